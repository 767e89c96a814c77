"""Decides which files in C's folder, or objects below its address, belong to an array there."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...support.errors import InputError
from ..format import documents
from ..format.unfinished import ASIDE, JOURNAL, METADATA, PARTIAL, is_journal
from ..io import files, locks

NODES = (*METADATA, ".zgroup")
"""Names of files that make a folder an array or a group."""
LITTER = re.compile(
    r"\.ooc-gemm-run-\w+(\.gone)?|ooc-gemm\.(journal|owner)\.new"
    r"|(zarr(\.json)?|\.zarray|\.zattrs)(\.[0-9a-f]+)?(\.partial)?\.(new|partial|pending)"
)
"""Pattern of the files that killed runs leave beside C's metadata."""
SUFFIX = re.compile(r"(\.pending|(\.[0-9a-f]{32})?\.partial)$")
"""Pattern of what follows the name of a chunk while this package or zarr writes it."""
NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


ENDLESS = 1 << 62
"""Number of chunks along a dimension where it is not known."""


@dataclass(frozen=True)
class Keys:
    """How the keys of an array's chunks are spelled."""

    default: bool
    """Whether keys begin with `c`, as those of version 3 do."""
    separator: str
    grid: tuple[int, ...]
    """Number of chunks along each dimension."""

    def takes(self, path: tuple[str, ...]) -> bool | None:
        """Whether a path inside the array's folder is that of a chunk: True for a chunk, None for a folder of
        chunks, False for neither."""
        extents = self.grid if self.grid or self.default else (1,)  # a v2 array of no dimensions has chunk 0
        levels = 1 if self.separator == "." else len(extents) + self.default
        if len(path) > levels:
            return False
        last = len(path) == levels
        parts = (*path[:-1], SUFFIX.sub("", path[-1])) if last else path
        if self.separator == ".":
            parts = tuple(parts[0].split("."))
        if self.default:
            if parts[0] != "c":
                return False
            # Below `c` there are chunks only; some may be of an array that was larger.
            parts, extents = parts[1:], (ENDLESS,) * len(extents)
        if len(parts) > len(extents) or (last and len(parts) < len(extents)):
            return False
        numbers = all(
            NUMBER.fullmatch(part) and int(part) < extent
            for part, extent in zip(parts, extents, strict=False)
        )
        return (True if last else None) if numbers else False


ANY = Keys(True, "/", (ENDLESS, ENDLESS))
"""Keys of the chunks of a C whose metadata are not known."""


