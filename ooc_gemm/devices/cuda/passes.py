"""Passes over one matrix on one GPU (`engine/passes.py`).

    slot ──2-D copy, upload stream──► panel P ──centre.cu──► Y = P·V ──► YᵀY, Z += Pᵀ·Y      compute stream
                                                                └─────► YᵀY, slot

cuBLAS makes products in the type of panels, never in TF32, and adds up RUN terms at most. sum.cu adds up
these parts: for Y in the type of panels, for Z and YᵀY in float64.
"""

import contextlib
from threading import Lock
from typing import Any

import numpy as np

from ...cuda_kernels import cublas, driver, preparations
from ...cuda_kernels.driver import TO_DEVICE, TO_HOST, Event
from ...cuda_kernels.launch import load
from ...cuda_kernels.product import Operand, Product
from ...engine.passes import PassSums, PassWork
from ...engine.ports import COMPUTE, UPLOAD, Array
from ...planning.passes import LOAD_BYTES, PANELS, RUN, PassPlan
from ...planning.schedule import Piece
from ...support.buffers import Bytes
from ...support.intervals import ceil_div, ranges
from ...support.onward import Onward
from .arrays import allocate, copy_2d
from .check import add_products
from .gpu import FIRST, GPU
from .pinned import HostMemory
from .rates import CONTEXT_BYTES

_DOWN, _UP, _WITHIN = 2, 1, 3
"""cudaMemcpyKind: to the host, to the device, from device to device."""
_FLOAT64 = np.dtype(np.float64)


