"""Reads and writes of files that go on in threads of the C library's (POSIX asynchronous I/O, glibc).

A thread of Python's that copies 16 MiB comes back with cold caches to an interpreter that twenty others want:
a chunk takes it five times as long as one thread that does nothing but begin and end what others copy. Where
a disk is the slower part that does not matter; where files lie in memory it is what matters.

`THERE` is False where there is no glibc. Errors are OSError.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from .pages import PAGE, Bytes
from .tiles import ceil_div, ranges, round_up

_CONTROL = struct.Struct("=iii4xQQ12xi80xq32x")
"""struct aiocb of glibc, where pointers take 8 bytes: file, what to do, priority, buffer, bytes, whom to
tell, memory of the library's, offset."""
_READ, _WRITE, _DO_NOT_WAIT, _NOBODY = 0, 1, 1, 1
"""LIO_READ, LIO_WRITE, LIO_NOWAIT, SIGEV_NONE."""
_THREADS = 32
"""That copy, at most; 20 unless asked for."""


def _library() -> tuple[ctypes.PyDLL, ctypes.CDLL] | None:
    try:
        if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or "") or ctypes.sizeof(ctypes.c_void_p) != 8:
            return None
        quick, slow = ctypes.PyDLL(None), ctypes.CDLL(None)
        quick.lio_listio.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        quick.aio_error.argtypes = quick.aio_return.argtypes = (ctypes.c_void_p,)
        quick.aio_return.restype = ctypes.c_ssize_t
        slow.aio_suspend.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        quick.aio_init((ctypes.c_int * 8)(_THREADS, 2 * _THREADS, 0, 0, 0, 0, 1, 0))
    except (AttributeError, ValueError, OSError, TypeError):
        return None
    return quick, slow


_found = _library()
THERE = _found is not None


class Transfer:
    """Bytes on their way between a buffer and a file. They must be waited for, whatever happens."""

    def __init__(self, fds: Sequence[int], buffer: Bytes, offset: int, write: bool = False):
        """`fds`: of one file; through each goes a part of the bytes, all at once."""
        assert _found is not None
        quick, _ = _found
        self._buffer, start = buffer, buffer.ctypes.data  # until they are there
        step = round_up(ceil_div(len(buffer), len(fds)), PAGE)
        self._sizes = [stop - first for first, stop in ranges(len(buffer), step)]
        self._memory = ctypes.create_string_buffer(_CONTROL.size * len(self._sizes))
        at = ctypes.addressof(self._memory)
        for number, size in enumerate(self._sizes):
            first = number * step
            _CONTROL.pack_into(
                self._memory, number * _CONTROL.size,
                fds[number], _WRITE if write else _READ, 0, start + first, size, _NOBODY, offset + first,
            )  # fmt: skip
        self._controls = [at + number * _CONTROL.size for number in range(len(self._sizes))]
        self._list = struct.pack(f"={len(self._controls)}Q", *self._controls)
        quick.lio_listio(_DO_NOT_WAIT, self._list, len(self._controls), None)

    def wait(self) -> bool:
        """Whether all bytes have been moved, when nothing is under way any more; others may go on."""
        assert _found is not None
        (quick, slow), whole = _found, True
        for number, control in enumerate(self._controls):
            while (status := quick.aio_error(control)) == errno.EINPROGRESS:
                slow.aio_suspend(self._list[8 * number : 8 * number + 8], 1, None)
            whole = quick.aio_return(control) == self._sizes[number] and not status and whole
        return whole
