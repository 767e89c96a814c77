"""A disk that remembers every write and every flush, in order: what a loop device needs of FUSE, and no more.

    with Recorder(folder, image) as recorder:       # folder/disk is a file that holds `image`
        …                                           # losetup, mount, write
        recorder.log                                # [(offset, bytes) | None for a flush]

The system is asked for /dev/fuse and for a mount, so this is for root.
"""

import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path

Entry = tuple[int, bytes] | None
"""A write (its offset and its bytes), or None for a flush, after which all writes before it are on the
disk."""

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS, _RELEASE = 1, 2, 3, 4, 14, 15, 16, 17, 18
_FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 20, 25, 26, 27, 28, 29
_DESTROY, _BATCH_FORGET = 38, 42
_HEAD, _ANSWER = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
_PLACE = struct.Struct("=QQIIQII")
_ROOT, _DISK, _MOST, _PAGE = 1, 2, 1 << 20, 4096
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
"""With these flags one write is one request. If half of a split write failed, the loop device would not
notice."""
_NAME = b"disk"

_libc = ctypes.CDLL(None, use_errno=True)


class Recorder:
    """A folder that holds one file, whose writes are recorded."""

    def __init__(self, folder: Path, image: bytes):
        """`image`: the contents of the file. Raises OSError if nothing can be mounted."""
        self._folder, self.data, self.log = folder, bytearray(image), list[Entry]()
        self.fail: Callable[[int, bytes], int] = lambda offset, data: 0
        """Is called for each write, and returns the errno with which the write fails, or 0."""
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        if _libc.mount(b"recorder", os.fsencode(folder), b"fuse", 0, options):
            number = ctypes.get_errno()
            os.close(self._device)
            raise OSError(number, os.strerror(number), str(folder))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        _libc.umount2(os.fsencode(self._folder), 2)
        self._thread.join(10)
        os.close(self._device)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._folder / _NAME.decode()

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MOST + _PAGE)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # it is not mounted any more
            _, kind, unique, node, *_ = _HEAD.unpack_from(request)
            if kind in (_FORGET, _BATCH_FORGET):
                continue
            found = self._answer(kind, node, request[_HEAD.size :])
            error, body = (-found, b"") if isinstance(found, int) else (0, found)
            try:
                os.write(self._device, _ANSWER.pack(_ANSWER.size + len(body), error, unique) + body)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    return

    def _answer(self, kind: int, node: int, body: bytes) -> bytes | int:
        """Return the answer to a request: a body, or an errno."""
        if kind == _INIT:
            readahead = struct.unpack_from("=I", body, 8)[0]
            flags, pages = _BIG_WRITES | _MAX_PAGES, _MOST // _PAGE
            return struct.pack("=IIIIHHIIHH28x", 7, 31, readahead, flags, 16, 12, _MOST, 1, pages, 0)
        if kind == _LOOKUP:
            if body.rstrip(b"\0") != _NAME:
                return errno.ENOENT
            return struct.pack("=QQQQII", _DISK, 0, 3600, 0, 0, 0) + self._attributes(_DISK)
        if kind in (_GETATTR, _SETATTR):
            return struct.pack("=QII", 0, 0, 0) + self._attributes(node)
        if kind in (_OPEN, _OPENDIR):
            return struct.pack("=QII", 0, 0, 0)
        if kind in (_RELEASE, _RELEASEDIR, _FLUSH, _DESTROY, _READDIR):
            return b""
        if kind == _READ:
            _, offset, size, *_ = _PLACE.unpack_from(body)
            return bytes(self.data[offset : offset + size])
        if kind == _WRITE:
            _, offset, size, *_ = _PLACE.unpack_from(body)
            data = body[_PLACE.size : _PLACE.size + size]
            if number := self.fail(offset, data):
                return number
            self.data[offset : offset + size] = data
            for at in range(0, size, _PAGE):
                self.log.append((offset + at, data[at : at + _PAGE]))
            return struct.pack("=II", size, 0)
        if kind == _FSYNC:
            self.log.append(None)
            return b""
        if kind == _STATFS:
            return struct.pack("=QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 9, 9, 4096, 255, 4096, 0)
        return errno.ENOSYS

    def _attributes(self, node: int) -> bytes:
        mode, size = (stat.S_IFDIR | 0o700, 0) if node == _ROOT else (stat.S_IFREG | 0o600, len(self.data))
        numbers = (node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        return struct.pack("=QQQQQQIIIIIIIIII", *numbers)
