"""What all GEMMs on tensor cores share: operands prepared for the instructions, k in slices where C has too
few tiles to go round, and the fallback of float32 where three float16 products would not do.

    fp16x3   float32  ──row and column exponents, range──► split in two float16 planes ──► 3 products
                                          └── out of range, NaN, Inf: ffma instead, decided on the device
    fp16     float16  ─────────────────────────────────────────────────────────────────► 1 product
    tf32     float32  ──for wgmma, an operand contiguous along m or n: transposed──────► 1 product
    int8     int8, uint8  ──likewise, also for mma─────────────────────────────────────► 1 product
    dmma     float64  ─────────────────────────────────────────────────────────────────► 1 product
                                       └── k in slices: their sum, always in the same order (sum.cu)

wgmma.py and mma.py launch the product itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from . import catalog, driver, nvrtc
from .driver import Kernel
from .nvrtc import Config
from .plan import DIAGONAL_STRIPS
from .tiles import ceil_div, ranges, round_up

PITCH_BYTES = 256
"""Rows of an operand must start at multiples of this: a segment of both planes of split.cu, and more than
the 16 bytes that tensor maps and ldmatrix ask for."""
BYTES_PER_LINE = 12
"""Device memory for each row and column of C: exponents, and the largest magnitudes they come from."""
LOW_SHARE = 32
"""fp16x3 takes operands of which at most one element in this many lies too low to keep its bits."""
FALLBACK_SLICES = 8
"""A plain float32 sum over all of k would be less accurate than SGEMM's, which is made of several."""
SPLIT_PAYS, SPLIT_PAYS_DEEP = 600, 256
"""m·n/(m + n), and k, from which fp16x3 is ahead of plain float32 on an H200, its split included."""
LEAST_STRIP = 1024
"""Rows of a strip of a symmetric C, at least; strips begin where segments of split.cu may begin."""
_FLAG_BYTES = 12
"""The flag of split.cu, and a count for each operand."""
_SPLIT_KERNELS = ("row_exponents", "column_largest", "column_exponents", "split")

Operands = dict[str, tuple[int, int, int]]
"""a, b → address, elements from one row to the next, lines (rows of op(A), columns of op(B))."""


