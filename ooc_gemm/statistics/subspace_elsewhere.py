"""Passes of the subspace iteration by processes elsewhere.

Each process makes the sums over ranges of B's rows, as on one machine. This process adds them up in the order
of the ranges, so results do not depend on which process is first, or dies.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..engine.passes import PassDevice
from ..engine.ports import Device
from ..run.pool import RANGES, Here, InOrder, Pool, parts_of
from ..run.stream import Array, Progress, Range
from ..storage.read.source import Opened
from ..support.errors import InputError
from ..support.intervals import ceil_div
from .subspace import Centre, Floats, Products, Size, Sums, panel_type
from .subspace_cpu import OnCPU
from .subspace_device import OnDevice

PART_BYTES = 32 << 20
"""Bytes of B·V that a process finds at a time, about."""


@dataclass(frozen=True)
class Matrix:
    """B, of which processes are given ranges of rows."""

    flipped: bool
    """It is the transpose of the user's array."""
    size: Size
    centre: Centre
    device_memory_limit: int | None
    extra: int
    """Host memory in bytes for what a process finds, and for its share of what comes together elsewhere."""


@dataclass(frozen=True)
class Pass:
    """What all processes are given for a pass."""

    matrix: Matrix
    vectors: Floats
    mean: Floats | None
    exponent: int
    """As of `Products`."""


def passes_of(name: str, device: Device) -> PassDevice | None:
    """Return the device of a name as what makes passes; None for the CPU. Raises InputError where it makes
    none."""
    if isinstance(device, PassDevice):
        return device
    if device.name == "cpu":
        return None
    raise InputError(
        f"device {name!r} cannot be used here; components are computed on the CPU or on one GPU: "
        "cpu, cuda or cuda:N"
    )


def _products(here: Here, matrix: Matrix, rows: Range) -> Products:
    """What multiplies some rows of B in this process. Raises BudgetError and InputError."""
    x = here.inputs["x"]
    x = x.transpose() if matrix.flipped else x
    some, device = x.window(rows, (0, x.shape[1])), passes_of(here.device.name, here.device)
    size = replace(matrix.size, rows=rows[1] - rows[0], whole=matrix.size.rows)
    if device is None:
        return OnCPU(some, size, matrix.centre, here.memory_limit, matrix.extra, here.threads)
    limits = here.memory_limit, matrix.device_memory_limit
    return OnDevice(some, size, matrix.centre, limits, matrix.extra, device)


def fit(here: Here, matrix: Matrix, rows: Range) -> None:
    """Raise BudgetError or InputError where a process cannot multiply some rows of B."""
    _products(here, matrix, rows)


def sums_of(here: Here, shared: Pass, rows: Range) -> Sums:
    """The sums of a pass over some rows of B."""
    products = _products(here, shared.matrix, rows)
    products.exponent = shared.exponent
    try:
        return products.applied(shared.vectors, shared.mean, here.tell)
    finally:
        _note(here, products)


def rows_of(here: Here, shared: Pass, rows: Range) -> tuple[Array, Floats]:
    """Some rows Y of B·V, and YᵀY."""
    assert shared.mean is not None, "the first pass has found it"
    products, at = _products(here, shared.matrix, rows), 0
    products.exponent = shared.exponent
    found = np.empty((rows[1] - rows[0], shared.vectors.shape[1]), products.dtype)

    def add(some: Array) -> None:
        nonlocal at
        found[at : at + len(some)] = some
        at += len(some)

    try:
        gram = products.projected(shared.vectors, shared.mean, add, here.tell)
    finally:
        _note(here, products)
    return found, gram


def _note(here: Here, products: Products) -> None:
    """Note what was read and held."""
    products.close()
    here.trace.bytes["read"] += products.bytes_read
    here.peak_device_bytes = products.peak_device_bytes


class OnPool:
    """Multiplies B by a few vectors, a range of rows in each process."""

    def __init__(
        self,
        pool: Pool,
        beside: Callable[[int], int],
        opened: Opened,
        matrix: Matrix,
    ):
        """beside: counts bytes that this process holds (`Elsewhere`). opened: B. matrix: with bytes that
        results take in this process as `extra`. Raises BudgetError, InputError and DeviceError."""
        self.name, self.dtype, self.opened = opened.name, panel_type(opened.dtype), opened
        self.device, self._pool, size = pool.hardware.name, pool, matrix.size
        self.exponent = 0
        self._parts = parts_of(opened, RANGES * pool.count)
        line = size.wanted * self.dtype.itemsize
        self._smaller = parts_of(opened, max(RANGES * pool.count, ceil_div(size.rows * line, PART_BYTES)))
        height = self._smaller[0][1]
        comes = max(height * line, (size.cols + size.width) * size.width * 8)
        share = beside(size.needs(self.dtype).fixed + matrix.extra + comes)
        self._matrix = replace(matrix, extra=height * line + share)
        pool.ask(fit, self._matrix, self._parts[0])

    @property
    def bytes_read(self) -> int:
        return self._pool.trace.bytes["read"]

    @property
    def peak_host_bytes(self) -> int:
        return self._pool.peak_host_bytes

    @property
    def peak_device_bytes(self) -> int:
        return self._pool.peak_device_bytes

    def applied(self, basis: Floats, mean: Floats | None, report: Progress | None) -> Sums:
        """Adds up the sums of ranges in their order."""
        (rows, cols), centre, width = self.opened.shape, self._matrix.centre, basis.shape[1]
        means = np.zeros(rows if centre == "rows" else cols)
        sums = Sums(np.zeros((width, width)), np.zeros(basis.shape), means, 0.0)
        rounded = basis.astype(self.dtype).astype(np.float64) if centre == "columns" else None

        def add(number: int, found: Sums) -> None:
            with np.errstate(all="ignore"):
                sums.include(found, rounded if mean is None else None)
            if mean is None and centre == "rows":
                means[slice(*self._parts[number])] = found.mean

        shared = Pass(self._matrix, basis, mean, self.exponent)
        self._pool.each(sums_of, shared, self._parts, InOrder(add), _told(report))
        return sums

    def projected(
        self, vectors: Floats, mean: Floats, add: Callable[[Array], None], report: Progress | None
    ) -> Floats:
        """Takes ranges in their order."""
        gram = np.zeros((vectors.shape[1],) * 2)

        def added(number: int, found: tuple[Array, Floats]) -> None:
            np.add(gram, found[1], out=gram)
            add(found[0])

        shared = Pass(self._matrix, vectors, mean, self.exponent)
        self._pool.each(rows_of, shared, self._smaller, InOrder(added), _told(report))
        return gram

    def close(self) -> None:
        """Closes the pool."""
        self._pool.close()


def _told(report: Progress | None) -> Callable[[float], object]:
    return report or (lambda fraction: None)
