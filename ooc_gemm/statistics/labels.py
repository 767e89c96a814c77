"""Labels of results: what an xarray.DataArray says of its variables goes on to what is computed of it."""

import sys
from typing import Any


def labelled(x: Any, array: Any, axis: int, name: str) -> Any:
    """The array with the labels of an axis of `x`, if that is a DataArray; otherwise the array itself.

    x: the input. array: a NumPy array each of whose axes is that axis of `x`; None where it was stored. axis:
    of the variables. name: of the new DataArray. Where there are two axes, their names end in _0 and _1.
    """
    xarray: Any = sys.modules.get("xarray")
    if xarray is None or array is None or not isinstance(x, xarray.DataArray):
        return array
    dim = x.dims[axis]
    ends = ("",) if array.ndim == 1 else ("_0", "_1")
    along = {key: values for key, values in x.coords.items() if values.dims == (dim,)}
    coords = {f"{key}{end}": (f"{dim}{end}", values.values) for key, values in along.items() for end in ends}
    return xarray.DataArray(array, dims=[f"{dim}{end}" for end in ends], coords=coords, name=name)
