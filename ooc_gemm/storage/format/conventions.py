"""What an input says of its values that the engine does not apply: scaling, missing values, masks.

xarray, netCDF and GDAL store packed numbers, and say in the attributes how to decode them. The engine
multiplies what is stored. It says so, lest anybody takes that for a product of the decoded values.
"""

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
    """How `spec` would have to be decoded, in words; empty where it holds plain values. A NaN that stands for
    missing values is a plain value: a product has NaN there either way."""
    masked = sys.modules.get("numpy.ma")  # where nobody has imported it, there is no masked array
    if masked is not None and isinstance(spec, masked.MaskedArray):
        return "a mask" if masked.is_masked(spec) else ""
    if masked is not None and isinstance(getattr(spec, "_meta", None), masked.MaskedArray):  # dask's
        return "a mask"
    return " and ".join(_found(attributes))


def said(name: str, undecoded: str) -> str:
    """What the user is told of an input, by its name and what `ignored` has found; empty where there is
    nothing to tell."""
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
    """Also as JSON has it: `NaN`, and in version 3 xarray's base64 of a float64."""
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
