"""What the tasks of `matmul` do on their workers."""

import itertools
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..api import multiply as multiply_here
from ..devices.cpu.blas import gemm, one_blas_thread
from ..run.request import Precision
from ..storage.read import inputs
from ..storage.write import conversion
from ..support.errors import BudgetError, RangeError
from ..support.memory import STEP, resident_bytes
from .on_worker import CPUOfTask, open_here, task_room


@dataclass(frozen=True)
class Options:
    """How a task multiplies, as arguments of `multiply`."""

    device: str
    precision: Precision
    kernel: str
    memory: int | None
    """Bytes that a task may take beyond what its process holds; None for its share of what the worker has
    left."""


def accumulated(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which the elements of a result are added up."""
    if dtype.kind in "iu":
        return np.dtype(np.int64)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


@dataclass(frozen=True)
class Piece:
    """The part of a step's extent along k that one chunk of x and one of y share."""

    x: int
    """Number of the chunk of x among those of the step."""
    in_x: slice
    """The columns of that chunk that the piece covers."""
    y: int
    """Number of the chunk of y among those of the step."""
    in_y: slice
    """The rows of that chunk that the piece covers."""


def pieces_of(
    in_x: list[tuple[int, int, int]], in_y: list[tuple[int, int, int]], start: int, stop: int
) -> list[Piece]:
    """Cut [start, stop) along k where a chunk of x or of y ends.

    in_x, in_y: the number, start and stop of each chunk that holds some of it."""
    found = []
    for (p, (_, x, x_stop)), (q, (_, y, y_stop)) in itertools.product(enumerate(in_x), enumerate(in_y)):
        low, high = max(x, y, start), min(x_stop, y_stop, stop)
        if low < high:
            found.append(Piece(p, slice(low - x, high - x), q, slice(low - y, high - y)))
    return found


_gpu = threading.Lock()
"""Lets one task at a time use the GPU, because plans count on its memory."""


def product_of_stored(
    x: Any,
    y: Any,
    ranges: list[tuple[tuple[int, int], tuple[int, int]]],
    dtype: np.dtype[Any],
    options: Options,
) -> Any:
    """Return the product of parts of two stored arrays, in the ranges of rows and columns given for each. No
    store is asked for the sizes of all chunks, of which a task reads few."""
    left, right = (
        inputs.open_input(spec, sizes=False).window(*part) for spec, part in zip((x, y), ranges, strict=True)
    )
    return _engine(left, right, dtype, options)


def _engine(x: Any, y: Any, dtype: np.dtype[Any], options: Options) -> Any:
    """Compute x·y within the memory that this task may hold, or within the least that the product needs."""
    here, room = open_here(options.device, 1), task_room(options.memory)
    if here.name == "cpu":
        here = CPUOfTask(1)
    else:
        room += resident_bytes()
    with _gpu if here.name != "cpu" else nullcontext():
        # What overflows becomes infinite without a word, as in `dask.array.matmul`.
        run = partial(
            multiply_here,
            x,
            y,
            device=here,
            precision=options.precision,
            kernel=options.kernel,
            out_dtype=dtype,
            notice=nothing,
        )
        try:
            return run(memory_limit=room).array
        except BudgetError as error:
            if error.minimum_memory_limit is None:
                raise
            return run(memory_limit=error.minimum_memory_limit + STEP).array


@dataclass(frozen=True)
class Step:
    """A task that adds the product of some chunks to a superblock, and returns a new array."""

    rows: list[int]
    """Where the chunks of x begin and end in C."""
    cols: list[int]
    """Where the chunks of y begin and end in C."""
    pieces: list[Piece]
    last: bool
    dtype: np.dtype[Any]
    """Type of the last step's result. Earlier steps return the type in which sums are added up."""
    options: Options

    def __call__(self, before: Any, wait: None, x: list[list[Any]], y: list[list[Any]]) -> Any:
        """Add the products. `x`: chunks by their place down C and along k. `y`: chunks by their place along k
        and across C."""
        dtype = accumulated(self.dtype)
        if not self.pieces:  # k = 0
            out = np.zeros((self.rows[-1] - self.rows[0], self.cols[-1] - self.cols[0]), dtype)
        elif dtype.kind in "fc" and open_here(self.options.device, 1).name == "cpu":
            out = self._blas(before, x, y, dtype)
        else:
            left = [[x[i][p.x][:, p.in_x] for p in self.pieces] for i in range(len(x))]
            right = [[chunk[p.in_y] for chunk in y[p.y]] for p in self.pieces]
            out = part = _engine(np.block(left), np.block(right), dtype, self.options)
            if before is not None:
                out = before + part
                if dtype.kind == "i" and (((before ^ out) & (part ^ out)) < 0).any():
                    raise RangeError("a sum of products may exceed int64; convert the operands to float64")
        if not self.last:
            return out
        if self.dtype.kind in "iu":
            conversion.check_fits(out, self.dtype, "the product")
        with np.errstate(over="ignore"):
            return out.astype(self.dtype, copy=False)

    def _blas(self, before: Any, x: list[list[Any]], y: list[list[Any]], dtype: np.dtype[Any]) -> Any:
        x, y = ([[_for_blas(chunk, dtype) for chunk in line] for line in some] for some in (x, y))
        rows, cols = ([edge - edges[0] for edge in edges] for edges in (self.rows, self.cols))
        out = np.empty((rows[-1], cols[-1]), dtype) if before is None else before.copy()
        _, run = gemm(dtype.char)
        with one_blas_thread:
            for (i, down), (j, across) in itertools.product(
                *(enumerate(_slices(edges)) for edges in (rows, cols))
            ):
                for number, p in enumerate(self.pieces):
                    beta = 0.0 if before is None and number == 0 else 1.0
                    run(x[i][p.x][:, p.in_x], y[p.y][j][p.in_y], out[down, across], 1.0, beta)
        return out


def _slices(edges: list[int]) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def _for_blas(chunk: Any, dtype: np.dtype[Any]) -> Any:
    """Return a chunk in the given type, in a memory layout that BLAS accepts."""
    chunk = chunk.astype(dtype, copy=False)
    return chunk if chunk.itemsize in chunk.strides else np.ascontiguousarray(chunk)


def part_of(block: Any, row: int, row_stop: int, col: int, col_stop: int) -> Any:
    """Copy a part of a superblock, so that the copy does not keep the superblock in memory."""
    return block[row:row_stop, col:col_stop].copy()


def nothing(*_: Any) -> None:
    """Does nothing. Its task exists so that others wait for it."""
