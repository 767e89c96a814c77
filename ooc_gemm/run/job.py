"""Carries out a job that `prepare` has made."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..planning.schedule import Block
from ..storage.read import addresses
from ..storage.write import conversion, opening, reopen
from ..storage.write.provenance import Finished
from ..support.errors import (
    NO_MEMORY,
    Error,
    InputError,
    OutOfMemoryError,
    Place,
    StoreError,
    VerificationError,
    letting_go,
    no_memory,
)
from ..support.meter import UNWRITTEN, Meter, event, logs
from ..support.recording import recorded
from ..support.trace import EXCHANGE, Trace
from . import cold_start, rates_learned
from .destination import after_reading, beginning, continued
from .elsewhere import only_here
from .executor import Executor, Local
from .finish import Finished as FinishedTarget
from .observer import Observer
from .prepare import Job, prepare
from .rechunk import Rechunked, check_space, rechunked
from .recovery import Recovery, recovery
from .request import Request
from .result import Result
from .transforms import found_of


@dataclass(frozen=True)
class _Made:
    """The outcome of a job: what the result is built from."""

    copies: tuple[Rechunked, ...]
    array: Any
    overflowed: int


def attempt(request: Request, observer: Observer, executor: Executor | None = None) -> Result | Recovery:
    """Prepare a request and carry it out.

    Returns a Recovery where a device has failed and the run can go on without it. Raises what `multiply`
    raises.
    """
    started = time.perf_counter()
    with letting_go(), continued(request) as log:
        job = prepare(request, log, executor, observer)
        if observer.trace is not None:
            only_here("trace")
            _check_trace(observer.trace, request)
        copies = job.copies if job.plan.block_count else ()
        if copies:
            check_space(copies, request.c)
        _announce(job, observer)
        job, passed = _with_transforms(job)
        watch, begun = _watch(observer.trace), False
        try:
            try:
                if job.works:
                    job.executor.start(job.plan, job.operation, watch)
                begun = True
                made = _carry_out(job, observer, watch)
            finally:
                job.executor.close()
        except BaseException as error:
            watch.close()
            if not isinstance(error, Exception):
                raise
            return _recovered(request, job, begun, error)
    _learn(job, observer, watch, time.perf_counter() - started)
    if made.overflowed:
        observer.warn(conversion.said(made.overflowed, _name(job), job.output.dtype))
    if observer.trace is not None:
        try:
            watch.write()
        except StoreError as error:  # which does not make the result any less finished
            observer.warn(str(error))
    result = replace(_result(job, made, watch, time.perf_counter() - started), bytes_passed=passed)
    _say_done(job, result)
    return recorded(result)


def _watch(trace: str | os.PathLike[str] | None) -> Trace:
    """Begin a trace. Raises InputError where there is no place for its spans."""
    try:
        return Trace(trace)
    except OSError as error:
        said = f"the trace {os.fspath(trace or '')} cannot be written there: {error.strerror or error}"
        raise InputError(f"{said}; name another file") from error


def _announce(job: Job, observer: Observer) -> None:
    """Tell the user what concerns the answer, and how the run is done."""
    if logs():
        event("plan", f"{_name(job)}: {job.plan!r}", plan=job.plan.to_dict())
    observer.warn_of_undecoded(job.sources.values())
    if job.plan.advice:
        observer.note(job.plan.advice)
    if isinstance(job.log, Finished):
        observer.note(str(job.log))
    elif job.log:
        observer.note(f"{job.blocks - job.plan.block_count} of {job.blocks} blocks are done already")


def _say_done(job: Job, result: Result) -> None:
    """Log what the run has taken."""
    found = ("seconds", "tflops", "bytes_read", "bytes_written", "peak_host_bytes", "peak_device_bytes")
    numbers = {name: getattr(result, name) for name in (*found, "blocks", "blocks_resumed")}
    event("done", f"{_name(job)}: done in {result.seconds:.2f} s", **numbers)


def _learn(job: Job, observer: Observer, watch: Trace, seconds: float) -> None:
    """Remember rates that the run, of so many seconds, has shown."""
    if isinstance(job.executor, Local) and job.works:
        cold_start.learn(job.executor.device, job.plan, seconds)
        operands = [opened for name, opened in job.sources.items() if name != "c"]
        device, arithmetic, plan = job.executor.device, job.operation.arithmetic, job.plan
        for said in (
            rates_learned.learn(device, arithmetic, plan, watch),
            rates_learned.learn_blas(device, arithmetic, plan, watch, seconds),
            rates_learned.learn_decoding(device, operands, plan, watch),
            rates_learned.learn_unpacking(device, operands, plan, watch),
        ):
            if said:
                observer.note(said)


def _with_transforms(job: Job) -> tuple[Job, int]:
    """The job with what is done to elements of operands, and the bytes read by passes that found it."""
    if not (job.works and job.wanted):
        return job, 0
    opening.try_place(job.request.c)
    symmetric = job.plan.problem.symmetric
    found, passed = found_of(job.wanted, job.operation.arithmetic.panel, job.request.memory_limit, symmetric)
    return replace(job, operation=replace(job.operation, transforms=found)), passed


def _carry_out(job: Job, observer: Observer, watch: Trace) -> _Made:
    """Copy operands to better chunks, run the plan on the started executor, and finish C."""
    plan, report = job.plan, observer.progress
    meter = Meter(_name(job), plan.flops, plan.bytes_read, lambda: watch.bytes["read"])

    def progress(fraction: float) -> object:
        fraction = min(fraction, UNWRITTEN)
        meter(fraction)
        return report(fraction, plan, watch) if report else None

    wanted = job.copies if plan.block_count else ()
    with (
        meter,
        rechunked(wanted, job.sources, job.request.c) as (sources, copies),
        beginning(job, observer) as c,
    ):
        readers = {name: opened.source for name, opened in sources.items()}

        def stored() -> Any:
            (target, _), matrix = c.found(), plan.problem.c
            if not job.request.finish:
                return target
            return FinishedTarget(target, job.request.finish, (matrix.chunk_rows, matrix.chunk_cols))

        def when_read() -> None:
            after_reading(job, c.found()[0])

        if not job.works:
            when_read()
        elif wrong := job.executor.execute(readers, stored, progress, when_read, c.begun):
            observer.note(f"the check of {_spelled(_places(wrong))} of C failed; computed once more")
            _start_again(job, wrong, watch)
            if wrong := job.executor.execute(readers, stored, progress, when_read, c.begun):
                raise _wrong_again(job, wrong)
    if job.works:
        observer.all_done(plan, watch)
    target, array = c.found()
    if job.request.c is not None:  # it is opened while a device frees its memory
        array = reopen.open_result(job.request.c)
    return _Made(copies, array, target.overflowed if target else 0)


def _start_again(job: Job, wrong: list[Block], watch: Trace) -> None:
    """Start the executor again, for blocks that failed their check."""
    plan = job.plan.without(job.plan.all_but(wrong))
    job.executor.close()
    job.executor.start(plan, job.operation, watch)


def _wrong_again(job: Job, wrong: list[Block]) -> VerificationError:
    """Return the error of blocks that failed their check twice."""
    places = _places(wrong)
    rest = "run again" if job.head is None else "continue with resume=True"
    return VerificationError(
        f"{_name(job)} is wrong in {_spelled(places)}, also when computed again; "
        f"{rest}, on another device than {job.executor.hardware.name}",
        places,
    )


def _recovered(request: Request, job: Job, begun: bool, error: Exception) -> Recovery:
    """Return how a request continues after an error. Raises the error, or what it means, where it does
    not."""
    failure = job.executor.explain(error)
    if failure is None and (isinstance(error, Error) or not no_memory(error)):
        raise error
    if failure is None:
        raise OutOfMemoryError(NO_MEMORY) from error
    if found := recovery(request, failure, begun, job.plan.budget.device, error):
        return found
    if failure.error is error:
        raise error
    raise failure.error from error


def _result(job: Job, made: _Made, watch: Trace, seconds: float) -> Result:
    plan = job.plan
    return Result(
        m=plan.problem.m,
        n=plan.problem.n,
        k=plan.problem.k,
        dtype=job.dtype.name,
        out_dtype=job.output.dtype.name,
        device=job.executor.hardware.name,
        kernel=job.operation.arithmetic.kernel,
        precision=job.request.precision,
        seconds=seconds,
        tflops=plan.flops / seconds / 1e12,
        bytes_read=watch.bytes["read"],
        bytes_written=watch.bytes["write"],
        bytes_uploaded=watch.bytes["upload"],
        bytes_downloaded=watch.bytes["download"],
        bytes_exchanged=watch.bytes[EXCHANGE],
        lower_bound_bytes=plan.lower_bound_bytes,
        peak_host_bytes=job.executor.peak_host_bytes(),
        peak_device_bytes=job.executor.peak_device_bytes(),
        stage_seconds=watch.stage_seconds(),
        blocks=job.blocks,
        blocks_resumed=job.blocks - plan.block_count,
        verified=True if job.operation.verify and not isinstance(job.log, Finished) else None,
        overflowed=made.overflowed,
        rechunked=made.copies,
        plan=job.executor.as_done(plan),
        array=made.array,
        timeline=watch.timeline(),
    )


def _name(job: Job) -> str:
    """Return how messages call C."""
    return "C" if job.request.c is None else addresses.describe(job.request.c)


def _places(wrong: Iterable[Block]) -> tuple[Place, ...]:
    """Return the rows and columns of C that blocks cover."""
    return tuple(
        ((block.row, block.row + block.rows), (block.col, block.col + block.cols)) for block in wrong
    )


def _spelled(places: tuple[Place, ...]) -> str:
    some = [f"rows {r}–{rs - 1} × columns {c}–{cs - 1}" for (r, rs), (c, cs) in places[:4]]
    more = f" and {len(places) - 4} more blocks" if len(places) > 4 else ""
    return ", ".join(some) + more


def _check_trace(trace: str | os.PathLike[str], request: Request) -> None:
    """Refuse a file for the trace that cannot be written, or would be written into an array."""
    place = os.fspath(trace)
    file = os.path.abspath(place)
    if os.path.isdir(file):
        raise InputError(f"the trace {place} is a folder; name a file")
    for array in (request.a.array, request.b.array, request.c):
        if array is not None and addresses.same_place(place, array):
            raise InputError(f"the trace {place} lies inside {addresses.describe(array)}; write it elsewhere")
    target = file if os.path.exists(file) else os.path.dirname(file)
    if not os.access(target, os.W_OK) or not os.path.isdir(os.path.dirname(file)):
        raise InputError(f"the trace {place} cannot be written there; name another file")
