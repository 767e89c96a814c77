"""Finds out how the attributes of an input say that its values are to be decoded: scaling, missing values,
masks. xarray, netCDF and GDAL store packed numbers and describe their meaning in attributes. The engine
multiplies the stored numbers, and tells the user so."""

import base64
import binascii
import math
import struct
import sys
from collections.abc import Container
from typing import Any

import numpy as np

SCALING = ("scale_factor", "add_offset")
MISSING = ("_FillValue", "missing_value")


def ignored(spec: Any, attributes: Container[str]) -> str:
    """Return in words how the values of `spec` would have to be decoded; empty where it holds plain values. A
    NaN that stands for a missing value is a plain value, because a product is NaN there either way."""
    masked = sys.modules.get("numpy.ma")  # where nobody has imported it, there is no masked array
    if masked is not None and isinstance(spec, masked.MaskedArray):
        return "a mask" if masked.is_masked(spec) else ""
    if masked is not None and isinstance(getattr(spec, "_meta", None), masked.MaskedArray):  # dask's
        return "a mask"
    return " and ".join(_found(attributes))


def said(name: str, undecoded: str) -> str:
    """Return what the user is told of an input, from its name and the result of `ignored`; empty where there
    is nothing to tell."""
    if undecoded == "a mask":
        return f"{name} has a mask, which is not applied; the values under it are multiplied like others"
    if not undecoded:
        return ""
    return (
        f"{name} has {undecoded} in its attributes, which are not applied; its values are multiplied as they "
        "are stored"
    )


def _found(attributes: Any) -> list[str]:
    found = [name for name in SCALING if name in attributes]
    return found + [name for name in MISSING if name in attributes and not _is_nan(attributes[name])]


def _is_nan(value: Any) -> bool:
    """Whether a value is NaN, also as JSON spells it: `NaN`, or in version 3 xarray's base64 of a float64."""
    if isinstance(value, str):
        if value == "NaN":
            return True
        try:
            (value,) = struct.unpack("<d", base64.b64decode(value, validate=True))
        except (binascii.Error, ValueError, struct.error):
            return False
    try:
        return math.isnan(np.asarray(value).item())
    except (TypeError, ValueError):
        return False
