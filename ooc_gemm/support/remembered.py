"""Measurements of this machine, stored as JSON beside the compiled kernels and read again at each use."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import cache

Table = dict[str, dict[str, Any]]
"""Device → name of the measurement → value."""

_unwritten: dict[Path, Table] = {}
"""For each file, what only this process knows, because the file could not or must not be written."""
_why: dict[Path, str] = {}
"""For each folder, why it could not be written to."""
_for_now = False


def recall(name: str) -> Table:
    """Return what the file `name` holds, together with what this process could not write there. A file that
    is missing, damaged or not trusted (cache.py) counts as empty. Values are shared with other callers, who
    must not change them."""
    file = cache.folder() / name
    return _merged(_in_file(name), _unwritten.get(file, {}))


def remember(name: str, device: str, values: dict[str, Any]) -> None:
    """Add `values` to what the file `name` holds for a device. If the cache folder cannot be written, only
    this process remembers them, and `not_written` says why."""
    file = cache.folder() / name
    if not _for_now:
        found = _merged(recall(name), {device: values})
        try:
            cache.write(name, json.dumps(found, indent=1).encode())
            _unwritten.pop(file, None)
            _why.pop(file.parent, None)
            return
        except OSError as error:
            _why[file.parent] = error.strerror or str(error)
    _unwritten[file] = _merged(_unwritten.get(file, {}), {device: values})


def not_written() -> str:
    """Say in one sentence why something could not be remembered; "" if everything was."""
    folder = cache.folder()
    if folder not in _why:
        return ""
    return (
        f"what was measured cannot be remembered in {folder}: {_why[folder]}; "
        "set OOC_GEMM_CACHE to a folder that is yours"
    )


@contextmanager
def for_now() -> Iterator[None]:
    """Forget at the end what was remembered inside this context; no file changes."""
    global _for_now, _unwritten
    before = _for_now, copy.deepcopy(_unwritten)
    _for_now = True
    try:
        yield
    finally:
        _for_now, _unwritten = before


def _in_file(name: str) -> Table:
    return _parsed(cache.read(name) or b"")


@lru_cache(maxsize=4)
def _parsed(data: bytes) -> Table:
    """Return what a file holds. A run asks for it several times."""
    try:
        found = json.loads(data)
        return found if all(isinstance(entry, dict) for entry in found.values()) else {}
    except (ValueError, AttributeError):
        return {}


def _merged(old: Table, new: Table) -> Table:
    return {device: old.get(device, {}) | new.get(device, {}) for device in [*old, *new]}
