"""A local folder as a `Place`."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np

from ...planning.traits import StoreTraits
from . import durable, files
from .files import ChunkFile
from .listing import Numbers, files_of, look, numbered, numbers
from .requests import side_by_side
from .stamps import Stamp, Stamps, stamp_of, stamps_of

SHARE, THREADS, MANY = 16, 4, 64
"""Folders that a thread looks into, and the threads that do so at the same time where there are more, if the
first folder holds many files. Asking for a file takes 1 to 2 µs, in which other threads have the interpreter.
Where there are few in each, threads wait for the interpreter (256 folders with a file each: 15 ms, alone
4)."""


class Folder:
    """The files below a local folder (`Place`)."""

    def __init__(self, root: Path):
        self.root = root

    @cached_property
    def traits(self) -> StoreTraits:
        """The traits of local files. Files in memory are asynchronous."""
        return StoreTraits(asynchronous=files.in_background(self.root))

    def path(self, key: str) -> str:
        """Return the path of the file with this key."""
        return f"{self.root}/{key}"

    def all_keys(self) -> Iterator[str]:
        """Looks into folders of any depth."""
        for top, _, names in os.walk(self.root):
            folder = os.path.relpath(top, self.root)
            yield from (f"{folder}/{name}".removeprefix("./") for name in names)

    def listed(self, pattern: str) -> Iterator[tuple[Numbers, Stamps]]:
        """Looks only into folders that the pattern leads to, and into many by several threads. Raises
        OSError."""
        above, _, last = pattern.rpartition("/")
        folders = [f"{key}/" for key in self._matching("", above.split("/"))] if above else [""]
        leads = numbers(above)
        matches = (leads.fullmatch(folder[:-1]) for folder in folders)
        before = numbered(filter(None, matches), leads.groups)
        if "*" not in last:
            for at, folder in enumerate(folders):
                if len(row := look(self.path(folder + last))):
                    yield before[at : at + 1], stamps_of(row)
            return

        def look_into(first: int, stop: int) -> Iterator[tuple[Numbers, Stamps]]:
            some = [self.path(folder) for folder in folders[first:stop]]
            for at, in_names, rows in files_of(some, last):
                yield np.hstack([before[first:][at], in_names[:, : last.count("*")]]), stamps_of(rows)

        def all_of(first: int) -> list[tuple[Numbers, Stamps]]:
            return list(look_into(first, first + SHARE))

        if len(folders) <= SHARE or not self._has_many(folders[0]):
            yield from look_into(0, len(folders))
            return
        for first in range(0, len(folders), THREADS * SHARE):
            shares = range(first, min(len(folders), first + THREADS * SHARE), SHARE)
            for found in side_by_side([partial(all_of, share) for share in shares]):
                yield from found

    def _has_many(self, folder: str) -> bool:
        """Whether there are so many files in a folder that several threads should look at those of all."""
        with suppress(OSError), os.scandir(self.path(folder)) as entries:
            return len(list(islice(entries, MANY))) == MANY
        return False

    def folders(self, pattern: str) -> Sequence[str]:
        """Return the paths of the folders that hold the files of a pattern, and of all folders between.
        Raises OSError."""
        parts = pattern.split("/")[:-1]
        keys = {key for count in range(1, len(parts) + 1) for key in self._matching("", parts[:count])}
        return [self.path(key) for key in sorted(keys)]

    def _matching(self, folder: str, parts: Sequence[str]) -> Iterator[str]:
        """Yield what is in a folder and matches parts of a pattern."""
        part, *rest = parts
        names = [part] if rest or os.path.lexists(self.root / folder / part) else []
        if "*" in part:
            wanted, names = numbers(part), []
            with suppress(FileNotFoundError, NotADirectoryError):
                names = [name for name in os.listdir(self.path(folder)) if wanted.fullmatch(name)]
        for name in names:
            if rest:
                yield from self._matching(f"{folder}{name}/", rest)
            else:
                yield folder + name

    def open(self, key: str, direct: bool = True) -> ChunkFile:
        """Raises OSError, also for anything that is not a regular file."""
        return ChunkFile(self.path(key), direct)

    def read(self, key: str, most: int) -> bytes | None:
        """Returns `most` + 1 bytes of a longer file. Raises OSError."""
        return files.read_small(self.path(key), most)

    def put(self, key: str, data: bytes) -> Stamp:
        """Flushes the data before it returns; the name is durable after `durable.flush_folders`."""
        durable.replace(self.root / key, data)
        return self.stamp(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Removes one file after the other."""
        for key in keys:
            (self.root / key).unlink(missing_ok=True)

    def stamp(self, key: str) -> Stamp:
        """Returns the size in bytes and the time of the last modification in ns."""
        return stamp_of(self.path(key), self.traits.asynchronous)

    def cancel(self) -> None:
        """Does nothing: local files always answer."""
