"""Layouts: which chunks of the inputs would do better, and what copying an input to them first would cost.

Standard library only, like all planning; `rechunk` carries the copies out. A copy goes region by region: what
is read of the source fills one region in memory, and leaves it as whole chunks of the copy.

     source chunks                region                     chunks of the copy
    ═══════════════          ┌──────────────┐              ┌──────┬──────┐
    ═══════════════   read   │              │    write     │      │      │
    ═══════════════  ──────► │   in memory  │  ──────────► ├──────┼──────┤
    ═══════════════          └──────────────┘              └──────┴──────┘
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from mmap import PAGESIZE
from typing import NamedTuple

from ..support.intervals import round_up
from .candidates import chunk_side, steps
from .ledger import piece_bytes
from .machine import Budget, Rates
from .plan import Plan
from .problem import CHUNK_BYTES, Matrix, MiB, Problem
from .reads import one_pass
from .search import least_seconds, make_plan, predict

ADVISED = 2.0
"""A plan gives advice on chunks where better ones would make the job at least this many times as fast."""

ADVISED_SECONDS = 2.0
"""A plan gives advice only where that saves at least so many seconds. To find it takes a tenth of a second,
which would be much of a shorter run."""

ALIKE = 1.05
"""Copies of fewer operands are advised where the job takes at most so many times what it takes with the best
layout."""

WORTH = 0.9
"""Copies are made where the job then takes less than this share of its time, because predictions are not
exact."""

MAX_EXTENT = 1 << 34
"""Most rows or columns of an array whose layouts are compared. Only absurd metadata claim more, for which it
would take long."""

PIECE_BYTES = 4 * MiB
"""Bytes that one read of a copy brings, where chunks can be read in part."""


@dataclass(frozen=True)
class Copy:
    """A copy of an operand in other chunks. Sizes in bytes."""

    operand: str
    source: Matrix
    target: Matrix
    rows: int
    """Rows of a region, which consists of whole chunks of the copy."""
    cols: int
    readers: int
    writers: int
    slot_bytes: int
    """Bytes of a reader's slot: one piece of the source. A writer holds one chunk of the copy."""
    ledger: dict[str, int]
    """Bytes of the host budget by holder."""
    bytes_read: int
    bytes_written: int
    seconds: float


class Planned(NamedTuple):
    """What a plan was made of, and its predicted seconds."""

    problem: Problem
    budget: Budget
    rates: Rates
    seconds: float

    @classmethod
    def by(cls, plan: Plan) -> "Planned":
        """Return what a plan was made of."""
        return cls(plan.problem, plan.budget, plan.used_rates, plan.predicted_seconds)


@dataclass(frozen=True)
class Layout:
    """A problem in which some operands have other chunks."""

    problem: Problem
    operands: str
    """The operands with other chunks: `a`, `b` or `ab`."""
    seconds: float
    """Predicted seconds of the job with these chunks."""
    copies: tuple[Copy, ...]
    """The copies to make; empty where the memory limit is too small for them."""

    @property
    def total(self) -> float:
        """Predicted seconds of the copies and of the job after them."""
        return self.seconds + sum(copy.seconds for copy in self.copies) if self.copies else math.inf


def advice(problem: Problem, budget: Budget, rates: Rates, seconds: float) -> str | None:
    """Return advice where other chunks would make a plan several times as fast; None elsewhere. seconds:
    predicted for the plan that was made of the rest."""
    planned = Planned(problem, budget, rates, seconds)
    if seconds < ADVISED_SECONDS:
        return None
    found = list(_layouts(planned, ADVISED, ALIKE))
    best = min((layout.seconds for layout in found), default=math.inf)
    if best > min(seconds / ADVISED, seconds - ADVISED_SECONDS):
        return None
    chosen = next(layout for layout in found if layout.seconds <= ALIKE * best)
    if chosen.total < WORTH * seconds:
        todo = f"rechunk=True copies first and takes {_time(chosen.total)} in all"
    else:
        todo = "copies for this job alone would not pay, but storing it so from the start would"
    times = seconds / chosen.seconds
    chunks = _chunks(planned.problem, chosen)
    return f"{chunks} make this {times:.1f} times as slow as {_better(chosen)} would; {todo}"


