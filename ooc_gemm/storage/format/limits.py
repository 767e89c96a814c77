"""What can be a matrix: element types, and sizes that metadata may claim."""

from typing import Any

import numpy as np

from ...support.errors import InputError
from .documents import SUPPORTED

MAX_CHUNK_BYTES = 1 << 48
"""No file is larger: metadata that says so is corrupt."""
MAX_ARRAY_BYTES = 1 << 60
"""Nor is any array."""
MAX_CHUNKS = 1 << 22
"""Chunks of one array that are looked at one by one."""


def matrix_dtype(asked: Any) -> np.dtype[Any]:
    """The native data type a user asks for. Raises InputError where matrices cannot be of it."""
    try:
        dtype: np.dtype[Any] = np.dtype(asked).newbyteorder("=")
        check_matrix("", (1, 1), dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InputError(f"matrices cannot be of type {asked!r}; choose one of {SUPPORTED}") from error
    return dtype


def check_matrix(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Refuse what is not 2-D or holds what cannot be multiplied. Raises InputError."""
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
