"""Writers: the threads that download finished parts of a block into slots and store them."""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE
from threading import Lock
from typing import Any

from ..planning.plan import Plan
from ..planning.schedule import TOGETHER, Block, Part
from ..support.buffers import Bytes
from ..support.errors import on_thread
from ..support.intervals import ceil_div
from ..support.onward import Inward
from ..support.trace import Trace
from .ports import Check, Session, Target
from .ring import Event

FEWER = 8
"""One in so many slots is there where parts are written without them, for those that must have one."""


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
    writers: ThreadPoolExecutor,
    session: Session,
    plan: Plan,
    target: Target,
    slots: "queue.SimpleQueue[Bytes]",
) -> None:
    """Prepare the slots for writing. This is called when the first panels have arrived, so that it does not
    delay them, and before a block is finished, so that the block need not wait. Where parts are written
    without them, few are needed, if any, and they are prepared then."""
    if session.brings and target.bring:
        for buffer in session.host_buffers(ceil_div(plan.writers, FEWER), _part_bytes(plan)):
            slots.put(buffer)
        return
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
    from the device, which is faster, and the others to the store. What the session and the target can bring
    from the device to the store by themselves takes no slot.
    """
    was_noted = False
    coming: deque[tuple[Bytes | Inward, list[Part], Event]] = deque()
    going: deque[tuple[Bytes | Inward, list[Part], Callable[[], int]]] = deque()
    again: deque[Part] = deque()
    """Parts that could not be brought, which go through slots. What does not fit of them was noted."""

    def note_lost(some: list[Part]) -> None:
        for part in some:
            if (lost := session.lost(block, part, c)).elements:
                target.note_lost(*lost)

    def give_back(source: Bytes | Inward) -> None:
        if not isinstance(source, Inward):
            slots.put(source)

    def send() -> None:
        source, some, came = coming[0]
        came.synchronize()
        coming.popleft()
        if check and not check.verdict().ok:
            give_back(source)
        elif isinstance(source, Inward):
            assert target.bring
            note_lost(some)
            going.append((source, some, target.bring(some, source)))
        else:
            if not was_noted:
                note_lost(some)
            going.append((source, some, target.start(some[0], source)))

    def end() -> None:
        source, some, stored = going.popleft()
        try:
            start = time.perf_counter()
            nbytes = stored()
            if isinstance(source, Inward) and not nbytes:
                again.extend(some)
                return
            trace.add("write", start, nbytes=nbytes, chunk=some[0].chunk)
            if isinstance(source, Inward):
                source.brought()
        finally:
            give_back(source)

    def finish() -> None:
        while coming:
            send()
        while going:
            end()

    def in_turn() -> Iterator[tuple[list[Part], Inward | None]]:
        nonlocal was_noted
        for some in beside(parts, TOGETHER if target.bring and session.brings else 1):
            if inward := session.inward(block, some, c) if target.bring else None:
                yield some, inward
            else:
                yield from (([part], None) for part in some)
        finish()
        was_noted = True
        while again:
            yield [again.popleft()], None

    def under_way(sources: "deque[tuple[Any, list[Part], Any]]") -> int:
        return sum(len(some) for _, some, _ in sources)

    try:
        for some, inward in in_turn():
            if inward:
                coming.append((inward, some, inward.finished))
            else:
                while (slot := _free(slots, wait=not (coming or going))) is None:
                    (end if going else send)()
                session.prepare(slot)
                coming.append((slot, some, session.download(block, some[0], c, target.view(some[0], slot))))
            while under_way(coming) > ahead // 4:
                send()
            while under_way(going) >= ahead - ahead // 4:
                end()
        finish()
    finally:
        while coming:
            give_back(coming.popleft()[0])
        while going:
            with contextlib.suppress(BaseException):
                end()


def beside(parts: Iterator[Part], most: int) -> Iterator[list[Part]]:
    """Yield the parts in lists of up to so many that are equally large and lie one to the right of the
    other."""
    some: list[Part] = []
    for part in parts:
        if some:
            last = some[-1]
            right = last._replace(chunk=(last.chunk[0], last.chunk[1] + 1), col=last.col + last.cols)
            if len(some) == most or part != right:
                yield some
                some = []
        some.append(part)
    if some:
        yield some


def _free(slots: "queue.SimpleQueue[Bytes]", wait: bool) -> Bytes | None:
    try:
        return slots.get(block=wait)
    except queue.Empty:
        return None
