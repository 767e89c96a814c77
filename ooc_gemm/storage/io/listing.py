"""Looks at many files in a few calls (listing.c), or with Python's functions where the library is missing."""

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from . import native

Numbers = npt.NDArray[np.int64]
"""For each file a row: its size, the times of its last modification and of its last change in ns, its number,
and that of its file system. The size of a file that cannot be looked at is −1."""
_COLUMNS, _NAME_BYTES, _FILES = 5, 256, 1024
"""Numbers of a file, most bytes of its name with a zero, and files that one call looks at."""
_found = native.loaded()
_library = _found[1] if _found else None


def files_of(folders: Iterable[str]) -> Iterator[tuple[int, list[str], Numbers]]:
    """Yield the number of a folder, and names and numbers of some of its files. What leads nowhere, or has a
    name that begins with a dot, is left out, and so are folders that are none. The numbers are overwritten
    when the next are asked for. Raises OSError."""
    numbers, used = np.empty((_FILES, _COLUMNS), np.int64), ctypes.c_int64()
    names = ctypes.create_string_buffer(_FILES * _NAME_BYTES if _library else 1)
    to = numbers.ctypes.data, ctypes.addressof(names), ctypes.addressof(used)
    for at, folder in enumerate(folders):
        opened = _library and _library.listing_open(os.fsencode(folder))
        if not (_library and opened):  # if it cannot be opened, Python says why
            with suppress(FileNotFoundError, NotADirectoryError):
                yield from ((at, *some) for some in _with_python(folder))
            continue
        try:
            while count := _library.listing_next(opened, _FILES, *to):
                if count < 0:
                    raise OSError(-count, os.strerror(-count), folder)
                text = os.fsdecode(ctypes.string_at(names, used.value))
                yield at, text.split("\0")[:-1], numbers[:count]
        finally:
            _library.listing_close(opened)


def _with_python(folder: str) -> Iterator[tuple[list[str], Numbers]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and len(found := look(entry.path)):
                yield [entry.name], found


def look(path: str) -> Numbers:
    """Return the row of one file; no row where there is none."""
    try:
        return _row(os.stat(path))
    except FileNotFoundError:  # a link to nowhere, too
        return np.empty((0, _COLUMNS), np.int64)
    except OSError:
        return np.array([[-1, 0, 0, 0, 0]], np.int64)


def rename(pairs: Sequence[tuple[str, str]]) -> Numbers:
    """Rename files, in their order, and return the numbers that they have then: a row for each that was
    renamed, which are fewer than the pairs where one was not."""
    if _library is None:
        rows = []
        for old, new in pairs:
            try:
                os.replace(old, new)
                rows.append(_row(os.stat(new)))
            except OSError:
                break
        return np.concatenate([np.empty((0, _COLUMNS), np.int64), *rows])
    numbers = np.empty((len(pairs), _COLUMNS), np.int64)
    names = os.fsencode("".join(f"{old}\0{new}\0" for old, new in pairs))
    return numbers[: _library.listing_rename(names, len(pairs), numbers.ctypes.data)]


def _row(found: os.stat_result) -> Numbers:
    """Return the numbers of one file."""
    times = found.st_mtime_ns, found.st_ctime_ns
    return np.array([[found.st_size, *times, found.st_ino, found.st_dev]], np.int64)
