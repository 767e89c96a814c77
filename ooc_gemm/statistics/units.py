"""How blocks that a reduction takes are dealt to processes elsewhere: in units of whole rows of blocks or,
where there are few of these, of parts of them, whose results are then put together."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..planning.plan import Plan
from ..run.layout import REDUCED_COLUMNS
from ..run.observer import Observer
from ..run.plans import completed
from ..run.pool import Function, Pool, Take
from ..storage.read.source import Opened
from ..support.intervals import ceil_div, ranges
from ..support.meter import UNWRITTEN, Meter
from ..support.recording import note_plan
from .rescore import Range

T = TypeVar("T")
S = TypeVar("S")

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


class Gathering(Generic[T, S]):
    """Puts together what was found in the parts of each row of blocks."""

    def __init__(
        self,
        parts: Sequence[Unit],
        combine: Callable[[S | None, Unit, T], S],
        complete: Callable[[int, S], None],
    ):
        """combine: called with what was found in other parts of a row of blocks, or None, and with a part.
        complete: called with the number of a row of blocks, when all of its parts have come."""
        self._parts, self._combine, self._complete = parts, combine, complete
        self._left = Counter(unit.band for unit in parts)
        self._held: dict[int, S] = {}

    def take(self, number: int, read: Callable[[], T]) -> None:
        """Take what was found in a unit (`Take`)."""
        unit = self._parts[number]
        found = self._combine(self._held.pop(unit.band, None), unit, read())
        self._left[unit.band] -= 1
        if self._left[unit.band]:
            self._held[unit.band] = found
        else:
            self._complete(unit.band, found)


def deal(
    pool: Pool, plan: Plan, observer: Observer, call: tuple[Function, Any], parts: Sequence[Unit], take: Take
) -> None:
    """Have a pool make units. plan: of what is left, for those who look on. call: the function, and what all
    units have in common. Raises what `Pool.each` raises."""
    trace = pool.trace
    note_plan(plan, pool.hardware.model)
    meter = Meter("comparison of rows", plan.flops, plan.bytes_read, lambda: trace.bytes["read"])

    def progress(fraction: float) -> None:
        fraction = min(fraction, UNWRITTEN)
        meter(fraction)
        if observer.progress:
            observer.progress(fraction, plan, trace)

    with meter:
        pool.each(*call, parts, take, progress)


def cell_bytes(shape: tuple[int, int], chunk_rows: int) -> int:
    """Bytes that `plan_of` takes for a unit of a C of this shape, at most."""
    return CELL_BYTES * ceil_div(shape[0], chunk_rows) * ceil_div(shape[1], REDUCED_COLUMNS)
