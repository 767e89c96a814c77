"""Passes of the subspace iteration on a device with memory of its own.

Means are subtracted in float64, so that sums need no correction for their rounding. In the first pass the
device sends the means of each panel, and the host applies Chan's formula to several panels at a time.
"""

from collections.abc import Callable

import numpy as np

from ..engine.passes import PassDevice, PassWork
from ..planning.passes import PassPlan
from ..planning.stream_plan import Cut
from ..run.passes import DevicePanels, pass_plan
from ..run.stream import Array, Progress, Range
from ..storage.read.source import Opened
from ..support.buffers import Bytes
from ..support.memory import peak_resident_bytes
from .subspace import Centre, Floats, Size, Sums, panel_type


class OnDevice:
    """Multiplies B by a few vectors, panel by panel, on a device."""

    def __init__(
        self,
        opened: Opened,
        size: Size,
        centre: Centre,
        limits: tuple[int, int | None],
        extra: int,
        device: PassDevice,
        passes: int = 1,
    ):
        """limits: of host memory and of device memory, in bytes; None: the device's default. extra: bytes
        that results take on the host. passes: how many are made before this is closed. Raises BudgetError."""
        self.name, self.dtype, self.device = opened.name, panel_type(opened.dtype), device.name
        held = size.needs(self.dtype).fixed + size.cols * size.width * 8  # with the means of some panels
        plan = pass_plan(opened, self.dtype, device, limits, size.width, held + extra, passes)
        self._size, self._centre, self.exponent = size, centre, 0
        self._panels = DevicePanels(opened, self.dtype, plan, device)

    @property
    def plan(self) -> PassPlan:
        """How the passes are made."""
        return self._panels.plan

    @property
    def opened(self) -> Opened:
        return self._panels.opened

    @property
    def cut(self) -> Cut:
        return self._panels.plan.cut

    @property
    def bytes_read(self) -> int:
        return self._panels.bytes_read

    @property
    def peak_host_bytes(self) -> int:
        return peak_resident_bytes()

    @property
    def peak_device_bytes(self) -> int:
        return self._panels.peak_device_bytes

    def applied(self, basis: Floats, mean: Floats | None, report: Progress | None) -> Sums:
        """Combines the means of panels in the first pass."""
        first, centre, (rows, cols) = mean is None, self._centre, (self._size.rows, self._size.cols)
        between = _Between(basis.astype(self.dtype).astype(np.float64), cols) if centre == "columns" else None
        means = np.zeros(rows if centre == "rows" else cols)

        def hand(out: Bytes, place: Range) -> None:
            count = place[1] - place[0]
            if between is not None:
                between.add(out[: cols * 8].view(np.float64) / count, count)
            else:
                np.divide(out[: count * 8].view(np.float64), cols, out=means[slice(*place)])

        wanted = hand if first and centre else None
        found = self._panels.each(self._work(basis, mean, first=first), wanted, report)
        sums = Sums(found.gram, found.product, means, found.squares if first else 0.0, rows)
        if first and between is not None:
            with np.errstate(all="ignore"):
                between.end(sums)
        return sums

    def projected(
        self, vectors: Floats, mean: Floats, add: Callable[[Array], None], report: Progress | None
    ) -> Floats:
        """Hands rows of Y to `add` as the device has made them, and returns YᵀY, which it adds up."""

        def hand(out: Bytes, place: Range) -> None:
            count, width = place[1] - place[0], vectors.shape[1]
            add(out[: count * width * self.dtype.itemsize].view(self.dtype).reshape(count, width))

        return self._panels.each(self._work(vectors, mean, projects=True), hand, report).gram

    def _work(
        self, vectors: Floats, mean: Floats | None, first: bool = False, projects: bool = False
    ) -> PassWork:
        """Return what a pass does with each panel."""
        by_mean = self._centre == "columns" and mean is not None
        return PassWork(
            vectors=vectors,
            shift=mean if by_mean else None,
            own=None if by_mean else self._centre,
            first=first,
            projects=projects,
            exponent=self.exponent,
        )

    def close(self) -> None:
        """Frees the memory of the device."""
        self._panels.close()


class _Between:
    """What is missing in sums over panels that were each centred by their own means: the sum of n·δδᵀ, where
    n is the number of a panel's rows, and δ is its mean minus the mean of all rows."""

    def __init__(self, basis: Floats, cols: int):
        """basis: Ω, as the device has rounded it."""
        self._basis, self._lines = basis, np.zeros((basis.shape[1], cols))
        self._filled, self._rows = 0, 0
        self._near: Floats = np.zeros(cols)
        """The mean of the first panel, from which others are taken, so that no digits are lost."""
        self._apart: Floats = np.zeros(cols)
        self._sums = Sums(np.zeros((basis.shape[1],) * 2), np.zeros(basis.shape), np.zeros(0), 0.0)

    def add(self, mean: Floats, count: int) -> None:
        """Take the mean of the next panel, which has `count` rows."""
        if self._rows == 0:
            self._near = mean
        self._rows += count
        np.multiply(mean - self._near, count**0.5, out=self._lines[self._filled])
        self._apart += self._lines[self._filled] * count**0.5
        self._filled += 1
        if self._filled == len(self._lines):
            self._flush()

    def _flush(self) -> None:
        lines, self._filled = self._lines[: self._filled], 0
        along = lines @ self._basis
        self._sums.product += lines.T @ along
        self._sums.gram += along.T @ along
        self._sums.squares += float(np.vecdot(lines, lines).sum())

    def end(self, sums: Sums) -> None:
        """Add it to the sums over panels, with the mean of all rows."""
        self._flush()
        apart = self._apart / self._rows
        self._sums.correct(apart, self._basis, -float(self._rows))
        sums.product += self._sums.product
        sums.gram += self._sums.gram
        sums.squares += self._sums.squares
        sums.mean = self._near + apart
