"""The objects below one address of an object store, as a `Place`.

get a range ──► bytes of the client's ──► slot          a reader asks for one range, and waits
slot ──► put                                            a chunk is put whole, and is there or is not
"""

import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ...planning.traits import StoreTraits
from ...support.buffers import Bytes
from ...support.errors import StoreError, bad_certificate, remedy
from .answers import Answers
from .listing import Numbers, numbered, numbers
from .stamps import Stamp, Stamps

T = TypeVar("T")

MARK = "oocgemm"
"""Name of the metadata of an object that hold its mark. Azure takes letters only."""


async def _ask(question: Callable[[], Awaitable[T]]) -> T:
    """obstore wants to be called where the loop runs."""
    return await question()


async def _next(stream: Any) -> Any:
    """None at the end."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


def _tag(found: Any) -> int:
    """Return a number that differs where the object differs. Azure lists tags without the quotes that it puts
    around them elsewhere."""
    said = (found.get("e_tag") or "").strip('"') or found.get("version") or str(found.get("last_modified"))
    return int.from_bytes(blake2b(said.encode(), digest_size=8).digest(), "big") >> 1


_fastest: dict[int, float] = {}
"""Seconds of the fastest answer of each client, by the client's id."""


def _version(found: Any) -> Any:
    """Return the mode with which `put_async` replaces exactly this version of an object."""
    return {name: found[name] for name in ("e_tag", "version") if found.get(name)}


