"""One NVIDIA GPU through CuPy: streams, pinned slots, 2-D copies, events.

    slot (pinned) ──2-D copy, upload stream──► panel ──kernel, compute stream──► C block
                                                       C block ──2-D copy, download stream──► slot (pinned)

Nothing here waits for the device but `Event.synchronize`, which readers and writers call.
"""

import contextlib
import itertools
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from mmap import PAGESIZE
from threading import Lock
from typing import Any

import numpy as np

from ...cuda_kernels import catalog, driver
from ...cuda_kernels.catalog import KERNELS
from ...cuda_kernels.complex_gemm import ComplexGemm, product_bytes
from ...cuda_kernels.driver import Event
from ...cuda_kernels.mma import Mma
from ...cuda_kernels.roofline import most_flops, peak_flops
from ...cuda_kernels.tensor import BYTES_PER_LINE, load, split_pays, strips
from ...cuda_kernels.tuning import best_config
from ...cuda_kernels.wgmma import Wgmma
from ...engine.ports import (
    COMPUTE,
    DOWNLOAD,
    UPLOAD,
    Arithmetic,
    Array,
    Check,
    Device,
    Failure,
    Limits,
    Operation,
    Overflow,
)
from ...planning.ledger import panel_elements
from ...planning.machine import Rates
from ...planning.plan import Plan
from ...planning.problem import MiB
from ...planning.schedule import EARLY_STRIPS, Block, Part, Piece
from ...support import cache
from ...support.buffers import Bytes, page_aligned
from ...support.errors import NO_MEMORY, DeviceError, InputError, OutOfMemoryError
from ...support.intervals import BAND, ceil_div, ranges, round_up
from ...support.trace import PASS, Trace
from .check import Checks

HOST_BASELINE = 704 * MiB
"""Resident set of a process with a CUDA context, CuPy and cuBLAS loaded (measured 480 to 560 MiB)."""
CONTEXT_BYTES = 528 * MiB
"""Device memory of a context (measured 527 MiB on an H200)."""
LIBRARY_BYTES = 144 * MiB
"""Device memory of cuBLAS: its handle and workspace (measured 132 MiB)."""
MODULE_BYTES = 48 * MiB
"""Device memory of our own kernels, loaded, of CuPy's that convert and turn, and what a dozen allocations are
rounded up by, to 2 MiB (with 32 MiB a product within the smallest limit passed it by 7 MB)."""

ALIGN = 512
"""Bytes that arrays begin at multiples of."""

THIN = 512
"""Rows or columns of C below which our tiles for float16 lie half empty."""

STRIP_ELEMENTS = 1 << 25
"""Of C in a strip that is finished before others, at least: tiles for all multiprocessors many times over."""

SPANS = 128
"""Operations whose events are kept before the trace is told: a product of many pieces has a million, and at
the end each takes 15 µs."""

COPIES_TIMED = 8
"""One in so many has two events of its own, which take as long as the copy."""

_CUDA_TYPE = {"f": 0, "d": 1, "e": 2, "F": 4, "D": 5}
_COMPUTE_32F, _COMPUTE_64F = 68, 70
_OP_N, _OP_T, _OP_C = 0, 1, 2
_DEFAULT_ALGORITHM = -1
_CUDA_FULL, _CUBLAS_FULL = 2, 3
"""Status of an allocation that failed."""
_TO_DEVICE, _TO_HOST = (driver.DEVICE, driver.HOST), (driver.HOST, driver.DEVICE)
_BETWEEN_DEVICES = driver.EITHER, driver.EITHER
_PORTABLE = 1
"""Pinned for all devices."""
_CLOCK_RATE, _MEMORY_CLOCK_RATE, _MEMORY_BUS_WIDTH = 13, 36, 37
"""cudaDeviceAttr: kHz, kHz, bits."""


def _cupy() -> Any:
    cache.guard_cupy()
    try:
        import cupy
    except ImportError as error:
        raise InputError(
            "there is no CuPy; install it with pip install 'ooc-gemm[cuda13]' or use device='cpu'"
        ) from error
    return cupy


def count() -> int:
    """How many GPUs there are. Raises InputError where there is none."""
    runtime = _cupy().cuda.runtime
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise InputError(f"there is no usable GPU ({error}); use device='cpu'") from error


_ANSWER = "import cupy, sys; cupy.cuda.Device(int(sys.argv[1])).use(); assert cupy.arange(8).sum() == 28"


def answering(indices: list[int]) -> list[int]:
    """Those of some GPUs that compute in a fresh process; that takes seconds."""
    command = [sys.executable, "-c", _ANSWER]
    asked = {i: subprocess.Popen([*command, str(i)], stderr=subprocess.DEVNULL) for i in indices}
    return [index for index, process in asked.items() if process.wait() == 0]