class CUDAPasses(HostMemory):
    """Passes on one GPU: its arrays, streams and kernels."""

    def __init__(self, device: GPU, plan: PassPlan, stored: np.dtype[Any], panel: np.dtype[Any]):
        super().__init__(device)
        self._plan, self._panel = plan, panel
        self._cupy, self._runtime = device.cupy, device.runtime
        self._free = self._least_free = device.free
        self._arrays: dict[Any, Any] = {}
        self._streams: dict[str, Any] = {}
        self._staging = Lock()
        try:
            self._open(stored)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one that counts
                self.close()
            raise

    def _open(self, stored: np.dtype[Any]) -> None:
        """Allocate all arrays, make streams, and load kernels."""
        self._device.use()
        plan, panel = self._plan, self._panel
        cols, w, lines = plan.problem.shape[1], plan.width, plan.lines
        rows, self._pitch = plan.panel_shape
        wanted: dict[Any, tuple[int, np.dtype[Any]]] = {
            ("panel", p): (rows * self._pitch, panel) for p in range(PANELS)
        }
        wanted |= dict.fromkeys(("ones", "shift", "means", "squares", "unused"), (lines, _FLOAT64))
        wanted |= {"vectors": (cols * w, panel), "y": (plan.height * w, panel)}
        wanted |= {"z": (cols * w, _FLOAT64), "gram": (w * w, _FLOAT64)}
        wanted["parts"] = plan.parts_bytes, np.dtype(np.uint8)
        wanted["kept"] = plan.kept * rows * self._pitch, panel
        if panel != _FLOAT64:
            wanted["wide y"] = plan.height * w, _FLOAT64
        if plan.problem.converted:
            wanted["staging"] = plan.slot_bytes, np.dtype(np.uint8)
        self._arrays = allocate(self._device, wanted)
        self._device.reserve_events()
        stream = self._cupy.cuda.Stream
        self._streams = {
            UPLOAD: stream(non_blocking=True, priority=FIRST),
            COMPUTE: stream(non_blocking=True),
        }
        vec = LOAD_BYTES // panel.itemsize
        self._lines = load(preparations.check(panel.name, False, vec), "rows", "columns", "signs"), vec
        self._centre = preparations.centre(panel.name)
        self._subtract = load(self._centre)["centre"]
        self._add = {
            total: load(preparations.sum_slices(total.name, part.name))["sum"]
            for part, total in ((panel, panel), (panel, _FLOAT64))
        }
        self._add_wide = load(preparations.sum_slices("float64", "float64"))["sum"]
        types = [(stored, panel), (panel, _FLOAT64)]
        self._placed = {
            source: preparations.place(source.name, target.name, False)
            for source, target in types
            if source != target
        }
        self._place = {source: load(config)["place"] for source, config in self._placed.items()}
        self._write("ones", np.ones(lines))

    def begin(self, work: PassWork) -> None:
        """Copies the vectors, and sets all sums to zero."""
        self._device.use()
        self._work = work
        vectors = np.zeros((len(work.vectors), self._plan.width), self._panel)
        vectors[:, : work.vectors.shape[1]] = work.vectors
        self._write("vectors", vectors)
        if work.shift is not None:
            self._write("shift", work.shift)
        for name in ("z", "gram", "squares"):
            self._zero(name)

    def onward(self, piece: Piece, dtype: np.dtype[Any], buffer: int) -> Onward | None:
        """Returns the place of a piece in a panel of its type."""
        if self._plan.problem.converted:
            return None
        self._device.use()
        stream, size, (row, col) = self._streams[UPLOAD], self._panel.itemsize, piece.into
        at = self._arrays["panel", buffer].data.ptr + (row * self._pitch + col) * size
        arrived = self._device.points.make()
        packed = driver.place(self._device.index, stream.ptr, arrived, at, self._pitch * size)
        return Onward(packed, lambda: arrived)

    def upload(self, source: Array, piece: Piece, buffer: int) -> Event:
        """Makes a 2-D copy into the panel, or into the staging buffer, from which the device converts it."""
        self._device.use()
        stream, size, (row, col) = self._streams[UPLOAD], self._panel.itemsize, piece.into
        at = self._arrays["panel", buffer].data.ptr + (row * self._pitch + col) * size
        if not self._plan.problem.converted:
            copy_2d(TO_DEVICE, at, self._pitch * size, source.ctypes.data, source.strides[0], source, stream)
            return self._record(stream)
        with self._staging:
            staged = self._arrays["staging"].data.ptr
            width = source.shape[1] * source.itemsize
            copy_2d(TO_DEVICE, staged, width, source.ctypes.data, source.strides[0], source, stream)
            self._convert(source.dtype, source.shape, (staged, source.shape[1]), (at, self._pitch), stream)
            return self._record(stream)

    def _convert(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], source: tuple[int, int], target: tuple[int, int],
        stream: Any,
    ) -> None:  # fmt: skip
        """Convert a matrix. `dtype`: its type. `source`, `target`: address, and elements from row to row."""
        config, i64, u, null = self._placed[dtype], np.int64, np.uintp, np.uintp(0)
        rows, cols = shape
        if not (rows and cols):
            return
        compared = np.float32 if dtype == np.float16 else dtype.type
        args = (
            i64(rows), i64(cols), u(source[0]), i64(source[1]), u(target[0]), i64(target[1]), *(null,) * 6,
            np.int32(0), compared(0), np.dtype(config.dtype).type(0),
        )  # fmt: skip
        self._place[dtype](config.grid(rows, cols), config.block, args, stream)

    def keep(self, buffer: int, slot: int) -> None:
        """Starts a copy from the buffer, before a kernel of the compute stream centres the panel there."""
        self._move(("panel", buffer), 0, "kept", slot)

    def bring(self, slot: int, buffer: int) -> None:
        """Starts a copy to the buffer, when the compute stream no longer needs what that holds."""
        self._move("kept", slot, ("panel", buffer), 0)

    def _move(self, source: Any, source_slot: int, target: Any, target_slot: int) -> None:
        """Start to copy a panel from one array to another in the upload stream. Slots count panels."""
        self._device.use()
        nbytes = self._plan.panel_bytes
        at, to = self._arrays[source].data.ptr, self._arrays[target].data.ptr
        self._runtime.memcpyAsync(
            to + target_slot * nbytes, at + source_slot * nbytes, nbytes, _WITHIN, self._streams[UPLOAD].ptr
        )

    def apply(self, buffer: int, count: int, out: Bytes) -> Event:
        """Starts all work on a panel in the compute stream."""
        self._device.use()
        work, at = self._work, self._arrays["panel", buffer].data.ptr
        if work.exponent:
            self._multiply(at, count)
        self._center(at, count)
        if work.first:
            self._sum_lines(at, count, "columns", "unused", "squares")
        self._times_vectors(at, count)
        self._add_gram(count)
        if work.projects:
            self._leave(count, out)
        else:
            self._add_products(at, count)
            if work.first and work.own:
                self._bring_means(count, out)
        return self._record(self._streams[COMPUTE])

    def _stored(self, count: int) -> tuple[int, int]:
        """Rows and columns of a panel as it is stored."""
        cols = self._plan.problem.shape[1]
        return (cols, count) if self._plan.problem.matrix.transposed else (count, cols)

    def _multiply(self, at: int, count: int) -> None:
        """Multiply a panel by the power of two of the pass, as C ← 0 + β·C, a few rows at a time: there are
        as many zeros as partial sums of products."""
        (rows, cols), size, u, i64 = self._stored(count), self._panel.itemsize, np.uintp, np.int64
        factor, zeros = self._panel.type(2.0**self._work.exponent), self._arrays["parts"].data.ptr
        self._zero("parts")
        for start, stop in ranges(rows, max(1, self._plan.parts_bytes // (size * cols))):
            args = (
                i64(stop - start), np.int32(cols), np.int32(1), self._panel.type(1), u(zeros), factor,
                u(at + start * self._pitch * size), i64(self._pitch), u(0),
            )  # fmt: skip
            grid = (ceil_div((stop - start) * cols, 256),)
            self._add[self._panel](grid, (256,), args, self._streams[COMPUTE])

    def _center(self, at: int, count: int) -> None:
        """Subtract the means that the pass subtracts."""
        work, by, scale = self._work, "shift", 1.0
        if work.own:
            by, scale = "means", 1 / (count if work.own == "columns" else self._plan.problem.shape[1])
            self._zero("means")
            down = (work.own == "columns") != self._plan.problem.matrix.transposed
            self._sum_lines(at, count, "columns" if down else "rows", "means", None)
        elif work.shift is None:
            return
        stored, u, i64 = self._stored(count), np.uintp, np.int64
        vector, null = u(self._arrays[by].data.ptr), u(0)
        of_rows = (work.own == "rows") != self._plan.problem.matrix.transposed
        vectors = (vector, null) if of_rows else (null, vector)
        args = i64(stored[0]), i64(stored[1]), u(at), i64(self._pitch), *vectors, np.float64(scale)
        self._subtract(self._centre.grid(*stored), self._centre.block, args, self._streams[COMPUTE])

    def _sum_lines(self, at: int, count: int, name: str, out: str, squares: str | None) -> None:
        """Add up the rows or columns of a panel as it is stored (`name`), and their squares."""
        arrays, matrix = self._arrays, (at, self._pitch, *self._stored(count))
        to = 0 if squares is None else arrays[squares].data.ptr
        add_products(
            self._lines, name, matrix, arrays["ones"].data.ptr, arrays[out].data.ptr, to,
            self._streams[COMPUTE],
        )  # fmt: skip

    def _times_vectors(self, at: int, count: int) -> None:
        """Y = P·V."""
        cols, w, y = self._plan.problem.shape[1], self._plan.width, self._arrays["y"].data.ptr
        transposed = self._plan.problem.matrix.transposed
        step = self._pitch if transposed else 1
        slices = self._sliced(
            (count, w, cols), (at, self._pitch, step, transposed), self._arrays["vectors"].data.ptr
        )
        self._add_up(self._add[self._panel], self._panel, (count, w), slices, y, 0)

    def _add_products(self, at: int, count: int) -> None:
        """Add Pᵀ·Y of a panel to Z."""
        cols, w, arrays = self._plan.problem.shape[1], self._plan.width, self._arrays
        transposed = self._plan.problem.matrix.transposed
        step, y = 1 if transposed else self._pitch, arrays["y"].data.ptr
        slices = self._sliced((cols, w, count), (at, self._pitch, step, not transposed), y)
        self._add_up(self._add[_FLOAT64], _FLOAT64, (cols, w), slices, arrays["z"].data.ptr, 1)

    def _add_gram(self, count: int) -> None:
        """Add YᵀY of a panel to that of all."""
        w, arrays = self._plan.width, self._arrays
        y = arrays["y"].data.ptr
        if self._panel != _FLOAT64:
            wide = arrays["wide y"].data.ptr
            self._convert(self._panel, (count, w), (y, w), (wide, w), self._streams[COMPUTE])
            y = wide
        slices = self._sliced((w, w, count), (y, w, w, True), y, _FLOAT64)
        self._add_up(self._add_wide, _FLOAT64, (w, w), slices, arrays["gram"].data.ptr, 1)

    def _sliced(
        self, shape: tuple[int, int, int], a: tuple[int, int, int, bool], b: int,
        dtype: np.dtype[Any] | None = None,
    ) -> int:  # fmt: skip
        """Start products op(A)·B for each RUN of k, one after the other in `parts`. Returns their number.

        `shape`: m, n, k. `a`: address, elements from row to row as A is stored and from one k to the next,
        and whether A is stored transposed. `b`: address of B, which is dense.
        """
        dtype = dtype or self._panel
        (m, n, k), (at, pitch, step, transposed), size = shape, a, dtype.itemsize
        full, rest = divmod(k, RUN)
        parts, stream = self._arrays["parts"].data.ptr, self._streams[COMPUTE]
        operations = cublas.operation(transposed), cublas.operation(False)
        if full:
            product = Product(m, n, RUN, 1, Operand(at, pitch), Operand(b, n), 0, Operand(parts, n))
            cublas.gemm_batch(
                self._cupy.cuda, product, stream, operations=operations, dtype=dtype.name, count=full,
                steps=(RUN * step, RUN * n, m * n),
            )  # fmt: skip
        if rest:
            left = Operand(at + full * RUN * step * size, pitch)
            right, to = Operand(b + full * RUN * n * size, n), Operand(parts + full * m * n * size, n)
            product = Product(m, n, rest, 1, left, right, 0, to)
            types = dtype.name, dtype.name
            cublas.gemm(self._cupy.cuda, product, stream, operations=operations, types=types)
        return full + bool(rest)

    def _add_up(
        self, kernel: Any, dtype: np.dtype[Any], shape: tuple[int, int], slices: int, out: int, beta: int
    ) -> None:
        """Add up the parts of a product. `dtype`: the type of the sums. `beta`: 1 to add them to what lies at
        `out`, else 0."""
        (m, n), u, i64, scalar = shape, np.uintp, np.int64, dtype.type
        args = (
            i64(m), np.int32(n), np.int32(slices), scalar(1), u(self._arrays["parts"].data.ptr), scalar(beta),
            u(out), i64(n), u(0),
        )  # fmt: skip
        kernel((ceil_div(m * n, 256),), (256,), args, self._streams[COMPUTE])

    def _leave(self, count: int, out: Bytes) -> None:
        """Start to copy Y to the host, without what fills up its rows."""
        w, size, stream = self._plan.width, self._panel.itemsize, self._streams[COMPUTE]
        y, wanted = self._arrays["y"].data.ptr, self._work.vectors.shape[1] * size
        self.prepare(out)
        driver.copy(TO_HOST, out.ctypes.data, wanted, y, w * size, wanted, count, stream.ptr)

    def _bring_means(self, count: int, out: Bytes) -> None:
        """Start to copy the sums of the panel's columns, or rows, to the host."""
        lines = count if self._work.own == "rows" else self._plan.problem.shape[1]
        self.prepare(out)
        source, stream = self._arrays["means"].data.ptr, self._streams[COMPUTE]
        driver.copy(TO_HOST, out.ctypes.data, lines * 8, source, lines * 8, lines * 8, 1, stream.ptr)

    def sums(self) -> PassSums:
        """Copies the sums to the host."""
        self._device.use()
        shown = self._work.vectors.shape[1]
        cols, w = self._plan.problem.shape[1], self._plan.width
        z, gram, squares = (self._read(name) for name in ("z", "gram", "squares"))
        return PassSums(
            np.ascontiguousarray(z.reshape(cols, w)[:, :shown]),
            np.ascontiguousarray(gram.reshape(w, w)[:shown, :shown]),
            float(squares.sum()),
        )

    def _write(self, name: str, values: Array) -> None:
        """Copy values to the beginning of an array, and wait for that."""
        stream = self._streams[COMPUTE]
        to = self._arrays[name].data.ptr
        self._runtime.memcpyAsync(to, values.ctypes.data, values.nbytes, _UP, stream.ptr)
        stream.synchronize()

    def _read(self, name: str) -> Array:
        """Wait for the compute stream, and copy an array to the host."""
        stream, array = self._streams[COMPUTE], self._arrays[name]
        found: Array = np.empty(array.nbytes // 8)
        self._runtime.memcpyAsync(found.ctypes.data, array.data.ptr, found.nbytes, _DOWN, stream.ptr)
        stream.synchronize()
        return found

    def _zero(self, name: str) -> None:
        array = self._arrays[name]
        driver.fill(array.data.ptr, 0, array.nbytes, self._streams[COMPUTE])

    def _record(self, stream: Any) -> Event:
        return self._device.points.record(stream.ptr)

    def record(self, stream: str) -> Event:
        """Records an event at the end of the stream."""
        self._device.use()
        return self._record(self._streams[stream])

    def wait(self, stream: str, event: Any) -> None:
        """Lets the stream wait on the device. The caller does not wait."""
        self._device.use()
        driver.wait(self._streams[stream].ptr, event)

    def peak_bytes(self) -> int:
        """Adds the context to the decrease of free memory since it was made."""
        return CONTEXT_BYTES + int(self._free - self._least_free)

    def close(self) -> None:
        """Waits for the work under way, and frees everything."""
        try:
            self._device.use()
            for stream in self._streams.values():
                stream.synchronize()
            if self._arrays:
                self._least_free = min(self._least_free, self._device.free_bytes())
        finally:
            self._streams = {}
            self._arrays.clear()
            super().close()
