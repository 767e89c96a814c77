"""Checks numbers as users give them: α and β, counts, and real numbers."""

import cmath
import operator
from typing import Any

import numpy as np

from ..support.errors import InputError


def scalar(name: str, value: Any) -> Any:
    """Return α or β as a Python number: an int for an integer of any kind, otherwise a float or a complex
    number. None stays None.

    name: how messages call it. value: any number, also of NumPy's, or an array without dimensions. Raises
    InputError where it is not a number, or not finite.
    """
    if value is None:
        return None
    if not isinstance(value, str | bytes | bytearray) and np.ndim(value) == 0:
        plain = value.item() if isinstance(value, np.ndarray | np.generic) else value
        for convert in (operator.index, float, complex):
            try:
                found = convert(plain)
                float(found.real)
            except OverflowError as error:
                raise InputError(f"{name} is {value}; it must be finite in double precision") from error
            except (TypeError, ValueError):
                continue
            if not isinstance(found, int) and not cmath.isfinite(found):
                raise InputError(f"{name} is {value}; it must be finite")
            return found
    raise InputError(f"{name} is {value!r}, which is not a number; give one such as 2, 0.5 or 1+2j")


def whole(name: str, value: Any, least: int | None = None) -> int:
    """Return an integer of any kind as a Python int. name: how messages call it. Raises InputError where it
    is none, or less than `least`."""
    said = "give an integer" if least is None else f"give an integer of {least} or more"
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        found = operator.index(value)
    except TypeError as error:
        raise InputError(f"{name} is {_shown(value)}; {said}") from error
    if least is not None and found < least:
        raise InputError(f"{name} is {found}; {said}")
    return found


def real(name: str, value: Any) -> float:
    """Return a real number of any kind, which may be NaN, as a float. name: how messages call it. Raises
    InputError where it is none."""
    try:
        if isinstance(value, str | bytes | bytearray) or np.ndim(value):
            raise TypeError
        return float(value.item() if isinstance(value, np.ndarray | np.generic) else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} is {_shown(value)}; give a number, such as 1 or 0.5") from error


def is_one_of(value: Any, words: tuple[str, ...]) -> bool:
    """Whether a value, which may be an array, is one of these words."""
    return isinstance(value, str) and value in words


def choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise InputError where a value is none of the known words. name: what one of them is called."""
    if not is_one_of(value, known):
        raise InputError(f"{_shown(value)} is not a {name}; choose one of {', '.join(known)}")


def _shown(value: Any) -> str:
    """Return what a message says of a value: an array by its shape."""
    shape = getattr(value, "shape", ())
    return f"an array of shape {shape}" if shape else repr(value)
