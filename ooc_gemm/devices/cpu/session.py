"""A run on the CPU: its panels, its C blocks, and the workers that compute tiles of them.

Uploads and downloads are copies that the calling thread makes. Multiplications have a stream, which is a
thread that deals pieces of the product to workers, one for each core, each of which calls BLAS
single-threaded. So a worker that loses its core to a reader or writer for a while delays one piece and no
other worker.
"""

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from threading import BoundedSemaphore, get_ident
from typing import Any, Protocol

import numpy as np

from ...engine.overflow import Overflow
from ...engine.ports import COMPUTE, Array, Check, Lost, Operation, Session
from ...engine.reduction import Reduction, pieces_of
from ...engine.ring import Event
from ...engine.standardize import Standardizer
from ...planning.plan import Plan
from ...planning.schedule import Block, Part, Piece
from ...support.buffers import Bytes, page_aligned
from ...support.intervals import ceil_div
from ...support.onward import Inward, Onward
from ...support.trace import Trace
from . import eight_bit, integers, tiles
from .blas import Gemm, Syrk, gemm, one_blas_thread, scale_in_place, syrk
from .check import Checks
from .eight_bit import EightBit
from .stream import Done, Mark, PendingCheck, Stream
from .workers import Workers, beside, cut, slices

TILE = 2048
"""Largest side of a tile. BLAS is no faster on larger ones, and a tile should not take long."""
LINES_ELEMENTS = 1 << 19
"""Elements that a worker standardizes together: they stay in the caches of the processor."""
TURN_TILE = 256
"""Side of the tiles in which a block is transposed, which is twice as fast as in one piece."""


Multiplier = Callable[[slice, complex, Array], Callable[[slice, slice], None]]
"""A function of a range of k, of β and of an array. It returns one that computes some rows and columns of
this array: out ← α·a·b + β·out, with the elements of a and b in the range."""


class Cores(Protocol):
    """What a session asks of the CPU."""

    threads: int
    """How many threads multiply."""


