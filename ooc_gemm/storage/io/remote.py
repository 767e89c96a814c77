"""Arrays in object stores: s3://, gs://, az:// and http(s)://. The only importer of obstore and botocore.

    get a range ──► bytes of the client's ──► slot          a reader asks for one range, and waits
    slot ──► put                                            a chunk is put whole, and is there or is not

obstore retries what fails for a while (5xx, connections that break or stall) with exponential back-off and
jitter. Credentials come from the environment and the usual files, as botocore finds them.
"""

import datetime
import io
import math
import os
import re
import time
import uuid
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np

from ...support import redact
from ...support.buffers import Bytes
from ...support.errors import InputError, StoreError, remedy
from ..read.local import Folder
from ..write.journal import ANEW, NAME, Journal, Stamp
from .files import ChunkFile

T = TypeVar("T")

SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https")
"""What obstore speaks."""
VARIABLES = ("AWS", "AZURE", "GOOGLE", "SSL", "HTTP", "HTTPS")
"""What those of the environment begin with that clients look at."""
BANDWIDTH = 1 << 30
"""Bytes a second that requests are to fill together: 10 Gbit/s, of what one process takes in."""
STREAM = 96 << 20
"""Bytes a second of one request, once it is answered: what object stores give each."""
AT_ONCE = 8, 64
"""Fewest requests under way, and most."""
PIECE_BYTES = 4 << 20
"""Bytes of one request, at most, where a chunk can be read in part."""
WRITERS = 8
"""Puts under way: of whole chunks, which are larger."""
CONNECTION_BYTES = 1 << 20
"""Memory that the client takes for each."""


def requests(latency: float, piece: int) -> int:
    """How many requests at a time, each of up to `piece` bytes and answered after `latency` seconds, fill the
    bandwidth (Little's law); a power of two, for latencies differ from one measurement to the next."""
    wanted = BANDWIDTH * (latency / max(1, min(piece, PIECE_BYTES)) + 1 / STREAM)
    count = AT_ONCE[0]
    while count * 1.5 < wanted and count < AT_ONCE[1]:
        count *= 2
    return count


OPENER = "ooc-gemm opener"
"""Threads that ask before there is a plan."""


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """What each of some calls returns, that ask for answers which take a while. Raises what the first of them
    raises that fails."""
    with ThreadPoolExecutor(len(works), OPENER) as pool:
        return [found.result() for found in [pool.submit(work) for work in works]]


# ---------------------------------------------------------------------------------------------- addresses


def speaks(url: str) -> bool:
    """Whether an address is one of these."""
    return urlsplit(url).scheme in SCHEMES


def normal(url: str) -> str:
    """One way to write an address, with a slash in the end."""
    scheme, _, rest = url.partition("://")
    return f"{'s3' if scheme == 's3a' else scheme}://" + re.sub("/+", "/", rest.rstrip("/") + "/")


def address(store: Any) -> str:
    """Of obstore's store, where there is no doubt about it; or nothing."""
    schemes = {"S3Store": "s3", "GCSStore": "gs"}
    scheme = schemes.get(type(store).__name__)
    return f"{scheme}://{store.config['bucket']}/{store.prefix or ''}" if scheme else ""


def connect(url: str, seconds: float) -> tuple[Any, str]:
    """obstore's store, and the path in it; `seconds`: for how long a request may be retried. Raises
    InputError, and ImportError where a package is not installed."""
    redact.keep_secrets_of(url)
    address = urlsplit(url)
    web = address.scheme in ("http", "https")
    if not web and (("@" in address.netloc and not address.scheme.startswith("abfs")) or address.query):
        raise InputError(
            f"{redact.url(url)}: credentials do not belong in this address; give them in the environment "
            "or in the usual files, such as ~/.aws/credentials"
        )
    name, path = redact.url(url), ""
    if address.scheme in ("s3", "s3a", "gs"):  # one client, and its connections, for all of a bucket
        url, path = f"{address.scheme}://{address.netloc}", address.path.strip("/")
    where = (one for one in os.environ.items() if one[0] == "HOME" or one[0].partition("_")[0] in VARIABLES)
    try:
        with _connecting:
            return _client(url, seconds, tuple(sorted(where))), path
    except InputError as error:
        raise InputError(f"{name} {error}") from error.__cause__


