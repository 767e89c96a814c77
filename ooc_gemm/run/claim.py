"""What `verify` checks: a claim that C = α·op(A)·op(B) + β·(old C), with its operands opened."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..storage.read.source import Opened
from ..storage.write import recorded
from ..support.errors import InputError
from .operands import open_operand
from .scalars import scalar

SIGNS = {"none": "", "transpose": "ᵀ", "adjoint": "ᴴ"}
Flags = tuple[bool | None, bool | None]
"""Whether an operand is transposed, and whether its adjoint is taken; None where that is not given."""


@dataclass(frozen=True)
class Claim:
    """The claim that a stored C is a product, and the operands of the product."""

    made: recorded.Recorded
    """α, β, op() and the precision of the run that made C."""
    left: Opened
    """A, with op()."""
    right: Opened
    """B, with op()."""
    product: Opened
    """C, as it is stored."""
    before: Opened | None
    """The old C; None where β is 0."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The extents (m, n, k) of the product."""
        return *self.product.shape, self.left.shape[1]

    @property
    def formula(self) -> str:
        """What C should be, in the form `2·Aᵀ·B + 0.5·old C`."""
        return _formula(self.made)

    @property
    def operands(self) -> dict[str, tuple[Opened, str]]:
        """The arrays that are read, with their op(), in the order in which they are read. Where α is 0, A and
        B are not: 0·NaN would be NaN."""
        found = {"b": (self.right, self.made.op_b), "a": (self.left, self.made.op_a)}
        found = found if self.made.alpha != 0 else {}
        found["c"] = (self.product, "none")
        return found | ({} if self.before is None else {"old": (self.before, "none")})

    @property
    def wide(self) -> np.dtype[Any]:
        """The type in which the check adds up: float64, or complex128 where a complex number takes part."""
        numbers = [np.min_scalar_type(value) for value in (self.made.alpha, self.made.beta)]
        types = [*(opened.dtype for opened, _ in self.operands.values()), *numbers]
        return np.dtype(np.complex128 if any(one.kind == "c" for one in types) else np.float64)


def open_claim(
    a: Any,
    b: Any,
    c: Any,
    old: Any,
    alpha: complex | None,
    beta: complex | None,
    flags_a: Flags,
    flags_b: Flags,
) -> Claim:
    """Open the operands of a claim, and check that they fit together.

    a, b, c, old: as of `verify`. alpha, beta, flags_a, flags_b: what is given; None where C's attributes say
    it. Raises InputError.
    """
    left, right, product = (open_operand(x, name) for x, name in ((a, "A"), (b, "B"), (c, "C")))
    found = recorded.read(product.attributes)
    if found.changed:
        raise InputError(
            f"{product.name} is not a plain product: its operands were centred, scaled or weighted, or its "
            "elements changed; it can only be checked by the run that makes it, with verify=True"
        )
    made = _asked(found, alpha, beta, flags_a, flags_b)
    left, right = (x.transpose() if op != "none" else x for x, op in ((left, made.op_a), (right, made.op_b)))
    if made.beta == 0 and old is not None:
        raise InputError("the old C does not count where beta is 0; give beta, or leave out old")
    if made.beta != 0 and old is None:
        said = f"{product.name} was made with beta = {_text(made.beta)} of a C that it has replaced"
        said = f"{said}, and" if made.beta == found.beta else f"if {said}, it"
        raise InputError(
            f"{said} cannot be checked without that; give that C as old='PATH', or beta=0 to check a product "
            "alone"
        )
    before = None if made.beta == 0 else open_operand(old, "the old C")
    claim = Claim(made, left, right, product, before)
    _check_shapes(claim)
    return claim


def _check_shapes(claim: Claim) -> None:
    """Raise InputError where the operands do not fit together."""
    (m, k), (k_b, n) = claim.left.shape, claim.right.shape
    results = [x for x in (claim.product, claim.before) if x is not None]
    if k != k_b or any(x.shape != (m, n) for x in results):
        shapes = [f"op({claim.left.name}) {m}×{k}", f"op({claim.right.name}) {k_b}×{n}"]
        shapes += [f"{x.name} {x.shape[0]}×{x.shape[1]}" for x in results]
        raise InputError(
            f"the shapes do not fit in C = {claim.formula}: {', '.join(shapes)}; "
            "check the arrays and their transposition"
        )


def _asked(
    made: recorded.Recorded, alpha: complex | None, beta: complex | None, flags_a: Flags, flags_b: Flags
) -> recorded.Recorded:
    """Return what is recorded, with what is given in its place. Raises InputError."""
    alpha, beta = scalar("alpha", alpha), scalar("beta", beta)
    return replace(
        made,
        alpha=made.alpha if alpha is None else alpha,
        beta=made.beta if beta is None else beta,
        op_a=_operation(flags_a, made.op_a),
        op_b=_operation(flags_b, made.op_b),
    )


def _operation(flags: Flags, recorded: str) -> str:
    """Return op() of an operand: as given, otherwise as recorded. Raises InputError."""
    transpose, adjoint = flags
    if transpose and adjoint:
        raise InputError("an operand is either transposed or its adjoint taken; give one of the two")
    if transpose is None and adjoint is None:
        return recorded
    return "transpose" if transpose else "adjoint" if adjoint else "none"


def _formula(made: recorded.Recorded) -> str:
    """Return what C should be, in the form `2·Aᵀ·B + 0.5·old C`."""
    signs = SIGNS[made.op_a], SIGNS[made.op_b]
    product = "" if made.alpha == 1 else f"{_text(made.alpha)}·"
    product += f"A{signs[0]}·B{signs[1]}"
    return product if made.beta == 0 else f"{product} + {_text(made.beta)}·old C"


def _text(value: complex) -> str:
    """Return a number as text, without an imaginary part of 0."""
    return f"{value:g}" if complex(value).imag else f"{complex(value).real:g}"
