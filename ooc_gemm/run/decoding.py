"""Decoding by the CF conventions, as a part of a transform.

A stored element x stands for f·x + o. Where that is centred by c and divided by s,

    (f·x + o − c)/s  =  (x − (c − o)/f) / (s/f)

so what is asked of decoded elements is a transform of stored ones with other numbers. Means and deviations
that a pass over the array finds are those of stored elements to begin with: o then cancels exactly.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..storage.format.conventions import Decoding
from ..storage.format.conventions import decoding as decoding_of
from ..storage.read.source import Opened
from ..support.errors import InputError
from .request import Lines, Operand, numbers

PLAIN = Decoding()
"""Of elements that are stored as they are."""


def decoded(operand: Operand, opened: Opened) -> tuple[Operand, Decoding]:
    """What happens to stored elements of an operand that is to be decoded, and how they are decoded. opened:
    the array, with op(). Raises InputError where its attributes cannot be followed."""
    found = decoding_of(opened.name, opened.dtype, opened.undecoded, opened.packing)
    if operand.missing is not None and found.missing is not None:
        raise InputError(
            f"{opened.name} has {found.missing:g} for missing elements in its attributes, which decode_cf "
            "follows; leave out missing"
        )
    missing = operand.missing if found.missing is None else _as_stored(found.missing, opened.dtype)
    operand = replace(operand, missing=missing, decode_cf=False)
    return replace(
        operand,
        center=_center(operand.center, found, opened),
        scale=_scale(operand.scale, found, opened),
    ), found


def _as_stored(missing: float, dtype: np.dtype[Any]) -> float:
    """The number in an attribute, which stands for an element of the array even where its type has to round
    it."""
    if dtype.kind != "f":
        return missing
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(dtype.type(missing))
    return rounded if rounded and np.isfinite(rounded) else missing


def _center(lines: Lines | None, found: Decoding, opened: Opened) -> Lines | None:
    """What is subtracted from stored elements."""
    if isinstance(lines, str) or (lines is None and found.offset == 0):
        return lines
    if lines is None:
        return "columns", np.broadcast_to(-found.offset / found.factor, _columns(opened))
    return lines[0], (numbers(lines[1], "center") - found.offset) / found.factor


def _scale(lines: Lines | None, found: Decoding, opened: Opened) -> Lines | None:
    """What stored elements are then divided by."""
    if isinstance(lines, str) or (lines is None and found.factor == 1):
        return lines
    if lines is None:
        return "columns", np.broadcast_to(1 / found.factor, _columns(opened))
    return lines[0], numbers(lines[1], "scale") / found.factor


def _columns(opened: Opened) -> tuple[int]:
    """Shape of a vector with a number for each column of the array as its user sees it."""
    s = opened.matrix
    return (s.rows if s.fortran else s.cols,)