_connecting = Lock()
"""Those who come at once are to have one client."""


@lru_cache(16)
def _client(url: str, seconds: float, environment: tuple[tuple[str, str], ...]) -> Any:
    """In an environment; to make one takes 30 to 80 ms."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise ImportError("obstore; pip install 'ooc-gemm[remote]'") from error
    address = urlsplit(url)
    client: dict[str, Any] = {
        "connect_timeout": datetime.timedelta(seconds=min(10, seconds / 4)),
        "read_timeout": datetime.timedelta(seconds=seconds / 3),
        "timeout": datetime.timedelta(seconds=600),
        "pool_max_idle_per_host": str(AT_ONCE[1]),
    }
    retry = {
        "max_retries": 10,
        "retry_timeout": datetime.timedelta(seconds=0.75 * seconds),
        "backoff": {
            "init_backoff": datetime.timedelta(milliseconds=100),
            "max_backoff": datetime.timedelta(seconds=min(5, seconds / 8)),
            "base": 2,
        },
    }
    options: dict[str, Any] = {}
    if address.scheme in ("s3", "s3a"):
        options = _aws()
    if "http" in (address.scheme, urlsplit(options.get("endpoint", "")).scheme):
        client["allow_http"] = True
    if address.scheme in ("http", "https") and "@" in address.netloc:  # which obstore leaves out
        user, _, host = address.netloc.rpartition("@")
        word = b64encode(unquote(user).encode()).decode()
        redact.keep_secret(word)
        client["default_headers"] = {"Authorization": f"Basic {word}"}
        url = address._replace(netloc=host).geturl()
    options |= {"client_options": client, "retry_config": retry}
    return from_url(url, **options)


def _aws() -> dict[str, Any]:
    """What the environment and ~/.aws say of credentials, region and endpoint. Raises InputError, without the
    name of what was asked for."""
    try:
        import botocore.configprovider
        import botocore.session
    except ImportError as error:
        raise ImportError("botocore; pip install 'ooc-gemm[remote]'") from error
    try:
        session = botocore.session.get_session()
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
        endpoint = botocore.configprovider.ConfiguredEndpointProvider(
            session.full_config, session.get_scoped_config(), "s3"
        ).provide()
        unsigned = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on")
        found = None if unsigned else session.get_credentials()
    except Exception as error:  # a profile that is not there, a file that cannot be parsed
        said = " ".join(str(error).split())
        raise InputError(f"cannot be asked for: {said}; repair ~/.aws/config or AWS_PROFILE") from error
    options = {key: value for key, value in (("region", region), ("endpoint", endpoint)) if value}
    if unsigned:
        return options
    if found is None:
        raise InputError(
            "needs credentials, and there are none; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public bucket"
        )
    return {**options, "credential_provider": _Credentials(found)}


class _Credentials:
    """botocore's credentials, which it renews, as obstore asks for them. None are pickled: another process
    that gets this object finds credentials of its own."""

    def __init__(self, found: Any):
        self._found = found
        self()

    def __reduce__(self) -> tuple[Any, ...]:
        return _credentials_here, ()

    def __call__(self) -> dict[str, Any]:
        """Those of now."""
        now = self._found.get_frozen_credentials()
        redact.keep_secret(now.access_key, now.secret_key, now.token)
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=10),
        }


def _credentials_here() -> Any:
    """A credential provider of this process; None where there are no credentials."""
    return _aws().get("credential_provider")


def secrets_of(client: Any) -> Iterator[Any]:
    """What obstore's store holds, and would pickle, that may be a credential."""
    provider = getattr(client, "credential_provider", None)
    if not (provider is None or isinstance(provider, _Credentials)):
        yield provider
    for name in ("config", "client_options"):
        yield from redact.secrets_in(getattr(client, name, None) or {})
    yield from redact.secrets_in({"endpoint": getattr(client, "url", None)})


