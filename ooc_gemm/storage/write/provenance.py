"""Describes what a C is made of: its inputs and options, in the head of its journal and in the attributes of
a finished C. By this description a run is recognized as one that was begun, or is finished already."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...support.errors import InputError
from ...support.intervals import ceil_div
from ..format import documents, limits
from ..format.chunks import Chunks
from ..format.unfinished import METADATA
from ..io.stamps import Stamp, Stamps, digest
from ..read import addresses, metadata
from ..read.source import Opened
from .journal import ANEW, Chunk, Journal

ATTRIBUTE = "ooc-gemm"
"""The attribute of a finished C that describes what it was made of."""
LAYOUT = ("alpha", "beta", "out_dtype", "chunks", "shards", "compressor")
"""Options that a continued run takes from the journal where they are not given again (None)."""


def head(
    sources: Mapping[str, Opened],
    before: Iterable[tuple[Chunk, Stamp]],
    options: dict[str, Any],
) -> dict[str, Any] | None:
    """Return the first line of a journal; None where changes of the inputs could not be noticed.

    sources: the inputs `a` and `b`, and `c` where C is read. before: chunks of C, and the stamps that they
    had before this run wrote them. options: everything that can change a bit of the result, as JSON types.
    """
    inputs = {}
    for name, source in sources.items():
        mark = source.fingerprint(before if name == "c" else ())
        if mark is None:
            return None
        inputs[name] = {"name": source.name, "is": mark}
        if name != "c":  # which is where the journal is
            inputs[name]["at"] = digest([source.address.encode()])
    return {"inputs": inputs, "options": options}


def number(value: complex) -> str:
    """Spell a number so that 2, 2.0 and 2+0j give the same text."""
    value = complex(value)
    return str(value) if value.imag else str(value.real)


def settled(
    given: Mapping[str, Any], begun: Mapping[str, Any] | None, there: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Return the options of `LAYOUT` with the values that count; C's type, chunks and shards may stay open.

    given: options as the user gave them, None for those not given. begun: the head of the journal of the run
    that is continued, or None. there: `chunks` and `shards` of an existing C; giving those is the same as
    giving those of the journal. name: how messages call C. Raises InputError where the head cannot be used.
    """
    found = dict(given)
    if begun is None:
        usual = {"alpha": 1.0, "beta": 0.0, "compressor": "none"}
        return found | {key: value for key, value in usual.items() if found[key] is None}
    try:
        before = begun["options"]
        for key in LAYOUT:
            if found[key] is None or (key in there and found[key] == there[key]):
                found[key] = before[key]
        for key in ("alpha", "beta"):
            value = complex(found[key])
            found[key] = value if value.imag else value.real
        for key in ("chunks", "shards"):
            if found[key] is not None:
                rows, cols = found[key]
                found[key] = int(rows), int(cols)
        if not isinstance(found["compressor"], str):
            raise TypeError
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"what {name} was begun with cannot be read; start over with force=True") from error
    return found


