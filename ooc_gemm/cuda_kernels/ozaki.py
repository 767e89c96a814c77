"""float64, complex128 and wide integers by 8-bit integers on the tensor cores: `ozaki2`, the second scheme of
Ozaki, by residues (docs/decisions/float64-on-tensor-cores.md).

    float64, complex128   ──scales.py──► exponents, moduli ──residues.py──► C
                               └── inaccurate, NaN, Inf: sums in float64, decided on the device
    integers              ──────────────────────────────────residues.py──► C, int64
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..support.intervals import ranges, reuses, round_up
from .fallback import ComplexFallback, Fallback, complex_product_bytes
from .launch import Functions
from .moduli import DEPTH, FLOATING, least_count
from .product import Operand, Product, Strips
from .residues import PITCH, TILE_COLUMNS, Planes, Residues, Scales
from .scales import Scaler
from .scratch import Scratch
from .transposition import Transposition

MOST_LINES = 1 << 25
"""Most rows of op(A), or columns of op(B), of a product: rows of all planes are numbered in 32 bits."""
PAYS, PAYS_DEEP = {"float64": 2000, "complex128": 1000}, 1000
"""Values of m·n/(m + n), by type, and of k from which residues are faster than sums in float64 (those of
m·n/(m + n) measured for cubes on an H200, that of k estimated)."""
_INT64_MAX = 2**63 - 1


def residues_pay(m: int, n: int, k: int, dtype: str) -> bool:
    """Return whether each element of A, B and C takes part in enough products. `dtype`: float64 or
    complex128."""
    return reuses(m, n, k, (PAYS[dtype], PAYS_DEEP)) and max(m, n) <= MOST_LINES


def exact_count(a_type: str, b_type: str, k: int) -> int:
    """Return how many moduli products of integers need, whose sums fit int64. `a_type`, `b_type`: NumPy's
    names of the types of A and B."""
    most = min(k, DEPTH)
    for name in (a_type, b_type):
        info = np.iinfo(name)
        most *= max(-int(info.min), int(info.max))
    return least_count(min(most, _INT64_MAX))


def planes(a_type: str, b_type: str, k: int) -> int:
    """Return the bytes of residues of an element of a panel."""
    kind = np.dtype(a_type).kind
    if kind in "iu":
        return exact_count(a_type, b_type, k)
    return FLOATING[-1] * (3 if kind == "c" else 1)


class Ozaki:
    """C ← α·op(A)·op(B) + β·C on the current device. C has the type of float64 or complex128 operands; of
    integers of 16 and 32 bits it is int64."""

    def __init__(
        self,
        trans_a: bool,
        trans_b: bool,
        types: tuple[str, str],
        conjugate: tuple[bool, bool] = (False, False),
        depth: int = DEPTH,
        chooses: bool = True,
        spared: int = 0,
    ):
        """`trans_a`, `trans_b`: whether A is stored k×m, and B n×k. `types`: NumPy's names of the stored
        types of A and B, which are of one size. `conjugate`: whether op() conjugates A, and B. `depth`: the
        largest k of integers. `chooses`: float64 sums replace residues where these do not pay. `spared`: as
        of `TensorGemm`."""
        from cupy.cuda import Device

        dtype = np.dtype(types[0])
        self._types, self._item = dict(zip("ab", types, strict=True)), dtype.itemsize
        self._dtype = dtype.name
        self._mn = {"a": trans_a, "b": not trans_b}
        """Whether a stored operand is contiguous along m or n, and not along k."""
        self._chooses, self._conjugate = chooses, conjugate
        attributes = Device().attributes
        multiprocessors = int(attributes["MultiProcessorCount"]) - spared
        shared = int(attributes["MaxSharedMemoryPerMultiprocessor"])
        self.scratch = Scratch()
        self._scaler: Scaler | None = None
        self._complex: ComplexFallback | None = None
        counts: tuple[int, ...] = FLOATING
        if dtype.kind in "iu":
            counts = (exact_count(*types, depth),)
        else:
            self._scaler = Scaler(dtype.name, multiprocessors, self.scratch)
            along_k = {"a": False, "b": False}
            self._fall_back = Fallback(along_k, multiprocessors, shared, Functions(), "float64")
            if dtype.kind == "c":
                self._complex = ComplexFallback(self._fall_back, conjugate, self.scratch)
        self.residues = Residues(types, counts, conjugate, multiprocessors, self.scratch)
        self._turn = {name: Transposition(dtype) for name, dtype in self._types.items() if self._mn[name]}

    def __call__(self, product: Product, stream: Any, strips: Strips | None = None) -> None:
        """Start the product in a CuPy stream of the current device. Returns at once. Rows of A and B start at
        multiples of 16 elements. `strips`: the strips in which C is made, by default one."""
        m, n = product.m, product.n
        if m == 0 or n == 0:
            return
        if product.alpha == 0:
            product = replace(product, k=0)
        strips = strips or Strips()
        if self._scaler is None and max(m, n) > MOST_LINES:
            self._in_bands(product, stream, strips)
            return
        (a, b), beta = self._along_k(product, stream), product.beta
        silent = Strips(strips.rows, strips.lower, above=strips.above)
        for start, stop in list(ranges(product.k, DEPTH)) or [(0, 0)]:
            left, right = (x.moved(self._item * start) for x in (a, b))
            part = replace(product, k=stop - start, a=left, b=right, beta=beta)
            self._part(part, stream, strips if stop == product.k else silent)
            beta = 1.0

    def _in_bands(self, product: Product, stream: Any, strips: Strips) -> None:
        """Start a product with more rows or columns than residues are made of at once, whole even if C is
        symmetric."""
        m, n, c = product.m, product.n, product.c
        steps = {
            name: self._item * (1 if self._mn[name] else x.ld)
            for name, x in (("a", product.a), ("b", product.b))
        }
        for top, bottom in ranges(m, MOST_LINES):
            for left, right in ranges(n, MOST_LINES):
                a, b = product.a.moved(top * steps["a"]), product.b.moved(left * steps["b"])
                moved = c.moved(8 * (top * c.ld + left))
                self(replace(product, m=bottom - top, n=right - left, a=a, b=b, c=moved), stream)
            strips.after(bottom)

    def _along_k(self, product: Product, stream: Any) -> tuple[Operand, Operand]:
        """Transpose the operands that do not lie along k. Returns both."""
        found = list[Operand]()
        for name, x, lines in (("a", product.a, product.m), ("b", product.b, product.n)):
            if found and x.ptr == product.a.ptr and all(self._mn.values()):  # op(B) is op(A) transposed
                x = found[0]
            elif product.k and name in self._turn:
                pitch = round_up(product.k, PITCH)
                turned = Operand(self.scratch.at(f"turned {name}", lines * pitch * self._item), pitch)
                self._turn[name](product.k, lines, x, turned, stream)
                x = turned
            found.append(x)
        return found[0], found[1]

    def _part(self, product: Product, stream: Any, strips: Strips) -> None:
        """Start a product of operands along k, no deeper than residues allow."""
        m, n, k = product.m, product.n, product.k
        pays = self._scaler is None or (k > 0 and (not self._chooses or residues_pay(m, n, k, self._dtype)))
        same = strips.lower and product.a.ptr == product.b.ptr
        scales = Scales()
        made: tuple[Planes, Planes] | None = None
        if pays:
            if self._scaler:
                scales = self._scaler.scales(product, same, stream)
            made = self._planes(product, same and len(set(self._conjugate)) == 1, scales, stream)
        elif self._scaler:
            scales = Scales(state=self._scaler.state(1, stream))
        embedded = product
        if self._complex:
            embedded = self._complex.embed(product, scales.state, stream)
        for covered, tiles in strips.tiled(m, n, self.residues.tile_elements(), TILE_COLUMNS, PITCH):
            if made:
                for tile in tiles:
                    self.residues.tile(product, *made, tile, scales, stream)
            for start, stop, width in covered:
                if self._scaler:
                    rows = embedded.rows(start, stop, width, self._item * product.a.ld, self._item)
                    (self._complex or self._fall_back)(rows, scales.state, stream)
                strips.after(stop)

    def _planes(self, product: Product, same: bool, scales: Scales, stream: Any) -> tuple[Planes, Planes]:
        """Start to write the residues of both operands. `same`: those of op(B) are those of op(A)."""
        k = product.k
        a = self.residues.planes("a", product.a, product.m, k, scales, stream)
        return a, a if same else self.residues.planes("b", product.b, product.n, k, scales, stream)

    def moduli(self) -> int:
        """Wait for the device, and return how many moduli the last product of floating-point numbers took; 0
        if float64 sums made it."""
        assert self._scaler, "integers always take the same number"
        return self._scaler.moduli()

    def fell_back(self) -> bool:
        """Wait for the device, and return whether float64 sums made the last product."""
        return self.moduli() == 0

    def reserve(self, m: int, n: int, k: int, real: bool = True) -> None:
        """Allocate scratch memory for products up to m×n×k. `real`: α and β will be real."""
        for name, lines in (("a", m), ("b", n)):
            if name in self._turn:
                self.scratch.at(f"turned {name}", lines * round_up(k, PITCH) * self._item)
        self.residues.reserve(m, n, min(k, DEPTH))
        if self._scaler:
            self._scaler.reserve(m, n, min(k, DEPTH))
            self._fall_back.reserve()
        if self._complex and not real:
            self.scratch.at("product", complex_product_bytes(m, n))