# ------------------------------------------------------------------------------------------------ objects


class Answers(Protocol):
    """Waits for asynchronous answers, with a time limit (store.Answers)."""

    def of(self, question: Coroutine[Any, Any, T]) -> T:
        """The answer."""

    def cancel(self) -> None:
        """Wake all who wait."""


async def _ask(question: Callable[[], Awaitable[T]]) -> T:
    """obstore wants to be called where the loop runs."""
    return await question()


async def _next(stream: Any) -> Any:
    """None at the end."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


@dataclass(frozen=True)
class _Stat:
    """Of an object, as `Folder.stamps` takes it of a file."""

    st_size: int
    st_mtime_ns: int
    st_ctime_ns = st_ino = st_dev = 0

    def stat(self) -> "_Stat":
        return self


def _tag(found: Any) -> int:
    """Another number where the object is another."""
    said = found.get("e_tag") or found.get("version") or str(found.get("last_modified"))
    return int.from_bytes(blake2b(said.encode(), digest_size=8).digest(), "big") >> 1


_fastest: dict[int, float] = {}
"""Of each client, by its id."""


def _version(found: Any) -> Any:
    """What `put` takes for its mode to replace just this."""
    return {name: found[name] for name in ("e_tag", "version") if found.get(name)}


class Objects:
    """What lies below one address."""

    def __init__(self, store: Any, prefix: str, answers: Answers):
        """`store`: obstore's."""
        import obstore

        self._obstore, self._store, self._answers = obstore, store, answers
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""

    @property
    def path(self) -> str:
        """Of the address in its store."""
        return self._prefix.rstrip("/")

    def at(self, path: str) -> "Objects":
        """What lies below another path of the same store."""
        return Objects(self._store, path, self._answers)

    @property
    def tells(self) -> bool:
        """Whether it can be asked for all there is, and changes objects only if nobody else has."""
        return type(self._store).__name__ != "HTTPStore"

    def cancel(self) -> None:
        """Wake all who wait."""
        self._answers.cancel()

    def find(self, key: str) -> bytes | None:
        """An object, None where there is none."""
        found = self.find_version(key)
        return None if found is None else found[0]

    def find_version(self, key: str) -> tuple[bytes, Any] | None:
        """The same, and its version."""
        try:
            data, version = self._answers.of(_ask(lambda: self._get(key)))
        except FileNotFoundError:
            return None
        return bytes(data), version

    def document(self, key: str, most: int) -> bytes | None:
        """The same, or just more than `most` bytes where it is longer."""
        try:
            return self._timed(_ask(lambda: self._document(key, most)))
        except FileNotFoundError:
            return None

    async def _document(self, key: str, most: int) -> bytes:
        found = await self._obstore.get_async(self._store, self._prefix + key)
        return bytes(most + 1 if found.meta["size"] > most else await found.bytes_async())

    async def _get(self, key: str) -> tuple[Any, Any]:
        found = await self._obstore.get_async(self._store, self._prefix + key)
        version = _version(found.meta)
        return await found.bytes_async(), version

    def start(self, key: str, size: int) -> bytes | None:
        """The first bytes of an object, None where there is none."""
        try:
            found = self.stat(key)
            return bytes(self.read(key, 0, min(size, found[0]))) if found[0] else b""
        except FileNotFoundError:
            return None

    def read(self, key: str, start: int, size: int) -> Any:
        """Bytes of an object. Raises FileNotFoundError."""
        path = self._prefix + key
        return self._answers.of(
            _ask(lambda: self._obstore.get_range_async(self._store, path, start=start, length=size))
        )

    def stat(self, key: str) -> Stamp:
        """Size and tag. Raises FileNotFoundError."""
        found = self._answers.of(_ask(lambda: self._obstore.head_async(self._store, self._prefix + key)))
        return int(found["size"]), _tag(found)

    @property
    def latency(self) -> float:
        """Seconds until an answer: the fastest there was, of a list or a small object."""
        return _fastest.get(id(self._store), 0.0)

    def _timed(self, question: Coroutine[Any, Any, T]) -> T:
        start, which = time.perf_counter(), id(self._store)
        answer = self._answers.of(question)
        _fastest[which] = min(_fastest.get(which, math.inf), time.perf_counter() - start)
        return answer

    def put(self, key: str, data: Any, mode: Any = "overwrite") -> tuple[Stamp, Any]:
        """Size, tag and version of the object that is there then: in one request, and so whole or not."""
        path = self._prefix + key
        made = self._answers.of(
            _ask(lambda: self._obstore.put_async(self._store, path, data, mode=mode, use_multipart=False))
        )
        if not made.get("e_tag"):
            return self.stat(key), _version(made)
        return (len(data), _tag(made)), _version(made)

    def list(self) -> Iterator[tuple[str, int, int]]:
        """Keys, sizes and tags of all there is."""
        stream = self._obstore.list(self._store, self._prefix or None, chunk_size=1000)
        batch = self._timed(_next(stream))
        while batch is not None:
            for found in batch:
                if found["path"].startswith(self._prefix):
                    yield found["path"][len(self._prefix) :], int(found["size"]), _tag(found)
            batch = self._answers.of(_next(stream))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove some; those that are not there are none."""
        paths = [self._prefix + key for key in keys]
        for at in range(0, len(paths), 1000):
            some = paths[at : at + 1000]
            self._answers.of(_ask(lambda some=some: self._obstore.delete_async(self._store, some)))  # type: ignore[misc]

    def has(self, key: str) -> bool:
        """Whether there is such an object."""
        try:
            self.stat(key)
        except FileNotFoundError:
            return False
        return True

    def has_any(self) -> bool:
        """Whether there is anything."""
        return next(self.list(), None) is not None

    def changed(self, error: Exception) -> bool:
        """Whether an error says that somebody else was there first."""
        kinds = self._obstore.exceptions
        return isinstance(error, kinds.AlreadyExistsError | kinds.PreconditionError)

    def forbids(self, error: Exception) -> bool:
        """Whether an error says that something must not be asked for."""
        kinds = self._obstore.exceptions
        return isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError | PermissionError)

    def cannot(self, error: Exception) -> bool:
        """Whether an error says that the store knows no conditions."""
        return isinstance(error, self._obstore.exceptions.NotSupportedError | NotImplementedError)


class _Object(ChunkFile):
    """One chunk's object."""

    def __init__(self, objects: Objects, key: str, name: str):
        self._objects, self._key, self._name = objects, key, name

    @property
    def size(self) -> int:  # type: ignore[override]
        """Asked for."""
        return self._said(lambda: self._objects.stat(self._key)[0])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def read(self, into: Bytes, offset: int) -> None:
        """As of a file. Raises StoreError."""
        into[:] = self._bytes(offset, len(into))

    def read_range(self, into: Bytes, offset: int, size: int) -> Bytes:
        """As of a file, in memory of the client's."""
        return self._bytes(offset, size)

    def _bytes(self, offset: int, size: int) -> Bytes:
        found = np.frombuffer(self._said(lambda: self._objects.read(self._key, offset, size)), np.uint8)
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
                f"{self._name}: chunk {self._key} does not come ({why(error)}); "
                f"{remedy(error, 'see to its store')}, run again"
            ) from error


