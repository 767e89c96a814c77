"""Where the chunks of an array lie: their keys, and the range of bytes where several share the file of a
shard."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np

from ...planning.problem import Matrix
from ...support.buffers import Bytes, scratch
from ..io.files import room
from ..io.place import InputPlace, Readable
from ..io.requests import FEWEST_REQUESTS, OPENER
from ..io.stamps import Stamps
from .shards import Index, read_index


class Chunks:
    """The chunks of an array, each in a file of its own. Indices (i, j) are those of the stored matrix."""

    def __init__(self, place: InputPlace, metadata: Any, transposed: bool = False, tail: str = ""):
        """metadata: those of the array, as zarr holds them. transposed: whether the stored matrix is the
        transpose of the array. tail: how keys end after both indices, where chunks have more dimensions."""
        self.place, self._metadata, self._transposed, self._tail = place, metadata, transposed, tail
        self._sizes: Any = None
        """Sizes of the objects in a store. They come from one list, so that no object is asked for its
        size."""

    def key(self, i: int, j: int) -> str:
        """Return the key of the file that holds a chunk: its own, or that of its shard."""
        return self._key(i, j)

    def column(self, rows: range, j: int) -> Iterable[tuple[str, int, int | None]]:
        """Return `key` and `extent` of chunks below each other. Raises ValueError where one of them does."""
        before, after = self._key("\0", j).split("\0")  # without a call for each chunk
        sizes = repeat(None) if self._sizes is None else self._sizes[rows.start : rows.stop, j].tolist()
        return zip([f"{before}{i}{after}" for i in rows], repeat(0), sizes)

    def _key(self, i: int | str, j: int) -> str:
        """Return the key of the file in this row and column of the grid of files."""
        head, between = self._ends
        return (
            f"{head}{j}{between}{i}{self._tail}" if self._transposed else f"{head}{i}{between}{j}{self._tail}"
        )

    @property
    def pattern(self) -> str:
        """The pattern that `Place.list` takes to find all files of chunks."""
        head, between = self._ends
        return f"{head}*{between}*{self._tail}"

    @cached_property
    def _ends(self) -> tuple[str, str]:
        """What keys begin with, and what stands between both indices."""
        key = str(self._metadata.encode_chunk_key((0, 0)))
        return key[:-3], key[-2]

    def extent(self, i: int, j: int) -> tuple[int, int | None]:
        """Return where in its file a chunk begins, and its size in bytes: None for the whole file, 0 for a
        missing chunk. Raises ValueError where that cannot be known."""
        return 0, None if self._sizes is None else int(self._sizes[i, j])

    def open(self, i: int, j: int) -> Readable:
        """Open the file that holds a chunk. Raises OSError."""
        return self.place.open(self.key(i, j))

    def encoded(self, i: int, j: int, most: int, held: int = 0, into: Bytes | None = None) -> Bytes | None:
        """Return a chunk as it is stored, or None where it is missing. The memory is reused by the thread's
        next call. most: the most bytes that it may take. held: the bytes of that memory that the thread will
        need, where that is known. into: memory to use instead, where it is large enough. Raises OSError and
        ValueError."""
        offset, size = self.extent(i, j)
        if size == 0:
            return None
        try:
            with self.open(i, j) as file:
                size = file.size if size is None else size
                if size > most:
                    raise ValueError(f"it takes {size} bytes, more than {most}")
                needed = room(offset, size)
                if into is None or len(into) < needed:
                    into = scratch("encoded", needed, held)
                return file.read_range(into, offset, size)
        except FileNotFoundError:
            return None

    def stamps(self, grid: tuple[int, int]) -> Stamps:
        """Return the stamps of all files, in row-major order of their grid. This takes time for files that
        exist only, so a grid of millions costs little. Raises OSError."""
        found, (down, across) = np.zeros((grid[0] * grid[1], 3), np.int64), grid
        for places, stamps in self.place.listed(self.pattern):
            i, j = places.T[::-1] if self._transposed else places.T
            there = (i < down) & (j < across)
            found[(i * across + j)[there]] = stamps[there]
        if self.place.traits.remote:
            self._sizes = found[:, 0].reshape(grid)
        return found


class Shards(Chunks):
    """Chunks of which several share a file. The index of each file is read when the array is opened."""

    def __init__(self, files: Chunks, s: Matrix, outer: Matrix, sizes: Iterable[int], index: Index):
        """files: the shards, as chunks of their own. s: the matrix in chunks. outer: the matrix in shards.
        sizes: bytes of each shard, 0 where it is missing. index: how their indices are stored."""
        super().__init__(files.place, files._metadata, tail=files._tail)
        self._grid, grid = s.grid, outer.grid
        self._per = down, across = outer.chunk_rows // s.chunk_rows, outer.chunk_cols // s.chunk_cols
        self._extents = np.zeros((grid[0] * down, grid[1] * across, 2), np.uint64)
        self._damaged: dict[tuple[int, int], str] = {}

        def look(at: int) -> None:
            i, j = divmod(at, grid[1])
            try:
                found = read_index(self.place, self._key(i, j), index)
            except (OSError, ValueError) as error:
                self._damaged[i, j] = str(error)
                return
            if found is not None:
                part = self._extents[i * down : (i + 1) * down, j * across : (j + 1) * across]
                part[...] = found.reshape(down, across, 2)

        _for_each((at for at, size in enumerate(sizes) if size), look, self.place.traits.remote)

    def key(self, i: int, j: int) -> str:
        """Returns the key of the shard."""
        return self._key(i // self._per[0], j // self._per[1])

    def column(self, rows: range, j: int) -> Iterable[tuple[str, int, int | None]]:
        """Returns what the index of each shard says."""
        return [(self.key(i, j), *self.extent(i, j)) for i in rows]

    def extent(self, i: int, j: int) -> tuple[int, int | None]:
        """Returns what the index of the shard says."""
        if said := self._damaged.get((i // self._per[0], j // self._per[1])):
            raise ValueError(said)
        offset, size = self._extents[i, j]
        return int(offset), int(size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of every chunk in bytes, from the indices; 0 where the chunk is missing or the index is
        damaged."""
        return tuple(self._extents[: self._grid[0], : self._grid[1], 1].ravel().tolist())


def _for_each(items: Iterable[int], work: Callable[[int], None], side_by_side: bool) -> None:
    """Call `work` for every item. `side_by_side`: for several items at a time, because each call waits for a
    store."""
    if not side_by_side:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(2 * FEWEST_REQUESTS, OPENER) as pool:
        for _ in pool.map(work, items):
            pass
