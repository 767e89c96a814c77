"""Reads and writes of files that go on in threads of the C library's (POSIX asynchronous I/O, glibc).

A thread of Python's that copies 16 MiB comes back with cold caches to an interpreter that twenty others want:
a chunk takes it five times as long as one thread that does nothing but begin and end what others copy. Where
a disk is the slower part that does not matter; where files lie in memory it is what matters.

`THERE` is False where there is no glibc. Errors are OSError.
"""

import ctypes
import errno
import os
from collections.abc import Sequence

from .pages import PAGE, Bytes
from .tiles import ceil_div, ranges, round_up


class _Control(ctypes.Structure):
    """struct aiocb of glibc, where pointers take 8 bytes."""

    _fields_ = (
        ("fd", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("reserved", ctypes.c_char * 80),
        ("offset", ctypes.c_int64),
        ("reserved_too", ctypes.c_char * 32),
    )


_NOTHING = 1
"""SIGEV_NONE."""
_THREADS = 32
"""That copy, at most; 20 unless asked for."""
_POINTER = ctypes.POINTER(_Control)


def _library() -> tuple[ctypes.PyDLL, ctypes.CDLL] | None:
    try:
        if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or "") or ctypes.sizeof(ctypes.c_void_p) != 8:
            return None
        quick, slow = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        for name in ("aio_read", "aio_write", "aio_error", "aio_return"):
            getattr(quick, name).argtypes = (_POINTER,)
        quick.aio_return.restype = ctypes.c_ssize_t
        quick.aio_init((ctypes.c_int * 8)(_THREADS, 2 * _THREADS, 0, 0, 0, 0, 1, 0))
        slow.aio_suspend.argtypes = (ctypes.POINTER(_POINTER), ctypes.c_int, ctypes.c_void_p)
    except (AttributeError, ValueError, OSError, TypeError):
        return None
    return quick, slow


_found = _library()
THERE = _found is not None


class Transfer:
    """Bytes on their way between a buffer and a file. They must be waited for, whatever happens."""

    def __init__(self, name: str, fds: Sequence[int], buffer: Bytes, offset: int):
        """`name`: read or write. `fds`: of one file; through each goes a part of the bytes, all at once."""
        assert _found is not None
        self._quick, self._slow = _found
        self._buffer = buffer  # until they are there
        start, at = getattr(self._quick, f"aio_{name}"), buffer.ctypes.data
        self._controls: list[_Control] = []
        step = round_up(ceil_div(len(buffer), len(fds)), PAGE)
        for fd, (first, stop) in zip(fds, ranges(len(buffer), step), strict=False):
            control = _Control(
                fd=fd, buffer=at + first, nbytes=stop - first, notify=_NOTHING, offset=offset + first
            )
            if start(control):
                error = _error(ctypes.get_errno())
                self.wait()
                raise error
            self._controls.append(control)

    def wait(self) -> bool:
        """Whether all bytes have been moved, when nothing is under way any more; others may go on."""
        whole = True
        while self._controls:
            control = self._controls[-1]
            while (status := self._quick.aio_error(control)) == errno.EINPROGRESS:
                self._slow.aio_suspend((_POINTER * 1)(ctypes.pointer(control)), 1, None)
            self._controls.pop()
            moved = self._quick.aio_return(control)
            whole = whole and not status and moved == control.nbytes
        return whole


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
