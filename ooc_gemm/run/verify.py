"""Freivalds' check that C = α·op(A)·op(B) + β·(old C), which reads each array once.

For a vector x of random signs, C·x = α·op(A)·(op(B)·x) + β·(old C·x) costs O(n²) instead of O(n³), and a
wrong C passes a round with probability at most one half (R. Freivalds, IFIP Congress 1977); in practice an
error larger than the tolerance is missed only where its row's errors cancel under random signs.

The tolerance is that of check.py with Σ_k |a_ik|·‖b_k‖ in place of ‖a_i‖·‖B‖_F, which is no larger, and what
storing C in its type rounds once more: 8·u_C·‖c_i‖, and half of that type's smallest number for each element.
Where elements may be too large for C's type, C may be infinite or NaN.

Where columns of op(B) have very different norms, rounding of the largest ones would hide errors in all
others. Then the elements of x are powers of two, with random signs, that make all columns alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.check import HOEFFDING, Rounding, compare, least, norms, roundoff
from ..storage.io.zarr_internals import refuse_event_loop
from ..support.errors import Refusals
from ..support.memory import memory_limit_of
from ..support.meter import Meter
from .claim import Claim, open_claim
from .observer import Observer
from .scalars import whole
from .stream import Needs, Pieces, Range

Array = npt.NDArray[Any]
TF32 = 2.0**-10
"""Relative error of an element that is rounded to TF32."""
ALIKE = 10
"""Columns of op(B) are made alike where their norms differ by more than this power of two."""
Progress = Callable[[int, int], None]
"""Called with the bytes of elements that have been read, and the bytes of all arrays."""


@dataclass(frozen=True)
class Check:
    """The result of `verify`."""

    ok: bool
    rounds: int
    rows_wrong: int
    """Number of rows of C that were found to be wrong."""
    first_wrong: int | None
    """The first wrong row; None where no row is wrong."""
    worst: float
    """Largest ratio of an error to its tolerance; a ratio of at most 1 passes."""
    rows_not_finite: int
    """Number of rows that may be NaN or infinite, and are not checked further: both sides are, or C's type
    may be too small for them."""
    bytes_read: int
    alpha: complex = 1.0
    beta: complex = 0.0
    formula: str = ""
    """What C was compared with, such as `2·Aᵀ·B`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        numbers = {"alpha": self.alpha, "beta": self.beta}
        return {**self.__dict__, **{name: _json(value) for name, value in numbers.items()}}


def verify(
    a: Any,
    b: Any,
    c: Any,
    *,
    alpha: complex | None = None,
    beta: complex | None = None,
    old: Any = None,
    transpose_a: bool | None = None,
    transpose_b: bool | None = None,
    adjoint_a: bool | None = None,
    adjoint_b: bool | None = None,
    rounds: int = 2,
    seed: int | None = None,
    memory_limit: str | int | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> Check:
    """Check that C (m×n) = α·op(A) (m×k)·op(B) (k×n) + β·(old C), to rounding.

    Each array is read once, and B once more where its columns have very different norms and β is 0. Where α,
    β and op() are not given, those count that C's attributes record of the run that made it; where they
    record nothing, α = 1, β = 0 and op() changes nothing.

    Parameters
    ----------
    a, b, c : str, os.PathLike, zarr.Array or array-like
        The inputs and the result: a path, a URL, an open Zarr array, or anything with shape, dtype and
        slicing.
    alpha, beta : complex, optional
        α and β. By default what C's attributes record, else 1 and 0.
    old : str, os.PathLike, zarr.Array or array-like, optional
        C as it was before, which is needed where β is not 0.
    transpose_a, transpose_b : bool, optional
        Whether an input is transposed. False says that it is not, whatever is recorded.
    adjoint_a, adjoint_b : bool, optional
        Whether the conjugate transpose of an input is multiplied.
    rounds : int, default 2
        Number of random vectors. Each halves the chance that a wrong C passes.
    seed : int, optional
        Seed of the random vectors. By default they are different each time.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident, in bytes or as `"8GiB"`. By default 60 % of what
        the process may use.
    progress : callable, optional
        Called with (bytes done, bytes in all) as arrays are read: bytes of elements, after they are decoded.
    notice : callable, optional
        Called with sentences about what concerns the answer, which are UserWarnings where there is no
        `notice`: attributes or a mask of an array that are not applied.

    Returns
    -------
    Check
        `ok`, and where C is wrong which rows are.

    Raises
    ------
    InputError, BudgetError
        Before anything is read: the arrays do not fit together, or the memory limit is too small.
    StoreError
        A chunk could not be read.
    """
    refuse_event_loop()
    rounds = whole("rounds", rounds, 1)
    seed = None if seed is None else whole("seed", seed, 0)
    claim = open_claim(a, b, c, old, alpha, beta, (transpose_a, adjoint_a), (transpose_b, adjoint_b))
    limit = memory_limit_of(memory_limit)
    Observer(notice=notice).warn_of_undecoded(opened for opened, _ in claim.operands.values())
    passes = _Passes(claim, rounds, limit, progress)
    signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(claim.shape[1], rounds))
    with passes.meter, np.errstate(all="ignore"):
        sums = _sums(claim, passes, signs.astype(claim.wide))
        tolerance, overflows = _tolerance(claim, sums)
        bad, ratio = compare(sums.found, sums.wanted, tolerance, overflows)
        not_finite = ~(np.isfinite(sums.found) & np.isfinite(sums.wanted)) & ~bad
    wrong = np.flatnonzero(bad.any(axis=1))
    return Check(
        ok=not wrong.size,
        rounds=rounds,
        rows_wrong=int(wrong.size),
        first_wrong=int(wrong[0]) if wrong.size else None,
        worst=float(ratio.max(where=np.isfinite(ratio), initial=0.0)),
        rows_not_finite=int(not_finite.any(axis=1).sum()),
        bytes_read=passes.bytes_read,
        alpha=claim.made.alpha,
        beta=claim.made.beta,
        formula=claim.formula,
    )


