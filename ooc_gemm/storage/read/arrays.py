"""Inputs that are no Zarr arrays: NumPy arrays, and lazy ones, which are anything with shape, dtype and
slicing (dask, xarray, h5py, memory maps, classes of their users).

A NumPy array is in memory already, and threads copy parts of its pieces. How much memory a lazy array takes
while it makes a piece is not known here. So pieces of lazy arrays are made one at a time, by one thread for
the whole process. What one takes is measured before a plan is made, and the ledger counts it.
"""

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ...planning.problem import Matrix, MiB
from ...planning.schedule import Piece
from ...planning.traits import StoreTraits
from ...support import memory
from ...support.buffers import Bytes, give_back
from ...support.errors import BudgetError, Error, InputError, StoreError
from ...support.imported import imported
from ...support.intervals import ceil_div, ranges
from ...support.memory import peak_over
from ...support.onward import Onward
from ..io import files
from . import mapped
from .source import Opened, Source

T = TypeVar("T")
Array = npt.NDArray[Any]

UNIT_BYTES = 4 * MiB
"""Bytes up to which several small chunks of a lazy array are read together."""
MARGIN = 1.25
"""Share by which a piece may take more memory than the measured ones."""
CACHES = 16 * MiB
"""Bytes for caches that libraries fill during a run (HDF5: 1 to 16 MiB for each array)."""
COPIERS = 16
"""Most threads that copy pieces of NumPy arrays."""
UNMEASURED = 6
"""Memory of a piece, in units, that is assumed where the system cannot measure it."""


def untried(chunk_bytes: int) -> int:
    """Return the memory in bytes that reading is assumed to take where no trial has been made."""
    return int(MARGIN * UNMEASURED * chunk_bytes) + CACHES


def tried(opened: Opened, limit: int) -> tuple[Opened, BudgetError | None]:
    """Return an array with the memory that reading takes within a memory limit of so many bytes. Where a
    trial is refused, that is what it is assumed to take, and the second value is the refusal: the limit that
    it names need not do for what else a run holds."""
    try:
        return opened.measured(limit), None
    except BudgetError as error:
        return replace(opened, matrix=replace(opened.matrix, apart=untried(opened.matrix.chunk_bytes))), error


def open_other(name: str, array: Any, under: Any = None) -> Opened:
    """Open an array that is not a Zarr array. `name`: how messages call it. under: the array that it is
    computed from, where that is known. Raises InputError where its extents are not known."""
    try:
        rows, cols = (int(extent) for extent in array.shape)
    except (TypeError, ValueError) as error:  # dask: nan
        raise InputError(
            f"{name} has shape {tuple(array.shape)}; make its extents known first "
            "(dask: compute_chunk_sizes), so that they are numbers"
        ) from error
    itemsize = np.dtype(array.dtype).itemsize
    array = unlabelled(array)
    if not isinstance(array, np.ndarray):
        matrix = _lazy_matrix(array, rows, cols, itemsize)
        return Opened(LazySource(name, array, matrix, under), matrix)
    if mapped.releasable(array) is None:
        matrix = Matrix(
            rows, cols, itemsize, max(1, min(rows, 1024)), max(1, cols), chunked=False,
            traits=StoreTraits(asynchronous=True, in_process=True),
        )  # fmt: skip
        return Opened(ArraySource(name, array, matrix), matrix)
    turned = mapped.turned(array)  # pieces follow the file
    if turned:
        array, rows, cols = array.T, cols, rows
    matrix = _lazy_matrix(array, rows, cols, itemsize)
    return Opened(LazySource(name, array, matrix), replace(matrix, transposed=turned, fortran=turned))


