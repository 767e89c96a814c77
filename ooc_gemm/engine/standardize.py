"""Standardizes op(A) in the panels of a symmetric product op(A)·op(A)ᵀ that is made as one block.

A panel then holds all elements of op(A) at its places along k. What is subtracted from them, and by what they
are divided, is found in the panel, so that no pass over the array must find it before. Several devices have
bands of op(A), and each of them the whole panel of op(B) = op(A)ᵀ, which it standardizes.

    p = mean/2        x' = (x − 2p)/√(2p(1 − p)),  and 0 where x is missing

That is how a number of successes of two trials is standardized, such as the number of copies of an allele.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]
SLICES_BYTES = 32 << 20
"""Device memory in which a product of 8-bit integers cuts k in slices where C is small."""


MARGIN = 1 / 1024
"""By how much elements may be less than 0, or more than 2: what was computed is rounded."""


@dataclass(frozen=True)
class Binomial:
    """How the elements at each place along k are standardized."""

    missing: float | None
    """The number that stands for a missing element, in the panel's type; NaN: those that are NaN; None: no
    element is missing."""
    least: float
    """A place where p or 1 − p is less than this is left out: its elements become 0."""
    scaled: bool
    """Whether elements are divided by √(2p(1 − p)); otherwise their means alone are subtracted."""
    paired: bool
    """Whether it is counted at how many places that are not left out two rows of op(A) both lack their
    element."""

    def device_bytes(self, rows: int, k: int) -> int:
        """Return the device memory, in bytes, of what is found of so many rows and places along k, and of the
        kernel that counts pairs."""
        return 8 * k + 8 + (4 * rows * rows + SLICES_BYTES if self.paired else 0)

    @property
    def panel_bytes(self) -> int:
        """Device memory, in bytes, for each element of a panel: a byte that says whether it is missing, which
        may be transposed for the kernel that counts pairs."""
        return 2 if self.paired else 0

    @property
    def line_bytes(self) -> int:
        """Device memory, in bytes, by which rows of such panels are longer."""
        return 16 if self.paired else 0


class Standardizer(Protocol):
    """Standardizes panels, and keeps what it finds. Any thread may call it."""

    rule: Binomial
    keeps: bool
    """Whether it keeps what it finds. If not, a device need not count anything."""

    def beside(self) -> "Standardizer":
        """Return one that standardizes likewise and keeps nothing, for other devices that have the same
        panels."""

    def begin(self) -> None:
        """Forget what was found. This is called before the first panel, also of a block that is made once
        more."""

    def standardize(self, lines: Array, first: int) -> None:
        """Standardize some places along k in place. `lines`: a contiguous row for each of them, with all
        elements of op(A) there. `first`: the number of the first."""

    def take(self, shares: Array, missing: int, lack_both: Array | None) -> None:
        """Take what a device with memory of its own has found, which does the same.

        shares: p of each place, float64; NaN where all elements are missing, and more than 1 where one is no
        number from 0 to 2. missing: the number of missing elements at places that are not left out.
        lack_both: the counts of pairs (int32, rows × rows) if they were wanted; they may be overwritten."""
