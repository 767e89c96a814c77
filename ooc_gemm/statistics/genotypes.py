"""One pass over genotypes: allele frequencies, and for each pair of samples the variants that both have.

A variant that lacks c samples lacks c(c+1)/2 pairs. Where few are missing, these pairs are listed and
counted; where many are, the 0/1 matrix M of missing elements is multiplied, MᵀM, in float32, which is exact
up to 2²⁴ variants at a time. Where a GPU multiplies M faster than pairs are listed, the pass gives up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from ..devices.cpu.blas import one_blas_thread
from ..engine.ports import Array
from ..engine.standardize import MARGIN
from ..engine.transform import missing_of
from ..run.stream import Needs, Panels, Range
from ..storage.read.source import Opened
from ..support.errors import InputError
from ..support.intervals import ranges
from . import words
from .words import room

STRIP = 1 << 19
"""Genotypes that are looked at together."""
PAIRS = 1 << 18
"""Pairs that are listed at a time, at most."""
LISTED = 1000
"""Elements of MᵀM that are computed, for one variant, in the time in which one pair is listed and counted."""
PAIR_BYTES = 40 * PAIRS
"""Lists of pairs, in each thread."""
THREAD_BYTES = 32 * STRIP + PAIR_BYTES
"""What each thread computes in: a strip as floats, its mask, lists of what is missing and of pairs. A strip
of bytes takes less (`words.NBYTES`)."""
MOST_LISTED = 1 << 25
"""Pairs after which a pass gives up counting, where a GPU can count. A core lists so many in half a
second."""
ROUNDING = 2.0**-44
"""A frequency that is less than the least one by no more than this counts as equal to it, as in plink2."""
FLOAT64 = np.dtype(np.float64)
TILE = 256
"""Rows of MᵀM that are computed together."""


@dataclass(frozen=True)
class Genotypes:
    """What a pass over genotypes has found."""

    frequency: npt.NDArray[np.float64]
    """Of the counted allele of each variant, among the samples that have it; NaN where none has."""
    kept: npt.NDArray[np.bool_]
    """Variants whose minor allele is frequent enough."""
    missing: npt.NDArray[np.int64]
    """Variants, of those kept, that each sample lacks."""
    pairs: Array | None
    """Variants, of those kept, that both of two samples have (int32, samples × samples); None where that
    was not asked for, or the pass has given up counting."""
    bytes_read: int

    @property
    def variants(self) -> int:
        """Number of variants that are kept."""
        return int(np.count_nonzero(self.kept))

    def checked(self, name: str) -> "Genotypes":
        """The same. Raises InputError where the array of this name holds no numbers of alleles."""
        wrong = np.flatnonzero((self.frequency < -MARGIN) | (self.frequency > 1 + MARGIN))
        if wrong.size:
            raise InputError(
                f"{name} holds more than 2 alleles, or fewer than 0, or NaN, for variant {wrong[0]}; give "
                "numbers from 0 to 2, and say which one is missing"
            )
        return self


def pair_bytes(samples: int) -> int:
    """Memory in bytes of the counts of pairs."""
    return 4 * samples * samples


class Tally:
    """What is found of genotypes, strip by strip. Any thread may call `look`."""

    def __init__(
        self,
        shape: tuple[int, int],
        missing: float | None,
        least: float,
        counts: "Counts | None" = None,
        dtype: np.dtype[Any] = FLOAT64,
    ):
        """shape: variants, samples. missing: the number that stands for a missing genotype. least: variants
        with a less frequent minor allele are left out. counts: where pairs are counted; None: they are not.
        dtype: type in which the genotypes of a variant are added up."""
        variants, samples = shape
        self._missing, self._least, self.counts, self._dtype = missing, least, counts, dtype
        self.frequency, self.kept = np.full(variants, np.nan), np.zeros(variants, bool)
        self.lacking = np.zeros(samples, np.int64)
        self._lock = Lock()

    @staticmethod
    def nbytes(variants: int, samples: int, paired: bool) -> int:
        """Memory in bytes of a tally."""
        return 9 * variants + 8 * samples + (pair_bytes(samples) if paired else 0)

    def look(self, strip: Array, first: int) -> "Lacking":
        """Count a strip, variants × samples in C order, whose first variant has this number. Returns which
        genotypes are missing."""
        mask = missing_of(strip, self._missing, room("missing", strip.shape, np.bool_))
        lacks = Lacking.of(mask, strip.shape)
        good = self._note(_sums(strip, lacks.where, self._dtype), lacks.each, first)
        if len(lacks.where):
            found = lacks.only(good).count(self.counts)
            with self._lock:
                self.lacking += found
        return lacks

    def look_at_words(self, strip: Array, first: int) -> None:
        """Count a strip of bytes likewise (`words.fit`), faster."""
        seen, counts = words.Strip(strip, self._missing), self.counts
        good = self._note(seen.sums, seen.missing, first)
        if seen.missing.any():
            if counts is None or counts.given_up:
                found = seen.lacking(good)
            else:
                found = Lacking(seen.where(), seen.missing, strip.shape[1]).only(good).count(counts)
            with self._lock:
                self.lacking += found

    def _note(self, sums: Array, missing: Array, first: int) -> Array:
        """Note frequencies of variants from sums of genotypes and numbers of missing ones. Returns which
        variants are kept."""
        lines = slice(first, first + len(sums))
        with np.errstate(all="ignore"):  # NaN where no sample has a genotype, or inf
            share = np.divide(sums, 2.0 * (len(self.lacking) - missing), dtype=np.float64)
            good: Array = ~(np.minimum(share, 1 - share) < self._least - ROUNDING)
        self.frequency[lines], self.kept[lines] = share, good
        return good

    def found(self, bytes_read: int = 0) -> Genotypes:
        """Return what was found of all variants."""
        pairs, counts = None, self.counts
        if counts is not None and not counts.given_up:
            pairs = have_both_of(counts.lack_both, int(np.count_nonzero(self.kept)), self.lacking)
        return Genotypes(self.frequency, self.kept, self.lacking, pairs, bytes_read)


def look_through(
    opened: Opened,
    limit: int,
    missing: float | None,
    least: float,
    paired: bool,
    progress: Callable[[float], None] | None = None,
    most: int | None = None,
) -> Genotypes:
    """Find frequencies and count pairs.

    opened: variants × samples, with its op(): numbers of alleles from 0 to 2. limit: the memory limit of the
    process in bytes. missing: the number that stands for a missing genotype. least: variants with a less
    frequent minor allele are left out. paired: whether pairs are counted. progress: called with the fraction
    that is done. most: after so many pairs, counting them is given up; None: never.

    Raises BudgetError and StoreError.
    """
    samples = opened.shape[1]
    counts = Counts(samples, most) if paired else None
    tally = Tally(opened.shape, missing, least, counts, sum_type(opened.dtype))
    needs = Needs(Tally.nbytes(*opened.shape, paired), THREAD_BYTES + 16 * samples)
    panels = Panels(opened, opened.dtype, limit, "look through", needs)

    def work(panel: Array, rows: Range) -> None:
        in_words, lists = words.fit(panel.dtype), counts is not None and not counts.given_up
        look: Callable[[Array, int], object] = tally.look_at_words if in_words else tally.look
        step = words.rows_of(samples) if in_words and not lists else max(1, STRIP // max(1, samples))
        for start, stop in ranges(len(panel), step):
            look(panel[start:stop], rows[0] + start)

    with one_blas_thread:
        panels.each(work, lambda nothing: None, progress=progress)
    return tally.found(panels.bytes_read)


def sum_type(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which the genotypes of a variant are added up."""
    return np.dtype(np.float32) if stored.itemsize == 1 else FLOAT64


