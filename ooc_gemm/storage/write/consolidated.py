"""Consolidated metadata of the groups that C lies in.

A group may hold copies of the metadata of all arrays below it. While C is unfinished such a copy would make
it look like an array, and afterwards like the array that C has replaced. So C's entry is removed when a run
begins, and written again when C is finished. That goes for every group above C, of version 3 (in `zarr.json`)
and of version 2 (`.zmetadata`).

Folders between C and a group, or a folder named like a store (`c.zarr`), are made groups when C is finished,
unless they are something else already.
"""

import contextlib
import json
import os
import unicodedata
from collections.abc import Iterator
from typing import Any

from ...support.errors import Error, InputError, StoreError
from ..format import documents
from ..format.unfinished import METADATA
from ..io.objects import why
from ..io.requests import side_by_side
from ..read.addresses import describe, local_path, objects_at
from ..read.metadata import document_at, explained, look_at
from .above import MAX_BYTES, Group, RemoteGroup, above, above_objects

DOCUMENTS = ("zarr.json", ".zmetadata")
"""What holds consolidated metadata, of version 3 and of version 2."""
MARKS = (b'"consolidated_metadata"', b'"metadata"')
"""Texts of which a document with consolidated metadata holds at least one."""
GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
"""The metadata of a group without attributes."""
STORE = ".zarr"
"""How names of stores end."""


class Consolidated:
    """The entries of one C in the consolidated metadata of the groups above it."""

    def __init__(self, groups: list[Group], name: str, parents: int = 0):
        """groups: the places above C. name: how messages call C. parents: how many of them, from the first
        on, are the folders that C lies in, the nearest first. Raises InputError where one of them cannot
        be read."""
        self._name, self._parents = name, groups[:parents]
        looks = [(group, document) for group in groups for document in DOCUMENTS]

        def look(one: tuple[Group, str]) -> tuple[bool, bool]:
            text = one[0].read(one[1])
            return text is not None, text is not None and MARKS[DOCUMENTS.index(one[1])] in text

        if any(isinstance(group, RemoteGroup) for group in groups):
            found = side_by_side([lambda one=one: look(one) for one in looks])  # type: ignore[misc]
        else:
            found = [look(one) for one in looks]
        self._groups = [
            one for (one, key), (there, _) in zip(looks, found, strict=True) if there and key == DOCUMENTS[0]
        ]
        self._holders = [one for one, (_, holds) in zip(looks, found, strict=True) if holds]

    def unseen(self) -> str | None:
        """Return what to tell the user where the nearest group above a new C, which is of version 3, is of
        version 2."""
        for group in self._parents:
            if group in self._groups:
                return None
            if group.read(".zgroup") is not None:
                return (
                    f"{self._name} will be of Zarr version 3, in the group {group.name} of version 2: "
                    "programs that open the group, such as xarray, will not see C; open it by its own path"
                )
        return None

    def forget(self) -> None:
        """Remove the entry of C from all groups, because C is begun. Raises InputError where a group cannot
        be changed."""
        for group, document in self._holders:
            try:
                group.change(document, lambda text, key=group.key: _without(text, key))  # type: ignore[misc]
            except Exception as error:
                raise InputError(
                    f"{self._name} cannot be begun: a group above it holds its metadata in {document}, which "
                    f"cannot be changed ({_said(error)}); make it writable, or choose another place"
                ) from error

    def enter(self, entry: dict[str, Any], attributes: dict[str, Any] | None) -> str | None:
        """Make folders above C groups, and write the entry of C into all groups, because C is finished.

        entry: the contents of C's zarr.json or .zarray. attributes: those of its .zattrs, None for version 3.
        Returns what to tell the user where a group cannot be made or changed.
        """
        made, said = self._new_groups() if attributes is None else [], None
        for group in made:
            try:
                group.make(DOCUMENTS[0], json.dumps(GROUP, indent=2).encode())
            except Exception as error:
                said = (
                    f"{self._name} is finished, but the folder {group.name} above it cannot be made a group "
                    f"({_said(error)}); make it writable, and run again with resume=True"
                )
        keys = {group.key for group in made}
        for group, document in self._holders:
            try:
                group.change(
                    document,
                    lambda text, key=group.key: _with(text, key, entry, attributes, keys),  # type: ignore[misc]
                )
            except Exception as error:
                said = (
                    f"{self._name} is finished, but is missing in the consolidated metadata of a group above "
                    f"it, which cannot be changed ({_said(error)}); consolidate them again"
                )
        return said

    def _new_groups(self) -> list[Group]:
        """The folders above C that are to be made groups: those below the nearest group, or else the
        outermost that is named like a store, and those below it. What is of version 2 stays as it is."""
        stores = any(group.name.endswith(STORE) for group in self._parents)
        found: list[Group] = []
        last = 0
        for group in self._parents if stores or self._groups else []:
            if group in self._groups:
                return found
            if any(group.read(key) is not None for key in (METADATA[1], ".zgroup")):
                break
            found.append(group)
            if group.name.endswith(STORE):
                last = len(found)
        return found[:last]


