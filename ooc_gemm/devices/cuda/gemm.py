"""Opens the kernel of a plan: one function that multiplies panels, whichever kernel it is."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...cuda_kernels import cublas
from ...cuda_kernels.catalog import KERNELS
from ...cuda_kernels.complex_gemm import ComplexGemm
from ...cuda_kernels.integers import WideIntegers
from ...cuda_kernels.launch import launch, load
from ...cuda_kernels.ozaki import Ozaki
from ...cuda_kernels.product import Product, Strips
from ...cuda_kernels.tuning import best_config
from ...cuda_kernels.wgmma import open_tensor_gemm
from ...engine.ports import Arithmetic, Operation
from ...planning.plan import Plan
from ...planning.schedule import EARLY_STRIPS
from ...support.intervals import BAND, ceil_div, ranges, round_up
from .panels import Layout

SPARED = 2
"""Multiprocessors that products leave to kernels of other streams where pieces are converted or transposed as
they arrive. Thread blocks of products stay on theirs for milliseconds, for which other kernels would wait
(32768³ float64 on an H200: 1.14 s instead of 1.22)."""

STRIP_ELEMENTS = 1 << 25
"""Least number of elements in a strip of C that is finished before others. Every multiprocessor then has many
tiles."""


def early_strips(rows: int, cols: int) -> list[tuple[int, int]]:
    """Return the strips of rows, [start, stop) each, in which the last multiplication makes a block of C."""
    count = max(1, min(EARLY_STRIPS, rows * cols // STRIP_ELEMENTS))
    return list(ranges(rows, round_up(ceil_div(rows, count), BAND)))


class Gemm:
    """C ← α·op(A)·op(B) + β·C on panels of one operation, by the kernel of its arithmetic. It is called with
    a product, a stream and the strips in which C is made."""

    def __init__(
        self, plan: Plan, operation: Operation, layout: Layout, cuda: Any, model: str, multiprocessors: int
    ):
        """`cuda`: CuPy's module of that name. `model`: the GPU's, under which configurations are
        remembered."""
        self._op, self._layout, self._cuda = operation, layout, cuda
        self._spared = SPARED if plan.budget.staged else 0
        self.lost: Any = np.zeros(1, np.uint32)
        """An array of one element, which is not 0 if a product was not made because a panel that stays was no
        longer as it was uploaded."""
        self._multiply = self._open(plan, model, multiprocessors)

    def __call__(self, product: Product, stream: Any, strips: Strips) -> None:
        """Start the product. Returns at once."""
        self._multiply(product, stream, strips=strips)

    def _open(self, plan: Plan, model: str, multiprocessors: int) -> Callable[..., None]:
        """Load the kernel, and allocate its scratch memory. Returns what is called for each product."""
        op = self._op
        arithmetic = op.arithmetic
        if arithmetic.kernel == "cublas":
            return partial(_by_strips, partial(_cublas, op, self._cuda), op.arithmetic, self._layout)
        trans_a, trans_b = not self._layout.along_k("a"), self._layout.along_k("b")
        kernel, panel = KERNELS[arithmetic.kernel], arithmetic.panel.name
        size, real = (plan.bm, plan.bn, plan.bk), op.alpha.imag == op.beta.imag == 0
        once, stays = arithmetic.once, plan.k_panels.staying
        in_place = "".join(name for name, count in zip("ab", stays, strict=True) if once or not count)
        stay = stays if once else (0, 0)
        if kernel.launcher == "ozaki":
            a_type, b_type = (dtype.name for dtype in arithmetic.panels)
            conjugate = op.conjugate_a, op.conjugate_b
            ozaki = Ozaki(trans_a, trans_b, (a_type, b_type), conjugate, plan.bk, spared=self._spared)
            ozaki.reserve(*size, real=real)
            return ozaki
        if panel == "complex64":
            complex_gemm = ComplexGemm(trans_a, trans_b, op.conjugate_a, op.conjugate_b, spared=self._spared)
            in_place = in_place.removesuffix("b")  # which is embedded elsewhere
            complex_gemm.reserve(*size, in_place, real, stay)
            self.lost = complex_gemm.real.lost
            return partial(complex_gemm, in_place=in_place)
        if kernel.launcher != "launch":
            a_type, b_type = (dtype.name for dtype in arithmetic.panels)
            if arithmetic.block == np.int64:
                integers = WideIntegers(kernel.name, a_type, b_type, self._spared)
                integers.reserve(*size)
                return integers
            gemm = open_tensor_gemm(kernel.name, trans_a, trans_b, a_type, b_type, spared=self._spared)
            gemm.reserve(*size, in_place, stay)
            self.lost = gemm.lost
            return partial(gemm, in_place=in_place)
        config = best_config(kernel.name, panel, trans_a, trans_b, *size, model, multiprocessors)
        one = partial(launch, load(config)[config.kernel], config)
        return partial(_by_strips, one, op.arithmetic, self._layout)


def _by_strips(
    gemm: Callable[[Product, Any], None], arithmetic: Arithmetic, layout: Layout, product: Product,
    stream: Any, strips: Strips,
) -> None:  # fmt: skip
    """Start one product for each strip of rows."""
    down = (product.a.ld if layout.along_k("a") else 1) * arithmetic.panel.itemsize
    for start, stop, width in strips.of(product.m, product.n):
        gemm(product.rows(start, stop, width, down, arithmetic.block.itemsize), stream)
        strips.after(stop)


def _cublas(op: Operation, cuda: Any, product: Product, stream: Any) -> None:
    operations = (
        cublas.operation(op.transpose_a, op.conjugate_a),
        cublas.operation(op.transpose_b, op.conjugate_b),
    )
    types = op.arithmetic.panel.name, op.arithmetic.block.name
    cublas.gemm(cuda, product, stream, operations=operations, types=types)
