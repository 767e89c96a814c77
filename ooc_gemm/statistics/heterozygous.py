"""What kinship counts of genotypes (`kinship.py`): for each sample the variants that it lacks and those at
which it is heterozygous; and where some are missing, for each pair of samples the variants that both have,
and H. That is one pass over the genotypes and one product, of all variants or of ranges of them: processes
elsewhere are given ranges, and their counts are added up."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..devices.cpu.blas import one_blas_thread
from ..engine.ports import Array, Device
from ..engine.transform import missing_of
from ..run.observer import Observer
from ..run.pool import Here, Pool, parts_of
from ..run.prepare import prepare
from ..run.request import Operand, Request
from ..run.retry import carry_out, result_of
from ..run.stream import Needs, Panels, Range
from ..storage.read.source import Opened
from ..support.errors import InputError, Refusals
from ..support.intervals import ranges
from ..support.memory import Growth
from .genotypes import STRIP, THREAD_BYTES, Counts, Lacking, pair_bytes


@dataclass(frozen=True)
class Asked:
    """What is counted, and with what. Sizes in bytes."""

    missing: float | None
    limit: int
    """The memory limit of the process."""
    device: str | Device
    verify: bool
    extra: int = 0
    """Memory that something else holds."""
    threads: int = 0
    """As of `Needs`."""


@dataclass(frozen=True)
class Counted:
    """What was counted of some variants."""

    hets: Array
    """Heterozygous variants of each sample."""
    lacking: Array
    """Variants that each sample lacks."""
    lack_both: Array | None
    """Variants that two samples lack (`Counts`); None where nothing is missing."""
    product: Array | None
    """H, samples × samples: variants at which the first is heterozygous and that the second has. None where
    nothing is missing: then it is `hets` for each second sample."""
    bytes_read: int


def tables(dtype: np.dtype[Any], missing: float | None) -> tuple[Array, Array, Array]:
    """What genotypes of a type become: y, het and there of the formulas of `kinship.py`."""
    values = np.arange(256, dtype=np.uint8).view(dtype)
    gone = missing_of(values, missing)
    there = np.isin(values, (0, 1, 2)) & (True if gone is None else ~gone)
    y = np.where(there, values.astype(np.int16) - 1, 0)
    return y.astype(np.int8), ((values == 1) & there).astype(np.int8), there.astype(np.int8)


def count(opened: Opened, asked: Asked, observer: Observer, first: int = 0) -> Counted:
    """Count in this process. opened: variants × samples. first: the number of the first variant, for
    messages. Raises InputError where there are other genotypes than 0, 1 and 2, and BudgetError, StoreError
    and DeviceError."""
    samples = opened.shape[1]
    hets, lacking = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
    both, growth = None if asked.missing is None else Counts(samples), Growth()
    panels = _panels(opened, asked)

    def work(panel: Array, lines: Range) -> tuple[Array, Array]:
        het, gone = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
        for start, stop in ranges(len(panel), max(1, STRIP // max(1, samples))):
            strip = panel[start:stop]
            mask, one = missing_of(strip, asked.missing), strip == 1
            known = one | (strip == 0)
            known |= strip == 2
            if mask is not None:
                one &= ~mask
                known |= mask
                gone += Lacking.of(mask, strip.shape).count(both)
            if not known.all():
                variant = int(np.flatnonzero(~known.all(axis=1))[0])
                raise InputError(
                    f"{opened.name} holds {strip[variant][~known[variant]][0]} for variant "
                    f"{first + lines[0] + start + variant}; give 0, 1 or 2 alleles, and say which number is "
                    "missing"
                )
            het += np.count_nonzero(one, axis=0)
        return het, gone

    def add(found: tuple[Array, Array]) -> None:
        np.add(hets, found[0], out=hets)
        np.add(lacking, found[1], out=lacking)

    with one_blas_thread:
        panels.each(work, add)
    if both is None or not lacking.any():
        return Counted(hets, lacking, None, None, panels.bytes_read)
    # On a cluster, the limit of a process is for what it holds beside the baseline.
    counted = growth.of(pair_bytes(samples)) if isinstance(asked.device, str) else 0
    request = _request(opened, replace(asked, extra=asked.extra - counted))
    product = result_of(carry_out(request, Observer(None, observer.notice)))
    return Counted(hets, lacking, both.lack_both, product.array, panels.bytes_read + product.bytes_read)


def check(opened: Opened, asked: Asked, refusals: Refusals) -> None:
    """Note where this process cannot count (`count`). Raises InputError."""
    with refusals.noted():
        _panels(opened, asked)
    if asked.missing is not None:
        with refusals.noted():
            prepare(_request(opened, asked).check())


def _panels(opened: Opened, asked: Asked) -> Panels:
    """The pass over genotypes. Raises BudgetError."""
    samples = opened.shape[1]
    fixed = 16 * samples + asked.extra + (0 if asked.missing is None else pair_bytes(samples))
    needs = Needs(fixed, THREAD_BYTES + 32 * samples, threads=asked.threads)
    return Panels(opened, opened.dtype, asked.limit, "look through", needs)


def _request(opened: Opened, asked: Asked) -> Request:
    """The product H."""
    _, het, there = tables(opened.dtype, asked.missing)
    return Request(
        Operand(opened, transpose=True, table=het),
        Operand(opened, table=there),
        memory_limit=asked.limit,
        device=asked.device,
        out_dtype="int32",
        verify=asked.verify,
        finish=_Held(pair_bytes(opened.shape[1]) + asked.extra),
    )


class _Held:
    """Changes nothing: the plan counts memory that is held during a product."""

    name = "king counts"

    def __init__(self, nbytes: int):
        self.nbytes = nbytes

    def apply(self, values: Array, row: int, col: int) -> None:
        """Changes nothing."""


@dataclass(frozen=True)
class Shared:
    """What all processes are given."""

    samples: int
    """The axis of samples of the array."""
    asked: Asked


def _part(here: Here, shared: Shared, variants: Range) -> tuple[Opened, Asked]:
    """Some variants × samples, and what is counted of them in this process."""
    g = here.inputs["g"]
    g = g.transpose() if shared.samples == 0 else g
    asked = replace(shared.asked, limit=here.memory_limit, device=here.device, threads=here.threads)
    return g.window(variants, (0, g.shape[1])), asked


def fit(here: Here, shared: Shared, variants: Range) -> None:
    """Raise BudgetError or InputError where a process cannot count of some variants."""
    refusals = Refusals()
    check(*_part(here, shared, variants), refusals)
    refusals.end()


def counted(here: Here, shared: Shared, variants: Range) -> Counted:
    """Count of some variants."""
    opened, asked = _part(here, shared, variants)
    found = count(opened, asked, Observer(notice=lambda said: None), variants[0])
    here.trace.bytes["read"] += found.bytes_read
    return found


def count_elsewhere(
    pool: Pool, beside: Callable[[int], int], opened: Opened, axis: int, asked: Asked
) -> Counted:
    """Have processes elsewhere count. beside: counts bytes that this process holds (`Elsewhere`). opened:
    variants × samples. axis: that of samples in the array. Raises what `count` raises."""
    samples = opened.shape[1]
    pairs = 0 if asked.missing is None else pair_bytes(samples)
    # Two matrices of counts, and those of a process that come.
    shared = Shared(axis, replace(asked, extra=beside(4 * pairs + 64 * samples)))
    parts = parts_of(opened, pool.count)
    pool.ask(fit, shared, parts[0])
    hets, lacking = np.zeros(samples, np.int64), np.zeros(samples, np.int64)
    both, product = (np.zeros((samples, samples), np.int32) if pairs else None for _ in range(2))

    def take(number: int, read: Callable[[], Counted]) -> None:
        found = read()
        np.add(hets, found.hets, out=hets)
        np.add(lacking, found.lacking, out=lacking)
        if both is not None and found.lack_both is not None:
            np.add(both, found.lack_both, out=both)
        if product is not None:
            mine = found.hets.astype(np.int32)[:, None] if found.product is None else found.product
            np.add(product, mine, out=product)

    with pool:
        pool.each(counted, shared, parts, take, lambda done: None)
    read = pool.trace.bytes["read"]
    if not lacking.any():
        return Counted(hets, lacking, None, None, read)
    return Counted(hets, lacking, both, product, read)
