"""Carries out a product whose blocks a reduction takes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from ..engine.reduction import Reduction
from ..planning.plan import Plan
from ..planning.schedule import Part
from ..run.executor import Local
from ..run.observer import Observer
from ..run.prepare import Job
from ..support.buffers import Bytes
from ..support.errors import NO_MEMORY, Error, OutOfMemoryError, no_memory
from ..support.trace import Trace
from .rescore import Array


class ReducingTarget:
    """Takes what is downloaded of blocks (the engine's port). When all parts of a row of blocks have come, it
    has that finished."""

    background = False

    def __init__(
        self,
        plan: Plan,
        reduction: Reduction,
        products: np.dtype[Any],
        reduces: bool,
        finish: Callable[[int], int],
    ):
        """products: type of the elements of blocks. reduces: the device has given the blocks to the reduction
        itself. finish: finishes a row of blocks; bytes written."""
        c, self._height = plan.problem.c, plan.bm
        self._reduction, self._reduces, self._finish = reduction, reduces, finish
        self._chunk, self._dtype = (c.chunk_rows, c.chunk_cols), products
        self._left = Counter(self._band(part) for block in plan.blocks() for part in plan.parts(block))
        self._lock = Lock()

    def _band(self, part: Part) -> int:
        return part.chunk[0] * self._chunk[0] // self._height

    def note_lost(self, elements: int, least: int, greatest: int) -> None:
        """Do nothing: sums come as they are."""

    def view(self, part: Part, slot: Bytes) -> Array:
        """Return the beginning of the slot, or all of it for what a device has found."""
        if self._reduces:
            return slot
        size = part.rows * part.cols * self._dtype.itemsize
        return slot[:size].view(self._dtype).reshape(part.rows, part.cols)

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Reduce, and finish what that completes, when the function is called that is returned."""
        return partial(self._take, part, slot)

    def _take(self, part: Part, slot: Bytes) -> int:
        if not self._reduces:
            row, col = (number * size for number, size in zip(part.chunk, self._chunk, strict=True))
            self._reduction.take(self.view(part, slot), row, col)
        band = self._band(part)
        with self._lock:
            self._left[band] -= 1
            complete = not self._left[band]
        return self._finish(band) if complete else 0

    def cancel(self) -> None:
        """Do nothing: local disks answer."""


def run_reduced(
    job: Job,
    reduction: Reduction,
    finish: Callable[[int], int],
    executor: Local,
    observer: Observer,
    trace: Trace,
) -> None:
    """Run the plan of a job.

    job: with `Operation.ranked` where the device finds what is kept. reduction: what takes its blocks.
    finish: called with the number of each row of blocks that is complete; returns the bytes that it writes.
    Raises what `multiply` raises.
    """
    plan, operation = job.plan, job.operation
    if not plan.block_count:
        return
    if executor.device.reduces:
        operation = replace(operation, reduction=reduction)
    reduces = operation.reduction is not None or operation.ranked is not None
    target = ReducingTarget(plan, reduction, operation.arithmetic.block, reduces, finish)

    def progress(fraction: float) -> None:
        if observer.progress:
            observer.progress(fraction, plan, trace)

    try:
        try:
            executor.start(plan, operation, trace)
            sources = {name: opened.source for name, opened in job.sources.items()}
            executor.execute(sources, target, progress)
        finally:
            executor.close()
    except Exception as error:
        raise _explained(error, executor) from error


def _explained(error: Exception, executor: Local) -> Exception:
    """What an error means to the user."""
    failure = executor.explain(error)
    if failure is not None:
        return failure.error
    if isinstance(error, Error) or not no_memory(error):
        return error
    return OutOfMemoryError(NO_MEMORY)
