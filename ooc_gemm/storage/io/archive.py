"""Files in a zip archive, for reading. One that is stored as it is lies in one piece of the archive, which
any thread reads; another one is unpacked from its beginning on."""

import itertools
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from struct import Struct
from types import TracebackType
from typing import IO

import numpy as np

from ...planning.traits import LOCAL, StoreTraits
from ...support.buffers import Bytes
from .files import ChunkFile
from .listing import Numbers, numbered, numbers
from .place import Readable
from .stamps import Stamps, identity

HEADER, MAGIC = Struct("<4s22xHH"), b"PK\x03\x04"
"""What stands before an entry's name: a signature, and at its end the lengths of the name and of what follows
it (APPNOTE.TXT 4.3.7)."""
ENCRYPTED = 1
UNPACKED_BYTES = 64 << 10
"""Bytes that are unpacked at a time."""


class Archive:
    """The files below a folder of an archive that is open for reading (`InputPlace`)."""

    def __init__(self, archive: zipfile.ZipFile, folder: str):
        self._archive, self._prefix = archive, f"{folder}/" if folder else ""
        self._path = str(archive.filename)

    @property
    def traits(self) -> StoreTraits:
        """The traits are those of local files: an archive is one."""
        return LOCAL

    def listed(self, pattern: str) -> Iterator[tuple[Numbers, Stamps]]:
        """The sizes are those of unpacked files, and the times those of the archive. Raises OSError."""
        found = os.stat(self._path)
        time, number, wanted = found.st_mtime_ns, identity(found), self._names(pattern)
        every = self._archive.infolist()
        some = [(match, entry) for entry in every if (match := wanted.fullmatch(entry.filename))]
        stamps = np.array([(entry.file_size, time, number) for _, entry in some], np.int64)
        yield numbered((match for match, _ in some), wanted.groups), stamps.reshape(-1, 3)

    def packs(self, pattern: str) -> bool:
        """Whether some of the files that match a pattern must be unpacked."""
        wanted, packed = self._names(pattern), itertools.filterfalse(_as_it_is, self._archive.infolist())
        return any(wanted.fullmatch(entry.filename) for entry in packed)

    def _names(self, pattern: str) -> re.Pattern[str]:
        """Return the regular expression for names in the archive of files that match a pattern."""
        return re.compile(re.escape(self._prefix) + numbers(pattern).pattern)

    def open(self, key: str, direct: bool = True) -> Readable:
        """Raises OSError, also for what zipfile cannot unpack."""
        try:
            entry = self._archive.getinfo(self._prefix + key)
        except KeyError:
            raise FileNotFoundError(self._prefix + key) from None
        return StoredFile(self._path, entry, direct) if _as_it_is(entry) else PackedFile(self._archive, entry)

    def cancel(self) -> None:
        """Does nothing: local files always answer."""


def _as_it_is(entry: zipfile.ZipInfo) -> bool:
    """Whether an archive holds a file as it is."""
    return entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & ENCRYPTED


class StoredFile(ChunkFile):
    """A file that an archive holds as it is."""

    def __init__(self, path: str, entry: zipfile.ZipInfo, direct: bool):
        super().__init__(path, direct)
        self.size, self._checksum = entry.file_size, entry.CRC
        try:
            header = os.pread(self._fd, HEADER.size, entry.header_offset)
            magic, name, extra = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
            if magic != MAGIC:
                raise OSError("the archive holds something else where it should be")
        except BaseException:
            os.close(self._fd)
            raise
        self._start = entry.header_offset + HEADER.size + name + extra

    def read(self, into: Bytes, offset: int) -> None:
        """Also compares the checksum where the whole file is read."""
        if offset + len(into) > self.size:
            raise OSError("the file became shorter while it was read")
        super().read(into, self._start + offset)
        if len(into) == self.size and zlib.crc32(into.data) != self._checksum:
            raise OSError("its checksum is wrong")

    def read_range(self, into: Bytes, offset: int, size: int) -> Bytes:
        """Reads as `read` does."""
        self.read(into[:size], offset)
        return into[:size]


class PackedFile:
    """A file that is packed in an archive (`Readable`)."""

    def __init__(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo):
        self.size, self._archive, self._entry = entry.file_size, archive, entry
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "PackedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, into: Bytes, offset: int) -> None:
        """Unpacks what comes before, too. At its end zipfile compares the checksum."""
        try:
            if self._file is None or self._file.tell() > offset:
                self._file = self._archive.open(self._entry)
            while before := offset - self._file.tell():
                if not self._file.read(min(before, UNPACKED_BYTES)):
                    break
            done = 0
            while done < len(into):
                data = self._file.read(min(len(into) - done, UNPACKED_BYTES))
                if not data:
                    raise OSError("the file became shorter while it was read")
                into.data[done : done + len(data)] = data
                done += len(data)
        except (RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise OSError(str(error)) from error

    def read_range(self, into: Bytes, offset: int, size: int) -> Bytes:
        """Reads as `read` does."""
        self.read(into[:size], offset)
        return into[:size]
