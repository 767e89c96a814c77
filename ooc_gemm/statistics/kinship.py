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
from typing import Any, Literal

import numpy as np

from ..devices.cpu.blas import one_blas_thread
from ..engine.ports import Array, Device
from ..engine.transform import missing_of
from ..planning.plan import Plan
from ..run.elsewhere import only_here
from ..run.observer import Observer
from ..run.prepare import prepare
from ..run.request import Operand, Request, gram_operands
from ..run.retry import carry_out, result_of
from ..run.stream import Needs, Panels, Range
from ..storage.read.source import Opened
from ..support.errors import InputError
from ..support.intervals import ranges
from ..support.memory import memory_limit_of
from ..support.trace import Trace
from .genotypes import STRIP, THREAD_BYTES, Counts, Lacking, pair_bytes
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
        the process may use. If a genotype is missing, 8 bytes of it are taken for each pair of samples.
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
    only_here("king")
    data, axis = open_genotypes(g, samples)
    opened = data.opened.transpose() if axis == 0 else data.opened
    _check(opened, out_dtype)
    request = Request(
        Operand(data.opened),
        Operand(data.opened),
        c,
        memory_limit=memory_limit_of(memory_limit),
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
    done = _kinship(request, opened, missing, axis == 1, Observer(progress, notice))
    return replace(done, samples=names.written())


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
    a, b = gram_operands(Operand(data.opened, table=_tables(opened.dtype, missing)[0]), axis == 1)
    dtype = out_dtype or ("float32" if opened.shape[0] <= EXACT else "float64")
    request = Request(a, b, symmetric=True, writes=False, out_dtype=dtype, **options)
    return _plan(request, *opened.shape, Observer(notice=notice))


def _plan(request: Request, variants: int, samples: int, observer: Observer | None = None) -> Plan:
    """What the last product would take. observer: is told of rates that are measured for it; without one they
    are not."""
    nothing = _Robust(variants, np.zeros(samples, np.int64))
    return prepare(replace(request, finish=nothing).check(), observer=observer).plan


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


@dataclass(frozen=True)
class _Found:
    """What a pass over the genotypes has found."""

    hets: Array
    """Heterozygous variants of each sample."""
    lacking: Array
    """Variants that each sample lacks."""
    both: Array | None
    """Variants that both of two samples have, samples × samples; None where nothing can be missing."""
    bytes_read: int


def _kinship(
    request: Request, opened: Opened, missing: float | None, rows: bool, observer: Observer
) -> Kinship:
    """request: of the last product, without tables. rows: whether variants are rows of the array."""
    variants, samples = opened.shape
    y, het, there = _tables(opened.dtype, missing)
    array = request.a.array
    a, b = gram_operands(Operand(array, table=y), rows)
    request = replace(request, a=a, b=b)
    if not request.resume:
        _plan(request, variants, samples)
    found = _look_through(opened, int(request.memory_limit or 0), missing)
    gone, read, finish = int(found.lacking.sum()), found.bytes_read, _Robust(variants, found.hets)
    if gone:
        assert found.both is not None, "there is a number for what is missing"
        hets = replace(
            request,
            a=Operand(array, transpose=rows, table=het),
            b=Operand(array, transpose=not rows, table=there),
            c=None,
            dimensions=None,
            out_dtype="int32",
            chunks=None,
            shards=None,
            compressor=None,
            resume=False,
            symmetric=False,
            finish=_Held(found.both.nbytes),
        )
        product = result_of(carry_out(hets, Observer(None, observer.notice)))
        finish = _Robust(variants, found.hets, _combined(found.both, product.array))
        read += product.bytes_read
        del product
    done = result_of(carry_out(replace(request, finish=finish), observer))
    return Kinship(**dict(done.__dict__) | {"bytes_passed": read}, variants=variants, missing=gone)


def _tables(dtype: np.dtype[Any], missing: float | None) -> tuple[Array, Array, Array]:
    """What genotypes of a type become: y, het and there of the formulas above."""
    values = np.arange(256, dtype=np.uint8).view(dtype)
    gone = missing_of(values, missing)
    there = np.isin(values, (0, 1, 2)) & (True if gone is None else ~gone)
    y = np.where(there, values.astype(np.int16) - 1, 0)
    return y.astype(np.int8), ((values == 1) & there).astype(np.int8), there.astype(np.int8)


def _look_through(opened: Opened, limit: int, missing: float | None) -> _Found:
    """Count what is heterozygous and what is missing. Raises InputError where there are other genotypes than
    0, 1 and 2, and BudgetError and StoreError."""
    variants, samples = opened.shape
    hets, lacking = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
    counts = None if missing is None else Counts(samples)
    fixed = 16 * samples + (pair_bytes(samples) if counts else 0)
    panels = Panels(opened, opened.dtype, limit, "look through", Needs(fixed, THREAD_BYTES + 32 * samples))

    def work(panel: Array, lines: Range) -> tuple[Array, Array]:
        het, gone = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
        for start, stop in ranges(len(panel), max(1, STRIP // max(1, samples))):
            strip = panel[start:stop]
            mask, one = missing_of(strip, missing), strip == 1
            known = one | (strip == 0)
            known |= strip == 2
            if mask is not None:
                one &= ~mask
                known |= mask
                gone += Lacking.of(mask, strip.shape).count(counts)
            if not known.all():
                variant = int(np.flatnonzero(~known.all(axis=1))[0])
                raise InputError(
                    f"{opened.name} holds {strip[variant][~known[variant]][0]} for variant "
                    f"{lines[0] + start + variant}; give 0, 1 or 2 alleles, and say which number is missing"
                )
            het += np.count_nonzero(one, axis=0)
        return het, gone

    def add(found: tuple[Array, Array]) -> None:
        np.add(hets, found[0], out=hets)
        np.add(lacking, found[1], out=lacking)

    with one_blas_thread:
        panels.each(work, add)
    both = counts.have_both(variants, lacking) if counts and lacking.any() else None
    return _Found(hets, lacking, both, panels.bytes_read)


def _combined(both: Array, hets: Array) -> Array:
    """D + 2·y·yᵀ of different samples above the diagonal, and min(H, Hᵀ) on and below it, in the memory of
    there·thereᵀ. hets: H."""
    count = len(both)
    for start, stop in ranges(count, max(1, PART // max(1, count))):
        lines, turned = hets[start:stop], hets[:, start:stop].T
        above = np.arange(count) > np.arange(start, stop)[:, None]
        both[start:stop] = np.where(above, 2 * both[start:stop] - lines - turned, np.minimum(lines, turned))
    return both


class _Held:
    """Changes nothing: the plan counts memory that is held during a product."""

    name = "king counts"

    def __init__(self, nbytes: int):
        self.nbytes = nbytes

    def apply(self, values: Array, row: int, col: int) -> None:
        """Changes nothing."""


class _Robust:
    """Makes kinship coefficients of y·yᵀ."""

    name = "king robust"

    def __init__(self, variants: int, hets: Array, table: Array | None = None):
        """variants: their number. hets: heterozygous variants of each sample, which are all that counts where
        nothing is missing. table: as of `_combined`, where something is."""
        self._variants, self._hets, self._table = variants, hets, table
        self.nbytes = PARTS_BYTES + hets.nbytes + (0 if table is None else table.nbytes)

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
