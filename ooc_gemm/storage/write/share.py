"""What a worker of a cluster makes of C. Its chunks go into a folder of the run, each under a name of its
own, until the process that keeps the journal takes them over."""

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from uuid import uuid4

from ...support.buffers import Bytes
from ...support.errors import InputError, remedy
from ..io import durable, files
from .journal import Chunk

RUN = ".ooc-gemm-run-"
"""Prefix of the folder, inside C's, in which workers of a cluster put their chunks."""


@contextlib.contextmanager
def run_folder(root: Path) -> Iterator[Path]:
    """Yield a folder inside C's for the chunks that workers make. Raises OSError."""
    folder = Path(root, RUN + uuid4().hex)
    folder.mkdir()
    try:
        yield folder
    finally:
        revoke(folder)


@contextlib.contextmanager
def run_folder_beside(place: Path, name: str) -> Iterator[Path]:
    """Yield a hidden folder beside a place for what workers find, and remove those that killed runs for this
    place have left. name: how messages call what is made there. Raises InputError."""
    root = next(folder for folder in place.parents if folder.exists())
    own = f"{RUN}{hashlib.sha256(place.name.encode()).hexdigest()[:12]}-"
    folder, lock = root / f".ooc-gemm-{uuid4().hex}", -1
    try:
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = folder.rename(root / (own + uuid4().hex))  # others find it only when it is locked
        for left in root.glob(glob.escape(own) + "*"):
            if left != folder and _is_left(left):
                revoke(left)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
        raise InputError(
            f"{name} cannot be made: workers need a folder in {root} ({error.strerror}); "
            f"{remedy(error, 'choose another place')}"
        ) from error
    try:
        yield folder
    finally:
        revoke(folder)
        os.close(lock)


def _is_left(folder: Path) -> bool:
    """Whether the run that a folder belongs to is over, as far as locks tell."""
    try:
        file = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def revoke(folder: Path) -> None:
    """Remove the folder of a run. Workers that still write there no longer find it, and stop."""
    gone = folder.with_suffix(".gone")
    with contextlib.suppress(OSError):
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


class Written:
    """Chunks that a worker has written, in 16 bytes each, because C may have millions."""

    def __init__(self, stem: str = "") -> None:
        """stem: what the paths of all files begin with."""
        self._stem, self._numbers = stem, array("q")

    def file(self, chunk: Chunk) -> str:
        """Return the path of the file of a chunk."""
        return f"{self._stem}-{chunk[0]}-{chunk[1]}"

    def add(self, chunk: Chunk) -> None:
        """Note that a chunk was written."""
        self._numbers.extend(chunk)

    def files(self) -> Iterator[tuple[Chunk, str]]:
        """Yield the chunks, and the paths of their files."""
        for at in range(0, len(self._numbers), 2):
            chunk = self._numbers[at], self._numbers[at + 1]
            yield chunk, self.file(chunk)


class Share:
    """Where a worker writes its chunks (`target.Sink`). Nothing of C itself is changed."""

    background, far, bring = False, False, None
    afterwards = "run again with force=True"

    def __init__(self, folder: Path, direct: bool):
        """folder: that of the run. direct: whether to write past the page cache. Raises OSError."""
        self._folder, self._direct, self._disk = folder, direct, durable.Disk(folder)
        self.written = Written(str(self._folder / uuid4().hex))
        """The chunks that were written."""
        self._lock = Lock()

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Writes a new file. Raises OSError."""
        files.write(self.written.file(chunk), data, self._direct)
        with self._lock:
            self.written.add(chunk)

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Writes the file before it returns."""
        self.write(chunk, data)
        return lambda: True

    def flush(self) -> None:
        """Waits until all files are on the disk, so that other hosts find them. Raises OSError."""
        self._disk.flush()

    def cancel(self) -> None:
        """Does nothing: local files always answer."""