def devices() -> list[dict[str, Any]]:
    """What each GPU is; its clocks are the highest ones, and peaks are at them. Raises InputError where
    there is none."""
    cupy, found = _cupy(), []
    for index in range(count()):
        p = cupy.cuda.runtime.getDeviceProperties(index)
        clock, memory_clock, bus_bits = (
            cupy.cuda.runtime.deviceGetAttribute(attribute, index)
            for attribute in (_CLOCK_RATE, _MEMORY_CLOCK_RATE, _MEMORY_BUS_WIDTH)
        )
        capability = p["major"], p["minor"]
        with cupy.cuda.Device(index):
            free, total = cupy.cuda.runtime.memGetInfo()
        found.append(
            {
                "name": p["name"].decode(),
                "compute_capability": f"{p['major']}.{p['minor']}",
                "multiprocessors": p["multiProcessorCount"],
                "memory_bytes": total,
                "free_bytes": free,
                "l2_cache_bytes": p["l2CacheSize"],
                "shared_memory_per_block_bytes": p["sharedMemPerBlockOptin"],
                "shared_memory_per_multiprocessor_bytes": p["sharedMemPerMultiprocessor"],
                "registers_per_multiprocessor": p["regsPerMultiprocessor"],
                "warp_size": p["warpSize"],
                "clock_hertz": clock * 1000,
                "memory_clock_hertz": memory_clock * 1000,
                # Two transfers a clock.
                "memory_bandwidth_bytes_per_second": 2 * memory_clock * 1000 * bus_bits // 8,
                "peak": {
                    f"{name}_flops": rate
                    for name, rate in peak_flops(capability, p["multiProcessorCount"], clock * 1e3).items()
                },
            }
        )
    return found


_Rows = list[tuple[int, Event]]
"""Where strips of rows stop, and when each is finished."""