def _sums(strip: Array, gone: Array, dtype: np.dtype[Any]) -> Array:
    """Sums of the genotypes of each variant; infinite where one is no number from 0 to 2. gone: indices of
    those that are missing."""
    values = room("genotypes", strip.shape, dtype)
    np.copyto(values, strip)
    values.reshape(-1)[gone] = 0
    outside = None
    if values.size and not (values.min() >= -MARGIN and values.max() <= 2 + MARGIN):  # also where one is NaN
        outside = ~((values >= -MARGIN) & (values <= 2 + MARGIN))
        values[outside] = 0
    sums: Array = values @ np.ones(values.shape[1], values.dtype)  # at most 254·samples: float32 holds that
    if outside is not None:
        sums[outside.any(axis=1)] = np.inf
    return sums


@dataclass(frozen=True)
class Lacking:
    """Which genotypes of a strip are missing: lists, which are faster than masks where few are."""

    where: Array
    """Indices of the missing genotypes in the strip, in C order."""
    each: Array
    """How many are missing of each variant."""
    samples: int

    @classmethod
    def of(cls, mask: Array | None, shape: tuple[int, ...]) -> "Lacking":
        """Of a strip, variants × samples. mask: true where a genotype is missing; None where none is."""
        variants, samples = shape
        where = np.zeros(0, np.intp) if mask is None else np.flatnonzero(mask)
        ends = np.searchsorted(where, np.arange(variants + 1) * samples)
        return cls(where, np.diff(ends), samples)

    @property
    def at(self) -> Array:
        """The sample of each of `where`."""
        at: Array = self.where - np.repeat(np.arange(len(self.each)) * self.samples, self.each)
        return at

    def only(self, kept: Array) -> "Lacking":
        """The same, as if no genotype of the other variants were missing."""
        if kept.all():
            return self
        return Lacking(self.where[np.repeat(kept, self.each)], np.where(kept, self.each, 0), self.samples)

    def count(self, counts: "Counts | None") -> Array:
        """Variants that each sample lacks. Counts the pairs of samples that lack one together."""
        if counts is not None:
            counts.add(self)
        return np.bincount(self.at, minlength=self.samples)