@contextlib.contextmanager
def forgotten(spec: Any) -> Iterator[Consolidated]:
    """Remove the entry of C from the groups above it, and write it again where the body fails and C is still
    an array. Raises InputError."""
    groups = groups_of(spec)
    groups.forget()
    try:
        yield groups
    except BaseException:
        enter(spec, groups)
        raise


def groups_of(spec: Any) -> Consolidated:
    """Find the groups above C that hold its metadata. Raises InputError."""
    name, place = describe(spec), local_path(spec)
    with explained(name, remote=place is None):
        if place is not None:
            spelled = os.fspath(spec) if isinstance(spec, str | os.PathLike) else ""
            groups = above(place, None if "://" in spelled else spelled)
            return Consolidated(groups, name, len(place.parents))
        objects = objects_at(spec)
        groups = above_objects(objects) if objects else []
        return Consolidated(groups, name, len(groups))


def enter(spec: Any, groups: Consolidated) -> str | None:
    """Write the metadata of the array at C's place into the groups above it, if there is an array. Returns
    what to tell the user where a group cannot be changed."""
    with contextlib.suppress(Error):
        return groups.enter(*entry_of(spec, describe(spec)))
    return None


def entry_of(spec: Any, name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read the metadata of an array, and for version 2 its attributes. Raises InputError."""
    at, key, described = look_at(spec, name)
    if documents.kind(key, described) != "array":
        raise InputError(f"{name} is not a Zarr array; check the path")
    if key == METADATA[0]:
        return described, None
    return described, documents.parse(name, document_at(at, ".zattrs") or b"{}")


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or why(error)


def _entries(text: bytes) -> tuple[dict[str, Any], dict[str, Any], bool] | None:
    """Return a document, its entries, and whether they are of version 3; None where it has none. Raises
    StoreError where it is too long."""
    if len(text) > MAX_BYTES:
        raise StoreError(f"it takes more than {MAX_BYTES >> 20} MiB")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    inline = found.get("consolidated_metadata")
    new = found.get("zarr_format") == 3
    entries = inline.get("metadata") if new and isinstance(inline, dict) else found.get("metadata")
    return (found, entries, new) if isinstance(entries, dict) else None


def _without(text: bytes, key: str) -> bytes | None:
    """Return the document without the entries of C and of everything below it; None where it has none."""
    if (parsed := _entries(text)) is None:
        return None
    found, entries, _ = parsed
    gone = [one for one in entries if one == key or one.startswith(f"{key}/")]
    for one in gone:
        del entries[one]
    return json.dumps(found, indent=2).encode() if gone else None


def _with(
    text: bytes, key: str, entry: dict[str, Any], attributes: dict[str, Any] | None, made: set[str]
) -> bytes | None:
    """Return the document with C's entry; None where it has no place for one. made: C's paths relative to the
    groups that were made for it."""
    if (parsed := _entries(text)) is None:
        return None
    found, entries, new = parsed
    between = [key[:at] for at, letter in enumerate(key) if letter == "/"]
    if new:
        inline = {"kind": "inline", "must_understand": False, "metadata": {}}
        for one in between:
            if key.removeprefix(f"{one}/") in made:
                entries.setdefault(one, {**GROUP, "consolidated_metadata": inline})
    if new != (attributes is None) or any(
        one + ("" if new else "/.zgroup") not in entries for one in between
    ):
        return None
    own = {key: entry} if attributes is None else {f"{key}/.zattrs": attributes, f"{key}/.zarray": entry}
    before = list(entries.items())
    after = sorted((entries | own).items(), key=lambda item: _order(item[0], new))
    if after == before:
        return None
    entries.clear()
    entries.update(after)
    return json.dumps(found, indent=2).encode()


def _order(key: str, new: bool) -> tuple[int, str, str, str]:
    """Return what entries are sorted by. Zarr writes them in this order, and zarr 3.1 loses members of a
    group whose entries do not follow each other. new: whether the entry is of version 3."""
    path = key if new else key.rpartition("/")[0]
    parent, slash, name = path.rpartition("/")
    return path.count("/"), _folded(parent + slash), parent, _folded(name)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
