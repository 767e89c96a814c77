"""Checks α and β, as users give them."""

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
            except OverflowError as error:
                raise InputError(f"{name} is {value}; it must be finite in double precision") from error
            except (TypeError, ValueError):
                continue
            if not isinstance(found, int) and not cmath.isfinite(found):
                raise InputError(f"{name} is {value}; it must be finite")
            return found
    raise InputError(f"{name} is {value!r}, which is not a number; give one such as 2, 0.5 or 1+2j")
