"""Looks at many files in a few calls (listing.c), or with Python's functions where the library is missing."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from . import native

Numbers = npt.NDArray[np.int64]
"""Numbers that names hold; or for each file a row: its size, the times of its last modification and of its
last change in ns, its number, and that of its file system. The size of a file that cannot be looked at is
−1."""
_COLUMNS, _IN_NAME, _FILES = 5, 2, 1024
"""Numbers of a file, most numbers in its name, and files that one call looks at."""
_found = native.loaded()
_library = _found[1] if _found else None


def numbers(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a pattern in which `*` stands for a number, with a group for each.
    Numbers are spelled as keys spell them: without leading zeros."""
    return re.compile(re.escape(pattern).replace(r"\*", "(0|[1-9][0-9]{0,17})"))


def numbered(matches: Iterable[re.Match[str]], count: int) -> Numbers:
    """Return a row for each match of a regular expression of `numbers`: the `count` numbers that it has
    found."""
    found = [[int(group) for group in match.groups()] for match in matches]
    return np.array(found, np.int64).reshape(len(found), count)


def files_of(folders: Sequence[str], pattern: str) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """Yield three arrays for some of the files whose names match a pattern with up to two `*`: for each file
    the number of its folder, the numbers in its name, and its own numbers. What leads nowhere is left out,
    and so are folders that are none. The arrays are overwritten when the next are asked for. Raises
    OSError."""
    if _library is None:
        for number, folder in enumerate(folders):
            yield from _with_python(number, folder, pattern)
        return
    at, in_names = np.empty(_FILES, np.int64), np.empty((_FILES, _IN_NAME), np.int64)
    rows, state = np.empty((_FILES, _COLUMNS), np.int64), np.zeros(4, np.int64)
    arrays = [state.ctypes.data, at.ctypes.data, rows.ctypes.data, in_names.ctypes.data]
    names, wanted = os.fsencode("".join(f"{folder}\0" for folder in folders)), os.fsencode(pattern)
    try:
        while state[0] < len(folders):
            count = _library.listing_files(names, len(folders), wanted, _FILES, *arrays)
            if count:
                yield at[:count], in_names[:count], rows[:count]
            number, begin, is_open, error = state.tolist()
            if error and is_open:
                raise OSError(error, os.strerror(error), folders[number])
            if error:  # Python says why it cannot be opened
                yield from _with_python(number, folders[number], pattern)
                state[:2] = number + 1, names.index(0, begin) + 1
    finally:
        _library.listing_close(state.ctypes.data)


def _with_python(number: int, folder: str, pattern: str) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """Yield what `files_of` yields for one folder; nothing where there is none."""
    wanted = numbers(pattern)
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if (name := wanted.fullmatch(entry.name)) and len(row := look(entry.path)):
                yield np.array([number]), numbered([name], wanted.groups), row


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