def reads_c(begun: Mapping[str, Any]) -> bool:
    """Whether the run whose journal has this head reads the old C."""
    return "c" in (begun.get("inputs") or ())


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return sentences on how two heads differ: that of the run that was begun, and that of this run. An
    input is the same if it lies at the same place, however that is spelled, and has not changed."""
    found = []
    for name, was in before["inputs"].items():
        found_now = now["inputs"].get(name)
        if found_now is None or any(was.get(key) != found_now.get(key) for key in ("is", "at")):
            found.append(f"{was['name']} was changed since, or is another array")
    options = dict.fromkeys(now["options"]) | dict(before["options"])
    for name, was in options.items():
        after = now["options"].get(name)
        if json.dumps(after) != json.dumps(was):
            found.append(f"{name} was {_word(was)} and is {_word(after)}")
    return found


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def refuse_changes(log: "Journal | Finished", head: Mapping[str, Any] | None, name: str) -> None:
    """Raise InputError where this run is not the one that was begun, or whose result is finished.

    log: the journal of the run that was begun, or a finished C. head: of this run; None where changes of its
    inputs could not be noticed. name: how messages call C.
    """
    head = head or {"inputs": {}, "options": {}}
    if isinstance(log, Finished):
        if other := log.others(head):
            raise InputError(
                f"{name} is not the unfinished result of an interrupted run but a finished array, and "
                f"not the result asked for: {'; '.join(other)}; leave out resume=True"
            )
    elif other := differences(log.head, head):
        raise InputError(
            f"{name} cannot be continued: {'; '.join(other)}; give what it was begun with, or {ANEW}"
        )


def mark(metadata: Any, stamps: Stamps) -> str:
    """Return the digest by which a finished C is recognized: of its metadata without attributes and names of
    dimensions, which are not read, and of the stamps of all its chunks."""
    described = {**metadata.to_dict(), "attributes": {}}
    described.pop("dimension_names", None)
    return digest([json.dumps(described, default=str).encode(), stamps[:, :2].tobytes()])


class _Every(Mapping[Chunk, tuple[Stamp, Stamp]]):
    """All chunks of a grid, with no stamps."""

    def __init__(self, grid: tuple[int, int]):
        self._grid = grid

    def __getitem__(self, chunk: Chunk) -> tuple[Stamp, Stamp]:
        if not all(0 <= at < count for at, count in zip(chunk, self._grid, strict=True)):
            raise KeyError(chunk)
        return (0, 0), (0, 0)

    def __iter__(self) -> Iterator[Chunk]:
        return ((i, j) for i in range(self._grid[0]) for j in range(self._grid[1]))

    def __len__(self) -> int:
        return self._grid[0] * self._grid[1]


class Finished:
    """A finished C whose attributes describe what it was made of. It replaces the journal of a run in which
    nothing is left to do."""

    def __init__(self, name: str, record: Mapping[str, Any], grid: tuple[int, int], changed: bool):
        """name: how messages call C. record: what its attributes say. grid: number of chunks, or shards, down
        and across. changed: whether C was changed since it was finished."""
        self.name, self._changed = name, changed
        self.head: dict[str, Any] = {"inputs": dict(record["inputs"]), "options": dict(record["options"])}
        self.head["inputs"].pop("c", None)  # C as it was before
        self.done: Mapping[Chunk, tuple[Stamp, Stamp]] = _Every(grid)
        """All chunks, in the form that a journal has them."""

    def others(self, head: Mapping[str, Any]) -> list[str]:
        """Return sentences on how this C differs from what `head` asks for."""
        changed = ["its chunks were changed since, or copied without their times"] if self._changed else []
        return differences(self.head, head) + changed

    def __str__(self) -> str:
        options = self.head["options"]
        return (
            f"{self.name} is finished already, with the same inputs, alpha {options['alpha']} and beta "
            f"{options['beta']}; nothing was done"
        )


def finished(spec: Any) -> Finished | None:
    """Return the finished C at a place; None where its attributes do not describe what it was made of. spec:
    path, URL or zarr.Array. Raises InputError where its metadata cannot be read."""
    name = addresses.describe(spec)
    with metadata.explained(name, remote=addresses.local_path(spec) is None):
        at, key, described = metadata.look_at(spec, name)
        if documents.kind(key, described) != "array":
            return None
        if key == METADATA[1]:
            attributes = documents.parse(name, metadata.document_at(at, ".zattrs") or b"{}")
        else:
            attributes = described.get("attributes") or {}
        record: Any = attributes.get(ATTRIBUTE)
        try:
            parts = record["inputs"], record["options"], record["result"]
            usable = all(isinstance(x["name"], str) for x in parts[0].values()) and {*LAYOUT} <= {*parts[1]}
        except (AttributeError, LookupError, TypeError):
            return None
        if not usable:
            return None
        array = metadata.array_at(documents.check(name, described, key), at)
        unit = array.shards or array.chunks
        grid = ceil_div(array.shape[0], unit[0]), ceil_div(array.shape[1], unit[1])
        if grid[0] * grid[1] > limits.MAX_CHUNKS:
            return None
        stamps = stamps_of(array, grid)
        if stamps is None:
            return None
        return Finished(name, record, grid, mark(array.metadata, stamps) != parts[2])


def recorded(spec: str, name: str) -> dict[str, Any] | None:
    """Return what a finished group says of the run that made it; None where it says nothing, or there is no
    group. name: how messages call it. Raises InputError where its metadata cannot be read."""
    with metadata.explained(name, remote=addresses.local_path(spec) is None):
        _, key, described = metadata.look_at(spec, name)
    if documents.kind(key, described) != "group":
        return None
    record = (described.get("attributes") or {}).get(ATTRIBUTE)
    if not isinstance(record, dict) or not {"inputs", "options"} <= set(record):
        return None
    return {"inputs": record["inputs"], "options": record["options"]}


def stamps_of(array: Any, grid: tuple[int, int]) -> Stamps | None:
    """Return the stamps of the files or objects of an array, in row-major order; None where they cannot be
    had."""
    place = addresses.place_of(array)
    return None if place is None else Chunks(place, array.metadata).stamps(grid)
