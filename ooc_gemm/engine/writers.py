"""Writers: the threads that download finished parts of a block into slots and store them."""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE
from threading import Lock

from ..planning.plan import Plan
from ..planning.schedule import Block, Part
from ..support.buffers import Bytes
from ..support.errors import on_thread
from ..support.trace import Trace
from .ports import Check, Session, Target
from .ring import Event


class InTurn(Iterator[Part]):
    """An iterator of which several threads take the next part."""

    def __init__(self, parts: Iterator[Part]):
        self._parts, self._lock = parts, Lock()

    def __next__(self) -> Part:
        with self._lock:
            return next(self._parts)

    def end(self) -> None:
        """Give no part to anybody any more."""
        with self._lock:
            self._parts = iter(())


def _part_bytes(plan: Plan) -> int:
    c = plan.problem.c
    return c.chunk_rows * c.chunk_cols * plan.problem.part_itemsize


def make_ready(
    writers: ThreadPoolExecutor, session: Session, plan: Plan, slots: "queue.SimpleQueue[Bytes]"
) -> None:
    """Prepare the slots for writing. This is called when the first panels have arrived, so that it does not
    delay them, and before a block is finished, so that the block need not wait."""
    for buffer in session.host_buffers(plan.writers, _part_bytes(plan)):
        writers.submit(_ready, session, buffer, slots)


def _ready(session: Session, slot: Bytes, slots: "queue.SimpleQueue[Bytes]") -> None:
    """Touch a slot's pages and prepare it, because memory is pinned slowly where its pages do not exist yet.
    An error here occurs again where the slot is used, and is reported there."""
    try:
        slot[::PAGESIZE] = 0
        session.prepare(slot)
    finally:
        slots.put(slot)


@on_thread("writer")
def write(
    session: Session,
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
        if (lost := session.lost(block, part, c)).elements:
            target.note_lost(*lost)
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
            session.prepare(slot)
            coming.append((slot, part, session.download(block, part, c, target.view(part, slot))))
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
