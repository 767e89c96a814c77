"""Checks of the blocks that a GPU makes: kernels/check.cu, on the compute stream.

                      x ──► y = op(B)·x ──► z += op(A)·y       each pair of panels, before it is multiplied
the old C ──► β·C·x                            C·x             each block
                 └──────── one copy ────────────┴──► host: check.Sums.verdict
"""

import random
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from ...cuda_kernels import driver, preparations
from ...cuda_kernels.driver import Event, Events
from ...cuda_kernels.launch import load
from ...engine.check import Sums, Verdict
from ...engine.ports import Operation
from ...planning.ledger import check_bytes
from ...planning.plan import Plan
from ...planning.schedule import Block
from ...support.buffers import Bytes, page_aligned
from ...support.intervals import ceil_div, round_up

THREADS, ROWS, DEPTH = 256, 8, 256
"""Threads of a block of kernels/prepare/check.cu; rows that a warp of `rows` takes; rows that a block of
`columns` takes."""
WARPS = 8192
"""Number of warps that keeps any GPU busy."""
HALF = 2.0**-24, DEPTH // (THREADS // 32)
"""Rounding of float16 products: they are first added up in float32, this many at a time."""


class Check:
    """The check of a block, whose sums are on their way to the host."""

    def __init__(self, done: Event, judge: "partial[Verdict]") -> None:
        self._done, self._judge, self._lock = done, judge, Lock()
        self._found: Verdict | None = None

    def verdict(self) -> Verdict:
        """Waits for the sums. The first thread that asks works the verdict out."""
        with self._lock:
            if self._found is None:
                self._done.synchronize()
                self._found = self._judge()
            return self._found


