"""What runs on the workers of a cluster where k is cut: partial sums of blocks, which stay in the memory of
workers as results of tasks until they are added up and written."""

import time
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.ports import Failure
from ..engine.transform import Transform
from ..planning.chunk_set import Chunk
from ..planning.plan import Plan
from ..planning.schedule import Part
from ..storage.read.source import Opened
from ..storage.write.share import Written
from ..support.buffers import Bytes
from ..support.errors import PAST_INT64, RangeError
from ..support.intervals import ranges
from ..support.memory import peak_resident_bytes
from ..support.trace import Trace
from .on_worker import (
    Report,
    Work,
    carried_out,
    check_folder,
    finished,
    handed_over,
    opened,
    plan_of,
    share_of,
)

Array = npt.NDArray[Any]
Sum = tuple[Array | None, Report]
"""The sum of a block over some of k, in the type in which the device adds up, and how it was made. None in
place of a block that has failed its check."""
SLAB = 1 << 20
"""Elements that are added up at a time, to limit the memory that finding overflows takes."""


class BlockTarget:
    """Takes the one block that a plan makes, and adds it to an earlier sum (the engine's `Target`)."""

    background, bring = False, None

    def __init__(self, plan: Plan, dtype: np.dtype[Any], before: Array | None):
        """dtype: the type in which parts come. before: the earlier sum, which is not changed; None for
        none."""
        block = next(plan.blocks())
        self.sum = np.zeros((block.rows, block.cols), dtype)
        self._before = before

    def cancel(self) -> None:
        """Does nothing: no thread waits for a store."""

    def note_lost(self, elements: int, least: int, greatest: int) -> None:
        """Does nothing: a device converts no partial sums to C's type."""

    def view(self, part: Part, slot: Bytes) -> Array:
        """Returns a dense matrix at the front of the slot."""
        count = part.rows * part.cols
        return slot[: count * self.sum.itemsize].view(self.sum.dtype).reshape(part.rows, part.cols)

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Returns what adds the part to the sum: nothing is done in the background."""
        return partial(self._add, part, slot)

    def _add(self, part: Part, slot: Bytes) -> int:
        """Add a part. Nothing is written to a store. Raises RangeError for integers past int64."""
        place = slice(part.row, part.row + part.rows), slice(part.col, part.col + part.cols)
        if self._before is None:
            self.sum[place] = self.view(part, slot)
        else:
            add(self._before[place], self.view(part, slot), self.sum[place])
        return 0


def add(x: Array, y: Array, out: Array) -> None:
    """Add two matrices. Raises RangeError where a sum of integers does not fit their type."""
    for start, stop in ranges(len(out), max(1, SLAB // max(1, out.shape[1]))):
        left, right, both = x[start:stop], y[start:stop], out[start:stop]
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(left, right, out=both)
        if both.dtype.kind == "i" and (((left ^ both) & (right ^ both)) < 0).any():
            raise RangeError(PAST_INT64)


def summed(
    work: Work, number: int, done: Set[Chunk], k: tuple[int, int], before: Sum | None
) -> Sum | Failure:
    """Multiply one block over one range of k.

    number: that of the task, for the client. done: all chunks of C that the block need not hold. before: the
    sum of the block over other ranges, to which this one is added.
    """
    check_folder(work)
    operands = {name: opened(work, name) for name in work.inputs if name != "c" or k[0] == 0}
    plan = replace(plan_of(work, operands), done=done).within(*k)
    sources = {name: _window(one, name, plan, k).source for name, one in operands.items()}
    transforms = {name: _cut(one, name, plan, k) for name, one in work.transforms.read().items()}
    operation = replace(work.operation, transforms=transforms, beta=work.operation.beta if k[0] == 0 else 0.0)
    target = BlockTarget(plan, operation.leaves, before[0] if before else None)
    report = carried_out(work, number, plan, operation, sources, target)
    if isinstance(report, Failure):
        return report
    right = not report.wrong and (before is None or before[0] is not None)
    return target.sum if right else None, report


def _window(operand: Opened, name: str, plan: Plan, k: tuple[int, int]) -> Opened:
    """Return the part of an operand that a range of k concerns."""
    if name == "c":
        return operand
    m, n = plan.problem.m, plan.problem.n
    return operand.window((0, m), k) if name == "a" else operand.window(k, (0, n))


def _cut(transform: Transform, name: str, plan: Plan, k: tuple[int, int]) -> Transform:
    """Return the part of a transform that a range of k concerns."""
    turned = (plan.problem.a if name == "a" else plan.problem.b).transposed
    every, some = slice(None), slice(*k)
    return transform.within(every, some) if turned == (name == "b") else transform.within(some, every)


def merged(x: Sum, y: Sum) -> Sum:
    """Add up the sums of a block over different ranges of k. Neither is changed."""
    if x[0] is None or y[0] is None:
        return None, _nothing_moved(Trace())
    found = np.empty_like(x[0])
    add(x[0], y[0], found)
    return found, _nothing_moved(Trace())


def written(work: Work, done: Set[Chunk], *sums: Sum) -> Report:
    """Write the chunks of C that are not `done`, from the sum of their block over all of k, or from two that
    have to be added up."""
    check_folder(work)
    whole = sums[0] if len(sums) == 1 else merged(*sums)
    plan, trace = replace(work.plan, done=done), Trace()
    block, c = next(plan.blocks()), plan.problem.c
    if whole[0] is None:
        return replace(_nothing_moved(trace), wrong=[block])
    target = share_of(work)
    stored = finished(work, target)
    slot = np.empty(c.chunk_rows * c.chunk_cols * whole[0].itemsize, np.uint8)
    for part in plan.parts(block):
        values = whole[0].T if part.mirrored else whole[0]
        start = time.perf_counter()
        target.view(part, slot)[...] = values[
            part.row : part.row + part.rows, part.col : part.col + part.cols
        ]
        trace.add("write", start, nbytes=stored.start(part, slot)())
    return handed_over(work, _nothing_moved(trace), target)


def report_of(found: Sum | Failure) -> Report | Failure:
    """Return what the client is told of a sum, which stays on its worker."""
    return found if isinstance(found, Failure) else found[1]


def _nothing_moved(trace: Trace) -> Report:
    """Return the report of a task that computes on no device."""
    return Report(Written(), [], trace.bytes, trace.seconds, peak_resident_bytes(), 0)
