"""Carries out what `prepare` has decided."""

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..engine.execute import execute
from ..planning.plan import Plan
from ..planning.schedule import Block
from ..storage.format import conventions
from ..storage.read import store
from ..storage.write import conversion
from ..storage.write.provenance import Finished
from ..support.errors import (
    NO_MEMORY,
    DeviceLostError,
    Error,
    InputError,
    OutOfMemoryError,
    Place,
    StoreError,
    VerificationError,
    no_memory,
)
from ..support.memory import peak_resident_bytes
from ..support.trace import Trace
from .destination import journal_of, opened_target
from .prepare import Job, prepare
from .rechunk import check_space, rechunked
from .result import Result


def run_once(
    a: Any,
    b: Any,
    c: Any,
    *,
    trace: str | os.PathLike[str] | None,
    progress: Callable[[float, Plan, Trace], None] | None,
    notice: Callable[[str], None] | None,
    beta: complex | None,
    precision: str = "highest",
    resume: bool = False,
    engine: Callable[..., list[Block]] | None = None,
    **options: Any,
) -> Result:
    """Open, plan, execute. `options` are those of `prepare`."""
    started = time.perf_counter()
    with journal_of(c, beta, resume) as log:
        job = prepare(a, b, c, writes=True, beta=beta, precision=precision, log=log, **options)
        if trace is not None:
            _check_trace(trace, [x for x in (a, b, c) if x is not None])
        plan, watch, name = job.plan, Trace(keep=trace is not None), "C" if c is None else store.describe(c)
        copies_wanted = job.copies if plan.block_count else ()
        if copies_wanted:
            check_space(copies_wanted, c)
        for text in dict.fromkeys(
            conventions.said(source.name, source.undecoded) for source in job.sources.values()
        ):
            if text:
                _tell(notice, text)
        if notice and plan.advice:
            notice(plan.advice)
        if notice and isinstance(log, Finished):
            notice(str(log))
        elif notice and log:
            notice(f"{job.blocks - plan.block_count} of {job.blocks} blocks are done already")
        with (
            _started(job, watch),
            rechunked(copies_wanted, job.sources, c) as (sources, copies),
            opened_target(c, job, log, notice) as (target, array),
        ):
            if plan.block_count and plan.problem.m and plan.problem.n:
                report = (
                    (lambda fraction: progress(fraction, plan, watch))
                    if progress
                    else (lambda fraction: None)
                )
                run = partial(
                    engine or execute, device=job.device, sources=sources, target=target, trace=watch
                )
                wrong = run(plan, progress=report, verify=job.operation.verify)
                if wrong:
                    _again(job, run, report, watch, wrong, notice, name)
            overflowed = target.overflowed if target else 0
    if overflowed:
        _tell(notice, conversion.said(overflowed, name, job.output.dtype))
    if trace is not None:
        try:
            watch.write(trace)
        except StoreError as error:  # which does not make the result any less finished
            _tell(notice, str(error))
    seconds = time.perf_counter() - started
    p = plan.problem
    return Result(
        m=p.m,
        n=p.n,
        k=p.k,
        dtype=job.dtype.name,
        out_dtype=job.output.dtype.name,
        device=job.device.name,
        kernel=job.operation.arithmetic.kernel,
        precision=precision,
        seconds=seconds,
        tflops=plan.flops / seconds / 1e12,
        bytes_read=watch.bytes["read"],
        bytes_written=watch.bytes["write"],
        bytes_uploaded=watch.bytes["upload"],
        bytes_downloaded=watch.bytes["download"],
        lower_bound_bytes=plan.lower_bound_bytes,
        peak_host_bytes=peak_resident_bytes(),
        peak_device_bytes=job.device.peak_bytes(),
        stage_seconds=watch.stage_seconds(),
        blocks=job.blocks,
        blocks_resumed=job.blocks - plan.block_count,
        verified=True if job.operation.verify and not isinstance(log, Finished) else None,
        overflowed=overflowed,
        rechunked=copies,
        plan=plan,
        array=array,
    )