class ArraySource(Source):
    """A NumPy array in memory. The bytes read are those of the elements taken."""

    def __init__(self, name: str, array: Any, matrix: Matrix):
        super().__init__(name, np.dtype(array.dtype).newbyteorder("="), matrix)
        self._array = array
        self._copiers: ThreadPoolExecutor | None = None

    def measure(self, limit: int) -> int:
        """Reads what it maps of a file, so that it counts as memory that the process holds; returns the bytes
        of that where it does not fit."""
        return mapped.make_resident(self._array, limit)

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Copies a slice of the array into the slot."""
        return self._start(piece, slot, 0)()

    def start(
        self, piece: Piece, slot: Bytes, onward: Onward | None = None
    ) -> Callable[[], tuple[Array, int]]:
        """Lets other threads copy parts of the piece, unless that is soon done."""
        return self._start(piece, slot, files.PARTS)

    def _start(self, piece: Piece, slot: Bytes, most: int) -> Callable[[], tuple[Array, int]]:
        """Start to copy a piece in up to so many parts, or leave it to the function returned."""
        place = self._place(piece, slot)
        array = self._array[slice(*piece.rows), slice(*piece.span)]
        parts = min(most, len(place), place.nbytes // files.LEAST_PART)
        jobs = []
        if parts:
            copiers = self._copiers = _threads_that_copy(os.getpid())  # kept; others after a fork
            for start, stop in ranges(len(place), ceil_div(len(place), parts)):
                jobs.append(copiers.submit(_copy, place[start:stop], array[start:stop]))

        def done() -> tuple[Array, int]:
            for job in jobs:
                job.result()
            if not jobs:
                _copy(place, array)
            return place[:, piece.cols[0] - piece.span[0] : piece.cols[1] - piece.span[0]], place.nbytes

        return done


def _copy(place: Array, array: Array) -> None:
    np.copyto(place, array, casting="unsafe")


class LazySource(Source):
    """An array whose pieces are made on demand, one at a time. The bytes read are those of the chunks, or
    elements, that are asked for."""

    def __init__(self, name: str, array: Any, matrix: Matrix, under: Any = None):
        """under: as of `open_other`."""
        super().__init__(name, np.dtype(array.dtype).newbyteorder("="), matrix)
        self._array, self._under = array, under
        self._depth = getattr(_here, "depth", 0)
        self._thread: ThreadPoolExecutor | None = _thread(os.getpid(), self._depth)

    def measure(self, limit: int) -> int:
        """Make a few pieces, and return the memory that this takes in addition to the slot. Raises
        BudgetError before any piece is made where a memory limit of `limit` bytes cannot be enough, and
        StoreError where a piece fails."""
        s = self.matrix
        unit = min(s.chunk_rows, s.rows) * min(s.chunk_cols, s.cols) * s.itemsize
        if not unit:
            return 0
        least = memory.resident_bytes() + 2 * unit
        if limit < least:
            reason = (
                f"a memory limit of {limit} bytes is too small for {self.name}: a chunk of it takes {unit} "
                "bytes, twice while it is made"
            )
            raise BudgetError(
                f"{reason}; the smallest that may do is {least} bytes ({ceil_div(least, MiB)}MiB)",
                minimum_memory_limit=least,
                reason=reason,
            )
        give_back()
        if isinstance(self._under, np.ndarray) and mapped.releasable(self._under) is None:
            rest = mapped.make_resident(self._under, limit)
            if rest:
                return rest + untried(s.chunk_bytes)
        most = max(self._alone(partial(self._peak, rows, cols)) for rows, cols in self._samples())
        return int(MARGIN * most) + CACHES

    def _samples(self) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        """Return the rows and columns of a few pieces of the largest size: the first, one in the middle, the
        last, and tall ones where any part can be read."""
        s, found = self.matrix, set()
        shapes = [(s.chunk_rows, s.chunk_cols)]
        if not s.whole:
            shapes.append((min(s.rows, 1024), max(1, min(s.cols, UNIT_BYTES // s.itemsize // 1024))))
        for height, width in shapes:
            for share in (0.0, 0.5, 1.0):
                row, col = (
                    int(share * max(0, extent - size)) // size * size
                    for extent, size in ((s.rows, height), (s.cols, width))
                )
                found.add(((row, min(row + height, s.rows)), (col, min(col + width, s.cols))))
        return found

    def _peak(self, rows: tuple[int, int], cols: tuple[int, int]) -> int:
        found = peak_over(lambda: self._made(rows, cols).shape)
        return UNMEASURED * self.matrix.chunk_bytes if found is None else found

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Makes the piece on the thread for lazy arrays."""
        s, place = self.matrix, self._place(piece, slot)
        span = piece.span[0], min(piece.span[1], s.cols)

        def make() -> None:
            found = self._made(piece.rows, span)
            mapped.copy(place[:, : span[1] - span[0]], found, mapped.releasable(found))

        self._alone(make)
        view = place[:, piece.cols[0] - span[0] : piece.cols[1] - span[0]]
        if not s.whole:
            return view, place.nbytes
        return view, s.stored_size(*piece.chunk)

    def _alone(self, work: Callable[[], T]) -> T:
        thread = self._thread = _thread(os.getpid(), self._depth)  # another one after a fork
        try:
            return thread.submit(work).result()
        except BaseException:
            self._thread = None  # the error may keep this array alive, which must not keep the thread
            raise
        finally:
            del thread

    def _made(self, rows: tuple[int, int], cols: tuple[int, int]) -> Array:
        """Make a piece. Raises StoreError, whatever the array raises."""
        shape = rows[1] - rows[0], cols[1] - cols[0]
        try:
            found = np.asarray(computed(self._array[slice(*rows), slice(*cols)]))
            if found.shape != shape or not np.can_cast(found.dtype, self.dtype, "same_kind"):
                raise TypeError(f"its slice is {found.shape} {found.dtype}, not {shape} {self.dtype}")
            return found
        except (Error, MemoryError):
            raise
        except BaseException as error:  # also StopIteration and SystemExit, which mean something to who waits
            raise StoreError(
                f"{self.name}: rows {rows[0]}–{rows[1] - 1} × columns {cols[0]}–{cols[1] - 1} cannot be read "
                f"({type(error).__name__}: {error}); check where they come from, then run again"
            ) from error


