"""A local folder as a `Place`."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ...planning.traits import StoreTraits
from . import durable, files
from .files import ChunkFile
from .stamps import Listed, Stamp, identity, stamp_of


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

    def list(self, pattern: str = "") -> Iterator[tuple[str, Listed]]:
        """Looks only into folders that the pattern leads to. Raises OSError."""
        if pattern:
            found = self._matching("", pattern.split("/"))
        else:
            tops = ((os.path.relpath(top, self.root), names) for top, _, names in os.walk(self.root))
            found = (
                (f"{top}/{name}".removeprefix("./"), self.root / top / name)
                for top, names in tops
                for name in names
            )
        for key, entry in found:
            try:
                file = entry.stat()
                yield key, (file.st_size, file.st_mtime_ns, identity(file))
            except FileNotFoundError:  # a link to nowhere
                continue
            except OSError:  # reading it will say
                yield key, (1, 0, 0)

    def folders(self, pattern: str) -> Sequence[str]:
        """Return the paths of the folders that hold the files of a pattern, and of all folders between.
        Raises OSError."""
        parts = pattern.split("/")[:-1]
        keys = {key for count in range(1, len(parts) + 1) for key, _ in self._matching("", parts[:count])}
        return [self.path(key) for key in sorted(keys)]

    def _matching(self, folder: str, parts: Sequence[str]) -> Iterator[tuple[str, "os.DirEntry[str] | Path"]]:
        part, *rest = parts
        if "*" not in part:
            if rest:
                yield from self._matching(f"{folder}{part}/", rest)
            elif os.path.lexists(path := self.root / folder / part):
                yield f"{folder}{part}", path
            return
        wanted = numbers(part)
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path(folder)) as entries:
            for entry in entries:
                if not wanted.fullmatch(entry.name):
                    continue
                if rest:
                    yield from self._matching(f"{folder}{entry.name}/", rest)
                else:
                    yield folder + entry.name, entry

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


def numbers(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a pattern in which `*` stands for a number."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[0-9]+"))
