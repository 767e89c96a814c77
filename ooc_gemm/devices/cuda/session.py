"""A run on one NVIDIA GPU through CuPy: streams, pinned slots, 2-D copies, events.

    slot (pinned) ──2-D copy, upload stream──► panel ──kernel, compute stream──► C block
                                                       C block ──2-D copy, download stream──► slot (pinned)

Nothing here waits for the device but `Event.synchronize`, which readers and writers call.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import numpy as np

from ...cuda_kernels import driver
from ...cuda_kernels.driver import Event
from ...cuda_kernels.product import Operand, Product, Stay
from ...cuda_kernels.transposition import Transposition
from ...engine.overflow import Overflow
from ...engine.ports import (
    COMPUTE,
    DOWNLOAD,
    UPLOAD,
    Array,
    Check,
    Lost,
    Operation,
    Session,
)
from ...planning.ledger import PAGE, decoders, lost_bytes, panel_elements, staged_bytes
from ...planning.plan import Plan
from ...planning.schedule import Block, Part, Piece
from ...support.onward import Inward, Onward
from ...support.shared import in_thread
from ...support.trace import PASS, Trace
from .arrays import allocate, allocate_shared
from .check import Checks
from .decoding import Decoding
from .gemm import Gemm
from .gpu import FIRST, GPU
from .leaving import Leaving
from .panels import Layout
from .pinned import HostMemory
from .rates import CONTEXT_BYTES
from .reduction import Found
from .samples import Samples
from .standardizing import Standardizing
from .timing import Timing
from .uploads import Uploads

FREED_EARLY = 16 << 30
"""Bytes of panels that are freed while the last blocks leave, because that takes long. For smaller ones it
takes longer than it saves (H200, up to 10 GiB: 32768³ float32 .416 s instead of .413, 8192³ complex128 .118
instead of .113)."""

_BETWEEN_DEVICES = driver.EITHER, driver.EITHER


class LostPanelError(Exception):
    """A panel that stays would be needed as it was uploaded."""


class CUDASession(HostMemory):
    """A run on one GPU: its arrays, streams, kernel, and events."""

    def __init__(self, device: GPU, plan: Plan, operation: Operation, trace: Trace):
        super().__init__(device)
        self._cupy, self._runtime = device.cupy, device.runtime
        self._free = self._least_free = device.free
        self._arrays: dict[Any, Any] = {}
        self._streams: dict[str, Any] = {}
        self._timing = Timing(device.name, device.times, device.points)
        self._gemm: Gemm | None = None
        self._lost: Any = (0,)
        """One element, which is not 0 once a product could not be made (`Gemm.lost`)."""
        self._checks: Checks | None = None
        self._standardizing: Standardizing | None = None
        self._leaving: Leaving | None = None
        self._memory: driver.Memory | None = None
        """That of the panels of op(B), if other devices are to reach it."""
        self._shared: Future[None] | None = None
        """Until it has ended, other devices cannot reach the panels of op(B)."""
        self._uploads: Uploads | None = None
        self._decoding: Decoding | None = None
        try:
            self._open(plan, operation, trace)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one that counts
                self.close()
            raise

    def _open(self, plan: Plan, operation: Operation, trace: Trace) -> None:
        """Allocate panels and blocks, make streams, and load the kernel."""
        cupy = self._cupy
        self._op, self._layout = operation, Layout(operation)
        self._overflow = Overflow(operation)
        arithmetic = operation.arithmetic
        self._device.use()
        types = arithmetic.panels
        panels = dict[Any, tuple[int, np.dtype[Any]]]()
        for side, (name, rooms) in enumerate(plan.rooms().items()):
            for number, (lines, depth) in enumerate(rooms):
                size = panel_elements(plan.problem, lines, lines, depth)[side]
                panels[name, number] = size, types[side]
        others: dict[Any, tuple[int, np.dtype[Any]]] = {
            ("c", c): (plan.bm * cols, arithmetic.block) for c, cols in enumerate(plan.block_rooms())
        }
        turned = {dtype for name, dtype in zip("ab", types, strict=True) if self._layout.turned(name)}
        if plan.problem.symmetric:
            part = plan.problem.c.chunk_rows * plan.problem.c.chunk_cols
            others["mirrored"] = part, operation.leaves
            turned |= {arithmetic.block, operation.leaves}
        self._turn = {dtype.name: Transposition(dtype.name) for dtype in turned}
        if operation.narrowed:
            lost_size = lost_bytes(plan.problem.c, plan.bm, plan.bn), np.dtype(np.uint8)
            others |= {("lost", c): lost_size for c in range(plan.c_buffers)}
        if staged := staged_bytes(plan.budget, plan.readers, plan.slot_bytes):
            others["staging"] = staged, np.dtype(np.uint8)
        if decoding := decoders(plan.problem, plan.budget).nbytes:
            others["decoding"] = decoding, np.dtype(np.uint8)
        if plan.budget.step:
            others["sample"] = plan.budget.step, np.dtype(np.uint8)
        if self._device.reached_by:
            theirs = {key: panels.pop(key) for key in list(panels) if key[0] == "b"}
            arrays, memory = allocate_shared(self._device, theirs)
            self._arrays |= arrays
            self._memory = memory
        for some in (panels, others):  # which go at different times
            self._arrays |= allocate(self._device, some)
        self._gemm = Gemm(
            plan, operation, self._layout, cupy.cuda, self._device.model, self._device.multiprocessors
        )
        self._depth, self._lost = plan.problem.k, self._gemm.lost
        self._kept = plan.k_panels.stay
        self._stay = [stays and arithmetic.once for stays in self._kept]
        if operation.verify:
            self._checks = Checks(
                plan, operation, self._allocate, self.prepare, self._runtime, self._timing.points
            )
        names = UPLOAD, PASS, COMPUTE, DOWNLOAD
        self._device.reserve_events()
        self._streams = {
            name: cupy.cuda.Stream(non_blocking=True, priority=0 if name == COMPUTE else FIRST)
            for name in names
        }
        if operation.standardizer:
            self._standardizing = Standardizing(
                plan, operation, self._layout, self._device, partial(allocate, self._device)
            )
        samples = None
        if plan.budget.step:
            host = self.kept_buffer(plan.budget.step)
            self._streams["samples"] = cupy.cuda.Stream(non_blocking=True, priority=FIRST)
            samples = Samples(self._timing, host, self._arrays["sample"], self._streams["samples"])
        self._leaving = Leaving(
            self._device, plan, operation, self._arrays, self._turn, self._timing, samples, self._streams,
            self.prepare, partial(allocate, self._device),
        )  # fmt: skip
        self._uploads = Uploads(
            self._device, plan, operation, self._layout, self._overflow, self._arrays, self._turn,
            self._timing, samples, self._streams[UPLOAD], self._allocate,
        )  # fmt: skip
        if decoding:
            (host,) = self.host_buffers(1, PAGE)
            self.prepare(host)
            copies = self._streams["stored"] = cupy.cuda.Stream(non_blocking=True, priority=FIRST)
            self._decoding = Decoding(
                self._device, plan, self._arrays["decoding"], host, self._timing, self._streams[UPLOAD],
                copies, self._uploads.place,
            )  # fmt: skip
        self._timing.open(trace, self._streams[COMPUTE])

    def _allocate(self, elements: int, dtype: np.dtype[Any]) -> Any:
        """Allocate one array."""
        return allocate(self._device, {0: (elements, dtype)})[0]

    def upload(self, source: Array, piece: Piece, buffer: int) -> Event:
        """Makes a 2-D copy into the panel (`Uploads`), or keeps a chunk to be decoded (`Decoding`)."""
        if self._decoding and source.ndim == 1:
            self._device.use()
            return self._decoding.upload(source, piece, buffer)
        assert self._uploads is not None
        return self._uploads.upload(source, piece, buffer)

    def onward(self, piece: Piece, dtype: np.dtype[Any], buffer: int) -> Onward | None:
        """Returns the place of a piece on the device (`Uploads`)."""
        if self._decoding and self._decoding.takes(piece):
            return None
        assert self._uploads is not None
        return self._uploads.onward(piece, dtype, buffer)

    def take(
        self,
        other: Session,
        panel: tuple[int, int],
        rows: tuple[int, int],
        cols: tuple[int, int],
        buffer: int,
        uploaded: Any,
    ) -> None:
        """Makes a 2-D copy from panel to panel, in the stream *pass*."""
        assert isinstance(other, CUDASession)
        if other._shared:
            other._shared.result()
        self._device.use()
        stream, size = self._streams[PASS], self._op.arithmetic.panel.itemsize
        driver.wait(stream.ptr, uploaded)
        if self._layout.turned("b"):
            panel, rows, cols = panel[::-1], cols, rows
        pitch = self._layout.row("b", panel[1])
        at = (rows[0] * pitch + cols[0]) * size
        width, lines = (cols[1] - cols[0]) * size, rows[1] - rows[0]
        to, source = (session._arrays["b", buffer].data.ptr + at for session in (self, other))
        start = self._timing.begin(stream)
        driver.copy(_BETWEEN_DEVICES, to, pitch * size, source, pitch * size, width, lines, stream.ptr)
        self._timing.end(PASS, start, stream, width * lines)

    def multiply(
        self, block: Block, panel: tuple[int, int], pair: tuple[int, int], c: int, first: bool
    ) -> None:
        """Starts one GEMM in the compute stream; for a block on the diagonal perhaps one for each strip of
        rows."""
        self._device.use()
        self._check_lost()
        op, k = self._op, panel[1] - panel[0]
        self._overflow.multiply(block, pair, c, k, first, self._kept)
        stream = self._streams[COMPUTE]
        start = self._timing.begin(stream)
        a, b, out = (self._arrays[key] for key in (("a", pair[0]), ("b", pair[1]), ("c", c)))
        lda, ldb = (
            self._layout.pitch(name, k, lines) for name, lines in (("a", block.rows), ("b", block.cols))
        )
        if self._standardizing:
            whole = Operand(b.data.ptr, ldb) if block.band else Operand(a.data.ptr, lda)
            self._standardizing.standardize(whole, panel, stream)
        if block.band:
            self._copy_band(block, k, a, b, stream)
        if self._checks:
            if first:
                self._checks.begin(block, out, stream)
            left, right = (
                (a.data.ptr, lda, self._layout.along_k("a")),
                (b.data.ptr, ldb, self._layout.along_k("b")),
            )
            self._checks.add(block, k, left, left if block.diagonal else right, stream)
        for memory, conjugate, transpose in (
            (a, op.conjugate_a, op.transpose_a),
            (b, op.conjugate_b, op.transpose_b),
        ):
            if conjugate and op.arithmetic.kernel == "cublas" and not transpose:
                with stream:
                    self._cupy.conjugate(memory, out=memory)
        beta = op.beta if first else 1.0
        assert self._gemm is not None
        assert self._leaving is not None
        strips = self._leaving.strips(block, c, panel[1] == self._depth and not self._checks)
        if op.alpha == 0:  # a library may make NaN of 0·NaN
            self._scale(block, c, beta)
            return
        if op.arithmetic.kernel == "cublas" and out.dtype.kind == "c" and beta != 0:
            self._scale(block, c, beta)  # cuBLAS would multiply by β + 0i
            beta = 1.0
        if block.diagonal:
            b = self._as_b(a, b, (k, block.rows) if op.transpose_a else (block.rows, k), stream)
        product = Product(
            block.rows, block.cols, k, op.alpha, Operand(a.data.ptr, lda), Operand(b.data.ptr, ldb), beta,
            Operand(out.data.ptr, block.cols),
            (
                Stay(pair[0], block.row) if self._stay[0] else None,
                Stay(pair[1], block.col) if self._stay[1] else None,
            ),
        )  # fmt: skip
        self._gemm(product, stream, strips)
        self._timing.end(COMPUTE, start, stream, 0, block=block.index, k=k)

    def _copy_band(self, block: Block, k: int, a: Any, b: Any, stream: Any) -> None:
        """Copy the panel of op(A) of a band from the panel of op(B), which is laid out likewise."""
        along_k, size, rows = self._layout.along_k("b"), b.itemsize, block.rows
        assert self._layout.along_k("a") == along_k, "op(B) is op(A) transposed, for all kernels"
        to, pitch = (self._layout.pitch(*side) for side in (("a", k, rows), ("b", k, block.cols)))
        at = b.data.ptr + (block.row - block.col) * (pitch if along_k else 1) * size
        width, lines = (k, rows) if along_k else (rows, k)
        driver.copy(
            driver.WITHIN_DEVICE, a.data.ptr, to * size, at, pitch * size, width * size, lines, stream.ptr
        )

    def _as_b(self, a: Any, b: Any, shape: tuple[int, int], stream: Any) -> Any:
        """Return op(A)ᵀ in the layout of op(B)'s panels, for a panel of op(A) that has this shape as stored:
        the panel itself, or its copy in the panel of op(B)."""
        if self._layout.along_k("a") == self._layout.along_k("b"):
            return a
        with stream:
            self._cupy.copyto(self._layout.panel(b, "b", shape), self._layout.panel(a, "a", shape))
        return b

    def mirror(self, block: Block, c: int, col: int = 0) -> None:
        """Works in place, in the compute stream, unless `multiply` has done so strip by strip."""
        if self._leaving and self._leaving.is_mirrored(block, c):
            return
        self._device.use()
        stream, n = self._streams[COMPUTE], block.rows
        start = self._timing.begin(stream)
        out = self._arrays["c", c]
        square = Operand(out.data.ptr + col * out.itemsize, block.cols)
        self._turn[self._op.arithmetic.block.name].mirror(n, square, stream)
        self._timing.end(COMPUTE, start, stream, 0, block=block.index)

    def check(self, block: Block, c: int) -> Check:
        """Works in the compute stream."""
        self._device.use()
        stream = self._streams[COMPUTE]
        assert self._checks is not None
        start = self._timing.begin(stream)
        check = self._checks.end(block, self._arrays["c", c], c, stream)
        self._timing.end(COMPUTE, start, stream, 0, block=block.index)
        return check

    def scale(self, block: Block, c: int) -> None:
        """Works in place, in the compute stream."""
        self._overflow.scale(c)
        self._device.use()
        if self._checks:
            self._checks.begin(block, self._arrays["c", c], self._streams[COMPUTE])
        self._scale(block, c, self._op.beta)

    def _scale(self, block: Block, c: int, beta: complex) -> None:
        """Multiply a block by β in place. If β is real, the parts of a complex C are multiplied one by one,
        as `blas.scale_in_place` does."""
        out = self._arrays["c", c][: block.rows * block.cols]
        with self._streams[COMPUTE]:
            if beta == 0:
                out.fill(0)
            elif beta == 1:
                return
            elif out.dtype.kind == "c" and beta.imag == 0:
                parts = out.view(out.dtype.char.lower())
                parts *= parts.dtype.type(beta.real)
            else:
                out *= out.dtype.type(beta if out.dtype.kind == "c" else beta.real)

    def finish(self, block: Block, c: int) -> None:
        """Lets the block leave (`Leaving`). This waits for the compute stream where panels were
        standardized."""
        self._device.use()
        if self._standardizing:
            self._standardizing.deliver(self._streams[COMPUTE])
        assert self._leaving is not None
        self._leaving.finish(block, c)

    def download(self, block: Block, part: Part, c: int, target: Array) -> Event | Found:
        """Copies, or hands on what was found (`Leaving`)."""
        self._device.use()
        assert self._leaving is not None
        return self._leaving.download(block, part, c, target)

    @property
    def brings(self) -> bool:
        """Whether parts leave without slots (`Leaving`)."""
        return self._leaving is not None and self._leaving.brings

    def inward(self, block: Block, parts: Sequence[Part], c: int) -> Inward | None:
        """Returns the place of parts on the device (`Leaving`)."""
        assert self._leaving is not None
        return self._leaving.inward(block, parts, c)

    def lost(self, block: Block, part: Part, c: int) -> Lost:
        """Reads what the device has counted."""
        if self._decoding:
            self._decoding.check()
        self._check_lost()
        assert self._leaving is not None
        return self._leaving.lost(block, part, c)

    def _check_lost(self) -> None:
        """Raise LostPanelError where a product that the device has come to could not be made."""
        if self._lost[0]:
            raise LostPanelError(f"{self._device.name} needs a panel again as it was before it was split")

    def gathers(self, pair: tuple[int, int]) -> bool:
        """Whether chunks of these panels are to be decoded with others (`Decoding`)."""
        return self._decoding is not None and self._decoding.gathers(pair)

    def record(self, stream: str, pair: tuple[int, int] | None = None) -> Event:
        """Records an event at the end of the stream, in which chunks that were uploaded are decoded first."""
        self._device.use()
        if self._decoding and stream == UPLOAD:
            self._decoding.complete(pair)
        return self._timing.points.record(self._streams[stream].ptr)

    def wait(self, stream: str, event: Any) -> None:
        """Lets the stream wait on the device. The caller does not wait."""
        self._device.use()
        driver.wait(self._streams[stream].ptr, event)

    def free_panels(self) -> None:
        """Frees panels that are large, and the kernel's scratch memory. Downloads go on meanwhile, but wait
        for the driver while it frees. Small panels are freed at the end, beside other work."""
        panels = [key for key in self._arrays if key[0] in ("a", "b")]
        if sum(self._arrays[key].nbytes for key in panels) < FREED_EARLY:
            return
        self._device.use()
        self._streams[COMPUTE].synchronize()
        self._wait_for_share()
        self._least_free = min(self._least_free, self._device.free_bytes())
        self._gemm = None
        for key in panels:
            del self._arrays[key]

    def share(self) -> None:
        """Lets the devices that reach this one have its panels of op(B). The driver takes some 50 ms for
        that, in which it allocates nothing."""
        if self._memory:
            self._shared = in_thread("access", partial(self._memory.share, tuple(self._device.reached_by)))
            self._memory = None

    def _wait_for_share(self) -> None:
        """Wait until memory is no longer being shared, which must not be freed meanwhile."""
        if self._shared:
            wait([self._shared])

    def peak_bytes(self) -> int:
        """Adds the context to the decrease of free memory since it was made."""
        return CONTEXT_BYTES + int(self._free - self._least_free)

    def cancel(self) -> None:
        """Does nothing: kernels are short."""

    def close(self) -> None:
        """Waits for the work under way, tells the trace of it, and frees everything."""
        try:
            self._cupy.cuda.Device(self._device.index).use()
            self._wait_for_share()
            for stream in self._streams.values():
                stream.synchronize()
            if self._arrays:
                self._least_free = min(self._least_free, self._device.free_bytes())
            self._timing.tell_all()
        finally:
            self._streams = {}
            self._arrays.clear()
            self._gemm = self._checks = self._uploads = self._decoding = None  # and their scratch
            self._lost = (0,)
            self._leaving = self._standardizing = None
            self._timing.close()
            super().close()
