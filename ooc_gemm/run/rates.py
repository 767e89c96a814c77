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
from datetime import UTC, datetime
from mmap import ACCESS_COPY, PAGESIZE, mmap
from pathlib import Path
from typing import Any

from ..engine.ports import Arithmetic, Hardware
from ..planning.machine import Rates
from ..storage.io.files import IN_MEMORY, in_memory, mounted, open_file, type_of
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
Folder = dict[str, float]
"""Rates of a file system, in bytes per second, by what is done, such as "read", "decode" or, for what one
compressor has made, "decode zstd 0 float32"; `turns`, `entering`, `leaving` and `piece_seconds` as in
`Rates`; `begin_seconds`, what a product takes besides all bytes, and of that `create_seconds`, in which C is
begun."""
THREADS = 16
"""The most threads at which reads from memory are expected to become faster."""
COPIED, DECODED = 4e9, 1e9
"""Bytes per second that one thread copies out of the page cache, and that it decodes (H200 machine, 16
threads: 72e9 and 16e9)."""
DECODE = "decode "
"""Beginning of the names of rates at which one compressor's chunks are decoded."""
UNPACK_RATES = "unpack_bytes_per_second"
"""What is remembered of a device: the rate at which it decodes a part of a chunk (`Rates.unpack`), by
compressor."""
SHARED_MEMORY = 0.75
"""How reads and writes of files in memory, and copies to and from devices, share the memory of a host where
that was not measured (H200 and H100, 16 cores: reads 60 to 70 GB/s, copies 50, both at once 35 to 40)."""
MOST_BYTES = 512e9
"""Bytes per second that no core exceeds: 64 in each cycle of a clock of 8 GHz."""
SAMPLED = 4
"""Entries that are looked at in every folder of an array."""

_mincore = getattr(CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = c_void_p, c_size_t, c_void_p


def known(
    device: Hardware, arithmetic: Arithmetic, inputs: Iterable[Place], c: Place, codecs: Iterable[str] = ()
) -> Rates:
    """Return the rates of a device for a kernel, for inputs at these places and a result at that place.
    `codecs`: what decodes the chunks of inputs (`Source.codec`)."""
    usual, found, there = device.rates(arithmetic), recall(FILE).get(device.model, {}), list(inputs)
    key, most, names = kernel_key(arithmetic), device.most_flops, {codec for codec in codecs if codec}
    try:
        return _known(usual, found, key, there, c, most, names)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):  # a file of another version
        return _known(usual, {}, key, there, c, most, names)


def _known(
    usual: Rates, found: dict[str, Any], key: str, inputs: list[Place], c: Place,
    most: Callable[[str, str], float], codecs: set[str],
) -> Rates:  # fmt: skip
    rates, speeds = _of_device(usual, found), possible(found.get("flops"), most, key)
    missing = []
    used = [found] if key in speeds or "touch_bytes_per_second" in found else []
    if key in speeds:
        rates = replace(rates, flops=usual.devices * speeds[key]["flops"], thin=speeds[key]["thin"])
    else:
        missing.append(key)
    unpack = [rate for codec, rate in unpacking(found).items() if codec in codecs]
    if unpack and usual.unpack:
        rates = replace(rates, unpack=min(unpack))
    remembered = dict(found.get(FOLDERS[False], {}))
    if usual.devices > 1:
        remembered |= found.get(FOLDERS[True], {})
    systems = {place: file_system(place) for place, _ in (*inputs, c) if place}
    folders = {name: _folder(usual, name, remembered.get(name, {})) for name in systems.values()}
    rates = _of_folders(rates, {place: folders[name] for place, name in systems.items()}, inputs, c, codecs)
    if c[0] and any(place and systems[place] == systems[c[0]] for place, _ in inputs):
        rates = replace(rates, turns=folders[systems[c[0]]]["turns"])
    used += [remembered[name] for name in folders if name in remembered]
    if not used:
        return replace(rates, note=NOT_MEASURED)
    brief = " briefly" if any(record.get("brief") for record in used) else ""
    note = f"measured{brief} {min(record['date'] for record in used)}"
    missing += [name.split()[0] for name in sorted(folders) if name not in remembered]
    if missing:
        note += f", default rates for {' and '.join(missing)} (not measured); {SUGGESTION_FOLDER}"
    return replace(rates, note=note)


