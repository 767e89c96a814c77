"""What is unsure about neighbours, and which of their values the type of the result does not hold."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..run.observer import Observer
from .rescore import Array

Flags = npt.NDArray[np.bool_]


class Doubts:
    """Counts by chunks of rows, because some chunks are computed twice: what was counted last counts."""

    def __init__(self) -> None:
        self._close: dict[int, int] = {}
        self._unsure: dict[int, int] = {}
        self._extreme: dict[int, int] = {}
        self._beyond: dict[int, int] = {}
        self._vanished: dict[int, int] = {}

    @property
    def rows_close(self) -> int:
        """Rows whose last neighbour may be another one."""
        return sum(self._close.values())

    @property
    def sure(self) -> set[int]:
        """The chunks that were computed and have no row of which a last neighbour may be a better one."""
        return {number for number, count in self._unsure.items() if not count}

    @property
    def rows_extreme(self) -> int:
        """Rows of A whose squares are beyond float64."""
        return sum(self._extreme.values())

    def of_rows(self, number: int, close: Flags, unsure: Flags, extreme: Flags) -> None:
        """Count rows of a chunk. number: of the chunk. close: those whose last neighbour may be another one.
        unsure: of these the ones that may have one with a better score. extreme: those whose squares are
        beyond float64."""
        for counts, flags in ((self._close, close), (self._unsure, unsure), (self._extreme, extreme)):
            counts[number] = int(np.count_nonzero(flags))

    def of_values(self, first: int, values: Array, scores: Array, scaled: bool) -> None:
        """Count values of a chunk of rows. first: its first row. values: as the result holds them. scores: in
        float64. scaled: whether rows were multiplied, so that a value may be too small."""
        self._beyond[first] = int(np.count_nonzero(np.isinf(values) & np.isfinite(scores)))
        self._vanished[first] = int(np.count_nonzero((values == 0) & (scores != 0))) if scaled else 0

    def tell(self, observer: Observer, dtype: np.dtype[Any]) -> None:
        """Tell the user. dtype: the type of values in the result."""
        if unsure := sum(self._unsure.values()):
            observer.note(
                f"the last neighbours of {unsure} rows may be others, whose scores differ from theirs by no "
                "more than rounding"
            )
        lost = (self._beyond, "too large", "infinite"), (self._vanished, "too small", "0")
        for counts, what, become in lost:
            if count := sum(counts.values()):
                observer.warn(
                    f"{count} values are {what} for {dtype}, and {become} in the result; the neighbours are "
                    "those with the best values in float64"
                )
