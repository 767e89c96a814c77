"""Runs a plan with three kinds of threads.

    readers                    conductor (the caller's thread)                  writers
    chunk → slot → panel ──►   panels → C block, one pair after the other ──►   part of C → slot → chunk

The conductor opens one pair of panels after the other for uploads and hands multiplications to the device.
Events order the device's three streams. The conductor waits only for uploads and for a free C block.
"""

import contextlib
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import PAGESIZE
from threading import Lock
from typing import Protocol

from ..planning.plan import Plan
from ..planning.schedule import Block, Part, Piece
from ..support.buffers import Bytes
from ..support.errors import on_thread
from ..support.shared import Shared
from ..support.trace import Trace
from .ports import COMPUTE, UPLOAD, Array, Check, Device
from .ring import SIGNAL_SECONDS, Event, Ring, Slot, Stopped, Task

SWITCH_SECONDS = 5e-4
"""Seconds for which a thread may keep the interpreter while others wait for it. Readers and writers need it
briefly between long calls, and the conductor must not wait Python's usual 5 ms for each of its short calls
(four H200: 1.9 s instead of 2.6)."""


@Shared
@contextmanager
def quick_turns() -> Iterator[None]:
    """Let threads take turns more often while any run is under way in this process."""
    patience = sys.getswitchinterval()
    sys.setswitchinterval(min(patience, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(patience)


class Source(Protocol):
    """A stored matrix from which pieces are read."""

    background: bool
    """Whether a read that has been started continues without a thread of Python's."""

    def start(self, piece: Piece, slot: Bytes) -> Callable[[], tuple[Array, int]]:
        """Start to read `piece` into `slot`. The function that is returned must be called, whatever happens.
        It waits for the read and returns a view of the piece's rows × cols, in the slot or where the data
        already is, and the number of bytes read."""

    def cancel(self) -> None:
        """Let no reader wait any longer for a store that may never answer."""


class Target(Protocol):
    """The stored C, to which chunks are written."""

    def view(self, part: Part, slot: Bytes) -> Array:
        """Return the view of `slot` in which the part's rows × cols belong."""

    background: bool
    """Whether a write that has been started continues without a thread of Python's."""

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Start to store the chunk in `slot`, whole and atomically. The function that is returned must be
        called, whatever happens. It waits for the write and returns the number of bytes written."""

    def cancel(self) -> None:
        """Let no writer wait any longer for a store that may never answer."""


@dataclass
class _CBlock:
    """A block buffer on the device, and the writes that must end before the buffer is used again."""

    writes: list[Future[None]] = field(default_factory=list)
    checked: tuple[Block, Check] | None = None
    wrong: list[Block] = field(default_factory=list)
    """Blocks that were computed in this buffer and failed their check."""

    def free(self) -> None:
        """Wait for the writes. Raises the error of the first that failed."""
        while wait(self.writes, SIGNAL_SECONDS, FIRST_EXCEPTION).not_done:
            self.check()
        self.check()
        self.writes.clear()
        if self.checked:
            block, check = self.checked
            self.checked = None
            if not check.verdict().ok:
                self.wrong.append(block)

    def check(self) -> None:
        """Raise the error of a write that has failed. Does not wait."""
        for write in self.writes:
            if write.done():
                write.result()


class _Pairs:
    """The pairs of panels on the device. Each step of a plan fills one pair and multiplies it."""

    def __init__(self, plan: Plan, device: Device, ring: Ring):
        self._plan, self._device, self._ring = plan, device, ring
        self._panels = list(plan.panels())
        self._opened = 0
        self._used: dict[tuple[str, int], tuple[int, Event | None]] = {}
        """For each panel of op(A) and op(B): the last step that multiplies it, and the event after which that
        is done; None if the step has not been handed to the device yet."""

    def open(self, step: int, early: bool = False) -> None:
        """Let readers fill the pair of this step, unless they may already. `early`: only if the device no
        longer needs what the pair holds. Readers then need not wait until the conductor has handed over the
        step before."""
        plan = self._plan
        if step < self._opened or step == plan.block_count * len(self._panels):
            return
        a, b = self._buffers(step)
        filled = [a, b] if plan.brings_a(step // len(self._panels)) else [b]
        before = {self._used[panel][1] for panel in filled if panel in self._used}
        if early and not all(event and event.done for event in before):
            return
        for event in before:
            assert event, "steps are handed over in order"
            self._device.wait(UPLOAD, event)
        self._used[a] = self._used[b] = step, None
        self._ring.open((a[1], b[1]))
        self._opened = step + 1

    def multiplied(self, step: int) -> None:
        """Note that the device has been given this step's multiplication."""
        event = self._device.record(COMPUTE)
        for panel in self._buffers(step):
            if self._used[panel][0] == step:  # the next may need op(A)'s, too
                self._used[panel] = step, event

    def _buffers(self, step: int) -> tuple[tuple[str, int], tuple[str, int]]:
        b = step % self._plan.panel_buffers
        return ("a", self._plan.k_panels.a_buffer(self._panels[step % len(self._panels)], b)), ("b", b)


@quick_turns
def execute(
    plan: Plan,
    device: Device,
    sources: Mapping[str, Source],
    target: Target,
    trace: Trace,
    progress: Callable[[float], None] = lambda fraction: None,
    verify: bool = False,
) -> list[Block]:
    """Run `plan` on a device that has been started with it.

    `progress` is called on this thread with the fraction of the work that has been handed to the device.
    `verify`: check each block before it is written; blocks that fail are not written but returned.
    """
    ring = Ring(device.host_buffers(plan.slots + plan.cache_slots, plan.slot_bytes), _turns(plan))
    write_slots: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    readers = ThreadPoolExecutor(plan.readers, "ooc-gemm reader")
    writers = ThreadPoolExecutor(plan.writers, "ooc-gemm writer")
    blocks = [_CBlock() for _ in range(plan.c_buffers)]
    pairs = _Pairs(plan, device, ring)
    steps, step = plan.block_count * max(1, plan.panel_count), 0
    try:
        threads, each = _dealt(plan.readers, all(source.background for source in sources.values()))
        for _ in range(threads):
            readers.submit(_read, ring, device, sources, trace, each, bool(plan.budget.connection))
        for block in plan.blocks():
            c = block.index % plan.c_buffers
            if plan.problem.reads_c:
                blocks[c].free()
                ring.open((c, c))
                _wait_for_all(ring, device)
            for number, panel in enumerate(plan.panels(), 1):
                pairs.open(step)
                _wait_for_all(ring, device)
                uploaded = device.record(UPLOAD)
                if number < plan.panel_count or not plan.problem.reads_c:
                    pairs.open(step + 1, early=True)
                if panel[0] == 0:
                    blocks[c].free()
                for other in blocks:
                    other.check()
                device.wait(COMPUTE, uploaded)
                device.multiply(block, panel, step % plan.panel_buffers, c, first=panel[0] == 0)
                pairs.multiplied(step)
                if step == 0:
                    _make_ready(writers, device, plan, write_slots)
                step += 1
                progress(step / steps)
            if plan.panel_count == 0:
                if block.index == 0:
                    _make_ready(writers, device, plan, write_slots)
                blocks[c].free()
                device.wait(COMPUTE, device.record(UPLOAD))
                device.scale(block, c)
            if block.diagonal:
                device.mirror(block, c)
            check = device.check(block, c) if verify else None
            device.finish(block, c)
            blocks[c].checked = (block, check) if check else None
            parts = _InTurn(plan.parts(block))
            threads, each = _dealt(plan.writers, target.background)
            for _ in range(threads):
                job = writers.submit(_write, device, target, block, parts, c, check, write_slots, trace, each)
                blocks[c].writes.append(job)
        freed = readers.submit(device.free_panels)
        for other in blocks:
            other.free()
        freed.result()
        return sorted((block for x in blocks for block in x.wrong), key=lambda block: block.index)
    except BaseException:
        device.cancel()
        target.cancel()
        for source in sources.values():
            source.cancel()
        raise
    finally:
        ring.close()
        try:
            readers.shutdown(cancel_futures=True)
        finally:  # also where Ctrl-C comes just now
            writers.shutdown(cancel_futures=True)


def _turns(plan: Plan) -> Iterator[Iterator[Piece]]:
    """Yield the pieces of each turn, in the order in which the device needs them. A turn fills a pair of
    panels or, if the old C is read, a block."""
    for block in plan.blocks():
        if plan.problem.reads_c:
            yield plan.block_pieces(block)
        for panel in plan.panels():
            yield plan.pieces(block, panel)


def _part_bytes(plan: Plan) -> int:
    c = plan.problem.c
    return c.chunk_rows * c.chunk_cols * plan.problem.block_itemsize


class _InTurn(Iterator[Part]):
    """An iterator of which several threads take the next part."""

    def __init__(self, parts: Iterator[Part]):
        self._parts, self._lock = parts, Lock()

    def __next__(self) -> Part:
        with self._lock:
            return next(self._parts)


def _dealt(count: int, background: bool) -> tuple[int, int]:
    """Return the number of threads for `count` reads or writes at once, and how many of them each thread has
    under way. One thread handles all background operations, because two would wait for each other for longer
    than they work."""
    return (1, count) if background else (count, 1)


def _read(
    ring: Ring, device: Device, sources: Mapping[str, Source], trace: Trace, ahead: int, aside: bool
) -> None:
    """Read pieces and upload them until there are none left.

    `ahead`: the number of reads under way at once. `aside`: leave pieces whose turn has not come to the
    conductor. Over a network the time of a read varies much, and readers would wait for the slowest one at
    every turn.
    """
    begun: deque[tuple[Slot, Task, Callable[[], tuple[Array, int]] | None]] = deque()
    try:
        with on_thread("reader"):
            while True:
                while len(begun) < ahead and (found := ring.acquire(wait=not begun)):
                    slot, (_, piece) = found
                    end = None if piece.found else sources[piece.source].start(piece, slot.data)
                    begun.append((*found, end))
                slot, task, end = begun.popleft()
                piece = task.piece
                if end:
                    start = time.perf_counter()
                    view, nbytes = end()
                    trace.add("read", start, nbytes=nbytes, operand=piece.operand, chunk=piece.chunk)
                    device.prepare(slot.data)
                    slot.view = view
                _upload(ring, device, slot, task, aside)
    except Stopped:
        pass
    except Exception as error:
        ring.close(error)
    finally:
        for *_, end in begun:
            if end:
                with contextlib.suppress(BaseException):
                    end()


def _upload(ring: Ring, device: Device, slot: Slot, task: Task, aside: bool = False) -> None:
    if panels := ring.admit(slot, task, aside):
        assert slot.view is not None, "it is filled"
        buffer = panels[task.piece.operand != "a"]
        ring.release(slot, task, device.upload(slot.view, task.piece, buffer))


def _wait_for_all(ring: Ring, device: Device) -> None:
    """Upload the pieces of the open turn that were put aside, and wait until all of its pieces are being
    uploaded."""
    with contextlib.suppress(Stopped):  # where a reader has failed: `wait` says with what
        for slot, task in ring.aside():
            _upload(ring, device, slot, task)
    ring.wait()


def _make_ready(
    writers: ThreadPoolExecutor, device: Device, plan: Plan, slots: "queue.SimpleQueue[Bytes]"
) -> None:
    """Prepare the slots for writing. This is called when the first panels have arrived, so that it does not
    delay them, and before a block is finished, so that the block need not wait."""
    for buffer in device.host_buffers(plan.writers, _part_bytes(plan)):
        writers.submit(_ready, device, buffer, slots)


def _ready(device: Device, slot: Bytes, slots: "queue.SimpleQueue[Bytes]") -> None:
    """Touch a slot's pages and prepare it, because memory is pinned slowly where its pages do not exist yet.
    An error here occurs again where the slot is used, and is reported there."""
    try:
        slot[::PAGESIZE] = 0
        device.prepare(slot)
    finally:
        slots.put(slot)


@on_thread("writer")
def _write(
    device: Device,
    target: Target,
    block: Block,
    parts: Iterator[Part],
    c: int,
    check: Check | None,
    slots: "queue.SimpleQueue[Bytes]",
    trace: Trace,
    ahead: int,
) -> None:
    """Download parts of a block and store them until there are none left.

    `parts` is shared with other threads. `ahead`: the number of parts under way at once, a quarter of them
    from the device, which is faster, and the others to the store.
    """
    coming: deque[tuple[Bytes, Part, Event]] = deque()
    going: deque[tuple[Bytes, Part, Callable[[], int]]] = deque()

    def send() -> None:
        slot, part, came = coming[0]
        came.synchronize()
        coming.popleft()
        if check and not check.verdict().ok:
            slots.put(slot)
            return
        going.append((slot, part, target.start(part, slot)))

    def end() -> None:
        slot, part, stored = going.popleft()
        try:
            start = time.perf_counter()
            nbytes = stored()
            trace.add("write", start, nbytes=nbytes, chunk=part.chunk)
        finally:
            slots.put(slot)

    try:
        for part in parts:
            while (slot := _free(slots, wait=not (coming or going))) is None:
                (end if going else send)()
            device.prepare(slot)
            coming.append((slot, part, device.download(block, part, c, target.view(part, slot))))
            while len(coming) > ahead // 4:
                send()
            while len(going) >= ahead - ahead // 4:
                end()
        while coming:
            send()
        while going:
            end()
    finally:
        for slot, *_ in coming:
            slots.put(slot)
        while going:
            with contextlib.suppress(BaseException):
                end()


def _free(slots: "queue.SimpleQueue[Bytes]", wait: bool) -> Bytes | None:
    try:
        return slots.get(block=wait)
    except queue.Empty:
        return None
