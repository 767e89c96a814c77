"""The finished chunks of a C, with the stamps of their files: numbers in one block of memory, because a C may
have millions of chunks, and each takes half a kilobyte as objects of Python's."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..io.stamps import Stamp, Stamps
from ..read import addresses

Chunk = tuple[int, int]
NUMBERS = 4
"""Of a chunk: size and time of its file, and of the file that it replaces."""
AT_ONCE = 1 << 12
"""Chunks that are looked at together."""
IN_FOLDER, IN_STORE = 400, 1200
"""Bytes that a process holds for each chunk of a C in a folder, and in an object store: what is done, the
lines of a journal that is an object, and stamps when all files are looked at last. 270 and 940 were measured
(`tests/system/test_many_chunks.py` measures the first)."""
IN_MEMORY = 1500
"""Bytes that each chunk of a C in memory takes beside its own, for its key and objects of the store's. 380
were measured in a `MemoryStore`, 530 in fsspec's file system, and 1500 in obstore's store."""
IN_WORKER = 40
"""Bytes that a worker of a cluster holds for each chunk of C: which are its own, and which it has written."""


def bytes_per_chunk(spec: Any) -> int:
    """Return the memory in bytes that a run holds for each chunk of its C. spec: path, URL or zarr.Array;
    None for a folder that is not known yet."""
    if spec is None or addresses.local_path(spec) is not None:
        return IN_FOLDER
    held = IN_MEMORY if addresses.in_memory(spec) else 0
    return held + (IN_STORE if addresses.traits_of(spec).remote else 0)


class Done(MutableMapping[Chunk, tuple[Stamp, Stamp]]):
    """For every finished chunk the stamp of its file, and the stamp of the file that it replaces."""

    def __init__(self, grid: Chunk):
        """grid: number of chunks down and across."""
        self._grid, self._count = grid, 0
        self._numbers = np.zeros(grid[0] * grid[1] * NUMBERS, np.int64)
        self._view = self._numbers.data

    def __getitem__(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        at = self._at(chunk)
        now, was = self._stamp(at), self._stamp(at + 2)
        if now == (0, 0):
            raise KeyError(chunk)
        return now, was

    def __setitem__(self, chunk: Chunk, stamps: tuple[Stamp, Stamp]) -> None:
        at, view = self._at(chunk), self._view
        self._count += self._stamp(at) == (0, 0)
        (view[at], view[at + 1]), (view[at + 2], view[at + 3]) = stamps

    def __delitem__(self, chunk: Chunk) -> None:
        at = self._at(chunk)
        if self._stamp(at) == (0, 0):
            raise KeyError(chunk)
        self._numbers[at : at + NUMBERS] = 0
        self._count -= 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Chunk]:
        across = self._grid[1]
        for first in range(0, len(self._numbers), AT_ONCE * NUMBERS):
            some = self._numbers[first : first + AT_ONCE * NUMBERS].reshape(-1, NUMBERS)
            for at in np.flatnonzero(some[:, :2].any(axis=1)).tolist():
                yield divmod(first // NUMBERS + at, across)

    def differing(self, stamps: Stamps, identities: npt.NDArray[np.int64] | None) -> Chunk | None:
        """Return a chunk whose file is not as it was made; None where all are. `stamps`: those of all files.
        `identities`: of the files when they came to their places; 0 where that is not known."""
        made = self._numbers.reshape(-1, NUMBERS)[:, :2]
        wrong = (stamps[:, :2] != made).any(axis=1)
        if identities is not None:
            known = identities.ravel()
            wrong |= (known != 0) & (known != stamps[:, 2])
        found = np.flatnonzero(wrong & made.any(axis=1))
        return divmod(int(found[0]), self._grid[1]) if len(found) else None

    def _at(self, chunk: Chunk) -> int:
        """Return the place of a chunk's first number. Raises KeyError for a chunk that C does not have."""
        (i, j), (down, across) = chunk, self._grid
        if not (0 <= i < down and 0 <= j < across):
            raise KeyError(chunk)
        return (i * across + j) * NUMBERS

    def _stamp(self, at: int) -> Stamp:
        return self._view[at], self._view[at + 1]
