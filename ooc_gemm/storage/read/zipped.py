"""Arrays in zip archives, as `zarr.storage.ZipStore` writes them."""

import contextlib
import itertools
import zipfile
from pathlib import Path
from typing import Any

import zarr
from zarr.storage import StorePath, ZipStore

from ...support.errors import InputError
from ..format.unfinished import METADATA
from ..io.answers import Answers
from .metadata import MOST_LOOKED_AT, advice, look_at, stored_at

MAGIC = b"PK\x03\x04"


def open_zip(path: Path, inside: str, name: str) -> zarr.Array[Any]:
    """Open the Zarr array at a path inside of an archive, for reading. It may have one dimension. Raises
    InputError."""
    opening = ZipStore.open(path, mode="r", read_only=True)
    try:
        store = Answers(ZipStore(path, mode="r")).of(opening)
    except zipfile.BadZipFile as error:
        raise InputError(f"{name} is no whole zip archive ({error}); copy or write it again") from error
    found = stored_at(StorePath(store, inside.strip("/")), name, flat=True)
    if isinstance(found, zarr.Array):
        return found
    with zipfile.ZipFile(path) as archive:
        files = archive.namelist()
    if all(file.endswith(".npy") for file in files):
        raise InputError(
            f"{name} is a zip archive, such as numpy.savez makes; save each array with numpy.save"
        )
    known = _arrays_in(store, files, name)
    if not known:
        raise InputError(f"{name} is a zip archive that holds no Zarr array; check the path")
    what = "is a Zarr group" if found else "is not in that archive" if inside else "is a zip archive"
    raise InputError(f"{name} {what}; {advice(known, f'{path.name}::')}")


def _arrays_in(store: ZipStore, files: list[str], name: str) -> dict[str, Any]:
    """Return the metadata of arrays in an archive by their paths, of at most `MOST_LOOKED_AT` nodes."""
    nodes = (file.rpartition("/")[0] for file in files if file.rpartition("/")[2] in METADATA)
    known = {}
    for node in itertools.islice(nodes, MOST_LOOKED_AT):
        with contextlib.suppress(Exception):  # the advice is right without it
            known[node] = look_at(StorePath(store, node), name)[2]
    return known
