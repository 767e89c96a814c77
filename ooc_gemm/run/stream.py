"""Passes over an operand, in which a few threads read all of it once, within a memory limit.

`Pieces` reads an operand as it lies in its store, for sums and for counts. `Panels` gathers all columns of
some rows, in one type, for products with tall matrices. Both call two functions: `work` by several threads at
a time, each with what it has read, and `add` with the result of `work`, one call at a time and in the order
of the pieces. So sums that `add` makes do not depend on how fast the threads are.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..devices.cpu.device import INTERPRETER_BYTES
from ..planning.problem import MiB
from ..planning.refusal import VARIES
from ..planning.schedule import Piece, cut
from ..planning.stream_plan import Cut
from ..storage.io.requests import CONNECTION_BYTES, requests
from ..storage.read.arrays import tried
from ..storage.read.source import Opened
from ..support.buffers import PAGE, Bytes, page_aligned
from ..support.errors import BudgetError, letting_go
from ..support.intervals import ceil_div, ranges, round_up
from ..support.memory import baseline_bytes
from ..support.meter import Meter
from ..support.trace import Trace
from .rechunk import each

Array = npt.NDArray[Any]
Range = tuple[int, int]
"""[start, stop) of rows or columns of op(X)."""
Progress = Callable[[float], None]
"""Called with the fraction of the matrix that has been added."""
R = TypeVar("R")
T = TypeVar("T")

THREADS = 4
"""Fewest threads that read a local store, because they wait for it in turns."""
PIECE_BYTES = 4 * MiB
"""Most bytes of a piece, where chunks can be read in part."""
PANEL_BYTES = 8 * MiB
"""Approximate bytes of a panel, where neither chunks nor the memory limit require another size."""

SHORTER = 32
"""A small memory limit makes panels shorter by this factor at most: very short ones take longer to hand on
than to work on. A limit that is too small for that is refused."""
FOR_A_SECOND = 8
"""Panels become shorter by this factor at most so that a second thread has one, too."""


@dataclass(frozen=True)
class Needs:
    """Memory in bytes that a pass takes in addition to what it reads and gathers."""

    fixed: int = 0
    """Memory that exists once: results, and what they are computed from."""
    thread: int = 0
    """Memory that `work` takes in each thread, its result included."""
    element: int = 0
    """Memory that `work` takes for each element of the piece or panel."""
    threads: int = 0
    """Cores that the pass may use; 0: those of this process."""


class _Turns:
    """Lets several threads act in the order of their numbers, from 0."""

    def __init__(self) -> None:
        self._next, self.failed, self._changed = 0, False, Condition()

    def take(self, number: int, act: Callable[[], None]) -> None:
        """Act when all lower numbers have acted; do nothing where one of them has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failed or self._next == number)
            if not self.failed:
                act()
                self._next += 1
                self._changed.notify_all()

    def numbered(self, items: Iterator[T]) -> Iterator[tuple[int, T]]:
        """Yield the items with their numbers, until one has failed."""
        for numbered in enumerate(items):
            if self.failed:
                return
            yield numbered

    def fail(self) -> None:
        """Note a failure, and wake all waiting threads."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()


class _Pass:
    """The common part of passes: threads, their memory, and the order in which results are added."""

    def __init__(self, opened: Opened, limit: int, purpose: str, threads: int):
        self.opened, self._untried = (opened, None) if opened.matrix.apart else tried(opened, limit)
        self.bytes_read = 0
        """Bytes moved from the store by all passes."""
        self._trace = Trace()
        s, far = self.opened.matrix, self.opened.traits.remote
        line = s.chunk_cols * s.itemsize
        self._slot = s.chunk_bytes if s.whole else max(line, min(s.chunk_bytes, PIECE_BYTES))
        self._reads = self._slot + s.beside(self._slot) + (CONNECTION_BYTES if far else 0)
        local = max(THREADS, threads or len(os.sched_getaffinity(0)))
        self._most = requests(self.opened.traits.latency, self._slot) if far else local
        self._limit, self._purpose = limit, purpose

    def _threads(self, fixed: int, each: int) -> int:
        """Return how many threads fit, each with so many bytes. Raises BudgetError where none does."""
        least = baseline_bytes(INTERPRETER_BYTES) + fixed + self.opened.matrix.apart + each
        if self._limit < least or self._untried:
            if self._untried:
                least = max(least, self._untried.minimum_memory_limit or 0)
            least += self.opened.matrix.apart // VARIES
            raise BudgetError(
                f"a memory limit of {self._limit} bytes is too small to {self._purpose} {self.opened.name}; "
                f"the smallest that would do is {least} bytes ({ceil_div(least, MiB)}MiB)",
                minimum_memory_limit=least,
            )
        return min(self._most, 1 + (self._limit - least) // each)

    def _run(
        self,
        memory: list[Bytes],
        items: Iterator[T],
        work: Callable[[T, Bytes], tuple[R, int, int]],
        add: Callable[[R], None],
        progress: Progress | None,
    ) -> None:
        """Make a pass. `work` returns what is added, the elements of the item and the bytes read for it."""
        rows, cols = self.opened.shape
        turns, done = _Turns(), 0
        meter = Meter(f"{self._purpose} {self.opened.name}", nbytes=rows * cols * self.opened.dtype.itemsize)

        def run(numbered: tuple[int, T], slot: Bytes) -> int:
            number, item = numbered
            try:
                with np.errstate(all="ignore"):
                    found, elements, moved = work(item, slot)

                    def act() -> None:
                        nonlocal done
                        add(found)
                        done += elements
                        meter(done / max(1, rows * cols))
                        if progress is not None:
                            progress(meter.fraction)

                    turns.take(number, act)
            except BaseException:
                turns.fail()
                raise
            return moved

        with (
            meter,
            ThreadPoolExecutor(len(memory), "ooc-gemm pass") as pool,
            self.opened.source.cancelled_on_error(),
        ):
            self.bytes_read += each(pool, memory, turns.numbered(items), run)


class Pieces(_Pass):
    """Passes over op(X) in pieces: parts of chunks, whole chunks, or a few small ones."""

    def __init__(self, opened: Opened, limit: int, purpose: str, needs: Needs):
        """purpose: what messages say is done to the array ("check", say). limit: the memory limit of the
        process, in bytes. needs: what `work` and its results take.

        Raises BudgetError before anything is read, except for the trial that measures a lazy input.
        """
        super().__init__(opened, limit, purpose, needs.threads)
        each = self._reads + needs.thread + needs.element * (self._slot // self.opened.matrix.itemsize)
        self.threads = self._threads(needs.fixed, each)

    @letting_go()
    def each(
        self,
        work: Callable[[Array, Range, Range], R],
        add: Callable[[R], None],
        progress: Progress | None = None,
    ) -> None:
        """Read everything once. `work(values, rows, columns)` gets each piece of op(X), in the stored type
        and not conjugated, in memory that is reused after it returns. Raises StoreError, and what the
        functions raise."""
        s, source = self.opened.matrix, self.opened.source

        def run(piece: Piece, slot: Bytes) -> tuple[R, int, int]:
            start = time.perf_counter()
            values, moved = source.read(piece, slot)
            self._trace.add("read", start, nbytes=moved)
            rows, cols = piece.rows, piece.cols
            start = time.perf_counter()
            found = work(values.T, cols, rows) if s.transposed else work(values, rows, cols)
            self._trace.add("compute", start)
            return found, values.size, moved

        pieces = cut("", s, (0, s.rows), (0, s.cols), self._slot)
        self._run(page_aligned(self.threads, self._slot), pieces, run, add, progress)


class Panels(_Pass):
    """Passes over op(X) in panels: all columns of some rows, as one array in C order."""

    def __init__(
        self,
        opened: Opened,
        dtype: Any,
        limit: int,
        purpose: str,
        needs: Needs,
        rows: int = 1,
        passes: int = 1,
    ) -> None:
        """dtype: the type of panels. rows: a panel has no fewer, unless the matrix has, or the memory limit
        asks for it. passes: how many will be made; if there are several, panels that are decoded, downloaded
        or computed stay in memory from the first pass on, as far as the limit allows. Others: as of `Pieces`.
        Panels end at edges of chunks wherever a chunk would otherwise be read twice."""
        super().__init__(opened, limit, purpose, needs.threads)
        s, (extent, width) = self.opened.matrix, self.opened.shape
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        step = s.chunk_cols if s.transposed else s.chunk_rows if s.whole else 1
        step = min(step, max(1, extent))
        line: int = width * (self.dtype.itemsize + needs.element)

        def takes(height: int) -> int:
            return self._reads + needs.thread + PAGE + min(height, extent) * line

        usual = max(rows, PANEL_BYTES // max(1, width * self.dtype.itemsize))
        height = round_up(min(usual, max(1, extent)), step)
        least = round_up(max(1, height // SHORTER), step)
        self._threads(needs.fixed, takes(least))
        fits = limit - baseline_bytes(INTERPRETER_BYTES) - needs.fixed - s.apart

        def highest(threads: int) -> int:
            found = height
            while found > least and fits // takes(found) < threads:
                found = max(least, round_up(found // 2, step))
            return found

        alone, height = highest(1), highest(min(self._most, 2))
        if alone > FOR_A_SECOND * height:
            height = alone
        self.height = height
        """Rows of a panel; the last may have fewer."""
        self.threads = self._threads(needs.fixed, takes(height))
        self._needs, self._panel_bytes = needs, PAGE + min(height, extent) * line
        count, spare = ceil_div(extent, height), fits - self.threads * takes(height)
        self._held_bytes = PAGE + min(height, extent) * width * self.dtype.itemsize
        costs = passes > 1 and (s.whole or s.apart > 0 or self.opened.traits.remote)
        self._keeps = min(count, spare // self._held_bytes) if costs else 0
        self._kept: dict[int, Array] = {}
        """The first panels, by their numbers, as they were read."""

    @property
    def cut(self) -> Cut:
        """How a pass cuts op(X), and what it takes."""
        s, threads, needs = self.opened.matrix, self.threads, self._needs
        held = {
            "baseline": baseline_bytes(INTERPRETER_BYTES),
            "reading": threads * self._reads,
            "lazy inputs": s.apart,
            "panels": threads * self._panel_bytes,
            "work": threads * needs.thread,
            "results": needs.fixed,
        }
        if self._keeps:
            held["kept panels"] = self._keeps * self._held_bytes
        kept = s.panels_bytes(self.height, range(self._keeps))
        return Cut(self.height, threads, s.pass_bytes(self.height), held, {}, kept_bytes=kept)

    def close(self) -> None:
        """Forget the panels that are kept."""
        self._kept.clear()

    @letting_go()
    def each(
        self,
        work: Callable[[Array, Range], R],
        add: Callable[[R], None],
        shift: Array | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Read everything once. `work(panel, rows)` gets each panel, which it may write to; the memory is
        reused after it returns. shift: what is subtracted from each row, in the type of panels. Raises
        StoreError, and what the functions raise."""
        s, source, (extent, width) = self.opened.matrix, self.opened.source, self.opened.shape
        front = round_up(self._slot, PAGE)
        size = min(self.height, extent) * width * self.dtype.itemsize

        def put(values: Array, place: Array, less: Array | None) -> None:
            if less is None:
                np.copyto(place, values, casting="unsafe")
            else:
                np.subtract(values, less, out=place, casting="unsafe")

        def read(rows: Range, panel: Array, memory: Bytes, less: Array | None) -> int:
            moved = 0
            stored = ((0, s.rows), rows) if s.transposed else (rows, (0, s.cols))
            for piece in cut("", s, *stored, self._slot):
                values, nbytes = source.read(piece, memory[: self._slot])
                moved += nbytes
                (row, col), values = (piece.into[::-1], values.T) if s.transposed else (piece.into, values)
                cols = slice(col, col + values.shape[1])
                put(values, panel[row : row + len(values), cols], None if less is None else less[cols])
            return moved

        def run(rows: Range, memory: Bytes) -> tuple[R, int, int]:
            count, moved, start = rows[1] - rows[0], 0, time.perf_counter()
            number = rows[0] // self.height
            space = memory[front : front + count * width * self.dtype.itemsize]
            panel: Array = space.view(self.dtype).reshape(count, width)
            if number >= self._keeps:
                moved = read(rows, panel, memory, shift)
            else:
                if number not in self._kept:
                    kept: Array = np.empty_like(panel)
                    moved = read(rows, kept, memory, None)
                    self._kept[number] = kept
                put(self._kept[number], panel, shift)
            self._trace.add("read", start, nbytes=moved)
            start = time.perf_counter()
            found = work(panel, rows)
            self._trace.add("compute", start)
            return found, count * width, moved

        memory = page_aligned(self.threads, front + size)
        self._run(memory, ranges(extent, self.height), run, add, progress)
