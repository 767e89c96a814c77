"""System calls that do not give up the interpreter, for files in memory.

`os.open` and its like release the interpreter's lock, as befits a disk. A file in memory is opened in a
microsecond; but beside twenty readers and writers who want the lock, whoever gives it up for that microsecond
sleeps until its turn comes, 35 µs and more on a virtual machine, and a chunk takes four such calls to be read
and seven to be written. Those here keep it, as `devices.driver` does. What copies a chunk's bytes goes
through `os`.

Linux only; elsewhere `THERE` is False. Errors are OSError, as `os` has them.
"""

import ctypes
import os
import struct
from typing import NamedTuple

_AT_FDCWD, _AT_EMPTY_PATH, _BASIC, _F_DUPFD_CLOEXEC = -100, 0x1000, 0x7FF, 1030
_STATX = struct.Struct("=28xH10xQ64xqI12xII")
"""Of struct statx, which is the same everywhere: mode, size, time of the last change, device."""


class Stat(NamedTuple):
    """What `os.stat` says, as far as it is asked for."""

    st_mode: int
    st_size: int
    st_mtime_ns: int
    st_dev: int


def _functions() -> ctypes.PyDLL | None:
    try:
        libc = ctypes.PyDLL(None, use_errno=True)
        libc.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
        libc.open.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint)
        libc.write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        libc.write.restype = ctypes.c_ssize_t
    except (OSError, AttributeError, TypeError):
        return None
    return libc


_libc = _functions()
THERE = _libc is not None


def open_(path: str | os.PathLike[str], flags: int, mode: int = 0) -> int:
    """As `os.open`."""
    return _done("open", path, os.fsencode(path), flags | os.O_CLOEXEC, mode)


def again(fd: int) -> int:
    """The same file by another number, as `os.dup` gives it."""
    return _done("fcntl", None, fd, _F_DUPFD_CLOEXEC, 0)


def close(fd: int) -> None:
    """As `os.close`."""
    _done("close", None, fd)


def stat(file: str | os.PathLike[str] | int) -> Stat:
    """As `os.stat`."""
    found = ctypes.create_string_buffer(256)
    if isinstance(file, int):
        _done("statx", None, file, b"", _AT_EMPTY_PATH, _BASIC, found)
    else:
        _done("statx", file, _AT_FDCWD, os.fsencode(file), 0, _BASIC, found)
    mode, size, seconds, nanoseconds, major, minor = _STATX.unpack_from(found)
    return Stat(mode, size, seconds * 10**9 + nanoseconds, os.makedev(major, minor))


def write(fd: int, data: bytes) -> int:
    """As `os.write`: for few bytes."""
    return _done("write", None, fd, data, len(data))


def _done(name: str, path: str | os.PathLike[str] | None, *args: object) -> int:
    result: int = getattr(_libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
