"""Nearest neighbours: the best k rows of B for each row of A, without the matrix of all scores."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..engine.ports import Device
from ..planning.plan import Plan
from ..run.elsewhere import current, limit_of
from ..run.executor import open_local
from ..run.observer import Observer
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.write import rows as stored
from ..support.errors import InputError
from ..support.recording import recorded
from ..support.shown import Shown
from ..support.trace import Trace
from .asked import Asked
from .compared import try_output
from .graph import graph_rows
from .ranking import Ranking
from .ranking_elsewhere import RankingElsewhere
from .rescore import Array, Metric


@dataclass(frozen=True, repr=False)
class Neighbours(Shown):
    """The nearest neighbours of each row. Sizes in bytes, times in seconds."""

    indices: Any = field(repr=False)
    """m×k, int64: rows of B, best first; −1 where a row has no more neighbours. A NumPy array, or the Zarr
    array where there is an output."""
    values: Any = field(repr=False)
    """m×k: their dot products, cosines or squared distances; NaN where there is no neighbour."""
    metric: str
    k: int
    shape: tuple[int, int]
    """Rows of A, and of B."""
    device: str
    kernel: str
    seconds: float
    bytes_read: int
    bytes_written: int
    peak_host_bytes: int
    """The largest resident set the process has had."""
    peak_device_bytes: int
    """The most memory of the device that was held; 0 where it computes in host memory."""
    rows_resumed: int
    """Rows that an earlier run has finished."""
    rows_close: int
    """Rows, of those that this run made, whose last neighbour may be another one: the scores of rows that
    were left out differ from its score by no more than the rounding of the product."""
    verified: bool | None
    """True if some rows were checked with all their scores; None if that was not asked for."""
    plan: Plan = field(repr=False)

    def csr(self) -> tuple[Array, Array, Array]:
        """(data, indices, indptr) of the m×n graph of neighbours, which `scipy.sparse.csr_matrix` takes with
        `shape`. Data are distances, 1 − cosine or squared, or dot products. Columns are in ascending order.
        """
        data, indices, counts = graph_rows(np.asarray(self.indices), np.asarray(self.values), self.metric)
        return data, indices, np.concatenate([[0], np.cumsum(counts)])

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without the arrays."""
        out = {key: value for key, value in self.__dict__.items() if key not in ("indices", "values", "plan")}
        return {**out, "shape": list(self.shape), "plan": self.plan.to_dict()}


