"""Carries out a product whose blocks a reduction takes."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, NoReturn

import numpy as np

from ..engine.ports import Operation, Source
from ..engine.reduction import Reduction
from ..planning.plan import Plan
from ..planning.schedule import Part
from ..run.executor import Executor, Local
from ..run.observer import Observer
from ..run.prepare import Job
from ..run.transforms import found_of
from ..support.buffers import Bytes
from ..support.errors import NO_MEMORY, Error, OutOfMemoryError, StoppedError, no_memory, on_thread
from ..support.meter import UNWRITTEN, Meter, event, logs
from ..support.trace import Trace
from .rescore import Array


class ReducingTarget:
    """Takes what is downloaded of blocks (the engine's port). When all parts of a row of blocks have come, it
    has that finished."""

    background, bring = False, None

    def __init__(
        self,
        plan: Plan,
        reduction: Reduction,
        products: np.dtype[Any],
        reduces: bool,
        finish: Callable[[int], int],
    ):
        """products: type of the elements of blocks. reduces: the device has given the blocks to the reduction
        itself. finish: finishes a row of blocks, or begins to; bytes written so far."""
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


class InBackground:
    """Finishes rows of blocks on a thread of its own, one after the other, while the device goes on. A device
    can use the buffers of a block again only after its writers have done all that they were given."""

    def __init__(self, finish: Callable[[int], int], trace: Trace):
        self._finish, self._trace = finish, trace
        self._pool, self._lock = ThreadPoolExecutor(1, "ooc-gemm finisher"), Lock()
        self._before: Future[None] | None = None

    def __call__(self, band: int) -> int:
        """Begin to finish a row of blocks, when the one before is finished. Raises what that has raised."""
        with self._lock:
            self.wait()
            self._before = self._pool.submit(self._work, band)
        return 0

    def wait(self) -> None:
        """Wait until what has begun is finished. Raises its error."""
        if self._before:
            self._before.result()

    def close(self) -> None:
        """Wait for the thread."""
        self._pool.shutdown(cancel_futures=True)

    @on_thread("finisher")
    def _work(self, band: int) -> None:
        start = time.perf_counter()
        self._trace.add("write", start, nbytes=self._finish(band))


@dataclass(frozen=True)
class Blocks:
    """The blocks that a reduction takes."""

    plan: Plan
    operation: Operation
    """With `Operation.ranked` where the device finds what is kept."""
    sources: Mapping[str, Source]
    """What reads the operands, by name."""

    @classmethod
    def of(cls, job: Job, plan: Plan) -> "Blocks":
        """Those of a job, by a plan of what is left to do, with what happens to elements of operands."""
        panel, limit = job.operation.arithmetic.panel, job.request.memory_limit
        operation = replace(job.operation, transforms=found_of(job.wanted, panel, limit, False)[0])
        return cls(plan, operation, {name: opened.source for name, opened in job.sources.items()})

    def taken_by(self, reduction: Any) -> "Blocks":
        """The same, where the device finds what a reduction keeps, if the plan has memory for that."""
        ranked = reduction if self.plan.problem.found_bytes else None
        return replace(self, operation=replace(self.operation, ranked=ranked))


def run_reduced(
    blocks: Blocks,
    reduction: Reduction,
    finish: Callable[[int], int],
    executor: Local,
    observer: Observer,
    trace: Trace,
) -> None:
    """Compute blocks.

    reduction: what takes them. finish: called with the number of each row of blocks that is complete; returns
    the bytes that it writes. Raises what `multiply` raises.
    """
    plan, operation = blocks.plan, blocks.operation
    if logs():
        event("plan", f"comparison of rows: {plan!r}", plan=plan.to_dict())
    if not plan.block_count:
        return
    if executor.device.reduces:
        operation = replace(operation, reduction=reduction)
    reduces = operation.reduction is not None or operation.ranked is not None
    # What comes of a row of blocks is little where the device ranks it, so there is memory for several.
    later = InBackground(finish, trace) if operation.ranked else None
    target = ReducingTarget(plan, reduction, operation.arithmetic.block, reduces, later or finish)
    meter = Meter("comparison of rows", plan.flops, plan.bytes_read, lambda: trace.bytes["read"])

    def progress(fraction: float) -> object:
        fraction = min(fraction, UNWRITTEN)
        meter(fraction)
        return observer.progress(fraction, plan, trace) if observer.progress else None

    try:
        try:
            executor.start(plan, operation, trace)
            with meter:
                executor.execute(blocks.sources, lambda: target, progress)
                if later:
                    later.wait()
        except StoppedError:
            if later:
                later.wait()
            raise
        finally:
            if later:
                later.close()
            executor.close()
    except Exception as error:
        fail(error, executor)


def fail(error: Exception, executor: Executor) -> NoReturn:
    """Raise what an error means to the user."""
    failure = executor.explain(error)
    if failure is not None:
        raise failure.error from error
    if isinstance(error, Error) or not no_memory(error):
        raise error
    raise OutOfMemoryError(NO_MEMORY) from error
