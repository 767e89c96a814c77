"""Reads what C's attributes say about the run that made it. A finished C carries, under `ooc-gemm`, the
version, the inputs and the options of its run. They are untrusted input: impossible values count as
missing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .provenance import ATTRIBUTE

OPERATIONS = ("none", "transpose", "adjoint")
PRODUCTS = ("multiply", "gram", None)
ELEMENTS = "elements of "
"""Begins the names of options that say what happened to elements of an operand."""


@dataclass(frozen=True)
class Recorded:
    """C = alpha·op(A)·op(B) + beta·(old C), as the attributes say; the plain product where they say
    nothing."""

    alpha: complex = 1.0
    beta: complex = 0.0
    op_a: str = "none"
    """What was done to A: `none`, `transpose` or `adjoint`."""
    op_b: str = "none"
    precision: str = "highest"
    kernel: str = "auto"
    changed: bool = False
    """Elements of A or B were centred, scaled or weighted, or those of C changed, before they were stored."""


def read(attributes: Mapping[str, Any]) -> Recorded:
    """Return what the attributes of an array say about the run that made it."""
    found = attributes.get(ATTRIBUTE)
    options = found.get("options") if isinstance(found, dict) else None
    if not isinstance(options, dict):
        return Recorded()

    def operation(name: str) -> str:
        said = options.get(name)
        return said if said in OPERATIONS else "none"

    return Recorded(
        _number(options.get("alpha"), 1.0),
        _number(options.get("beta"), 0.0),
        operation("op(A)"),
        operation("op(B)"),
        str(options.get("precision")),
        str(options.get("kernel")),
        options.get("product") not in PRODUCTS or any(key.startswith(ELEMENTS) for key in options),
    )


def _number(text: Any, otherwise: float) -> complex:
    try:
        value = complex(text)
    except (TypeError, ValueError):
        return otherwise
    if not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return otherwise
    return value if value.imag else value.real