def _of_device(usual: Rates, found: dict[str, Any]) -> Rates:
    """Return the rates of a device with those that are remembered of it, but for kernels and folders."""

    def speed(name: str, otherwise: float, times: int = 1) -> float:
        measured = sound(found.get(f"{name}_bytes_per_second"))
        return times * measured if measured else otherwise

    return replace(
        usual,
        upload=speed("upload", usual.upload, usual.at_once),
        download=speed("download", usual.download, usual.at_once),
        touch=speed("touch", usual.touch),
        piece_seconds=float(found.get("piece_seconds", usual.piece_seconds)),
        start=float(found.get("start_seconds", usual.start)),
    )


def _folder(usual: Rates, system: str, found: dict[str, Any]) -> Folder:
    """Return the rates of a file system: those that are remembered and sound, and default ones for others.
    What is in memory, as files or in the page cache, is read and written as fast as threads can copy."""
    threads = min(cores(), THREADS)
    cached = max(usual.read, COPIED * threads)
    memory = system.split()[0] in IN_MEMORY
    rates = {
        "read": cached if memory else usual.read,
        "cached": cached,
        "write": max(usual.write, cached / 3) if memory else usual.write,
        "decode": DECODED * threads,
    }
    suffix = "_bytes_per_second"
    decoded = [name.removesuffix(suffix) for name in found if name.startswith(DECODE)]
    names = *rates, "write_cached", *decoded
    measured = {name: sound(found.get(name + suffix)) for name in names}
    rates |= {name: value for name, value in measured.items() if value}
    rates.setdefault("write_cached", rates["write"])
    shares = SHARED_MEMORY if memory else usual.entering
    seconds = {"piece_seconds": 0.0, "begin_seconds": 0.0, "create_seconds": 0.0}
    ways = {"turns": usual.turns, "entering": shares, "leaving": shares} | seconds
    return ways | rates | {name: float(found[name]) for name in ways if name in found}


def _of_folders(
    rates: Rates, folders: dict[Path, Folder], inputs: list[Place], c: Place, codecs: set[str]
) -> Rates:
    """Return the rates with those of the folders in which the inputs and C lie. Several inputs are read at
    the rate at which all of them take as long as they do each at its own."""
    seconds, total, cached, costs, decoding, entering = 0.0, 0, 0.0, [0.0], [math.inf], [rates.entering]
    for place, nbytes in inputs:
        if place is None:
            continue
        folder = folders[place]
        share = cached_share(place) if folder["read"] < folder["cached"] else 1.0
        seconds += nbytes * ((1 - share) / folder["read"] + share / folder["cached"])
        total, cached = total + nbytes, cached + share * nbytes
        costs.append(folder["piece_seconds"])
        decoding += [folder.get(DECODE + codec, folder["decode"]) for codec in codecs or [""]]
        entering.append(folder["entering"])
    if total:
        rates = replace(
            rates, read=total / seconds, piece_seconds=rates.piece_seconds + max(costs), decode=min(decoding),
            entering=max(entering), cached=cached / sum(nbytes for _, nbytes in inputs),
        )  # fmt: skip
    target, size = c
    if target is None:
        return rates
    folder = folders[target]
    written = folder["write" if size >= DIRECT_BYTES else "write_cached"]
    begin = min(folder["create_seconds"], folder["begin_seconds"])
    start = max(rates.start, folder["begin_seconds"] - begin)  # of the device alone, and of all that is begun
    return replace(rates, write=written, leaving=folder["leaving"], start=start, begin=begin)


