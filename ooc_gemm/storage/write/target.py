"""C as the engine writes it: blocks of sums come, and become chunks in C's type and encoding.

A chunk is written whole and never read back. Where it goes is the matter of a sink: C itself
(`publication.py`), or a worker's share of it (`share.py`).
"""

import contextlib
import errno
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import zarr

from ...planning.schedule import Part
from ...support.buffers import Bytes, scratch
from ...support.errors import StoreError, remedy
from ...support.onward import Inward
from ..io.objects import why
from ..read.source import Array
from .conversion import check_fits, check_range, convert
from .encoding import Encoder
from .journal import Chunk

Bring = Callable[[Sequence[Chunk], Inward], Callable[[], bool]]
"""What a sink does with chunks, and the place where a device has them (`Sink.bring`)."""


class Sink(Protocol):
    """Takes the stored bytes of chunks."""

    @property
    def background(self) -> bool:
        """Whether writes continue in the background once they are started."""

    @property
    def far(self) -> bool:
        """Whether chunks go to a store, not to a disk of this machine."""

    @property
    def afterwards(self) -> str:
        """What messages tell the user to do after a run that fails."""

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Write a chunk, or a shard. Raises OSError, StoreError, and what a store's client raises."""

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Start to write in the background. The function returned waits for the end, and returns whether the
        chunk was written; it must be called."""

    @property
    def bring(self) -> Bring | None:
        """Starts to write chunks that a device has, as `start` does, where there is a background. None where
        there never is."""

    def cancel(self) -> None:
        """Wake all threads that wait for an answer."""


S = TypeVar("S", bound=Sink)


class Target(Generic[S]):
    """The stored C while it is written (the engine's `Target`)."""

    def __init__(self, array: zarr.Array[Any], name: str, block: np.dtype[Any], sink: S):
        """array: C, which need not be stored yet. name: how messages call it. block: the type in which parts
        come. sink: where chunks go."""
        self.name, self.sink, self._array, self._block = name, sink, array, block
        self._shape = array.shards or array.chunks
        self._encoder = Encoder(array)
        self.background = self._encoder.copies and array.dtype == block and sink.background
        """Whether writes continue in the background once they are started."""
        self.overflowed = 0
        """Number of finite elements that became infinite in C, because they are too large for its type."""
        self._lock = Lock()

    def cancel(self) -> None:
        """Wake all threads that wait for a store to take a chunk."""
        self.sink.cancel()

    def note_lost(self, elements: int, least: int, greatest: int) -> None:
        """Count elements that a device has made infinite. Raises RangeError for integers that do not fit."""
        if self._array.dtype.kind in "iu":
            check_range(least, greatest, self._array.dtype, self.name)
        with self._lock:
            self.overflowed += elements

    def view(self, part: Part, slot: Bytes) -> Array:
        """Return the part of a chunk in `slot` that lies inside C."""
        return self._chunk(slot)[: part.rows, : part.cols]

    def _chunk(self, slot: Bytes) -> Array:
        rows, cols = self._shape
        return slot[: rows * cols * self._block.itemsize].view(self._block).reshape(rows, cols)

    def _padded(self, part: Part, slot: Bytes) -> Array:
        values = self._chunk(slot)
        if (part.rows, part.cols) != values.shape:
            values[part.rows :] = 0
            values[: part.rows, part.cols :] = 0
        return values

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Start to write, in the background where a chunk is stored as it is. The function returned waits for
        the end and returns the bytes; it must be called."""
        write = partial(self.write, part, slot)
        if not self.background:
            return write
        data = self._padded(part, slot).reshape(-1).view(np.uint8)
        try:
            end = self.sink.start(part.chunk, data)
        except OSError:
            return write
        return self._ended(part.chunk, end, len(data), write)  # or `write` says what the matter is

    @property
    def bring(self) -> Callable[[Sequence[Part], Inward], Callable[[], int]] | None:
        """Starts to write chunks that a device has; None where nothing is written in the background."""
        return self._bring if self.background else None

    def _bring(self, parts: Sequence[Part], inward: Inward) -> Callable[[], int]:
        """Start to write chunks that a device has, as of `start`. The function returned returns 0 where
        that was not possible."""
        assert self.sink.bring, "there is a background"
        try:
            end = self.sink.bring([part.chunk for part in parts], inward)
        except OSError:
            return int
        return self._ended(parts[0].chunk, end, len(parts) * math.prod(inward.shape), int)

    def _ended(
        self, chunk: Chunk, end: Callable[[], bool], nbytes: int, otherwise: Callable[[], int]
    ) -> Callable[[], int]:
        def done() -> int:
            with self._explained(chunk):
                written = end()
            return nbytes if written else otherwise()

        return done

    def write(self, part: Part, slot: Bytes) -> int:
        """Convert a part to C's type, encode it and write it. Returns the bytes of its elements. Raises
        StoreError, and RangeError for integers that do not fit."""
        values, dtype = self._chunk(slot), self._array.dtype
        if dtype.kind in "iu":
            check_fits(values[: part.rows, : part.cols], dtype, self.name)
        with self._explained(part.chunk):
            data = self._padded(part, slot)
            if values.dtype != dtype:
                nbytes = values.size * dtype.itemsize
                data = scratch("converted", nbytes)[:nbytes].view(dtype).reshape(values.shape)
                if found := convert(values, data):
                    with self._lock:
                        self.overflowed += found
            self.sink.write(part.chunk, self._encoder.encode(data))
            return data.nbytes

    @contextlib.contextmanager
    def _explained(self, chunk: Chunk) -> Iterator[None]:
        """Turn an error of writing a chunk into a StoreError that names the chunk."""
        try:
            yield
        except (MemoryError, StoreError):
            raise
        except Exception as error:
            key = self._array.metadata.encode_chunk_key(chunk)
            said = (isinstance(error, OSError) and error.strerror) or why(error)
            full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
            place = "store" if self.sink.far else "disk"
            first = remedy(error, "make room there" if full else f"check its {place}")
            raise StoreError(
                f"{self.name}: chunk {key} cannot be written: {said}; {first} and {self.sink.afterwards}"
            ) from error
