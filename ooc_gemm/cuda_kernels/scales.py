"""Finds how float64 operands are scaled to integers, and whether their residues are as accurate as sums in
float64 (kernels/prepare/scale.cu).

    largest elements of each k ──► d ──► norms of lines ──► magnitudes
                                                                │ one int8 product
                              moduli and exponents, or the fallback
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, round_up
from . import driver, preparations, tensor_tiles
from .launch import load
from .product import Operand, Product
from .residues import EXPONENT_BYTES, PITCH, Planes, Scales, plane_map
from .scratch import Scratch

LINE_BYTES, TOP_BYTES, DEPTH_BYTES = 16, 4, 12
"""Bytes of device memory of scale.cu: a `Line` and the largest element of each row and column of C; the
largest elements and d of each k."""
BYTES_PER_LINE = LINE_BYTES + TOP_BYTES + EXPONENT_BYTES
"""Bytes of device memory for each row and column of C. For each k they are more than enough."""
TOLERANCE = 0.25
"""The error that the rounding to integers may cause in a sum, at most, as a multiple of 2⁻⁵³·Σ|a||b|. The
bound by which it is judged takes a quarter of Σ|a||b| into account, so the error is a quarter of this where
the terms of a sum are alike. A sum in float64 has an error of about .4 where its terms cancel, and more where
they do not."""
_SQUARE_BYTES = 8
"""Bytes of the squares of a line in a block of columns."""
_STATE_BYTES, _LEAST_BYTES = 16, 4
"""Bytes of a `State`, and of `least` at its end."""
_KERNELS = "depth_largest", "equilibrate", "lines", "decide"
_MOST_THREADS, _THREADS_AT_ONCE = 1024, 2048
"""Most threads of a block that reduces lines, and threads of all such blocks of a multiprocessor."""
_SHORT_BYTES, _SHORT_THREADS, _LONG_THREADS = 1 << 16, 256, 512
"""Bytes of a line that is reduced by a block of few threads, and threads for such lines and longer ones. Of
1024 threads most would wait for the others (measured on an H200)."""
_STRIP, _COLUMNS = 128, 256
"""Rows and columns of a block of `depth_largest`."""
_DEVICE_TO_HOST = 2
"""cudaMemcpyKind."""


def sampled(k: int) -> int:
    """Return how many of k elements of a line have magnitudes."""
    spans, rest = divmod(k, preparations.SPAN)
    return spans * preparations.SAMPLE + min(rest, preparations.SAMPLE)


@dataclass(frozen=True, slots=True)
class _Side:
    """An operand, and the addresses of what is found of its lines."""

    name: str
    """Which operand this is: a or b."""
    x: Operand
    count: int
    """Number of lines: rows of op(A), or columns of op(B)."""
    lines: int
    """Address of a `Line` for each."""
    tops: int
    """Address of the largest element of each; 0 where they are not looked for with d."""
    partial: int
    """Address of the squares of each in each block of columns; 0 likewise."""
    magnitudes: int
    """Address of the magnitudes, which lie where residues will."""


class Scaler:
    """Finds the scales of operands along k on the current device."""

    def __init__(self, dtype: str, multiprocessors: int, scratch: Scratch):
        """`dtype`: float64 or complex128."""
        self._parts = 2 if dtype == "complex128" else 1
        self._multiprocessors, self._scratch = multiprocessors, scratch
        self._kernels = load(preparations.scale(dtype), *_KERNELS)
        self._config = tensor_tiles.of_magnitudes()
        self._multiply = load(self._config)["wgmma"]

    def state(self, fallback: int, stream: Any) -> int:
        """Set the `State` of scale.cu, whose first word is the flag of the fallback. Returns its address."""
        at, least = self._scratch.at("state", _STATE_BYTES), _STATE_BYTES - _LEAST_BYTES
        driver.fill(at, fallback, least, stream)
        driver.fill(at + least, 0x7F, _LEAST_BYTES, stream)
        return at

    def scales(self, product: Product, symmetric: bool, stream: Any) -> Scales:
        """Find the scales of both operands, or raise the flag of the fallback. `symmetric`: op(B) is the
        transpose of op(A), or its adjoint."""
        m, n, k = product.m, product.n, product.k
        state = self.state(0, stream)
        exponents = self._scratch.at("exponents", EXPONENT_BYTES * (m + n))
        depth = self._scratch.at("depth", DEPTH_BYTES * k + TOP_BYTES * (m + n))
        sides = self._sides(product, symmetric, depth + DEPTH_BYTES * k)
        if symmetric:  # both operands have the same elements at every k
            depth = 0
        else:
            self._equilibrate(k, sides, depth, state, stream)
        planes = [self._find_lines(k, side, depth, state, stream) for side in sides]
        self._find_least(product, planes[0], planes[-1], symmetric, state, stream)
        found = Scales(depth, exponents, exponents if symmetric else exponents + EXPONENT_BYTES * m, state)
        self._decide(product, (sides[0].lines, sides[-1].lines), found, stream)
        return found

    def _sides(self, product: Product, symmetric: bool, tops: int) -> list[_Side]:
        """Return the operands that have lines of their own. `tops`: where the largest elements of their lines
        will be, if d are found."""
        m, n, k = product.m, product.n, product.k
        lines = self._scratch.at("lines", LINE_BYTES * (m + n))
        found, before = [], 0
        for name, x, count in (("a", product.a, m), ("b", product.b, n))[: 1 if symmetric else 2]:
            nbytes = round_up(count * round_up(sampled(k), PITCH), LINE_BYTES)
            at = self._scratch.at(f"planes {name}", nbytes + _SQUARE_BYTES * count * self._across(k))
            top, partial = (0, 0) if symmetric else (tops + TOP_BYTES * before, at + nbytes)
            found.append(_Side(name, x, count, lines + LINE_BYTES * before, top, partial, at))
            before += count
        return found

    def _across(self, k: int) -> int:
        """Return the number of blocks of columns of an operand."""
        return ceil_div(self._parts * k, _COLUMNS)

    def _equilibrate(self, k: int, sides: list[_Side], depth: int, state: int, stream: Any) -> None:
        """Find a power of two for each k, by which op(A) is multiplied and op(B) divided; and the largest
        elements of lines, and their squares. `depth`: the address of d, behind which lie the largest elements
        of each k, and of lines."""
        i32, u, largest = np.int32, np.uintp, {"a": depth + 4 * k, "b": depth + 8 * k}
        driver.fill(largest["a"], 0, 8 * k + TOP_BYTES * sum(side.count for side in sides), stream)
        for side in sides:
            args = (
                i32(side.count), i32(k), u(side.x.ptr), np.int64(side.x.ld), u(largest[side.name]),
                u(side.tops), u(side.partial),
            )  # fmt: skip
            grid = ceil_div(side.count, _STRIP) * self._across(k)
            self._kernels["depth_largest"]((grid,), (_COLUMNS,), args, stream)
        found = i32(k), u(largest["a"]), u(largest["b"]), u(depth), u(state)
        self._kernels["equilibrate"]((1,), (_MOST_THREADS,), found, stream)

    def _find_lines(self, k: int, side: _Side, depth: int, state: int, stream: Any) -> Planes:
        """Find norms and magnitudes of the lines of an operand. `depth`: the address of d, or 0. Returns the
        place of magnitudes."""
        count, x, pitch = side.count, side.x, round_up(sampled(k), PITCH)
        i32, i64, u = np.int32, np.int64, np.uintp
        args = (
            i32(count), i32(k), u(x.ptr), i64(x.ld), u(depth), i32(1 if side.name == "a" else -1),
            u(side.tops), u(side.partial), u(side.lines), u(side.magnitudes), i64(pitch), u(state),
        )  # fmt: skip
        threads = _SHORT_THREADS if 8 * self._parts * k <= _SHORT_BYTES else _LONG_THREADS
        blocks = min(count, self._multiprocessors * (_THREADS_AT_ONCE // threads))
        self._kernels["lines"]((blocks,), (threads,), args, stream)
        return Planes(side.magnitudes, pitch, count)

    def _find_least(
        self, product: Product, a: Planes, b: Planes, symmetric: bool, state: int, stream: Any
    ) -> None:
        """Start the product of magnitudes, of which only the least sum is kept. Of a symmetric one, tiles far
        above the diagonal are left out."""
        m, n, k, config = product.m, product.n, sampled(product.k), self._config
        i32, u, cluster = np.int32, np.uintp, config.value("CLUSTER")
        maps = [plane_map(x, 1, k, name, config) for name, x in zip("ab", (a, b), strict=True)]
        args = (
            *maps, i32(m), i32(n), i32(k), u(self._scratch.drawn(stream)), i32(1), i32(0),
            u(state + _STATE_BYTES - _LEAST_BYTES), np.int64(n), u(0), u(0), u(state), i32(1), i32(symmetric),
            i32(0),
        )  # fmt: skip
        grid = min(self._multiprocessors // cluster, config.grid(m, n)[0]) * cluster
        self._multiply((grid,), config.block, args, stream, config.shared_bytes)

    def _decide(self, product: Product, lines: tuple[int, int], found: Scales, stream: Any) -> None:
        """Start to choose the number of moduli, and to write exponents; or raise the flag of the fallback."""
        i32, u = np.int32, np.uintp
        args = (
            i32(product.m), i32(product.n), i32(product.k), u(lines[0]), u(found.a), u(lines[1]), u(found.b),
            np.float64(TOLERANCE), u(found.state),
        )  # fmt: skip
        self._kernels["decide"]((1,), (_MOST_THREADS,), args, stream)

    def moduli(self) -> int:
        """Wait for the device, and return how many moduli the last product took; 0 for the fallback."""
        from cupy.cuda import runtime

        runtime.deviceSynchronize()
        state = np.zeros(_STATE_BYTES // 4, np.uint32)
        at = self._scratch.at("state", _STATE_BYTES)
        runtime.memcpy(state.ctypes.data, at, state.nbytes, _DEVICE_TO_HOST)
        fallback, moduli, *_ = map(int, state)
        return 0 if fallback else moduli

    def reserve(self, m: int, n: int, k: int) -> None:
        """Allocate scratch memory for products up to m×n×k, but for magnitudes, which lie in planes of
        residues."""
        self._scratch.at("state", _STATE_BYTES)
        self._scratch.at("lines", LINE_BYTES * (m + n))
        self._scratch.at("exponents", EXPONENT_BYTES * (m + n))
        self._scratch.at("depth", DEPTH_BYTES * k + TOP_BYTES * (m + n))