class Counts:
    """Variants that two samples lack together, for each pair of different samples."""

    def __init__(self, samples: int, most: int | None = None):
        """most: after so many pairs, counting is given up; None: never."""
        self.given_up, self._seen, self._most = False, 0, most
        self.lack_both = np.zeros((samples, samples), np.int32)
        """Above the diagonal: variants that two samples lack; on and below it nothing that counts."""
        self._lock = Lock()

    def add(self, lacks: Lacking) -> None:
        """Count a strip."""
        samples, each = lacks.samples, lacks.each
        pairs = each * (each - 1) // 2
        listed = int(pairs.sum())
        with self._lock:
            self._seen += listed
            self.given_up = self._most is not None and self._seen > self._most
        if self.given_up:
            return
        if listed > len(each) * samples * samples // LISTED or pairs.max(initial=0) > PAIRS // 2:
            self._multiply(lacks)
        elif listed:
            at, ends = lacks.at, np.cumsum(each)
            parts = np.flatnonzero(np.diff((np.cumsum(pairs) - pairs) // (PAIRS // 2), prepend=-1))
            for start, stop in pairwise([*parts.tolist(), len(each)]):
                some = slice(ends[start] - each[start], ends[stop - 1])
                first, second = _pairs(at[some], each[start:stop])
                index = first * samples + second
                with self._lock:
                    np.add.at(self.lack_both.reshape(-1), index, np.int32(1))  # other types: 14 times slower

    def _multiply(self, missing: Lacking) -> None:
        lacks = np.zeros((len(missing.each), missing.samples), np.float32)
        lacks.reshape(-1)[missing.where] = 1
        for start, stop in ranges(missing.samples, TILE):
            product = (lacks[:, start:stop].T @ lacks[:, start:]).astype(np.int32)
            with self._lock:
                self.lack_both[start:stop, start:] += product


def have_both_of(lack_both: Array, variants: int, lacking: Array) -> Array:
    """How many of so many variants both of two samples have, in the memory of `lack_both`.

    lack_both: variants that two different samples lack, int32, above the diagonal (`Counts`). lacking: how
    many variants each sample lacks.
    """
    found, there = lack_both, (variants - lacking).astype(np.int32)
    for start, stop in ranges(len(found), TILE):
        rows = found[start:stop]
        rows[:, start:stop] = np.triu(rows[:, start:stop], 1)
        rows[:, start:stop] += rows[:, start:stop].T.copy()
        rows[:, start:] += there[start:stop, None]
        rows[:, start:] -= lacking[None, start:].astype(np.int32)
        found[stop:, start:stop] = rows[:, stop:].T
    np.fill_diagonal(found, there)
    return found


def have_both(lack_both: Array, variants: int, lacking: Array) -> Array:
    """How many variants both of two samples have, int32, from the product MᵀM; in its memory.

    lack_both: variants that both samples lack, int32 or float32. variants: how many there are. lacking: how
    many each sample lacks.
    """
    found: Array = lack_both.view(np.int32)
    for start, stop in ranges(len(found), TILE):
        rows = np.rint(lack_both[start:stop]).astype(np.int32)
        rows += (variants - lacking[start:stop, None]).astype(np.int32)
        rows -= lacking.astype(np.int32)
        found[start:stop] = rows
    return found


def _pairs(at: Array, each: Array) -> tuple[Array, Array]:
    """All pairs of samples that lack one variant together, the first before the second.

    at: samples that lack a variant, in ascending order, one variant after the other. each: how many these are
    for each variant.
    """
    ends = np.repeat(np.cumsum(each), each)
    partners = ends - np.arange(1, len(at) + 1)  # those after it
    first = np.repeat(np.arange(len(at)), partners)
    begins = np.cumsum(partners) - partners
    second = np.arange(len(first)) - begins[first] + first + 1
    return at[first], at[second]
