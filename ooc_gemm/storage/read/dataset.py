"""Genotypes with the names of their samples, from what a user gives: a matrix, calls, or a group of VCF
Zarr."""

import copy
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zarr
from zarr.storage import StorePath

from ...support.errors import InputError
from ..format import documents
from . import addresses
from .calls import Described, open_calls
from .inputs import open_input
from .metadata import array_at, document_at, explained, look_at
from .source import Opened
from .texts import read_texts

CALLS, NAMES = "call_genotype", "sample_id"


@dataclass(frozen=True)
class Dataset:
    """Genotypes, opened as a matrix."""

    opened: Opened
    axis: int | None = None
    """The axis of samples that the names of its dimensions say; None where they do not."""
    names: Any = None
    """Where the names of samples are; None where there are none, or where an array alone was given."""

    def sample_names(self, count: int) -> list[str] | None:
        """Read the names of all samples; None where there are none. Raises InputError."""
        if isinstance(self.names, StorePath):
            return read_texts(self.names, f"{NAMES} of {self.opened.name}", count)
        return None if self.names is None else [str(one) for one in np.asarray(self.names)]


def open_dataset(spec: Any, name: str) -> Dataset:
    """Open genotypes.

    spec: what `open_input` takes, a group or an xarray Dataset with `call_genotype`, or an array of three
    dimensions, the last of which is ploidy. name: how messages call what has no name. Raises InputError.
    """
    name = addresses.role(spec, name)
    if isinstance(spec, zarr.Group) or (isinstance(spec, zarr.Array) and spec.ndim == 3):
        at = spec.store_path
    elif isinstance(spec, str | os.PathLike):
        found = _at_path(spec, name)
        if found is None:
            return Dataset(open_input(spec, name))
        at = found
    elif hasattr(spec, "data_vars"):  # xarray's Dataset
        if CALLS not in spec:
            raise InputError(f"{name} holds no {CALLS}; give an array of genotypes")
        array = spec[CALLS]
        return Dataset(open_calls(name, array), _axis(array.dims), spec.get(NAMES))
    else:
        three = len(getattr(spec, "shape", ())) == 3 and hasattr(spec, "dtype")
        opened = open_calls(name, spec) if three else open_input(spec, name)
        return Dataset(opened, _axis(getattr(spec, "dims", ())))
    with explained(name):
        return _stored(at, name)


def _at_path(spec: str | os.PathLike[str], name: str) -> StorePath | None:
    """The place of a group, or of an array of three dimensions; None for anything else."""
    place = addresses.local_path(spec)
    if place is not None and not os.path.exists(place):  # Path.exists raises where a name is too long
        return None
    with explained(name, remote=place is None):
        at, key, described = look_at(spec, name)
    shape = described.get("shape")
    group = documents.kind(key, described) == "group"
    return at if group or (isinstance(shape, list) and len(shape) == 3) else None


def _stored(at: StorePath, name: str) -> Dataset:
    """Open calls in a store. at: of the group, or of the array itself."""
    _, key, described = look_at(at, name)
    names = None
    if documents.kind(key, described) == "group":
        names = at / NAMES if look_at(at / NAMES, name)[1] else None
        at, name = at / CALLS, f"{name}/{CALLS}"
        _, key, described = look_at(at, name)
    if documents.kind(key, described) != "array":
        raise InputError(f"{name} is not a Zarr array; give genotypes, or a group of VCF Zarr")
    dims = described.get("dimension_names")
    if key != "zarr.json":
        dims = documents.parse(name, document_at(at, ".zattrs") or b"{}").get(documents.DIMENSIONS)
    calls = _described(name, described, key, at)
    place = addresses.local_path(calls.calls)
    opened = replace(
        open_calls(name, calls), place=place, address=str(place or addresses.address_of(calls.calls))
    )
    return Dataset(opened, _axis(dims), names)


def _axis(dims: Any) -> int | None:
    """The axis that is called `samples`."""
    found = [str(one) for one in dims] if isinstance(dims, Iterable) else []
    return found.index("samples") if "samples" in found[:2] else None


def _described(name: str, described: dict[str, Any], key: str, at: StorePath) -> Described:
    """An array of three dimensions, and the matrix whose chunks hold the same bytes. Raises InputError."""
    plain, extents = copy.deepcopy(described), list[list[int]]()
    for one, what in _extents(plain, key):
        extents.append(_three(name, what, one.get(what)))
        rows, cols, ploidy = extents[-1]
        one[what] = [rows, cols * ploidy]
    plain = documents.check(name, plain, key)
    deep = copy.deepcopy(plain)
    for (one, what), found in zip(_extents(deep, key), extents, strict=True):
        one[what] = found
    calls = array_at(deep, at)
    moved = deep.get("order") == "F" or "transpose" in json.dumps(deep.get("codecs"))
    if moved or any(one[2] != extents[0][2] for one in extents):
        return Described(calls, None, "")
    alleles = array_at(plain, at)
    tail = calls.metadata.encode_chunk_key((0, 0, 0)).removeprefix(alleles.metadata.encode_chunk_key((0, 0)))
    return Described(calls, alleles, tail)


def _extents(described: dict[str, Any], key: str) -> list[tuple[dict[str, Any], str]]:
    """Where the metadata of this key hold the shape, and those of chunks and shards."""
    if key != "zarr.json":
        return [(described, "shape"), (described, "chunks")]
    found, chain = [(described, "shape")], described.get("codecs")
    for part in (described.get("chunk_grid"), *(chain if isinstance(chain, list) else ())):
        inside = part.get("configuration") if isinstance(part, dict) else None
        if isinstance(inside, dict) and "chunk_shape" in inside:
            found.append((inside, "chunk_shape"))
    return found


def _three(name: str, what: str, found: Any) -> list[int]:
    """The three extents of a shape. Raises InputError."""
    some = found[:4] if isinstance(found, list) else []
    if len(some) != 3 or any(type(x) is not int or not 0 <= x < documents.MAX_EXTENT for x in some):
        raise InputError(
            f"{name} has {what} {documents.short(found)}, and genotypes have three dimensions, variants × "
            "samples × ploidy, or two; give such an array"
        )
    return list(some)
