"""Kinship coefficients of samples by KING-robust, from products of small integers, which are exact.

With the variants that samples i and j both have, and N counts of them (Manichaikul et al., Bioinformatics 26
(2010), eq. 11, as plink2 has it):

    φ[i, j] = 1/2 − (4·N(AA, aa) + N(Aa, AA or aa) + N(AA or aa, Aa)) / (4·min(H[i, j], H[j, i]))

H[i, j] counts those at which i is heterozygous. The numerator is D[i, j], the sum of (x[i, v] − x[j, v])²
over these variants. With y = x − 1, which is 0 for a missing genotype, there = 1 for one that is there, and
het = 1 for a heterozygous one,

    H = het·thereᵀ        D = 2·there·thereᵀ − H − Hᵀ − 2·y·yᵀ

One pass counts what is missing, and there·thereᵀ with it. H is a product, and held in memory with what the
pass has counted. The last product, y·yᵀ, becomes C. Where nothing is missing, H and there·thereᵀ are of rank
one, and y·yᵀ is the only product.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ..engine.ports import Array, Device
from ..planning.plan import Plan
from ..run.elsewhere import current, limit_of
from ..run.observer import Observer
from ..run.prepare import prepare
from ..run.request import Operand, Request, gram_operands
from ..run.retry import carry_out, result_of
from ..run.scalars import real
from ..storage.read.source import Opened
from ..storage.write.opening import try_place
from ..support.errors import InputError, Refusals
from ..support.intervals import ranges
from ..support.memory import STEP, Growth
from ..support.meter import Unfinished
from ..support.trace import Trace
from .genotypes import have_both_of, pair_bytes
from .heterozygous import Asked, check, count, count_elsewhere, tables
from .samples import Labelled, labelled, open_genotypes

NAME = "stat_king_kinship"
"""The matrix in a group."""
PART = 1 << 14
"""Elements of C that are worked on together by one thread."""
PARTS_BYTES = 8 << 20
"""What all threads allocate for that."""
EXACT = 1 << 24
"""Variants up to which sums of float32 are exact: no partial sum of products of −1, 0 and 1 is larger."""


@dataclass(frozen=True, repr=False)
class Kinship(Labelled):
    """What `king` did and found. `array` is the matrix, a zarr.Array where it was stored."""

    variants: int = 0
    """Number of variants."""
    missing: int = 0
    """Number of missing genotypes."""


def king(
    g: Any,
    c: Any = None,
    *,
    samples: Literal[0, 1] | None = None,
    missing: float | None = -1,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Kinship:
    """The KING-robust kinship coefficients of samples (samples × samples), as `plink2 --make-king` has them.

    Parameters
    ----------
    g : str, os.PathLike, zarr.Array, zarr.Group, xarray.Dataset or array-like
        Genotypes: numbers of copies of an allele, 0, 1 or 2, of variants × samples, as integers of 8 bits. Or
        calls in the layout of VCF Zarr, as of `grm`.
    c : str, os.PathLike or zarr.Array, optional
        Where the matrix goes, as of `grm`; in a group it is `stat_king_kinship`. By default it is returned as
        `array` of the result.
    samples : {0, 1}, optional
        The axis of people, as of `grm`.
    missing : float, optional
        Genotypes that are equal to this number are missing; None: no genotype is. By default −1.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident, in bytes or as `"8GiB"`. By default 60 % of what
        the process may use. Unless `missing` is None, it has to have room for 8 bytes for each pair of
        samples.
    device : str or Device, default "auto"
        The device, as of `multiply`.
    out_dtype : {"float32", "float64"}, optional
        Type of the matrix. By default float32, or float64 with more than 2²⁴ variants, whose counts float32
        does not hold.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of a new C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    verify : bool, default False
        Check every block of products before it is stored, and compute what fails once more.
    force : bool, default False
        Replace a C that exists.
    resume : bool, default False
        Continue an interrupted run of the same problem, as of `multiply`. What is held in memory is made
        again.
    progress : callable, optional
        Called with (fraction, plan, trace) while the last product is computed.
    notice : callable, optional
        Called with sentences for the user, as of `multiply`.

    Returns
    -------
    Kinship
        What was done, with the `array`, the number of `variants`, and the names of `samples`. Two samples of
        which one has no heterozygous variant that the other has, too, have −∞ or NaN. The diagonal is 1/2.

    Raises
    ------
    InputError, BudgetError
        Before anything is written: the request cannot be carried out, or not within the memory limit.
    StoreError, DeviceError, VerificationError
        While running, as of `multiply`.
    """
    data, axis = open_genotypes(g, samples)
    opened = data.opened.transpose() if axis == 0 else data.opened
    _check(opened, out_dtype)
    missing = None if missing is None else real("missing", missing)
    request = Request(
        Operand(data.opened),
        Operand(data.opened),
        c,
        memory_limit=memory_limit,
        device=device,
        out_dtype=out_dtype or ("float32" if opened.shape[0] <= EXACT else "float64"),
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        verify=verify,
        force=force,
        resume=resume,
        symmetric=True,
    )
    request, names = labelled(request, data, opened.shape[1], NAME)
    told = Unfinished(progress)
    done = _kinship(request, opened, missing, axis, Observer(told, notice))
    done = replace(done, samples=names.written())
    told.finish()
    return done


def planned(
    g: Any,
    samples: Literal[0, 1] | None,
    missing: float | None,
    notice: Callable[[str], None],
    out_dtype: Any,
    **options: Any,
) -> Plan:
    """What `king` with these arguments would do in its last product. Reads no genotypes.

    options: of the request of its product. Raises InputError and BudgetError.
    """
    data, axis = open_genotypes(g, samples)
    opened = data.opened.transpose() if axis == 0 else data.opened
    _check(opened, out_dtype)
    missing = None if missing is None else real("missing", missing)
    a, b = gram_operands(Operand(data.opened, table=tables(opened.dtype, missing)[0]), axis == 1)
    dtype = out_dtype or ("float32" if opened.shape[0] <= EXACT else "float64")
    request = Request(a, b, symmetric=True, writes=False, out_dtype=dtype, **options)
    return _plan(request, opened, missing, Observer(notice=notice))


def _plan(request: Request, opened: Opened, missing: float | None, observer: Observer | None = None) -> Plan:
    """What the last product would take. Raises BudgetError, with a limit that does for all steps, where one
    of them does not fit: unless `missing` is None, genotypes may be missing.

    opened: variants × samples. observer: is told of rates that are measured; without one they are not. Where
    the baseline is measured, it may be one step larger after the pass.
    """
    (variants, samples), refusals = opened.shape, Refusals()
    held = 0 if missing is None else pair_bytes(samples) + STEP
    finish = _Robust(variants, np.zeros(samples, np.int64), held=held)
    with refusals.noted():
        plan = prepare(replace(request, finish=finish).check(), observer=observer).plan
    asked = Asked(missing, limit_of(request.memory_limit), request.device, request.verify)
    check(opened, asked if missing is None else replace(asked, extra=STEP), refusals)
    refusals.end()
    return plan


def _check(opened: Opened, out_dtype: Any) -> None:
    """Raise InputError where no kinship can be computed of the genotypes, whatever they are."""
    if opened.dtype.kind not in "iu" or opened.dtype.itemsize != 1:
        raise InputError(
            f"{opened.name} holds {opened.dtype}, and kinship is computed of genotypes of 0, 1 or 2 alleles; "
            "give integers of 8 bits"
        )
    if not opened.shape[0]:
        raise InputError(f"{opened.name} has no variants; give genotypes of some")
    if out_dtype is None:
        return
    try:
        dtype: np.dtype[Any] = np.dtype(out_dtype)
    except TypeError as error:
        raise InputError(f"out_dtype is {out_dtype!r}; give float32 or float64") from error
    if dtype.char not in "fd" or (dtype.char == "f" and opened.shape[0] > EXACT):
        raise InputError(f"out_dtype is {dtype}, which does not hold the counts; give float64")


def _kinship(
    request: Request, opened: Opened, missing: float | None, axis: int, observer: Observer
) -> Kinship:
    """request: of the last product, without tables. opened: variants × samples. axis: that of samples in the
    array."""
    variants = opened.shape[0]
    limit, elsewhere = limit_of(request.memory_limit), current()
    asked = Asked(missing, limit, request.device, request.verify)
    pool = elsewhere and elsewhere.pool(
        {"g": request.a.array}, ("C", request.c), request.device, limit, resumes=True
    )
    a, b = gram_operands(Operand(request.a.array, table=tables(opened.dtype, missing)[0]), axis == 1)
    if not request.resume:
        # On a cluster, processes say themselves whether they can count.
        _plan(replace(request, a=a, b=b, memory_limit=limit), opened, None if pool else missing)
        try_place(request.c)
    growth = Growth()
    if elsewhere and pool:
        found = count_elsewhere(pool, partial(elsewhere.beside, request.memory_limit), opened, axis, asked)
    else:
        found = count(opened, asked, observer)
    gone, finish = int(found.lacking.sum()), _Robust(variants, found.hets)
    if found.lack_both is not None and found.product is not None:
        both = have_both_of(found.lack_both, variants, found.lacking)
        there = 0 if elsewhere or not isinstance(request.device, str) else growth.of(both.nbytes)
        held = elsewhere.beside(request.memory_limit, both.nbytes) if elsewhere else -there
        finish = _Robust(variants, found.hets, _combined(both, found.product), held)
    read = found.bytes_read
    del found
    done = result_of(carry_out(replace(request, a=a, b=b, memory_limit=limit, finish=finish), observer))
    return Kinship(**dict(done.__dict__) | {"bytes_passed": read}, variants=variants, missing=gone)


def _combined(both: Array, hets: Array) -> Array:
    """D + 2·y·yᵀ of different samples above the diagonal, and min(H, Hᵀ) on and below it, in the memory of
    there·thereᵀ. hets: H."""
    count = len(both)
    for start, stop in ranges(count, max(1, PART // max(1, count))):
        lines, turned = hets[start:stop], hets[:, start:stop].T
        above = np.arange(count) > np.arange(start, stop)[:, None]
        both[start:stop] = np.where(above, 2 * both[start:stop] - lines - turned, np.minimum(lines, turned))
    return both


class _Robust:
    """Makes kinship coefficients of y·yᵀ."""

    name = "king robust"

    def __init__(self, variants: int, hets: Array, table: Array | None = None, held: int = 0):
        """variants: their number. hets: heterozygous variants of each sample, which are all that counts where
        nothing is missing. table: as of `_combined`, where something is. held: other bytes that count in
        the limit, such as those of another process in that of each one that computes; negative where the
        baseline has some of the table."""
        self._variants, self._hets, self._table = variants, hets, table
        self.nbytes = PARTS_BYTES + hets.nbytes + (0 if table is None else table.nbytes) + held

    def apply(self, values: Array, row: int, col: int) -> None:
        """Change a part of C in place."""
        cols = slice(col, col + values.shape[1])
        for start, stop in ranges(len(values), max(1, PART // max(1, values.shape[1]))):
            rows, part = slice(row + start, row + stop), values[start:stop]
            least, distance = self._counts(rows, cols)
            with np.errstate(all="ignore"):
                product = np.rint(part, dtype=np.float64)  # a device may have rounded
                part[...] = 0.5 - (distance - 2 * product) / (4 * least)
            same = np.arange(rows.start, rows.stop)[:, None] == np.arange(col, cols.stop)
            part[same] = 0.5

    def _counts(self, rows: slice, cols: slice) -> tuple[Array, Array]:
        """min(H, Hᵀ), and D + 2·y·yᵀ where samples differ, of a part of C."""
        if self._table is None:
            one, other = self._hets[rows, None], self._hets[cols]
            return np.minimum(one, other).astype(np.float64), 2 * self._variants - one - other
        here, there = self._table[rows, cols], self._table[cols, rows].T
        above = np.arange(rows.start, rows.stop)[:, None] < np.arange(cols.start, cols.stop)
        return np.where(above, there, here).astype(np.float64), np.where(above, here, there)
