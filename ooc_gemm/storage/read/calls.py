"""Called genotypes as VCF Zarr has them (bio2zarr, sgkit), read as a matrix of numbers of alleles.

`call_genotype` has three dimensions, variants × samples × ploidy, and holds numbers of alleles: 0 for the
reference, −1 for a missing allele, −2 where a call has fewer alleles than others. Of each call this makes the
number of its alleles that are not the reference, or −1 where one of them is missing. A chunk of the array
holds the same bytes as one of a matrix of (samples · ploidy) columns, so it is read as such; each piece is
decoded into scratch memory of its thread and counted from there. No copy is stored.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore, ObjectStore

from ...planning.problem import Matrix, Work
from ...planning.schedule import Piece
from ...support.buffers import Bytes, scratch
from ...support.errors import InputError
from ...support.intervals import ranges
from ..format.bounded import bounded
from .arrays import computed, open_other, unlabelled
from .compressed import CompressedSource
from .inputs import open_zarr
from .mapped import taken
from .raw import RawSource
from .source import Array, Opened, Source

MISSING = -1
"""A call of which an allele is missing."""
PLOIDIES = (1, 2)
STRIP = 1 << 16
"""Calls that are counted together."""
WORK_BYTES = 16 * STRIP
"""What is allocated to count a strip."""


@cache
def _pairs() -> Array:
    """What is counted of every pair of alleles of 8 bits, by the 16 bits that both are in memory."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.int8).reshape(-1, 1, 2)
    return _counted(every)[:, 0]


