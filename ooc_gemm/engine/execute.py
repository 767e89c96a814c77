"""Runs a plan with three kinds of threads.

    readers                    conductor (the caller's thread)                  writers
    chunk → slot → panel ──►   panels → C block, one pair after the other ──►   part of C → slot → chunk

The conductor opens one pair of panels after the other for uploads and hands multiplications to the device.
Events order the device's three streams. The conductor waits only for uploads and for a free C block. Where a
plan has lanes, there are no readers, and the conductor waits for the lanes (`lanes.py`).
"""

import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from ..planning.plan import Plan
from ..planning.schedule import Block, Piece
from ..support.buffers import Bytes, drop
from ..support.errors import ENOUGH, StoppedError
from ..support.shared import Shared
from ..support.trace import Trace
from .lanes import Lanes
from .ports import COMPUTE, UPLOAD, Check, LaneSession, Session, Source, Target
from .readers import dealt, read, wait_for_all
from .ring import SIGNAL_SECONDS, Event, Ring
from .writers import InTurn, make_ready, write

SWITCH_SECONDS = 5e-4
"""Seconds for which a thread may keep the interpreter while others wait for it. Readers and writers need it
briefly between long calls, and the conductor must not wait Python's usual 5 ms for each of its short calls
(four H200: 1.9 s instead of 2.6)."""

GATHER_SECONDS = 2e-4
"""Seconds after which the conductor looks again whether chunks are still to be gathered."""

SEVERAL = 16
"""Panels of a block from which C is begun when the first of them is there. To begin it takes the interpreter
for some milliseconds, in which readers would begin late (AᵀA of 262144 × 768 on an H200, 16 panels: 34.9 ms
instead of 36.2, together with turns that are open before readers look for them)."""


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


@dataclass
class _CBlock:
    """A block buffer on the device, and the writes that must end before the buffer is used again."""

    writes: list[Future[None]] = field(default_factory=list)
    parts: InTurn = field(default_factory=lambda: InTurn(iter(())))
    """What these writes have still to write."""
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
        for job in self.writes:
            if job.done():
                job.result()


class _Pairs:
    """The pairs of panels on the device. Each step of a plan fills one pair and multiplies it."""

    def __init__(self, plan: Plan, session: Session, ring: Ring):
        self._plan, self._session, self._ring = plan, session, ring
        self._opened = 0
        self._used: dict[tuple[str, int], tuple[int, Event | None]] = {}
        """For each panel of op(A) and op(B): the last step that multiplies it, and the event after which that
        is done; None if the step has not been handed to the device yet."""

    def open(self, step: int) -> None:
        """Let readers fill the pair of this step, unless they may already."""
        if step == self._opened:
            self._open(step, self._before(step))

    def open_early(self, step: int, stop: int) -> None:
        """Let readers fill the pairs of the steps after this one, before `stop`, as far as the device no
        longer needs what these hold. Readers then need not wait until the conductor has handed over the step
        before."""
        for later in range(max(step + 1, self._opened), stop):
            before = self._before(later)
            if not all(event and event.done for event in before):
                return
            self._open(later, before)

    def _before(self, step: int) -> set[Event | None]:
        """Return the events after which the device no longer needs what the pair of a step holds."""
        brings = self._plan.brings(self._plan.at(step)[0])
        filled = [panel for panel, comes in zip(self._buffers(step), brings, strict=True) if comes]
        return {self._used[panel][1] for panel in filled if panel in self._used}

    def _open(self, step: int, before: set[Event | None]) -> None:
        for event in before:
            assert event, "steps are handed over in order"
            self._session.wait(UPLOAD, event)
        a, b = self._buffers(step)
        self._used[a] = self._used[b] = step, None
        self._ring.open((a[1], b[1]))
        self._opened = step + 1

    def multiplied(self, step: int) -> None:
        """Note that the device has been given this step's multiplication."""
        event = self._session.record(COMPUTE)
        for panel in self._buffers(step):
            if self._used[panel][0] == step:  # the next may need op(A)'s, too
                self._used[panel] = step, event

    def _buffers(self, step: int) -> tuple[tuple[str, int], tuple[str, int]]:
        a, b = self._plan.pair(step)
        return ("a", a), ("b", b)


@dataclass
class _Stored:
    """The stored C, which may be begun while the first panels are read and multiplied."""

    begun: Callable[[], bool]
    target: Callable[[], Target]
    make_ready: Callable[[Target], None]
    found: Target | None = None

    def look(self) -> None:
        """Prepare the writers if C is begun. Does not wait."""
        if self.found is None and self.begun():
            self.get()

    def get(self) -> Target:
        """Return the stored C. Waits until it is begun, and raises what prevents that."""
        if self.found is None:
            self.found = self.target()
            self.make_ready(self.found)
        return self.found


