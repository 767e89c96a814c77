"""Compiles transfers.c and listing.c with the C compiler of the machine, and loads what they make.

Installing the package compiles it (hatch_build.py, which loads this file by its path, so it imports nothing
but the standard library). Where there is no compiler the package works without it, and reads files in memory
more slowly.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("transfers.c", "listing.c"))
LIBRARY = Path(__file__).with_name("_transfers.so")
_VERSION = 10
"""What `transfers_version` returns. A library that an older source has left behind is not used."""


def compiler() -> str | None:
    """Return the C compiler: what the environment variable CC names, or cc."""
    return shutil.which(os.environ.get("CC") or "cc")


def compile_library() -> Path | None:
    """Compile the library beside its source. Returns its path; None where that cannot be done."""
    found = compiler()
    if found is None or sys.platform != "linux":
        return None
    made = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}")
    flags = "-std=c11", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"
    try:
        done = subprocess.run([found, *flags, "-o", made, *SOURCES], capture_output=True, text=True)
        if done.returncode:
            print(f"{LIBRARY.name} does not compile, and is left out: {done.stderr}", file=sys.stderr)
            return None
        made.replace(LIBRARY)  # another installation may be under way
    except OSError as error:
        print(f"{LIBRARY.name} is left out: {error}", file=sys.stderr)
        return None
    finally:
        with suppress(OSError):
            made.unlink(missing_ok=True)
    return LIBRARY


def load() -> tuple[ctypes.PyDLL, ctypes.CDLL] | None:
    """Return the library for calls that keep the interpreter's lock, and for those that give it up; None
    where it is not there."""
    try:
        quick, slow = ctypes.PyDLL(str(LIBRARY)), ctypes.CDLL(str(LIBRARY))
        if quick.transfers_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        return None
    number, memory, text = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
    quick.transfers_start.argtypes = text, text, number, ctypes.c_int, memory, number, number
    quick.transfers_start.restype = memory
    for library in (quick, slow):
        library.transfers_ended.argtypes = library.transfers_end.argtypes = (memory,)
        library.transfers_make.argtypes = text, text, number, ctypes.c_int, memory
        library.listing_files.argtypes = text, number, text, number, *(memory,) * 4
        library.listing_close.argtypes, library.listing_close.restype = (memory,), None
        library.listing_rename.argtypes = text, number, memory
        library.listing_files.restype = library.listing_rename.restype = number
    return quick, slow


@cache
def loaded() -> tuple[ctypes.PyDLL, ctypes.CDLL] | None:
    """Return what `load` has returned to the first who asked."""
    return load()


if __name__ == "__main__":
    print(compile_library() or f"{LIBRARY.name} was not compiled: there is no C compiler")
