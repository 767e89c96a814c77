"""Freivalds' check: is C = op(A)·op(B)? Each array is read once.

For a vector x of random signs, C·x = op(A)·(op(B)·x) costs O(n²) instead of O(n³), and a wrong C passes
a round with probability at most one half (R. Freivalds, IFIP Congress 1977); in practice an error larger
than the tolerance is missed only where its row's errors cancel under random signs.

The tolerance of check.py, and as storing C rounds once more: 8·u_C·‖c_i‖.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from . import store
from .api import _operand
from .check import HOEFFDING, Rounding, compare, roundoff
from .devices.cpu import INTERPRETER_BYTES
from .errors import BudgetError, InputError
from .limits import baseline_bytes, default_memory_limit, parse_size
from .local import Source
from .pages import Bytes, page_aligned
from .plan import Piece, cut
from .problem import MiB
from .rechunk import each
from .remote import CONNECTION_BYTES, requests
from .tiles import ceil_div

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Check:
    """What the check found."""

    ok: bool
    rounds: int
    rows_wrong: int
    """Rows of C that are wrong, as far as was seen."""
    first_wrong: int | None
    """The first such row."""
    worst: float
    """Largest error over its tolerance; 1 and below passes."""
    rows_not_finite: int
    """Rows where both sides are NaN or infinite: right to be so, but not checked further."""
    bytes_read: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return dict(self.__dict__)


def verify(
    a: Any,
    b: Any,
    c: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    rounds: int = 2,
    seed: int | None = None,
    memory_limit: str | int | None = None,
) -> Check:
    """Is C (m×n) = op(A) (m×k)·op(B) (k×n), to rounding? Arguments as of `multiply`; `rounds` random
    vectors. Raises InputError, BudgetError, StoreError."""
    store.refuse_event_loop()
    if rounds < 1:
        raise InputError(f"{rounds} rounds check nothing; give 1 or more")
    if seed is not None and seed < 0:
        raise InputError(f"seed {seed} is negative; give 0 or more")
    left, right, product = (
        _operand(a, transpose_a or adjoint_a), _operand(b, transpose_b or adjoint_b), _operand(c, False)
    )  # fmt: skip
    (m, k), (k_b, n) = left.shape, right.shape
    if k != k_b or product.shape != (m, n):
        raise InputError(
            f"the shapes do not fit: op({left.name}) {m}×{k}, op({right.name}) {k_b}×{n}, {product.name} "
            f"{product.shape[0]}×{product.shape[1]}; check the arrays and their transposition"
        )
    limit = default_memory_limit() if memory_limit is None else parse_size(memory_limit)
    wide: Any = (
        np.complex128 if "c" in (left.dtype.kind + right.dtype.kind + product.dtype.kind) else np.float64
    )
    vectors = (m * 6 + n * 2 + k * 4) * rounds * np.dtype(wide).itemsize
    streams = [
        _Stream(source, conj, limit, vectors)
        for source, conj in ((right, adjoint_b), (left, adjoint_a), (product, False))
    ]
    x = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(n, rounds)).astype(wide)
    with np.errstate(all="ignore"):
        y, b_rows = streams[0].times(x)
        z, a_rows = streams[1].times(y)
        w, c_rows = streams[2].times(x)
        scale = np.sqrt(a_rows)[:, None] * math.sqrt(float(b_rows.sum()))
        u = max(roundoff(left.dtype), roundoff(right.dtype))
        tolerance = Rounding(u).tolerance(scale, k, n)
        tolerance += HOEFFDING * roundoff(product.dtype, stored=True) * np.sqrt(c_rows)[:, None]
        bad, ratio = compare(w, z, tolerance)
        neither = ~np.isfinite(w) & ~np.isfinite(z)
    wrong = np.flatnonzero(bad.any(axis=1))
    return Check(
        ok=not wrong.size,
        rounds=rounds,
        rows_wrong=int(wrong.size),
        first_wrong=int(wrong[0]) if wrong.size else None,
        worst=float(ratio.max(where=np.isfinite(ratio), initial=0.0)),
        rows_not_finite=int(neither.any(axis=1).sum()),
        bytes_read=sum(stream.bytes_read for stream in streams),
    )


class _Stream:
    """One pass over a stored matrix by a few threads, each with one slot."""

    def __init__(self, source: Source, conjugate: bool, limit: int, vectors: int):
        s = self._matrix = source.matrix
        self._source, self._conjugate = source, conjugate and source.dtype.kind == "c"
        line = min(s.chunk_cols, s.cols) * s.itemsize
        self._slot = (
            s.chunk_bytes if s.whole else max(s.chunk_cols * s.itemsize, min(s.chunk_bytes, 4 * MiB), line)
        )
        # A piece, twice in the wide type (itself and its squares); a decoder holds chunks more.
        each = self._slot + 2 * self._slot // s.itemsize * 16 + s.beside(self._slot)
        each += CONNECTION_BYTES if s.remote else 0
        source.measure(limit)
        s = self._matrix = source.matrix
        fixed = baseline_bytes(INTERPRETER_BYTES) + vectors + s.apart
        most = requests(source.latency, self._slot) if source.latency else 4
        self._threads = min(most, (limit - fixed) // each)
        if self._threads < 1:
            raise BudgetError(
                f"a memory limit of {limit} bytes is too small to check {source.name}; "
                f"the smallest that would do is {fixed + each} bytes ({ceil_div(fixed + each, MiB)}MiB)",
                minimum_memory_limit=fixed + each,
            )
        self.bytes_read = 0

    def times(self, x: Array) -> tuple[Array, Array]:
        """(op(S)·x, squared norms of op(S)'s rows)."""
        s = self._matrix
        out = np.zeros((s.cols if s.transposed else s.rows, x.shape[1]), x.dtype)
        norms = np.zeros(out.shape[0])
        lock = Lock()
        pieces = cut("", s, (0, s.rows), (0, s.cols), self._slot)

        def add(piece: Piece, slot: Bytes) -> int:
            values, moved = self._source.read(piece, slot)
            wide = values.astype(x.dtype)
            if self._conjugate:
                wide = wide.conj()
            rows, cols = slice(*piece.rows), slice(*piece.cols)
            if s.transposed:
                wide, rows, cols = wide.T, cols, rows
            part, squares = _product(wide, x[cols]), np.square(np.abs(wide)).sum(axis=1)
            with lock:
                out[rows] += part
                norms[rows] += squares
            return moved

        slots = page_aligned(self._threads, self._slot)
        with (
            ThreadPoolExecutor(self._threads, "ooc-gemm verify") as pool,
            self._source.cancelled_on_error(),
        ):
            self.bytes_read = each(pool, slots, pieces, add)
        return out, norms


def _product(a: Array, x: Array) -> Array:
    with np.errstate(all="ignore"):
        found: Array = a @ x
    return found
