"""Exact scores of candidates: the rows of A and B that they are of are read once more, and multiplied in
float64."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..planning.problem import MiB
from ..planning.schedule import Piece, cut
from ..planning.traffic import piece_read_bytes
from ..run.rechunk import each
from ..storage.read.source import Opened
from ..support.buffers import Bytes, page_aligned
from ..support.intervals import ranges

Array = npt.NDArray[Any]
Metric = Literal["dot", "cosine", "sqeuclidean"]
Range = tuple[int, int]

THREADS = 2, 4
"""Fewest and most threads that read, each with a slot."""
UPLOADING_THREADS = 2, 8
"""The same where what they read is copied to a device …"""
UPLOADING_BYTES = 128 * MiB
"""… as long as their slots take no more bytes than this."""
PIECE_BYTES = 4 * MiB
"""Bytes of a slot, at most, where chunks can be read in part."""
PANEL_BYTES = 8 * MiB
"""Bytes of the rows of A whose candidates are scored, as far as they are held at a time, where blocks have
few rows."""
WORK_BYTES = 6 * MiB
"""Bytes in which a thread computes, in strips of this many bytes of float64: …"""
STRIP_BYTES = 2 * MiB
SMALL = 1e-280
"""Squared norms below this have lost digits."""
LOOK_BYTES = 64 << 10
"""Bytes of rows that are looked at together while they go to a device."""
MOST_EXPONENT = 1022
"""Two to this power, and one over it, have all their digits."""
CANDIDATE_BYTES = 96
"""Bytes for each candidate of a row."""


class Rows:
    """Reads parts of an operand, in pieces, within a fixed amount of memory."""

    def __init__(self, opened: Opened, uploads: bool = False, cores: int | None = None):
        """opened: an operand, of which parts of op(X) are read. uploads: nothing is computed with them on the
        host, so that more threads read. cores: how many there are for that; None: those of this process."""
        s, (fewest, most) = opened.matrix, UPLOADING_THREADS if uploads else THREADS
        self.opened, self.bytes_read = opened, 0
        self.factors: Array | None = None
        """What the elements of each row of op(X) are multiplied with, which are float64; None: nothing."""
        self.slots: list[Bytes] = []
        """Memory that is used, of as many slots as there are threads; by default it is allocated."""
        self.slot = (
            s.chunk_bytes if s.whole else max(s.chunk_cols * s.itemsize, min(s.chunk_bytes, PIECE_BYTES))
        )
        # Pieces of one that is stored transposed may be cut along k; then one thread adds them up in order.
        if uploads:
            most = min(most, UPLOADING_BYTES // max(1, self.slot))
        some = max(fewest, min(most, cores or len(os.sched_getaffinity(0))))
        self.threads = 1 if s.transposed and not uploads else some
        self._beside = (self.slot if s.transposed else 0) if uploads else WORK_BYTES

    @property
    def nbytes(self) -> int:
        """Memory that it takes, with what each thread computes in."""
        beside = self.slot + self.opened.matrix.beside(self.slot) + self._beside
        return self.threads * beside + self.opened.matrix.apart

    def cost(self, rows: Range, cols: Range) -> int:
        """Bytes that reading moves from the store."""
        return sum(piece_read_bytes(self.opened.matrix, piece) for piece in self._pieces(rows, cols))

    def each(self, rows: Range, cols: Range, work: Callable[[Array, int, int], None]) -> int:
        """Call `work(values, row, column)` for each piece of rows × cols of op(X), by several threads; the
        bytes read. The columns of pieces of the same rows are different ones."""

        def run(piece: Piece, slot: Bytes) -> int:
            values, moved = self.opened.source.read(piece, slot)
            (row, col), place = (piece.rows[0], piece.cols[0]), values
            if self.opened.matrix.transposed:
                (row, col), values = (col, row), values.T
            with np.errstate(all="ignore"):
                if self.factors is not None:
                    if not np.may_share_memory(place, slot):
                        place = slot[: place.nbytes].view(place.dtype).reshape(place.shape)
                    out = place.T if self.opened.matrix.transposed else place
                    factors = self.factors[row : row + len(values), None]
                    values = np.multiply(values, factors, out=out)
                work(values, row, col)
            return moved

        with (
            ThreadPoolExecutor(self.threads, "ooc-gemm rows") as pool,
            self.opened.source.cancelled_on_error(),
        ):
            slots = self.slots or page_aligned(self.threads, self.slot)
            moved = each(pool, slots, self._pieces(rows, cols), run)
        self.bytes_read += moved
        return moved

    def _pieces(self, rows: Range, cols: Range) -> Iterator[Piece]:
        s = self.opened.matrix
        return cut("", s, *((cols, rows) if s.transposed else (rows, cols)), self.slot)


class Extreme:
    """Finds rows of float64 that are finite but have squares beyond float64, which count as infinite or
    as 0."""

    def __init__(self, rows: Rows, count: int):
        """rows: what they are read with. count: how many there are."""
        self._looks, self._lock = rows.opened.dtype == np.float64, Lock()
        self._largest = np.zeros(count * self._looks)
        """The largest element of each row, of the parts that were looked at; NaN or infinite where one is."""

    def look(self, wide: Array, squares: Array, first: int) -> None:
        """Look at a part of the columns of some rows. squares: the squared norms of these parts."""
        if self._looks and (odd := ~np.isfinite(squares) | (squares < SMALL)).any():
            at, some = first + np.flatnonzero(odd), wide[odd]
            largest = np.maximum(some.max(axis=1), -some.min(axis=1))
            with self._lock:
                self._largest[at] = np.maximum(self._largest[at], largest)

    def look_at(self, values: Array, first: int) -> None:
        """Look at a part of the columns of some rows, a few at a time."""
        if self._looks:
            for start, stop in ranges(len(values), max(1, LOOK_BYTES // 8 // max(1, values.shape[1]))):
                strip = values[start:stop]
                self.look(strip, np.vecdot(strip, strip), first + start)

    def rows(self, squares: Array) -> Array:
        """Which rows these are. squares: their squared norms."""
        if not self._looks:
            return np.zeros(len(squares), bool)
        odd = ~np.isfinite(squares) | ((self._largest > 0) & (squares < SMALL))
        found: Array = odd & np.isfinite(self._largest)
        return found

    def exponents(self, squares: Array) -> Array:
        """About the binary logarithm of the largest element of each row that is one of these; 0 of others.
        squares: their squared norms."""
        found, some = np.zeros(len(squares), np.int32), self.rows(squares)
        if some.any():
            # Parts of a row whose squares are finite may sum up to infinity.
            least = np.where(np.isfinite(squares[some]), 0, 2.0**512)
            found[some] = np.frexp(np.maximum(self._largest[some], least))[1]
        return np.clip(found, -MOST_EXPONENT, MOST_EXPONENT, out=found)


class Whole:
    """Finds out whether all elements of rows are integers, but for those that are not finite."""

    def __init__(self, rows: Rows):
        """rows: what they are read with."""
        self._looks, self.found = rows.opened.dtype.kind not in "iub", True

    def look(self, values: Array) -> None:
        """Look at some elements, unless others are known not to be integers."""
        for start, stop in ranges(len(values), max(1, LOOK_BYTES // 8 // max(1, values.shape[1]))):
            if not (self._looks and self.found):
                return
            strip = values[start:stop]
            with np.errstate(all="ignore"):
                if (np.abs(strip - np.rint(strip)) > 0).any():
                    self.found = False


def norms(rows: Rows) -> tuple[Array, Array, Array, bool]:
    """(squared norm of each row in float64, sum of each column over the rows that are finite, `exponents` of
    the rows that are `Extreme`, whether all elements are integers)."""
    count, k = rows.opened.shape
    squares, sums, lock = np.zeros(count), np.zeros(k), Lock()
    extreme, whole = Extreme(rows, count), Whole(rows)

    def add(values: Array, row: int, col: int) -> None:
        step = max(1, STRIP_BYTES // 8 // max(1, values.shape[1]))
        for start, stop in ranges(len(values), step):
            wide = values[start:stop].astype(np.float64)
            some = np.vecdot(wide, wide)
            squares[row + start : row + stop] += some
            extreme.look(wide, some, row + start)
            whole.look(wide)
            if not np.isfinite(some).all():
                wide = wide[np.isfinite(some)]
            total = wide.sum(axis=0)
            with lock:
                sums[col : col + values.shape[1]] += total

    for columns in depths(rows, 1):
        rows.each((0, count), columns, add)
    return squares, sums, extreme.exponents(squares), whole.found


def spread(squares: Array, sums: Array) -> float:
    """The share of all squares that the deviations of columns from their means make up, of rows that are
    finite; 1 where there are none. squares: squared norm of each row. sums: of the columns of these rows."""
    finite = np.isfinite(squares)
    total, number = float(squares[finite].sum()), int(finite.sum())
    if not total:
        return 1.0
    with np.errstate(all="ignore"):
        return 1.0 - float(np.square(sums).sum()) / number / total


def depths(rows: Rows, count: int, itemsize: int = 1, nbytes: int = 0) -> Iterator[Range]:
    """The columns of op(X) that are looked at together: of one chunk, so that each row comes in one piece,
    and few enough that `count` rows of another operand fit `nbytes`, by default `PANEL_BYTES`."""
    s, k = rows.opened.matrix, rows.opened.shape[1]
    chunk = s.chunk_rows if s.transposed else s.chunk_cols
    most = max(1, (nbytes or PANEL_BYTES) // max(1, count * itemsize))
    for start, stop in ranges(k, chunk):
        for inner, outer in ranges(stop - start, min(most, chunk)):
            yield start + inner, start + outer


class Exact:
    """Computes the scores of candidates in float64, on the host."""

    def __init__(self, a: Rows, b: Rows, metric: Metric, panel_bytes: int = 0, among: Range | None = None):
        """panel_bytes: in place of `PANEL_BYTES`. among: the rows of B that candidates are; None: all."""
        self.a, self.b, self.metric = a, b, metric
        self.scale: Array | None = None
        """As of `Scaling`."""
        self.panel_bytes = panel_bytes or PANEL_BYTES
        self._among = among or (0, b.opened.shape[0])

    def norms(self) -> tuple[Array, float, Array, bool]:
        """(squared norm of each row of B in float64, `spread` of these rows, `exponents` of those that are
        `Extreme`, whether all elements are integers). Called before any scores are, and again where rows are
        multiplied by factors."""
        squares, sums, extreme, whole = norms(self.b)
        return squares, spread(squares, sums), extreme, whole

    def multiply(self, factors: tuple[Array | None, Array | None], scale: Array | None) -> None:
        """Have rows of A and of B multiplied by factors, if there are any, from now on. scale: as of
        `Scaling`."""
        (self.a.factors, self.b.factors), self.scale = factors, scale

    def close(self) -> None:
        """Free what is held between calls."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes beside `CANDIDATE_BYTES` for each candidate."""
        return self.a.nbytes + self.b.nbytes + self.panel_bytes

    def cost(self, rows: Range) -> int:
        """Bytes that it reads for candidates of these rows of A."""
        return sum(self.a.cost(rows, k) + self.b.cost(self._among, k) for k in self._depths(rows))

    def scores(self, rows: Range, columns: Array) -> tuple[Array, Array, bool, int]:
        """(score of each candidate, higher is better, −∞ for none; norm of each row of A, ∞ where it is
        `Extreme`; whether all elements of these rows are integers, where those of B are; bytes read). Row i
        of `columns` has the candidates of row rows[0] + i of A, −1 for none."""
        count, keep = columns.shape
        order = np.argsort(columns, axis=None, kind="stable")
        order = order[np.searchsorted(columns.reshape(-1)[order], 0) :]
        column, row = columns.reshape(-1)[order], order // keep
        sums, right = np.zeros(len(order)), np.zeros(len(order))
        left, moved, extreme, whole = np.zeros(count), 0, Extreme(self.a, count), Whole(self.a)
        for k in self._depths(rows):
            panel = np.empty((count, k[1] - k[0]), self.a.opened.dtype)

            def fill(values: Array, at: int, col: int, panel: Array = panel, first: int = k[0]) -> None:
                height, width = values.shape
                panel[at - rows[0] : at - rows[0] + height, col - first : col - first + width] = values

            def add(values: Array, at: int, col: int, panel: Array = panel, first: int = k[0]) -> None:
                here = slice(*np.searchsorted(column, (at, at + len(values))))
                step = max(1, STRIP_BYTES // 8 // max(1, values.shape[1]))
                for start, stop in ranges(here.stop - here.start, step):
                    some = slice(here.start + start, here.start + stop)
                    x = panel[row[some], col - first : col - first + values.shape[1]].astype(np.float64)
                    y = values[column[some] - at].astype(np.float64)
                    if self.metric == "sqeuclidean":
                        x -= y
                        y = x
                    elif self.metric == "cosine":
                        right[some] += np.vecdot(y, y)
                    sums[some] += np.vecdot(x, y)

            moved += self.a.each(rows, k, fill)
            step = max(1, STRIP_BYTES // 8 // max(1, panel.shape[1]))
            for start, stop in ranges(count, step):
                wide = panel[start:stop].astype(np.float64)
                with np.errstate(all="ignore"):
                    some = np.vecdot(wide, wide)
                left[start:stop] += some
                extreme.look(wide, some, start)
                whole.look(wide)
            moved += self.b.each(self._among, k, add)
        found = np.full(columns.shape, -np.inf)
        with np.errstate(all="ignore"):
            found.reshape(-1)[order] = self.scored(sums, left[row], right, column)
            lengths = np.where(np.isfinite(left), np.sqrt(left), np.nan)
        lengths[extreme.rows(left)] = np.inf
        found[~np.isfinite(left)] = -np.inf
        return found, lengths, whole.found, moved

    def scored(self, sums: Array, left: Array, right: Array, columns: Array | slice) -> Array:
        """Scores, of which the highest are best, from sums over products of elements or squares of their
        differences. left, right: squared norms of rows of A and of B. columns: the rows of B."""
        if self.metric == "sqeuclidean":
            return -sums
        if self.metric == "dot":
            return sums if self.scale is None else sums * self.scale[columns]
        lengths = np.sqrt(left) * np.sqrt(right)
        cosines: Array = np.divide(sums, lengths, out=np.zeros_like(sums), where=lengths > 0)
        return cosines

    def _depths(self, rows: Range) -> list[Range]:
        return list(depths(self.b, rows[1] - rows[0], self.a.opened.dtype.itemsize, self.panel_bytes))
