"""Chunks in local files: read into a slot, past the page cache where that is faster; written whole or not
at all.

    file ──► slot                   O_DIRECT, where the place in the file and the slot are aligned
    file ──► page cache ──► slot    what the page cache already has, small and unaligned parts, and
                                    file systems that cannot do otherwise

The page cache costs a copy and a page allocated for every page read: half of what a fast disk delivers. It is
worth that only for what is there already.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import TracebackType

import numpy as np

from ...support.buffers import PAGE, Bytes
from ...support.intervals import round_up
from ...support.onward import Inward, Onward
from . import background
from .background import Job

DIRECT = getattr(os, "O_DIRECT", 0)
NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
LEAST_DIRECT = 256 << 10
"""Fewest bytes that are read past the page cache. Shorter reads gain from its read-ahead."""

PARTS, LEAST_PART = 4, 1 << 20
"""Of a chunk in memory as many are read at once, each by a thread: so there are few chunks on their way, and
what was read is still in the caches of the CPU when the device comes for it. And their size, at least."""

SHORT_PART, FEW_CORES = 64 << 10, 4
"""Parts of files in memory up to this size are copied by the thread that asks for them where there are few
cores: that takes less CPU time than to let others copy them (16 of 64 KiB: 97 µs instead of 120 to 140; 2
cores). With more cores others do, which keeps that thread for a third of the time."""

DIRECT_READS = 6
"""Most direct reads under way. A few keep a disk busy (16 threads are 7 to 13 % slower than 4). With more,
readers that also decode wait for the disk at the same time and then leave it idle at the same time."""


class Queue:
    """Lets `count` threads in at a time, in the order in which they came. A semaphore lets whoever has just
    left in again before those who wait: then the piece that is needed first may be read last, while all
    slots fill up behind it and every reader stands still (seen in timelines of cold reads)."""

    def __init__(self, count: int):
        self._free = count
        self._waiting: deque[threading.Lock] = deque()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1


_turns = Queue(DIRECT_READS)
_buffered: set[int] = set()
"""File systems (`st_dev`) that cannot read and write past the page cache."""
_blind: set[int] = set()
"""File systems that do not tell what the page cache has."""
IN_MEMORY = "tmpfs", "ramfs"
"""File systems that keep their files in memory."""


def mounted() -> dict[str, tuple[str, str, str]]:
    """Return the mounted file systems: device number (`major:minor`) → type, mount point and options."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    found: dict[str, tuple[str, str, str]] = {}
    for line in lines:
        fields = line.split()
        found.setdefault(fields[2], (fields[fields.index("-") + 1], fields[4], fields[-1]))
    return found


@cache
def type_of(system: int) -> str:
    """Return the type of a file system (`st_dev`), such as ext4; empty where it is not known."""
    return mounted().get(f"{os.major(system)}:{os.minor(system)}", ("",))[0]


@cache
def in_memory(system: int) -> bool:
    """Whether a file system (`st_dev`) keeps its files in memory. Then reads past the page cache make no
    sense, although tmpfs takes O_DIRECT, and more readers are faster (H200 machine: 6 readers 38 GB/s, 16 59,
    64 82)."""
    return type_of(system) in IN_MEMORY


