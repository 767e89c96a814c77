"""What all GEMMs on tensor cores share: operands prepared for the instructions, k in slices where C has too
few tiles to go round, and the fallback of float32 where three float16 products would not do.

    fp16x3   float32  ──powers of two along m, n and k──► split in two float16 planes ──► 3 products
                                          └── inaccurate, NaN, Inf: sums in float64, decided on the device
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

from ..planning.schedule import DIAGONAL_STRIPS
from ..support.intervals import ceil_div, ranges, round_up
from . import catalog, driver, nvrtc, preparations
from .driver import Kernel
from .nvrtc import Config

PITCH_BYTES = 256
"""Rows of an operand must start at multiples of this: a segment of both planes of split.cu, and more than
the 16 bytes that tensor maps and ldmatrix ask for."""
LINE_BYTES, DEPTH_BYTES, _STATE_BYTES = 24, 12, 8
"""Device memory of split.cu: `Line`; the largest elements and d of each k; `State`."""
BYTES_PER_LINE = LINE_BYTES + 4
"""Device memory for each row and column of C, and more than enough for each k: `Line` and an exponent."""
LOW_SHARE = 1 / 4
"""fp16x3 takes operands where a line has at most this share of low elements, measured by the elements that
carry the sums of the other operand (`judge` in split.cu)."""
LEAST_TERMS, LEAST_DENSITY = 32, 1 / 16
"""Least number of terms that a sum must effectively have for three products to be as accurate as float32, and
their least share of k: the sums of fp16x3 are rounded as often for a term of zero as for another."""
FLOAT64_AT_FULL_RATE = ("80", "90", "100")
"""Compute capabilities whose float64 tensor cores are as fast as float32 arithmetic."""
FALLBACK_SLICES = 8
"""Elsewhere the fallback is plain float32. One sum over all of k would be less accurate than SGEMM's, which
is made of several."""
SPLIT_PAYS, SPLIT_PAYS_DEEP = 600, 256
"""m·n/(m + n), and k, from which fp16x3 is ahead of plain float32 on an H200, its split included."""
LEAST_STRIP = 1024
"""Rows of a strip of a symmetric C, at least; strips begin where segments of split.cu may begin."""
_SPLIT_KERNELS = (
    "row_lines", "column_largest", "column_exponents", "column_counts", "depth_largest", "equilibrate",
    "judge", "split",
)  # fmt: skip

_SIGN = {"a": 1, "b": -1}
"""Of d: what op(A) is multiplied by, op(B) is divided by."""
_JUDGES, _ROW_THREADS, _ROWS_AT_ONCE = 512, 512, 4
"""Threads of `equilibrate` and `judge`, and of kernels that reduce rows; of those, blocks at once on each
multiprocessor."""
_DEVICE_TO_HOST = 2
"""cudaMemcpyKind."""

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
        self._sum = load(preparations.sum_slices(self.configs[0].dtype))["sum"]
        if self.kind == "fp16x3":
            self._split = {
                name: load(preparations.split(not mn), *_SPLIT_KERNELS) for name, mn in self._mn.items()
            }
            self._float64 = Device().compute_capability in FLOAT64_AT_FULL_RATE
            self._plain = (
                catalog.float64_sums(trans_a, trans_b)
                if self._float64
                else [catalog.guarded(config) for config in catalog.ffma("float32", trans_a, trans_b)]
            )
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
                skip = self._state(1, stream)
            else:
                shared = lower and a_ptr == b_ptr
                prepared = {"a": given["a"]} if shared else dict(given)
                at = self.memory("exponents", 4 * (m + n))
                skip = self._prepare(k, prepared, in_place, stream)
                prepared, exponents = {"b": prepared["a"], **prepared}, (at, at if shared else at + 4 * m)
        size = np.dtype(self.configs[0].dtype).itemsize
        for start, stop in rows or (strips(m) if lower else [(0, m)]):
            cut = partial(self._cut, start, stop, n // m * stop if lower else n)
            c = c_ptr + start * ldc * size, ldc
            if not thin:
                at = exponents[0] + 4 * start
                self._product(k, alpha, cut(prepared), beta, c, (at, exponents[1]), skip, stream)
            if skip:  # the split may not have come about
                self._fall_back(k, alpha, cut(given), beta, c, skip, stream)
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

    def _turn_operands(self, config: Config, k: int, operands: Operands, stream: Any) -> None:
        """Those that must lie along k, and do not."""
        i32, i64, u = np.int32, np.int64, np.uintp
        for name in self.turned(config):
            turn = self._function(preparations.transpose(self._types[name]))
            ptr, ld, lines = operands[name]
            size = np.dtype(self._types[name]).itemsize
            pitch = round_up(k, PITCH_BYTES // size)
            turned = self.memory(f"turned {name}", lines * pitch * size)
            args = i32(k), i32(lines), u(ptr), i64(ld), u(turned), i64(pitch)
            turn((ceil_div(k, 32) * ceil_div(lines, 32),), (32, 8), args, stream)
            operands[name] = turned, pitch, lines

    def _fall_back(
        self,
        k: int,
        alpha: float,
        operands: Operands,
        beta: float,
        c: tuple[int, int],
        flag: int,
        stream: Any,
    ) -> None:
        """The product in float64, or in plain float32 where that would take much longer. Nothing happens
        unless the flag is raised; then A and B are still as they were."""
        (a, lda, m), (b, ldb, n) = operands["a"], operands["b"]
        if self._float64:
            plain, _ = catalog.choose_mma(
                self._plain, m, n, k, self._multiprocessors, self._shared, most_slices=1
            )
            i64, f64, u = np.int64, np.float64, np.uintp
            args = (
                i64(m), i64(n), i64(k), f64(alpha), u(a), i64(lda), u(b), i64(ldb), f64(beta),
                u(c[0]), i64(c[1]), u(flag),
            )  # fmt: skip
            self._function(plain)(plain.grid(m, n), plain.block, args, stream, plain.shared_bytes)
            return
        plain = catalog.choose_ffma(self._plain, m, n, k, self._multiprocessors)
        for start, stop in ranges(k, max(1024, ceil_div(k, FALLBACK_SLICES))):
            a_ptr = a + 4 * start * (lda if self._mn["a"] else 1)
            b_ptr = b + 4 * start * (ldb if self._mn["b"] else 1)
            nvrtc.launch(
                self._function(plain), plain, m, n, stop - start, alpha, a_ptr, lda, b_ptr, ldb,
                beta if start == 0 else 1.0, *c, stream, flag,
            )  # fmt: skip

    def _prepare(self, k: int, operands: Operands, in_place: str, stream: Any) -> int:
        """Split float32 operands into two float16 planes each, in the same memory or in other; where that
        would cost accuracy, leave them as they are. With a single operand the other one is its transpose.

        `operands` then name the planes; exponents of all lines lie in the memory of that name. Returns the
        address of the state, which begins with the flag for `_fall_back`."""
        u, i32, i64 = np.uintp, np.int32, np.int64
        state, lines = self._state(0, stream), sum(lines for _, _, lines in operands.values())
        at = self.memory("lines", LINE_BYTES * lines), self.memory("exponents", 4 * lines)
        depth = self.memory("depth", DEPTH_BYTES * k)
        args: tuple[Any, ...]
        largest = {"a": depth + 4 * k, "b": depth + 8 * k}
        places: dict[str, tuple[int, int]] = {}
        for name, (_, _, count) in operands.items():
            places[name] = at
            at = at[0] + LINE_BYTES * count, at[1] + 4 * count
            self._find_lines(k, name, operands[name], 0, places[name], state, stream)
        if len(operands) == 2:  # otherwise both sides of every k are alike
            driver.fill(largest["a"], 0, 8 * k, stream)
            for name, (ptr, ld, count) in operands.items():
                rows, cols = (k, count) if self._mn[name] else (count, k)
                args = i32(rows), i32(cols), u(ptr), i64(ld), u(largest[name])
                at_once = min(rows, self._multiprocessors * _ROWS_AT_ONCE)
                grid, block = (at_once, _ROW_THREADS) if self._mn[name] else (_strips(rows, cols), 256)
                self._split[name]["depth_largest"]((grid,), (block,), args, stream)
            args = i32(k), u(largest["a"]), u(largest["b"]), u(depth), u(state)
            self._split["a"]["equilibrate"]((1,), (_JUDGES,), args, stream)
            for name, operand in operands.items():
                self._find_lines(k, name, operand, depth, places[name], state, stream)
        (a, (_, _, m)), (b, (_, _, n)) = (
            (places[name][0], operands[name]) for name in ("a", "b" if "b" in operands else "a")
        )
        f32 = np.float32
        terms = max(LEAST_TERMS, LEAST_DENSITY * k)
        args = i32(m), i32(n), i32(k), u(a), u(b), f32(LOW_SHARE), f32(terms), u(state)
        self._split["a"]["judge"]((1,), (_JUDGES,), args, stream)
        for name, (ptr, ld, count) in operands.items():
            rows, cols = (k, count) if self._mn[name] else (count, k)
            planes = ptr if name in in_place else self.memory(f"planes {name}", rows * ld * 4)
            args = (
                i32(rows), i32(cols), u(ptr), i64(ld), u(depth), i32(_SIGN[name]), u(places[name][1]),
                u(planes), u(state),
            )  # fmt: skip
            self._split[name]["split"]((ceil_div(rows * ceil_div(cols, 64), 8),), (256,), args, stream)
            operands[name] = planes, ld, count
        return state

    def _find_lines(
        self, k: int, name: str, operand: tuple[int, int, int], depth: int, place: tuple[int, int],
        state: int, stream: Any,
    ) -> None:  # fmt: skip
        """Exponents and counts of the lines of one operand; `depth`: the address of d, once it is known."""
        (ptr, ld, count), (lines, exponents) = operand, place
        u, i32 = np.uintp, np.int32
        kernels, stored, found = self._split[name], (u(ptr), np.int64(ld)), (u(lines), u(exponents), u(state))
        scale = u(depth), i32(_SIGN[name])
        if not self._mn[name]:
            blocks = min(count, self._multiprocessors * _ROWS_AT_ONCE)
            kernels["row_lines"](
                (blocks,), (_ROW_THREADS,), (i32(count), i32(k), *stored, *scale, *found), stream
            )
            return
        if not depth:
            driver.fill(lines, 0, LINE_BYTES * count, stream)
        args, grid = (i32(k), i32(count), *stored, *scale, *found), (_strips(k, count),)
        kernels["column_largest"](grid, (256,), args, stream)
        kernels["column_exponents"]((ceil_div(count, 256),), (256,), (i32(count), u(depth), *found), stream)
        kernels["column_counts"](grid, (256,), args, stream)

    def _state(self, fallback: int, stream: Any) -> int:
        """The address of the state of split.cu, every byte of it set to `fallback`."""
        state = self.memory("state", _STATE_BYTES)
        driver.fill(state, fallback, _STATE_BYTES, stream)
        return state

    def fell_back(self) -> bool:
        """Whether the last product of fp16x3 was made by the fallback. Waits for the device."""
        from cupy.cuda import runtime

        runtime.deviceSynchronize()
        state = np.zeros(2, np.uint32)
        runtime.memcpy(state.ctypes.data, self.memory("state", _STATE_BYTES), state.nbytes, _DEVICE_TO_HOST)
        return bool(state[0])

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
            self.memory("state", _STATE_BYTES)
            self.memory("exponents", 4 * (m + n))
            self.memory("lines", LINE_BYTES * (m + n))
            self.memory("depth", DEPTH_BYTES * k)
            for name in {"a", "b"} - set(in_place):
                lines, pitch = {"a": m, "b": n}[name], PITCH_BYTES // 4
                padded = k * round_up(lines, pitch) if self._mn[name] else lines * round_up(k, pitch)
                self.memory(f"planes {name}", 4 * padded)


def _strips(rows: int, cols: int) -> int:
    """Blocks of 256 columns × 128 rows, in one dimension, which is the only one of a grid that is long."""
    return ceil_div(rows, 128) * ceil_div(cols, 256)


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