@quick_turns
def execute(
    plan: Plan,
    session: Session,
    sources: Mapping[str, Source],
    target: Callable[[], Target],
    trace: Trace,
    progress: Callable[[float], object] = lambda fraction: None,
    verify: bool = False,
    when_read: Callable[[], object] = lambda: None,
    begun: Callable[[], bool] = lambda: True,
) -> list[Block]:
    """Run `plan` in a session that was opened for it.

    `target` returns the stored C, and waits until it is begun. `begun` is called while the first panels are
    read, or when they are there if several follow, and between multiplications: it starts to begin C if
    nothing has, and returns whether `target` need not wait.
    `progress` is called on this thread with the share of all operations that has been handed to the device.
    When it returns `ENOUGH`, the block under way is the last, with those that are made at the same time: they
    are finished and written, and StoppedError is raised unless all others are, too.
    `verify`: check each block before it is written; blocks that fail are not written but returned.
    `when_read` is called on another thread when all operands have been read, while the last blocks are made
    and written.
    """
    slots = session.host_buffers(plan.slots + plan.cache_slots, plan.slot_bytes)
    ring = Ring(slots, _turns(plan))
    write_slots: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    readers = ThreadPoolExecutor(plan.readers, "ooc-gemm reader")
    writers = ThreadPoolExecutor(plan.writers, "ooc-gemm writer")
    blocks = [_CBlock() for _ in range(plan.c_buffers)]
    pairs = _Pairs(plan, session, ring)
    steps, step, enough = plan.block_count * max(1, plan.panel_count), 0, False
    multiplied, flops = 0, max(1, plan.flops)
    ready = partial(make_ready, writers, session, plan, slots=write_slots)
    stored = _Stored(begun, target, ready)
    lanes: Lanes | None = None

    def leave(block: Block) -> None:
        """Let writers write a block, all of whose panels have been handed to the device."""
        sink, c = stored.get(), plan.c_buffer(block)
        if plan.panel_count == 0:
            blocks[c].free()
            session.wait(COMPUTE, session.record(UPLOAD))
            session.scale(block, c)
        if block.diagonal:
            session.mirror(block, c)
        check = session.check(block, c) if verify else None
        session.finish(block, c)
        blocks[c].checked = (block, check) if check else None
        parts = blocks[c].parts = InTurn(plan.parts(block))
        threads, each = dealt(plan.writers, sink.background)
        for _ in range(threads):
            job = writers.submit(write, session, sink, block, parts, c, check, write_slots, trace, each)
            blocks[c].writes.append(job)

    try:
        if plan.k_panels.lanes:
            assert isinstance(session, LaneSession), "the device says so"
            lanes = Lanes(plan, session, sources, slots, trace, readers)
        if plan.panel_count and not (lanes or plan.problem.reads_c or plan.found):
            pairs.open(0)  # readers that come first would wait for the conductor
            pairs.open_early(0, steps)
        threads, each = dealt(plan.readers, all(source.asynchronous for source in sources.values()))
        for _ in range(0 if lanes else threads):
            onward = bool(plan.budget.step) and not plan.problem.encoded
            how = bool(plan.budget.connection), each > 1 and onward
            readers.submit(read, ring, session, sources, trace, each, *how)
        for several in plan.together():
            for c in map(plan.c_buffer, several) if plan.problem.reads_c else ():
                blocks[c].free()
                ring.open((c, c))
                wait_for_all(ring, session)
            if lanes:
                stored.get()
                lanes.wait(progress)
                step = steps
            turns = () if lanes else product(enumerate(plan.panels(), 1), several)
            for (number, panel), block in turns:
                pairs.open(step)
                # Where the old C is read, its turn comes before the panels of its block.
                stop = step + 1 + plan.panel_count - number if plan.problem.reads_c else steps
                if not plan.found:  # else the next use of a piece could free it before the first
                    pairs.open_early(step, stop)
                if step == 0 and plan.panel_count < SEVERAL:
                    begun()
                wait_for_all(ring, session)
                pair = plan.pair(step)
                while session.gathers(pair):
                    if not plan.found:
                        pairs.open_early(step, stop)
                    time.sleep(GATHER_SECONDS)
                uploaded = session.record(UPLOAD, pair)
                pairs.open_early(step, min(stop, step + 2) if plan.found else stop)
                c = plan.c_buffer(block)
                if panel[0] == 0:
                    blocks[c].free()
                for other in blocks:
                    other.check()
                session.wait(COMPUTE, uploaded)
                session.multiply(block, panel, pair, c, first=panel[0] == 0)
                pairs.multiplied(step)
                stored.look()
                step += 1
                multiplied += block.flops(panel[1] - panel[0])
                enough = progress(multiplied / flops) is ENOUGH or enough
                if number == plan.panel_count:
                    leave(block)
            for block in several if lanes or plan.panel_count == 0 else ():
                leave(block)
            if enough and step < steps:
                for other in blocks:
                    other.free()
                raise StoppedError(
                    f"the run ended in order after {several[-1].index + 1} of {plan.block_count} blocks; "
                    "continue with resume=True"
                )
        free = partial(_free_what_readers_had, session, slots)
        ends = [readers.submit(work) for work in (free, when_read)]
        for other in blocks:
            other.free()
        for end in ends:
            end.result()
        return sorted((block for x in blocks for block in x.wrong), key=lambda block: block.index)
    except BaseException:
        for other in blocks:
            other.parts.end()
        session.cancel()
        if stored.found:
            stored.found.cancel()
        for source in sources.values():
            source.cancel()
        raise
    finally:
        ring.close()
        if lanes:
            lanes.stop()
        writers.shutdown(wait=False, cancel_futures=True)  # its threads end while those of readers do
        try:
            readers.shutdown(cancel_futures=True)
        finally:  # also where Ctrl-C comes just now
            writers.shutdown()
            drop(write_slots)


def _free_what_readers_had(session: Session, slots: list[Bytes]) -> None:
    """Free the panels and the slots when all has been multiplied, while the last blocks are written."""
    session.free_panels()
    session.release(slots)


def _turns(plan: Plan) -> Iterator[Iterator[Piece]]:
    """Yield the pieces of each turn, in the order in which the device needs them. A turn fills a pair of
    panels or, if the old C is read, a block."""
    for blocks in plan.together():
        if plan.problem.reads_c:
            yield from map(plan.block_pieces, blocks)
        for panel, block in product(plan.panels(), blocks):
            yield plan.pieces(block, panel)