class HostMemory:
    """Plain memory, from which the CPU can copy at full speed."""

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Returns plain memory, which is page-aligned for direct reads and writes."""
        return page_aligned(count, nbytes)

    def prepare(self, buffer: Bytes, used: int | None = None) -> None:
        """Does nothing: the CPU can copy from any memory."""

    def release(self, buffers: list[Bytes]) -> None:
        """Does nothing: `prepare` pins nothing."""

    def prepared(self, buffer: Bytes) -> bool:
        """Returns True: no buffer needs to be made ready."""
        return True

    def close(self) -> None:
        """Does nothing."""


class CPUSession(HostMemory):
    """A run on the CPU: its panels and blocks, its workers, and its compute stream."""

    def __init__(self, device: Cores, plan: Plan, operation: Operation, trace: Trace):
        self.threads, self._op, self._trace = device.threads, operation, trace
        self._opened = ExitStack()
        self._finished: dict[int, Mark] = {}
        try:
            self._open(plan, operation)
        except BaseException:
            self.close()
            raise

    def _open(self, plan: Plan, operation: Operation) -> None:
        """Start the threads, and then allocate panels and blocks: a thread that finds no memory hangs."""
        self._opened.enter_context(one_blas_thread)
        self._workers = self._opened.enter_context(closing(Workers(self.threads)))
        self._stream = Stream()
        self._opened.callback(self._stream.close)
        self._k = plan.problem.k
        arithmetic = operation.arithmetic
        self._overflow = Overflow(operation, noted=arithmetic.exact)
        self._integers: EightBit | integers.Integers | None = None
        if arithmetic.exact:
            kind = EightBit if arithmetic.kernel == eight_bit.KERNEL else integers.Integers
            self._integers = kind(arithmetic, self.threads)
        self._stay = plan.k_panels.stay
        self._panels = {
            (name, number): np.empty(lines * depth, dtype)
            for (name, rooms), dtype in zip(plan.rooms().items(), arithmetic.panels, strict=True)
            for number, (lines, depth) in enumerate(rooms)
        }
        self._blocks = [np.empty(plan.bm * plan.bn, arithmetic.block) for _ in range(plan.c_buffers)]
        self._lanes, size = plan.k_panels.lanes > 0, plan.bm * plan.bn
        self._cores = BoundedSemaphore(self.threads)
        self._in_slots: dict[tuple[str, int], Array] = {}
        """Panels that are whole pieces, which lie in the slots of lanes."""
        room = (plan.k_panels.sums - 1) * size if self._lanes else beside(self.threads, size)
        self._beside = np.empty(room, arithmetic.block)
        self._shared = len(plan.budget.weights) > 1  # others copy panels of op(B)
        self._checks = Checks(plan, operation, self._workers.run, self.threads) if operation.verify else None

    brings = False

    def inward(self, block: Block, parts: Sequence[Part], c: int) -> Inward | None:
        """Returns None: `download` makes all copies."""
        return None

    def onward(self, piece: Piece, dtype: np.dtype[Any], buffer: int) -> Onward | None:
        """Returns None: `upload` makes all copies."""
        return None

    def upload(self, source: Array, piece: Piece, buffer: int) -> Event:
        """Copies on the calling thread, converts to the panel's type, and transforms."""
        start = time.perf_counter()
        self._overflow.upload(piece, buffer, source)
        memory = self._blocks[buffer] if piece.operand == "c" else self._panels[piece.operand, buffer]
        row, col = piece.into
        rows, cols = source.shape
        place = _shaped(memory, piece.panel)[row : row + rows, col : col + cols]
        transform = self._op.transforms.get(piece.operand)
        if self._lanes and not transform and self._stays(source, piece, place):
            self._in_slots[piece.operand, buffer] = source
        elif transform:
            transform.place(source, piece.rows, piece.cols, place)
        else:
            np.copyto(place, source, casting="unsafe")
        self._trace.add("upload", start, time.perf_counter(), f"upload {get_ident()}")
        return Done()

    def multiply_alone(
        self, block: Block, panel: tuple[int, int], lane: int, number: int, first: bool
    ) -> None:
        """Multiplies on the calling thread. As many lanes as there are cores do so at a time."""
        op, k = self._op, panel[1] - panel[0]
        left, right = (
            self._in_slots.pop((operand, lane), self._panels[operand, lane]).reshape(-1)
            for operand in ("a", "b")
        )
        a = self._operand(left, (block.rows, k), op.transpose_a, op.conjugate_a)
        b = self._operand(left if block.diagonal else right, (k, block.cols), op.transpose_b, op.conjugate_b)
        out, every = self._sum(block, number), slice(None)
        multiply = self._multiplier(a, b, (0, 0), block.diagonal)
        with self._cores:
            start = time.perf_counter()
            self._workers.begin_calls()
            if op.alpha == 0:  # some BLAS makes NaN of 0·NaN
                out[...] = 0
            else:
                multiply(slice(0, k), 0.0 if first else 1.0, out)(every, every)
            self._trace.add("compute", start, block=block.index, k=k)

    def add_up(self, block: Block, count: int) -> None:
        """Lets the workers add some rows each."""
        sums = [self._sum(block, number) for number in range(count)]

        def add(rows: slice) -> None:
            with np.errstate(all="ignore"):
                for one in sums[1:]:
                    sums[0][rows] += one[rows]

        self._workers.run_slices(add, block.rows)

    def _sum(self, block: Block, number: int) -> Array:
        """Return a sum of panels that lanes multiply; the first is the block."""
        size = block.rows * block.cols
        memory = self._beside[(number - 1) * size :] if number else self._blocks[0]
        return _shaped(memory, (block.rows, block.cols))

    def _stays(self, source: Array, piece: Piece, place: Array) -> bool:
        """Whether a piece is multiplied where it was read: it is all of a panel, as the panel would be."""
        conjugate = self._op.conjugate_a if piece.operand == "a" else self._op.conjugate_b
        same = source.shape == piece.panel == place.shape and source.dtype == place.dtype
        return same and not conjugate and source.flags.c_contiguous

    def share(self) -> None:
        """Does nothing: panels are in host memory."""

    def take(
        self,
        other: Session,
        panel: tuple[int, int],
        rows: tuple[int, int],
        cols: tuple[int, int],
        buffer: int,
        uploaded: Event,
    ) -> None:
        """Copies at once, on the calling thread."""
        assert isinstance(other, CPUSession)
        to, at = (_shaped(session._panels["b", buffer], panel) for session in (self, other))
        np.copyto(to[slice(*rows), slice(*cols)], at[slice(*rows), slice(*cols)])
        self._overflow.note("b", buffer, self._op.arithmetic.largest[1])

    def multiply(
        self, block: Block, panel: tuple[int, int], pair: tuple[int, int], c: int, first: bool
    ) -> None:
        """Deals tiles of the block to the workers, in the compute stream."""
        k = panel[1] - panel[0]
        most = self._overflow.multiply(block, pair, c, k, first, self._stay)
        a = self._panels["a", pair[0]]
        b = a if block.diagonal else self._panels["b", pair[1]]
        last = panel[1] == self._k
        if self._op.standardizer:
            whole, rows = (b, block.cols) if block.band else (a, block.rows)
            self._stream.submit(partial(self._standardize, self._op.standardizer, whole, rows, panel))
        if block.band:
            self._stream.submit(partial(self._copy_band, block, k, a, b))
        self._stream.submit(partial(self._multiply, block, k, a, b, most, c, (first, last)))

    def scale(self, block: Block, c: int) -> None:
        """Scales the block in place, in the compute stream."""
        self._overflow.scale(c)
        self._stream.submit(partial(self._begin, _shaped(self._blocks[c], (block.rows, block.cols))))

    def mirror(self, block: Block, c: int, col: int = 0) -> None:
        """Deals tiles below the diagonal to the workers, in the compute stream."""
        whole = _shaped(self._blocks[c], (block.rows, block.cols))
        self._stream.submit(partial(self._mirror, whole[:, col : col + block.rows]))

    def check(self, block: Block, c: int) -> Check:
        """The workers check the block, in the compute stream."""
        check = PendingCheck()
        self._stream.submit(partial(self._check, check, _shaped(self._blocks[c], (block.rows, block.cols))))
        check.done = self._stream.mark()
        return check

    def finish(self, block: Block, c: int) -> None:
        """Marks the point in the compute stream at which the block is finished. This waits for that where
        panels were standardized: what was found is then complete."""
        self._finished[c] = self._stream.mark()
        if self._op.standardizer:
            self._finished[c].synchronize()

    def download(self, block: Block, part: Part, c: int, target: Array) -> Event:
        """Copies on the calling thread. A transposed part is copied in tiles that fit the processor's
        caches. Of a block that was reduced nothing is copied."""
        self._finished[c].synchronize()
        if self._op.reduction:
            return Done()
        start = time.perf_counter()
        view = _shaped(self._blocks[c], (block.rows, block.cols))
        if part.mirrored:
            source = view.T[part.row : part.row + part.rows, part.col : part.col + part.cols]
            for rows in slices(part.rows, TURN_TILE):
                for cols in slices(part.cols, TURN_TILE):
                    np.copyto(target[rows, cols], source[rows, cols])
        else:
            np.copyto(target, view[part.row : part.row + part.rows, part.col : part.col + part.cols])
        self._trace.add("download", start, time.perf_counter(), f"download {get_ident()}")
        return Done()

    def lost(self, block: Block, part: Part, c: int) -> Lost:
        """Returns nothing: blocks are downloaded as they are."""
        return Lost()

    def gathers(self, pair: tuple[int, int]) -> bool:
        """Nothing that was uploaded has to be decoded."""
        return False

    def record(self, stream: str, pair: tuple[int, int] | None = None) -> Event:
        """Only the compute stream has events: a copy is done when it returns."""
        return self._stream.mark() if stream == COMPUTE else Done()

    def wait(self, stream: str, event: Event) -> None:
        """Waits on the calling thread, which makes all copies itself. Nothing is to be done for the compute
        stream: it waits only for copies, and those are done when they return."""
        if stream != COMPUTE:
            event.synchronize()

    def peak_bytes(self) -> int:
        """Returns 0: the CPU has no memory apart from the host's."""
        return 0

    def cancel(self) -> None:
        """Stops each worker after its current piece."""
        self._workers.cancel()

    def free_panels(self) -> None:
        """Does nothing: `close` frees panels and blocks together, which takes no time."""

    def close(self) -> None:
        """Frees the buffers and the workers, and lets BLAS use its threads again."""
        self._opened.close()
        self._panels, self._blocks, self._in_slots = {}, [], {}
        self._finished.clear()

    def _multiply(
        self,
        block: Block,
        k: int,
        left: Array,
        right: Array,
        largest: tuple[int, int],
        c: int,
        ends: tuple[bool, bool],
    ) -> None:
        """Multiply a pair of panels, of which `ends` says whether it is the block's first and its last."""
        start, (first, last) = time.perf_counter(), ends
        op, arithmetic = self._op, self._op.arithmetic
        a = self._operand(left, (block.rows, k), op.transpose_a, op.conjugate_a)
        b = self._operand(right, (k, block.cols), op.transpose_b, op.conjugate_b)
        out = _shaped(self._blocks[c], (block.rows, block.cols))
        if self._checks:
            if first:
                self._checks.begin(out)
            self._checks.add(a, b, largest)
        if op.alpha == 0:  # some BLAS makes NaN of 0·NaN
            if first:
                self._scale(out)
            return
        beta, whole = op.beta if first else 1.0, slice(0, k)
        multiply = self._multiplier(a, b, largest, block.diagonal)
        if op.reduction and last and first and arithmetic.block.kind != "i":
            self._reduce_apart(op.reduction, block, a, b, self._blocks[c])
        elif op.reduction and last:
            self._reduce(op.reduction, block, multiply(whole, beta, out), out)
        else:
            self._deal(multiply, k, beta, out, lower=block.diagonal)
        self._trace.add("compute", start, time.perf_counter(), "compute", block=block.index, k=k)

    def _multiplier(self, a: Array, b: Array, largest: tuple[int, int], diagonal: bool) -> Multiplier:
        """Choose what multiplies a pair of panels. `diagonal`: op(B) is the transpose of op(A)."""
        alpha, kind = self._op.alpha, self._integers
        if isinstance(kind, EightBit):
            return lambda k, beta, out: kind.tile(a[:, k], b[k], int(alpha.real), int(beta.real), out)
        if kind:
            centred = None
            if not self._shared:
                centred, largest = kind.centred(a, b, largest, self._workers.run_slices)
            return lambda k, beta, out: kind.tile(
                a[:, k], b[k], largest, int(alpha.real), int(beta.real), out, None if k.start else centred
            )
        char = self._op.arithmetic.panel.char
        run, half = gemm(char)[1], syrk(char) if diagonal else None
        return lambda k, beta, out: partial(self._tile, run, a[:, k], b[k], out, beta, half)

    def _deal(self, multiply: Multiplier, k: int, beta: complex, out: Array, lower: bool) -> None:
        """Let the workers compute out ← α·a·b + β·out, piece by piece. `lower`: only on the diagonal and
        below it."""
        side = tiles.TILE if self._integers else TILE
        pieces = cut(out.shape, k, side, self.threads, self._beside.size, lower)
        sums = [
            _shaped(self._beside[number * out.size :], out.shape) for number in range(len(pieces.ranges) - 1)
        ]
        first, *others = pieces.ranges
        works = [multiply(first, beta, out), *map(multiply, others, [0.0] * len(others), sums)]
        self._workers.run(
            lambda work, rows, cols: work(rows, cols),
            ((work, *tile) for work in works for tile in pieces.tiles),
        )
        if not sums:
            return

        def add(rows: slice, cols: slice) -> None:
            with np.errstate(all="ignore"):
                for one in sums:
                    out[rows, cols] += one[rows, cols]

        self._workers.run(add, pieces.tiles)

    def _standardize(
        self, standardizer: Standardizer, memory: Array, rows: int, panel: tuple[int, int]
    ) -> None:
        """Let workers standardize a panel that holds all rows of op(A), some places along k at a time."""
        start, k = time.perf_counter(), panel[1] - panel[0]
        if panel[0] == 0:
            standardizer.begin()
        lines = _shaped(memory, (k, rows)) if self._op.transpose_a else _shaped(memory, (rows, k)).T

        def work(some: slice) -> None:
            strip = np.ascontiguousarray(lines[some])
            standardizer.standardize(strip, panel[0] + some.start)
            if not self._op.transpose_a:
                lines[some] = strip

        each = max(1, min(ceil_div(k, 2 * self.threads), LINES_ELEMENTS // max(1, rows)))
        self._workers.run(work, ((some,) for some in slices(k, each)))
        self._trace.add("compute", start, time.perf_counter(), "compute")

    def _copy_band(self, block: Block, k: int, a: Array, b: Array) -> None:
        """Copy the panel of op(A) of a band from the panel of op(B)."""
        start, wide = block.row - block.col, self._op.transpose_a
        some = slice(start, start + block.rows)
        whole = _shaped(b, (k, block.cols) if wide else (block.cols, k))
        np.copyto(
            _shaped(a, (k, block.rows) if wide else (block.rows, k)), whole[:, some] if wide else whole[some]
        )

    def _reduce(
        self, reduction: Reduction, block: Block, work: Callable[[slice, slice], None], out: Array
    ) -> None:
        """Let workers finish tiles of a block and reduce each while it is in the processor's caches."""

        def reduced(rows: slice, cols: slice) -> None:
            work(rows, cols)
            reduction.take(out[rows, cols], block.row + rows.start, block.col + cols.start)

        self._workers.run(reduced, pieces_of(out.shape, reduction.tile))

    def _reduce_apart(self, reduction: Reduction, block: Block, a: Array, b: Array, memory: Array) -> None:
        """The same for a block of one pair of panels, whose tiles need not stay: each worker uses the same
        few MiB of the block's memory again and again, so that sums need not pass through main memory."""
        shape, run = (block.rows, block.cols), gemm(a.dtype.char)[1]
        tile = min(reduction.tile[0], shape[0]), min(reduction.tile[1], shape[1])
        count = max(1, min(self.threads, len(memory) // max(1, tile[0] * tile[1])))
        free: queue.SimpleQueue[Array] = queue.SimpleQueue()
        for index in range(count):
            free.put(memory[index * tile[0] * tile[1] :])

        def reduced(rows: slice, cols: slice) -> None:
            room = free.get()
            try:
                out = _shaped(room, (rows.stop - rows.start, cols.stop - cols.start))
                run(a[rows], b[:, cols], out, self._op.alpha, 0.0)
                reduction.take(out, block.row + rows.start, block.col + cols.start)
            finally:
                free.put(room)

        self._workers.run(reduced, pieces_of(shape, tile))

    def _operand(self, memory: Array, shape: tuple[int, int], transpose: bool, conjugate: bool) -> Array:
        panel = _shaped(memory, shape[::-1] if transpose else shape)
        if conjugate:
            np.conjugate(panel, out=panel)
        return panel.T if transpose else panel

    def _tile(
        self,
        run: Gemm,
        a: Array,
        b: Array,
        out: Array,
        beta: complex,
        half: Syrk | None,
        rows: slice,
        cols: slice,
    ) -> None:
        """Compute a tile. One on the diagonal is its own mirror image, of which `half` computes a half."""
        if half and rows == cols:
            half(a[rows], out[rows, cols], self._op.alpha, beta)
        else:
            run(a[rows], b[:, cols], out[rows, cols], self._op.alpha, beta)

    def _scale(self, out: Array) -> None:
        scale_in_place(out, self._op.beta)

    def _begin(self, out: Array) -> None:
        """Scale a block that has no panels."""
        if self._checks:
            self._checks.begin(out)
        self._scale(out)

    def _check(self, check: PendingCheck, out: Array) -> None:
        assert self._checks is not None
        start = time.perf_counter()
        check.found = self._checks.end(out)
        self._trace.add("compute", start, time.perf_counter(), "compute")

    def _mirror(self, out: Array) -> None:
        above = ~np.tri(min(TURN_TILE, len(out)), dtype=bool)

        def turn(rows: slice, cols: slice) -> None:
            if rows == cols:
                tile = out[rows, cols]
                np.copyto(tile, tile.T.copy(), where=above[: len(tile), : len(tile)])
            else:
                np.copyto(out[cols, rows], out[rows, cols].T)

        start = time.perf_counter()
        self._workers.run(
            turn, ((r, c) for r in slices(len(out), TURN_TILE) for c in slices(r.stop, TURN_TILE))
        )
        self._trace.add("compute", start, time.perf_counter(), "compute")


def _shaped(memory: Array, shape: tuple[int, int]) -> Array:
    """View the beginning of a flat buffer as a dense matrix."""
    return memory[: shape[0] * shape[1]].reshape(shape)
