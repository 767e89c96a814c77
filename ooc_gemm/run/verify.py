"""Freivalds' check: is C = α·op(A)·op(B) + β·(the old C)? Each array is read once.

For a vector x of random signs, C·x = α·op(A)·(op(B)·x) + β·(old C·x) costs O(n²) instead of O(n³), and a
wrong C passes a round with probability at most one half (R. Freivalds, IFIP Congress 1977); in practice an
error larger than the tolerance is missed only where its row's errors cancel under random signs.

The tolerance is that of check.py, and what storing C in its type rounds once more: 8·u_C·‖c_i‖, and half of
that type's smallest number for each element. Where elements may be too large for C's type, C may be infinite
or NaN.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.check import HOEFFDING, ROOT_TINY, Rounding, compare, least, roundoff
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.read.source import Opened
from ..storage.write import recorded
from ..support.errors import InputError
from ..support.memory import default_memory_limit, parse_size
from .operands import open_operand
from .stream import Needs, Pieces, Range

Array = npt.NDArray[Any]
TF32 = 2.0**-10
"""Relative error of an element as TF32 takes it."""
SIGNS = {"none": "", "transpose": "ᵀ", "adjoint": "ᴴ"}


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
    """Rows that are rightly NaN or infinite, and not checked further: both sides are, or C's type may be too
    small for them."""
    bytes_read: int
    alpha: complex = 1.0
    beta: complex = 0.0
    formula: str = ""
    """What C was compared with: `2·Aᵀ·B`."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
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
) -> Check:
    """Is C (m×n) = α·op(A) (m×k)·op(B) (k×n) + β·(old C), to rounding?

    Each array is read once. What is not given is what C's attributes record of the run that made it; where
    they record nothing, α = 1, β = 0 and op() changes nothing.

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
    if rounds < 1:
        raise InputError(f"{rounds} rounds check nothing; give 1 or more")
    if seed is not None and seed < 0:
        raise InputError(f"seed {seed} is negative; give 0 or more")
    left, right, product = (open_operand(x, name) for x, name in ((a, "A"), (b, "B"), (c, "C")))
    if recorded.read(product.attributes).changed:
        raise InputError(
            f"{product.name} is not a plain product: its operands were centred, scaled or weighted, or its "
            "elements changed; it can only be checked by the run that makes it, with verify=True"
        )
    made = _asked(
        recorded.read(product.attributes),
        alpha,
        beta,
        (transpose_a, adjoint_a),
        (transpose_b, adjoint_b),
    )
    alpha, beta = made.alpha, made.beta
    left, right = (x.transpose() if op != "none" else x for x, op in ((left, made.op_a), (right, made.op_b)))
    if beta == 0 and old is not None:
        raise InputError("the old C does not count where beta is 0; give beta, or leave out old")
    if beta != 0 and old is None:
        raise InputError(
            f"{product.name} was made with beta = {_text(beta)} of a C that it has replaced, and cannot be "
            "checked without that; give that C as old='PATH', or beta=0 to check a product alone"
        )
    before = None if beta == 0 else open_operand(old, "the old C")
    (m, k), (k_b, n) = left.shape, right.shape
    if k != k_b or any(x.shape != (m, n) for x in (product, before) if x is not None):
        shapes = [f"op({left.name}) {m}×{k}", f"op({right.name}) {k_b}×{n}"]
        shapes += [f"{x.name} {x.shape[0]}×{x.shape[1]}" for x in (product, before) if x is not None]
        raise InputError(
            f"the shapes do not fit in C = {_formula(made)}: {', '.join(shapes)}; "
            "check the arrays and their transposition"
        )
    limit = default_memory_limit() if memory_limit is None else parse_size(memory_limit)
    sources = [(right, made.op_b), (left, made.op_a), (product, "none")]
    sources += [(before, "none")] if before is not None else []
    if alpha == 0:  # A and B are not looked at: 0·NaN would be NaN
        sources = sources[2:]
    numbers = [np.min_scalar_type(value) for value in (alpha, beta)]
    is_complex = "c" in "".join(x.kind for x in (*(source.dtype for source, _ in sources), *numbers))
    wide: Any = np.complex128 if is_complex else np.float64
    vectors = (m * (6 if before is None else 9) + n * 2 + k * 4) * rounds * np.dtype(wide).itemsize
    streams = [_Stream(source, op == "adjoint", limit, vectors) for source, op in sources]
    rest = streams[0 if alpha == 0 else 2 :]
    x = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(n, rounds)).astype(wide)
    with np.errstate(all="ignore"):
        wanted, sums = np.zeros((m, rounds), wide), np.zeros((m, 1))
        if alpha != 0:
            y, b_rows = streams[0].times(x)
            z, a_rows = streams[1].times(y)
            wanted += wide(alpha) * z
            largest = math.sqrt(float(b_rows.sum())) + math.sqrt(k * n) * ROOT_TINY
            sums += (largest * (np.sqrt(a_rows) + math.sqrt(k) * ROOT_TINY))[:, None]
        scale = abs(alpha) * sums if alpha != 0 else sums
        w, c_rows = rest[0].times(x)
        kept = np.zeros((m, 1))
        if before is not None:
            v, old_rows = rest[1].times(x)
            wanted += wide(beta) * v
            kept += (abs(beta) * (np.sqrt(old_rows) + math.sqrt(n) * ROOT_TINY))[:, None]
        rounding, stored = _rounding(left, right, product, made), product.dtype
        tolerance = rounding.tolerance(scale, k, n, kept, abs(alpha))
        too_large: Any = False
        if stored.kind in "fc":
            tolerance += HOEFFDING * roundoff(stored, stored=True) * np.sqrt(c_rows)[:, None]
            tolerance += HOEFFDING * math.sqrt(n) * least(stored)
            # Sums may be too large for their type before α makes them smaller.
            too_large = ~((sums < rounding.largest) & (scale + kept < float(np.finfo(stored).max)))
        bad, ratio = compare(w, wanted, tolerance, too_large)
        not_finite = ~(np.isfinite(w) & np.isfinite(wanted)) & ~bad
    wrong = np.flatnonzero(bad.any(axis=1))
    return Check(
        ok=not wrong.size,
        rounds=rounds,
        rows_wrong=int(wrong.size),
        first_wrong=int(wrong[0]) if wrong.size else None,
        worst=float(ratio.max(where=np.isfinite(ratio), initial=0.0)),
        rows_not_finite=int(not_finite.any(axis=1).sum()),
        bytes_read=sum(stream.bytes_read for stream in streams),
        alpha=alpha,
        beta=beta,
        formula=_formula(made),
    )


Flags = tuple[bool | None, bool | None]
"""Whether an operand is transposed, and whether its adjoint is taken; None: not given."""


def _asked(
    made: recorded.Recorded, alpha: complex | None, beta: complex | None, flags_a: Flags, flags_b: Flags
) -> recorded.Recorded:
    """What is recorded, where nothing else is given. Raises InputError."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is not None and not np.isfinite(value):
            raise InputError(f"{name} is {value}; it must be finite")
    return replace(
        made,
        alpha=made.alpha if alpha is None else alpha,
        beta=made.beta if beta is None else beta,
        op_a=_operation(flags_a, made.op_a),
        op_b=_operation(flags_b, made.op_b),
    )


