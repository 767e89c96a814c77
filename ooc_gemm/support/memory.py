"""Memory of this process: what it holds now, the most that it has held, and what it may use."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path

from .errors import InputError
from .intervals import power_of_two, round_up

STEP, ROUNDED = 16 << 20, 16
"""Measured memory is rounded up to so many bytes, or to about one in so many of those that a process holds.
So two runs of one problem get one plan, which takes longer to make than to look up."""


MOST = 1 << 62
"""Bytes that no machine has; Python numbers may be too large for a float."""
_SIZE = re.compile(r"\s*(?P<number>\d+\.?\d*(?:e[+-]?\d{1,2})?|\.\d+)\s*(?P<unit>[a-z]*)\s*", re.ASCII)
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _UNITS |= dict.fromkeys((_letter, f"{_letter}b"), 1000**_power)
    _UNITS |= dict.fromkeys((f"{_letter}i", f"{_letter}ib"), 1024**_power)


def parse_size(text: str | int) -> int:
    """Bytes of `512MiB`, `8GB`, `8g`, `1e9` or a plain number. Without an `i` a unit is a power of 1000, with
    one a power of 1024; case does not matter, and no unit means bytes. What is more than `MOST` is `MOST`.
    Raises InputError."""
    if isinstance(text, int):
        text = sorted((-MOST, text, MOST))[1]
    found = _SIZE.fullmatch(str(text).lower())
    size = 0
    if found and found["unit"] in _UNITS:
        number = found["number"]
        whole = number.isdecimal() and len(number) < 20
        size = int(min(MOST, (int(number) if whole else float(number)) * _UNITS[found["unit"]]))
    if size <= 0:
        raise InputError(f"{text!r} is not a size; write for example 512MiB, 8GB or a number of bytes")
    return size


def spelled_size(nbytes: float) -> str:
    """Return a number of bytes in the form that people read: `1.50 GiB`."""
    for power, prefix in zip((5, 4, 3, 2, 1), "PTGMK", strict=True):
        if nbytes >= 0.9 * 1024**power:
            return f"{nbytes / 1024**power:.2f} {prefix}iB"
    return f"{nbytes} B"


def resident_bytes() -> int:
    """The resident set of this process now, in bytes."""
    return _resident()


def _resident() -> int:
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE
    import psutil  # for other systems than Linux: importing it takes 10 ms

    return int(psutil.Process().memory_info().rss)


_peak_before = 0
"""The largest resident set, in bytes, before `peak_over` last told the system to forget it."""


def peak_over(work: Callable[[], object]) -> int | None:
    """Run `work` and return by how many bytes the resident set rose while it ran, beyond what it still holds
    afterwards; None if the system cannot tell. Raises what `work` raises."""
    global _peak_before
    _peak_before = peak_resident_bytes()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak (proc(5))
    except OSError:
        work()
        return None
    work()
    return max(0, _peak_since() - _resident())


def peak_resident_bytes() -> int:
    """The largest resident set that this process has had, in bytes."""
    return max(_peak_before, _peak_since())


def _peak_since() -> int:
    """The largest resident set, in bytes, since the system was last told to forget it (VmHWM)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def baseline_bytes(usual: int) -> int:
    """Bytes that the process holds before the plan's buffers are allocated: `usual` in a process of its own,
    and the measured resident set, rounded up, in a process that already holds more."""
    held = resident_bytes()
    return max(usual, round_up(held, max(STEP, power_of_two(held // ROUNDED))))


class Growth:
    """How much the baseline of this process has grown since this was made. Buffers that have become resident
    are in the baseline, and are not to be counted again."""

    def __init__(self) -> None:
        self._before = resident_bytes()

    def of(self, nbytes: int) -> int:
        """Return how many of so many bytes of buffers are in the baseline."""
        return min(nbytes, max(0, round_up(resident_bytes() - self._before, STEP)))


def free_bytes() -> int:
    """Bytes that this process may still allocate: free memory, or what its control group has left."""
    return min([_available_bytes(), *(limit - used for limit, used in _cgroup_files())])


def _available_bytes() -> int:
    """Bytes that the system can give to processes without swapping."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024
    import psutil  # as above

    return int(psutil.virtual_memory().available)


def default_memory_limit() -> int:
    """The memory limit where none is given, in bytes: what the process holds, and 60 % of what it may still
    allocate."""
    return max(STEP, int(0.6 * free_bytes()) + resident_bytes()) // STEP * STEP


def memory_limit_of(given: str | int | None) -> int:
    """The memory limit that is asked for, in bytes: `given` as of `parse_size`, or the default where it is
    None. Raises InputError."""
    return default_memory_limit() if given is None else parse_size(given)


def _cgroup_files() -> list[tuple[int, int]]:
    """Return (limit, used), in bytes, of every control group above this process that limits memory."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    root = Path("/sys/fs/cgroup")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = ("memory.max", "memory.current")
        top = root
        if controllers:
            names, top = ("memory.limit_in_bytes", "memory.usage_in_bytes"), root / "memory"
        group = Path(os.path.normpath(f"{top}/{path}"))
        for folder in [group, *group.parents]:
            try:
                found.append((int((folder / names[0]).read_text()), int((folder / names[1]).read_text())))
            except (OSError, ValueError):
                continue
    return found
