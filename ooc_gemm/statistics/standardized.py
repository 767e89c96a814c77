"""Standardizes genotypes while their relationship matrix is computed, so that they are read once."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.ports import Array
from ..engine.standardize import Binomial
from ..engine.transform import as_element
from ..storage.read.source import Opened
from ..support.intervals import ranges
from .genotypes import (
    PAIR_BYTES,
    ROUNDING,
    STRIP,
    THREAD_BYTES,
    Counts,
    Genotypes,
    Tally,
    have_both,
    sum_type,
)

Vector = npt.NDArray[np.float64]


def factors(frequency: Vector, kept: npt.NDArray[np.bool_], scaled: bool) -> tuple[Vector, Vector]:
    """Return what is subtracted from the genotypes of each variant, and by what they are divided.

    frequency: of the counted allele. kept: variants that are not left out; others are divided by infinity, as
    are those without variation. scaled: whether the others are divided by their standard deviation.
    """
    with np.errstate(all="ignore"):
        mean = np.where(kept & ~np.isnan(frequency), 2 * frequency, 0.0)
        variance = mean * (1 - mean / 2)
        some = kept & (variance > 0)
        return mean, np.where(some, np.sqrt(variance) if scaled else 1.0, np.inf)


class Standardized:
    """Standardizes genotypes in the panels of their product (`Standardizer`), and keeps what it finds."""

    keeps = True

    def __init__(self, opened: Opened, missing: float | None, least: float, scaled: bool, paired: bool):
        """opened: variants × samples. missing: as stored. The others are as of `Binomial`."""
        gone = None if missing is None else as_element(missing, opened.dtype)
        self.rule = Binomial(None if gone is None else float(gone), least - ROUNDING, scaled, paired)
        self.name, (self.variants, self.samples) = opened.name, opened.shape
        self._sums = sum_type(opened.dtype)
        self._tally: Tally | None = None
        self._taken: Genotypes | None = None
        self._lock = Lock()

    def nbytes(self, threads: int) -> int:
        """Host memory in bytes. threads: how many standardize."""
        held = Tally.nbytes(self.variants, self.samples, self.rule.paired)
        each = THREAD_BYTES + 8 * STRIP + 16 * self.samples
        return held + threads * (each - (0 if self.rule.paired else PAIR_BYTES))

    def beside(self) -> "Standardized":
        """Return one that keeps nothing."""
        found = copy(self)
        found.keeps, found.rule = False, replace(self.rule, paired=False)
        return found

    def begin(self) -> None:
        """Makes room for what is found."""
        self._tally = self._taken = None
        if self.keeps:
            self._tally = self._new_tally(self.variants)

    def _new_tally(self, variants: int) -> Tally:
        counts = Counts(self.samples) if self.rule.paired else None
        shape, least = (variants, self.samples), self.rule.least + ROUNDING
        return Tally(shape, self.rule.missing, least, counts, self._sums)

    def standardize(self, lines: Array, first: int) -> None:
        """Counts on the way what is missing."""
        tally = self._tally
        if not self.keeps:
            tally, first = self._new_tally(len(lines)), 0
        assert tally, "it has begun"
        for start, stop in ranges(len(lines), max(1, STRIP // max(1, self.samples))):
            strip, some = lines[start:stop], slice(first + start, first + stop)
            lacks = tally.look(strip, first + start)
            mean, scale = factors(tally.frequency[some], tally.kept[some], self.rule.scaled)
            high = mean.astype(strip.dtype)
            with np.errstate(all="ignore"):
                for by in (high, (mean - high).astype(strip.dtype)):
                    np.subtract(strip, by[:, None], out=strip)
                np.multiply(strip, (1 / scale).astype(strip.dtype)[:, None], out=strip)
            strip.reshape(-1)[lacks.where] = 0

    def take(self, shares: Array, missing: int, lack_both: Array | None) -> None:
        """Makes the numbers of variants that both of two samples have of those that they lack, in place."""
        with np.errstate(invalid="ignore"):
            kept = ~(np.minimum(shares, 1 - shares) < self.rule.least)
        lacking, pairs = np.array([missing], np.int64), None
        if lack_both is not None:
            lacking = lack_both.diagonal().astype(np.int64)
            pairs = have_both(lack_both, int(np.count_nonzero(kept)), lacking)
        self._taken = Genotypes(shares, kept, lacking, pairs, 0)

    def found(self) -> Genotypes | None:
        """Return what was found, once all panels are standardized; None if none was."""
        with self._lock:
            if self._taken is None and self._tally is not None:
                self._taken = self._tally.found()
            return self._taken


class Quotients:
    """Divides sums over variants by their number, or by that of those that both samples have (`Finish`)."""

    def __init__(self, name: str, divisor: float | Array, nbytes: int):
        """name: for the journal. divisor: a number, or one for each pair of samples. nbytes: host memory in
        bytes of the divisor, and of what finds it."""
        self.name, self.nbytes, self._divisor = name, nbytes, divisor

    def apply(self, values: Array, row: int, col: int) -> None:
        """Change a part of C in place. Two samples that share no variant have NaN."""
        by: Any = self._divisor
        if isinstance(by, np.ndarray):
            by = by[row : row + values.shape[0], col : col + values.shape[1]]
        with np.errstate(all="ignore"):
            np.divide(values, by, out=values)


class LaterQuotients:
    """The same, by what is known once all sums are made."""

    def __init__(
        self,
        name: str,
        standardized: Standardized,
        divisor: Callable[[Genotypes], float | Array],
        nbytes: int,
    ):
        """standardized: what has found numbers of variants. divisor: returns what divides the sums. name,
        nbytes: as of `Quotients`."""
        self.name, self.nbytes = name, nbytes
        self._standardized, self._divisor = standardized, divisor
        self._known: tuple[Genotypes, Quotients] | None = None
        self._lock = Lock()

    def apply(self, values: Array, row: int, col: int) -> None:
        """Change a part of C in place. Raises InputError where the array holds no numbers of alleles."""
        self._quotients().apply(values, row, col)

    def _quotients(self) -> Quotients:
        found = self._standardized.found()
        assert found, "all panels are standardized"
        with self._lock:
            if self._known is None or self._known[0] is not found:
                divisor = self._divisor(found.checked(self._standardized.name))
                self._known = found, Quotients(self.name, divisor, 0)
            return self._known[1]
