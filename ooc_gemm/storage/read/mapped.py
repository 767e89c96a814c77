"""NumPy arrays whose memory is that of a file, and when their pages count as memory of this process.

A page that was read is resident until it is released. Pages of a shared map are released after they were
read, because what was written to them stays with the file. A private (copy-on-write) map would lose that, so
its pages are never released. They are read before a plan is made, whose baseline then holds them.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ...support import memory
from ...support.intervals import ceil_div, ranges, round_up

Array = npt.NDArray[Any]
Range = tuple[int, int]

MAPS = Path("/proc/self/maps")
AROUND = 64 << 10
"""Bytes around an element that Linux maps with it."""
MOST_RESIDENT = 8 << 20
"""Bytes of a map's pages that may be resident before they are released."""
LOOKED_AT = 1 << 16
"""Pages whose state is looked up together."""
RELEASED = "r", "r+", "w+"
"""Modes of np.memmap in which nothing is lost with a page."""

_shared: WeakKeyDictionary[mmap.mmap, bool] = WeakKeyDictionary()
"""Whether maps are shared, as the system said when it was asked."""


class _Area(NamedTuple):
    """A part of this process' addresses."""

    start: int
    stop: int
    shared: bool
    file: bool


def _areas(start: int, stop: int) -> list[_Area] | None:
    """Return the areas that hold the addresses [start, stop); None where the system does not say."""
    found = []
    try:
        for line in MAPS.read_bytes().splitlines():
            where, permissions, _, _, inode, *_ = line.split(None, 5)
            first, last = (int(one, 16) for one in where.split(b"-"))
            if first < stop and start < last:
                found.append(_Area(first, last, permissions[3:4] == b"s", inode != b"0"))
    except (OSError, ValueError):
        return None
    return found


def addresses(array: Array) -> Range:
    """Return the addresses [start, stop) between which the elements of an array lie."""
    start = stop = int(array.__array_interface__["data"][0])
    if not array.size:
        return start, start
    for extent, stride in zip(array.shape, array.strides, strict=True):
        start, stop = start + min(0, (extent - 1) * stride), stop + max(0, (extent - 1) * stride)
    return start, stop + array.itemsize


def releasable(array: Any) -> mmap.mmap | None:
    """Return the memory map that an array is a view of; None where it views none, or one whose pages cannot
    be released, because writes to them may be private."""
    if not isinstance(array, np.ndarray) or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    base: Any = array
    modes = set()
    while isinstance(base, np.ndarray | memoryview):
        modes |= {base.mode} if isinstance(base, np.memmap) else set()
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap):
        return None
    if base not in _shared and array.size:
        areas = _areas(*addresses(array))
        if areas is None:  # no other sign says whether a map is private
            return base if modes and modes <= {*RELEASED} else None
        _shared[base] = bool(areas) and all(area.shared for area in areas)
    return base if _shared.get(base) else None


def taken(part: Any) -> Array:
    """Return a part of an array in C order, and release its pages where it views a map that lets them go."""
    file = releasable(part)
    if file is None:
        return np.ascontiguousarray(part)
    found: Array = np.empty(part.shape, part.dtype)
    copy(found, part, file)
    return found


def copy(place: Array, part: Array, mapped: mmap.mmap | None) -> None:
    """Copy a part of an array to `place`. Where it views a map that is `releasable`, which is `mapped`, its
    pages are released before too many are resident."""
    if mapped is not None and part.size > 1 and _resident_after(part) > MOST_RESIDENT:
        axis = max(range(part.ndim), key=lambda one: (part.shape[one] - 1) * abs(part.strides[one]))
        half = part.shape[axis] // 2
        for some in (slice(None, half), slice(half, None)):
            at = (slice(None),) * axis + (some,)
            copy(place[at], part[at], mapped)
        return
    np.copyto(place, part, casting="unsafe")
    if mapped is not None:
        with suppress(OSError):  # pages that are locked, or large ones
            mapped.madvise(mmap.MADV_DONTNEED)


def _resident_after(part: Array) -> int:
    """Return how many bytes of a map are resident at most after a part of it was read."""
    found = 2 * AROUND
    for stride, extent in sorted(zip(map(abs, part.strides), part.shape, strict=True)):
        found = min(extent * found, (extent - 1) * stride + found)
    return found


def turned(array: Array) -> bool:
    """Return whether the elements of columns lie nearer to each other than those of rows."""
    return array.size > 0 and abs(array.strides[0]) < abs(array.strides[1])


def make_resident(array: Array, limit: int) -> int:
    """Read the pages of files that an array lies in and that this process does not hold yet, so that they
    count as memory that it holds. Where they do not fit a memory limit of `limit` bytes, none is read. Return
    the bytes of pages that are still to be read, rounded up."""
    start, stop = addresses(array)
    absent = [
        one
        for area in _areas(start, stop) or ()
        if area.file
        for one in _absent(max(start, area.start), min(stop, area.stop))
    ]
    missing = sum(last - first for first, last in absent)
    if limit < memory.resident_bytes() + missing:
        return round_up(missing, memory.STEP)
    if absent:
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * (stop - start)).from_address(start))
        for first, last in absent:
            whole[max(0, first - start) : last - start : mmap.PAGESIZE].max()
    return 0


def _absent(start: int, stop: int) -> Iterator[Range]:
    """Yield the ranges of pages between two addresses that are not resident: all of them where the system
    does not say."""
    size = mmap.PAGESIZE
    first, last = start // size, ceil_div(stop, size)
    try:
        file = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        yield start, stop
        return
    try:
        for page, end in ((first + one, first + two) for one, two in ranges(last - first, LOOKED_AT)):
            entries = np.frombuffer(os.pread(file, 8 * (end - page), 8 * page), np.uint64)
            gone = np.zeros(len(entries) + 2, np.int8)
            gone[1:-1] = entries >> np.uint64(63) == 0
            edges = np.flatnonzero(np.diff(gone)) + page
            for one, two in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                yield one * size, two * size
    finally:
        os.close(file)
