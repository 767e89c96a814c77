"""Genetic relationship matrices of samples from their genotypes.

With p the frequency of the counted allele of variant v, and x the number of its copies that sample i has, 0
to 2:

    gcta       G[i, j] = mean over v of (x[i, v] − 2p)(x[j, v] − 2p)/(2p(1 − p))   Yang et al., AJHG 88 (2011)
    cov        G[i, j] = mean over v of (x[i, v] − 2p)(x[j, v] − 2p)
    vanraden   G[i, j] = Σ over v of (x[i, v] − 2p)(x[j, v] − 2p) / Σ over v of 2p(1 − p)   VanRaden (2008),
    method 1

Standardized genotypes, in which missing ones are 0, are multiplied by their transpose. Where the matrix is
one block of its plan, a panel holds all samples of its variants: it is standardized there, and what is
missing is counted, so that genotypes are read once. Otherwise a pass over the genotypes finds frequencies
first, and counts missing genotypes of pairs of samples; where there are many pairs and a GPU, a product
counts them, of the matrix that is 1 where a genotype is missing.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from ..devices import open_device, within
from ..devices.cpu.device import CPU
from ..devices.several import Several
from ..engine.ports import Array, Device
from ..engine.transform import missing_of
from ..planning.plan import Plan
from ..run.elsewhere import current, limit_of
from ..run.finish import Finish
from ..run.observer import Observer
from ..run.prepare import prepare
from ..run.request import Axis, Operand, Request, gram_operands
from ..run.result import Result
from ..run.retry import carry_out, result_of
from ..run.scalars import choice, real
from ..storage.read.addresses import in_memory
from ..storage.read.dataset import Dataset
from ..storage.read.source import Opened
from ..storage.write.opening import try_place
from ..support.errors import BudgetError, InputError
from ..support.memory import memory_limit_of
from ..support.meter import Unfinished
from ..support.trace import Trace
from .genotypes import MOST_LISTED, Genotypes, have_both, look_through, pair_bytes
from .samples import Labelled, labelled, open_genotypes
from .standardized import LaterQuotients, Quotients, Standardized, factors

Method = Literal["gcta", "cov", "vanraden"]
EXACT = 2**24
"""Variants up to which float32 counts them."""
NEAR = 1.05
"""Genotypes are read once if that takes up to so many times as long by its prediction, which may be as far
off."""
NAME = "stat_genomic_relationship"
"""The matrix in a group, as sgkit calls it."""


@dataclass(frozen=True, repr=False)
class Relationship(Labelled):
    """What `grm` did and found. `array` is the matrix, a zarr.Array where it was stored."""

    variants: int = 0
    """Number of variants that count: those that the filter has left."""
    missing: int = 0
    """Number of missing genotypes of these."""
    frequency: Any = field(default=None, repr=False)
    """Of the counted allele of each variant, also of those that the filter left out; NaN where no sample
    has a genotype. A NumPy array of float64."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without the frequencies and the names of samples."""
        return {key: value for key, value in super().to_dict().items() if key != "frequency"}


