"""How blocks that a reduction takes are dealt to processes elsewhere: in units of whole rows of blocks or,
where there are few of these, of parts of them, whose results are then put together."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..planning.plan import Plan
from ..run.layout import REDUCED_COLUMNS
from ..run.plans import completed
from ..storage.read.source import Opened
from ..support.intervals import ceil_div, ranges
from .rescore import Range

FEWEST = 4
"""Units for each process, at least, where C has so many blocks."""
CELL_BYTES = 160
"""Bytes that a unit takes for each chunk of C that is none of its own."""


@dataclass(frozen=True)
class Unit:
    """Blocks that one process makes in one task: those of one row of blocks in some columns."""

    band: int
    """Number of the row of blocks."""
    cols: Range
    """Columns [start, stop) of C, from the edge of a block to that of another."""


def units(plan: Plan, processes: int) -> list[Unit]:
    """Cut what is left of a plan into units, those of one row of blocks one after the other."""
    bands, n = sorted({block.row // plan.bm for block in plan.blocks()}), plan.problem.n
    across, parts = ceil_div(n, plan.bn), ceil_div(FEWEST * processes, max(1, len(bands)))
    width = plan.bn * ceil_div(across, min(across, parts))
    return [Unit(band, cols) for band in bands for cols in ranges(n, width)]


def plan_of(unit: Unit, plan: Plan, operands: Mapping[str, Opened]) -> Plan:
    """Return the plan of a unit, from a slim one of all of C. operands: opened, with their op()."""
    plan = completed(plan, operands)
    c, (down, across) = plan.problem.c, plan.problem.c.grid
    rows = range(unit.band * plan.bm // c.chunk_rows, ceil_div((unit.band + 1) * plan.bm, c.chunk_rows))
    cols = range(unit.cols[0] // c.chunk_cols, ceil_div(unit.cols[1], c.chunk_cols))
    others = ((i, j) for i in range(down) for j in range(across) if i not in rows or j not in cols)
    return plan.without(frozenset(others))


def cell_bytes(shape: tuple[int, int], chunk_rows: int) -> int:
    """Bytes that `plan_of` takes for a unit of a C of this shape, at most."""
    return CELL_BYTES * ceil_div(shape[0], chunk_rows) * ceil_div(shape[1], REDUCED_COLUMNS)
