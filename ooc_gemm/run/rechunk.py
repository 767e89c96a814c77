"""Copies operands to better chunks, as `planning/layouts.py` has planned it, within the memory limit."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from ..engine.ports import Array
from ..planning.layouts import Copy
from ..planning.schedule import Part, Piece, cut
from ..storage.io.trees import remove_tree
from ..storage.read.source import Opened
from ..storage.write import layout, opening
from ..support.buffers import Bytes, page_aligned
from ..support.errors import InputError, on_thread
from ..support.intervals import overlaps, ranges

T = TypeVar("T")


@dataclass(frozen=True)
class Rechunked:
    """A copy that was made for one product. Sizes in bytes, times in seconds."""

    operand: str
    """The operand that was copied: `a` or `b`."""
    name: str
    """Name of the array that was copied."""
    bytes_read: int
    """Bytes moved from the store for this copy, counted where they move."""
    bytes_written: int
    seconds: float


def check_space(copies: Iterable[Copy], c: Any) -> None:
    """Refuse copies for which there is no room beside C. Raises InputError."""
    folder = opening.scratch_folder(c)
    wanted, free = sum(copy.bytes_written for copy in copies), shutil.disk_usage(folder).free
    if wanted > free:
        raise InputError(
            f"rechunking takes {wanted} bytes in {folder}, where {free} are free; "
            "write C to another disk or leave out rechunk=True"
        )


@contextlib.contextmanager
def rechunked(
    copies: Sequence[Copy], sources: Mapping[str, Opened], c: Any
) -> Iterator[tuple[dict[str, Opened], tuple[Rechunked, ...]]]:
    """Yield the operands, with copies in place of those that are copied, and what the copying took. Until the
    body ends, copies lie in a hidden folder beside C, or among temporary files where C is not local."""
    found, done = dict(sources), []
    with _hidden_folder(c) if copies else contextlib.nullcontext(Path()) as folder:
        for copy in copies:
            start, source = time.perf_counter(), sources[copy.operand]
            found[copy.operand], read, written = _copied(copy, source, folder / copy.operand)
            seconds = time.perf_counter() - start
            done.append(Rechunked(copy.operand, source.name, read, written, seconds))
        yield found, tuple(done)


@contextlib.contextmanager
def _hidden_folder(c: Any) -> Iterator[Path]:
    """Yield a new hidden folder, which is removed at the end."""
    parent = opening.scratch_folder(c)
    try:
        folder = tempfile.mkdtemp(".rechunked", ".ooc-gemm-", parent)
    except OSError as error:
        raise InputError(
            f"no copy can be made in {parent} ({error.strerror}); leave out rechunk=True"
        ) from error
    try:
        yield Path(folder)
    finally:
        with contextlib.suppress(OSError):
            remove_tree(Path(folder))


def _copied(copy: Copy, opened: Opened, place: Path) -> tuple[Opened, int, int]:
    """Copy an operand, and return the opened copy, the bytes read and the bytes written."""
    t, source = copy.target, opened.source
    output = layout.Output((t.rows, t.cols), source.dtype, (t.chunk_rows, t.chunk_cols))
    target = opening.create_target(str(place), output, source.dtype, keep=False)
    (memory,) = page_aligned(1, copy.rows * copy.cols * t.itemsize)
    read_slots = page_aligned(copy.readers, copy.slot_bytes)
    write_slots = page_aligned(copy.writers, t.chunk_bytes)
    read = written = 0
    with (
        ThreadPoolExecutor(copy.readers, "ooc-gemm reader") as readers,
        ThreadPoolExecutor(copy.writers, "ooc-gemm writer") as writers,
        source.cancelled_on_error(),
    ):
        for rows in ranges(t.rows, copy.rows):
            for cols in ranges(t.cols, copy.cols):
                shape = rows[1] - rows[0], cols[1] - cols[0]
                size = shape[0] * shape[1] * t.itemsize
                region = memory[:size].view(source.dtype).reshape(shape)

                def fill(piece: Piece, slot: Bytes, region: Array = region) -> int:
                    view, nbytes = source.read(piece, slot)
                    row, col = piece.into
                    region[row : row + view.shape[0], col : col + view.shape[1]] = view
                    return nbytes

                def drain(part: Part, slot: Bytes, region: Array = region) -> int:
                    inside = region[part.row : part.row + part.rows, part.col : part.col + part.cols]
                    target.view(part, slot)[...] = inside
                    return target.write(part, slot)

                pieces = cut(copy.operand, copy.source, rows, cols, copy.slot_bytes)
                parts = (
                    Part((i, j), row - rows[0], col - cols[0], row_stop - row, col_stop - col)
                    for i, row, row_stop in overlaps(*rows, t.chunk_rows)
                    for j, col, col_stop in overlaps(*cols, t.chunk_cols)
                )
                read += each(readers, read_slots, pieces, fill)
                written += each(writers, write_slots, parts, drain)
    return replace(target.sink.opened(source.name), matrix=t), read, written


def each(
    pool: ThreadPoolExecutor, slots: list[Bytes], items: Iterable[T], work: Callable[[T, Bytes], int]
) -> int:
    """Call `work` for every item, in one thread for each slot, and return the sum of its results. After an
    error or Ctrl-C no thread takes another item."""
    lock, left = Lock(), iter(items)

    @on_thread("worker")
    def run(slot: Bytes) -> int:
        total = 0
        while True:
            with lock:
                item = next(left, None)
            if item is None:
                return total
            total += work(item, slot)

    jobs = [pool.submit(run, slot) for slot in slots]
    try:
        wait(jobs, return_when=FIRST_EXCEPTION)
    finally:
        with lock:
            left = iter(())
    return sum([job.result() for job in jobs])  # a generator would be a cycle with a job that fails