class RemoteFolder(Folder):
    """Where the chunks of an array in an object store lie."""

    def __init__(self, objects: Objects, name: str, metadata: Any, transposed: bool = False):
        super().__init__(Path(), metadata, transposed)
        self._objects, self._name = objects, name
        self._sizes: Any = None
        self.background = False

    def extent(self, i: int, j: int) -> tuple[int, int | None]:
        """The size was in the list of all."""
        return 0, None if self._sizes is None else int(self._sizes[i, j])

    def stamps(self, grid: tuple[int, int]) -> Any:
        """From the list of all objects."""
        found = super().stamps(grid)
        self._sizes = found[:, 0].reshape(grid)
        return found

    def open(self, key: str, direct: bool = True) -> ChunkFile:
        """Asks nothing yet."""
        return _Object(self._objects, key, self._name)

    def each(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        """Several at a time."""
        with ThreadPoolExecutor(AT_ONCE[0] * 2, OPENER) as pool:
            for _ in pool.map(work, items):
                pass

    def cancel(self) -> None:
        """Wake who waits."""
        self._objects.cancel()

    def _files(self) -> Iterator[tuple[str, Any]]:
        for key, size, tag in self._objects.list():
            yield key, _Stat(size, tag)


def why(error: BaseException) -> str:
    """What the client says, without what only its authors want to know."""
    text = str(error).partition("Debug source")[0]
    return " ".join(text.split())[:300] or type(error).__name__


# ------------------------------------------------------------------------------------------------ journal


class _Text(io.BytesIO):
    """A file that is only ever added to, and cut."""

    def write(self, data: Any) -> int:
        """At the end."""
        self.seek(0, io.SEEK_END)
        return super().write(data)


class RemoteJournal(Journal):
    """The journal as an object beside C's chunks, put whole now and then: every chunk that it names was there
    before. It is put only where it is still what this run has put last: whoever takes C over, to go on with
    it or to begin anew, so keeps those away who had it."""

    def __init__(self, objects: Objects, name: str):
        self._objects, self._run, self._version = objects, uuid.uuid4().hex, None
        super().__init__(Path(), name, create=True)

    @classmethod
    def begin(cls, objects: Objects, name: str, head: dict[str, Any], replace: bool) -> "RemoteJournal":
        """A new one, in the place of an older one where `replace` says so. Raises InputError where somebody
        else was faster, and what the store raises."""
        journal = cls(objects, name)
        journal._begin(head)
        journal._put("overwrite" if replace else "create")
        return journal

    @classmethod
    def go_on(cls, objects: Objects, name: str) -> "RemoteJournal":
        """The one that an interrupted run has left, which is this run's from now on. Raises InputError where
        there is none, or it cannot be used, and what the store raises."""
        journal = cls(objects, name)
        found = objects.find_version(NAME)
        if found is None:
            raise InputError(f"{name} has no journal of what was done, so it cannot be continued; {ANEW}")
        text, journal._version = found
        journal._file.write(text)
        journal._file.seek(0)
        journal._continue()
        if not journal.head:
            raise InputError(f"{name} has no journal of what was done, so it cannot be continued; {ANEW}")
        journal._put(journal._version)
        return journal

    def durable(self, count: int) -> None:
        """Put it, where chunks were added. Raises StoreError where C is another run's by now."""
        with self._lock:
            self._append({"durable": count, "save": self._saves + 1})
            self._saves += 1
        try:
            self._put(self._version)
        except InputError as error:
            raise StoreError(str(error)) from None

    def remove(self) -> None:
        """C is finished."""
        self._objects.delete([NAME])
        self.close()

    def _open(self, create: bool) -> BinaryIO:
        return _Text()

    def _boot(self) -> str:
        return self._run

    def _rewrite(self, *entries: dict[str, Any]) -> None:
        self._file, self._size = _Text(), 0
        self._append(*entries)

    def _write(self, lines: bytes) -> None:
        self._file.write(lines)

    def _put(self, mode: Any) -> None:
        with self._lock:
            text = self._file.getvalue()  # type: ignore[attr-defined]
        try:
            self._version = self._objects.put(NAME, text, mode)[1]
        except Exception as error:
            if self._objects.cannot(error):
                self._version = self._objects.put(NAME, text)[1]
                return
            if not self._objects.changed(error):
                raise
            found = self._objects.find_version(NAME)  # our own, whose answer got lost?
            if found is None or found[0] != text:
                raise InputError(
                    f"{self._name} is being written by another process; wait for it, or stop it"
                ) from error
            self._version = found[1]