class Objects:
    """The objects below one address (`Place`)."""

    def __init__(self, store: Any, prefix: str, answers: Answers, name: str = ""):
        """store: obstore's. prefix: the path of the address in it. answers: waits for the store's answers.
        name: how messages call the array there."""
        import obstore

        self._obstore, self._store, self._answers, self._name = obstore, store, answers, name
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""

    @property
    def traits(self) -> StoreTraits:
        """The latency is the shortest time in which a list or a small object came. Plain HTTP cannot list."""
        listable = type(self._store).__name__ != "HTTPStore"
        return StoreTraits(remote=True, latency=_fastest.get(id(self._store), 0.0), listable=listable)

    @property
    def path(self) -> str:
        """The path of the address in its store."""
        return self._prefix.rstrip("/")

    def at(self, path: str) -> "Objects":
        """Return the place at another path of the same store."""
        return Objects(self._store, path, self._answers)

    def cancel(self) -> None:
        """Wakes all threads that wait."""
        self._answers.cancel()

    def all_keys(self) -> Iterator[str]:
        """Lists all keys."""
        for batch in self._listed():
            yield from (key for key, _ in batch)

    def listed(self, pattern: str) -> Iterator[tuple[Numbers, Stamps]]:
        """Lists all keys, whatever the pattern. The third number of a stamp is 1."""
        wanted = numbers(pattern)
        for batch in self._listed():
            some = [(match, found) for key, found in batch if (match := wanted.fullmatch(key))]
            places = numbered((match for match, _ in some), wanted.groups)
            stamps = [(int(found["size"]), _tag(found), 1) for _, found in some]
            yield places, np.array(stamps, np.int64).reshape(-1, 3)

    def _listed(self) -> Iterator[list[tuple[str, Any]]]:
        """Yield keys and descriptions of objects, as many at a time as one answer names."""
        stream = self._obstore.list(self._store, self._prefix or None, chunk_size=1000)
        batch = self._timed(_next(stream))
        while batch is not None:
            yield [
                (found["path"].removeprefix(self._prefix), found)
                for found in batch
                if found["path"].startswith(self._prefix)
            ]
            batch = self._answers.of(_next(stream))

    def open(self, key: str, direct: bool = True) -> "ObjectReader":
        """Sends no request."""
        return ObjectReader(self, key, self._name)

    def read(self, key: str, most: int) -> bytes | None:
        """Returns `most` + 1 bytes of a longer object."""
        try:
            found = self._timed(_ask(lambda: self._read(key, most)))
            return bytes(self.read_range(key, 0, most + 1)) if found is None else found
        except FileNotFoundError:
            return None

    async def _read(self, key: str, most: int) -> bytes | None:
        found = await self._obstore.get_async(self._store, self._prefix + key)
        return None if found.meta["size"] > most else bytes(await found.bytes_async())

    def read_range(self, key: str, start: int, size: int) -> Any:
        """Return a part of an object. Raises FileNotFoundError."""
        path = self._prefix + key
        return self._answers.of(
            _ask(lambda: self._obstore.get_range_async(self._store, path, start=start, length=size))
        )

    def read_version(self, key: str) -> tuple[bytes, Any] | None:
        """Return an object's contents and version, which `exchange` takes; None where there is no object."""
        try:
            data, version = self._answers.of(_ask(lambda: self._get(key)))
        except FileNotFoundError:
            return None
        return bytes(data), version

    async def _get(self, key: str) -> tuple[Any, Any]:
        found = await self._obstore.get_async(self._store, self._prefix + key)
        version = _version(found.meta)
        return await found.bytes_async(), version

    def stamp(self, key: str) -> Stamp:
        """Returns the size, and a number made of the object's tag."""
        try:
            found = self._answers.of(_ask(lambda: self._obstore.head_async(self._store, self._prefix + key)))
        except FileNotFoundError:
            return 0, 0
        return int(found["size"]), _tag(found)

    def put(self, key: str, data: Any) -> Stamp:
        """Sends one request, so that the object is stored whole or not at all."""
        return self._stamp_of(key, data, self._put(key, data))

    def exchange(self, key: str, data: Any, version: Any) -> Any:
        """Put an object where the present one still has this version, and return the new version. `version`:
        `create` where there must be none, `overwrite` where any may be replaced. Raises an error that
        `changed` recognizes."""
        return _version(self._put(key, data, mode=version))

    def marked(self, key: str) -> tuple[Stamp, Any, str]:
        """Return an object's stamp, version and mark; `create` is the version where there is no object."""
        ask = self._obstore.get_async
        try:
            found = self._answers.of(
                _ask(lambda: ask(self._store, self._prefix + key, options={"head": True}))
            )
        except FileNotFoundError:
            return (0, 0), "create", ""
        stamp = int(found.meta["size"]), _tag(found.meta)
        return stamp, _version(found.meta), str(found.attributes.get(MARK, ""))

    def put_marked(self, key: str, data: Any, version: Any, mark: str) -> Stamp:
        """Put an object with a mark, in one step with its data, where the present one still has this version.
        A store that supports no conditional requests, or no metadata of objects, does without. Raises an
        error that `changed` recognizes."""
        attributes = {MARK: mark}
        for how in ({"mode": version, "attributes": attributes}, {"attributes": attributes}):
            try:
                return self._stamp_of(key, data, self._put(key, data, **how))
            except Exception as error:
                if not self.cannot(error):
                    raise
        return self.put(key, data)

    def _put(self, key: str, data: Any, **how: Any) -> Any:
        path = self._prefix + key
        return self._answers.of(
            _ask(lambda: self._obstore.put_async(self._store, path, data, use_multipart=False, **how))
        )

    def _stamp_of(self, key: str, data: Any, made: Any) -> Stamp:
        """Return the stamp of an object that was just put, from the store's answer where that has the tag."""
        return (len(data), _tag(made)) if made.get("e_tag") else self.stamp(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Removes up to 1000 objects with one request. Azure refuses to remove what is not there, and
        may then leave others: these are removed one by one."""
        paths = [self._prefix + key for key in keys]
        for at in range(0, len(paths), 1000):
            some = paths[at : at + 1000]
            try:
                self._delete(some)
            except FileNotFoundError:
                for path in some:
                    with suppress(FileNotFoundError):
                        self._delete([path])

    def _delete(self, paths: Sequence[str]) -> None:
        self._answers.of(_ask(lambda: self._obstore.delete_async(self._store, list(paths))))

    def has(self, key: str) -> bool:
        """Whether an object with this key exists."""
        return self.stamp(key) != (0, 0)

    def has_any(self, but: str) -> bool:
        """Whether any object exists below the address. but: a key that does not count."""
        return any(key != but for key in self.all_keys())

    def changed(self, error: Exception) -> bool:
        """Whether an error says that another process has replaced the object first."""
        kinds = self._obstore.exceptions
        return isinstance(error, kinds.AlreadyExistsError | kinds.PreconditionError)

    def forbids(self, error: Exception) -> bool:
        """Whether an error says that the credentials do not allow a request."""
        kinds = self._obstore.exceptions
        return isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError | PermissionError)

    def cannot(self, error: Exception) -> bool:
        """Whether an error says that the store does not support conditional requests."""
        return isinstance(error, self._obstore.exceptions.NotSupportedError | NotImplementedError)

    def _timed(self, question: Coroutine[Any, Any, T]) -> T:
        start, which = time.perf_counter(), id(self._store)
        answer = self._answers.of(question)
        _fastest[which] = min(_fastest.get(which, math.inf), time.perf_counter() - start)
        return answer


class ObjectReader:
    """An object that is read in parts (`Readable`)."""

    def __init__(self, objects: Objects, key: str, name: str):
        self._objects, self._key, self._name = objects, key, name

    @property
    def size(self) -> int:
        """Asks the store each time. Raises StoreError."""
        size, tag = self._said(lambda: self._objects.stamp(self._key))
        if not (size or tag):
            raise FileNotFoundError
        return size

    def __enter__(self) -> "ObjectReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does nothing: no connection is held."""

    def read(self, into: Bytes, offset: int) -> None:
        """Raises StoreError instead of OSError."""
        into[:] = self._bytes(offset, len(into))

    def read_range(self, into: Bytes, offset: int, size: int) -> Bytes:
        """Returns memory of the store's client. Raises StoreError."""
        return self._bytes(offset, size)

    def _bytes(self, offset: int, size: int) -> Bytes:
        data = self._said(lambda: self._objects.read_range(self._key, offset, size))
        found = np.frombuffer(data, np.uint8)
        if len(found) != size:
            raise StoreError(
                f"{self._name}: chunk {self._key} gives {len(found)} bytes instead of {size}; it is cut "
                "off, or was changed since it was looked at: write it again"
            )
        return found

    def _said(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (FileNotFoundError, MemoryError, StoreError):
            raise
        except Exception as error:
            raise StoreError(
                f"{self._name}: chunk {self._key} cannot be fetched ({why(error)}); "
                f"{remedy(error, 'check its store')}, then run again"
            ) from error


def why(error: BaseException) -> str:
    """Return the text of a client's error, without the details that only its authors need."""
    if fault := bad_certificate(error):
        return f"its TLS certificate is not trusted: {fault}"
    text = str(error).partition("Debug source")[0]
    return " ".join(text.split())[:300] or type(error).__name__