def rechunk(plan: Plan) -> tuple[Plan, tuple[Copy, ...]]:
    """Return the copies to make first and the plan of the job after them, with advice that says which and
    why. Where that is predicted to save little, the plan is returned as it is, without copies."""
    planned, without = Planned.by(plan), plan.predicted_seconds
    found = [layout for layout in _layouts(planned, 1.0) if layout.seconds < without]
    best = min(found, key=lambda layout: layout.total, default=None)
    if best is None or not best.copies:
        return replace(plan, advice="nothing is rechunked: within the limits no other chunks are faster"), ()
    if best.total >= WORTH * without:
        best = min((layout for layout in found if layout.copies), key=lambda layout: layout.seconds)
    copying, rest, before = map(_time, (best.total - best.seconds, best.seconds, without))
    if best.total >= WORTH * without:
        cost = f"copying {' and '.join(best.operands.upper())} takes {copying} and the rest {rest}"
        return replace(plan, advice=f"nothing is rechunked: {cost}, all as it is {before}"), ()
    words = f"{_chunks(plan.problem, best)} are first copied to {_better(best)}"
    words += f", which takes {copying}, and the rest {rest} instead of {before}"
    return replace(make_plan(best.problem, plan.budget, plan.used_rates), advice=words), best.copies


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _chunks(p: Problem, layout: Layout) -> str:
    """Describe the present chunks: `chunks of 1×4096 in A and 64×64 in B`."""
    shapes = zip(layout.operands.upper(), _shapes(p, layout.operands), strict=True)
    return "chunks of " + " and ".join(f"{shape} in {name}" for name, shape in shapes)


def _better(layout: Layout) -> str:
    """Describe better chunks: `raw ones of 2048×2048`."""
    return "raw ones of " + " and ".join(dict.fromkeys(_shapes(layout.problem, layout.operands)))


def _shapes(p: Problem, operands: str) -> list[str]:
    """Return the shapes of chunks as the user of the arrays sees them."""
    sides = [(s.chunk_rows, s.chunk_cols, s.fortran) for s in _matrices(p, operands)]
    return [f"{cols}×{rows}" if fortran else f"{rows}×{cols}" for rows, cols, fortran in sides]


def _matrices(p: Problem, operands: str) -> list[Matrix]:
    return [p.a if operand == "a" else p.b for operand in operands]


def _layouts(planned: Planned, factor: float, alike: float = math.inf) -> Iterator[Layout]:
    """Yield layouts to compare, those with fewer operands first. Yields none where good chunks of all
    operands, or even unlimited memory, would not make the job `factor` times as fast. `alike`: leaves out
    those that cannot come as close as that to the best one, which is the last."""
    p, within = planned.problem, planned.seconds / factor
    sides = [("a", p.a), *([] if p.symmetric else [("b", p.b)])]
    operands = "".join(name for name, s in sides if s.chunked and s.rows and s.cols)
    if any(max(s.rows, s.cols) > MAX_EXTENT for _, s in sides):
        return
    ideal = _with_chunks(p, operands, CHUNK_BYTES[0])
    if not operands or least_seconds(ideal, planned.budget, planned.rates) > within:
        return
    best: Layout | None = None
    for size in CHUNK_BYTES:
        found = _layout(planned, operands, size)
        if best and best.copies and found.seconds > 0.95 * best.seconds:
            break
        if found.seconds <= within:
            best, chunk_bytes = found, size
    if best is None:
        return
    for one in operands if len(operands) > 1 else "":
        other = _with_chunks(p, one, chunk_bytes)
        if least_seconds(other, planned.budget, planned.rates) <= alike * best.seconds:
            yield _layout(planned, one, chunk_bytes)
    yield best


def _layout(planned: Planned, operands: str, chunk_bytes: int) -> Layout:
    problem = _with_chunks(planned.problem, operands, chunk_bytes)
    seconds = predict(problem, planned.budget, planned.rates)
    return Layout(problem, operands, seconds, _copies(problem, operands, planned))


