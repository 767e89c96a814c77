"""What names an array (a path, a URL, an open array), and which place it means."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import zarr
from zarr.storage import (
    FsspecStore,
    GpuMemoryStore,
    LocalStore,
    MemoryStore,
    ObjectStore,
    StorePath,
    ZipStore,
)

from ...planning.traits import StoreTraits
from ...support import redact
from ...support.errors import InputError
from ..io import answers
from ..io.answers import Answers
from ..io.client import address, connect, normal, shown, speaks
from ..io.client import secrets_of as remote_secrets
from ..io.folder import Folder
from ..io.objects import Objects
from ..io.place import Place
from ..io.zarr_internals import unwrapped
from .source import Opened

KNOWN = "s3://, gs://, az://, abfs://, abfss://, http://, https:// or file://"
"""How messages list the schemes of addresses."""


def describe(spec: Any) -> str:
    """Return how messages call an array: its path or URL as given, or what it is."""
    if isinstance(spec, Opened):
        return spec.name
    if isinstance(spec, str | os.PathLike):
        return redact.url(os.fspath(spec)) or "''"
    if isinstance(spec, zarr.Array):
        redact.keep_secret(*secrets_of(spec))
        if path := local_path(spec):
            return str(path)
        at = spec.store_path
        if isinstance(at.store, ObjectStore):
            return redact.redacted(f"{shown(at.store.store)}/{at.path}".rstrip("/"))
        text = str(at)
        return redact.redacted(f"{type(at.store).__name__}/{at.path}" if text.startswith("<") else text)
    return f"the {type(spec).__name__} given"


def role(spec: Any, name: str) -> str:
    """Return how messages call an operand: the name it is stored under, or its letter (`A`)."""
    return describe(spec) if isinstance(spec, str | os.PathLike | zarr.Array | Opened) else name


class Located(str):
    """A path as the user has given it, and the folder that it means. A run resolves it once, and so takes the
    same folder to its end."""

    __slots__ = ("place",)
    place: Path


def located(spec: Any) -> Any:
    """Return what names an array, together with its folder where it is the path of one. Raises InputError
    for a text that cannot name a file."""
    place = local_path(spec) if isinstance(spec, str | os.PathLike) else None
    if place is None:
        return spec
    found = Located(os.fspath(spec))
    found.place = place
    return found


def local_path(spec: Any) -> Path | None:
    """Return the folder of a local array or group, with symlinks resolved; None for anything else. Raises
    InputError for a text that cannot name a file."""
    if isinstance(spec, Opened):
        return spec.place
    if isinstance(spec, zarr.Array):
        store = spec.store_path.store
        return (
            Path(os.path.realpath(Path(store.root) / spec.store_path.path))
            if isinstance(store, LocalStore)
            else None
        )
    if isinstance(spec, Located):
        return spec.place
    if not isinstance(spec, str | os.PathLike):
        return None
    text = os.fspath(spec)
    url = urlsplit(text)
    if url.scheme in ("file", "local"):
        return _resolved(unquote(url.path))
    return None if "://" in text else _resolved(text)


def _resolved(path: str) -> Path:
    """Return a path with symlinks resolved. Raises InputError for a text that cannot name a file."""
    try:
        if b"\0" not in os.fsencode(path):
            return Path(os.path.realpath(path))
    except UnicodeError:
        pass
    raise InputError(
        f"{redact.url(path)!a} cannot be a path: it holds a null byte, or half of a character; check its "
        "spelling"
    )


def portable(spec: Any) -> Any:
    """Return what another process can open the same array by: a path, a URL or an open array. Returns None
    where another process cannot find the array, or would be sent credentials with it."""
    if (place := local_path(spec)) is not None:
        return str(place)
    at = spec.store_path if isinstance(spec, zarr.Array) else None
    if at and isinstance(at.store, FsspecStore) and "file" in _protocols(at.store):  # dask opens paths so
        return os.path.join(at.store.path, at.path).rstrip("/")
    known = isinstance(spec, str) or (at and isinstance(at.store, FsspecStore | ObjectStore | ZipStore))
    return spec if known and next(secrets_of(spec), None) is None else None


def secrets_of(spec: Any) -> Iterator[Any]:
    """Return the parts of an address, or of the store of an open array, that may be credentials. They would
    be pickled with an open array."""
    if isinstance(spec, str):
        yield from redact.secrets_in({"endpoint": redact.without_container(spec)})
    if not isinstance(spec, zarr.Array):
        return
    store = spec.store_path.store
    if isinstance(store, ObjectStore):
        yield from remote_secrets(store.store)
    elif isinstance(store, FsspecStore):
        yield from redact.secrets_in({"path": store.path})
        system = getattr(store.fs, "sync_fs", store.fs)
        yield from redact.secrets_in([system.storage_args, system.storage_options])


def is_array(spec: Any) -> bool:
    """Whether an object is an open zarr array."""
    return isinstance(spec, zarr.Array)


def in_memory(spec: Any) -> bool:
    """Whether what is written to an open array stays in the memory of this process."""
    if not isinstance(spec, zarr.Array):
        return False
    store = unwrapped(spec.store_path.store)
    if isinstance(store, FsspecStore):
        return "memory" in _protocols(store)
    if isinstance(store, ObjectStore):
        return type(store.store).__name__ == "MemoryStore"
    return isinstance(store, MemoryStore) and not isinstance(store, GpuMemoryStore)


def _protocols(store: FsspecStore) -> list[str]:
    """Return the names of the protocol by which a file system of fsspec's is reached."""
    system: Any = getattr(store.fs, "sync_fs", store.fs)
    return [str(one) for one in np.atleast_1d(system.protocol)]