def keys_of(name: str, key: str, described: dict[str, Any]) -> Keys:
    """Return how an array of this metadata spells the keys of its chunks. `key`: of the document. Raises
    InputError where that is not known."""
    shape, separator = described.get("shape"), described.get("dimension_separator", ".")
    sizes, default = described.get("chunks"), False
    if key.startswith(METADATA[0]):
        encoding = described.get("chunk_key_encoding") or {"name": "default"}
        if isinstance(encoding, str):
            encoding = {"name": encoding}
        if not isinstance(encoding, dict) or encoding.get("name") not in ("default", "v2"):
            raise _unknown(name)
        default = encoding["name"] == "default"
        inside = encoding.get("configuration") or {}
        usual = "/" if default else "."
        separator = encoding.get("separator") or (
            inside.get("separator", usual) if isinstance(inside, dict) else None
        )
        grid = described.get("chunk_grid")
        sizes = grid.get("configuration", {}).get("chunk_shape") if isinstance(grid, dict) else None
    if separator not in (".", "/") or not isinstance(shape, list):
        raise _unknown(name)
    try:
        counts = tuple(-(-int(n) // max(1, int(size))) for n, size in zip(shape, sizes or (), strict=True))
    except (TypeError, ValueError):
        counts = (ENDLESS,) * len(shape)
    return Keys(default, str(separator), counts)


def _unknown(name: str) -> InputError:
    return InputError(
        f"{name} names its chunks in a way that is not known here, so they cannot be told from other files; "
        "remove it yourself, or choose another place"
    )


@dataclass
class Files:
    """The files in a folder that belong to an array there."""

    chunks: list[Path] = field(default_factory=list)
    """Files of chunks, and folders that hold nothing else."""
    metadata: list[Path] = field(default_factory=list)
    """The metadata of the array, which are removed first."""
    attributes: list[Path] = field(default_factory=list)
    litter: list[Path] = field(default_factory=list)
    """Files that interrupted runs have left."""


def survey(place: Path, name: str) -> Files:
    """Find the files in a folder that belong to the array there, finished or not. `name`: how messages call
    it. Raises InputError where that cannot be decided, where they cannot be removed, or where other files are
    in the way of C's chunks."""
    _check(place, name)
    found, keys, described_by = Files(), list[Keys](), list[str]()
    unfinished = [key + PARTIAL for key in METADATA]
    for path in (place / key for key in (*METADATA, *unfinished, *(f"{ASIDE}/{key}" for key in unfinished))):
        described = _document(path, name)
        if described is not None:
            keys.append(keys_of(name, path.name, described))
            described_by.append(path.name)
    keys = keys or [ANY]
    found.metadata = [place / key for key in METADATA if (place / key).exists()]
    if any(key.startswith(METADATA[1]) for key in described_by) and (place / ".zattrs").exists():
        found.attributes = [place / ".zattrs"]
    found.litter = [entry for entry in _entries(place, name) if LITTER.fullmatch(entry.name)]
    found.chunks = _chunks(place, (), keys, name)[0]
    room = place / "c"
    shared = any(one.default and one.separator == "/" for one in keys) and room.is_dir()
    if room not in found.chunks and not shared and os.path.lexists(room):
        raise InputError(
            f"{name} cannot be replaced: {room} is not part of it and stands where the chunks of the new "
            "array are to go; move it away, or choose another place"
        )
    return found


def _document(path: Path, name: str) -> dict[str, Any] | None:
    """Read the metadata of an array; None where there are none, or they cannot be used."""
    with suppress(OSError, InputError):
        text = files.read_small(path, documents.MAX_BYTES)
        if text is not None:
            described = documents.parse(name, text)
            return described if documents.kind(path.name, described) == "array" else None
    return None


def _chunks(folder: Path, path: tuple[str, ...], keys: list[Keys], name: str) -> tuple[list[Path], bool]:
    """Find the chunks below a folder, and folders that hold nothing else. Returns them, and whether this
    folder holds nothing else. `path`: the path of the folder inside the array's."""
    found, only = list[Path](), True
    for entry in _entries(folder, name):
        inside = (*path, entry.name)
        if path and entry.name in NODES:
            raise _among(name, folder)
        answers = {one.takes(inside) for one in keys}
        if None in answers and entry.is_dir() and not entry.is_symlink():
            _check(entry, name)
            if entry.is_mount():
                raise _fixed(name, entry)
            below, nothing_else = _chunks(entry, inside, keys, name)
            found += [entry] if nothing_else else below
            only = only and nothing_else
        elif entry.is_symlink() and answers != {False}:  # what it leads to is somebody's
            found.append(entry)
        elif True in answers and entry.is_dir():
            raise _among(name, entry)
        elif True in answers:
            if os.geteuid() == 0 and not os.access(entry, os.W_OK):  # nobody may, not even root
                raise _fixed(name, entry)
            found.append(entry)
        else:
            only = False
    return found, only


def _entries(folder: Path, name: str) -> Iterator[Path]:
    """Return the entries of a folder; none where there is no folder. Raises InputError where it cannot be
    read."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield folder / entry.name
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as error:
        raise _fixed(name, folder) from error


def _check(folder: Path, name: str) -> None:
    """Raise InputError where nothing can be removed from a folder."""
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"{name} cannot be replaced: {folder} is not a writable folder; change its permissions, or "
            "choose another place"
        )


def _among(name: str, node: Path | str) -> InputError:
    return InputError(
        f"{name} cannot be replaced: {node}, an array, a group or a folder of something else, stands "
        "among its chunks; move it away, or choose another place"
    )


def _fixed(name: str, path: Path) -> InputError:
    return InputError(
        f"{name} cannot be replaced: {path} cannot be changed or removed; change its permissions, or choose "
        "another place"
    )


def is_ours(place: Path) -> bool:
    """Whether a folder without an array is empty, or holds only what a run of this package has left that was
    killed before it began C. Raises OSError."""
    names = {entry.name for entry in os.scandir(place)}
    if not names:
        return True
    known = all(name in (JOURNAL, locks.OWNER) or LITTER.fullmatch(name) for name in names)
    return known and _has_journal(place)


def _has_journal(place: Path) -> bool:
    try:
        return is_journal(files.read_small(place / JOURNAL, 64))
    except OSError:  # what is no file is none
        return False


def owned(keys: Iterable[str], metadata: dict[str, dict[str, Any]], name: str) -> list[str]:
    """Return which objects below an address belong to the array there. keys: all objects. metadata: the
    documents of the array, by key. name: how messages call it. Raises InputError."""
    grammar = [keys_of(name, key, described) for key, described in metadata.items()] or [ANY]
    found = []
    for key in keys:
        path = tuple(key.split("/"))
        ours = key in (*METADATA, JOURNAL) or bool(LITTER.fullmatch(key))
        ours = ours or (key == ".zattrs" and any(one.startswith(METADATA[1]) for one in metadata))
        if ours or any(one.takes(path) for one in grammar):
            found.append(key)
        elif path[-1] in NODES and any(one.takes(path[:-1]) is not False for one in (*grammar, ANY)):
            raise _among(name, "/".join((name, *path[:-1])))
    return found


def forget_journal(place: Path) -> None:
    """Remove the journal of an earlier run, where this run has none. Raises OSError."""
    if _has_journal(place):
        (place / JOURNAL).unlink()