def early_strips(rows: int, cols: int) -> list[tuple[int, int]]:
    """In which the last multiplication makes a block of C."""
    count = max(1, min(EARLY_STRIPS, rows * cols // STRIP_ELEMENTS))
    return list(ranges(rows, round_up(ceil_div(rows, count), BAND)))


@dataclass
class _Span:
    """Two events around an operation, for its time."""

    stage: str
    start: Event
    stop: Event
    nbytes: int
    args: dict[str, Any]


class CUDA:
    """GPU number `index`."""

    def __init__(self, index: int = 0):
        cupy = self._cupy = _cupy()
        self._runtime = cupy.cuda.runtime
        if index >= (there := count()):
            raise InputError(f"there is no GPU {index}; this machine has {there}")
        self.name = "cuda" if index == 0 else f"cuda:{index}"
        self._device = cupy.cuda.Device(index)
        properties = self._runtime.getDeviceProperties(index)
        self._capability = 10 * properties["major"] + properties["minor"]
        self.model, self._multiprocessors = (
            properties["name"].decode(),
            int(properties["multiProcessorCount"]),
        )
        self.speed = self._multiprocessors * int(properties.get("clockRate") or 1_500_000) // 1000
        try:
            self._device.use()
            self._free = self._least_free = self._runtime.memGetInfo()[0]
        except self._runtime.CUDARuntimeError as error:  # not even for a context
            raise DeviceError(
                f"{self.name} cannot be used ({error}); wait until other programs leave it, "
                "or use another device"
            ) from error
        self._arrays: dict[Any, Any] = {}
        self._reached_by = set[int]()
        """Other devices that take panels from this one."""
        self._pinned: dict[int, Bytes] = {}
        self._streams: dict[str, Any] = {}
        self._times, self._points = (driver.Events(timed) for timed in (True, False))
        self._spans: deque[_Span] = deque()
        self._copies: dict[str, Iterator[int]] = {}
        self._untimed = Counter[str]()
        self._telling, self._counting = Lock(), Lock()
        self._gemm: Any = None
        self._early: dict[int, _Rows] = {}
        self._finished: dict[int, _Rows] = {}
        self._checks: Checks | None = None
        self._lock = Lock()
        self._staging, self._pinning = Lock(), Lock()

    def arithmetic(
        self,
        a: np.dtype[Any],
        b: np.dtype[Any],
        out: np.dtype[Any],
        shape: tuple[int, int, int],
        bound: int,
        kernel: str,
        precision: str,
    ) -> Arithmetic:
        """The kernel asked for, or the fastest known here that keeps the precision; every integer sum is
        exact."""
        if kernel not in ("auto", "cublas", *KERNELS):
            names = ", ".join(("auto", "cublas", *KERNELS))
            raise InputError(f"{kernel!r} is not a kernel of {self.name}; choose among {names}")
        wide = np.result_type(a, b, out, np.float32)
        if kernel == "auto":
            kernel, why = self._fastest(a, b, out, wide, shape, bound, precision)
        else:
            why = "asked for"
        found = self._with_kernel(kernel, a, b, out, wide, bound, why)
        if found is None:
            raise InputError(f"kernel {kernel!r} cannot multiply {a} by {b} into {out}; use 'auto'")
        return found

    def _fastest(
        self,
        a: np.dtype[Any],
        b: np.dtype[Any],
        out: np.dtype[Any],
        wide: np.dtype[Any],
        shape: tuple[int, int, int],
        bound: int,
        precision: str,
    ) -> tuple[str, str]:
        """A kernel and the reason, from what benchmarks/results says."""
        m, n, k = shape
        if out.kind in "iu":
            if self._capability == 90 and a == b and a.itemsize == 1 and bound < 2**31:
                return "int8", "exact in int32 on the tensor cores"
            if max(a.itemsize, b.itemsize) <= 2 and bound < 2**53:
                return "cublas", "every sum is exact in float64"
            return "ffma", "exact in int64"
        if self._capability == 90:
            if a == b == np.float16 and wide == np.float32:
                if min(m, n) < THIN:
                    return "cublas", "float16 on the tensor cores, sums in float32; C is thin"
                return "fp16", "float16 on the tensor cores, sums in float32"
            if wide == np.float32 and precision == "medium":
                return "tf32", "one TF32 product on the tensor cores, which precision medium allows"
            if wide in (np.float32, np.complex64):
                if not split_pays(m, n, k):
                    return "cublas", "too few products for each element for a split in float16 planes to pay"
                if wide == np.complex64:
                    return "fp16x3", "complex as real products as accurate as float32, ahead of CGEMM here"
                return "fp16x3", "no less accurate than float32, and over four times as fast as SGEMM here"
        return "cublas", "the fastest known here that keeps the precision"

    def _with_kernel(
        self,
        kernel: str,
        a: np.dtype[Any],
        b: np.dtype[Any],
        out: np.dtype[Any],
        wide: np.dtype[Any],
        bound: int,
        why: str,
    ) -> Arithmetic | None:
        """How that kernel multiplies these types; None where it cannot."""
        float32, float64, int64 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)
        exact, half = out.kind in "iu", a == b == np.float16 and wide == float32
        if kernel == "cublas":
            if exact:
                small = max(a.itemsize, b.itemsize) <= 2 and bound < 2**53
                return Arithmetic(kernel, float64, float64, why=why, exact=True) if small else None
            # Tensor cores are fed by 16 bytes.
            return Arithmetic(kernel, a if half else wide, wide, why=why, pitch=8 if half else 1)
        known, kind = KERNELS[kernel], kernel.removeprefix("mma-")
        if known.only_arch not in (None, self._capability) or self._capability < known.min_arch:
            return None
        if kind == "fp16x3":
            if wide == np.complex64 and kernel == kind:
                # Rows of re and of im for an A along m; B embedded, at twice its size.
                return Arithmetic(
                    kernel, wide, wide, why=why, pitch=64, line_bytes=2 * BYTES_PER_LINE, scratch=(8, 16),
                    product_bytes=product_bytes(1, 1),
                )  # fmt: skip
            fits = wide == float32
            return (
                Arithmetic(kernel, float32, float32, why=why, pitch=64, line_bytes=BYTES_PER_LINE)
                if fits
                else None
            )
        if kind == "fp16":
            return Arithmetic(kernel, a, float32, why=why, pitch=8) if half else None
        if kind == "tf32":
            fits = wide == float32
            cut = 2.0**-10  # 11 bits are left
            return (
                Arithmetic(kernel, wide, wide, why=why, pitch=4, along_k=(True, True), operand_error=cut)
                if fits
                else None
            )
        if kind == "int8":
            fits = exact and a == b and a.itemsize == 1 and bound < 2**31
            int32 = np.dtype(np.int32)
            return (
                Arithmetic(kernel, a, int32, why=why, pitch=16, along_k=(True, True), exact=True)
                if fits
                else None
            )
        wide = int64 if exact else wide
        pitch = 2 if kernel == "dmma" else 1  # 16 bytes
        along_k = (None, None) if known.transposes else (True, False)
        return (
            Arithmetic(kernel, wide, wide, why=why, pitch=pitch, along_k=along_k, exact=exact)
            if wide.name in known.dtypes
            else None
        )

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """Context and cuBLAS; 90 % of free memory unless a limit is given."""
        allowed = (
            CONTEXT_BYTES + int(0.9 * self._free) if device_memory_limit is None else device_memory_limit
        )
        code = LIBRARY_BYTES if arithmetic.kernel == "cublas" else MODULE_BYTES
        return Limits(
            host_baseline=HOST_BASELINE,
            device=allowed,
            device_baseline=CONTEXT_BYTES + code,
            workspace=0,
            readers=16,
            writers=8,
        )

    def rates(self, arithmetic: Arithmetic) -> Rates:
        """Peak rates by type from multiprocessors and clock, three quarters of which GEMM reaches; bus and
        disk as usual."""
        p = self._runtime.getDeviceProperties(self._device.id)
        clock = (p.get("clockRate") or 1_500_000) * 1e3
        lanes = p["multiProcessorCount"] * 128 * 2 * clock * 0.75
        full64 = (p["major"], p["minor"]) in ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
        times = {
            "e": 8.0,
            "f": 1.0,
            "d": 1.0 if full64 else 1 / 32,
            "F": 0.25,
            "D": 0.25 if full64 else 1 / 128,
        }
        flops = lanes * times.get(arithmetic.panel.char, 1 / 16)
        # Measured against SGEMM, DGEMM … on an H200 (benchmarks/results).
        factor = {
            "cublas": 1.0,
            "fp16x3": 4.4,
            "fp16": 1.5,
            "tf32": 7.0,
            "int8": 400.0,
            "dmma": 0.9,
            "mma-fp16x3": 2.9,
        }
        flops *= factor.get(arithmetic.kernel, 0.75)
        return Rates(flops, 3e9, 3e9, 50e9, 50e9, shared=False)

    def most_flops(self, kernel: str, panel: str) -> float:
        """By architecture, multiprocessors and the highest clock."""
        clock = 1e3 * self._runtime.deviceGetAttribute(_CLOCK_RATE, self._device.id)
        return most_flops(kernel, panel, divmod(self._capability, 10), self._multiprocessors, clock)

    def start(self, plan: Plan, operation: Operation, trace: Trace) -> None:
        """Allocate panels and blocks; make streams; load the kernel."""
        cupy = self._cupy
        self._op, self._trace = operation, trace
        self._overflow = Overflow(operation)
        arithmetic, self._block_shape = operation.arithmetic, (plan.bm, plan.bn)
        self._use()
        sizes = panel_elements(plan.problem, plan.bm, plan.bn, plan.bk)
        panels = {("a", p): (sizes[0], arithmetic.panel) for p in range(plan.k_panels.a_buffers)}
        panels |= {("b", p): (sizes[1], arithmetic.panel) for p in range(plan.panel_buffers)}
        others: dict[Any, tuple[int, np.dtype[Any]]] = {
            ("c", c): (plan.bm * plan.bn, arithmetic.block) for c in range(plan.c_buffers)
        }
        if plan.problem.symmetric:
            part = plan.problem.c.chunk_rows * plan.problem.c.chunk_cols
            others["mirrored"] = part, arithmetic.block
            self._turn = load(catalog.transpose(arithmetic.block.name), "transpose", "mirror")
        if plan.budget.staged:
            others["staging"] = plan.slot_bytes, np.dtype(np.uint8)
        if self._reached_by:
            theirs = {key: panels.pop(key) for key in list(panels) if key[0] == "b"}
            self._arrays |= self._allocate_all(theirs, self._reached_by)
        for some in (panels, others):  # which go at different times
            self._arrays |= self._allocate_all(some)
        self._gemm, self._depth = self._open_kernel(plan), plan.problem.k
        self._a_buffer = plan.k_panels.a_buffer
        self._waits_for_writes = plan.c_buffers == 1
        self._early, self._finished = {}, {}
        self._copies = {UPLOAD: itertools.count(), DOWNLOAD: itertools.count()}
        if operation.verify:
            self._checks = Checks(plan, operation, self._allocate, self.prepare, self._runtime, self._points)
        names = UPLOAD, PASS, COMPUTE, DOWNLOAD
        self._streams = {name: cupy.cuda.Stream(non_blocking=True) for name in names}
        self._base = self._times.record(self._streams[COMPUTE].ptr)
        self._base.synchronize()
        self._base_time = time.perf_counter()

    def _allocate_all(
        self, wanted: dict[Any, tuple[int, np.dtype[Any]]], reached_by: Iterable[int] = ()
    ) -> dict[Any, Any]:
        """Arrays in one allocation, that some other devices may reach into. Of their own: the memory pool
        keeps more than it is asked for."""
        cupy = self._cupy
        sizes = [round_up(max(1, n * dtype.itemsize), ALIGN) for n, dtype in wanted.values()]
        if reached_by:
            owner = driver.Memory(sum(sizes), self._device.id, reached_by)
            memory = cupy.cuda.UnownedMemory(owner.ptr, sum(sizes), owner, self._device.id)
        else:
            memory = cupy.cuda.Memory(sum(sizes))
        starts = itertools.accumulate(sizes, initial=0)
        return {
            key: cupy.ndarray((elements,), dtype, cupy.cuda.MemoryPointer(memory, at))
            for (key, (elements, dtype)), at in zip(wanted.items(), starts, strict=False)
        }

    def _allocate(self, elements: int, dtype: np.dtype[Any]) -> Any:
        """One array."""
        return self._allocate_all({0: (elements, dtype)})[0]

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Page-aligned memory that nobody has touched yet: `prepare` pins it."""
        return page_aligned(count, nbytes)

    def prepare(self, buffer: Bytes) -> None:
        """Pin a buffer, once. Pages come in when they are first touched, by many threads at a time if many
        read; pinned when they are there they cost 25 ms/GiB instead of 400 (H200 machine). The driver pins
        one after the other anyway, and copies begin between two of them unless more wait."""
        if id(buffer) not in self._pinned:
            self._use()
            try:
                with self._pinning:
                    self._runtime.hostRegister(
                        buffer.ctypes.data, round_up(buffer.nbytes, PAGESIZE), _PORTABLE
                    )
            except self._runtime.CUDARuntimeError as error:
                if error.status != _CUDA_FULL:
                    raise
                raise OutOfMemoryError(NO_MEMORY) from error
            self._pinned[id(buffer)] = buffer

    def upload(self, source: Array, piece: Piece, buffer: int) -> Event:
        """A 2-D copy into the panel, or, where the type or the orientation differs, to the staging buffer and
        converted from there: the stream's order keeps the next copy from overtaking the conversion."""
        self._use()
        self._overflow.upload(piece, buffer, source)
        memory, (row, col) = self._arrays[piece.operand, buffer], piece.into
        stream, size = self._streams[UPLOAD], source.itemsize
        start = self._from(UPLOAD)
        if memory.dtype == source.dtype and not self._turned(piece.operand):
            pitch = self._row(piece.operand, piece.panel[1])
            at = memory.data.ptr + (row * pitch + col) * size
            self._copy(_TO_DEVICE, at, pitch * size, source.ctypes.data, source.strides[0], source, stream)
        else:
            target = self._panel(memory, piece.operand, piece.panel)
            target = target[row : row + source.shape[0], col : col + source.shape[1]]
            at, width = self._arrays["staging"].data.ptr, source.shape[1] * size
            staged = self._arrays["staging"][: source.nbytes].view(source.dtype).reshape(source.shape)
            with self._staging, stream:
                self._copy(_TO_DEVICE, at, width, source.ctypes.data, source.strides[0], source, stream)
                self._cupy.copyto(target, staged, casting="unsafe")
        return self._span(UPLOAD, start, stream, source.nbytes, operand=piece.operand, chunk=piece.chunk)

    def _use(self) -> None:
        """Make it that of the calling thread: it must be so for kernels and events, and some must be for
        whatever the driver is told."""
        driver.use(self._device.id)

    @staticmethod
    def _copy(
        to: tuple[int, int], target: int, target_pitch: int, source: int, source_pitch: int, like: Array,
        stream: Any,
    ) -> None:  # fmt: skip
        """`to`: kinds of memory, as the driver has them; addresses, with bytes from row to row."""
        rows, width = like.shape[0], like.shape[1] * like.itemsize
        if rows and width:
            target_pitch, source_pitch = max(target_pitch, width), max(source_pitch, width)
            driver.copy(to, target, target_pitch, source, source_pitch, width, rows, stream.ptr)

    def reaches(self, other: Device) -> bool:
        """Over NVLink, or a bus that allows it."""
        if not isinstance(other, CUDA) or not driver.maps_memory(other._device.id):
            return False
        if not self._runtime.deviceCanAccessPeer(self._device.id, other._device.id):
            return False
        other._reached_by.add(self._device.id)
        return True

    def take(
        self,
        other: Device,
        panel: tuple[int, int],
        rows: tuple[int, int],
        cols: tuple[int, int],
        buffer: int,
        uploaded: Any,
    ) -> None:
        """A 2-D copy from panel to panel, on a stream of its own."""
        assert isinstance(other, CUDA)
        self._use()
        stream, size = self._streams[PASS], self._op.arithmetic.panel.itemsize
        driver.wait(stream.ptr, uploaded)
        if self._turned("b"):
            panel, rows, cols = panel[::-1], cols, rows
        pitch = self._row("b", panel[1])
        at = (rows[0] * pitch + cols[0]) * size
        width, lines = (cols[1] - cols[0]) * size, rows[1] - rows[0]
        to, source = (device._arrays["b", buffer].data.ptr + at for device in (self, other))
        start = self._times.record(stream.ptr)
        driver.copy(_BETWEEN_DEVICES, to, pitch * size, source, pitch * size, width, lines, stream.ptr)
        self._span(PASS, start, stream, width * lines)

    def multiply(self, block: Block, panel: tuple[int, int], p: int, c: int, first: bool) -> None:
        """One GEMM on the compute stream; on the diagonal perhaps one for each strip of rows."""
        self._use()
        op, k = self._op, panel[1] - panel[0]
        self._overflow.multiply(block, p, c, k, first)
        stream = self._streams[COMPUTE]
        start = self._times.record(stream.ptr)
        a, b, out = (self._arrays[key] for key in (("a", self._a_buffer(panel, p)), ("b", p), ("c", c)))
        lda, ldb = (self._pitch(name, k, lines) for name, lines in (("a", block.rows), ("b", block.cols)))
        if self._checks:
            if first:
                self._checks.begin(block, out, stream)
            left, right = (a.data.ptr, lda, self._along_k("a")), (b.data.ptr, ldb, self._along_k("b"))
            self._checks.add(block, k, left, left if block.diagonal else right, stream)
        for memory, conjugate, transpose in (
            (a, op.conjugate_a, op.transpose_a),
            (b, op.conjugate_b, op.transpose_b),
        ):
            if conjugate and op.arithmetic.kernel == "cublas" and not transpose:
                with stream:
                    self._cupy.conjugate(memory, out=memory)
        beta = op.beta if first else 1.0
        if op.alpha == 0:  # a library may make NaN of 0·NaN
            self._scale(block, c, beta)
            self._early[c] = []
            return
        if op.arithmetic.kernel == "cublas" and out.dtype.kind == "c" and beta != 0:
            self._scale(block, c, beta)  # cuBLAS would multiply by β + 0i
            beta = 1.0
        if block.diagonal:
            b = self._as_b(a, b, (k, block.rows) if op.transpose_a else (block.rows, k), stream)
        early: _Rows = []
        # Nothing hides the last block's writes, nor those that the next block waits for.
        last = panel[1] == self._depth and (block.last or self._waits_for_writes)
        last = last and not (block.diagonal or self._checks)
        self._gemm(
            block.rows, block.cols, k, op.alpha, a.data.ptr, lda, b.data.ptr, ldb, beta, out.data.ptr,
            block.cols, stream, lower=block.diagonal,
            rows=early_strips(block.rows, block.cols) if last else (),
            after=lambda stop: early.append((stop, self._points.record(stream.ptr))),
        )  # fmt: skip
        self._early[c] = early if last else []
        self._span(COMPUTE, start, stream, 0, block=block.index, k=k)

    def _as_b(self, a: Any, b: Any, shape: tuple[int, int], stream: Any) -> Any:
        """A panel of op(A), of this shape as stored, as one of op(A)ᵀ: itself, or turned into op(B)'s."""
        if self._along_k("a") == self._along_k("b"):
            return a
        with stream:
            self._cupy.copyto(self._panel(b, "b", shape), self._panel(a, "a", shape))
        return b

    def mirror(self, block: Block, c: int, col: int = 0) -> None:
        """In place, on the compute stream."""
        self._use()
        stream, n = self._streams[COMPUTE], block.rows
        start = self._times.record(stream.ptr)
        out = self._arrays["c", c]
        args = np.int32(n), np.uintp(out.data.ptr + col * out.itemsize), np.int64(block.cols)
        self._turn["mirror"]((ceil_div(n, 32) ** 2,), (32, 8), args, stream)
        self._early.pop(c, None)
        self._span(COMPUTE, start, stream, 0, block=block.index)

    def _along_k(self, operand: str) -> bool:
        """Whether the operand's panels lie with k along their rows."""
        wanted = self._op.arithmetic.along_k["ab".index(operand)]
        return self._stored_along_k(operand) if wanted is None else wanted

    def _stored_along_k(self, operand: str) -> bool:
        return not self._op.transpose_a if operand == "a" else self._op.transpose_b

    def _pitch(self, operand: str, k: int, lines: int) -> int:
        """Elements from one row of a panel to the next."""
        return round_up(k if self._along_k(operand) else lines, self._op.arithmetic.pitch)

    def _turned(self, operand: str) -> bool:
        """Whether the operand's panels lie the other way than it is stored."""
        return operand != "c" and self._stored_along_k(operand) != self._along_k(operand)

    def _row(self, operand: str, cols: int) -> int:
        """Elements from one row to the next of a panel, or C block, with rows of so many."""
        return cols if operand == "c" else round_up(cols, self._op.arithmetic.pitch)

    def _panel(self, memory: Any, operand: str, shape: tuple[int, int]) -> Any:
        """A panel, or a C block, as a matrix oriented as stored."""
        rows, cols = shape
        if self._turned(operand):
            return self._panel(memory, "c", (cols, self._row(operand, rows)))[:, :rows].T
        pitch = self._row(operand, cols)
        return memory[: rows * pitch].reshape(rows, pitch)[:, :cols]

    def _open_kernel(self, plan: Plan) -> Callable[..., None]:
        """A function of (m, n, k, α, a, lda, b, ldb, β, c, ldc, stream), and of `lower`, `rows` and `after`
        as TensorGemm has them, that starts the multiplication."""
        from ...cuda_kernels import nvrtc

        op = self._op
        arithmetic = op.arithmetic
        if arithmetic.kernel == "cublas":
            return partial(self._by_strips, self._cublas)
        trans_a, trans_b = not self._along_k("a"), self._along_k("b")
        kernel, panel = KERNELS[arithmetic.kernel], arithmetic.panel.name
        if panel == "complex64":
            product = ComplexGemm(trans_a, trans_b, op.conjugate_a, op.conjugate_b)
            product.reserve(plan.bm, plan.bn, plan.bk, real=op.alpha.imag == op.beta.imag == 0)
            return partial(product, in_place="a")
        if kernel.launcher != "nvrtc":
            kind = Wgmma if kernel.launcher == "wgmma" else Mma
            gemm = kind(kernel.name, trans_a, trans_b, panel, panel)
            in_place = "b" if plan.k_panels.resident else "ab"
            gemm.reserve(plan.bm, plan.bn, plan.bk, in_place)
            return partial(self._real, partial(gemm, in_place=in_place))
        size = plan.bm, plan.bn, plan.bk
        config = best_config(kernel.name, panel, trans_a, trans_b, *size, self.model, self._multiprocessors)
        launch = partial(self._real, partial(nvrtc.launch, load(config)[config.kernel], config))
        return partial(self._by_strips, launch)

    def _by_strips(
        self, gemm: Callable[..., None], m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int,
        ldb: int, beta: complex, c: int, ldc: int, stream: Any, lower: bool, rows: Iterable[tuple[int, int]],
        after: Callable[[int], None],
    ) -> None:  # fmt: skip
        """As `TensorGemm` does it."""
        arithmetic = self._op.arithmetic
        down = (lda if self._along_k("a") else 1) * arithmetic.panel.itemsize
        for start, stop in rows or (strips(m) if lower else [(0, m)]):
            gemm(
                stop - start, stop if lower else n, k, alpha, a + start * down, lda, b, ldb, beta,
                c + start * ldc * arithmetic.block.itemsize, ldc, stream,
            )  # fmt: skip
            after(stop)

    @staticmethod
    def _real(
        gemm: Callable[..., None], m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int,
        beta: complex, *rest: Any, **options: Any,
    ) -> None:  # fmt: skip
        gemm(m, n, k, alpha.real, a, lda, b, ldb, beta.real, *rest, **options)

    def _cublas(
        self, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int, beta: complex,
        c: int, ldc: int, stream: Any,
    ) -> None:  # fmt: skip
        """cuBLAS is column-major, so it is asked for Cᵀ = op(B)ᵀ·op(A)ᵀ, each as it lies."""
        op, cublas = self._op, self._cupy.cuda.cublas
        panel, total = op.arithmetic.panel, op.arithmetic.block
        scalars = np.array([alpha, beta], dtype="D")
        scalars = scalars.astype(total) if total.kind == "c" else scalars.real.astype(total)
        compute = _COMPUTE_64F if total.char in "dD" else _COMPUTE_32F
        transpose_a = (_OP_C if op.conjugate_a else _OP_T) if op.transpose_a else _OP_N
        transpose_b = (_OP_C if op.conjugate_b else _OP_T) if op.transpose_b else _OP_N
        handle = self._cupy.cuda.device.get_cublas_handle()  # the calling thread's
        with stream:  # CuPy sets cuBLAS's stream to the current one in every call
            cublas.gemmEx(
                handle, transpose_b, transpose_a, n, m, k, scalars[:1].ctypes.data,
                b, _CUDA_TYPE[panel.char], ldb, a, _CUDA_TYPE[panel.char], lda,
                scalars[1:].ctypes.data, c, _CUDA_TYPE[total.char], ldc, compute, _DEFAULT_ALGORITHM,
            )  # fmt: skip

    def check(self, block: Block, c: int) -> Check:
        """On the compute stream."""
        self._use()
        stream = self._streams[COMPUTE]
        assert self._checks is not None
        start = self._times.record(stream.ptr)
        check = self._checks.end(block, self._arrays["c", c], c, stream)
        self._span(COMPUTE, start, stream, 0, block=block.index)
        return check

    def scale(self, block: Block, c: int) -> None:
        """β·C in place."""
        self._use()
        if self._checks:
            self._checks.begin(block, self._arrays["c", c], self._streams[COMPUTE])
        self._scale(block, c, self._op.beta)

    def _scale(self, block: Block, c: int, beta: complex) -> None:
        """β·C in place; a complex C part by part where β is real, as `blas.scale_in_place` does."""
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
        """Rows that the last multiplication has made before others are finished before them."""
        self._finished[c] = self._early.pop(c, []) or [(block.rows, self.record(COMPUTE))]

    def download(self, block: Block, part: Part, c: int, target: Array) -> Event:
        """A 2-D copy out of the block, or of what is transposed on its way into memory for one chunk."""
        self._use()
        row, col = (part.col, part.row) if part.mirrored else (part.row, part.col)
        last = row + (part.cols if part.mirrored else part.rows)
        done = next(event for stop, event in self._finished[c] if last <= stop)
        width = block.cols * target.itemsize
        at = self._arrays["c", c].data.ptr + row * width + col * target.itemsize
        stream = self._streams[DOWNLOAD]
        with self._lock:  # so that the two events enclose this copy and no other
            driver.wait(stream.ptr, done)
            start = self._from(DOWNLOAD)
            if part.mirrored:
                to = self._arrays["mirrored"].data.ptr
                args = (
                    np.int32(part.cols), np.int32(part.rows), np.uintp(at), np.int64(block.cols),
                    np.uintp(to), np.int64(part.cols),
                )  # fmt: skip
                grid = ceil_div(part.rows, 32) * ceil_div(part.cols, 32)
                self._turn["transpose"]((grid,), (32, 8), args, stream)
                at, width = to, part.cols * target.itemsize
            self._copy(_TO_HOST, target.ctypes.data, target.strides[0], at, width, target, stream)
            return self._span(DOWNLOAD, start, stream, target.nbytes, chunk=part.chunk)

    def record(self, stream: str) -> Event:
        """An event at the end of the stream."""
        self._use()
        return self._points.record(self._streams[stream].ptr)

    def wait(self, stream: str, event: Any) -> None:
        """The stream waits on the device; the caller does not."""
        self._use()
        driver.wait(self._streams[stream].ptr, event)

    def free_panels(self) -> None:
        """With the kernel's scratch. What is downloaded meanwhile goes on."""
        self._use()
        self._streams[COMPUTE].synchronize()
        self._least_free = min(self._least_free, self._runtime.memGetInfo()[0])
        self._gemm = None
        for key in [key for key in self._arrays if key[0] in ("a", "b")]:
            del self._arrays[key]

    def peak_bytes(self) -> int:
        """Context, and what has gone from free memory since it was made."""
        return CONTEXT_BYTES + int(self._free - self._least_free)

    def cancel(self) -> None:
        """Kernels are short: nothing to do."""

    def close(self) -> None:
        """Wait for what is under way, turn events into spans, free everything."""
        try:
            self._device.use()
            for stream in self._streams.values():
                stream.synchronize()
            if self._arrays:
                self._least_free = min(self._least_free, self._runtime.memGetInfo()[0])
            self._tell(0)
            for stage, nbytes in self._untimed.items():  # at the rate of those like them
                seconds = self._trace.seconds[stage] / self._trace.bytes[stage]
                self._trace.include({stage: nbytes}, {stage: nbytes * seconds})
        finally:
            self._untimed.clear()
            self._streams = {}
            self._spans.clear()
            self._arrays.clear()
            self._early, self._finished = {}, {}
            self._gemm = self._checks = None  # and their scratch
            self._times.close()
            self._points.close()
            for buffer in self._pinned.values():
                with contextlib.suppress(self._runtime.CUDARuntimeError):  # where the device has failed
                    self._runtime.hostUnregister(buffer.ctypes.data)
            self._pinned.clear()

    def alive(self) -> bool:
        """An error in a kernel takes the whole context with it."""
        try:
            self._device.use()
            self._runtime.deviceSynchronize()
        except self._runtime.CUDARuntimeError:
            return False
        return True

    def explain(self, error: Exception) -> Failure | None:
        """What CuPy raises. Another plan may count on half of what is free now."""
        cuda = self._cupy.cuda
        failures = (
            self._runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.cublas.CUBLASError,
            driver.DriverError,
        )  # fmt: skip
        full = isinstance(error, cuda.memory.OutOfMemoryError)
        if not (full or isinstance(error, failures)):
            return None
        if not full:
            code = _CUBLAS_FULL if isinstance(error, cuda.cublas.CUBLASError) else _CUDA_FULL
            if getattr(error, "status", None) != code:
                return Failure(DeviceError(f"{self.name} failed ({error}); run again, or use another device"))
        limit = None
        with contextlib.suppress(*failures):
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._free = self._least_free = self._runtime.memGetInfo()[0]
            limit = CONTEXT_BYTES + self._free // 2
        full_error = OutOfMemoryError(
            f"{self.name} has not the memory that the plan counts on ({error}); "
            "give a smaller device_memory_limit"
        )
        return Failure(full_error, limit)

    def _track(self, stage: str) -> str:
        """The line of the timeline of one of its streams."""
        return stage if self.name == "cuda" else f"{stage} {self.name}"

    def _from(self, stage: str) -> Event | None:
        """Where a copy begins that is timed: some are, and all of them for a timeline."""
        if self._trace.keep or next(self._copies[stage]) % COPIES_TIMED == 0:
            return self._times.record(self._streams[stage].ptr)
        return None

    def _span(self, stage: str, start: Event | None, stream: Any, nbytes: int, **args: Any) -> Event:
        if start is None:
            with self._counting:
                self._untimed[stage] += nbytes
            return self._points.record(stream.ptr)
        stop = self._times.record(stream.ptr)
        self._spans.append(_Span(stage, start, stop, nbytes, args))
        self._tell(SPANS)
        return stop

    def _tell(self, keep: int) -> None:
        """The trace of the oldest spans, as far as the device has come and until so few are left."""
        if len(self._spans) <= keep or not self._telling.acquire(blocking=False):
            return
        try:
            while len(self._spans) > keep and self._spans[0].stop.done:
                span = self._spans.popleft()
                start, stop = (
                    self._base_time + event.seconds_since(self._base) for event in (span.start, span.stop)
                )
                self._trace.add(span.stage, start, stop, self._track(span.stage), span.nbytes, **span.args)
        finally:
            self._telling.release()
