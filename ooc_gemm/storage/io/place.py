"""The interface of places where arrays are stored: a local folder, an object store, and a zip archive for
reading. All hold files by key, which is a path with slashes below the place's own. `folder.py`, `objects.py`
and `archive.py` implement it."""

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol

from ...planning.traits import StoreTraits
from ...support.buffers import Bytes
from .listing import Numbers
from .stamps import Stamp, Stamps


class Readable(Protocol):
    """A file or an object that is open for reading."""

    @property
    def size(self) -> int:
        """Size in bytes. Raises FileNotFoundError and OSError."""

    def __enter__(self) -> "Readable":
        """Return this object."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""

    def read(self, into: Bytes, offset: int) -> None:
        """Fill `into` with the bytes from `offset` on. Raises OSError, also where the file ends before."""

    def read_range(self, into: Bytes, offset: int, size: int) -> Bytes:
        """Return `size` bytes from `offset` on. They lie in `into`, which has `files.room` for them, or in
        memory of the store's client. Raises OSError."""


class InputPlace(Protocol):
    """Files by key, for reading. Every method may raise OSError, and what the store's client raises."""

    @property
    def traits(self) -> StoreTraits:
        """What this store can do, as plans and readers need to know it."""

    def listed(self, pattern: str) -> Iterator[tuple[Numbers, Stamps]]:
        """Yield, for some files at a time that match a pattern such as `c/*/*`, the numbers that stand where
        it has `*`, in a row for each file, and their stamps."""

    def open(self, key: str, direct: bool = True) -> Readable:
        """Open a file for reading. `direct`: read past the page cache where that is faster."""

    def cancel(self) -> None:
        """Wake all threads that wait for an answer, and let no thread wait again."""


class Place(InputPlace, Protocol):
    """Files by key, also for writing."""

    def all_keys(self) -> Iterator[str]:
        """Yield the keys of all files."""

    def read(self, key: str, most: int) -> bytes | None:
        """Return a file's contents; more than `most` bytes of a longer file, None where there is no file."""

    def put(self, key: str, data: bytes) -> Stamp:
        """Create or replace a file in one step, and return its stamp."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files. A file that does not exist is not an error."""

    def stamp(self, key: str) -> Stamp:
        """Return the stamp of a file; (0, 0) where there is no file."""