def topk(
    a: Any,
    b: Any = None,
    out: str | os.PathLike[str] | None = None,
    *,
    k: int = 10,
    metric: Metric = "cosine",
    include_self: bool = False,
    graph: bool = False,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Neighbours:
    """The k nearest rows of B (n×d) for each row of A (m×d), exactly, without storing the m×n scores.

    All scores are computed as a product in float32 (float64 for float64, and where float32 has too few
    digits); the scores of each row's best candidates are then computed in float64, and decide. Equal scores
    are in the order of their rows. A row that holds NaN or infinite elements has no neighbours, and is none.

    Parameters
    ----------
    a : str, os.PathLike, zarr.Array or array-like
        The rows whose neighbours are wanted: real numbers or integers.
    b : str, os.PathLike, zarr.Array or array-like, optional
        The rows among which they are sought. By default those of `a`.
    out : str or os.PathLike, optional
        A local folder, or an address in an object store, for a Zarr group with the arrays `indices` and
        `values`. By default NumPy arrays are returned.
    k : int, default 10
        Neighbours of each row.
    metric : {"cosine", "dot", "sqeuclidean"}, default "cosine"
        Largest cosine or dot product, or smallest squared Euclidean distance. The cosine with a row of zeros
        is 0.
    include_self : bool, default False
        Where `b` is left out: whether a row counts among its own neighbours. With `b`, all its rows count.
    graph : bool, default False
        Write the graph of neighbours to the output, too: a sparse m×n matrix in the group `graph`, in the
        layout in which anndata stores `obsp`. Its data are distances, 1 − cosine or squared, or dot products.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident: `"8GiB"`, or bytes. By default 60 % of what the
        process may use.
    device : str or Device, default "auto"
        The device or devices, as of `multiply`. The CPU and one GPU reduce products where they compute
        them; several GPUs, and one for k past 113, send them to the host.
    device_memory_limit : str or int, optional
        Most memory of each device, in bytes or as `"8GiB"`. By default 90 % of what is free.
    verify : bool, default False
        Check eight rows of A, chosen at random, before the result is finished: all their scores are computed
        once more in float64, in one more pass over B, and none may be better than those that were found. With
        `resume`, a result that is finished is checked, too.
    force : bool, default False
        Replace a result that exists. In a folder it is kept until the new one is finished; in an object store
        it is removed first.
    resume : bool, default False
        Continue an interrupted run of the same problem; where it is finished already, do nothing.
    progress : callable, optional
        Called with (fraction, plan, trace) as the work goes on.
    notice : callable, optional
        Called with sentences for the user.

    Returns
    -------
    Neighbours
        `indices` and `values`, m×k, best first; and what was done.

    Raises
    ------
    InputError, BudgetError
        Before anything is written: the request cannot be carried out, or not within a memory limit.
    StoreError, RangeError, DeviceError, VerificationError
        While running. `resume` continues from the last rows that were finished.
    """
    refuse_event_loop()
    started = time.perf_counter()
    if resume and out is None:
        raise InputError("only a result that is stored can be continued; leave out resume=True")
    if graph and out is None:
        raise InputError("graph=True needs an output; without one, csr() of the result makes the graph")
    asked = Asked(a, b, k, metric, include_self, graph)
    place = None if out is None else stored.check(out, [a, asked.right], force, resume)
    observer = Observer(progress, notice)
    limits = device, memory_limit, device_memory_limit
    ranking = _ranking(asked, out, place, limits, observer, verify)
    with closing(ranking):
        try_output(place, resume)
        ranking.measure()
        arrays = ranking.carry_out(place, resume)
    observer.all_done(ranking.plan, ranking.trace)
    peak_host_bytes, peak_device_bytes = ranking.peaks()
    return recorded(
        Neighbours(
            indices=arrays["indices"],
            values=arrays["values"],
            metric=metric,
            k=k,
            shape=(asked.m, asked.n),
            device=ranking.job.executor.hardware.name,
            kernel=ranking.job.operation.arithmetic.kernel,
            seconds=time.perf_counter() - started,
            bytes_read=ranking.trace.bytes["read"],
            bytes_written=ranking.trace.bytes["write"],
            peak_host_bytes=peak_host_bytes,
            peak_device_bytes=peak_device_bytes,
            rows_resumed=ranking.rows_resumed,
            rows_close=ranking.rows_close,
            verified=ranking.verified,
            plan=ranking.plan,
        )
    )


def _ranking(
    asked: Asked,
    out: Any,
    place: stored.GroupPlace | None,
    limits: tuple[str | Device, str | int | None, str | int | None],
    observer: Observer,
    verify: bool,
) -> Ranking:
    """What carries out a search, here or elsewhere. limits: device, memory limit and device memory limit.
    Raises InputError, BudgetError and DeviceError."""
    elsewhere = current()
    if elsewhere is None:
        executor = open_local(limits[0], limits[1], observer.note)
        return Ranking(asked, asked.request(executor.hardware, *limits, place), executor, observer, verify)
    inputs = {"a": asked.left} | ({} if asked.same else {"b": asked.right})
    pool = elsewhere.pool(inputs, ("out", out), limits[0], limit_of(limits[1]), resumes=True)
    asked.cores = pool.threads
    request = asked.request(pool.hardware, *limits, place)
    return RankingElsewhere(asked, request, pool, partial(elsewhere.beside, limits[1]), observer, verify)


def planned(
    a: Any,
    b: Any,
    k: int,
    metric: Metric,
    include_self: bool,
    graph: bool,
    memory_limit: str | int | None,
    device: str,
    device_memory_limit: str | int | None,
    verify: bool,
    notice: Callable[[str], None] | None = None,
) -> Plan:
    """What `topk` with an output and these arguments would do. Reads nothing. Raises InputError and
    BudgetError."""
    asked, observer = Asked(a, b, k, metric, include_self, graph), Observer(notice=notice)
    executor = open_local(device, memory_limit, observer.note)
    request = asked.request(executor.hardware, device, memory_limit, device_memory_limit, None, writes=False)
    return Ranking(asked, request, executor, observer, verify).planned()
