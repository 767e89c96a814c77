"""What was measured on this machine, kept as JSON beside the compiled kernels and read anew each time."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import cache

Table = dict[str, dict[str, Any]]
"""Device → name → value."""

_unwritten: dict[Path, Table] = {}
"""By file: what this process alone knows, because it could not be written or is not to be."""
_why: dict[Path, str] = {}
"""By folder: why it could not be written to."""
_for_now = False


def recall(name: str) -> Table:
    """What the file `name` holds, and what this process could not write there. A file that is missing,
    damaged, or not to be trusted (cache.py) holds nothing."""
    file = cache.folder() / name
    return _merged(_in_file(name), _unwritten.get(file, {}))


def remember(name: str, device: str, values: dict[str, Any]) -> None:
    """Add `values` to what `name` holds for a device. Where the cache folder cannot be written they are kept
    for this process alone, and `not_written` says why."""
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
    """Why something could not be remembered, as a sentence; "" where everything was."""
    folder = cache.folder()
    if folder not in _why:
        return ""
    return (
        f"what was measured cannot be remembered in {folder}: {_why[folder]}; "
        "set OOC_GEMM_CACHE to a folder that is yours"
    )


@contextmanager
def for_now() -> Iterator[None]:
    """What is remembered inside is forgotten at the end: no file changes."""
    global _for_now, _unwritten
    before = _for_now, copy.deepcopy(_unwritten)
    _for_now = True
    try:
        yield
    finally:
        _for_now, _unwritten = before


def _in_file(name: str) -> Table:
    try:
        found = json.loads(cache.read(name) or b"")
        return found if all(isinstance(entry, dict) for entry in found.values()) else {}
    except (ValueError, AttributeError):
        return {}


def _merged(old: Table, new: Table) -> Table:
    return {device: old.get(device, {}) | new.get(device, {}) for device in [*old, *new]}
