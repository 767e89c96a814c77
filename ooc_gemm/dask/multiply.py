"""Multiplies on the workers of a cluster: `multiply` and `gram`."""

from collections.abc import Callable
from typing import Any

from ..planning.plan import Plan
from ..run.elsewhere import computing
from ..run.observer import Observer
from ..run.recovery import Recovery
from ..run.request import Operand, Precision, Request, gram_operands
from ..run.result import Result
from ..run.retry import carry_out, result_of
from ..storage.io.zarr_internals import refuse_event_loop
from ..support.trace import Trace
from .elsewhere import OnWorkers


def multiply(
    a: Any,
    b: Any,
    c: Any,
    *,
    client: Any = None,
    alpha: complex | None = None,
    beta: complex | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    memory_limit: str | int | None = None,
    device: str = "auto",
    device_memory_limit: str | int | None = None,
    precision: Precision = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Result:
    """C (m×n) ← α·op(A) (m×k)·op(B) (k×n) + β·C, on the workers of a cluster.

    It differs from `ooc_gemm.multiply` in where things lie and who computes. Each worker makes some blocks of
    C or, where the plan expects that to be faster, blocks over some of k, whose sums the workers add up.
    Where the network allows, workers make neighbouring blocks at the same time and hand pieces of A and B to
    each other, so that each piece is read once.
    A worker that dies has its part made again by others. Where the scheduler or the client dies, C can be
    continued with `resume`, also by `ooc_gemm.multiply`.

    Parameters
    ----------
    a, b : str, os.PathLike or zarr.Array
        The inputs: paths, URLs or open Zarr arrays that all workers can open. Workers take credentials of
        object stores from their own environment; an address or an open array that holds some is refused.
    c : str or os.PathLike
        Path of the result, in a folder that the workers share with this process.
    client : distributed.Client, optional
        Client of the cluster. By default the current one. Workers with the resource `GPU`, as those of
        dask-cuda have it, are the only ones used where there are any.
    alpha, beta : complex, default 1 and 0
        α and β. β ≠ 0 needs an existing C.
    transpose_a, transpose_b : bool, default False
        Multiply with the transpose of an input.
    adjoint_a, adjoint_b : bool, default False
        Multiply with the conjugate transpose of an input.
    memory_limit : str or int, optional
        Most host memory that each worker may hold resident, in bytes or as `"8GiB"`. By default what it may
        hold before `distributed` begins to spill.
    device : str, default "auto"
        Name of the device that each worker opens, as of `ooc_gemm.multiply`.
    device_memory_limit : str or int, optional
        Most memory of each worker's device. By default 90 % of what is free.
    precision : {"highest", "high", "medium"}, default "highest"
        Least accuracy of float32 products.
    kernel : str, default "auto"
        The kernel: the fastest that keeps the precision, or the one of this name.
    out_dtype : dtype, optional
        Type of C. By default as of `ooc_gemm.multiply`.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of a new C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    verify : bool, default False
        Check every block of C on its worker, and compute what fails once more.
    force : bool, default False
        Replace a C that exists.
    resume : bool, default False
        Continue an interrupted run of the same problem, as of `ooc_gemm.multiply`.
    progress : callable, optional
        Called with (fraction, plan, trace) as the work goes on.
    notice : callable, optional
        Called with sentences for the user, as of `ooc_gemm.multiply`.

    Returns
    -------
    Result
        Its bytes and stage seconds are those of all workers together, and its peaks those of the worker that
        held most. `bytes_exchanged` is what workers got from each other instead of the store.

    Raises
    ------
    InputError, BudgetError, StoreError, RangeError, VerificationError
        As `ooc_gemm.multiply`.
    DeviceError
        As `ooc_gemm.multiply`, and where the scheduler or all workers are gone.
    """
    request = Request(
        Operand.of(a, transpose_a, adjoint_a),
        Operand.of(b, transpose_b, adjoint_b),
        c,
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
        verify=verify,
        force=force,
        resume=resume,
    )
    return result_of(carry_out_on(client, request, Observer(progress, notice)))


def gram(
    a: Any,
    c: Any,
    *,
    client: Any = None,
    transpose: bool = False,
    alpha: complex | None = None,
    beta: complex | None = None,
    memory_limit: str | int | None = None,
    device: str = "auto",
    device_memory_limit: str | int | None = None,
    precision: Precision = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Result:
    """C (m×m) ← α·A·Aᵀ + β·C with A m×k, on the workers of a cluster. Complex A is not conjugated.

    One half of C is computed, and both are written, as by `ooc_gemm.gram`. Where things lie, who computes,
    and what happens if a worker, the scheduler or the client dies is as of `multiply`.

    Parameters
    ----------
    a : str, os.PathLike or zarr.Array
        The input, as of `multiply`.
    c : str or os.PathLike
        Path of the result, in a folder that the workers share with this process.
    client : distributed.Client, optional
        Client of the cluster, as of `multiply`. By default the current one.
    transpose : bool, default False
        Compute α·Aᵀ·A + β·C with A k×m instead.
    alpha, beta : complex, default 1 and 0
        α and β. β ≠ 0 needs an existing C.
    memory_limit : str or int, optional
        Most host memory that each worker may hold resident, in bytes or as `"8GiB"`. By default what it may
        hold before `distributed` begins to spill.
    device : str, default "auto"
        Name of the device that each worker opens, as of `ooc_gemm.multiply`.
    device_memory_limit : str or int, optional
        Most memory of each worker's device. By default 90 % of what is free.
    precision : {"highest", "high", "medium"}, default "highest"
        Least accuracy of float32 products.
    kernel : str, default "auto"
        The kernel: the fastest that keeps the precision, or the one of this name.
    out_dtype : dtype, optional
        Type of C. By default as of `ooc_gemm.multiply`.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of a new C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    verify : bool, default False
        Check every block of C on its worker, and compute what fails once more.
    force : bool, default False
        Replace a C that exists.
    resume : bool, default False
        Continue an interrupted run of the same problem, as of `ooc_gemm.multiply`.
    progress : callable, optional
        Called with (fraction, plan, trace) as the work goes on.
    notice : callable, optional
        Called with sentences for the user, as of `ooc_gemm.multiply`.

    Returns
    -------
    Result
        As of `multiply`.

    Raises
    ------
    InputError, BudgetError, StoreError, RangeError, VerificationError, DeviceError
        As `multiply`.
    """
    request = Request(
        *gram_operands(a, transpose),
        c,
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
        verify=verify,
        force=force,
        resume=resume,
    )
    return result_of(carry_out_on(client, request, Observer(progress, notice)))


def carry_out_on(client: Any, request: Request, observer: Observer) -> Result | Recovery:
    """Carry out a request on the cluster of a client; None is the current one. Raises as `multiply`."""
    refuse_event_loop()
    with computing(OnWorkers(client)):
        return carry_out(request, observer)