def chunks_at_once(readers: int, device: bool = False) -> int:
    """Return how many chunks of files in memory are read at a time, with so many threads. `device`: twice as
    many go to a device with memory of its own, by themselves (four H200: 7 % faster)."""
    return max(2, (2 if device else 1) * readers // PARTS)


def writes_at_once(writers: int) -> int:
    """Return for how many chunks there is room that are written to files in memory, where a disk is written
    to by so many threads: the system makes new pages with one core for each file (16 cores: 16 GB/s with 6
    under way, 19 with 8, 25 with 12, 31 with 16). A quarter of them are on their way from a device."""
    busy = _cores() + _cores() // 3
    return max(writers + writers // 2, min(2 * writers + writers // 2, busy))


def in_background(folder: str | os.PathLike[str]) -> bool:
    """Whether files in a folder are read and written in the background: those in memory are, where the system
    supports it."""
    try:
        return background.THERE and in_memory(os.stat(folder).st_dev)
    except OSError:
        return False


def room(offset: int, size: int) -> int:
    """Return the bytes of memory that `read_range` needs."""
    return round_up(offset % PAGE + size, PAGE)


_COLUMNS = struct.Struct("=6q")
"""The end of `Device` of transfers.c."""
NONBLOCK, NOFOLLOW = os.O_NONBLOCK, os.O_NOFOLLOW


def open_file(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """Open a file for reading, and return its descriptor and status. Raises OSError, also for a folder, a
    device, which may have no end, and a pipe, where `open` would wait for a writer."""
    fd = os.open(path, os.O_RDONLY | NONBLOCK)
    try:
        found = os.fstat(fd)
        check_is_file(found)
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def check_is_file(found: os.stat_result) -> None:
    """Raise OSError for anything that is not a regular file."""
    if not stat.S_ISREG(found.st_mode):
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, not a file")


def check(path: str, most: int) -> None:
    """Raise OSError or ValueError where there is something other than a file of at most so many bytes."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    check_is_file(found)
    if found.st_size > most:
        raise ValueError(f"it holds {found.st_size} bytes, more than {most}")


def read_small(path: str | os.PathLike[str], most: int) -> bytes | None:
    """Return a file's contents; `most` + 1 bytes of a longer file, None where there is no file. Raises
    OSError."""
    try:
        fd, _ = open_file(path)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    with open(fd, "rb") as file:
        return file.read(most + 1)


class ChunkFile:
    """A chunk's file that is open for reading (`Readable`)."""

    def __init__(self, path: str, direct: bool = True):
        """Open the file. `direct`: read past the page cache where that is faster. Raises OSError."""
        self._fd, found = open_file(path)
        self.size = found.st_size
        self._system = found.st_dev
        self._direct = bool(DIRECT) and direct and not in_memory(self._system)

    def __enter__(self) -> "ChunkFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read(self, into: Bytes, offset: int) -> None:
        """Raises OSError, also where the file ends before `into` is full."""
        self._read(into, offset, len(into))

    def read_range(self, into: Bytes, offset: int, size: int) -> Bytes:
        """Reads whole pages into `into`, which has `room` for them, and returns the wanted bytes there.
        Raises OSError."""
        start = offset // PAGE * PAGE
        stop = offset - start + size
        self._read(into[: round_up(stop, PAGE)], start, stop)
        return into[offset - start : stop]

    def _read(self, into: Bytes, offset: int, need: int) -> None:
        """Read at least `need` bytes: whole pages past the page cache, the rest through it."""
        done = 0
        aligned = not (offset % PAGE or into.ctypes.data % PAGE)
        if self._direct and aligned and need >= LEAST_DIRECT and not self._is_cached(into, offset, need):
            done = self._read_direct(into[: len(into) // PAGE * PAGE], offset, need)
        while done < need:
            got = os.preadv(self._fd, [into.data[done:]], offset + done)
            if got == 0:
                raise OSError("the file became shorter while it was read")
            done += got

    def _read_direct(self, into: Bytes, offset: int, need: int) -> int:
        """Read past the page cache, and return how many bytes came; 0 where the file system cannot do it."""
        if not _turn(self._fd, self._system, DIRECT):
            return 0
        done = 0
        try:
            with _turns:
                while done < min(need, len(into)) and done % PAGE == 0:
                    got = os.preadv(self._fd, [into.data[done:]], offset + done)
                    if got == 0:
                        break
                    done += got
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _buffered.add(self._system)
        if done < need:
            _turn(self._fd, self._system, 0)
        return done

    def _is_cached(self, into: Bytes, offset: int, need: int) -> bool:
        """Whether the page cache holds this part of the file, judged by one page. Asking for a page makes the
        system read it, so another page is asked for each time, and never the first, which triggers
        read-ahead."""
        if self._system in _blind or self._system in _buffered or not NOWAIT:
            return False
        at = random.randrange(1, need // PAGE) * PAGE
        try:
            return os.preadv(self._fd, [into.data[at : at + PAGE]], offset + at, NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            _blind.add(self._system)
            return False


def _turn(fd: int, system: int, flag: int) -> bool:
    """Turn direct access on (flag DIRECT) or off (0), and return whether that worked."""
    if flag and system in _buffered:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flag)
    except OSError:
        _buffered.add(system)
        return False
    return True


_MAKE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NOFOLLOW | NONBLOCK


def write(path: str, data: Bytes | bytes, direct: bool = False) -> None:
    """Write `data` to a new file, or replace the contents of an existing one; links are not followed.
    `direct`: past the page cache where possible. Raises OSError; then nothing is left behind."""
    fd = os.open(path, _MAKE, 0o666)
    try:
        try:
            view, done = data.data if isinstance(data, np.ndarray) else memoryview(data), 0
            if direct and DIRECT and isinstance(data, np.ndarray) and data.ctypes.data % PAGE == 0:
                done = _write_direct(fd, view[: len(view) // PAGE * PAGE])
            while done < len(view):
                done += os.write(fd, view[done:])
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def read(jobs: Sequence[Job], into: Bytes) -> bool:
    """Fill `into` with short parts of files, through the page cache and with as few calls as possible.
    Returns whether it is full; where it is not, `ChunkFile` says what the matter is."""
    if background.THERE:
        return background.read(jobs, into, quick=False)
    data, done, opened, fd = into.data, 0, "", -1
    try:
        for path, offset, nbytes, *_ in jobs:
            if path != opened:
                if fd >= 0:
                    os.close(fd)
                    fd = -1
                fd, opened = os.open(path, os.O_RDONLY | NONBLOCK), path
            if os.preadv(fd, [data[done : done + nbytes]], offset) != nbytes:
                return False
            done += nbytes
        return True
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)


@cache
def _cores() -> int:
    """Return how many cores this process may use. Each piece asks for it."""
    return len(os.sched_getaffinity(0))


def start_read(
    jobs: Sequence[Job], into: Bytes, onward: Onward | None = None, columns: tuple[int, int, int] = (0, 0, 0)
) -> Callable[[], bool]:
    """Start to fill `into` in the background, or leave short parts of files to the function returned. That
    must be called, whatever happens: it waits for the end, and returns whether `into` is full. Raises
    OSError.

    `onward`: where the rows of a piece go on to from there, unless the function returned fills `into`.
    `columns`: bytes of a row in `into`, how many of them are skipped, and how many go on.
    """
    if _cores() <= FEW_CORES and len(into) <= SHORT_PART * len(jobs) and all(job.rows == 1 for job in jobs):
        return partial(background.read, jobs, into, quick=True)
    parts = max(1, min(PARTS, len(into) // (len(jobs) * LEAST_PART)))
    if onward and not onward.pinned and not background.in_places(jobs, into, parts, onward.step, columns[0]):
        onward = None
    packed = onward.packed + _COLUMNS.pack(*columns, onward.step, onward.pinned, 0) if onward else None
    transfer = background.Transfer(jobs, os.O_RDONLY | NONBLOCK, into, parts, packed)
    if onward:
        onward.taken = True
    return transfer.end


def start_write(path: str, data: Bytes) -> Callable[[], bool]:
    """Start to write a file in the background. The function returned must be called, whatever happens: it
    waits for the end, and returns whether the file is complete. Raises OSError."""
    return background.Transfer([Job(path, 0, len(data))], _MAKE, data).end


def bring(paths: Sequence[str], inward: Inward) -> Callable[[], bool]:
    """Start to write a file for each of the parts of C that a device has, as of `start_write`."""
    (rows, width), (held_rows, held) = inward.shape, inward.held
    packed = inward.packed + _COLUMNS.pack(width, 0, held, inward.step, 0, inward.apart)
    jobs = [Job(path, 0, held_rows * width, apart=rows * width) for path in paths]
    return background.Transfer(jobs, _MAKE, None, device=packed).end


def flush(folder: int | str | os.PathLike[str]) -> None:
    """Wait until all that was written to the file system of a folder is on the disk. `folder`: an open
    descriptor, or a path; a write that has failed since the folder was opened is an error. Raises OSError."""
    if _syncfs is None:
        os.sync()
        return
    fd = folder if isinstance(folder, int) else os.open(folder, os.O_RDONLY)
    try:
        if _syncfs(fd):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        if not isinstance(folder, int):
            os.close(fd)


def _write_direct(fd: int, view: memoryview) -> int:
    """Write past the page cache, and return how many bytes went; 0 where the file system cannot do it."""
    system, done = os.fstat(fd).st_dev, 0
    if len(view) < LEAST_DIRECT or in_memory(system) or not _turn(fd, system, DIRECT):
        return 0
    try:
        while done < len(view) and done % PAGE == 0:
            done += os.write(fd, view[done:])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _buffered.add(system)
    _turn(fd, system, 0)
    return done