_here = threading.local()


_threads: WeakValueDictionary[tuple[int, int | None], ThreadPoolExecutor] = WeakValueDictionary()
"""The threads that make pieces, by process and depth, and those that copy them, by process and None. They end
with the last array that uses them."""
_starting = threading.Lock()


def _thread(process: int, depth: int) -> ThreadPoolExecutor:
    """Return the thread that makes pieces of lazy arrays. The allocator keeps freed memory for each thread,
    so the same thread is measured and used. process: its number, because a fork has no such thread. depth:
    how many pieces of other lazy arrays, which keep the threads of smaller depths busy, wait for this
    piece."""

    def begin() -> None:
        _here.depth = depth + 1

    return _started((process, depth), lambda: ThreadPoolExecutor(1, "ooc-gemm lazy input", initializer=begin))


def _threads_that_copy(process: int) -> ThreadPoolExecutor:
    """Return the threads that copy pieces of NumPy arrays. process: as of `_thread`."""
    return _started((process, None), lambda: ThreadPoolExecutor(COPIERS, "ooc-gemm copier"))


def _started(key: tuple[int, int | None], start: Callable[[], ThreadPoolExecutor]) -> ThreadPoolExecutor:
    """Return the threads with this key, which are started if there are none."""
    with _starting:
        found = _threads.get(key)
        if found is None:
            found = _threads[key] = start()
        return found


def computed(part: Any) -> Any:
    """Compute a dask collection in this process, task by task, unless a cluster computes it."""
    graph = getattr(part, "__dask_graph__", None)
    if graph is None or graph() is None:
        return part
    from dask.base import get_scheduler

    if getattr(get_scheduler(), "__self__", None) is not None:  # the method of a distributed.Client
        return part.compute()
    found = part.compute(scheduler="synchronous")
    gc.collect(1)  # graphs are cycles that hold on to blocks
    return found


def unlabelled(array: Any) -> Any:
    """Return the NumPy array that a labelled array (xarray) holds; any other as it is, and one that still
    lies in its file."""
    if not isinstance(array, (imported("xarray", "DataArray"), imported("xarray", "Variable"))):
        return array
    held = getattr(getattr(array, "variable", array), "_data", None)  # .data would load it
    return held if isinstance(held, np.ndarray) else array


def _lazy_matrix(array: Any, rows: int, cols: int, itemsize: int) -> Matrix:
    """Describe how a lazy array is read: by its own chunks, each of which must be made whole, or in bands of
    rows."""
    chunks = _chunks(array, (rows, cols))
    if chunks is None:
        width = max(1, min(cols, UNIT_BYTES // itemsize))
        height = max(1, min(rows, 1024, UNIT_BYTES // (width * itemsize)))
        return Matrix(rows, cols, itemsize, height, width, chunked=False)
    height, width = chunks
    while 2 * height * width * itemsize <= UNIT_BYTES and (height < rows or width < cols):
        if (height <= width and height < rows) or width >= cols:
            height *= 2
        else:
            width *= 2
    plain = Matrix(rows, cols, itemsize, height, width, whole=True, chunked=False, held=0)
    down, across = plain.grid
    stored = (
        min(height, rows - i * height) * min(width, cols - j * width) * itemsize
        for i in range(down)
        for j in range(across)
    )
    return replace(plain, stored=tuple(stored))


def _chunks(array: Any, shape: tuple[int, int]) -> tuple[int, int] | None:
    """Return the sizes of a lazy array's own chunks, the largest where they differ; None where it has
    none."""
    encoding = getattr(array, "encoding", None)  # xarray: as it lies in its file
    stored = [encoding.get(key) for key in ("chunks", "chunksizes")] if isinstance(encoding, dict) else []
    for said in (getattr(array, "chunks", None), *stored):
        with contextlib.suppress(TypeError, ValueError):
            height, width = (int(max(one) if isinstance(one, tuple | list) else one) for one in said or ())
            if height > 0 and width > 0:
                return min(height, max(1, shape[0])), min(width, max(1, shape[1]))
    return None
