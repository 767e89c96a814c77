"""Stamps: numbers that tell whether a file or an object has changed."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import background, files

Stamp = tuple[int, int]
"""Size in bytes, and the time of the last modification in ns or a number made of an object's tag; (0, 0)
where there is no file."""
Listed = tuple[int, int, int]
"""The two numbers of a stamp, and the file's `identity`."""
Stamps = npt.NDArray[np.int64]
"""For each file of a grid a row of three numbers, as in `Listed`; zeros where there is no file."""

NUMBERED = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "nfs", "nfs4")
"""File systems whose file numbers are permanent; others may change them."""


def identity(found: os.stat_result) -> int:
    """Return a number that changes whenever a file is written to or replaced, even if its size and
    modification time are set back. It is made of the time of the last change and the file's number."""
    number = found.st_ino if files.type_of(found.st_dev) in NUMBERED else 0
    return hash((found.st_ctime_ns, number)) or 1


def stamp_of(path: str | Path, asynchronous: bool = False) -> Stamp:
    """Return the stamp of a file. `asynchronous`: the file lies in memory, where asking must not release the
    interpreter lock. Raises OSError."""
    try:
        if asynchronous and background.THERE:
            return background.stamp(str(path)) or (0, 0)
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0
    return found.st_size, found.st_mtime_ns


def digest(parts: Iterable[bytes]) -> str:
    """Return a short hash of some contents."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()
