"""A matrix with names of its rows and columns: an array in a Zarr group, with coordinates as xarray has them.

k.zarr/stat_genomic_relationship    dimensions samples_0 × samples_1
k.zarr/samples_0, k.zarr/samples_1  the names
"""

import os
from typing import Any

import numpy as np
import zarr
from zarr.storage import StorePath

from ...support.errors import InputError, StoreError, remedy
from ..format import documents
from ..read.addresses import describe, local_path
from ..read.metadata import explained, look_at
from ..read.texts import read_texts
from .reopen import writable_place

DIMENSIONS = ("samples_0", "samples_1")
"""The names of the dimensions of a matrix of samples, as sgkit has them."""


def inside(group: str | os.PathLike[str], array: str, names: list[str]) -> str:
    """Return the path or URL of an array in a group that will have these names. Raises InputError where
    something else is there, or a group of version 2 or of other samples."""
    place, name = local_path(group), describe(group)
    with explained(name, remote=place is None):
        if place is None or os.path.exists(place):
            at, key, described = look_at(group, name)
            if documents.kind(key, described) == "array":
                raise InputError(
                    f"{name} is an array, and a matrix with names of samples goes into a group; choose "
                    "another place"
                )
            if key and key != "zarr.json":
                raise InputError(f"{name} is a group of Zarr version 2; choose another place")
            if key and not _has(at, names, name):
                raise InputError(f"{name} is a group with other samples; choose another place")
    return f"{os.fspath(group).rstrip('/')}/{array}"


def _has(at: StorePath, names: list[str], name: str) -> bool:
    """Whether a group has these names, or none."""
    for dimension in DIMENSIONS:
        _, key, described = look_at(at / dimension, name)
        if key and described.get("shape") != [len(names)]:
            return False
        if key and read_texts(at / dimension, f"{name}/{dimension}", len(names)) != names:
            return False
    return True


def write_names(group: str | os.PathLike[str], names: list[str]) -> None:
    """Write the names of samples beside a matrix that is finished, and make the folder a group where it is
    none. Raises StoreError."""
    name, values = describe(group), np.array(names, np.dtypes.StringDType())
    try:
        with explained(name, remote=local_path(group) is None):
            at = writable_place(group)
            there: Any = zarr.open_group(at, mode="a", zarr_format=3)
            for dimension in DIMENSIONS:
                if look_at(at / dimension, name)[1]:
                    continue
                options: Any = {"dimension_names": (dimension,), "compressors": None}
                size = max(1, len(names))
                array = there.create_array(
                    dimension, shape=values.shape, dtype=str, chunks=(size,), **options
                )
                array[...] = values
            zarr.consolidate_metadata(at.store, path=at.path, zarr_format=3)
    except (InputError, OSError) as error:
        raise StoreError(
            f"the names of samples cannot be written to {name} ({error}); "
            f"{remedy(error, 'check its disk')}, and run again with resume=True"
        ) from error
