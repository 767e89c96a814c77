"""Where the chunks of an array lie in a place: the keys of files of one chunk each, or of shards."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from ...planning.problem import Matrix
from ..io.place import Place, Readable
from ..io.requests import AT_ONCE, OPENER
from ..io.stamps import Stamps
from .shards import read_index


class Chunks:
    """The chunks of an array, each in a file of its own; (i, j) are of the stored matrix."""

    def __init__(self, place: Place, metadata: Any, transposed: bool = False):
        """metadata: zarr's, of the array. transposed: the stored matrix is the array's transpose."""
        self.place, self._metadata, self._transposed = place, metadata, transposed
        self._sizes: Any = None
        """Of the objects of a store, which need not be asked for each: they were in the list of all."""

    def key(self, i: int, j: int) -> str:
        """The key of the chunk, or of the shard that holds it."""
        return self._key(i, j)

    def _key(self, i: int, j: int) -> str:
        """Of the file in this row and column of the grid of files."""
        return str(self._metadata.encode_chunk_key((j, i) if self._transposed else (i, j)))

    @property
    def pattern(self) -> str:
        """The pattern of all keys (`Place.list`)."""
        key = self._key(0, 0)
        return f"{key[:-3]}*{key[-2]}*"

    def extent(self, i: int, j: int) -> tuple[int, int | None]:
        """Where in the file the chunk begins, and its bytes: None for all there are, 0 where it is missing.
        Raises ValueError where that cannot be known."""
        return 0, None if self._sizes is None else int(self._sizes[i, j])

    def open(self, i: int, j: int) -> Readable:
        """The file that holds a chunk. Raises OSError."""
        return self.place.open(self.key(i, j))

    def stamps(self, grid: tuple[int, int]) -> Stamps:
        """The stamps of all files, in row-major order of their grid. Takes time for those that are there
        only: a grid of millions costs little to ask for. Raises OSError."""
        found, (down, across) = np.zeros((grid[0] * grid[1], 3), np.int64), grid
        head, between = self._key(0, 0)[:-3], self._key(0, 0)[-2]
        places, stamps = list[int](), list[int]()
        for key, stamp in self.place.list(self.pattern):
            row, _, col = key[len(head) :].partition(between)
            i, j = _number(row), _number(col)
            if self._transposed:
                i, j = j, i
            if 0 <= i < down and 0 <= j < across:
                stamps += stamp
                places.append(i * across + j)
        found[places] = np.reshape(np.array(stamps, np.int64), (-1, 3))
        if self.place.traits.remote:
            self._sizes = found[:, 0].reshape(grid)
        return found


@lru_cache(1 << 16)
def _number(text: str) -> int:
    """As keys have it; -1 for what is none, such as 007."""
    return int(text) if text.isdecimal() and text == str(int(text)) else -1


class Shards(Chunks):
    """Several chunks in each file, whose index is read when the array is opened."""

    def __init__(self, files: Chunks, s: Matrix, outer: Matrix, sizes: tuple[int, ...], at_end: bool):
        """files: the shards. s: the matrix in chunks. outer: the matrix in shards. sizes: bytes of each
        shard, 0 where it is missing. at_end: the index follows the chunks."""
        super().__init__(files.place, files._metadata)
        self._grid, grid = s.grid, outer.grid
        self._per = down, across = outer.chunk_rows // s.chunk_rows, outer.chunk_cols // s.chunk_cols
        self._extents = np.zeros((grid[0] * down, grid[1] * across, 2), np.uint64)
        self._damaged: dict[tuple[int, int], str] = {}

        def look(at: int) -> None:
            i, j = divmod(at, grid[1])
            try:
                found = read_index(self.place, self._key(i, j), down * across, at_end)
            except (OSError, ValueError) as error:
                self._damaged[i, j] = str(error)
                return
            if found is not None:
                part = self._extents[i * down : (i + 1) * down, j * across : (j + 1) * across]
                part[...] = found.reshape(down, across, 2)

        _for_each((at for at, size in enumerate(sizes) if size), look, self.place.traits.remote)

    def key(self, i: int, j: int) -> str:
        """The shard's."""
        return self._key(i // self._per[0], j // self._per[1])

    def extent(self, i: int, j: int) -> tuple[int, int | None]:
        """As the index says."""
        if said := self._damaged.get((i // self._per[0], j // self._per[1])):
            raise ValueError(said)
        offset, size = self._extents[i, j]
        return int(offset), int(size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of every chunk, as the index says; 0 where it is missing, or the index is damaged."""
        return tuple(self._extents[: self._grid[0], : self._grid[1], 1].ravel().tolist())


def _for_each(items: Iterable[int], work: Callable[[int], None], side_by_side: bool) -> None:
    """Work on every item, on several at a time where each asks a store that takes a while."""
    if not side_by_side:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(AT_ONCE[0] * 2, OPENER) as pool:
        for _ in pool.map(work, items):
            pass
