"""The public functions: multiply, gram and plan."""

import os
from collections.abc import Callable
from typing import Any

from .engine.ports import Device
from .planning.plan import Plan
from .run.prepare import prepare
from .run.result import Result
from .run.retry import retried
from .storage.read import store
from .support.trace import Trace


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
    force: replace a C that exists. In a folder the old C is kept until the new one is finished; in an object
    store, which has no rename, it is removed when the run begins.
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
    return prepare(
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