class _Passes:
    """The passes over the operands of a claim, one over each, within a memory limit."""

    def __init__(self, claim: Claim, rounds: int, limit: int, progress: Progress | None):
        """Raises BudgetError where the limit is too small for one of them."""
        (m, n, k), wide = claim.shape, claim.wide.itemsize
        vectors = (m * (6 if claim.before is None else 9) + n * 2 + k * 4) * rounds * wide
        vectors += 8 * (2 * m + 4 * n + 3 * k)
        # A piece, twice in the wide type: itself and its squares.
        needs = Needs(fixed=vectors, element=2 * 16)
        self._operands, self._pieces, refusals = claim.operands, dict[str, Pieces](), Refusals()
        for name, (opened, _) in self._operands.items():
            with refusals.noted():
                self._pieces[name] = Pieces(opened, limit, "check", needs)
        refusals.end()
        self._sizes = {
            name: opened.matrix.rows * opened.matrix.cols * opened.matrix.itemsize
            for name, (opened, _) in self._operands.items()
        }
        self._done, self._whole, self._progress = 0, sum(self._sizes.values()), progress
        self.meter = Meter("verify", nbytes=self._whole)

    @property
    def bytes_read(self) -> int:
        """Bytes that all passes have moved from the stores."""
        return sum(pieces.bytes_read for pieces in self._pieces.values())

    def times(
        self,
        name: str,
        x: Array,
        size: Callable[[Array, slice], Array],
        add_up: Callable[[Array, Array], Array],
        kinds: int = 1,
        columns: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return op(X)·x for the operand X of this name, and what `add_up` makes of the sizes of the rows of
        its pieces. size: returns them, of so many kinds, for magnitudes in some columns of op(X). columns:
        where the norms of the columns of op(X) are added."""
        pieces, (opened, op) = self._pieces[name], self._operands[name]
        conjugate = op == "adjoint" and opened.dtype.kind == "c"
        out, sizes = np.zeros((opened.shape[0], x.shape[1]), x.dtype), np.zeros((opened.shape[0], kinds))
        Found = tuple[slice, slice, Array, Array, Array | None]

        def multiply(values: Array, rows: Range, cols: Range) -> Found:
            wide, place = values.astype(x.dtype), slice(*cols)
            if conjugate:
                wide = wide.conj()
            part, wide = wide @ x[place], np.abs(wide)
            across = None if columns is None else norms(wide.T)
            return slice(*rows), place, part, size(wide, place), across

        def add(found: Found) -> None:
            rows, cols, part, some, across = found
            out[rows] += part
            sizes[rows] = add_up(sizes[rows], some)
            if columns is not None and across is not None:
                columns[cols] = np.hypot(columns[cols], across)

        pieces.each(multiply, add, self._report(name))
        self._done += self._sizes[name]
        return out, sizes

    def again(self, name: str) -> None:
        """Take note that an operand will be read once more."""
        self._whole += self._sizes[name]

    def _report(self, name: str) -> Callable[[float], None]:
        """Return what a pass calls with the fraction that is done."""
        before, size, whole = self._done, self._sizes[name], self._whole

        def report(fraction: float) -> None:
            done = before + round(fraction * size)
            self.meter(done / max(1, whole))
            if self._progress is not None:
                self._progress(done, whole)

        return report


@dataclass(frozen=True)
class _Sums:
    """What is compared, with m rows and a column for each round, and what bounds its errors."""

    wanted: Array
    """α·op(A)·(op(B)·x) + β·(old C·x)."""
    found: Array
    """C·x."""
    sizes: Array
    """Σ_k |a_ik|·‖b_k‖ for each row of op(A), with rows b_k of op(B)·diag(|x|); 0 where α is 0."""
    largest: Array
    """The same with rows of op(B): no partial sum of an element of op(A)·op(B) is larger."""
    kept: Array
    """|β|·‖c_i‖ for each row of the old C."""
    stored: Array
    """Norms of the rows of C·diag(|x|)."""
    weights: float
    """The norm of x, the same in each round; √n where its elements are signs."""


def _sums(claim: Claim, passes: _Passes, x: Array) -> _Sums:
    """Read each operand, and multiply with the random signs x (n × rounds)."""
    (m, n, _), made = claim.shape, claim.made
    wanted, kept = np.zeros((m, x.shape[1]), x.dtype), np.zeros((m, 1))
    sizes, weights = np.zeros((m, 1)), None

    def weighted(values: Array, cols: slice) -> Array:
        return norms(values if weights is None else values * weights[cols])[:, None]

    if made.alpha != 0:
        columns = np.zeros(n) if made.beta == 0 else None
        y, of_b = passes.times("b", x, weighted, np.hypot, columns=columns)
        weights = None if columns is None else _alike(columns)
        if weights is not None:
            x = x * weights[:, None]
            passes.again("b")
            y, alike = passes.times("b", x, weighted, np.hypot)
            of_b = np.hstack([alike, of_b])
        z, sizes = passes.times("a", y, lambda values, cols: values @ of_b[cols], np.add, of_b.shape[1])
        wanted += x.dtype.type(made.alpha) * z
    found, stored = passes.times("c", x, weighted, np.hypot)
    if claim.before is not None:
        v, old_rows = passes.times("old", x, weighted, np.hypot)
        wanted += x.dtype.type(made.beta) * v
        kept += abs(made.beta) * old_rows
    norm = n**0.5 if weights is None else float(np.linalg.norm(weights))
    return _Sums(wanted, found, sizes[:, :1], sizes[:, -1:], kept, stored, norm)


def _alike(columns: Array) -> Array | None:
    """Return the powers of two by which columns of these norms get norms of about 1; None where they are
    alike, or a norm is not finite."""
    exponents, some = np.frexp(columns)[1], columns > 0
    if not (np.isfinite(columns).all() and some.any() and np.ptp(exponents[some]) > ALIKE):
        return None
    return np.where(some, np.ldexp(1.0, -np.clip(exponents, -1000, 1000)), 1.0)


def _tolerance(claim: Claim, sums: _Sums) -> tuple[Array, Any]:
    """Return the tolerance of each row, and whether its sums may overflow on their way to C or in it."""
    (_, n, k), alpha, stored = claim.shape, abs(claim.made.alpha), claim.product.dtype
    rounding = _rounding(claim)
    scale, largest = (alpha * x if alpha else x for x in (sums.sizes, sums.largest))
    tolerance = rounding.tolerance(scale, k, n, sums.kept, alpha, sums.weights)
    if stored.kind not in "fc":
        return tolerance, False
    tolerance += HOEFFDING * roundoff(stored, stored=True) * sums.stored
    tolerance += HOEFFDING * sums.weights * least(stored)
    # Sums may be too large for their type before α makes them smaller.
    held = (sums.largest < rounding.largest) & (largest + sums.kept < float(np.finfo(stored).max))
    return tolerance, ~held


def _rounding(claim: Claim) -> Rounding:
    """Return how the sums of products were rounded: as in the coarser type of A and B. Sums of integers are
    exact where C holds integers, too."""
    made, product, types = claim.made, claim.product, [claim.left.dtype, claim.right.dtype]
    coarse = max(types, key=roundoff)
    if roundoff(coarse) == 0:
        if product.dtype.kind in "iu":
            return Rounding(0.0)
        coarse = np.result_type(*types, product.dtype, np.float32)
    if coarse == np.float16:
        coarse = np.dtype(np.float32)
    single = np.finfo(coarse).dtype == np.float32
    tf32 = single and (made.precision == "medium" or made.kernel.removeprefix("mma-") == "tf32")
    return Rounding.of(coarse, TF32 if tf32 else 0.0)


def _json(value: complex) -> float | str:
    """Return a number for JSON, which has no complex numbers: these become text."""
    return str(complex(value)) if complex(value).imag else float(complex(value).real)
