"""Stamps: what tells whether a file or an object has changed."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import background, files

Stamp = tuple[int, int]
"""Size in bytes, and when the file was changed last in ns, or a number made of the object's tag; (0, 0) where
there is none."""
Listed = tuple[int, int, int]
"""The same, and the file's `identity`."""
Stamps = npt.NDArray[np.int64]
"""A row of three numbers, as `Listed`, for each file of a grid; zeros where there is none."""

NUMBERED = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "nfs", "nfs4")
"""File systems whose files keep their numbers for good; others make them up now and then."""


def identity(found: os.stat_result) -> int:
    """A number that changes whenever a file is written to or replaced, even if its size and the time of its
    last modification are set back. It is made of the time of the last change and of the file's number."""
    number = found.st_ino if files.type_of(found.st_dev) in NUMBERED else 0
    return hash((found.st_ctime_ns, number)) or 1


def stamp_of(path: str | Path, asynchronous: bool = False) -> Stamp:
    """The stamp of a file. `asynchronous`: the file lies in memory, where asking must not give up the
    interpreter. Raises OSError."""
    try:
        if asynchronous and background.THERE:
            return background.stamp(str(path))
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0
    return found.st_size, found.st_mtime_ns


def digest(parts: Iterable[bytes]) -> str:
    """A short name for contents."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()
