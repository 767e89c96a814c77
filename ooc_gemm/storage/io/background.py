"""Reads and writes of files in memory that go on in threads of the C library's: POSIX asynchronous I/O.

A thread of Python's that copies 16 MiB comes back with cold caches to an interpreter that twenty others want:
a chunk takes it several times as long as one thread that does nothing but begin and end what others copy.
Where a disk is the slower part that does not matter; where files lie in memory it is what matters. For the
same reason files are opened, closed and looked at here without giving up the interpreter, as `driver` does:
whoever gives it up for a microsecond waits for a turn to get it back.

`THERE` is False where there is no glibc, and in processes that were forked.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...support.buffers import PAGE, Bytes
from ...support.intervals import ceil_div, ranges, round_up

_CONTROL = np.dtype(
    {
        "names": ["file", "operation", "buffer", "size", "notify", "error", "moved", "offset"],
        "formats": ["i4", "i4", "u8", "u8", "i4", "i4", "i8", "i8"],
        "offsets": [0, 4, 16, 24, 44, 112, 120, 128],
        "itemsize": 168,
    }
)
"""Layout of glibc's struct aiocb where pointers take 8 bytes. `error` and `moved` are what `aio_error` and
`aio_return` return: EINPROGRESS until the end, and the bytes that were moved."""
Array = npt.NDArray[Any]
_READ, _WRITE, _DO_NOT_WAIT, _NOBODY = 0, 1, 1, 1
"""LIO_READ, LIO_WRITE, LIO_NOWAIT, SIGEV_NONE."""
_F_DUPFD_CLOEXEC = 1030
_AT_FDCWD, _SIZE_AND_TIME = -100, 0x240
"""Constants of statx: AT_FDCWD, and STATX_SIZE | STATX_MTIME."""
_STAT = struct.Struct("=40xQ64xqI132x")
"""Layout of struct statx: the size, and seconds and nanoseconds of the last change."""
_READ_ONLY = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_THREADS = 16
"""Most threads of the library that copy; glibc's default is 20. They are enough for the speed of memory (98
GB/s of files beside four H200), and few enough that all have work: starting a read then wakes no thread, and
no thread waits for the library's lock. With 32 threads, starting took 80 µs for each chunk."""


def _library() -> tuple[ctypes.PyDLL, ctypes.CDLL] | None:
    try:
        if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or "") or ctypes.sizeof(ctypes.c_void_p) != 8:
            return None
        quick, slow = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None)
        quick.open.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint)
        quick.lio_listio.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        quick.aio_error.argtypes = (ctypes.c_void_p,)
        quick.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
        quick.write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        quick.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong)
        quick.write.restype = quick.pread.restype = ctypes.c_ssize_t
        slow.aio_suspend.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        quick.aio_init((ctypes.c_int * 8)(_THREADS, 2 * _THREADS, 0, 0, 0, 0, 1, 0))
    except (AttributeError, ValueError, OSError, TypeError):
        return None
    return quick, slow


_found = _library()
THERE = _found is not None


def _leave() -> None:
    """Forget the library's threads in a forked process, which does not have them."""
    global THERE, _found
    THERE, _found = False, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)


class Job(NamedTuple):
    """A part of a file: as many rows of bytes as `rows` says, which begin `apart` bytes from each other. In
    memory they follow each other without a gap."""

    path: str
    offset: int
    """Bytes before the first row."""
    nbytes: int
    """Bytes of each row."""
    rows: int = 1
    apart: int = 0