class TensorGemm(ABC):
    """C ← α·op(A)·op(B) + β·C by one of the kinds above, on the current device.

    `a_type`, `b_type`: NumPy names of the stored types. C is float32; int32 for int8, float64 for dmma.
    Without a `config`, each product takes the one that suits its shape, or plain float32 where a split would
    not pay.
    """

    def __init__(
        self,
        kernel: str,
        trans_a: bool,
        trans_b: bool,
        a_type: str,
        b_type: str,
        config: Config | None = None,
    ):
        from cupy.cuda import Device

        self.kind, self._types = kernel.removeprefix("mma-"), {"a": a_type, "b": b_type}
        # Along which axis the stored operands are contiguous: False for k.
        self._mn = {"a": trans_a, "b": not trans_b}
        self.configs = self._shipped(*self._mn.values()) if config is None else [config]
        self._chooses = config is None
        self._chosen: dict[tuple[int, int, int], tuple[Config, int]] = {}
        attributes = Device().attributes
        self._multiprocessors = int(attributes["MultiProcessorCount"])
        self._shared = int(attributes["MaxSharedMemoryPerMultiprocessor"])
        self._scalar = np.dtype(self.configs[0].dtype).type
        self._functions: dict[Config, Kernel] = {}
        self._sum = load(catalog.sum_slices(self.configs[0].dtype))["sum"]
        if self.kind == "fp16x3":
            self._split = {
                name: load(catalog.split(not mn), *_SPLIT_KERNELS) for name, mn in self._mn.items()
            }
            self._plain = [catalog.guarded(config) for config in catalog.ffma("float32", trans_a, trans_b)]
        self._scratch: dict[str, Any] = {}

    @abstractmethod
    def _shipped(self, a_mn: bool, b_mn: bool) -> list[Config]:
        """Configurations, for operands contiguous along m or n (`mn`) or along k."""

    @abstractmethod
    def _choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        """`choose`, worked out."""

    @abstractmethod
    def _multiply(
        self,
        config: Config,
        slices: int,
        m: int,
        n: int,
        k: int,
        alpha: Any,
        operands: Operands,
        beta: Any,
        c: tuple[int, int],
        exponents: tuple[int, int],
        skip: int,
        stream: Any,
    ) -> None:
        """Start the product of prepared operands. Slice number s is stored s·m·ldc elements behind C."""

    def turned(self, config: Config) -> list[str]:
        """Operands that the kernel takes along k only, and that do not lie so."""
        if self.kind not in catalog.ALONG_K:
            return []
        return [name for name, mn in self._mn.items() if mn and not config.value(f"{name.upper()}_MN")]

    def choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        """The configuration for the shape, and in how many slices k is cut; remembered, for blocks come in
        few shapes."""
        if (m, n, k) not in self._chosen:
            self._chosen[m, n, k] = self._choose(m, n, k)
        return self._chosen[m, n, k]

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
        lower: bool = False,
        rows: Iterable[tuple[int, int]] = (),
        after: Callable[[int], None] = lambda stop: None,
    ) -> None:
        """As `nvrtc.launch`, but rows of A and B must start at multiples of PITCH_BYTES (fp16x3), of 16
        bytes, or anywhere (dmma). `in_place`: names of operands that may be overwritten; fp16x3 takes memory
        for the others. `lower`: of C no more than `strips` up to the diagonal, for it is symmetric (a real
        one, or a complex one of real ones side by side: n/m columns for each row); A and B at one address
        are prepared once. `rows`: C is made in these strips, [start, stop) each; `after` is called with where
        one stops when the stream has been given it."""
        if m == 0 or n == 0:
            return
        if alpha == 0:
            k = 0
        given = {"a": (a_ptr, lda, m), "b": (b_ptr, ldb, n)}
        prepared, exponents, skip, thin = given, (0, 0), 0, False
        if self.kind == "fp16x3" and k:
            thin = self._chooses and not split_pays(m, n, k)
            if thin:
                plain = catalog.choose_ffma(self._plain, m, n, k, self._multiprocessors)
                depth, skip = k, self._flag(1, stream)
            else:
                plain, depth = self._plain[0], max(1024, ceil_div(k, FALLBACK_SLICES))
                shared = lower and a_ptr == b_ptr
                prepared = {"a": given["a"]} if shared else dict(given)
                at, skip = self._exponents(m, n, k, prepared, stream)
                self._split_operands(k, prepared, at, skip, in_place, stream)
                prepared, exponents = {"b": prepared["a"], **prepared}, (at, at if shared else at + 4 * m)
        size = np.dtype(self.configs[0].dtype).itemsize
        for start, stop in rows or (strips(m) if lower else [(0, m)]):
            cut = partial(self._cut, start, stop, n // m * stop if lower else n)
            c = c_ptr + start * ldc * size, ldc
            if not thin:
                at = exponents[0] + 4 * start
                self._product(k, alpha, cut(prepared), beta, c, (at, exponents[1]), skip, stream)
            if skip:  # the split may not have come about
                self._fall_back(plain, depth, k, alpha, cut(given), beta, c, skip, stream)
            after(stop)

    def _cut(self, start: int, stop: int, width: int, operands: Operands) -> Operands:
        """What makes rows [start, stop) of the first `width` columns of C."""
        ptr, ld, _ = operands["a"]
        step = np.dtype(self._types["a"]).itemsize * (1 if self._mn["a"] else ld)
        return {"a": (ptr + start * step, ld, stop - start), "b": (*operands["b"][:2], width)}

    def _product(
        self, k: int, alpha: float, operands: Operands, beta: float, c: tuple[int, int],
        exponents: tuple[int, int], skip: int, stream: Any,
    ) -> None:  # fmt: skip
        """Of operands that are split, or need not be."""
        m, n = operands["a"][2], operands["b"][2]
        scalar, (config, slices) = self._scalar, self.choose(m, n, k)
        self._turn_operands(config, k, operands, stream)
        if slices == 1:
            self._multiply(
                config, 1, m, n, k, scalar(alpha), operands, scalar(beta), c, exponents, skip, stream
            )
            return
        parts = self.memory("slices", np.dtype(config.dtype).itemsize * slices * m * n)
        self._multiply(
            config, slices, m, n, k, scalar(1), operands, scalar(0), (parts, n), exponents, skip, stream
        )
        args = (
            np.int64(m), np.int32(n), np.int32(slices), scalar(alpha), np.uintp(parts), scalar(beta),
            np.uintp(c[0]), np.int64(c[1]), np.uintp(skip),
        )  # fmt: skip
        self._sum((ceil_div(m * n, 256),), (256,), args, stream)

    def _split_operands(
        self, k: int, operands: Operands, exponents: int, skip: int, in_place: str, stream: Any
    ) -> None:
        """Float32 → two float16 planes, in the same memory or in other."""
        i32, u = np.int32, np.uintp
        for name, (ptr, ld, lines) in operands.items():
            rows, cols = (k, lines) if self._mn[name] else (lines, k)
            planes = ptr if name in in_place else self.memory(f"planes {name}", rows * ld * 4)
            args = i32(rows), i32(cols), u(ptr), np.int64(ld), u(exponents), u(planes), u(skip)
            self._split[name]["split"]((ceil_div(rows * ceil_div(cols, 64), 8),), (256,), args, stream)
            operands[name] = planes, ld, lines
            exponents += 4 * lines

    def _turn_operands(self, config: Config, k: int, operands: Operands, stream: Any) -> None:
        """Those that must lie along k, and do not."""
        i32, i64, u = np.int32, np.int64, np.uintp
        for name in self.turned(config):
            turn = self._function(catalog.transpose(self._types[name]))
            ptr, ld, lines = operands[name]
            size = np.dtype(self._types[name]).itemsize
            pitch = round_up(k, PITCH_BYTES // size)
            turned = self.memory(f"turned {name}", lines * pitch * size)
            args = i32(k), i32(lines), u(ptr), i64(ld), u(turned), i64(pitch)
            turn((ceil_div(k, 32) * ceil_div(lines, 32),), (32, 8), args, stream)
            operands[name] = turned, pitch, lines

    def _fall_back(
        self, plain: Config, depth: int, k: int, alpha: float, operands: Operands, beta: float,
        c: tuple[int, int], flag: int, stream: Any,
    ) -> None:  # fmt: skip
        """Plain float32, `depth` of k at a time. Nothing happens unless the flag is raised; then A and B are
        still as they were."""
        (a, lda, m), (b, ldb, n) = operands["a"], operands["b"]
        for start, stop in ranges(k, depth):
            a_ptr = a + 4 * start * (lda if self._mn["a"] else 1)
            b_ptr = b + 4 * start * (ldb if self._mn["b"] else 1)
            nvrtc.launch(
                self._function(plain), plain, m, n, stop - start, alpha, a_ptr, lda, b_ptr, ldb,
                beta if start == 0 else 1.0, *c, stream, flag,
            )  # fmt: skip

    def _exponents(self, m: int, n: int, k: int, operands: Operands, stream: Any) -> tuple[int, int]:
        """Exponents of all rows of A and columns of B, and whether the split would lose accuracy: the
        addresses of both."""
        flag, exponents = self._flag(0, stream), self.memory("exponents", 4 * (m + n))
        u, i32 = np.uintp, np.int32
        at, low = exponents, flag + 4
        args: tuple[Any, ...]
        for name, (ptr, ld, lines) in operands.items():
            kernels = self._split[name]
            limit = np.uint32(min(2**32 - 1, lines * k // LOW_SHARE))
            stored = u(ptr), np.int64(ld)
            if self._mn[name]:
                largest = self.memory("largest", 4 * max(m, n))
                driver.fill(largest, 0, 4 * lines, stream)
                grid = (ceil_div(lines, 256), ceil_div(k, 128))
                sizes = i32(k), i32(lines)
                kernels["column_largest"](grid, (256,), (*sizes, *stored, u(largest)), stream)
                args = (*sizes, *stored, u(largest), u(at), u(low), limit, u(flag))
                kernels["column_exponents"](grid, (256,), args, stream)
            else:
                args = (i32(k), *stored, u(at), u(low), limit, u(flag))
                kernels["row_exponents"]((lines,), (256,), args, stream)
            at += 4 * lines
            low += 4
        return exponents, flag

    def _flag(self, value: int, stream: Any) -> int:
        """The address of the flag that lets `_fall_back` run, every byte of it set to `value`."""
        flag = self.memory("flag", _FLAG_BYTES)
        driver.fill(flag, value, _FLAG_BYTES, stream)
        return flag

    def _function(self, config: Config) -> Kernel:
        if config not in self._functions:
            self._functions[config] = load(config)[config.kernel]
        return self._functions[config]

    def memory(self, name: str, nbytes: int) -> int:
        """Scratch that only grows. What used the smaller one is still under way on the stream, so that one
        is freed after it."""
        from cupy.cuda import Memory, runtime

        if name not in self._scratch or self._scratch[name].size < nbytes:
            if name in self._scratch:
                runtime.deviceSynchronize()
            self._scratch[name] = Memory(max(256, nbytes))
        return int(self._scratch[name].ptr)

    def reserve(self, m: int, n: int, k: int, in_place: str = "ab") -> None:
        """Take the memory for products up to m×n×k now (no operand turned), and load the kernel."""
        config, _ = self.choose(m, n, k)
        self._function(config)
        # A smaller product at an edge may be cut in slices: no more than there are places for tiles.
        places = [self._multiprocessors * c.value("RESIDENT") * c.bm * c.bn for c in self.configs]
        self.memory("slices", np.dtype(config.dtype).itemsize * max(places))
        if self.kind == "fp16x3":
            self._function(self._plain[0])
            self.memory("flag", _FLAG_BYTES)
            self.memory("exponents", 4 * (m + n))
            self.memory("largest", 4 * max(m, n))
            for name in {"a", "b"} - set(in_place):
                lines, pitch = {"a": m, "b": n}[name], PITCH_BYTES // 4
                padded = k * round_up(lines, pitch) if self._mn[name] else lines * round_up(k, pitch)
                self.memory(f"planes {name}", 4 * padded)


def strips(extent: int) -> Iterator[tuple[int, int]]:
    """Rows of a symmetric matrix, each strip to be computed up to the diagonal: as many as save most of the
    other half, and none so thin that its tiles would not keep all multiprocessors busy."""
    return ranges(extent, round_up(max(LEAST_STRIP, ceil_div(extent, DIAGONAL_STRIPS)), 64))


def split_pays(m: int, n: int, k: int) -> bool:
    """Whether each element of A and B, split once, is multiplied often enough for fp16x3 to be ahead."""
    return m * n >= SPLIT_PAYS * (m + n) and k >= SPLIT_PAYS_DEEP


def load(config: Config, *names: str) -> dict[str, Kernel]:
    """Kernels of one source, for the current device."""
    from cupy.cuda import Device

    return _loaded(Device().id, config, names or (config.kernel,))


@cache
def _loaded(device: int, config: Config, names: tuple[str, ...]) -> dict[str, Kernel]:
    """They stay loaded: fp16x3 has seven modules."""
    from cupy.cuda import Device

    arch = nvrtc.arch_of(Device(device).compute_capability)
    return nvrtc.load_all(nvrtc.compile(config, arch), config, names)
