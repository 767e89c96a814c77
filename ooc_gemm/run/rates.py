"""What the planner is told about speed: rates that `ooc-gemm info --measure` found on this machine, and the
default rates of the device where there are none.

The file maps device model → rates of the device, and among them, under "folders", those of each file system
that was measured with it; several GPUs have more readers and writers: theirs are under "folders_of_several".
What is there, and how it is measured, stands in info.py.
"""

import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import CDLL, addressof, byref, c_char, c_size_t, c_ubyte, c_void_p
from dataclasses import replace
from mmap import ACCESS_COPY, PAGESIZE, mmap
from pathlib import Path
from typing import Any

from ..engine.ports import Arithmetic, Hardware
from ..planning.machine import Rates
from ..storage.io.files import mounted
from ..storage.write.staging_folder import DIRECT_BYTES
from ..support.remembered import recall

FILE = "rates.json"
FOLDERS = {False: "folders", True: "folders_of_several"}
"""Name of the table of file systems, by whether there are several devices."""
SUGGESTION = "measure with `ooc-gemm info --measure`"
SUGGESTION_FOLDER = "measure with `ooc-gemm info --measure FOLDER`"
NOT_MEASURED = f"default rates (not measured); {SUGGESTION}"
Place = tuple[Path | None, int]
"""The folder of an array, None where it is not local, and its size in bytes."""
SAMPLED = 4
"""Entries that are looked at in every folder of an array."""

_mincore = getattr(CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = c_void_p, c_size_t, c_void_p


def known(device: Hardware, arithmetic: Arithmetic, inputs: Iterable[Place], c: Place) -> Rates:
    """Return the rates of a device for a kernel, for inputs at these places and a result at that place."""
    usual, found = device.rates(arithmetic), recall(FILE).get(device.model, {})
    try:
        return _known(usual, found, kernel_key(arithmetic), list(inputs), c, device.most_flops)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a file of another version
        return replace(usual, note=NOT_MEASURED)


def _known(
    usual: Rates, found: dict[str, Any], key: str, inputs: list[Place], c: Place,
    most: Callable[[str, str], float],
) -> Rates:  # fmt: skip
    if not found:
        return replace(usual, note=NOT_MEASURED)
    rates = replace(
        usual,
        upload=usual.at_once * found["upload_bytes_per_second"],
        download=usual.at_once * found["download_bytes_per_second"],
        touch=found["touch_bytes_per_second"],
        piece_seconds=found["piece_seconds"],
        start=found["start_seconds"],
    )
    dates, missing = [found["date"]], []
    speeds = possible(found["flops"], most)
    if key in speeds:
        rates = replace(rates, **speeds[key])
        rates = replace(rates, flops=usual.devices * rates.flops)
    else:
        missing.append(key)
    folders = dict(found.get(FOLDERS[False], {}))
    if usual.devices > 1:
        folders |= found.get(FOLDERS[True], {})
    seconds, total, costs = 0.0, 0, [0.0]
    decoding = [math.inf]
    systems = {place: file_system(place) for place, _ in (*inputs, c) if place}
    for place, nbytes in inputs:
        folder = folders.get(systems[place]) if place else None
        if place is None or folder is None:
            continue
        cold, cached = folder["read_bytes_per_second"], folder["cached_bytes_per_second"]
        share = cached_share(place) if cold < cached else 1.0
        seconds += nbytes * ((1 - share) / cold + share / cached)
        total += nbytes
        costs.append(folder["piece_seconds"])
        decoding.append(folder["decode_bytes_per_second"])
    if total:
        rates = replace(rates, read=total / seconds, piece_seconds=rates.piece_seconds + max(costs))
        rates = replace(rates, decode=min(decoding))
    target, size = c
    if target and (folder := folders.get(systems[target])):
        way = "write" if size >= DIRECT_BYTES else "write_cached"
        rates = replace(rates, write=folder[f"{way}_bytes_per_second"])
        if any(place and systems[place] == systems[target] for place, _ in inputs):
            rates = replace(rates, turns=folder["turns"])
    dates += [folders[system]["date"] for system in systems.values() if system in folders]
    missing += [name.split()[0] for name in sorted(set(systems.values())) if name not in folders]
    note = f"measured {min(dates)}"
    if missing:
        note += f", default rates for {' and '.join(missing)} (not measured); {SUGGESTION_FOLDER}"
    return replace(rates, note=note)


def possible(flops: Any, most: Callable[[str, str], float]) -> dict[str, Any]:
    """Return those remembered rates of kernels, by their keys, that a device can reach. `most`:
    `Device.most_flops` of the device."""
    found = {}
    for key, speed in flops.items() if isinstance(flops, dict) else ():
        with suppress(KeyError, TypeError, ValueError):  # in a file of another version
            kernel, panel = key.split()[:2]
            if 0 < speed["flops"] <= most(kernel, panel):
                found[key] = speed
    return found


def kernel_key(arithmetic: Arithmetic) -> str:
    """Return the key under which a kernel's rate is remembered, such as `blas float32`."""
    panel, block = arithmetic.panel.name, arithmetic.block.name
    return f"{arithmetic.kernel} {panel}" + (f" to {block}" if block != panel else "")


def file_system(place: Path) -> str:
    """Return type and device number of the file system on which a folder lies, or will lie."""
    while not place.exists() and place != place.parent:
        place = place.parent
    device = os.stat(place).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    return f"{mounted().get(number, ('unknown',))[0]} {number}"


def described(place: Path) -> dict[str, str]:
    """Describe the file system on which a folder lies, for a report."""
    system = file_system(place)
    return {"mounted": mount_point(system), "type": system.split()[0]}


def mount_point(system: str) -> str:
    """Return where a file system is mounted; empty where it is not."""
    return mounted().get(system.split()[1], ("", ""))[1]


def cached_share(folder: Path) -> float:
    """Estimate from samples which share of an array the page cache holds; 0 where the system does not
    tell."""
    held = [_is_cached(path) for path in _sample(folder)]
    return sum(held) / len(held) if held else 0.0


def _sample(folder: Path) -> list[Path]:
    """Return some files below a folder, spread over it."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    entries = [entry for entry in entries if not entry.name.startswith((".z", "zarr.json"))]
    found = []
    for entry in entries[:: max(1, len(entries) // SAMPLED)]:
        found += _sample(entry) if entry.is_dir() else [entry]
    return found


def _is_cached(path: Path) -> bool:
    """Whether the page cache holds the page in the middle of a file; asking does not load it. The system does
    not tell for a file that this process may not write."""
    if not os.access(path, os.W_OK):
        return False
    try:
        with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_COPY) as pages:
            held = c_ubyte(0)
            at = addressof(c_char.from_buffer(pages)) + len(pages) // 2 // PAGESIZE * PAGESIZE
            return _mincore is not None and _mincore(at, 1, byref(held)) == 0 and bool(held.value & 1)
    except (OSError, ValueError):
        return False