def sound(rate: Any) -> float:
    """Return a number of bytes per second, if it is one that the cores of this machine can move; else 0.0.
    Also the bytes of a disk and of a network pass through memory."""
    possible = isinstance(rate, int | float) and 0 < rate <= cores() * MOST_BYTES
    return float(rate) if possible else 0.0


def unpacking(found: dict[str, Any]) -> dict[str, float]:
    """Return the sound rates at which a device decodes parts of chunks, by compressor, of what is remembered
    of it."""
    known = found.get(UNPACK_RATES)
    rates = {codec: sound(rate) for codec, rate in known.items()} if isinstance(known, dict) else {}
    return {codec: rate for codec, rate in rates.items() if rate}


def fresh_rate(nbytes: int, first: float, again: float) -> float:
    """Return the bytes per second at which fresh memory can be had, from the seconds of writing to it for the
    first time and once more. The system clears each page, which takes no less time than to write to it."""
    return nbytes / max(again, first - again)


def today() -> str:
    """Return the date under which rates are remembered."""
    return datetime.now(UTC).date().isoformat()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def possible(flops: Any, most: Callable[[str, str], float], only: str | None = None) -> dict[str, Any]:
    """Return those remembered rates of kernels, by their keys, that a device can reach. `most`:
    `Device.most_flops` of the device. `only`: the key that is looked at; None for all."""
    found = {}
    for key, speed in flops.items() if isinstance(flops, dict) else ():
        if only not in (None, key):
            continue
        with suppress(KeyError, TypeError, ValueError):  # in a file of another version
            kernel, panel = key.split()[:2]
            if 0 < speed["flops"] <= most(kernel, panel):
                found[key] = speed
    return found


def kernel_key(arithmetic: Arithmetic) -> str:
    """Return the key under which a kernel's rate is remembered, such as `blas float32`."""
    panel, block = arithmetic.panel.name, arithmetic.block.name
    return f"{arithmetic.kernel} {panel}" + (f" to {block}" if block != panel else "")


def nearest_folder(place: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    while not os.path.exists(place) and place != place.parent:  # Path.exists raises where a name is too long
        place = place.parent
    return place


def file_system(place: Path) -> str:
    """Return type and device number of the file system on which a folder lies, or will lie."""
    device = os.stat(nearest_folder(place)).st_dev
    return f"{type_of(device) or 'unknown'} {os.major(device)}:{os.minor(device)}"


def described(place: Path) -> dict[str, str]:
    """Describe the file system on which a folder lies, for a report."""
    system = file_system(place)
    return {"mounted": mount_point(system), "type": system.split()[0]}


def mount_point(system: str) -> str:
    """Return where a file system is mounted; empty where it is not."""
    return mounted().get(system.split()[1], ("", ""))[1]


def cached_share(folder: Path) -> float:
    """Estimate from samples which share of an array the page cache holds; 0 where the system does not tell,
    and 1 of files in memory."""
    with suppress(OSError):
        if in_memory(os.stat(folder).st_dev):
            return 1.0
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
        if not entry.is_symlink():  # which may lead anywhere, also back
            found += _sample(entry) if entry.is_dir() else [entry]
    return found


def _is_cached(path: Path) -> bool:
    """Whether the page cache holds the page in the middle of a file; asking does not load it. The system does
    not tell for a file that this process may not write. False for what is no file: a pipe would be waited
    for."""
    if not os.access(path, os.W_OK):
        return False
    try:
        with open(open_file(path)[0], "rb") as file, mmap(file.fileno(), 0, access=ACCESS_COPY) as pages:
            held = c_ubyte(0)
            at = addressof(c_char.from_buffer(pages)) + len(pages) // 2 // PAGESIZE * PAGESIZE
            return _mincore is not None and _mincore(at, 1, byref(held)) == 0 and bool(held.value & 1)
    except (OSError, ValueError):
        return False