def _with_chunks(p: Problem, operands: str, size: int) -> Problem:
    """Return the problem with these operands in nearly square raw chunks of about `size` bytes. Their edges
    lie on those of C's chunks, and along k on those of the other operand."""
    for operand in operands:
        s, other = (p.a, p.b) if operand == "a" else (p.b, p.a)
        along = p.c.chunk_rows if operand == "a" else p.c.chunk_cols
        deep = other.chunk_cols if other.transposed == (operand == "a") else other.chunk_rows
        elements, extents = size // s.itemsize, (s.rows, s.cols)
        outer_is_rows = s.transposed == (operand == "b")
        extent, k = extents if outer_is_rows else extents[::-1]
        outer = chunk_side(extent, max(math.isqrt(elements), elements / k), along)
        sides = outer, chunk_side(k, elements / outer, deep)
        rows, cols = sides if outer_is_rows else sides[::-1]
        traits = replace(s.traits, remote=False, latency=0.0)
        copy = replace(
            s, chunk_rows=rows, chunk_cols=cols, whole=False, stored=None, encoded="", traits=traits
        )
        p = replace(p, a=copy) if operand == "a" else replace(p, b=copy)
        if p.symmetric:
            p = replace(p, b=replace(copy, transposed=not copy.transposed))
    return p


def _copies(better: Problem, operands: str, planned: Planned) -> tuple[Copy, ...]:
    """Return the copies that give these operands better chunks; none where a copy does not fit the memory
    limit."""
    sides = _matrices(planned.problem, operands), _matrices(better, operands)
    found = [plan_copy(*side, planned.budget, planned.rates) for side in zip(operands, *sides, strict=True)]
    made = tuple(copy for copy in found if copy is not None)
    return made if len(made) == len(found) else ()


def plan_copy(operand: str, source: Matrix, target: Matrix, budget: Budget, rates: Rates) -> Copy | None:
    """Find the regions and threads that copy fastest within the host budget; None where none fit."""
    for readers, writers in ((budget.readers, budget.writers), (1, 1)):
        found = []
        for rows in steps(source.rows, target.chunk_rows):
            widths = steps(source.cols, target.chunk_cols)

            def fits(cols: int, rows: int = rows, threads: tuple[int, int] = (readers, writers)) -> bool:
                return sum(_ledger(source, target, budget, rows, cols, *threads).values()) <= budget.host

            for cols in widths[bisect_left(widths, True, key=fits) :][:1]:
                found.append((_seconds(source, target, rates, rows, cols), rows * cols, rows, cols))
        if found:
            seconds, _, rows, cols = min(found)
            return Copy(
                operand=operand,
                source=source,
                target=target,
                rows=rows,
                cols=cols,
                readers=readers,
                writers=writers,
                slot_bytes=_slot_bytes(source, rows, cols),
                ledger=_ledger(source, target, budget, rows, cols, readers, writers),
                bytes_read=source.read_bytes(rows, cols),
                bytes_written=math.prod(target.grid) * target.chunk_bytes,
                seconds=seconds,
            )
    return None


def _slot_bytes(source: Matrix, rows: int, cols: int) -> int:
    return round_up(piece_bytes(source, rows, cols, PIECE_BYTES), PAGESIZE)


def _ledger(
    source: Matrix, target: Matrix, budget: Budget, rows: int, cols: int, readers: int, writers: int
) -> dict[str, int]:
    """Return every byte of the host budget during a copy, by holder."""
    return {
        "baseline": budget.host_baseline,
        "region": round_up(rows * cols * source.itemsize, PAGESIZE),
        "read slots": readers * _slot_bytes(source, rows, cols),
        "decoding": readers * source.beside(_slot_bytes(source, rows, cols)),
        "connections": readers * budget.connection,
        "write slots": writers * round_up(target.chunk_bytes, PAGESIZE),
    }


def _seconds(source: Matrix, target: Matrix, rates: Rates, rows: int, cols: int) -> float:
    """Predict the seconds of a copy, in which each region is read and then written."""
    read = one_pass(source, rows, cols, _slot_bytes(source, rows, cols))
    return (
        read.nbytes / rates.read
        + read.decoded / rates.decode
        + read.calls * rates.read_seconds
        + read.pieces * rates.piece_seconds
        + math.prod(target.grid) * target.chunk_bytes / rates.write
    )
