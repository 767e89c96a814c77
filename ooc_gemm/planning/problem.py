"""What is planned: a product of stored matrices, described by numbers. Nothing here touches a store or a
device."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from ..support.intervals import ceil_div, overlaps, ranges, round_up, touches
from .traits import LOCAL, StoreTraits

MiB = 1 << 20

ROW_READ_BYTES = 32 << 10
"""A read of its own for each row pays when it saves more than this many bytes a row: a `pread` from Python
costs 5 to 10 µs that readers cannot share (the interpreter lock), the page cache gives 4 GB/s or more."""

STACKED, MOST_STACKED, STACK_BYTES = 16, 64, 4 * MiB
"""Most chunks of a piece: STACKED, or where its reader decodes none as many as take STACK_BYTES, up to
MOST_STACKED. A piece's own way costs as much as that of 20 chunks of 16 KiB (H200 machine, .2 ms), but of
large pieces there are too few for all readers. Files in memory have one, which only begins reads: their
pieces have up to MOST_STACKED."""

CHUNK_BYTES = (16 * MiB, 4 * MiB, 1 * MiB)
"""Chunk sizes tried for a new C, the preferred one first; the smaller ones are for small budgets."""


@dataclass(frozen=True)
class Work:
    """Memory that a codec takes for one chunk, in addition to the chunk and its encoded form."""

    fixed: int = 0
    """Bytes that do not depend on the chunk."""
    per_byte: int = 0
    """Bytes for each byte of the chunk, whose size is first rounded up to a power of two."""
    most: int = 0
    """Most bytes in all."""

    def bytes_for(self, chunk_bytes: int) -> int:
        """Return the bytes that a chunk of this size takes."""
        return self.fixed + min(self.most, self.per_byte << max(0, chunk_bytes - 1).bit_length())

    def __add__(self, other: "Work") -> "Work":
        """Return an upper bound of what both take together."""
        return Work(self.fixed + other.fixed, self.per_byte + other.per_byte, self.most + other.most)


@dataclass(frozen=True)
class Matrix:
    """A stored matrix S. An array in Fortran order is described as the transpose of a C-order S."""

    rows: int
    cols: int
    itemsize: int
    """Bytes of an element, decoded."""
    chunk_rows: int
    chunk_cols: int
    transposed: bool = False
    """Whether op(X) is Sᵀ or Sᴴ instead of S."""
    whole: bool = False
    """Whether chunks must be decoded whole; otherwise any rectangle of a chunk can be read."""
    fortran: bool = False
    """Whether S is the transpose of the array that its user sees."""
    chunked: bool = True
    """Whether the array has chunks; if not, those here only say how it is read, or written."""
    stored: tuple[int, ...] | None = field(default=None, repr=False)
    """Bytes of every stored chunk in row-major order of the chunk grid, 0 where a chunk is missing.
    None: none is missing and each takes its full decoded size."""
    estimated: bool = False
    """Whether that is an estimate: the store does not say how large all of its files are, or zarr reads
    shards there, whose indices it reads more or less often by its version."""
    held: int = 2
    """Memory, in chunks, that decoding or encoding a whole chunk takes in addition to its slot. It is more
    than 2 where zarr does it."""
    encoded: str = ""
    """What has compressed its chunks, where they go to a device as they are stored and are decoded there:
    zstd or blosc."""
    decodes: Work = Work()
    """What the codecs take in addition to decode a chunk."""
    encodes: Work = Work()
    """What the codecs take in addition to encode a chunk, if C is stored so."""
    apart: int = 0
    """Memory in bytes that reading takes in addition to all slots, where the process makes one piece at a
    time."""
    traits: StoreTraits = LOCAL
    """What the store can do. Parts of rows are never read from a remote store, and what arrives is held
    beside the slot."""

    @property
    def grid(self) -> tuple[int, int]:
        """Number of chunks along rows and columns."""
        return ceil_div(self.rows, self.chunk_rows), ceil_div(self.cols, self.chunk_cols)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return self.chunk_rows * self.chunk_cols * self.itemsize

    @property
    def skipped(self) -> int:
        """Bytes of an element that are saved where it is not read; 0 where that saves nothing, and many where
        it costs nothing."""
        if self.traits.in_process:
            return ROW_READ_BYTES + 1
        return 0 if self.traits.remote else self.itemsize

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of all stored chunks, which must be read at least once."""
        return self.rows * self.cols * self.itemsize if self.stored is None else sum(self.stored)

    def stored_size(self, i: int, j: int) -> int:
        """Return the bytes of one stored chunk; 0 where it is missing."""
        return self.chunk_bytes if self.stored is None else self.stored[i * self.grid[1] + j]

    def stores(self, rows: range, j: int) -> bool:
        """Whether none of these chunks below each other is missing."""
        across = self.grid[1]
        stored = self.stored
        return stored is None or all(stored[rows.start * across + j : rows.stop * across : across])

    @cached_property
    def largest_stored(self) -> int:
        """Bytes of the largest stored chunk."""
        return self.chunk_bytes if self.stored is None else max(self.stored, default=0)

    def window(self, rows: tuple[int, int], cols: tuple[int, int]) -> "Matrix":
        """Return rows [start, stop) × columns [start, stop) of S, which begin where a chunk begins."""
        down, across = rows[0] // self.chunk_rows, cols[0] // self.chunk_cols
        assert (down * self.chunk_rows, across * self.chunk_cols) == (rows[0], cols[0])
        found = replace(self, rows=rows[1] - rows[0], cols=cols[1] - cols[0], stored=None)
        if self.stored is None:
            return found
        (height, width), line = found.grid, self.grid[1]
        starts = ((down + i) * line + across for i in range(height))
        return replace(found, stored=tuple(size for at in starts for size in self.stored[at : at + width]))

    def beside(self, slot: int) -> int:
        """Return the bytes that a reader holds in addition to a slot of so many bytes."""
        if self.whole:
            return self.held * self.chunk_bytes + self.decodes.bytes_for(self.chunk_bytes)
        return slot if self.traits.remote else 0

    def chunks_of_piece(self, slot_bytes: int, cols: int) -> int:
        """Return the most chunks that one piece consists of, where up to so many columns are read."""
        if not self.traits.stackable:
            return 1
        cols = min(cols, self.chunk_cols)
        apart = not self.whole and rows_apart(self.chunk_cols, cols, self.skipped)
        line = (cols if apart else self.chunk_cols) * self.itemsize
        most = STACKED
        if self.encoded or not self.whole:
            fitting = STACK_BYTES // max(1, self.chunk_bytes)
            most = MOST_STACKED if self.traits.asynchronous else max(STACKED, min(MOST_STACKED, fitting))
        return max(1, min(most, slot_bytes // max(1, self.chunk_rows * line)))

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the columns that are read to get columns [start, stop) of one chunk: those alone, with one
        read for each row, or the chunk's whole rows, which are contiguous and take one read in all."""
        if self.whole or rows_apart(self.chunk_cols, stop - start, self.skipped):
            return start, stop
        first = start // self.chunk_cols * self.chunk_cols
        return first, first + self.chunk_cols

    def read_bytes(self, row_step: int, col_step: int) -> int:
        """Bytes moved from the store when S is read once, cut every `row_step` rows and `col_step`
        columns as well as at chunk edges. Exact."""
        return self._moved(*self._cover(row_step, col_step))

    def _moved(self, rows: Sequence[int], cols: Sequence[int]) -> int:
        """Return the bytes that are moved from the store where so many rows of each chunk row, and columns of
        each chunk column, are read; of chunks that are read whole, how often they are."""
        if self.stored is None:
            return sum(rows) * sum(cols) * (self.chunk_bytes if self.whole else self.itemsize)
        across, total = self.grid[1], 0
        for i, times in enumerate(rows):
            line = self.stored[i * across : (i + 1) * across]
            sizes = line if self.whole else [self.itemsize if size else 0 for size in line]
            total += times * sum(map(int.__mul__, cols, sizes))
        return total

    def pass_bytes(self, height: int) -> int:
        """Bytes moved from the store when op(X) is read once, in panels of so many rows. Exact."""
        return self.read_bytes(self.rows, height) if self.transposed else self.read_bytes(height, self.cols)

    def panels_bytes(self, height: int, panels: Iterable[int]) -> int:
        """Bytes moved from the store when panels of so many rows of op(X) are read once. `panels`: their
        numbers, from 0. Exact."""
        extent = self.cols if self.transposed else self.rows
        parts = [(i * height, min((i + 1) * height, extent)) for i in panels]
        if self.transposed:
            rows, _ = self._cover(self.rows, height)
            return self._moved(rows, _counted(extent, self.chunk_cols, parts, self._columns_read))
        _, cols = self._cover(height, self.cols)
        return self._moved(_counted(extent, self.chunk_rows, parts, self._rows_read), cols)

    def _rows_read(self, rows: int) -> int:
        """Return what `rows` rows of one chunk count for in `_moved`."""
        return 1 if self.whole else rows

    def _columns_read(self, columns: int) -> int:
        """Return what `columns` columns of one chunk count for in `_moved`."""
        return 1 if self.whole else _span(columns, self.chunk_cols, self.skipped)

    def read_bytes_estimate(self, row_step: int, col_step: int) -> float:
        """Estimate `read_bytes` without looking at each chunk. Exact if all chunks are equally large as
        stored."""
        if self.whole:
            times = touches(self.rows, row_step, self.chunk_rows) * touches(
                self.cols, col_step, self.chunk_cols
            )
            return times * self.chunk_bytes * self._density
        return (
            self.rows
            * _spanned_total(self.cols, col_step, self.chunk_cols, self.skipped)
            * self.itemsize
            * self._density
        )

    @cached_property
    def _density(self) -> float:
        if self.stored is None:
            return 1.0
        return self.stored_bytes / max(1, len(self.stored) * self.chunk_bytes)

    def _cover(self, row_step: int, col_step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.whole:
            return _touched(self.rows, row_step, self.chunk_rows), _touched(
                self.cols, col_step, self.chunk_cols
            )
        rows = tuple(stop - start for start, stop in ranges(self.rows, self.chunk_rows))
        return rows, _spanned(self.cols, col_step, self.chunk_cols, self.skipped)


def rows_apart(chunk_cols: int, cols: int, itemsize: int) -> bool:
    """Whether each row is read on its own. Where nothing would be wasted, that makes no difference."""
    return (chunk_cols - cols) * itemsize > ROW_READ_BYTES


@lru_cache(maxsize=1024)
def _touched(extent: int, step: int, chunk: int) -> tuple[int, ...]:
    """Return for each chunk along an axis how many ranges of `step` meet it."""
    return _counted(extent, chunk, ranges(extent, step), lambda _: 1)


@lru_cache(maxsize=1024)
def _spanned(extent: int, step: int, chunk: int, itemsize: int) -> tuple[int, ...]:
    """Return for each chunk column how many of its columns are read, over all ranges of `step`."""
    if rows_apart(chunk, step, itemsize):  # so is all that is narrower
        return tuple(stop - start for start, stop in ranges(extent, chunk))
    return _counted(extent, chunk, ranges(extent, step), lambda cols: _span(cols, chunk, itemsize))


def _span(cols: int, chunk: int, itemsize: int) -> int:
    """Return how many columns of a chunk are read to get so many of them."""
    return cols if rows_apart(chunk, cols, itemsize) else chunk


def _counted(
    extent: int, chunk: int, parts: Iterable[tuple[int, int]], weigh: Callable[[int], int]
) -> tuple[int, ...]:
    """Return for each chunk along an axis the sum of weights of its overlaps with all parts."""
    counts = [0] * ceil_div(extent, chunk)
    for start, stop in parts:
        for index, lo, hi in overlaps(start, stop, chunk):
            counts[index] += weigh(hi - lo)
    return tuple(counts)


@lru_cache(maxsize=1024)
def _spanned_total(extent: int, step: int, chunk: int, itemsize: int) -> int:
    return sum(_spanned(extent, step, chunk, itemsize))


@dataclass(frozen=True)
class Problem:
    """C (m×n) ← α·op(A) (m×k)·op(B) (k×n) + β·C, described by sizes."""

    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    c: Matrix
    """C as it is stored. `chunk_rows` × `chunk_cols` is what one write makes: a shard, if C has any."""
    panel_itemsize: int
    """Bytes of an element of a panel."""
    block_itemsize: int
    """Bytes of an element of a block of C while sums are added up."""
    narrowed: int = 0
    """Bytes of an element of C where the device converts it before it is downloaded; 0 where sums are."""
    reads_c: bool = False
    """Whether the old C is read, because β ≠ 0."""
    free_chunks: bool = True
    """Whether the planner may choose the chunks of a new C; those of `c` are then ignored."""
    pitch: int = 1
    """Rows of panels start at multiples of this many elements."""
    along_k: tuple[bool | None, bool | None] = (None, None)
    """Whether panels of op(A), and of op(B), lie with k along their rows; None: as the operand is stored."""
    turns: bool = False
    """Whether the kernel transposes panels that do not lie along k, in scratch memory of their size."""
    line_bytes: int = 0
    """Scratch of the kernel for each row and column of a block, and each k of a panel."""
    scratch: tuple[int, int] = (0, 0)
    """Scratch of the kernel for each element of a panel of op(A), and of op(B)."""
    once: bool = False
    """Whether panels that stay are prepared once, where they lie (`Arithmetic.once`)."""
    block_scratch: int = 0
    """Scratch memory of the kernel for each element of a block."""
    check_itemsize: int = 0
    """Bytes of an element of the vectors for checking blocks; 0 where blocks are not checked."""
    kernel: str = ""
    """What multiplies and why, for the reader of the plan."""
    types: tuple[str, str, str] = ("", "", "")
    """Types of the elements of A, B and C, for the reader of the plan."""
    transforms: tuple[int, int] = (0, 0)
    """Bytes of what is done to elements of operands: of vectors, on the host and on a device with memory of
    its own, and of what each reader needs on the host."""
    keeps_a: bool = False
    """Whether a panel of op(A) can be multiplied again by another panel of op(B)."""
    least: tuple[int, int] = (0, 0)
    """Products for each element of A and B, and for each of C, from which the kernel pays (`reuses`)."""
    row_bytes: int = 0
    """Host bytes for each row of a block of what a reduction keeps of C, whose blocks are then made row by
    row and not stored. 0: C is stored."""
    found_bytes: int = 0
    """Bytes of what a device with memory of its own keeps of each row of C, which is downloaded instead of
    blocks. 0: blocks are downloaded."""
    score_bytes: int = 0
    """Bytes of a number, of which such a device holds two for each column of C."""
    kept_bytes: int = 0
    """Bytes of what such a device keeps during the whole run beside panels and blocks."""
    same: bool = False
    """A and B are the same array, whatever op() and transforms make of them."""
    read_alike: bool = False
    """A and B are the same array, and what is read of it is the same, too: no table maps one of them
    otherwise."""
    symmetric: bool = False
    """Whether op(B) is op(A)ᵀ, so that C = Cᵀ. Then blocks on and below the diagonal are made, and the others
    are their mirror images."""
    whole: bool = False
    """Whether all of C must be one block."""
    parts: int = 1
    """Most ranges of k that workers of a cluster multiply apart. Their partial sums of each block are then
    added up."""

    @property
    def part_itemsize(self) -> int:
        """Bytes of an element of a part of C as it is downloaded."""
        return self.narrowed or self.block_itemsize

    @property
    def input_bytes(self) -> int:
        """What A and B take as they are stored, in bytes; an array that is both counts once."""
        return self.a.stored_bytes + (0 if self.same or self.symmetric else self.b.stored_bytes)

    @property
    def encoded(self) -> tuple[Matrix, ...]:
        """The operands whose chunks go to a device as they are stored (`Matrix.encoded`)."""
        return tuple(s for s in ((self.a,) if self.symmetric else (self.a, self.b)) if s.encoded)

    @property
    def estimated(self) -> bool:
        """Whether the bytes that are read can only be estimated (`Matrix.estimated`)."""
        return self.a.estimated or self.b.estimated or (self.reads_c and self.c.estimated)

    @property
    def flops(self) -> int:
        """Number of operations of the product; for a symmetric one, of half of C and its diagonal."""
        return (self.m + 1 if self.symmetric else 2 * self.m) * self.n * self.k

    @property
    def ready_again(self) -> tuple[bool, bool]:
        """Whether panels of op(A), and of op(B), that stay are made ready again for each block: all that are
        not prepared once where they lie. Complex numbers may be embedded elsewhere."""
        (a, b), (along_k, _) = self.scratch, self.panels_along_k
        return not self.once or (a > 0 and not along_k), not self.once or b > 0

    @property
    def align(self) -> tuple[int, int]:
        """Height and width of which block sizes are multiples: those of C's chunks; for a symmetric product,
        multiples of both."""
        rows, cols = self.c.chunk_rows, self.c.chunk_cols
        return (math.lcm(rows, cols),) * 2 if self.symmetric else (rows, cols)

    @property
    def k_chunk(self) -> int:
        """Distance along k at which edges of the chunks of both A and B lie."""
        a = self.a.chunk_rows if self.a.transposed else self.a.chunk_cols
        b = self.b.chunk_cols if self.b.transposed else self.b.chunk_rows
        return math.lcm(a, b)

    @property
    def k_ranges(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of the ranges of k that are multiplied apart. They begin where chunks of both A and B
        begin."""
        if self.parts == 1:
            return ((0, self.k),)
        return tuple(ranges(self.k, round_up(ceil_div(self.k, self.parts), self.k_chunk)))

    def within(self, start: int, stop: int) -> "Problem":
        """Return the product over one of `k_ranges` alone. The first of them has the old C."""
        k = start, stop
        a, b = self.a, self.b
        a = a.window(k, (0, a.cols)) if a.transposed else a.window((0, a.rows), k)
        b = b.window((0, b.rows), k) if b.transposed else b.window(k, (0, b.cols))
        return replace(self, k=stop - start, a=a, b=b, parts=1, reads_c=self.reads_c and start == 0)

    @cached_property
    def slots(self) -> dict[tuple[int, ...], int]:
        """Bytes of slots that `ledger.slot_bytes` has found."""
        return {}

    @property
    def stored_along_k(self) -> tuple[bool, bool]:
        """Whether A and B are stored with k along their rows."""
        return not self.a.transposed, self.b.transposed

    @cached_property
    def panels_along_k(self) -> tuple[bool, bool]:
        """`along_k`, with the order in which an operand is stored where no order is required."""
        a, b = (
            stored if wanted is None else wanted
            for stored, wanted in zip(self.stored_along_k, self.along_k, strict=True)
        )
        return a, b
