"""Inputs of one dimension, which are opened as matrices of one column."""

import os
from typing import Any

import numpy as np
import zarr

from ...support.errors import InputError
from ..format import limits
from ..format.bounded import bounded
from .inputs import open_input
from .metadata import array_at, explained, open_array
from .source import Array, Opened


class _Column:
    """An array of one dimension as a matrix of one column, whose pieces are made when they are asked for."""

    def __init__(self, array: Any):
        self._array, self.dtype, self.shape = array, array.dtype, (int(array.shape[0]), 1)
        chunks = getattr(array, "chunks", None)
        self.chunks = (chunks[0], 1) if chunks else None
        self.attrs = getattr(array, "attrs", {})

    def __getitem__(self, place: tuple[slice, slice]) -> Array:
        part = self._array[place[0]]
        part = part.compute() if hasattr(part, "compute") else part
        return np.asarray(part).reshape(-1, 1)


def open_vector(spec: Any, name: str) -> tuple[Opened, bool]:
    """Open an input that may have one dimension; whether it has. Raises InputError, as `open_input`."""
    array = open_array(spec, name, flat=True) if isinstance(spec, str | os.PathLike) else spec
    if len(getattr(array, "shape", ())) != 1:
        return open_input(array, name), False
    if isinstance(array, np.ndarray):
        return open_input(array.reshape(-1, 1), name), True
    if isinstance(array, zarr.Array):
        limits.check_matrix(name, (*array.shape, 1), array.dtype)
        if array.chunks[0] < 1 <= array.shape[0]:
            raise InputError(f"{name}: chunks of shape {array.chunks} cannot be right; repair its metadata")
        with explained(name):
            array = array_at(bounded(array.metadata)[0], array.store_path)
    return open_input(_Column(array), name), True
