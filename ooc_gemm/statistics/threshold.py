"""The pairs of rows whose scores reach a value, as a sparse matrix, without the matrix of all scores."""

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
from ..run.scalars import real
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.write import rows as stored
from ..support.errors import InputError
from ..support.recording import recorded
from ..support.shown import Shown
from ..support.trace import Trace
from .compared import try_output
from .rescore import Array
from .selection import Pairs, Score, Selection
from .selection_elsewhere import SelectionElsewhere


@dataclass(frozen=True, repr=False)
class Threshold(Shown):
    """The pairs of rows that were found: an m×n matrix in compressed sparse rows. Sizes in bytes, times in
    seconds."""

    data: Any = field(repr=False)
    """Scores of the pairs, row by row, and in ascending order of columns. A NumPy array, or the Zarr array
    where there is an output; so are the next two."""
    indices: Any = field(repr=False)
    """The column of each, int64."""
    indptr: Any = field(repr=False)
    """Where each row begins, and the last one ends, int64 (m + 1)."""
    metric: str
    least: float
    shape: tuple[int, int]
    """Rows of A, and of B."""
    count: int
    """Number of pairs."""
    device: str
    kernel: str
    seconds: float
    bytes_read: int
    bytes_written: int
    """Bytes of the result, and of the rows of which it is put together at the end."""
    peak_host_bytes: int
    """The largest resident set the process has had."""
    rows_resumed: int
    """Rows that an earlier run has finished."""
    verified: bool | None
    """True if some rows were checked with all their scores; None if that was not asked for."""
    plan: Plan = field(repr=False)

    def csr(self) -> tuple[Array, Array, Array]:
        """(data, indices, indptr) in memory, which `scipy.sparse.csr_matrix` takes with `shape`."""
        data, indices, ends = (np.asarray(x[:]) for x in (self.data, self.indices, self.indptr))
        return data, indices, ends

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without the arrays."""
        left_out = "data", "indices", "indptr", "plan"
        out = {key: value for key, value in self.__dict__.items() if key not in left_out}
        return {**out, "shape": list(self.shape), "plan": self.plan.to_dict()}


def threshold(
    a: Any,
    b: Any = None,
    out: str | os.PathLike[str] | None = None,
    *,
    least: float,
    metric: Score = "cosine",
    absolute: bool = False,
    include_self: bool = False,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Threshold:
    """The pairs of rows of A (m×d) and B (n×d) whose scores reach a value, as a sparse m×n matrix.

    All m×n scores are computed as a product, but only those that reach the value are kept; C is never
    stored, nor held beyond a block. Scores are computed, and compared, in float32, or in float64 where
    float32 does not hold the type of an array, or the numbers by which its rows are divided; dot products of
    integers exactly. A score that is NaN reaches no value.
    For dot products, rows of float64 that are very large or small are multiplied by powers of two on the way,
    which a pass over the array finds; what is too large for float64 counts as infinite.

    Parameters
    ----------
    a : str, os.PathLike, zarr.Array or array-like
        Rows: real numbers or integers.
    b : str, os.PathLike, zarr.Array or array-like, optional
        The rows with which each of `a` is compared. By default those of `a`; of each pair both orders are
        kept.
    out : str or os.PathLike, optional
        A local folder, or an address in an object store, for a Zarr group in the layout in which anndata
        stores sparse matrices: the arrays `data`, `indices` and `indptr`. By default NumPy arrays are
        returned, which may take an eighth of the memory limit; more is an error.
    least : float
        The value: scores of at least this are kept.
    metric : {"cosine", "correlation", "dot"}, default "cosine"
        The score of two rows: the cosine of their angle (0 with a row of zeros), their correlation
        coefficient (NaN with a row that is constant), or their dot product.
    absolute : bool, default False
        Keep scores whose absolute value is at least `least`.
    include_self : bool, default False
        Where `b` is left out: keep the score of a row with itself, too.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident: `"8GiB"`, or bytes. By default 60 % of what the
        process may use. Elements that are found, and do not fit, go to temporary files beside the output, or
        in the system's folder for them where the output is in an object store.
    device : str or Device, default "auto"
        The device or devices, as of `multiply`. Only the CPU reduces products where it computes them; others
        send them to the host.
    device_memory_limit : str or int, optional
        Most memory of each device, in bytes or as `"8GiB"`. By default 90 % of what is free.
    verify : bool, default False
        Check eight rows of A, chosen at random, before the result is finished: all their scores are computed
        once more in float64, in one more pass over B. Those that are kept must agree to rounding, and none
        that reaches the value may be missing. With `resume`, a result that is finished is checked, too.
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
    Threshold
        The sparse matrix, and what was done.

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
    pairs = Pairs(a, b, metric, real("least", least), absolute, include_self, verify)
    place = None if out is None else stored.check(out, [a, pairs.right], force, resume)
    limits = device, memory_limit, device_memory_limit
    observer = Observer(progress, notice)
    selection = _selection(pairs, out, place, limits, observer)
    with closing(selection):
        try_output(place, resume)
        selection.measure()
        arrays = selection.carry_out(place, resume)
    observer.all_done(selection.plan, selection.trace)
    return recorded(
        Threshold(
            data=arrays["data"],
            indices=arrays["indices"],
            indptr=arrays["indptr"],
            metric=metric,
            least=pairs.least,
            shape=(pairs.m, pairs.n),
            count=int(arrays["data"].shape[0]),
            device=selection.job.executor.hardware.name,
            kernel=selection.job.operation.arithmetic.kernel,
            seconds=time.perf_counter() - started,
            bytes_read=selection.bytes_passed + selection.trace.bytes["read"],
            bytes_written=selection.trace.bytes["write"],
            peak_host_bytes=selection.peaks(),
            rows_resumed=selection.rows_resumed,
            verified=selection.verified,
            plan=selection.plan,
        )
    )


def _selection(
    pairs: Pairs,
    out: Any,
    place: stored.GroupPlace | None,
    limits: tuple[str | Device, str | int | None, str | int | None],
    observer: Observer,
) -> Selection:
    """What carries out a search, here or elsewhere. limits: device, memory limit and device memory limit.
    Raises InputError, BudgetError and DeviceError."""
    elsewhere = current()
    if elsewhere is None:
        executor = open_local(limits[0], limits[1], observer.note)
        return Selection(pairs, pairs.request(executor.hardware, *limits, place), executor, observer)
    inputs = {"a": pairs.left} | ({} if pairs.same else {"b": pairs.right})
    pool = elsewhere.pool(inputs, ("out", out), limits[0], limit_of(limits[1]), resumes=True)
    request = pairs.request(pool.hardware, *limits, place)
    return SelectionElsewhere(pairs, request, pool, partial(elsewhere.beside, limits[1]), observer)


def planned(
    a: Any,
    b: Any,
    least: float,
    metric: Score,
    absolute: bool,
    include_self: bool,
    memory_limit: str | int | None,
    device: str,
    device_memory_limit: str | int | None,
    verify: bool,
    notice: Callable[[str], None] | None = None,
) -> Plan:
    """What `threshold` with an output and these arguments would do; nobody knows how much it would write.
    Reads nothing. Raises InputError and BudgetError."""
    pairs = Pairs(a, b, metric, real("least", least), absolute, include_self, verify)
    observer = Observer(notice=notice)
    executor = open_local(device, memory_limit, observer.note)
    request = pairs.request(executor.hardware, device, memory_limit, device_memory_limit, None, writes=False)
    return Selection(pairs, request, executor, observer).planned()
