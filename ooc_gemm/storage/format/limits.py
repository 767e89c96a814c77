"""Which arrays can be matrices: element types, and sizes that metadata may claim."""

from typing import Any

import numpy as np

from ...support.errors import InputError
from .documents import SUPPORTED

MAX_CHUNK_BYTES = 1 << 48
"""Most bytes of a chunk. No file is larger, so metadata that claim more are corrupt."""
MAX_ARRAY_BYTES = 1 << 60
"""Most bytes of an array."""
MAX_CHUNKS = 1 << 22
"""Most chunks of an array that are looked at one by one."""


def matrix_dtype(asked: Any) -> np.dtype[Any]:
    """Return the data type that a user asks for, in native byte order. Raises InputError where it is no type
    of a matrix."""
    try:
        dtype: np.dtype[Any] = np.dtype(asked).newbyteorder("=")
        check_matrix("", (1, 1), dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InputError(f"matrices cannot be of type {asked!r}; choose one of {SUPPORTED}") from error
    return dtype


def check_matrix(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Refuse an array that is not 2-D or whose elements cannot be multiplied. Raises InputError."""
    if len(shape) != 2:
        raise InputError(f"{name} has shape {tuple(shape)}, but a matrix has two dimensions; reshape it")
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = np.dtype(object)
    if known.kind not in "iufc" or known.name in ("float128", "complex256", "longdouble", "clongdouble"):
        raise InputError(
            f"{name} holds {dtype}, which cannot be multiplied; convert it to one of {SUPPORTED}"
        )
