"""Which kernel multiplies which types on a GPU, and how it wants its panels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...cuda_kernels import ozaki, scales
from ...cuda_kernels.catalog import KERNELS
from ...cuda_kernels.complex_gemm import product_bytes
from ...cuda_kernels.fallback import complex_product_bytes
from ...cuda_kernels.split import BYTES_PER_LINE, split_pays
from ...engine.ports import Arithmetic

THIN = 512
"""Number of rows or columns of C below which our tiles for float16 are half empty."""

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_SHORT, _WIDE = 1000, 500
"""Values of m·n/(m + n) from which residues of integers are faster than cuBLAS in float64 (16 bits) and than
`ffma` in int64 (where float64 is not exact), measured for cubes on an H200."""
_TF32_ERROR = 2.0**-10
"""Largest relative error of a float32 that is rounded to 11 bits."""


@dataclass(frozen=True)
class Case:
    """What the choice of a kernel depends on."""

    a: np.dtype[Any]
    b: np.dtype[Any]
    out: np.dtype[Any]
    """Type of C."""
    shape: tuple[int, int, int]
    """m, n, k."""
    bound: int
    """An upper bound of every sum of integers."""
    precision: str
    capability: int
    """Compute capability of the device, times ten."""

    @property
    def wide(self) -> np.dtype[Any]:
        """The type that holds A, B and C, float32 at least."""
        return np.result_type(self.a, self.b, self.out, np.float32)

    @property
    def exact(self) -> bool:
        return self.out.kind in "iu"

    @property
    def small_integers(self) -> bool:
        """Whether cuBLAS adds up these integers exactly, in float64."""
        return self.exact and max(self.a.itemsize, self.b.itemsize) <= 2 and self.bound < 2**53

    @property
    def bytes(self) -> bool:
        """Whether A and B hold 8-bit integers, for which tensor cores have instructions."""
        return self.exact and self.a.itemsize == self.b.itemsize == 1

    @property
    def integers(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """The types of panels of these integers, of the size of the wider ones."""
        size = max(self.a.itemsize, self.b.itemsize)
        return np.dtype(f"{self.a.kind}{size}"), np.dtype(f"{self.b.kind}{size}")

    @property
    def sums(self) -> np.dtype[Any]:
        """The type of sums on tensor cores: int32, in which tensor cores add up, or, where that might
        overflow, int64, to which their partial sums are added. Where k is 0, α may be too large for int32."""
        return _INT32 if self.bytes and self.bound < 2**31 and self.shape[2] else _INT64

    @property
    def half(self) -> bool:
        return self.a == self.b == np.float16 and self.wide == _FLOAT32

    @property
    def float32(self) -> bool:
        return self.wide == _FLOAT32

    @property
    def hopper(self) -> bool:
        """Whether there is wgmma. Its kernels are faster than all others."""
        return self.capability == 90

    @property
    def split_pays(self) -> bool:
        return split_pays(*self.shape)

    @property
    def residues_pay(self) -> bool:
        """Whether ozaki2 is the fastest."""
        found = _ozaki(self, "") if self.hopper and max(self.shape[:2]) <= ozaki.MOST_LINES else None
        return found is not None and found.pays(*self.shape)


_Rule = tuple[str, str, Callable[[Case], bool]]
_RULES: tuple[_Rule, ...] = (
    (
        "int8",
        "exact in int32 on the tensor cores",
        lambda c: c.hopper and c.bytes and c.sums == _INT32,
    ),
    (
        "int8",
        "exact in int32 on the tensor cores, partial sums added up in int64",
        lambda c: c.hopper and c.bytes,
    ),
    (
        "mma-int8",
        "exact on the tensor cores",
        lambda c: c.capability >= KERNELS["mma-int8"].min_arch and c.bytes,
    ),
    ("ozaki2", "exact by residues on the tensor cores", lambda c: c.exact and c.residues_pay),
    ("cublas", "every sum is exact in float64", lambda c: c.small_integers),
    ("ffma", "exact in int64", lambda c: c.exact),
    (
        "cublas",
        "float16 on the tensor cores, sums in float32; C is thin",
        lambda c: c.hopper and c.half and min(c.shape[:2]) < THIN,
    ),
    ("fp16", "float16 on the tensor cores, sums in float32", lambda c: c.hopper and c.half),
    (
        "tf32",
        "one TF32 product on the tensor cores, which precision medium allows",
        lambda c: c.hopper and c.float32 and c.precision == "medium",
    ),
    (
        "cublas",
        "too few products for each element for a split in float16 planes to pay",
        lambda c: c.hopper and (c.float32 or c.wide == np.complex64) and not c.split_pays,
    ),
    (
        "fp16x3",
        "complex as real products as accurate as float32, ahead of CGEMM here",
        lambda c: c.hopper and c.wide == np.complex64,
    ),
    (
        "fp16x3",
        "no less accurate than float32, and over four times as fast as SGEMM here",
        lambda c: c.hopper and c.float32,
    ),
    (
        "ozaki2",
        "by residues on the tensor cores, no less accurate than float64, and ahead of cuBLAS here",
        lambda c: c.residues_pay,
    ),
    ("cublas", "the fastest known here that keeps the precision", lambda c: True),
)
"""Kernel, reason, condition. The first rule whose condition holds is applied. The order follows measurements
(benchmarks/results)."""


def fastest(case: Case) -> Arithmetic | None:
    """Return how the fastest kernel known multiplies these types that keeps the precision, and how another
    does where memory is short. Every integer sum is exact."""
    (kernel, why), *others = ((kernel, why) for kernel, why, holds in _RULES if holds(case))
    found = arithmetic(kernel, case, why)
    if kernel == "ozaki2" and found is not None:
        return replace(
            found, other=arithmetic(others[0][0], case, "the memory is too small for panels of ozaki2")
        )
    return found


def arithmetic(kernel: str, case: Case, why: str) -> Arithmetic | None:
    """Return how a kernel multiplies these types; None if it cannot. `kernel`: "cublas" or a name in KERNELS.
    `why`: the reason for the choice, which the plan shows."""
    if kernel == "cublas":
        return _cublas(case, why)
    known, kind = KERNELS[kernel], kernel.removeprefix("mma-")
    if not known.runs_on(case.capability):
        return None
    if kernel == "fp16x3" and case.wide == np.complex64:
        # Rows of re and of im for an A along m; B embedded, at twice its size.
        return Arithmetic(
            kernel, case.wide, case.wide, why=why, pitch=64, line_bytes=2 * BYTES_PER_LINE, scratch=(8, 16),
            product_bytes=product_bytes(1, 1), once=True, in_place=False,
        )  # fmt: skip
    if kernel == "ozaki2":
        return _ozaki(case, why)
    panel: np.dtype[Any]
    block: np.dtype[Any]
    if kind == "fp16x3":
        fits, panel, block = case.float32, _FLOAT32, _FLOAT32
        more: dict[str, Any] = {"pitch": 64, "line_bytes": BYTES_PER_LINE, "once": True}
    elif known.dtypes == ("float16",):  # fp16, and rungs of the ladder
        along_k = (None, None) if known.transposes else (True, False)
        fits, panel, block, more = case.half, case.a, _FLOAT32, {"pitch": 8, "along_k": along_k}
    elif kind == "tf32":
        fits, panel, block = case.float32, case.wide, case.wide
        more = {"pitch": 4, "along_k": (True, True), "operand_error": _TF32_ERROR}
    elif kind == "int8":
        fits, block = case.exact, case.sums
        size = max(case.a.itemsize, case.b.itemsize)
        panel, panel_b = case.integers if fits else (_INT64,) * 2
        planes = size if size > 1 else 0  # into which panels are cut
        more = {
            "pitch": 16, "along_k": (True, True), "exact": True, "panel_b": panel_b,
            "scratch": (planes, planes),
        }  # fmt: skip
    else:
        panel = block = _INT64 if case.exact else case.wide
        fits = panel.name in known.dtypes
        pitch = 2 if kernel == "dmma" else 1  # 16 bytes
        along_k = (None, None) if known.transposes else (True, False)
        more = {"pitch": pitch, "along_k": along_k, "exact": case.exact}
    return Arithmetic(kernel, panel, block, why=why, **more) if fits else None


def _ozaki(case: Case, why: str) -> Arithmetic | None:
    """Return how ozaki2 multiplies: each element of a panel has a byte for each residue. Panels that do not
    lie along k are transposed before they are multiplied, and not as they arrive: kernels of another stream
    would wait for products, whose thread blocks leave a multiprocessor after milliseconds."""
    more: dict[str, Any]
    if case.exact:
        panels, block = case.integers, _INT64
        more = {"exact": True, "panel_b": panels[1]}
        fits, least = panels[0].itemsize in (2, 4), _SHORT if case.small_integers else _WIDE
    else:
        panels, block = (case.wide, case.wide), case.wide
        more = {"line_bytes": scales.BYTES_PER_LINE, "product_bytes": complex_product_bytes(1, 1)}
        fits, least = case.wide.name in ozaki.PAYS, ozaki.PAYS.get(case.wide.name, 0)
    if not fits:
        return None
    planes = ozaki.planes(panels[0].name, panels[1].name, case.shape[2])
    return Arithmetic(
        "ozaki2", panels[0], block, why=why, pitch=16, turns=True, scratch=(planes, planes),
        least=(least, ozaki.PAYS_DEEP), in_place=False, **more,
    )  # fmt: skip


def _cublas(case: Case, why: str) -> Arithmetic | None:
    if case.exact:
        small = case.small_integers
        return Arithmetic("cublas", _FLOAT64, _FLOAT64, why=why, exact=True) if small else None
    # Tensor cores are fed by 16 bytes.
    panel = case.a if case.half else case.wide
    return Arithmetic("cublas", panel, case.wide, why=why, pitch=8 if case.half else 1)
