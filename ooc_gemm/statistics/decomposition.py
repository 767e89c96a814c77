"""The decomposition of one array, as it is or as its transpose, on the CPU or on another device."""

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import numpy as np

from ..devices import open_device, within
from ..planning.stream_plan import StreamPlan
from ..run.elsewhere import current, limit_of
from ..run.forecast import Asked, Load, forecast
from ..run.kept_rows import ROOM, KeptRows
from ..run.observer import Observer
from ..run.operands import open_operand
from ..run.pool import Pool
from ..run.rows import RowWriter, check_rows, memory, write_rows
from ..run.scalars import whole
from ..run.stream import Array, Needs, Pieces, Range
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.read.arrays import tried
from ..storage.read.source import Opened
from ..support.errors import BudgetError, InputError, letting_go
from ..support.memory import parse_size
from ..support.meter import UNWRITTEN, Meter
from .subspace import Centre, Floats, Found, NotFiniteError, Size, Subspace, decomposed, panel_type
from .subspace_cpu import OnCPU
from .subspace_device import OnDevice
from .subspace_elsewhere import Matrix, OnPool, passes_of

CENTRED = 6
"""How often each element of a panel is read or written where the panel's own means are subtracted."""


class Decomposition:
    """An array x that is decomposed, as it is (B = x) or as its transpose: the vectors that are iterated are
    as long as B has columns."""

    def __init__(
        self,
        x: Any,
        components: int,
        iterations: int,
        limits: tuple[str | int | None, str | int | None],
        device: str,
        centred: bool,
    ):
        """limits: of host memory and of device memory, as the user has given them. Raises InputError."""
        refuse_event_loop()
        components, iterations = whole("components", components), whole("iterations", iterations)
        if iterations < 0:
            raise InputError(f"{iterations} iterations cannot be made; give 0 or more")
        self._x, self._wanted, self._iterations, self._centred = x, components, iterations, centred
        self._opened = open_operand(x, "x")
        self.name, self.shape = self._opened.name, self._opened.shape
        if self._opened.dtype.kind == "c":
            raise InputError(
                f"{self.name} is complex; give its real and imaginary parts as columns of a real one"
            )
        if not min(self.shape):
            raise InputError(f"{self.name} is {self.shape[0]}×{self.shape[1]}; give some elements")
        if not 1 <= components <= min(self.shape):
            raise InputError(
                f"{self.name} is {self.shape[0]}×{self.shape[1]} and has no {components} components; "
                f"give a number from 1 to {min(self.shape)}"
            )
        if centred and self.shape[0] < 2:
            raise InputError(f"{self.name} has {self.shape[0]} rows; a variance needs two or more")
        self._elsewhere, self._given = current(), (limits[0], device)
        self._pool: Pool | None = None
        self._limits = limit_of(limits[0]), None if limits[1] is None else parse_size(limits[1])
        name = "cpu" if self._elsewhere else within(device, self._limits[0])
        self._hardware = open_device(name)
        self._device = passes_of(name, self._hardware)
        self._dtype = panel_type(self._opened.dtype)
        self._written = 0

    def check(self, out: Any, name: str, force: bool, notice: Callable[[str], None] | None) -> None:
        """Refuse an output that cannot be written, and say what of the array is not applied. name: how
        messages call an output that is missing."""
        if self._elsewhere is not None:
            self._pool = self._elsewhere.pool(
                {"x": self._x}, (name, out), self._given[1], self._limits[0], resumes=False
            )
        if out is not None:
            check_rows(out, [self._x], force)
        observer = Observer(notice=notice)
        observer.warn_of_undecoded([self._opened])
        if self._device is None and self._elsewhere is None:
            observer.note_of_unused_limit(self._limits[1], None)

    def plan(self, out: Any, observer: Observer) -> StreamPlan:
        """What would be done. Nothing is read but for rates that are not known."""
        products, size, centre, flipped = self._choose(out)
        assert not isinstance(products, OnPool), "plans are of one machine"
        passes, elements = size.passes(self._iterations), 1.0 * self.shape[0] * self.shape[1]
        # The last pass makes one product, with the vectors that are wanted.
        iterated, wanted = 4 * elements * size.width * (passes - 1), 2 * elements * self._wanted
        touched = 1 + (0 if centre is None else CENTRED * (1 if centre == "columns" else passes))
        most = None if self._device is None else self._device.pass_limits(self._limits[1]).device
        observer.note_of_unused_limit(self._limits[1], most)
        what = "components" if self._centred else "singular values"
        load = Load(passes, self._dtype, ((iterated, size.width), (wanted, self._wanted)), touched)
        asked = Asked(
            opened=products.opened,
            turned=flipped,
            cut=products.cut,
            load=load,
            result=f"{self._wanted} {what}, by iterating {size.width} vectors",
            device=self._hardware,
            memory_limit=self._limits[0],
            device_memory_limit=most,
            out=out,
            shape=(self.shape[0], self._wanted),
            dtype=self._dtype,
        )
        return forecast(asked, observer)

    def carry_out(
        self,
        seed: int,
        out: Any,
        force: bool,
        progress: Callable[[float], None] | None,
        scaled: bool,
    ) -> tuple[Array | None, Floats, Array]:
        """The left vectors times the singular values (`scaled`: the vectors alone), or None where they went
        to `out`; the singular values; and the right vectors, as rows."""
        self._products, size, centre, flipped = self._choose(out)
        all_passes = size.passes(self._iterations)
        (m, n), itemsize = self.shape, self._opened.dtype.itemsize
        meter = Meter(f"components of {self.name}", nbytes=all_passes * m * n * itemsize)

        def report(done: float) -> None:
            meter(min(done / all_passes, UNWRITTEN))
            if progress is not None:
                progress(meter.fraction)

        self.subspace = Subspace(self._products, size, centre, report)
        try:
            with letting_go(), closing(self._products), meter:
                found = self._computed(seed, out, force, scaled, flipped)
        except NotFiniteError as error:
            raise InputError(
                f"{self.name}{self._where()} holds NaN or infinite numbers; replace them"
            ) from error
        if progress is not None:
            progress(1.0)
        return found

    def _where(self) -> str:
        """Say which column is the first that holds NaN or infinite numbers, from a pass over the array. On a
        cluster that is not looked for, because this process would read all of it."""
        columns: list[int] = []
        if self._pool is not None:
            return ""

        def work(values: Array, rows: Range, cols: Range) -> list[int]:
            return [cols[0] + int(column) for column in np.flatnonzero(~np.isfinite(values).all(axis=0))[:1]]

        opened = self._opened.measured(self._limits[0])
        Pieces(opened, self._limits[0], "look through", Needs(element=1)).each(work, columns.extend)
        return f": column {min(columns)}" if columns else ""

    def _computed(
        self, seed: int, out: Any, force: bool, scaled: bool, flipped: bool
    ) -> tuple[Array | None, Floats, Array]:
        """Carry out all passes; what `carry_out` returns."""
        found = self.subspace.found(self._iterations, seed)
        # Scores have the type of products, and are no larger than the largest singular value.
        dtype = np.dtype(np.float64) if scaled else self._dtype
        if not self.subspace.restored(found.values[:1])[0] <= np.finfo(dtype).max:
            raise InputError(
                f"{self.name} has a singular value that is too large for {dtype}; scale the array"
            )
        if not flipped:
            return self._from_rows(found.right, scaled, out, force)
        made, values, right = self._from_transpose(found, scaled)
        self._opened.check_unchanged()
        if out is None:
            return made, values, right
        self._written = write_rows(out, made, force)
        return None, values, right

    def took(self, begin: float) -> dict[str, Any]:
        """The fields of `Passes`. begin: when the run began."""
        return {
            "passes": self.subspace.passes,
            "seconds": time.perf_counter() - begin,
            "bytes_read": self._products.bytes_read,
            "bytes_written": self._written,
            "peak_host_bytes": self._products.peak_host_bytes,
            "device": self._products.device,
            "peak_device_bytes": self._products.peak_device_bytes,
        }

    def _choose(self, out: Any) -> tuple[OnCPU | OnDevice | OnPool, Size, Centre, bool]:
        """What multiplies x, or its transpose, whichever fits the limits, the one with the shorter vectors
        first; its size, what is centred, and whether it is the transpose. Raises BudgetError."""
        (m, n), k = self.shape, self._wanted
        itemsize, failed = self._dtype.itemsize, []
        opened, refused = tried(self._opened, self._limits[0])
        for flipped in (m < n, m >= n):
            if flipped:
                # Both kinds of vectors are held, and copies in float64 of those that are projected.
                size, extra = Size(n, m, k), n * k * (itemsize + 3 * 8) + m * k * itemsize
            else:
                size, extra = Size(m, n, k), n * k * itemsize + (m * k * itemsize if out is None else 0)
            extra += ROOM + (memory((m, k), self._dtype) if out is not None else 0)
            centre: Centre = None if not self._centred else "rows" if flipped else "columns"
            matrix = self._turned(opened) if flipped else opened
            try:
                found = self._multiplying(matrix, size, centre, extra, flipped)
            except BudgetError as error:
                failed.append(error)
                continue
            if refused is None:
                return found, size, centre, flipped
            failed.append(refused)
        raise min(failed, key=lambda error: error.minimum_memory_limit or 0)

    def _multiplying(
        self, matrix: Opened, size: Size, centre: Centre, extra: int, flipped: bool
    ) -> OnCPU | OnDevice | OnPool:
        """What multiplies a matrix. flipped: it is the transpose of x. Raises BudgetError."""
        if self._pool is not None and self._elsewhere is not None:
            beside = partial(self._elsewhere.beside, self._given[0])
            return OnPool(self._pool, beside, matrix, Matrix(flipped, size, centre, self._limits[1], extra))
        passes = size.passes(self._iterations)
        if self._device is None:
            return OnCPU(matrix, size, centre, self._limits[0], extra, passes=passes)
        return OnDevice(matrix, size, centre, self._limits, extra, self._device, passes)

    def _turned(self, opened: Opened) -> Opened:
        """The transpose; of an array in memory a view, any part of which can be read."""
        return open_operand(self._x.T, "x") if isinstance(self._x, np.ndarray) else opened.transpose()

    def _from_rows(
        self, vectors: Floats, scaled: bool, out: Any, force: bool
    ) -> tuple[Array | None, Floats, Array]:
        """Y = x·V is made for the vectors of the iteration. Then V and Y are turned, so that columns of Y are
        orthogonal, the largest first: YᵀY says how."""
        shape = self.shape[0], self._wanted
        with KeptRows(shape, self._dtype, out) as rows:
            values, left, right = decomposed(self.subspace.projected(vectors, rows.add))
            self._opened.check_unchanged()
            vectors = vectors @ right
            signs = _signs(vectors)
            turn = signs * (left * self._there(values) if scaled else right)
            with nullcontext() if out is None else RowWriter(out, shape, self._dtype, force) as writer:
                for some in rows.blocks():
                    turned = some.astype(np.float64) @ turn
                    some[...] = turned if scaled else self.subspace.restored(turned)
                    if writer is not None:
                        writer.add(some)
        if writer is not None:
            self._written = writer.bytes_written
        vt = np.ascontiguousarray((vectors * signs).T, self._dtype)
        return rows.array, self.subspace.restored(values), vt

    def _from_transpose(self, found: Found, scaled: bool) -> tuple[Array, Floats, Array]:
        """The left vectors are those of the iteration. The last pass makes right ones, of which x makes the
        left ones times the singular values."""
        basis = np.empty((self.shape[1], self._wanted), np.float64)
        at = 0

        def add(rows: Array) -> None:
            nonlocal at
            basis[at : at + len(rows)] = rows
            at += len(rows)

        self.subspace.projected(found.inverse, add)
        basis, triangle = np.linalg.qr(basis)  # orthonormal also where singular values are zero
        basis *= np.where(np.diag(triangle) < 0, -1.0, 1.0)
        signs, values = _signs(basis), self.subspace.restored(found.values)
        left = found.right * (signs * (self._there(found.values) if scaled else values))
        return left.astype(self._dtype), values, np.ascontiguousarray((basis * signs).T, self._dtype)

    def _there(self, values: Floats) -> Array:
        """Which singular values are not zero to rounding."""
        return np.asarray(values > np.finfo(self._dtype).eps * max(self.shape) ** 0.5 * values[0])


def _signs(vectors: Floats) -> Floats:
    """Return factors that make the largest element of each column positive."""
    largest = vectors[np.argmax(np.abs(vectors), axis=0), np.arange(vectors.shape[1])]
    return np.where(largest < 0, -1.0, 1.0)