class Transfer:
    """A transfer of bytes between a buffer and files that has been started."""

    def __init__(self, jobs: Sequence[Job], flags: int, buffer: Bytes, parts: int = 1):
        """One file after the other, each in so many parts at once. `flags`: of `open`; where they say so, it
        is a write. Raises OSError, also in a process that was forked since the folder was looked at."""
        self._quick, self._slow = quick, _ = _there(jobs[0].path)
        cuts = [_cuts(job.nbytes, job.rows, job.apart, parts) for job in jobs]
        self._buffer = buffer  # until all is there
        self._controls = controls = np.zeros(sum(len(some.sizes) for some in cuts), _CONTROL)
        self._files = list[int]()
        controls["operation"] = _WRITE if flags & os.O_WRONLY else _READ
        controls["notify"] = _NOBODY
        at, memory, flags = 0, buffer.ctypes.data, flags | os.O_CLOEXEC
        try:
            for job, some in zip(jobs, cuts, strict=True):
                path = job.path
                files = [_done(quick.open(os.fsencode(path), flags, 0o666), path)]
                self._files.append(files[0])
                for _ in range(some.files - 1):  # those of one number are made one after the other
                    files.append(_done(quick.fcntl(files[0], _F_DUPFD_CLOEXEC, 0), path))
                    self._files.append(files[-1])
                part = controls[at : at + len(some.sizes)]
                part["file"] = np.take(files, some.file)
                part["buffer"] = some.starts + np.uint64(memory)
                part["size"] = some.sizes
                part["offset"] = some.offsets + job.offset
                at += len(part)
                memory += job.rows * job.nbytes
        except OSError:
            self._close()
            raise
        self._list = np.arange(len(controls), dtype=np.uint64)
        self._list *= np.uint64(_CONTROL.itemsize)
        self._list += np.uint64(controls.ctypes.data)
        quick.lio_listio(_DO_NOT_WAIT, self._list.ctypes.data, len(controls), None)

    def end(self) -> bool:
        """Wait for the end of this transfer, and return whether all bytes were moved. It must be called
        exactly once, whatever happens."""
        controls = self._controls
        while len(waiting := np.flatnonzero(controls["error"] == errno.EINPROGRESS)):
            self._slow.aio_suspend(self._list[waiting[-1] :].ctypes.data, 1, None)
        # The library's lock is held until it is done with a part, and this call takes it.
        self._quick.aio_error(int(self._list[-1]))
        self._close()
        return not controls["error"].any() and bool((controls["moved"] == controls["size"]).all())

    def _close(self) -> None:
        for file in self._files:
            self._quick.close(file)


def read(jobs: Sequence[Job], buffer: Bytes) -> bool:
    """Fill a buffer with short parts of files in memory on the calling thread, and return whether it is
    full."""
    at, opened, file = buffer.ctypes.data, "", -1
    try:
        quick, _ = _there(jobs[0][0])
        for path, offset, nbytes, *_ in jobs:
            if path != opened:
                if file >= 0:
                    quick.close(file)
                    file = -1
                file, opened = _done(quick.open(os.fsencode(path), _READ_ONLY, 0), path), path
            if quick.pread(file, at, nbytes, offset) != nbytes:
                return False
            at += nbytes
        return True
    except OSError:
        return False
    finally:
        if file >= 0:
            quick.close(file)


def stamp(path: str) -> tuple[int, int]:
    """Return the size of a file in bytes, and the time of its last change in ns. Raises OSError."""
    quick, _ = _there(path)
    memory = ctypes.create_string_buffer(_STAT.size)
    _done(quick.statx(_AT_FDCWD, os.fsencode(path), 0, _SIZE_AND_TIME, memory), path)
    size, seconds, ns = _STAT.unpack(memory)
    return size, seconds * 10**9 + ns


def append(file: int, data: bytes, path: str) -> None:
    """Write to a file in memory that is open for appending. Raises OSError."""
    quick, _ = _there(path)
    while data:
        data = data[_done(quick.write(file, data, len(data)), path) :]


def _there(path: str) -> tuple[ctypes.PyDLL, ctypes.CDLL]:
    if _found is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
    return _found


class _Cuts(NamedTuple):
    """How a job is cut in parts."""

    starts: Array
    """Bytes of the job before each part, as they lie in memory."""
    sizes: Array
    offsets: Array
    """Bytes from the first row to each part in the file."""
    file: Array
    """Which descriptor each part is read by: parts of one are read one after the other."""
    files: int
    """Number of descriptors."""


@lru_cache(maxsize=1024)
def _cuts(nbytes: int, rows: int, apart: int, parts: int) -> _Cuts:
    """Cut a job: in as many parts as are made at once, of whole pages except for the last, or in its rows."""
    if rows > 1:
        number, files = np.arange(rows, dtype=np.int64), min(parts, rows)
        starts = (number * nbytes).astype("u8")
        size = np.full(rows, nbytes, np.uint64)
        return _Cuts(starts, size, number * apart, number * files // rows, files)
    cuts = list(ranges(nbytes, round_up(ceil_div(nbytes, parts), PAGE)))
    starts, stops = np.array(cuts, np.int64).reshape(-1, 2).T
    return _Cuts(starts.astype("u8"), (stops - starts).astype("u8"), starts, np.arange(len(cuts)), len(cuts))


def _done(result: int, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
