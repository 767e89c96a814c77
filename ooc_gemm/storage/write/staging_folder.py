"""C in a local folder: chunks are written beside their places, flushed, and renamed."""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from ...support.buffers import Bytes
from ...support.errors import InputError
from ...support.onward import Inward
from ..format import documents
from ..format.chunks import Chunks
from ..format.unfinished import ASIDE, METADATA, PARTIAL
from ..io import durable, files, listing
from ..io.folder import Folder
from ..io.stamps import Stamp, Stamps, identity, stamp_of, stamps_of
from . import replaced
from .journal import ANEW, Chunk
from .share import RUN, revoke
from .staging import Done, Notice, Staging, changed, grid_of

PENDING = ".pending"
"""Suffix of a chunk's file until it goes to its place."""
SETTLED = 1024
"""Files that are renamed together."""
DIRECT_BYTES = 256 << 20
"""Size from which C is written past the page cache, at the full speed of the disk. A smaller C takes little
time either way, and stays in the page cache for its next reader."""


class FolderStaging(Staging):
    """Files in a local folder: written beside their places, flushed, and renamed."""

    far, at_once = False, False

    def __init__(self, folder: Folder, array: zarr.Array[Any], name: str):
        """folder: C's folder. array: C. name: how messages call C."""
        self.root = Path(folder.root)
        self._folder, self._name = folder, name
        self._chunks = Chunks(folder, array.metadata)
        self._direct = array.nbytes >= DIRECT_BYTES
        self.background = folder.traits.asynchronous
        self._folders: set[str] = set()
        self._disk: durable.Disk | None = None
        """Flushes the files of this C; None where C need not survive a power cut."""
        self._placed = np.zeros(grid_of(array), np.int64)
        """Identities of chunks that this run has put in their places; 0 for others."""

    def begin(self, key: str, metadata: bytes | None, keep: bool, notice: Notice | None) -> None:
        """Renames the metadata; an old array was set aside before (`replaced.py`)."""
        root = self.root
        if keep:
            self._disk = durable.Disk(root)
        if metadata is None:
            self._check_links()
            if os.path.lexists(root / key) or not os.path.lexists(root / (key + PARTIAL)):
                os.replace(root / key, root / (key + PARTIAL))
        else:
            new = durable.prepare(root / (key + PARTIAL), metadata, flush=False)
            os.replace(new, root / (key + PARTIAL))
            if self._disk:
                self._disk.wrote(str(root / (key + PARTIAL)))
        old = [one for one in METADATA if os.path.lexists(root / one)]
        for one in old:
            (root / one).unlink()
        if old or metadata is None:
            durable.flush_folders(root)

    def proceed(self, done: Done) -> list[Chunk]:
        """Removes files that the interrupted run has left and that do not count."""
        try:
            self._check_links()
        except OSError as error:
            raise InputError(f"{self._name} cannot be continued: {error.strerror}; {ANEW}") from error
        self._disk = durable.Disk(self.root)
        waiting, known = list[Chunk](), set[str]()
        for chunk, (now, _) in done.items():
            path = self._folder.path(self._chunks.key(*chunk))
            if stamp_of(path + PENDING) == now:
                waiting.append(chunk)
            elif stamp_of(path) == now:
                self._placed[chunk] = identity(os.stat(path))
            else:
                sizes = {stamp_of(each)[0] for each in (path, path + PENDING)}
                said = "changed or removed since"
                if now[0] in sizes:
                    said = "changed since, or copied without its times (cp -a and rsync -a keep them)"
                raise changed(self._name, self._chunks.key(*chunk), said)
            known.add(path + PENDING)
        metadata = {key + PARTIAL for key in METADATA}
        for left in (*self.root.rglob("*" + PENDING), *self.root.glob("*" + PARTIAL)):
            if str(left) not in known and left.name not in metadata:
                left.unlink()
        for folder in self.root.glob(RUN + "*"):
            revoke(folder)
        return waiting

    def read(self, key: str) -> bytes | None:
        """Reads the file."""
        return self._folder.read(key, documents.MAX_BYTES)

    def put(self, key: str, document: bytes) -> None:
        """Replaces the file."""
        durable.replace(self.root / key, document)

    def path(self, chunk: Chunk) -> str:
        """Return the path of a chunk's file, and create its folder."""
        path = self._folder.path(self._chunks.key(*chunk))
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            check_real(folder, str(self.root))
            self._folders.add(folder)
        return path

    def write(self, chunk: Chunk, data: Bytes | bytes) -> None:
        """Writes a file beside the chunk's place."""
        files.write(self.path(chunk) + PENDING, data, self._direct)

    def start(self, chunk: Chunk, data: Bytes) -> Callable[[], bool]:
        """Starts to write that file in the background."""
        return files.start_write(self.path(chunk) + PENDING, data)

    def bring(self, chunks: Sequence[Chunk], inward: Inward) -> Callable[[], bool]:
        """Starts to write these files in the background."""
        return files.bring([self.path(chunk) + PENDING for chunk in chunks], inward)

    def take(self, chunk: Chunk, file: str) -> None:
        """Moves a file that a worker has written beside the chunk's place."""
        os.replace(file, self.path(chunk) + PENDING)

    def written(self, chunk: Chunk) -> None:
        """Opens the file, so that a failed write is noticed (`durable.Disk`)."""
        if self._disk:
            self._disk.wrote(self.path(chunk) + PENDING)

    def stamps(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        """Returns the stamps of the file beside the chunk's place and of the one in its place."""
        path = self.path(chunk)
        return stamp_of(path + PENDING, self.background), stamp_of(path, self.background)

    def flush(self, everything: bool = True) -> None:
        """Flushes the disk."""
        if self._disk:
            self._disk.flush(everything)

    @property
    def failed(self) -> OSError | None:
        """The error of the first flush that failed."""
        return self._disk.failed if self._disk else None

    def settle(self, chunks: list[Chunk]) -> None:
        """Renames files to those of the chunks, the last ones first."""
        while some := chunks[: -SETTLED - 1 : -1]:
            pairs = [(path + PENDING, path) for path in map(self.path, some)]
            there = listing.rename(pairs)
            down, across = zip(*some, strict=True)
            moved = len(there)
            self._placed[down[:moved], across[:moved]] = stamps_of(there)[:, 2]
            del chunks[len(chunks) - moved :]
            if moved < len(some):
                os.replace(*pairs[moved])  # which raises the error

    def drop(self, chunk: Chunk) -> None:
        """Removes the file beside the chunk's place."""
        with contextlib.suppress(OSError):
            os.unlink(self.path(chunk) + PENDING)

    def all_stamps(self, grid: Chunk) -> Stamps:
        """Lists the folder's files."""
        return self._chunks.stamps(grid)

    def identities(self) -> npt.NDArray[np.int64]:
        """Returns numbers made of the times of files' last changes and the files' numbers."""
        return self._placed

    def publish(self, key: str, metadata: bytes) -> None:
        """Flushes the names of all files first, and the name of the metadata last."""
        root = self.root
        if self._disk is None:
            durable.replace(root / key, metadata)
            return
        new = durable.prepare(root / key, metadata)
        names = {str(root)}
        for folder in self._folders:
            while folder not in names:
                names.add(folder)
                folder = folder.rpartition("/")[0]
        self._disk.flush_names(names)
        os.replace(new, root / key)
        durable.flush_folders(root)

    def finish(self, key: str) -> str | None:
        """Removes the partial metadata, and the array that was set aside."""
        (self.root / (key + PARTIAL)).unlink(missing_ok=True)
        self.close()
        return replaced.drop(self.root)

    def discard(self) -> None:
        """Moves an array that was set aside back."""
        self.close()
        with contextlib.suppress(OSError, InputError):
            replaced.discard(self.root, self._name)

    def kept(self) -> str | None:
        """Says where the array that was set aside lies."""
        if not replaced.is_kept(self.root):
            return None
        aside = self.root / ASIDE
        return f"the array that {self._name} is to replace is kept as {aside} until {self._name} is finished"

    def close(self) -> None:
        """Closes what flushes the disk."""
        if self._disk:
            self._disk.close()

    def _check_links(self) -> None:
        """Raise OSError where C's chunks would go through a link, which may lead to another array."""
        for folder in self._folder.folders(self._chunks.pattern):
            check_real(folder, str(self.root))


def check_real(folder: str, root: str) -> None:
    """Raise OSError where a folder, or one between it and C's own folder `root`, is a link, because another
    array would be written."""
    while len(folder) > len(root):
        if os.path.islink(folder):
            name = folder[len(root) + 1 :]
            raise OSError(errno.ELOOP, f"its folder {name} is a link, and what it leads to is not C's")
        folder = folder.rpartition("/")[0]