def _operation(flags: Flags, recorded: str) -> str:
    transpose, adjoint = flags
    if transpose and adjoint:
        raise InputError("an operand is either transposed or its adjoint taken; give one of the two")
    if transpose is None and adjoint is None:
        return recorded
    return "transpose" if transpose else "adjoint" if adjoint else "none"


def _rounding(left: Opened, right: Opened, product: Opened, made: recorded.Recorded) -> Rounding:
    """Of the sums of products: as of the coarser type of the two. Integers are exact, unless C is none."""
    types = [left.dtype, right.dtype]
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


def _formula(made: recorded.Recorded) -> str:
    """`2·Aᵀ·B + 0.5·old C`."""
    signs = SIGNS[made.op_a], SIGNS[made.op_b]
    product = "" if made.alpha == 1 else f"{_text(made.alpha)}·"
    product += f"A{signs[0]}·B{signs[1]}"
    return product if made.beta == 0 else f"{product} + {_text(made.beta)}·old C"


def _text(value: complex) -> str:
    return f"{value:g}" if complex(value).imag else f"{complex(value).real:g}"


def _json(value: complex) -> float | str:
    """A number, or where it is complex its text, for JSON has none."""
    return str(complex(value)) if complex(value).imag else float(complex(value).real)


class _Stream:
    """The pass over one of the matrices."""

    def __init__(self, opened: Opened, conjugate: bool, limit: int, vectors: int):
        """vectors: bytes of all vectors."""
        # A piece, twice in the wide type: itself and its squares.
        self._pieces = Pieces(opened, limit, "check", Needs(fixed=vectors, element=2 * 16))
        self._conjugate = conjugate and opened.dtype.kind == "c"

    @property
    def bytes_read(self) -> int:
        return self._pieces.bytes_read

    def times(self, x: Array) -> tuple[Array, Array]:
        """(op(S)·x, squared norms of op(S)'s rows)."""
        rows = self._pieces.opened.shape[0]
        out, norms = np.zeros((rows, x.shape[1]), x.dtype), np.zeros(rows)

        def multiply(values: Array, rows: Range, cols: Range) -> tuple[slice, Array, Array]:
            wide = values.astype(x.dtype)
            if self._conjugate:
                wide = wide.conj()
            return slice(*rows), wide @ x[slice(*cols)], np.square(np.abs(wide)).sum(axis=1)

        def add(found: tuple[slice, Array, Array]) -> None:
            rows, part, squares = found
            out[rows] += part
            norms[rows] += squares

        self._pieces.each(multiply, add)
        return out, norms