class Checks:
    """The checks of one run. One block at a time is being checked, but the sums of several may be on the
    host."""

    def __init__(
        self, plan: Plan, operation: Operation, allocate: Any, prepare: Any, runtime: Any, points: Events
    ) -> None:
        """`allocate`: (elements, dtype) → a device array. `prepare` pins host memory. `runtime`: CUDA's, as
        CuPy has it. `points` makes events."""
        self._runtime, self._op, self._plan, self._points = runtime, operation, plan, points
        arithmetic = operation.arithmetic
        self._dtype = arithmetic.check_type
        self._rounding = arithmetic.rounding(plan.bk)
        if arithmetic.panel == np.float16:
            self._rounding = replace(self._rounding, check=HALF)
        self._nbytes, _ = check_bytes(plan.problem, plan.bm, plan.bn, plan.bk)
        self._memory = allocate(self._nbytes, np.dtype(np.uint8))
        self._sums = Sums.within(self._memory, plan.bm, plan.bk, self._dtype)
        self._x, self._y = allocate(plan.bn, self._dtype), allocate(plan.bk, self._dtype)
        self._host: list[Bytes] = page_aligned(plan.c_buffers, self._nbytes)
        for buffer in self._host:
            prepare(buffer)
        self._panels = [self._kernels(dtype, arithmetic.pitch) for dtype in arithmetic.panels]
        self._block = {pitch: self._kernels(arithmetic.block, pitch) for pitch in (1, 16)}

    def _kernels(self, dtype: np.dtype[Any], pitch: int) -> tuple[dict[str, Any], int]:
        """Load the kernels for a matrix whose rows start at multiples of `pitch` elements. Returns them, and
        the number of elements that a thread loads at once."""
        vec = min(max(1, 16 // dtype.itemsize), pitch & -pitch)
        arithmetic = self._op.arithmetic
        wide = arithmetic.exact and arithmetic.check_type.itemsize == 8
        config = preparations.check(dtype.name, arithmetic.exact, vec, wide)
        return load(config, "rows", "columns", "signs"), vec

    def begin(self, block: Block, c: Any, stream: Any) -> None:
        """Start the check of a block: draw a new vector, and multiply the old C by it."""
        signs = self._panels[0][0]["signs"]
        args = np.int64(block.cols), np.uint64(random.getrandbits(64)), np.uintp(self._x.data.ptr)
        signs((ceil_div(block.cols, THREADS),), (THREADS,), args, stream)
        self._zero(self._memory, stream)
        if self._op.beta != 0:
            self._of_block(block, c, self._sums.old, self._sums.c, stream)

    def add(
        self, block: Block, k: int, a: tuple[int, int, bool], b: tuple[int, int, bool], stream: Any
    ) -> None:
        """Add the products of a pair of panels. `a`, `b`: address, elements from row to row, and whether k
        lies along the rows."""
        op = self._op
        if op.alpha == 0:  # then NaN in A and B is none in C
            return
        self._zero(self._y, stream)
        sums = self._sums
        for kernels, (at, pitch, along_k), lines, conjugate, v, out, squares in (
            (self._panels[1], b, block.cols, op.conjugate_b, self._x, self._y, sums.b),
            (self._panels[0], a, block.rows, op.conjugate_a, self._y, sums.product, sums.a),
        ):
            # op(B) is k × columns, and stored as such unless k lies along the rows; op(A) is rows × k.
            shape = (lines, k) if along_k else (k, lines)
            name = "rows" if along_k == (v is self._y) else "columns"
            self._times(kernels, name, shape, at, pitch, v, out, squares, conjugate, stream)

    def end(self, block: Block, c: Any, number: int, stream: Any) -> Check:
        """Multiply the finished block by the vector, and start to copy to the host what a verdict is made of.
        `number`: of the block's buffer."""
        self._of_block(block, c, self._sums.found, None, stream)
        host = self._host[number]
        self._runtime.memcpyAsync(host.ctypes.data, self._memory.data.ptr, self._nbytes, 2, stream.ptr)
        sums = Sums.within(host[: self._nbytes], self._plan.bm, self._plan.bk, self._dtype)
        k, op = self._plan.problem.k, self._op
        done = self._points.record(stream.ptr)
        return Check(
            done, partial(sums.verdict, block.rows, k, block.cols, op.alpha, op.beta, self._rounding)
        )

    def _of_block(self, block: Block, c: Any, out: Any, squares: Any, stream: Any) -> None:
        kernels = self._block[1 if block.cols % 16 else 16]
        shape = block.rows, block.cols
        self._times(kernels, "rows", shape, c.data.ptr, block.cols, self._x, out, squares, False, stream)

    def _times(
        self, kernels: tuple[dict[str, Any], int], name: str, shape: tuple[int, int], at: int, pitch: int,
        v: Any, out: Any, squares: Any, conjugate: bool, stream: Any,
    ) -> None:  # fmt: skip
        """Add a product of a stored matrix to the sums `out`, as `add_products` does, and sums of squares to
        `squares`, unless that is None."""
        norms = 0 if squares is None or self._op.arithmetic.exact else squares.data.ptr
        matrix = at, pitch, *shape
        add_products(kernels, name, matrix, v.data.ptr, out.data.ptr, norms, stream, conjugate)

    def _zero(self, array: Any, stream: Any) -> None:
        driver.fill(array.data.ptr, 0, array.nbytes, stream)


def add_products(
    kernels: tuple[dict[str, Any], int], name: str, matrix: tuple[int, int, int, int], v: int, out: int,
    squares: int, stream: Any, conjugate: bool = False,
) -> None:  # fmt: skip
    """Multiply a stored matrix, or its transpose, by a vector, and add the result to another one.

    `kernels`: of check.cu, and the elements that a thread loads at once. `name`: `rows` or `columns`, the
    kernel to use. `matrix`: address, elements from row to row, rows and columns. `v`, `out`: addresses of the
    vectors. `squares`: address of the sums of squares that are added to, or 0.
    """
    functions, vec = kernels
    at, pitch, rows, cols = matrix
    if rows == 0 or cols == 0:
        return
    i64, u = np.int64, np.uintp
    to = u(out), u(squares), np.int32(conjugate)
    stored = u(at), i64(pitch), u(v)
    if name == "rows":
        strips, step = ceil_div(rows, ROWS), 32 * vec
        across = max(1, min(WARPS // strips, cols // (4 * step)))
        width = round_up(ceil_div(cols, across), step)
        grid: tuple[int, ...] = ceil_div(strips, THREADS // 32), ceil_div(cols, width)
        args: tuple[Any, ...] = i64(rows), i64(cols), i64(width), *stored, *to
    else:
        grid = (ceil_div(cols, 32 * vec) * ceil_div(rows, DEPTH),)
        args = i64(rows), i64(cols), *stored, *to
    functions[name](grid, (THREADS,), args, stream)
