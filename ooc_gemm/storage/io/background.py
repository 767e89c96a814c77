"""Reads and writes of files in memory that go on in threads without the interpreter (transfers.c).

A thread of Python's that copies 16 MiB comes back with cold caches to an interpreter that twenty others want:
a chunk takes it several times as long as one thread that does nothing but begin and end what others copy.
Where a disk is the slower part that does not matter; where files lie in memory it is what matters. For the
same reason files are looked at here without giving up the interpreter, as `driver` does: whoever gives it up
for a microsecond waits for a turn to get it back.

`THERE` is False where the library is not there (`native.py`), and in processes that were forked.
"""

import ctypes
import errno
import os
import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from ...support.buffers import Bytes
from . import native

_AT_FDCWD, _SIZE_AND_TIME = -100, 0x240
"""Constants of statx: AT_FDCWD, and STATX_SIZE | STATX_MTIME."""
_STAT = struct.Struct("=40xQ64xqI132x")
"""Layout of struct statx: the size, and seconds and nanoseconds of the last change."""
_READ_ONLY = os.O_RDONLY | os.O_NONBLOCK
THREADS = min(24, max(16, 3 * (os.cpu_count() or 1) // 8))
"""Most threads that copy. They are enough for the speed of memory (beside four H200 and 64 cores, 16 are 8 %
slower than 24, and 48 as fast), and few enough that all have work: starting a read then wakes no thread."""
STEP_BYTES = 2 << 20
"""Most bytes that a thread reads before it sends them on to a device, or has from a device before it writes
them: few enough for caches of processors, and enough for what each step costs beside them, some 10 µs in
which no other thread calls the driver (32768³ float32 on an H200, two processes: .389 and .395 s, with steps
of 1 MiB .400 and .403)."""
SHORT_BYTES = 1 << 20
"""What is shorter than half of this, or of a step, goes to a device from the buffer if that is pinned. Also a
constant of transfers.c."""
TASK_BYTES = 1 << 20
"""Bytes of short jobs that a thread is woken for. Where it was woken for a quarter of them, chunks of 64 KiB
took 23 µs of processor time instead of 20 (two cores, 2026-11-29)."""


class _Libraries(NamedTuple):
    quick: ctypes.PyDLL
    """transfers.c, for calls that keep the interpreter's lock."""
    slow: ctypes.CDLL
    """The same for calls that give it up."""
    system: ctypes.PyDLL
    """The C library, for calls that keep the lock."""


def _libraries() -> _Libraries | None:
    found = native.loaded()
    if found is None:
        return None
    try:
        system = ctypes.PyDLL(None, use_errno=True)
        system.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
        system.write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        system.write.restype = ctypes.c_ssize_t
    except AttributeError:
        return None
    found[0].transfers_limit(THREADS)
    return _Libraries(*found, system)


_found = _libraries()
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
    """Bytes from row to row; the size of a file that comes from a device, which ends with zeros."""


_NUMBERS = itemgetter(1, 2, 3, 4)
"""Returns all fields of a job but the path."""


class Transfer:
    """A transfer of bytes between a buffer and files that has been started."""

    def __init__(
        self,
        jobs: Sequence[Job],
        flags: int,
        buffer: Bytes | None,
        parts: int = 1,
        device: bytes | None = None,
    ):
        """`flags`: of `open`; where they say so, it is a write. `parts`: each job is cut in so many, at once.
        `device`: the memory of a device (`Device` of transfers.c) to which rows go on from the buffer, or
        from which files are written, which needs no buffer. Raises OSError where there are no threads, also
        in a process that was forked since the folder was looked at."""
        self._libraries = _there(jobs[0].path)
        self._kept = buffer, *(given := _packed(jobs))  # until all is there
        memory = None if buffer is None else buffer.ctypes.data
        self._transfer = self._libraries.quick.transfers_start(
            *given, len(jobs), flags, memory, parts, _together(jobs, buffer, parts), device
        )
        if self._transfer is None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), jobs[0].path)

    def end(self) -> bool:
        """Wait for the end of this transfer, and return whether all bytes were moved. It must be called
        exactly once, whatever happens."""
        quick, slow, _ = self._libraries
        library = quick if quick.transfers_ended(self._transfer) else slow
        return not library.transfers_end(self._transfer)


def _together(jobs: Sequence[Job], buffer: Bytes | None, parts: int) -> int:
    """Return how many jobs a thread carries out one after the other: several where they are short, which have
    `TASK_BYTES` at most."""
    if parts > 1 or buffer is None:
        return 1
    each = max(job.nbytes * job.rows for job in jobs)
    return 1 if 2 * each >= SHORT_BYTES else max(1, TASK_BYTES // max(1, each))


def places_bytes(step: int) -> int:
    """Return the bytes of the places of `step` bytes that threads have, and of one from which a copy is
    timed."""
    return (4 * THREADS + 1) * step


def in_places(jobs: Sequence[Job], buffer: Bytes, parts: int, step: int, line: int) -> bool:
    """Whether what is read for a device goes there from places of threads, also the rest of it that fills
    less than half of one. Longer lines than a place, and short pieces, go there from the buffer.

    parts: as of `Transfer`. step: bytes of a place; 0 where there are none. line: bytes of a row.
    """
    nbytes, least = len(buffer) // (len(jobs) * parts), min(step, SHORT_BYTES)
    if _together(jobs, buffer, parts) > 1:
        return step >= TASK_BYTES and least <= 2 * len(buffer)
    return 0 < least <= 2 * nbytes and line <= step


def read(jobs: Sequence[Job], buffer: Bytes, quick: bool) -> bool:
    """Fill a buffer with parts of files on the calling thread, and return whether it is full. `quick`: keep
    the interpreter meanwhile."""
    try:
        libraries = _there(jobs[0].path)
    except OSError:
        return False
    library = libraries.quick if quick else libraries.slow
    return not library.transfers_make(*_packed(jobs), len(jobs), _READ_ONLY, buffer.ctypes.data)


def _packed(jobs: Sequence[Job]) -> tuple[bytes, bytes]:
    """Return the paths of jobs, and their numbers, as transfers.c wants them."""
    paths = os.fsencode("\0".join([job.path for job in jobs])) + b"\0"
    return paths, array("q", chain.from_iterable(map(_NUMBERS, jobs))).tobytes()


def stamp(path: str) -> tuple[int, int] | None:
    """Return the size of a file in bytes, and the time of its last change in ns; None where there is no file.
    Raises OSError."""
    system, memory = _there(path).system, ctypes.create_string_buffer(_STAT.size)
    if system.statx(_AT_FDCWD, os.fsencode(path), 0, _SIZE_AND_TIME, memory) < 0:
        if ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR):
            return None
        _done(-1, path)
    size, seconds, ns = _STAT.unpack(memory)
    return size, seconds * 10**9 + ns


def append(file: int, data: bytes, path: str) -> None:
    """Write to a file in memory that is open for appending. Raises OSError."""
    system = _there(path).system
    while data:
        data = data[_done(system.write(file, data, len(data)), path) :]


def _there(path: str) -> _Libraries:
    if _found is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
    return _found


def _done(result: int, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