def is_transactional(store: Any) -> bool:
    """Whether a store shows what is written to others when its session is committed, as Icechunk's does. It
    takes no keys but Zarr's, and may fail where a range ends behind the end."""
    return type(store).__module__.partition(".")[0] == "icechunk"


def traits_of(spec: Any) -> StoreTraits:
    """Return what is known of the store at a place before an array there is opened: whether it is remote.
    `Opened.traits` has all traits."""
    if isinstance(spec, zarr.Array):
        return StoreTraits(remote=isinstance(spec.store_path.store, ObjectStore))
    return StoreTraits(remote=isinstance(spec, str) and local_path(spec) is None)


def same_place(one: Any, other: Any) -> bool:
    """Whether two arrays are the same, or the folder of one lies inside the other's."""
    a, b = local_path(one), local_path(other)
    if a is None or b is None:
        if (
            isinstance(one, zarr.Array)
            and isinstance(other, zarr.Array)
            and one.store_path == other.store_path
        ):
            return True
        urls = [address_of(spec) for spec in (one, other)]
        return bool(urls[0] and urls[1]) and (urls[0].startswith(urls[1]) or urls[1].startswith(urls[0]))
    return a == b or a in b.parents or b in a.parents


def address_of(spec: Any) -> str:
    """Return the address of an array that is not local, the same for every spelling; empty where it is not
    known."""
    if isinstance(spec, Opened):
        return spec.address
    if isinstance(spec, zarr.Array):
        at = spec.store_path
        root = address(at.store.store) if isinstance(at.store, ObjectStore) else ""
        return root and normal(f"{root}/{at.path}")
    return normal(spec) if isinstance(spec, str) and "://" in spec else ""


def objects_at(spec: Any, nbytes: int = 0) -> Objects | None:
    """Return the objects at an address, or of an open array, in a store that lists them and reports their
    changes; None for all else. `nbytes`: the most bytes that a request moves."""
    if isinstance(spec, zarr.Array):
        at = spec.store_path
    elif local_path(spec) is None and speaks(os.fspath(spec)):
        at = remote_place(os.fspath(spec))
    else:
        return None
    if not isinstance(at.store, ObjectStore):
        return None
    found = Objects(at.store.store, at.path, Answers(at.store, nbytes))
    return found if found.traits.listable else None


def place_of(spec: Any) -> Place | None:
    """Return the folder of an array, or the objects at its address; None where it is in neither. spec: path,
    URL or zarr.Array."""
    local = local_path(spec)
    return objects_at(spec) if local is None else Folder(local)


def remote_place(url: str) -> StorePath:
    """Return the store and path of a URL: by obstore where it understands the scheme, otherwise by the file
    system that this program has registered with fsspec for it. Raises InputError where there is none."""
    redact.keep_secrets_of(url)
    if speaks(url):
        client, path = connect(url, answers.TIMEOUT)
        return StorePath(ObjectStore(client), path)
    if not _registered(scheme := url.partition("://")[0]):
        raise InputError(
            f"{redact.url(url)}: addresses that begin with {scheme}:// are not known; give a path, or an "
            f"address that begins with {KNOWN}"
        )
    return StorePath(FsspecStore.from_url(url))


def _registered(scheme: str) -> bool:
    """Whether this program has registered a file system of its own with fsspec. Those that fsspec brings
    (ftp, memory) do not count."""
    try:
        from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]
    except ImportError:
        return False
    return scheme in registry and scheme not in known_implementations
