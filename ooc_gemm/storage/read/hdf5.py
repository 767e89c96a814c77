"""Datasets in HDF5 and NetCDF-4 files, opened with h5py. Needs the extra `hdf5`."""

import contextlib
from pathlib import Path
from typing import Any

from ...support.errors import InputError
from ...support.imported import imported
from ..format import documents
from .metadata import MOST_LOOKED_AT, advice

MAGIC = b"\x89HDF\r\n\x1a\n"


def open_dataset(path: Path, inside: str, name: str) -> Any:
    """Open the dataset at a path inside of a file, for reading. Raises InputError."""
    try:
        import h5py
    except ImportError as error:
        raise InputError(
            f"{name} is in an HDF5 file, which is read with h5py; install that with "
            "pip install 'ooc-gemm[hdf5]'"
        ) from error
    try:
        file = h5py.File(path, "r")
        found = file[inside] if inside.strip("/") else file
    except KeyError as error:
        with file:
            raise InputError(f"{path} holds no {documents.short(inside)}; {_advice(file, path)}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be opened as HDF5 ({documents.short(error)}); copy or write it again"
        ) from error
    if not isinstance(found, h5py.Dataset):
        with file:
            raise InputError(f"{name} is an HDF5 group, not a dataset; {_advice(file, path)}")
    return found


def dimensions(dataset: Any) -> list[str | None]:
    """The names of a dataset's dimensions: their labels, else those of their scales, as NetCDF-4 has them.
    Other arrays have none."""
    names: list[str | None] = [None] * len(dataset.shape)
    if not isinstance(dataset, imported("h5py", "Dataset")):
        return names
    with contextlib.suppress(Exception):  # names are no reason to refuse an array
        for number, dim in enumerate(dataset.dims):
            scale = dim[0].name.rpartition("/")[2] if len(dim) else None
            names[number] = dim.label or scale
    return names


def _advice(file: Any, path: Path) -> str:
    """Return the advice to name one of the datasets of a file, which it lists."""
    found = dict[str, Any]()

    def note(key: str, node: Any) -> bool | None:
        if getattr(node, "shape", None) is not None:
            found[key] = {"shape": list(node.shape)}
        return True if len(found) >= MOST_LOOKED_AT else None  # which ends the visit

    with contextlib.suppress(Exception):
        file.visititems(note)
    if not found:
        return "name one of its datasets, such as FILE::/x"
    return advice(found, f"{path.name}::/", "its datasets")