def _tell(notice: Callable[[str], None] | None, text: str) -> None:
    """What the caller must hear of the answer: through `notice`, or without one as a warning."""
    if notice:
        notice(text)
    else:
        warnings.warn(text, stacklevel=1 + _frames_inside())


def _frames_inside() -> int:
    """How many frames of this package lie between the caller of this function and the user's code."""
    frame, count = sys._getframe(1), 0
    while frame and frame.f_globals.get("__name__", "").startswith("ooc_gemm."):
        count, frame = count + 1, frame.f_back  # type: ignore[assignment]
    return count


def _again(
    job: Job,
    run: Callable[..., list[Block]],
    report: Callable[[float], None],
    watch: Trace,
    wrong: list[Block],
    notice: Callable[[str], None] | None,
    name: str,
) -> None:
    """Blocks that failed their check, made once more. `run`: `execute` of a plan. Raises VerificationError
    where one fails again."""
    if notice:
        notice(f"the check of {_spelled(_places(wrong))} of C failed; computed once more")
    plan, (down, across) = job.plan, job.plan.problem.c.grid
    todo = {part.chunk for block in wrong for part in plan.parts(block)}
    plan = plan.without(frozenset((i, j) for i in range(down) for j in range(across)) - todo)
    job.device.close()
    job.device.start(plan, job.operation, watch)
    if wrong := run(plan, progress=report, verify=True):
        places = _places(wrong)
        rest = "run again" if job.head is None else "continue with resume=True"
        raise VerificationError(
            f"{name} comes out wrong in {_spelled(places)}, also when computed again; "
            f"{rest}, on another device than {job.device.name}",
            places,
        )


def _places(wrong: Iterable[Block]) -> tuple[Place, ...]:
    """Where the blocks lie."""
    return tuple(
        ((block.row, block.row + block.rows), (block.col, block.col + block.cols)) for block in wrong
    )


def _spelled(places: tuple[Place, ...]) -> str:
    some = [f"rows {r}–{rs - 1} × columns {c}–{cs - 1}" for (r, rs), (c, cs) in places[:4]]
    more = f" and {len(places) - 4} more blocks" if len(places) > 4 else ""
    return ", ".join(some) + more


@contextmanager
def _started(job: Job, watch: Trace) -> Iterator[None]:
    """The device, ready for the plan; C is not touched before. What its libraries and the system raise
    becomes an Error where a user can do something about it."""
    begun = False
    try:
        try:
            if job.plan.block_count and job.plan.problem.m and job.plan.problem.n:
                job.device.start(job.plan, job.operation, watch)
            begun = True
            yield
        finally:
            job.device.close()
    except Exception as error:
        if isinstance(error, Error):
            found: Exception | None = error
        else:
            traceback.clear_frames(error.__traceback__)  # they hold on to buffers
            found = job.device.explain(error)
        if found is None and no_memory(error):
            found = OutOfMemoryError(NO_MEMORY)
        if isinstance(found, OutOfMemoryError | DeviceLostError):
            found.begun = begun
        if isinstance(found, OutOfMemoryError):
            most = job.plan.budget.device
            found.limit = None if found.limit is None or most is None else min(found.limit, most)
        if found is None or found is error:
            raise
        raise found from error


def _check_trace(trace: str | os.PathLike[str], arrays: list[Any]) -> None:
    """Refuse a trace that cannot be written, or would be written into an array."""
    place = os.fspath(trace)
    for array in arrays:
        if store.same_place(place, array):
            raise InputError(f"the trace {place} lies inside {store.describe(array)}; write it elsewhere")
    file = os.path.abspath(place)
    target = file if os.path.exists(file) else os.path.dirname(file)
    if os.path.isdir(file) or not os.access(target, os.W_OK) or not os.path.isdir(os.path.dirname(file)):
        raise InputError(f"the trace {place} cannot be written there; name another file")
