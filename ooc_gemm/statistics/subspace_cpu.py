"""Passes of the subspace iteration on the CPU.

Means that are subtracted are rounded to the type of panels, and sums are corrected for what rounding leaves.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..devices.cpu.blas import one_blas_thread
from ..planning.stream_plan import Cut
from ..run.stream import Array, Needs, Panels, Progress, Range
from ..storage.read.source import Opened
from ..support.memory import peak_resident_bytes
from .subspace import Centre, Floats, Size, Sums, panel_type


class OnCPU:
    """Multiplies B by a few vectors, panel by panel, in several threads."""

    device, peak_device_bytes = "cpu", 0

    def __init__(
        self,
        opened: Opened,
        size: Size,
        centre: Centre,
        limit: int,
        extra: int,
        threads: int = 0,
        passes: int = 1,
    ):
        """limit: of host memory, in bytes. extra: bytes that results take. threads: cores that passes may
        use; 0: those of this process. passes: how many are made before this is closed. Raises BudgetError."""
        self.name, self.dtype = opened.name, panel_type(opened.dtype)
        needs = size.needs(self.dtype)
        needs = Needs(needs.fixed + extra, needs.thread, needs.element, threads)
        self._panels = Panels(opened, self.dtype, limit, "decompose", needs, 4 * size.width, passes)
        self._size, self._centre, self.exponent = size, centre, 0

    @property
    def opened(self) -> Opened:
        return self._panels.opened

    @property
    def cut(self) -> Cut:
        return self._panels.cut

    @property
    def bytes_read(self) -> int:
        return self._panels.bytes_read

    @property
    def peak_host_bytes(self) -> int:
        return peak_resident_bytes()

    def applied(self, basis: Floats, mean: Floats | None, report: Progress | None) -> Sums:
        """Corrects the sums of later passes for what rounding has left of the means."""
        first, by_columns = mean is None, self._centre == "columns"
        narrow = _lying(basis, self.dtype)
        wide_basis = narrow.T.astype(np.float64)
        means = np.zeros(self._size.rows if self._centre == "rows" else self._size.cols)
        sums = Sums(np.zeros((len(narrow),) * 2), np.zeros(narrow.shape).T, means, 0.0)
        shift, rest = self._rounded(mean)
        early, scaled = self._before(shift)

        def work(panel: Array, rows: Range) -> Sums:
            own = means
            scaled(panel)
            if self._centre == "rows":
                found = _centred_rows(panel)
                if first:
                    means[slice(*rows)] = found
            elif by_columns and first:
                own = centred_columns(panel)
            squares = float(np.vecdot(panel, panel).sum(dtype=np.float64)) if first else 0.0
            y = narrow @ panel.T  # the transpose of Y: BLAS multiplies rows that are long a quarter faster
            wide = y.astype(np.float64)
            return Sums(wide @ wide.T, (y @ panel).T, own, squares, len(panel))

        def add(found: Sums) -> None:
            sums.include(found, wide_basis if by_columns and first else None)

        with one_blas_thread:
            self._panels.each(work, add, early, report)
        if rest is not None:
            sums.correct(rest, wide_basis, -float(sums.rows))
        return sums

    def projected(
        self, vectors: Floats, mean: Floats, add: Callable[[Array], None], report: Progress | None
    ) -> Floats:
        """Corrects each panel for what rounding has left of the means."""
        narrow, gram = _lying(vectors, self.dtype), np.zeros((vectors.shape[1],) * 2)
        shift, rounded = self._rounded(mean)
        rest = None if rounded is None else (narrow @ rounded).astype(narrow.dtype)[:, None]
        early, scaled = self._before(shift)

        def work(panel: Array, rows: Range) -> tuple[Array, Floats]:
            scaled(panel)
            if self._centre == "rows":
                _centred_rows(panel)
            y = narrow @ panel.T
            if rest is not None:
                y -= rest
            wide = y.astype(np.float64)
            return y.T, wide @ wide.T

        def added(found: tuple[Array, Floats]) -> None:
            np.add(gram, found[1], out=gram)
            add(found[0])

        with one_blas_thread:
            self._panels.each(work, added, early, report)
        return gram

    def _rounded(self, mean: Floats | None) -> tuple[Array | None, Floats | None]:
        """What is subtracted from each row of panels, and what rounding has left of it; None where rows are
        not shifted."""
        if mean is None or self._centre != "columns":
            return None, None
        shift = mean.astype(self.dtype)
        return shift, mean - shift

    def _before(self, shift: Array | None) -> tuple[Array | None, Callable[[Array], None]]:
        """What is subtracted from rows while panels are gathered, and what is done to each panel then: where
        B is multiplied, `shift` is subtracted after that, because it may be too large or small before."""
        if not self.exponent:
            return shift, lambda panel: None
        factor = self.dtype.type(2.0**self.exponent)

        def scaled(panel: Array) -> None:
            panel *= factor
            if shift is not None:
                panel -= shift

        return None, scaled

    def close(self) -> None:
        """Frees the panels that are kept."""
        self._panels.close()


def _lying(vectors: Array, dtype: np.dtype[Any]) -> Array:
    """The vectors as rows, in the type of panels."""
    return np.ascontiguousarray(vectors.T, dtype)


def centred_columns(panel: Array) -> Floats:
    """Subtract the mean of each column from a panel, in place; those means. What rounding leaves is far below
    the precision of the panel's products."""
    mean = np.add.reduce(panel, axis=0, dtype=np.float64) / len(panel)
    panel -= mean.astype(panel.dtype)
    rest = np.add.reduce(panel, axis=0, dtype=np.float64) / len(panel)
    panel -= rest.astype(panel.dtype)
    return _mean(mean, rest, panel)


def _centred_rows(panel: Array) -> Floats:
    """Subtract the mean of each row from a panel, in place; those means."""
    mean = panel.mean(axis=1, dtype=np.float64)
    panel -= mean.astype(panel.dtype)[:, None]
    rest = panel.mean(axis=1, dtype=np.float64)
    panel -= rest.astype(panel.dtype)[:, None]
    return _mean(mean, rest, panel)


def _mean(mean: Floats, rest: Floats, panel: Array) -> Floats:
    """Return the means of a panel. rest: what was left of them when they were subtracted; in a panel of
    float32 that shows how its elements were rounded, and the means are exact to float64."""
    return np.asarray(mean + rest if panel.dtype == np.float64 else mean, np.float64)
