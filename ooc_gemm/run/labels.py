"""Labels of results: what an xarray.DataArray says of its axes goes on to what is computed of it."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from ..support.errors import InputError
from ..support.imported import imported
from .request import Request
from .result import Result


def product_names(row: str | None, col: str | None) -> tuple[str, str] | None:
    """Names of the dimensions of a product, of the names of its operands' dimensions; None where neither has
    one. What has no name is called as xarray calls it, and two equal names end in _0 and _1."""
    if row is None and col is None:
        return None
    row, col = row or "dim_0", col or "dim_1"
    return (f"{row}_0", f"{col}_1") if row == col else (row, col)


def check_aligned(request: Request) -> None:
    """Raise InputError where two DataArrays have different coordinates along k, the inner dimension of their
    product."""
    a, b = request.a.array, request.b.array
    if not (_is_labelled(a) and _is_labelled(b)) or a.ndim != 2 or b.ndim != 2:
        return
    along = a.dims[1 - _axis(request, "a")], b.dims[1 - _axis(request, "b")]
    if along[0] != along[1] or not all(along[0] in x.indexes for x in (a, b)):
        return
    left, right = (x.indexes[along[0]] for x in (a, b))
    if len(left) == len(right) and not left.equals(right):
        raise InputError(
            f"the coordinates of A and B along {along[0]!r} differ, and elements are multiplied in the order "
            "in which they are stored; align both with xarray.align"
        )


def labelled_product(request: Request, result: Result) -> Result:
    """The result, with the labels of its operands if one of them is a DataArray and C is in memory."""
    operands = request.a.array, request.b.array
    if not (isinstance(result.array, np.ndarray) and any(map(_is_labelled, operands))):
        return result
    axes = _axis(request, "a"), _axis(request, "b")
    old = [str(x.dims[axis]) if _is_labelled(x) else None for x, axis in zip(operands, axes, strict=True)]
    dims = product_names(*old) or ("dim_0", "dim_1")
    coords: dict[str, Any] = {}
    for x, axis, was, dim in zip(operands, axes, old, dims, strict=True):
        if was is not None:
            coords |= _coordinates(x, axis, dim, dim.removeprefix(was))
    return replace(result, array=sys.modules["xarray"].DataArray(result.array, dims=dims, coords=coords))


def labelled(x: Any, array: Any, axis: int, name: str) -> Any:
    """The array with the labels of an axis of `x`, if that is a DataArray; otherwise the array itself.

    x: the input. array: an array each of whose axes is that axis of `x`; one that is stored stays as it
    is. axis: of the variables. name: of the new DataArray. Where there are two axes, their names end in _0
    and _1.
    """
    if not (_is_labelled(x) and isinstance(array, np.ndarray)):
        return array
    dim, coords = x.dims[axis], dict[str, Any]()
    ends = ("",) if array.ndim == 1 else ("_0", "_1")
    for end in ends:
        coords |= _coordinates(x, axis, f"{dim}{end}", end)
    dims = [f"{dim}{end}" for end in ends]
    return sys.modules["xarray"].DataArray(array, dims=dims, coords=coords, name=name)


def own_coordinate(x: Any, dimension: str) -> Any:
    """What holds the coordinate of an input's dimension: of a DataArray, a Dataset with that alone; otherwise
    the input itself."""
    if not _is_labelled(x):
        return x
    found = x.coords.get(dimension)
    coords = {} if found is None or found.dims != (dimension,) else {dimension: found.variable}
    return sys.modules["xarray"].Dataset(coords=coords)


def _axis(request: Request, name: str) -> int:
    """The axis of A, or of B, that C has."""
    turned = getattr(request, name).op != "none"
    return int(turned if name == "a" else not turned)


def _coordinates(x: Any, axis: int, dim: str, end: str) -> dict[str, Any]:
    """The coordinates along an axis of a DataArray, for a dimension of the new name; their own names end in
    `end`."""
    along = ((key, values) for key, values in x.coords.items() if values.dims == (x.dims[axis],))
    return {f"{key}{end}": (dim, values.values, values.attrs) for key, values in along}


def _is_labelled(x: Any) -> bool:
    """Whether an input is an xarray.DataArray."""
    return isinstance(x, imported("xarray", "DataArray"))
