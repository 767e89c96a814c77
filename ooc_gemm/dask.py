"""The Dask side: products of dask arrays, and products made by a `distributed` cluster.

Needs the extra `distributed`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import api, store
from .cluster import Cluster
from .errors import InputError
from .plan import Plan
from .trace import Trace

if TYPE_CHECKING:
    import distributed


def multiply(
    a: Any,
    b: Any,
    c: Any,
    *,
    client: "distributed.Client | None" = None,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    memory_limit: str | int | None = None,
    device: str = "auto",
    device_memory_limit: str | int | None = None,
    precision: str = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str = "none",
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> api.Result:
    """C (m×n) ← α·op(A) (m×k)·op(B) (k×n) + β·C, its blocks spread over the workers of a cluster.

    a, b: path, URL or zarr.Array, which all workers can open; c: path of C in a folder that they share with
    this process.
    client: of the cluster, unless given the current one. GPU workers that say so by the resource `GPU`, as
    those of dask-cuda do, are the only ones used where there are any.
    memory_limit: most host memory that a worker may hold resident; unless given what it holds before
    `distributed` begins to spill.

    The rest as `ooc_gemm.multiply`. A worker that dies has its blocks done again by others; where scheduler
    or client die, C can be continued with `resume`, also by `ooc_gemm.multiply`. The result's bytes and stage
    seconds are those of all workers, and its peaks those of the worker that held most.

    Raises what `ooc_gemm.multiply` raises, and DeviceError where scheduler or workers are gone.
    """
    if store.local_path(c) is None:
        raise InputError(f"{store.describe(c)} is not in a folder that workers share; give the path of one")
    cluster = Cluster(client, {"a": a, "b": b}, device)
    result = api.retried(
        a,
        b,
        c,
        engine=cluster.execute,
        device=cluster,
        memory_limit=cluster.memory_limit if memory_limit is None else memory_limit,
        trace=None,
        progress=progress,
        notice=notice,
        alpha=alpha,
        beta=beta,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        adjoint_a=adjoint_a,
        adjoint_b=adjoint_b,
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
    plan = replace(result.plan, bytes_read=cluster.predicted_bytes_read)
    return replace(result, plan=plan, peak_host_bytes=cluster.peak_host)
