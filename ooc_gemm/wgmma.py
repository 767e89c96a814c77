"""Launches kernels/wgmma.cu, Hopper's tensor cores: what a `Config` does not say — tensor maps, the
preparation of operands, and the fallback of float32 where three float16 products would not do.

    fp16x3   float32  ──row and column exponents, range──► split in two float16 planes ──► wgmma, 3 products
                                          └── out of range, NaN, Inf: ffma instead, decided on the device
    fp16     float16  ─────────────────────────────────────────────────────────────────► wgmma
    tf32     float32  ──an operand contiguous along m or n: transposed────────────────► wgmma
    int8     int8, uint8  ──likewise───────────────────────────────────────────────────► wgmma
"""

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from . import catalog, nvrtc
from .errors import DeviceError
from .tiles import ceil_div, ranges, round_up

PITCH_BYTES = 256
"""Rows of an operand must start at multiples of this: a segment of both planes of split.cu, and more than
the 16 bytes that tensor maps ask for."""
BYTES_PER_LINE = 12
"""Device memory for each row and column of C: exponents, and the largest magnitudes they come from."""
LOW_SHARE = 32
"""fp16x3 takes operands of which at most one element in this many lies too low to keep its bits."""
FALLBACK_SLICES = 8
"""A plain float32 sum over all of k would be less accurate than SGEMM's, which is made of several."""
_FLAG_BYTES = 12
"""The flag of split.cu, and a count for each operand."""
_SPLIT_KERNELS = ("row_exponents", "column_largest", "column_exponents", "split")
_MAP_TYPES = {"float16": 6, "float32": 11, "int8": 0, "uint8": 0}
"""CU_TENSOR_MAP_DATA_TYPE_*; float32 as TF32."""
_SWIZZLE = {64: 2, 128: 3}
"""Bytes of a box's row → CU_TENSOR_MAP_SWIZZLE_*."""
_L2_PROMOTION_128 = 2


