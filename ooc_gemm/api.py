"""multiply, gram and plan: open → plan → execute."""

import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from . import __version__
from .devices import open_device
from .engine.execute import execute
from .engine.ports import INT64_MAX, Device, Operation
from .planning import layouts
from .planning.plan import Block, Plan
from .planning.problem import Budget, Matrix, Problem
from .planning.search import make_plan
from .run import rates
from .run.operands import open_operand
from .run.rechunk import Rechunked, check_space, rechunked
from .run.scalars import scalar
from .storage.format import conventions
from .storage.io.files import chunks_at_once
from .storage.io.remote import BANDWIDTH, CONNECTION_BYTES, STREAM, WRITERS, requests, side_by_side
from .storage.read import store
from .storage.read.local import Source
from .storage.write import conversion, journal, provenance, targets
from .storage.write.journal import Journal
from .storage.write.provenance import Finished
from .support.errors import (
    NO_MEMORY,
    BudgetError,
    DeviceLostError,
    Error,
    InputError,
    OutOfMemoryError,
    Place,
    StoreError,
    VerificationError,
    no_memory,
)
from .support.memory import baseline_bytes, default_memory_limit, parse_size, peak_resident_bytes
from .support.trace import Trace

PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class Result:
    """What a multiplication did. Sizes in bytes, times in seconds."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    device: str
    kernel: str
    precision: str
    seconds: float
    tflops: float
    """2mnk operations a second; half as many where one half of C is the other's mirror image, and those of
    blocks that were done already do not count."""
    bytes_read: int
    """Moved from the stores to the process, counted where it happens."""
    bytes_written: int
    bytes_uploaded: int
    bytes_downloaded: int
    lower_bound_bytes: int
    """Least bytes any schedule moves with the memory that was allowed."""
    peak_host_bytes: int
    """The largest resident set the process has had."""
    peak_device_bytes: int
    stage_seconds: dict[str, float]
    """Busy seconds of each stage, added over its threads."""
    blocks: int
    blocks_resumed: int
    verified: bool | None
    overflowed: int
    """Elements of C, as far as this run made them, that are infinite although the product is finite there:
    they are too large for C's type."""
    rechunked: tuple[Rechunked, ...]
    """Copies that were made first, their bytes and seconds; `seconds` contains theirs."""
    plan: Plan = field(repr=False)
    array: Any = field(default=None, repr=False)
    """C as a NumPy array, where none was given to write to."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        out = {key: value for key, value in self.__dict__.items() if key not in ("plan", "array")}
        return {**out, "rechunked": [asdict(copy) for copy in self.rechunked], "plan": self.plan.to_dict()}


@dataclass(frozen=True)
class _Job:
    """Everything decided before anything is written."""

    sources: dict[str, Source]
    operation: Operation
    output: targets.Output
    copies: tuple[layouts.Copy, ...]
    """Of operands, to be made first."""
    plan: Plan
    """Of what follows."""
    device: Device
    dtype: np.dtype[Any]
    head: dict[str, Any] | None
    """What makes C what it is, for the journal; None where nobody could tell whether the inputs are still the
    same."""
    options: dict[str, Any]
    """What makes C what it is, beside the inputs: for C's attributes."""
    blocks: int
    """Of the whole C; the plan may be of what is left."""
    force: bool
    """What stands in C's place is replaced."""
    fills: bool
    """C is an array that was given open: its values are replaced, and nothing else of it."""