def grm(
    g: Any,
    c: Any = None,
    *,
    samples: Literal[0, 1] | None = None,
    missing: float | None = -1,
    method: Method = "gcta",
    meanimpute: bool | None = None,
    maf: float = 0.0,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    verify: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[float, Plan, Trace], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Relationship:
    """The genetic relationship matrix of samples (samples × samples), as `plink2 --make-rel` computes it.

    Parameters
    ----------
    g : str, os.PathLike, zarr.Array, zarr.Group, xarray.Dataset or array-like
        Genotypes: numbers of copies of an allele, 0 to 2, of variants × samples. Or calls, in the layout of
        VCF Zarr, as bio2zarr and sgkit make it: a group or Dataset with `call_genotype`, or that array itself
        (variants × samples × ploidy; −1 for a missing allele, −2 for none). The alleles of a call that are
        not the reference are counted. A call that lacks one is missing, and one of a single allele counts as
        homozygous, as in plink2.
    c : str, os.PathLike or zarr.Array, optional
        Where the matrix goes, as of `multiply`. By default it is returned as `array` of the result. If `g`
        is a group or Dataset with names of samples (`sample_id`), this is the path of a group, in which the
        matrix is `stat_genomic_relationship`, with coordinates `samples_0` and `samples_1`, for xarray.
    samples : {0, 1}, optional
        The axis of people: 1 if `g` is variants × samples, 0 if it is samples × variants. By default what the
        names of its dimensions say, and 1 if they say nothing.
    missing : float, optional
        Genotypes that are equal to this number are missing; NaN: those that are NaN; None: no genotype is. By
        default −1.
    method : {"gcta", "cov", "vanraden"}, default "gcta"
        `"gcta"`: each variant is divided by its standard deviation under Hardy-Weinberg equilibrium, as
        plink2 and GCTA do; `"cov"`: it is not (plink2's modifier `cov`); `"vanraden"`: sums are divided by
        the sum of all 2p(1 − p) (method 1).
    meanimpute : bool, optional
        A missing genotype counts as the mean of its variant. If false, sums over variants are divided by the
        number of variants that both samples have. By default false, but true for `"vanraden"`.
    maf : float, default 0
        Variants are left out whose minor allele is less frequent. A variant without variation that is not
        left out counts in the number of variants, as in plink2.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident, in bytes or as `"8GiB"`. By default 60 % of what
        the process may use. Without `meanimpute`, 4 bytes of it are taken for each pair of samples.
    device : str or Device, default "auto"
        The device or devices, as of `multiply`.
    device_memory_limit : str or int, optional
        Most memory of each device, in bytes or as `"8GiB"`. By default 90 % of what is free.
    out_dtype : dtype, optional
        Type of the matrix, and of the arithmetic. By default float32, or float64 where float32 does not hold
        the type of `g`.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards of a new C. By default chunks near 16 MiB and no shards.
    compressor : str, optional
        `"none"` (the default), `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    verify : bool, default False
        Check every block of C before it is stored, and compute what fails once more.
    force : bool, default False
        Replace a C that exists.
    resume : bool, default False
        Continue an interrupted run of the same problem, as of `multiply`. The first pass is made again.
    progress : callable, optional
        Called with (fraction, plan, trace) while products are computed.
    notice : callable, optional
        Called with sentences for the user, as of `multiply`.

    Returns
    -------
    Relationship
        What was done, with the `array`, the `frequency` of each variant, the number of `variants` that
        count, and the names of `samples`.

    Raises
    ------
    InputError, BudgetError
        Before anything is written: the request cannot be carried out, or not within the memory limit.
    StoreError, DeviceError, VerificationError
        While running, as of `multiply`.
    """
    data, wanted = _asked(g, samples, missing, method, meanimpute, maf)
    request = Request(
        Operand(data.opened),
        Operand(data.opened),
        c,
        memory_limit=memory_limit,
        device=device,
        device_memory_limit=device_memory_limit,
        out_dtype=out_dtype,
        chunks=chunks,
        shards=shards,
        compressor=compressor,
        verify=verify,
        force=force,
        resume=resume,
        symmetric=True,
    )
    told = Unfinished(progress)
    found = _relationship(request, data, wanted, Observer(told, notice))
    told.finish()
    return found


def planned(
    g: Any,
    samples: Literal[0, 1] | None,
    missing: float | None,
    method: Method,
    meanimpute: bool | None,
    maf: float,
    notice: Callable[[str], None],
    **options: Any,
) -> Plan:
    """What `grm` with these arguments would do, after the pass that finds frequencies if there is one. Reads
    no genotypes.

    options: of the request of its product. Raises InputError and BudgetError.
    """
    data, wanted = _asked(g, samples, missing, method, meanimpute, maf)
    request = Request(Operand(data.opened), Operand(data.opened), symmetric=True, writes=False, **options)
    opened = wanted.checked(data.opened)
    observer = Observer(notice=notice)
    if once := _once(request, wanted, opened):
        return prepare(once[1].check(), observer=observer).plan
    plan = _plan(request, wanted, opened, observer)
    notice(f"{opened.name} is read once before that, to find the frequencies of alleles")
    return plan


def _asked(
    g: Any,
    samples: Literal[0, 1] | None,
    missing: float | None,
    method: Method,
    meanimpute: bool | None,
    maf: float,
) -> "tuple[Dataset, _Wanted]":
    """Open the genotypes, and check what the matrix is to be. Raises InputError."""
    choice("method", method, get_args(Method))
    missing, maf = None if missing is None else real("missing", missing), real("maf", maf)
    if not 0 <= maf <= 0.5:
        raise InputError(f"maf is {maf}; give a frequency from 0 to 0.5")
    impute = method == "vanraden" if meanimpute is None else meanimpute
    if method == "vanraden" and not impute:
        raise InputError("method='vanraden' takes the mean for missing genotypes; leave out meanimpute=False")
    data, axis = open_genotypes(g, samples)
    return data, _Wanted(axis, missing, method, impute, maf)


@dataclass(frozen=True)
class _Wanted:
    """What the matrix is to be."""

    samples: int
    missing: float | None
    method: Method
    impute: bool
    least: float

    @property
    def paired(self) -> bool:
        """Whether sums are divided by the number of variants that both of two samples have."""
        return not self.impute and self.missing is not None

    @property
    def name(self) -> str:
        """What is done, for the journal."""
        return f"grm {self.method}{' pairwise' if self.paired else ''}, maf {self.least!r}"

    @property
    def scaled(self) -> bool:
        """Whether variants are divided by their standard deviations."""
        return self.method == "gcta"

    def checked(self, opened: Opened) -> Opened:
        """Return genotypes as variants × samples. Raises InputError where there are none."""
        opened = opened.transpose() if self.samples == 0 else opened
        if opened.dtype.kind == "c":
            raise InputError(f"{opened.name} holds {opened.dtype}; give numbers of alleles from 0 to 2")
        if not opened.shape[0]:
            raise InputError(f"{opened.name} has no variants; give genotypes of some")
        return opened

    def request(self, request: Request, found: Genotypes, count: int) -> Request:
        """The request of the product of genotypes that were looked through. count: number of samples."""
        axis: Axis = "rows" if self.samples == 1 else "columns"
        mean, scale = factors(found.frequency, found.kept, self.scaled)
        operand = Operand(request.a.array, center=(axis, mean), scale=(axis, scale), missing=self.missing)
        finish = Quotients(self.name, self.divisor(found), pair_bytes(count) if self.paired else 0)
        return self._product(request, operand, finish)

    def in_panels(self, request: Request, standardized: Standardized, threads: int) -> Request:
        """The request of the product of genotypes that are standardized in its panels. threads: how many
        processors do that."""
        finish = LaterQuotients(self.name, standardized, self.divisor, standardized.nbytes(threads))
        made = self._product(request, Operand(request.a.array), finish)
        return replace(made, standardizer=standardized)

    def _product(self, request: Request, operand: Operand, finish: Finish) -> Request:
        a, b = gram_operands(operand, self.samples == 1)
        return replace(request, a=a, b=b, finish=finish, elements=f"{self.name}, missing {self.missing}")

    def divisor(self, found: Genotypes) -> float | Array:
        """By what sums are divided. Raises InputError where that is 0."""
        if self.paired:
            return 1.0 if found.pairs is None else found.pairs  # they are not known in a plan
        divisor = float(found.variants)
        if self.method == "vanraden":
            mean = 2 * found.frequency[found.kept]
            divisor = float(np.nansum(mean * (1 - mean / 2)))
        if divisor == 0:
            raise InputError("no variant varies, or maf leaves none; give other genotypes or a smaller maf")
        return divisor


def _relationship(request: Request, data: Dataset, wanted: _Wanted, observer: Observer) -> Relationship:
    limit = limit_of(request.memory_limit)
    opened = wanted.checked(data.opened)
    request, names = labelled(replace(request, memory_limit=limit), data, opened.shape[1], NAME)
    if once := _once(request, wanted, opened):
        standardized, product = once
        done = result_of(carry_out(product, observer))
        found, read = standardized.found(), 0
        if found is None:  # C was the result already
            found = look_through(opened, limit, wanted.missing, wanted.least, False)
            read = found.bytes_read
    else:
        done, found, read = _twice(request, wanted, opened, observer)
    known = dict(done.__dict__) | {"bytes_passed": read}
    count = int(found.missing.sum())
    made = Relationship(**known, variants=found.variants, missing=count, frequency=found.frequency)
    return replace(made, samples=names.written())


def _once(request: Request, wanted: _Wanted, opened: Opened) -> tuple[Standardized, Request] | None:
    """The product for which genotypes are read once, and what standardizes them; None where its plan does not
    fit, takes longer than two passes, or something else computes than devices of this process."""
    if current():
        return None
    device = _device(request)
    if not device.standardizes:
        return None
    standardized = Standardized(opened, wanted.missing, wanted.least, wanted.scaled, wanted.paired)
    members = device.devices if isinstance(device, Several) else [device]
    threads = sum(member.threads for member in members if isinstance(member, CPU))
    product = wanted.in_panels(request, standardized, threads)
    writes = request.writes and (request.c is None or in_memory(request.c))
    try:
        once = prepare(replace(product, c=None, resume=False, writes=writes).check()).plan
    except BudgetError:
        return None
    if once.block_count != 1:
        return None
    with suppress(BudgetError):
        twice = _plan(replace(request, c=None, resume=False, writes=writes), wanted, opened)
        share = opened.matrix.stored_bytes / max(1, twice.bytes_read)
        if once.predicted_seconds > NEAR * (twice.predicted_seconds + share * twice.stage_seconds["read"]):
            return None
    return standardized, product


def _twice(
    request: Request, wanted: _Wanted, opened: Opened, observer: Observer
) -> tuple[Result, Genotypes, int]:
    """Look through the genotypes, and compute their product. Returns also the bytes read by the pass."""
    if not request.resume:
        _plan(request, wanted, opened)
        try_place(request.c)
    most = MOST_LISTED if wanted.paired and _counts_pairs(request, wanted, opened) else None
    limit = int(request.memory_limit or 0)
    found = look_through(opened, limit, wanted.missing, wanted.least, wanted.paired, most=most)
    read = found.bytes_read
    if wanted.paired and found.pairs is None:
        found, moved = _with_pairs(request, wanted, found, opened, observer)
        read += moved
    found.checked(opened.name)
    done = result_of(carry_out(wanted.request(request, found, opened.shape[1]), observer))
    return done, found, read


def _counts_pairs(request: Request, wanted: _Wanted, opened: Opened) -> bool:
    """Whether the device counts pairs faster than they are listed: a GPU multiplies integers of 8 bits at its
    highest rate. If variants are left out, it counts in float32."""
    if current():  # workers make no product that stays in memory
        return False
    dtype = opened.dtype
    if dtype.kind not in "iu" or dtype.itemsize != 1 or (wanted.least > 0 and opened.shape[0] > EXACT):
        return False
    return _device(request).name != "cpu"


def _device(request: Request) -> Device:
    """The device that a request names."""
    device = request.device
    if isinstance(device, str):
        device = open_device(within(device, memory_limit_of(request.memory_limit)))
    return device


def _with_pairs(
    request: Request, wanted: _Wanted, found: Genotypes, opened: Opened, observer: Observer
) -> tuple[Genotypes, int]:
    """Count pairs by the product MᵀM of the 0/1 matrix of missing genotypes. Returns also the bytes read."""
    values = np.arange(256, dtype=np.uint8).view(opened.dtype)
    gone = missing_of(values, wanted.missing)
    assert gone is not None, "some are missing"
    weights = None if found.kept.all() else found.kept.astype(np.float64)
    operand = Operand(request.a.array, table=gone.astype(np.int8), weights=weights)
    a, b = gram_operands(operand, wanted.samples == 1)
    counts = replace(
        request,
        a=a,
        b=b,
        c=None,
        dimensions=None,
        out_dtype="int32" if weights is None else "float32",
        chunks=None,
        shards=None,
        compressor=None,
        force=False,
        resume=False,
    )
    product = result_of(carry_out(counts, Observer(None, observer.notice)))
    pairs = have_both(product.array, found.variants, found.missing)
    return replace(found, pairs=pairs), product.bytes_read


def _plan(request: Request, wanted: _Wanted, opened: Opened, observer: Observer | None = None) -> Plan:
    """What the product would take, whatever the genotypes are. observer: is told of rates that are measured
    for it; without one they are not."""
    variants, samples = opened.shape
    half = np.full(variants, 0.5)
    nothing = Genotypes(half, half > 0, np.zeros(samples, np.int64), None, 0)
    return prepare(wanted.request(request, nothing, samples).check(), observer=observer).plan
