"""Sets of chunks of C. C may have millions of chunks, each of which takes 150 bytes in a set of Python's."""

from collections.abc import Iterable, Iterator, Set
from typing import Any

Chunk = tuple[int, int]
"""Row and column of a chunk in the grid of C's chunks."""


class ChunkSet(Set[Chunk]):
    """A set of chunks, which takes one byte for each chunk of the grid."""

    __slots__ = ("_across", "_count", "_marks")

    def __init__(self, grid: Chunk, chunks: Iterable[Chunk] = (), inverted: bool = False):
        """grid: number of chunks down and across. chunks: those in the set, all of the grid; with `inverted`
        those that are not in it."""
        self._across = grid[1]
        marks = bytearray([inverted]) * (grid[0] * grid[1])
        for i, j in chunks:
            marks[i * grid[1] + j] = not inverted
        self._marks = bytes(marks)
        self._count = self._marks.count(1)

    @classmethod
    def _from_iterable(cls, chunks: Iterable[Chunk]) -> Set[Chunk]:  # type: ignore[override]
        """Return what operators make of sets."""
        return frozenset(chunks)

    def __contains__(self, chunk: Any) -> bool:
        i, j = chunk
        at: int = i * self._across + j
        return 0 <= j < self._across and 0 <= at < len(self._marks) and self._marks[at] == 1

    def __iter__(self) -> Iterator[Chunk]:
        at = self._marks.find(1)
        while at >= 0:
            yield divmod(at, self._across)
            at = self._marks.find(1, at + 1)

    def __len__(self) -> int:
        return self._count