def _counted(calls: Array) -> Array:
    """Alleles other than the reference of calls (rows × columns × ploidy); a call of one allele of two counts
    as homozygous."""
    there = calls != -2
    wrong = ((calls < 0) & there).any(axis=2) | ~there.any(axis=2)
    found = (calls > 0).sum(axis=2, dtype=np.int8) * (2 // np.maximum(there.sum(axis=2, dtype=np.int8), 1))
    return np.where(wrong, np.int8(MISSING), found)


def count_alleles(calls: Array, out: Array) -> None:
    """Count the alleles of each call that are not the reference.

    calls: rows × columns × ploidy, integers with sign, of 1 or 2 alleles, contiguous. out: rows × columns,
    int8. A call of a single allele counts as homozygous: 0 or 2.
    """
    rows, cols, ploidy = calls.shape
    for start, stop in ranges(rows, max(1, STRIP // max(1, cols))):
        if ploidy == 2 and calls.dtype == np.int8:
            _count_pairs(calls[start:stop].view(np.uint16)[:, :, 0], out[start:stop])
        else:
            out[start:stop] = _counted(calls[start:stop])


def _count_pairs(pairs: Array, out: Array) -> None:
    """`count_alleles` of pairs of 8 bits, with a few operations on 16 bits where no allele is negative."""
    low = np.uint16(0x7F7F)
    some = ((pairs & low) + low) >> np.uint16(7)  # bits 0 and 8 say which of both alleles is not 0
    np.copyto(out, (some & np.uint16(1)) + (some >> np.uint16(8) & np.uint16(1)), casting="unsafe")
    negative = (pairs & np.uint16(0x8080)) != 0
    if negative.any():
        out[negative] = _pairs()[pairs[negative]]


class CallSource(Source):
    """Reads chunks of calls by another source, as a matrix of alleles, and counts them."""

    def __init__(self, source: Source, ploidy: int):
        """source: of the matrix of (columns · ploidy) alleles."""
        self._source, self._ploidy = source, ploidy
        super().__init__(source.name, np.dtype(np.int8), _counts_of(source.matrix, ploidy))

    def lending(self) -> "CallSource":
        """Returns itself: what is lent would be counted into the slot all the same."""
        return self

    def cancel(self) -> None:
        """Cancels the source of the alleles."""
        self._source.cancel()

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Reads the whole chunk, and counts the piece."""
        s, (i, j), ploidy = self._source.matrix, piece.chunk, self._ploidy
        top, left = i * s.chunk_rows, j * s.chunk_cols
        rows, cols = (top, min(top + s.chunk_rows, s.rows)), (left, min(left + s.chunk_cols, s.cols))
        span = cols if s.whole else (left, left + s.chunk_cols)
        whole = piece._replace(rows=rows, cols=cols, span=span, into=(0, 0))
        memory = scratch("calls", s.chunk_bytes)
        alleles, moved = self._source.read(whole, memory[: s.chunk_bytes])
        first, stop = (x - cols[0] // ploidy for x in piece.cols)
        lines = alleles[piece.rows[0] - top : piece.rows[1] - top]
        calls = lines.reshape(len(lines), (cols[1] - cols[0]) // ploidy, ploidy)
        place = self._place(piece._replace(span=piece.cols), slot)
        count_alleles(calls[:, first:stop], place)
        return place, moved


def _counts_of(s: Matrix, ploidy: int) -> Matrix:
    """The matrix of counts, from that of alleles."""
    times = ploidy * s.itemsize
    down, across = s.grid
    stored = s.stored
    if not s.whole:  # rows beyond the array are not read
        heights = [min(s.chunk_rows, s.rows - i * s.chunk_rows) for i in range(down)]
        line = s.chunk_cols * s.itemsize
        there = stored or (1,) * (down * across)
        stored = tuple(heights[at // across] * line if size else 0 for at, size in enumerate(there))
    return replace(
        s,
        cols=s.cols // ploidy,
        chunk_cols=s.chunk_cols // ploidy,
        itemsize=1,
        whole=True,
        stored=stored,
        held=times * (1 + (s.held if s.whole else 1)),
        decodes=Work(fixed=WORK_BYTES + s.decodes.bytes_for(s.chunk_bytes)),
        traits=replace(s.traits, asynchronous=False, stackable=False),
    )


class _Calls:
    """Calls of any array with slicing, counted when they are asked for."""

    def __init__(self, array: Any):
        self._array, self.dtype, self.shape = array, np.dtype(np.int8), tuple(array.shape[:2])
        chunks = getattr(array, "chunks", None)
        self.chunks = chunks[:2] if chunks else None

    def __getitem__(self, place: tuple[slice, slice]) -> Array:
        calls = taken(computed(self._array[place]))
        found = np.empty(calls.shape[:2], np.int8)
        count_alleles(calls, found)
        return found


@dataclass(frozen=True)
class Described:
    """An array of calls in a store: its metadata for each way of reading it."""

    calls: zarr.Array[Any]
    """With three dimensions."""
    alleles: zarr.Array[Any] | None
    """As a matrix with a column for each allele; None where a chunk is no chunk of such a matrix."""
    tail: str
    """What the keys of its chunks have after those of the matrix."""


def open_calls(name: str, given: Any) -> Opened:
    """Open calls as a matrix of counts.

    given: `Described`, or anything with three dimensions, dtype and slicing. Raises InputError where it holds
    no integers with sign, or more than two alleles for each sample.
    """
    array = given.calls if isinstance(given, Described) else given
    dtype, ploidy = np.dtype(array.dtype), array.shape[2]
    if dtype.kind != "i":
        raise InputError(f"{name} holds {dtype}, and calls are integers with sign; give call_genotype")
    if ploidy not in PLOIDIES:
        raise InputError(
            f"{name} has {ploidy} alleles for each sample, and calls of 1 or 2 are understood; give numbers "
            "of alleles from 0 to 2, variants × samples"
        )
    if isinstance(given, Described):
        if given.alleles is not None and isinstance(array.store_path.store, LocalStore | ObjectStore):
            found = open_zarr(name, given.alleles, given.tail)
            if isinstance(found.source, RawSource | CompressedSource):
                counted = CallSource(found.source, ploidy)
                return replace(found, source=counted, matrix=counted.matrix)
        array = zarr.Array(zarr.AsyncArray(bounded(array.metadata)[0], array.store_path))
    array = unlabelled(array)
    return open_other(name, _Calls(array), under=array)