class Wgmma:
    """C ← α·op(A)·op(B) + β·C by one of the kinds above, on the current device.

    `a_type`, `b_type`: NumPy names of the stored types. C is float32, or int32 for int8. Without a `config`,
    each product takes the one that suits its shape.
    """

    def __init__(
        self,
        kind: str,
        trans_a: bool,
        trans_b: bool,
        a_type: str,
        b_type: str,
        config: nvrtc.Config | None = None,
    ):
        from cupy.cuda import Device

        self.kind, self._types = kind, {"a": a_type, "b": b_type}
        # Along which axis the stored operands are contiguous: False for k.
        self._mn = {"a": trans_a, "b": not trans_b}
        self._turns = {name: mn and kind in ("tf32", "int8") for name, mn in self._mn.items()}
        a_mn, b_mn = (mn and not self._turns[name] for name, mn in self._mn.items())
        self._configs = [
            catalog.wgmma(kind, a_mn, b_mn, a_type == "uint8", b_type == "uint8", narrow)
            for narrow in (False, True)
        ]
        if config is not None:
            self._configs = [config]
        self._multiprocessors = int(Device().attributes["MultiProcessorCount"])
        self._functions: dict[nvrtc.Config, Any] = {}
        self._scalar = np.dtype(self._configs[0].dtype).type
        self._turn = {
            name: _load(catalog.transpose(self._types[name]))["transpose"]
            for name, wanted in self._turns.items()
            if wanted
        }
        self._sum = _load(catalog.sum_slices(self._configs[0].dtype))["sum"]
        if kind == "fp16x3":
            self._split = {
                name: _load(
                    catalog.split(not mn), "row_exponents", "column_largest", "column_exponents", "split"
                )
                for name, mn in self._mn.items()
            }
            self._plain_config = catalog.guarded_ffma(trans_a, trans_b)
            self._plain = _load(self._plain_config)["ffma"]
        self._scratch: dict[str, Any] = {}

    def __call__(
        self,
        m: int,
        n: int,
        k: int,
        alpha: float,
        a_ptr: int,
        lda: int,
        b_ptr: int,
        ldb: int,
        beta: float,
        c_ptr: int,
        ldc: int,
        stream: Any,
        in_place: str = "",
    ) -> None:
        """As `nvrtc.launch`, but rows of A and B must start at multiples of PITCH_BYTES (fp16x3) or of 16
        bytes. `in_place`: names of operands that may be overwritten; fp16x3 takes memory for the others."""
        if m == 0 or n == 0:
            return
        if alpha == 0:
            k = 0
        operands = {"a": (a_ptr, lda, m), "b": (b_ptr, ldb, n)}
        args: tuple[Any, ...]
        u = np.uintp
        exponents = skip = 0  # none
        if self.kind == "fp16x3" and k:
            exponents, skip = self._exponents(m, n, k, operands, stream)
            for name, (ptr, ld, lines) in operands.items():
                rows, cols = (k, lines) if self._mn[name] else (lines, k)
                planes = ptr if name in in_place else self._memory(f"planes {name}", rows * ld * 4)
                segments = rows * ceil_div(cols, 64)
                at = exponents + (4 * m if name == "b" else 0)
                args = np.int32(rows), np.int32(cols), u(ptr), np.int64(ld), u(at), u(planes), u(skip)
                self._split[name]["split"]((ceil_div(segments, 8),), (256,), args, stream=stream)
                operands[name] = (planes, ld, lines)
        for name, turn in self._turn.items():
            ptr, ld, lines = operands[name]
            pitch = round_up(k, PITCH_BYTES // np.dtype(self._types[name]).itemsize)
            turned = self._memory(f"turned {name}", lines * pitch * np.dtype(self._types[name]).itemsize)
            args = np.int32(k), np.int32(lines), u(ptr), np.int64(ld), u(turned), np.int64(pitch)
            turn((ceil_div(k, 32) * ceil_div(lines, 32),), (32, 8), args, stream=stream)
            operands[name] = (turned, pitch, lines)
        config, slices = self.choose(m, n, k)
        maps = [self._map(config, name, k, *operands[name]) for name in ("a", "b")]
        scalar, i32 = self._scalar, np.int32
        partial = self._memory("partial", 4 * slices * m * n) if slices > 1 else 0
        args = (
            *maps, i32(m), i32(n), i32(k), scalar(alpha), scalar(beta), u(c_ptr), np.int64(ldc),
            u(exponents), u(exponents + 4 * m), u(skip), i32(slices), u(partial),
        )  # fmt: skip
        cluster = config.value("CLUSTER")
        at_once = self._multiprocessors // cluster * config.value("RESIDENT")
        grid = min(at_once, config.grid(m, n)[0] * slices) * cluster
        self._function(config)((grid,), config.block, args, config.shared_bytes, stream)
        if slices > 1:
            args = (
                np.int64(m), i32(n), i32(slices), scalar(alpha), u(partial), scalar(beta), u(c_ptr),
                np.int64(ldc), u(skip),
            )  # fmt: skip
            self._sum((ceil_div(m * n, 256),), (256,), args, stream=stream)
        if skip:
            self._fall_back(m, n, k, alpha, (a_ptr, lda), (b_ptr, ldb), beta, (c_ptr, ldc), skip, stream)

    def choose(self, m: int, n: int, k: int) -> tuple[nvrtc.Config, int]:
        """The configuration, and in how many slices k is cut, that keep the device busy for the shortest:
        rounds of tiles × steps of a tile × cost of a step."""

        def plan(config: nvrtc.Config) -> tuple[float, nvrtc.Config, int]:
            bk, tiles = config.value("BK"), config.grid(m, n)[0]
            places = self._multiprocessors // config.value("CLUSTER")
            slices = max(1, min(places // tiles, k // max(512, bk)))
            rounds, steps = ceil_div(tiles * slices, places), ceil_div(ceil_div(k, bk), slices)
            # Narrow tiles reach half of the rate of wide ones; slices have to be added up.
            cost = config.value("BM") * config.bn * bk * (2 if config.bn == 64 else 1)
            return (rounds * steps + (8 if slices > 1 else 0)) * cost, config, slices

        _, config, slices = min((plan(config) for config in self._configs), key=lambda found: found[0])
        return config, slices

    def _function(self, config: nvrtc.Config) -> Any:
        if config not in self._functions:
            self._functions[config] = _load(config)["wgmma"]
        return self._functions[config]

    def _fall_back(
        self, m: int, n: int, k: int, alpha: float, a: tuple[int, int], b: tuple[int, int], beta: float,
        c: tuple[int, int], flag: int, stream: Any,
    ) -> None:  # fmt: skip
        """Plain float32. Nothing happens unless the flag is raised; then A and B are still as they were."""
        step = max(1024, ceil_div(k, FALLBACK_SLICES))
        for start, stop in ranges(k, step):
            a_ptr = a[0] + 4 * start * (a[1] if self._mn["a"] else 1)
            b_ptr = b[0] + 4 * start * (b[1] if self._mn["b"] else 1)
            nvrtc.launch(
                self._plain, self._plain_config, m, n, stop - start, alpha, a_ptr, a[1], b_ptr, b[1],
                beta if start == 0 else 1.0, *c, stream, flag,
            )  # fmt: skip

    def _exponents(
        self, m: int, n: int, k: int, operands: dict[str, tuple[int, int, int]], stream: Any
    ) -> tuple[int, int]:
        """Exponents of all rows of A and columns of B, and whether the split would lose accuracy: the
        addresses of both."""
        from cupy.cuda import runtime

        flag = self._memory("flag", _FLAG_BYTES)
        exponents = self._memory("exponents", 4 * (m + n))
        runtime.memsetAsync(flag, 0, _FLAG_BYTES, stream.ptr)
        u, i32 = np.uintp, np.int32
        at, low = exponents, flag + 4
        args: tuple[Any, ...]
        for name, (ptr, ld, lines) in operands.items():
            kernels = self._split[name]
            limit = np.uint32(min(2**32 - 1, lines * k // LOW_SHARE))
            stored = u(ptr), np.int64(ld)
            if self._mn[name]:
                largest = self._memory("largest", 4 * max(m, n))
                runtime.memsetAsync(largest, 0, 4 * lines, stream.ptr)
                grid = (ceil_div(lines, 256), ceil_div(k, 128))
                sizes = i32(k), i32(lines)
                kernels["column_largest"](grid, (256,), (*sizes, *stored, u(largest)), stream=stream)
                args = (*sizes, *stored, u(largest), u(at), u(low), limit, u(flag))
                kernels["column_exponents"](grid, (256,), args, stream=stream)
            else:
                args = (i32(k), *stored, u(at), u(low), limit, u(flag))
                kernels["row_exponents"]((lines,), (256,), args, stream=stream)
            at += 4 * lines
            low += 4
        return exponents, flag

    def _map(self, config: nvrtc.Config, name: str, k: int, ptr: int, ld: int, lines: int) -> Any:
        """The tensor map of an operand, as a kernel argument."""
        tile = {"a": "BM", "b": "BN"}[name]
        parts = config.value("CLUSTER") if name == "b" else 1
        planes = 2 if self.kind == "fp16x3" else 1
        dtype = "float16" if planes == 2 else self._types[name]
        size, depth = np.dtype(dtype).itemsize, config.value("BK")
        if config.value(f"{name.upper()}_MN"):
            width, height, box = lines, k, (128 // size, depth // parts)
        else:
            width, height, box = k, lines, (depth, config.value(tile) // parts)
        if planes == 2:
            width, ld = 2 * round_up(width, 64), 2 * ld
        return tensor_map(dtype, ptr, max(1, width), max(1, height), ld * size, box)

    def _memory(self, name: str, nbytes: int) -> int:
        """Scratch that only grows. What used the smaller one is still under way on the stream, so that one
        is freed after it."""
        from cupy.cuda import Memory, runtime

        if name not in self._scratch or self._scratch[name].size < nbytes:
            if name in self._scratch:
                runtime.deviceSynchronize()
            self._scratch[name] = Memory(max(256, nbytes))
        return int(self._scratch[name].ptr)

    def reserve(self, m: int, n: int, k: int) -> None:
        """Take the memory for products up to m×n×k now (all in place, no operand turned), and load the
        kernel."""
        config, _ = self.choose(m, n, k)
        self._function(config)
        # A smaller product at an edge may be cut in slices: no more than there are places for tiles.
        self._memory(
            "partial",
            4 * max(self._multiprocessors * config.value("BM") * config.bn for config in self._configs),
        )
        if self.kind == "fp16x3":
            self._memory("flag", _FLAG_BYTES)
            self._memory("exponents", 4 * (m + n))
            self._memory("largest", 4 * max(m, n))


class ComplexGemm:
    """complex64 by a float32 product of twice the sizes (kernels/embed.cu); called like Wgmma, with leading
    dimensions in complex elements. `conjugate_a`, `conjugate_b`: the adjoint, where also transposed."""

    def __init__(
        self,
        trans_a: bool,
        trans_b: bool,
        conjugate_a: bool = False,
        conjugate_b: bool = False,
        config: nvrtc.Config | None = None,
    ):
        self._trans_a, self._trans_b = trans_a, trans_b
        self.real = Wgmma("fp16x3", trans_a, trans_b, "float32", "float32", config)
        mode = "double k" if trans_b else "double n"
        self._double = _load(catalog.embed(mode, conjugate_b, conjugate_a))["embed"]
        self._rows = _load(catalog.embed("rows"))["embed"] if trans_a else None

    def __call__(
        self,
        m: int,
        n: int,
        k: int,
        alpha: complex,
        a_ptr: int,
        lda: int,
        b_ptr: int,
        ldb: int,
        beta: complex,
        c_ptr: int,
        ldc: int,
        stream: Any,
        in_place: str = "",
    ) -> None:
        """C ← α·op(A)·op(B) + β·C."""
        if m == 0 or n == 0:
            return
        if alpha == 0:
            k = 0
        if beta.imag:
            _scale(c_ptr, m, n, ldc, beta, stream)
            beta = 1.0
        if k and self._rows is not None:
            pitch = round_up(m, 64)
            to = self.real._memory("rows of A", 2 * k * pitch * 4)
            _embed(self._rows, k, m, a_ptr, lda, to, pitch, 1.0, stream)
            a_ptr, lda, in_place = to, pitch, "a" + in_place
        else:
            lda *= 2
        if k:
            rows, cols = (n, k) if self._trans_b else (k, n)
            pitch = round_up(2 * cols, 64)
            to = self.real._memory("embedded B", 2 * rows * pitch * 4)
            _embed(self._double, rows, cols, b_ptr, ldb, to, pitch, alpha, stream)
            b_ptr, ldb = to, pitch
        self.real(
            m, 2 * n, 2 * k, 1.0, a_ptr, lda, b_ptr, ldb, beta.real, c_ptr, 2 * ldc, stream, in_place + "b"
        )

    def reserve(self, m: int, n: int, k: int) -> None:
        """Take the memory for products up to m×n×k now (A in place)."""
        self.real.reserve(m, 2 * n, 2 * k)
        if self._rows is not None:
            self.real._memory("rows of A", 2 * k * round_up(m, 64) * 4)
        rows, cols = (n, k) if self._trans_b else (k, n)
        self.real._memory("embedded B", 2 * rows * round_up(2 * cols, 64) * 4)


def _embed(
    kernel: Any, rows: int, cols: int, x: int, ldx: int, y: int, ldy: int, alpha: complex, stream: Any
) -> None:
    i32, i64, f32, u = np.int32, np.int64, np.float32, np.uintp
    args = (i32(rows), i32(cols), u(x), i64(ldx), u(y), i64(ldy), f32(alpha.real), f32(alpha.imag))
    kernel((ceil_div(rows, 8) * ceil_div(cols, 32),), (32, 8), args, stream=stream)


def _scale(ptr: int, m: int, n: int, ld: int, beta: complex, stream: Any) -> None:
    import cupy

    memory = cupy.cuda.UnownedMemory(ptr, 8 * ((m - 1) * ld + n), None)
    with stream:
        matrix = cupy.ndarray((m, n), "c8", cupy.cuda.MemoryPointer(memory, 0), strides=(8 * ld, 8))
        matrix *= np.complex64(beta)


def _load(config: nvrtc.Config, *names: str) -> dict[str, Any]:
    from cupy.cuda import Device

    arch = nvrtc.arch_of(Device().compute_capability)
    return nvrtc.load_all(nvrtc.compile(config, arch), config, names or (config.kernel,))


def tensor_map(dtype: str, ptr: int, width: int, height: int, pitch: int, box: tuple[int, int]) -> Any:
    """A CUtensorMap, as a NumPy scalar that CuPy passes by value: boxes of `box` (elements along a row,
    rows) of a matrix of height × width elements, its rows `pitch` bytes apart; zeros beyond.

    Raises DeviceError where the driver refuses.
    """
    memory = ctypes.create_string_buffer(128 + 64)
    offset = -ctypes.addressof(memory) % 64
    swizzle = _SWIZZLE[box[0] * np.dtype(dtype).itemsize]
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(memory) + offset), _MAP_TYPES[dtype], 2, ctypes.c_void_p(ptr),
        (ctypes.c_uint64 * 2)(width, height), (ctypes.c_uint64 * 1)(pitch), (ctypes.c_uint32 * 2)(*box),
        (ctypes.c_uint32 * 2)(1, 1), 0, swizzle, _L2_PROMOTION_128, 0,
    )  # fmt: skip
    if status != 0:
        raise DeviceError(
            f"the driver refuses a tensor map of {height}×{width} {dtype} with rows of {pitch} bytes "
            f"(error {status})"
        )
    return np.frombuffer(memory.raw[offset : offset + 128], "V128")


@lru_cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"The CUDA driver was not found ({error}); install NVIDIA's driver.") from error
