"""Converts C from the type in which sums are kept to the type in which it is stored, where the device has not
done that."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ...support.errors import RangeError

Array = npt.NDArray[Any]
SLAB = 1 << 16
"""Elements that are converted and compared at a time, to limit the memory that this takes."""


def convert(values: Array, out: Array) -> int:
    """Convert a matrix to the type of `out`, and store it there. Returns how many finite elements became
    infinite because they are too large for that type; a complex element counts where one of its parts is too
    large."""
    with np.errstate(over="ignore"):
        np.copyto(out, values, casting="unsafe")
    if out.dtype.kind not in "fc" or np.can_cast(values.dtype, out.dtype):
        return 0
    found, rows = 0, max(1, SLAB // max(1, out.shape[1]))
    for row in range(0, len(out), rows):
        infinite = np.isinf(out[row : row + rows])
        if infinite.any():
            found += int(np.count_nonzero(infinite & np.isfinite(values[row : row + rows])))
    return found


def said(count: int, name: str, dtype: np.dtype[Any]) -> str:
    """Return a sentence that tells the user how many elements of C became infinite."""
    elements = "1 element is" if count == 1 else f"{count} elements are"
    wider = {"float16": "float32", "float32": "float64", "complex64": "complex128"}[dtype.name]
    return (
        f"{elements} infinite in {name}, although the product is finite there: {dtype} ends at "
        f"{float(np.finfo(dtype).max):.6g}; give out_dtype={wider!r} to keep them"
    )


def check_fits(values: Array, dtype: np.dtype[Any], name: str) -> None:
    """Raise RangeError where an integer does not fit the type."""
    if values.size == 0 or np.can_cast(values.dtype, dtype):
        return
    check_range(int(values.min()), int(values.max()), dtype, name)


def check_range(low: int, high: int, dtype: np.dtype[Any], name: str) -> None:
    """Raise RangeError where one of two integers does not fit the type."""
    info = np.iinfo(dtype)
    if low < int(info.min) or high > int(info.max):
        value = low if low < int(info.min) else high
        raise RangeError(f"{name}: the exact value {value} does not fit {dtype}; give a wider out_dtype")
