"""Opens the kernel of a plan: one function that multiplies panels, whichever kernel it is."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ...cuda_kernels import cublas, nvrtc
from ...cuda_kernels.catalog import KERNELS
from ...cuda_kernels.complex_gemm import ComplexGemm
from ...cuda_kernels.mma import Mma
from ...cuda_kernels.tensor import load, strips
from ...cuda_kernels.tuning import best_config
from ...cuda_kernels.wgmma import Wgmma
from ...engine.ports import Operation
from ...planning.plan import Plan
from ...planning.schedule import EARLY_STRIPS
from ...support.intervals import BAND, ceil_div, ranges, round_up
from .panels import Layout

STRIP_ELEMENTS = 1 << 25
"""Least size of a strip of C that is finished before others: many tiles for each multiprocessor."""


def early_strips(rows: int, cols: int) -> list[tuple[int, int]]:
    """Strips of rows, [start, stop) each, in which the last multiplication makes a block of C."""
    count = max(1, min(EARLY_STRIPS, rows * cols // STRIP_ELEMENTS))
    return list(ranges(rows, round_up(ceil_div(rows, count), BAND)))


class Gemm:
    """C ← α·op(A)·op(B) + β·C on panels of one operation, by the kernel of its arithmetic.

    Called with (m, n, k, α, a, lda, b, ldb, β, c, ldc, stream) and with `lower`, `rows` and `after` as
    TensorGemm has them.
    """

    def __init__(
        self, plan: Plan, operation: Operation, layout: Layout, cuda: Any, model: str, multiprocessors: int
    ):
        """`cuda`: CuPy's module of that name; `model`: the GPU's, by which configurations are remembered."""
        self._op, self._layout, self._cuda = operation, layout, cuda
        self._multiply = self._open(plan, model, multiprocessors)

    def __call__(self, *args: Any, **options: Any) -> None:
        self._multiply(*args, **options)

    def _open(self, plan: Plan, model: str, multiprocessors: int) -> Callable[..., None]:
        op = self._op
        arithmetic = op.arithmetic
        if arithmetic.kernel == "cublas":
            return partial(self._by_strips, self._cublas)
        trans_a, trans_b = not self._layout.along_k("a"), self._layout.along_k("b")
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
        config = best_config(kernel.name, panel, trans_a, trans_b, *size, model, multiprocessors)
        launch = partial(self._real, partial(nvrtc.launch, load(config)[config.kernel], config))
        return partial(self._by_strips, launch)

    def _by_strips(
        self, gemm: Callable[..., None], m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int,
        ldb: int, beta: complex, c: int, ldc: int, stream: Any, lower: bool, rows: Iterable[tuple[int, int]],
        after: Callable[[int], None],
    ) -> None:  # fmt: skip
        """One product for each strip of rows, as `TensorGemm` does it."""
        arithmetic = self._op.arithmetic
        down = (lda if self._layout.along_k("a") else 1) * arithmetic.panel.itemsize
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
        """A kernel whose α and β are real."""
        gemm(m, n, k, alpha.real, a, lda, b, ldb, beta.real, *rest, **options)

    def _cublas(self, *args: Any) -> None:
        op = self._op
        operations = (
            cublas.operation(op.transpose_a, op.conjugate_a),
            cublas.operation(op.transpose_b, op.conjugate_b),
        )
        types = op.arithmetic.panel.name, op.arithmetic.block.name
        cublas.gemm(self._cuda, *args, operations=operations, types=types)
