"""Stamps: numbers that tell whether a file or an object has changed."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import background, files
from .listing import Numbers

Stamp = tuple[int, int]
"""Size in bytes, and the time of the last modification in ns or a number made of an object's tag; (0, 0)
where there is no file."""
Stamps = npt.NDArray[np.int64]
"""For each file a row of three numbers: the two of a stamp, and its `identity`; zeros where there is no
file."""

NUMBERED = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "nfs", "nfs4")
"""File systems whose file numbers are permanent; others may change them."""


_ODD, _POSITIVE = 0x9E3779B97F4A7C15, (1 << 63) - 1
"""An odd number without order in its bits, and the bits of a number in 64 that is not negative."""


def identity(found: os.stat_result) -> int:
    """Return a number that changes whenever a file is written to or replaced, even if its size and
    modification time are set back. It is made of the time of the last change and the file's number."""
    number = found.st_ino if files.type_of(found.st_dev) in NUMBERED else 0
    mixed: int = _mixed(found.st_ctime_ns, number)
    return max(1, mixed)


def _mixed(changed: Any, number: Any) -> Any:
    """Return what identities are made of, for one file, or for arrays of numbers in 64 bits without sign."""
    return (changed ^ number * _ODD) & _POSITIVE


def stamps_of(numbers: Numbers) -> Stamps:
    """Return the stamps and identities of files that `listing` has looked at. That of a file that cannot be
    looked at says that it is there: reading it will tell why."""
    found = np.empty((len(numbers), 3), np.int64)
    size, modified, changed, number, system = numbers.T
    permanent = np.zeros(len(numbers), bool)
    for one in set(system.tolist()):  # np.unique would import numpy.ma
        permanent |= (system == one) & (files.type_of(one) in NUMBERED)
    mixed = _mixed(changed.view(np.uint64), np.where(permanent, number, 0).view(np.uint64))
    found[:, 0], found[:, 1], found[:, 2] = size, modified, np.maximum(mixed, 1)
    found[size < 0] = 1, 0, 0
    return found


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
