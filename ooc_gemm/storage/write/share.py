"""What a worker of a cluster makes of C. Its chunks go into a folder of the run, each under a name of its
own, until the process that keeps the journal takes them over."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from ...support.buffers import Bytes
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


def revoke(folder: Path) -> None:
    """Remove the folder of a run. Workers that still write there no longer find it, and stop."""
    gone = folder.with_suffix(".gone")
    with contextlib.suppress(OSError):
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


class Share:
    """Where a worker writes its chunks (`target.Sink`). Nothing of C itself is changed."""

    background, far = False, False
    afterwards = "run again with force=True"

    def __init__(self, folder: Path, direct: bool):
        """folder: that of the run. direct: whether to write past the page cache. Raises OSError."""
        self._folder, self._direct, self._disk = folder, direct, durable.Disk(folder)
        self.written: list[tuple[Chunk, str]] = []
        """The chunks that were written, and the paths of their files."""

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Writes a new file. Raises OSError."""
        path = str(self._folder / uuid4().hex)
        files.write(path, data, self._direct)
        self.written.append((chunk, path))

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Writes the file before it returns."""
        self.write(chunk, data)
        return lambda: True

    def flush(self) -> None:
        """Waits until all files are on the disk, so that other hosts find them. Raises OSError."""
        self._disk.flush()

    def cancel(self) -> None:
        """Does nothing: local files always answer."""
