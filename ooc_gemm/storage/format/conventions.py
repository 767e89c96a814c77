"""Finds out how the attributes of an input say that its values are to be decoded: scaling, missing values,
masks. xarray, netCDF and GDAL store packed numbers and describe their meaning in attributes. The engine
multiplies the stored numbers, and tells the user so, unless it is asked to decode them."""

import base64
import binascii
import math
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...support.errors import InputError
from ...support.imported import imported

SCALING = ("scale_factor", "add_offset")
MISSING = ("_FillValue", "missing_value")
MASK = "a mask"


@dataclass(frozen=True)
class Decoding:
    """What the CF conventions make of a stored number: number·factor + offset, or nothing where it is
    `missing`."""

    factor: float = 1.0
    offset: float = 0.0
    missing: float | None = None
    """The stored number that stands for a missing element, or NaN; None where none does."""


def decoding(name: str, dtype: np.dtype[Any], undecoded: str, attributes: Mapping[str, Any]) -> Decoding:
    """How an array is decoded. name, dtype: of the array. undecoded: what `ignored` says of it. Raises
    InputError where a sum and a product do not express it."""
    if undecoded == MASK:
        raise InputError(f"{name} has a mask, which is not decoded; give the array that filled() returns")
    unsigned = attributes.get("_Unsigned")
    if unsigned is not None and (str(unsigned).lower() == "true") != (dtype.kind == "u"):
        raise InputError(
            f"{name} holds {dtype} that its attribute _Unsigned declares to be another type; convert it first"
        )
    factor, offset = (
        1.0 if key not in attributes and key == "scale_factor" else _number(name, key, attributes.get(key, 0))
        for key in SCALING
    )
    if not (math.isfinite(factor) and math.isfinite(offset) and factor):
        raise InputError(
            f"{name} has scale_factor {factor:g} and add_offset {offset:g} in its attributes, which decode "
            "nothing; repair them"
        )
    given = [_number(name, key, attributes[key]) for key in MISSING if key in attributes]
    if len(given) == 2 and given[0] != given[1] and not all(map(math.isnan, given)):
        raise InputError(
            f"{name} has the _FillValue {given[0]:g} and the missing_value {given[1]:g} in its attributes, "
            "and only one number can stand for missing elements; replace one by the other"
        )
    return Decoding(float(factor), float(offset), given[0] if given else None)


def ignored(spec: Any, attributes: Container[str]) -> str:
    """Return in words how the values of `spec` would have to be decoded; empty where it holds plain values. A
    NaN that stands for a missing value is a plain value, because a product is NaN there either way."""
    masked = imported("numpy.ma", "MaskedArray")
    if isinstance(spec, masked):
        return MASK if np.ma.is_masked(spec) else ""
    if isinstance(getattr(spec, "_meta", None), masked):  # dask's
        return MASK
    return " and ".join(_found(attributes))


def said(name: str, undecoded: str) -> str:
    """Return what the user is told of an input, from its name and the result of `ignored`; empty where there
    is nothing to tell."""
    if undecoded == MASK:
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
    """Whether a value is NaN."""
    try:
        return math.isnan(_value(value))
    except (TypeError, ValueError):
        return False


def _number(name: str, key: str, value: Any) -> float:
    """The number in an attribute; an integer stays one. Raises InputError."""
    try:
        return _value(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} has an attribute {key} that is not one number; repair it") from error


def _value(value: Any) -> float:
    """The number that a value of an attribute stands for, also as JSON spells it: `NaN`, or in version 3
    xarray's base64 of a float64. Raises TypeError and ValueError."""
    if isinstance(value, str):
        if value in ("NaN", "Infinity", "-Infinity"):
            return float(value)
        try:
            (number,) = struct.unpack("<d", base64.b64decode(value, validate=True))
        except (binascii.Error, struct.error) as error:
            raise ValueError("neither a number nor one in base64") from error
        return float(number)
    number = np.asarray(value).item()
    if isinstance(number, bool | str | bytes | complex):
        raise TypeError("not a real number")
    return int(number) if isinstance(number, int) else float(number)
