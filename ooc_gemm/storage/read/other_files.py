"""Files that hold arrays, told apart by their first bytes: NumPy's (.npy), HDF5, NetCDF-4, and zip archives
of Zarr. An array inside of a file is spelled `file.h5::/path/to/dataset`.
"""

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...support.errors import InputError
from ..io import files
from ..io.stamps import Stamps, identity
from . import hdf5, npy, zipped
from .addresses import local_path
from .source import Opened, Snapshot

INSIDE = "::"
"""What stands between the path of a file and the path inside of it."""
HDF5_AT = 0, 512, 1024, 2048
"""Where HDF5's first bytes may stand: files of MATLAB begin with 512 bytes of their own."""
NETCDF_3 = b"CDF"


def split(spec: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """Return the file that an address names, and the path inside of it; None where it names no local file
    that exists."""
    place = local_path(spec)
    if place is None or os.path.isdir(place):  # Path.is_dir raises where a name is too long
        return None
    if os.path.exists(place):
        return place, ""
    head, between, inside = os.fspath(spec).partition(INSIDE)
    file = local_path(head) if between and head else None
    there = file is not None and os.path.exists(file) and not os.path.isdir(file)
    return (file, inside) if file is not None and there else None


def open_file(spec: str | os.PathLike[str], name: str) -> Any:
    """Return the array that an address names, an `Npy`, a dataset of h5py or a zarr.Array; None where it
    names no file of these formats. Raises InputError and OSError."""
    found = split(spec)
    if found is None:
        return None
    path, inside = found
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise InputError(f"{name} is a pipe or a device, which is not read; save the array in a file first")
    text = files.read_small(path, HDF5_AT[-1] + len(hdf5.MAGIC)) or b""
    if any(text[at:].startswith(hdf5.MAGIC) for at in HDF5_AT):
        return hdf5.open_dataset(path, inside, name)
    if text.startswith(zipped.MAGIC):
        return zipped.open_zip(path, inside, name)
    if inside:
        raise InputError(
            f"{path} is neither an HDF5 file nor a zip archive, so there is no array inside of it; "
            "check the path"
        )
    if text.startswith(npy.MAGIC):
        return npy.look(path, name)
    if text.startswith(NETCDF_3):
        raise InputError(
            f"{name} is a NetCDF file of version 3, which is not read; convert it with nccopy -k nc4"
        )
    return None


def open_npy(found: npy.Npy, name: str) -> Opened:
    """Open the matrix in one of NumPy's files. Raises InputError."""
    source = npy.open_source(found, name)
    turned = found.fortran
    return Opened(source, replace(source.matrix, transposed=turned, fortran=turned))


def watched(opened: Opened, spec: str | os.PathLike[str]) -> Opened:
    """Return the same array with the state of the file that holds it, by which later changes are noticed."""
    found = split(spec)
    assert found, "it has just been opened"
    path, inside = found

    def look() -> Stamps:
        now = os.stat(path)
        return np.array([[now.st_size, now.st_mtime_ns, identity(now)]], np.int64)

    description = f"{inside.strip('/')} {opened.shape} {opened.dtype.str}".encode()
    return replace(
        opened, snapshot=Snapshot(description, look(), look), address=f"{path}{INSIDE}{inside.strip('/')}"
    )
