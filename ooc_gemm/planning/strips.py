"""Counts what reading one row of blocks, or one column of them, moves from the store."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from .panels import Panels
from .problem import Problem
from .schedule import Block, cut, cuts, sides
from .traffic import piece_read_bytes

Visit = tuple[tuple[str, int, int], list[int]]
"""A panel (its matrix, its number down or across C, its number along k), and bytes that reading its pieces
moves from the store: of the first, of the first two, and so on."""

NOTHING: Visit = ("", 0, 0), []
"""Stands for a panel that is not uploaded: it is on the device, or on the diagonal that of op(A) takes its
place."""


@dataclass(frozen=True)
class Strips:
    """The rows of op(A) and the columns of op(B) that blocks of `bm` rows and `bn` columns need."""

    problem: Problem
    k_panels: Panels
    bm: int
    bn: int
    edges: tuple[int, ...]
    """Edges of the columns of blocks (`column_edges`)."""
    slot_bytes: int
    """Most bytes of a piece."""
    weights: tuple[int, ...] = (1,)
    """Those of the devices, which have bands of op(A)."""

    def panels(self, operand: str, at: int) -> list[Visit]:
        """Return the panels of one row of blocks (`a`) or one column of them (`b`), along k."""
        p, found = self.problem, list[Visit]()
        row = at * self.bm, min((at + 1) * self.bm, p.m)
        col = (self.edges[at], self.edges[at + 1]) if operand == "b" else (0, 0)
        for number, panel in enumerate(self.k_panels):
            s, rows, cols = side = sides(p, row, col, panel)[operand]
            edges = cuts(p, operand, side, self.weights)
            pieces = cut(operand, s, rows, cols, self.slot_bytes, edges=edges)
            sizes = accumulate(piece_read_bytes(s, piece) for piece in pieces)
            found.append(((operand, at, number), list(sizes)))
        return found

    def read_in_teams(self, groups: list[list[Block]]) -> tuple[int, int]:
        """Return the bytes that teams read from the store, and those that their workers get from each other.
        groups: the blocks that each team makes at the same time."""
        p, read_bytes = self.problem, cache(self._read_bytes)
        read, exchanged, other = 0, 0, "a" if p.symmetric else "b"
        for group in groups:
            workers, held = Counter[tuple[str, int]](), dict[tuple[str, int], int]()
            for block in group:
                strips = {
                    ("a", block.row // self.bm): block.rows * p.a.itemsize,
                    (other, block.col // self.bn): block.cols * p.b.itemsize,
                }
                workers.update(strips.keys())
                held |= strips
            read += sum(read_bytes(*strip) for strip in workers)
            exchanged += sum((workers[strip] - 1) * size * p.k for strip, size in held.items())
        return read, exchanged

    def _read_bytes(self, operand: str, at: int) -> int:
        return sum(sizes[-1] for _, sizes in self.panels(operand, at) if sizes)
