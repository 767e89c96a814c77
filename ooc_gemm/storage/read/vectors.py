"""Inputs of one dimension, which are opened as matrices of one column."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import zarr

from ...planning.schedule import cut
from ...support.buffers import page_aligned
from ...support.errors import InputError
from ...support.memory import memory_limit_of
from ..format import limits
from ..format.bounded import bounded
from . import other_files
from .inputs import open_held, open_input
from .metadata import array_at, explained, open_array
from .npy import Npy
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


def read_vector(spec: str | os.PathLike[str], name: str) -> Array:
    """A stored array of one dimension, as float64 in memory. Raises InputError, and StoreError where a chunk
    cannot be read."""
    opened, flat = open_vector(spec, name)
    if not flat or opened.dtype.kind == "c":
        raise InputError(f"{name} is {opened.shape} {opened.dtype}; give real numbers in one dimension")
    count, most = opened.shape[0], memory_limit_of(None)
    if count * 8 > most:
        raise InputError(f"{name} holds {count} numbers, more than fit in memory; give fewer")
    found, s = np.empty(count), opened.matrix
    (slot,) = page_aligned(1, s.chunk_bytes)
    for piece in cut("", s, (0, count), (0, 1), s.chunk_bytes):
        found[slice(*piece.rows)] = opened.source.read(piece, slot)[0][:, 0]
    return found


def open_vector(spec: Any, name: str, sizes: bool = True) -> tuple[Opened, bool]:
    """Open an input that may have one dimension; whether it has. sizes: as of `open_zarr`. Raises
    InputError, as `open_input`."""
    array, file = spec, None
    if isinstance(spec, str | os.PathLike):
        with explained(name):
            file = other_files.open_file(spec, name)
        if isinstance(file, Npy) and len(file.shape) == 1:
            return open_held(replace(file, shape=(*file.shape, 1), fortran=False), name), True
        array = open_array(spec, name, flat=True) if file is None else file
    if len(getattr(array, "shape", ())) != 1:
        return open_input(array if file is None else spec, name, sizes), False
    if isinstance(array, np.ndarray):
        return open_input(array.reshape(-1, 1), name), True
    if isinstance(array, zarr.Array):
        limits.check_matrix(name, (*array.shape, 1), array.dtype)
        if array.chunks[0] < 1 <= array.shape[0]:
            raise InputError(f"{name}: chunks of shape {array.chunks} cannot be right; repair its metadata")
        with explained(name):
            array = array_at(bounded(array.metadata)[0], array.store_path)
    return open_input(_Column(array), name), True