def multiply(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: complex | None = None,
    beta: complex | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    precision: str = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    rechunk: bool = False,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    trace: str | os.PathLike[str] | None = None,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Result:
    """C (m×n) ← α·op(A) (m×k)·op(B) (k×n) + β·C.

    a, b: path, URL, zarr.Array, or anything with shape, dtype and slicing. Where that is neither
    Zarr's nor NumPy's a few pieces are made to measure how much memory one takes, also by `plan`.
    alpha, beta: α and β; unless given 1 and 0.
    c: path or URL of an array to make, or an open zarr.Array to fill: its shape and type must be those of the
    result, its chunks, codecs and attributes stay, and force is not needed. Without c the result's `array` is
    a NumPy array.
    memory_limit: most host memory the process may hold resident, `"8GiB"` or bytes.
    device: `auto`, `cpu`, `cuda`, `cuda:N`, or several GPUs that work as one, `cuda:0,1` or `cuda:all`;
    device_memory_limit: most memory of each.
    out_dtype: type of C. Unless given NumPy's promotion of the inputs, but int32 for 8-bit integers and int64
    for others: integers are exact, and a sum that does not fit is an error. float16 stays float16.
    chunks, shards, compressor: how a new C is stored, unless given in chunks near 16 MiB, no shards, "none".
    force: replace a C that exists.
    resume: continue an interrupted run of the same problem, with these or other limits, on this or another
    device. alpha, beta, out_dtype, chunks, shards and compressor are those it was begun with, unless they are
    given again. Where there is no C yet, begin; where C is finished and is the result already, do nothing.
    rechunk: copy A or B to better chunks first, beside C, where the plan shows that it pays.
    verify: check every block of C while it is on the device, and compute what fails once more.
    trace: file for a timeline of every stage. progress: called with (fraction, plan, trace).
    notice: called with a sentence: the plan's advice on chunks, before anything is written; blocks that fail;
    and what concerns the answer, which is a UserWarning where there is no `notice`: inputs whose attributes
    or masks are not applied, and finite results that are infinite in C's type.

    Raises InputError and BudgetError before anything is written; StoreError, RangeError, DeviceError and
    VerificationError while running, after which C is no Zarr array but an unfinished one, which `resume`
    continues.
    """
    return retried(
        a,
        b,
        c,
        trace=trace,
        progress=progress,
        notice=notice,
        force=force,
        resume=resume,
        alpha=alpha,
        beta=beta,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        adjoint_a=adjoint_a,
        adjoint_b=adjoint_b,
        memory_limit=memory_limit,
        device=device,
        device_memory_limit=device_memory_limit,
        precision=precision,
        kernel=kernel,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        rechunk=rechunk,
        verify=verify,
    )


def gram(
    a: Any,
    c: Any = None,
    *,
    transpose: bool = False,
    alpha: complex | None = None,
    beta: complex | None = None,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    precision: str = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    rechunk: bool = False,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    trace: str | os.PathLike[str] | None = None,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Result:
    """C (m×m) ← α·A·Aᵀ + β·C with A m×k; `transpose`: α·Aᵀ·A + β·C with A k×m. Complex A is not conjugated.

    One half of C is computed, with half of the reads of `multiply`; both are written, and C = Cᵀ to the bit.
    β ≠ 0 saves nothing, for the old C need not be symmetric; nor do chunks of C whose sides have no common
    multiple small enough for square blocks: then this is `multiply` (`plan.problem.symmetric` is False).

    All other arguments are those of `multiply`. Raises what it raises.
    """
    return retried(
        a,
        a,
        c,
        trace=trace,
        progress=progress,
        notice=notice,
        transpose_a=transpose,
        transpose_b=not transpose,
        symmetric=True,
        alpha=alpha,
        beta=beta,
        memory_limit=memory_limit,
        device=device,
        device_memory_limit=device_memory_limit,
        precision=precision,
        kernel=kernel,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        rechunk=rechunk,
        verify=verify,
        force=force,
        resume=resume,
    )


def retried(
    a: Any,
    b: Any,
    c: Any,
    *,
    notice: Callable[[str], None] | None,
    beta: complex | None = None,
    **options: Any,
) -> Result:
    """`_run`, and once more with less of the device's memory where another process has taken it, or on those
    of several devices that are left. `options` are those of `multiply`, and `engine`: what carries out a plan
    as `execute` does, where it is not that."""
    store.refuse_event_loop()
    beta, options["alpha"] = scalar("beta", beta), scalar("alpha", options.get("alpha"))
    try:
        return _run(a, b, c, notice=notice, beta=beta, **options)
    except (OutOfMemoryError, DeviceLostError) as error:
        more: dict[str, Any] | None = _to_go_on(error.begun, c, beta)
        if isinstance(error, DeviceLostError):
            error.options, what = more, {"device": error.left} if error.left else None
            how = f"on {error.left.name}" if error.left else ""
        else:
            what = {"device_memory_limit": error.limit} if error.limit else None
            how = f"with a plan for {error.limit} bytes of that memory"
        if more is None or what is None:
            raise
        if notice:
            notice(f"{str(error).partition(';')[0]}; it goes on {how}")
        options, failed = options | more | what, error
    again = _run if isinstance(failed, OutOfMemoryError) else retried
    try:
        return again(a, b, c, notice=notice, beta=beta, **options)
    except BudgetError as error:
        raise failed from error


def _to_go_on(begun: bool, c: Any, beta: complex | None) -> dict[str, bool] | None:
    """Options of a run that goes on where one has failed; None where none could: some blocks may have had
    their β already."""
    place = store.local_path(c) if begun and c is not None else None
    if place is not None and (place / journal.NAME).exists():
        return {"resume": True}
    if begun and not beta:
        return {"force": True}
    return None if begun else {}


def _run(
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
    """Open, plan, execute. `options` are those of `_prepare`."""
    started = time.perf_counter()
    with _journal(c, beta, resume) as log:
        job = _prepare(a, b, c, writes=True, beta=beta, precision=precision, log=log, **options)
        if trace is not None:
            _check_trace(trace, [x for x in (a, b, c) if x is not None])
        plan, watch, name = job.plan, Trace(keep=trace is not None), "C" if c is None else store.describe(c)
        copies_wanted = job.copies if plan.block_count else ()
        if copies_wanted:
            check_space(copies_wanted, c)
        for text in dict.fromkeys(conventions.said(source) for source in job.sources.values()):
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
            _target(c, job, log, notice) as (target, array),
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
        warnings.warn(text, stacklevel=5)  # who calls multiply, through `retried` and `_run`


def _again(
    job: _Job,
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


def plan(
    a: Any,
    b: Any,
    *,
    alpha: complex | None = None,
    beta: complex | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    precision: str = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    rechunk: bool = False,
    verify: bool = False,
) -> Plan:
    """What `multiply(a, b, …)` with the same arguments would do; runs nothing, writes nothing.

    With rechunk it is the plan after copies, where its advice says that they are made. Raises InputError and
    BudgetError.
    """
    store.refuse_event_loop()
    return _prepare(
        a,
        b,
        None,
        writes=False,
        alpha=alpha,
        beta=beta,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        adjoint_a=adjoint_a,
        adjoint_b=adjoint_b,
        memory_limit=memory_limit,
        device=device,
        device_memory_limit=device_memory_limit,
        precision=precision,
        kernel=kernel,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        rechunk=rechunk,
        verify=verify,
    ).plan


def _prepare(
    a: Any,
    b: Any,
    c: Any,
    *,
    writes: bool,
    alpha: complex | None = None,
    beta: complex | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    precision: str = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    rechunk: bool = False,
    verify: bool = False,
    force: bool = False,
    symmetric: bool = False,
    log: Journal | Finished | None = None,
) -> _Job:
    """Everything decided. `symmetric`: op(B) is op(A)ᵀ. `log`: of the run that is continued."""
    begun, layout_there = None, dict[str, Any]()
    fills = bool(log.head.get("fills")) if log else store.is_array(c)
    if log and (log.done or beta or fills or provenance.reads_c(log.head)):
        begun = targets.open_partial(c)
    if begun is not None:
        layout_there = {"chunks": begun.chunks, "shards": begun.shards}
    alpha, beta = scalar("alpha", alpha), scalar("beta", beta)
    given = {"alpha": alpha, "beta": beta, "out_dtype": out_dtype}
    given |= {"chunks": chunks, "shards": shards, "compressor": compressor}
    settled = provenance.settled(given, log.head if log else None, layout_there, store.describe(c))
    alpha, beta = settled["alpha"], settled["beta"]
    out_dtype, chunks, shards, compressor = (settled[key] for key in provenance.LAYOUT[2:])
    symmetric, fills = symmetric and beta == 0, fills and beta == 0
    if precision not in PRECISIONS:
        raise InputError(f"{precision!r} is not a precision; choose one of {', '.join(PRECISIONS)}")
    if (transpose_a and adjoint_a) or (transpose_b and adjoint_b):
        raise InputError("an operand is either transposed or its adjoint taken; give one of the two")
    if beta != 0 and c is None and writes:
        raise InputError("beta is not 0, so there must be a C to read; give its path")
    limit = default_memory_limit() if memory_limit is None else parse_size(memory_limit)
    device_limit = None if device_memory_limit is None else parse_size(device_memory_limit)
    if beta != 0 and c is not None and isinstance(c, str | os.PathLike):
        here = store.local_path(c)
        if here is not None and not here.exists():
            raise InputError(
                f"{store.describe(c)} does not exist, and beta is not 0; make C first or leave beta out"
            )
    works: list[Callable[[], Any]] = [
        partial(open_operand, a, "A", transpose_a or adjoint_a),
        partial(open_operand, b, "B", transpose_b or adjoint_b),
    ]
    if c is not None and log is None and beta == 0:
        works.append(partial(targets.check_output, c, [a, b], force, reads=fills))
    far = any(map(store.is_remote, (a, b, c)))
    left, right, *_ = side_by_side(works) if far else [work() for work in works]
    shape_a, shape_b = left.shape, right.shape
    if shape_a[1] != shape_b[0]:
        raise InputError(
            f"the inner dimensions of A and B differ: op({left.name}) is {shape_a[0]}×{shape_a[1]} and "
            f"op({right.name}) is {shape_b[0]}×{shape_b[1]}; transpose one of them or choose other arrays"
        )
    left.measure(limit)
    if a is b:
        right.matrix = replace(right.matrix, apart=left.matrix.apart)
    else:
        right.measure(limit)
    (m, k), n = shape_a, shape_b[1]
    sources, existing = {"a": left, "b": right}, None
    if log:
        existing = begun if beta != 0 else None
    elif c is not None and beta != 0:
        existing = targets.open_existing(c)
        targets.check_output(c, [a, b], force, reads=True)
    if existing is not None:
        old = store.open_source(existing, store.describe(c))
        if old.shape != (m, n):
            raise InputError(
                f"{store.describe(c)} has shape {old.shape} but the product is {m}×{n}; choose another C"
            )
        if out_dtype is not None and np.dtype(out_dtype) != old.dtype:
            raise InputError(f"{old.name} holds {old.dtype}, not {out_dtype}; leave out out_dtype")
        sources["c"], out_dtype = old, old.dtype
    out = _out_dtype(left.dtype, right.dtype, out_dtype, alpha, beta)
    if fills and log is None:
        targets.check_filled(c, (m, n), out, given, force)
        begun = c
    if m * n * out.itemsize > store.MAX_ARRAY_BYTES:
        raise InputError(
            f"op({left.name})·op({right.name}) is {m}×{n}, more than can be stored; transpose one or both"
        )
    chosen = open_device(device) if isinstance(device, str) else device
    bound = _bound(left.dtype, right.dtype, out, k, alpha, beta)
    arithmetic = chosen.arithmetic(left.dtype, right.dtype, out, (m, n, k), bound, kernel, precision)
    _check_scalars(alpha, beta, arithmetic.block)
    may_wrap = bound > INT64_MAX
    unit, asked = shards or chunks, chunks
    if (there := begun or existing) is not None:
        unit = (there.shards or there.chunks)[0], (there.shards or there.chunks)[1]
        chunks = there.chunks[0], there.chunks[1]
    output = _output((m, n), out, chunks, shards, compressor)
    height, width = unit or (1, 1)
    stored = Matrix(m, n, out.itemsize, height, width, whole=output.encoded, encodes=output.work)
    if existing is not None:
        stored = _updatable(sources["c"].matrix, height, width)
    elif fills and begun is not None:
        stored = _filled(begun, store.open_source(begun, store.describe(c)).matrix)
    problem = Problem(
        m,
        n,
        k,
        left.matrix,
        right.matrix,
        stored,
        panel_itemsize=arithmetic.panel.itemsize,
        block_itemsize=arithmetic.block.itemsize,
        reads_c=existing is not None,
        free_chunks=unit is None,
        pitch=arithmetic.pitch,
        along_k=arithmetic.along_k,
        line_bytes=arithmetic.line_bytes,
        scratch=arithmetic.scratch,
        block_scratch=arithmetic.product_bytes if alpha.imag or beta.imag else 0,
        check_itemsize=arithmetic.check_type.itemsize if verify else 0,
        kernel=f"{arithmetic.kernel}: {arithmetic.why}",
        symmetric=symmetric,
        types=(left.dtype.name, right.dtype.name, out.name),
        keeps_a=arithmetic.panel.kind != "c" and arithmetic.panel != np.int64 and not may_wrap,
    )
    costs = chosen.limits(arithmetic, device_limit)
    turned = problem.panels_along_k != problem.stored_along_k
    converted = turned or any(x.dtype != arithmetic.panel for x in (left, right))
    extra = m * n * out.itemsize if c is None and writes else 0
    asked_of = [(source.latency, source.matrix.chunk_bytes) for source in sources.values() if source.latency]
    readers = max([costs.readers, *(requests(*one) for one in asked_of)])
    if all(source.background for source in sources.values()):
        readers = chunks_at_once(readers)
    puts = store.is_remote(c)
    writers = max(costs.writers, WRITERS if puts else 0)
    budget = Budget(
        host=limit,
        host_baseline=extra + (costs.host_baseline if costs.workers else baseline_bytes(costs.host_baseline)),
        device=costs.device,
        device_baseline=costs.device_baseline,
        workspace=costs.workspace + (costs.check if verify else 0),
        staged=costs.device is not None and (converted or "c" in sources),
        readers=readers,
        writers=writers,
        connection=CONNECTION_BYTES if asked_of or puts else 0,
        workers=max(1, costs.workers),
        weights=costs.weights,
        linked=costs.linked,
        stacked=all(source.matrix.stacked for source in sources.values()),
    )
    inputs = [(source.place, source.matrix.stored_bytes) for source in sources.values()]
    place = store.local_path(c) if c is not None else None if writes else left.place
    usual = rates.known(chosen, arithmetic, inputs, (place, m * n * out.itemsize))
    if asked_of:  # to wait for a network takes nothing from the cores
        latency, read = max(asked_of)[0], min(usual.read, BANDWIDTH)
        usual = replace(usual, stream=STREAM, latency=latency, read=read, shared=False)
    made = make_plan(problem, budget, usual)
    made, copies = layouts.rechunk(made) if rechunk else (layouts.advise(made), ())
    options = {
        "shape": [m, n, k],
        "product": "gram" if symmetric else "multiply",
        "op(A)": "adjoint" if adjoint_a else "transpose" if transpose_a else "none",
        "op(B)": "adjoint" if adjoint_b else "transpose" if transpose_b else "none",
        "alpha": provenance.number(alpha),
        "beta": provenance.number(beta),
        "precision": precision,
        "kernel": kernel,
        "out_dtype": out.name,
        "chunks": asked,
        "shards": shards,
        "compressor": compressor,
    }
    before = {} if log is None else {chunk: was for chunk, (_, was) in log.done.items()}
    head = provenance.head(sources, before, options)
    if head and fills:
        head["fills"] = True
    blocks = made.block_count
    if log:
        provenance.refuse_changes(log, head, store.describe(c))
        made = made.without(frozenset(log.done))
    if made.problem.symmetric:
        del sources["b"]
    for source in sources.values():
        source.borrows = source.latency > 0 and made.budget.device is None
    if existing is None:
        made_c = made.problem.c
        size = (made_c.chunk_rows, made_c.chunk_cols)
        output = replace(output, chunks=chunks or size, shards=shards)
    operation = Operation(
        arithmetic,
        transpose_a=left.matrix.transposed,
        conjugate_a=adjoint_a and left.dtype.kind == "c",
        transpose_b=right.matrix.transposed,
        conjugate_b=adjoint_b and right.dtype.kind == "c",
        alpha=alpha,
        beta=beta,
        verify=verify,
        may_wrap=may_wrap,
    )
    dtype = np.result_type(left.dtype, right.dtype)
    return _Job(sources, operation, output, copies, made, chosen, dtype, head, options, blocks, force, fills)


@contextmanager
def _started(job: _Job, watch: Trace) -> Iterator[None]:
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


@contextmanager
def _journal(c: Any, beta: complex | None, resume: bool) -> Iterator[Journal | Finished | None]:
    """The journal of the run that is to be continued, if there is one to be continued; or C, where it is
    finished. `beta`: None where it is not given."""
    if not resume:
        yield None
        return
    place, name = store.local_path(c) if c is not None else None, store.describe(c)
    if c is None:
        raise InputError("only a C that is stored can be continued; leave out resume=True")
    if place is None:
        yield targets.continued(c, beta or 0)
        return
    if not (store.is_partial(place) or (place / journal.NAME).exists()):
        done = provenance.finished(c)
        if done is None and (beta or any((place / key).exists() for key in store.METADATA)):
            raise InputError(
                f"{name} is not the unfinished result of an interrupted run; leave out resume=True"
            )
        yield done
        return
    log = Journal.resume(place, name)
    # Killed before it began: C is what it was, or not there.
    if not log.head or not (log.done or store.is_partial(place)):
        log.close()
        yield None
        return
    try:
        yield log
    finally:
        log.close()


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


def _updatable(c: Matrix, height: int, width: int) -> Matrix:
    """An existing C, refusing what cannot be updated in place chunk by chunk."""
    if c.transposed or (c.chunk_rows, c.chunk_cols) != (height, width):
        raise InputError(
            "beta is not 0 and C is sharded or in Fortran order, which cannot be updated in place; "
            "copy C to a plain array first"
        )
    return c


def _filled(array: Any, s: Matrix) -> Matrix:
    """How an array that is filled is written, given how it would be read: in whole chunks, or shards."""
    rows, cols = array.shape
    height, width = array.shards or array.chunks
    plain = not (array.shards or s.transposed)
    return replace(
        s,
        rows=rows,
        cols=cols,
        chunk_rows=max(1, height),
        chunk_cols=max(1, width),
        transposed=False,
        fortran=False,
        whole=s.whole or not plain,
        held=s.held if plain else store.HELD_BY_ZARR,
        stored=None,
        stacked=False,
        remote=False,
    )


def _out_dtype(
    a: np.dtype[Any], b: np.dtype[Any], asked: Any, alpha: complex, beta: complex
) -> np.dtype[Any]:
    """C's type: NumPy's promotion, except that sums of integers have room: those of 8 bits make int32, all
    others int64. That is also so where NumPy has uint64, in which no sum of more than int64 is computed here,
    or float64 (of int64 and uint64), which is not exact."""
    natural = np.result_type(a, b)
    if a.kind in "iu" and b.kind in "iu":
        natural = np.dtype(np.int32 if a.itemsize == b.itemsize == 1 else np.int64)
    out = natural if asked is None else store.matrix_dtype(asked)
    order = "iufc"
    if order.index(out.kind) < order.index(natural.kind) and not (out.kind == "i" and natural.kind == "u"):
        raise InputError(f"C cannot hold {natural} results as {out}; leave out_dtype out or widen it")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not (math.isfinite(value.real) and math.isfinite(value.imag)):
            raise InputError(f"{name} is {value}; it must be finite")
        if out.kind != "c" and value.imag != 0:
            raise InputError(f"{name} is complex but C holds {out}; give a complex out_dtype")
        if out.kind in "iu" and value.real != int(value.real):
            raise InputError(f"{name} is {value} but C holds integers; give out_dtype='float64'")
    return out


def _check_scalars(alpha: complex, beta: complex, sums: np.dtype[Any]) -> None:
    """Raise InputError for an alpha or beta that the type of the sums cannot hold: as infinity it would make
    NaN of sums that are 0, and as 0, or with few digits, something else than was asked for."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        if sums.kind in "iu":
            fits = abs(int(value.real)) <= np.iinfo(sums).max
        else:
            info = np.finfo(sums)
            largest = max(abs(value.real), abs(value.imag))
            fits = value == 0 or float(info.tiny) <= largest <= float(info.max)
        if not fits:
            raise InputError(
                f"{name} is {value}, which {sums}, the type of the sums, cannot hold as an ordinary number; "
                "scale the inputs, or give a wider out_dtype"
            )


def _bound(
    a: np.dtype[Any], b: np.dtype[Any], out: np.dtype[Any], k: int, alpha: complex, beta: complex
) -> int:
    """For integers: no partial sum exceeds it in magnitude."""
    if out.kind not in "iu":
        return 0

    def largest(dtype: np.dtype[Any]) -> int:
        info = np.iinfo(dtype)
        return max(-int(info.min), int(info.max))

    return abs(int(alpha.real)) * largest(a) * largest(b) * k + abs(int(beta.real)) * largest(out)


def _output(
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    chunks: tuple[int, int] | None,
    shards: tuple[int, int] | None,
    compressor: str,
) -> targets.Output:
    targets.check_layout(chunks, shards, compressor)
    return targets.Output(shape, dtype, chunks or (1, 1), shards, compressor)


@contextmanager
def _target(
    c: Any, job: _Job, log: Journal | Finished | None, notice: Callable[[str], None] | None
) -> Iterator[tuple[Any, Any]]:
    """Where C goes, and the NumPy array if that is where. C becomes an array when the body succeeds."""
    block = job.operation.arithmetic.block
    if isinstance(log, Finished):
        yield None, None
        targets.enter(c, targets.groups_of(c))  # the run that has made C may have been killed before that
        return
    if c is None:
        array = np.empty(job.output.shape, job.output.dtype)
        yield targets.ArrayTarget(array, job.plan.problem.c, block), array
        for source in job.sources.values():
            source.check_unchanged()
        return
    reads = job.operation.beta != 0
    if log and not (
        log.done or reads or job.fills
    ):  # nothing was made yet: what is there may be of a run before
        log.close()
        target = targets.create_target(c, job.output, block, job.head, force=True, notice=notice)
    elif log:
        target = targets.continued_target(c, block, log)
    elif reads or job.fills:
        target = targets.update_target(c, block, job.head, fills=job.fills, force=job.force)
    else:
        target = targets.create_target(c, job.output, block, job.head, job.force, notice=notice)
    try:
        if "c" in job.sources:
            target.expect(job.sources["c"].stamps)
        yield target, None
        for name, source in job.sources.items():
            if name != "c":
                source.check_unchanged()
        left = target.commit({"version": __version__, **(job.head or {"options": job.options})})
        if left and notice:
            notice(left)
    except BaseException as error:
        target.pause()
        if kept := target.kept():
            error.add_note(kept)
        raise
