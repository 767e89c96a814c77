"""Passes over an operand on a device with memory of its own.

    readers                       conductor (the caller's thread)        writer
    chunk → slot → panel ──►      panel → sums, panel → slot ──►         slot → what is made of it, in order
                                  panel ⇄ kept panel

Panels that the plan keeps stay on the device when the first pass has brought them there. The ring, the
readers and the events are those of products (`engine/execute.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import numpy as np

from ..engine.execute import quick_turns
from ..engine.passes import PassDevice, PassSession, PassSums, PassWork
from ..engine.ports import COMPUTE, UPLOAD
from ..engine.readers import dealt, read, wait_for_all
from ..engine.ring import SIGNAL_SECONDS, Event, Ring
from ..planning.machine import Budget
from ..planning.passes import LEAVING, PANELS, PassPlan, PassProblem, make_pass_plan
from ..planning.schedule import Piece, cut
from ..storage.io.files import chunks_at_once
from ..storage.io.requests import CONNECTION_BYTES, requests
from ..storage.read.source import Opened
from ..support.buffers import Bytes
from ..support.errors import NO_MEMORY, Error, OutOfMemoryError, letting_go, no_memory
from ..support.intervals import ranges
from ..support.memory import baseline_bytes
from ..support.trace import Trace
from .stream import Progress, Range

Hand = Callable[[Bytes, Range], None]
"""Called with what has left the device of one panel, and its rows."""


def pass_plan(
    opened: Opened,
    dtype: np.dtype[Any],
    device: PassDevice,
    limits: tuple[int, int | None],
    vectors: int,
    fixed: int,
    passes: int,
) -> PassPlan:
    """Return how passes over op(X) are made on a device. dtype: the type of panels. limits: of host memory
    and of device memory, in bytes; None: the device's default. vectors: the most that op(X) is multiplied by.
    fixed: host memory for results. passes: how many are made. Raises BudgetError."""
    s, traits, found = opened.matrix, opened.traits, device.pass_limits(limits[1])
    readers = max(found.readers, requests(traits.latency, s.chunk_bytes) if traits.remote else 0)
    budget = Budget(
        host=limits[0],
        host_baseline=baseline_bytes(found.host_baseline),
        device=found.device,
        device_baseline=found.device_baseline,
        readers=chunks_at_once(readers) if traits.asynchronous else readers,
        connection=CONNECTION_BYTES if traits.remote else 0,
    )
    converted = opened.dtype != dtype
    problem = PassProblem(opened.name, s, dtype.itemsize, converted, vectors, fixed, passes)
    return make_pass_plan(problem, budget)


class DevicePanels:
    """Passes over op(X) in panels on a device, until it is closed."""

    def __init__(self, opened: Opened, dtype: np.dtype[Any], plan: PassPlan, device: PassDevice):
        """dtype: the type of panels. plan: from `pass_plan` for the same operand and device."""
        self.opened, self.dtype, self.plan = opened, dtype, plan
        self._device, self._trace = device, Trace()
        self._session: PassSession | None = None
        self._memory: tuple[list[Bytes], list[Bytes]] = [], []
        self._kept: set[int] = set()
        """The places on the device that hold a panel."""
        self.peak_device_bytes = 0

    @property
    def bytes_read(self) -> int:
        """Bytes moved from the store by all passes."""
        return self._trace.bytes["read"]

    @letting_go()
    def each(self, work: PassWork, hand: Hand | None, progress: Progress | None) -> PassSums:
        """Make one pass, and return its sums. `hand` gets what leaves the device, one call at a time and in
        the order of the panels, in memory that is reused after it returns; None where nothing leaves. Raises
        StoreError, DeviceError, and what the functions raise."""
        try:
            return self._each(self._opened_session(), work, hand, progress)
        except Exception as error:
            with suppress(Exception):  # of a device that has failed: the first error is the one that counts
                self.close()
            self._explain(error)
            raise

    def close(self) -> None:
        """Free the memory of the device, and the slots."""
        session, self._session, self._memory = self._session, None, ([], [])
        self._kept = set()
        if session is not None:
            try:
                session.close()
            finally:
                self.peak_device_bytes = max(self.peak_device_bytes, session.peak_bytes())

    def _opened_session(self) -> PassSession:
        if self._session is None:
            plan = self.plan
            session = self._device.open_passes(plan, self.opened.dtype, self.dtype)
            self._session = session
            slots = session.host_buffers(plan.slots, plan.slot_bytes)
            self._memory = slots, session.host_buffers(LEAVING, plan.leaving_bytes)
        return self._session

    def _explain(self, error: Exception) -> None:
        """Raise what an error of the device's libraries means. Returns where it is another one."""
        if isinstance(error, Error):
            return
        if failure := self._device.explain(error):
            raise failure.error from error
        if no_memory(error):
            raise OutOfMemoryError(NO_MEMORY) from error

    @quick_turns
    def _each(
        self, session: PassSession, work: PassWork, hand: Hand | None, progress: Progress | None
    ) -> PassSums:
        plan, source, trace = self.plan, self.opened.source, self._trace
        slots, leaving = self._memory
        ring = Ring(slots, self._turns())
        readers = ThreadPoolExecutor(plan.readers, "ooc-gemm reader")
        handing = ThreadPoolExecutor(1, "ooc-gemm writer")
        jobs: list[Future[None]] = []
        used: dict[int, Event] = {}

        def open_turn(number: int) -> None:
            """Let readers fill a panel when the device no longer needs what its buffer holds."""
            buffer = number % PANELS
            if buffer in used:
                session.wait(UPLOAD, used[buffer])
            ring.open((buffer, buffer))

        session.begin(work)
        try:
            threads, each = dealt(plan.readers, source.asynchronous)
            for _ in range(threads):
                readers.submit(read, ring, session, {"a": source}, trace, each, True)
            extent = self.opened.shape[0]
            open_turn(0)
            for number, rows in enumerate(ranges(extent, plan.height)):
                wait_for_all(ring, session)
                self._keep_or_bring(session, number)
                uploaded = session.record(UPLOAD)
                if rows[1] < extent:
                    open_turn(number + 1)
                session.wait(COMPUTE, uploaded)
                if len(jobs) == LEAVING:
                    _end(jobs.pop(0))
                out = leaving[number % LEAVING]
                used[number % PANELS] = left = session.apply(number % PANELS, rows[1] - rows[0], out)
                if hand is not None:
                    jobs.append(handing.submit(_hand, hand, left, out, rows))
                if progress is not None:
                    progress(rows[1] / extent)
            while jobs:
                _end(jobs.pop(0))
            return session.sums()
        except BaseException:
            source.cancel()
            raise
        finally:
            ring.close()
            try:
                readers.shutdown(cancel_futures=True)
            finally:
                handing.shutdown(cancel_futures=True)

    def _turns(self) -> Iterator[Iterable[Piece]]:
        """Yield the pieces of each panel; none of a panel that is on the device."""
        s, plan = self.opened.matrix, self.plan
        for number, rows in enumerate(ranges(self.opened.shape[0], plan.height)):
            stored = ((0, s.rows), rows) if s.transposed else (rows, (0, s.cols))
            yield () if plan.slot_of(number) in self._kept else cut("a", s, *stored, plan.cap)

    def _keep_or_bring(self, session: PassSession, number: int) -> None:
        """Copy a panel that the plan keeps to its place, or from there where it has been kept."""
        slot, buffer = self.plan.slot_of(number), number % PANELS
        if slot in self._kept:
            session.bring(slot, buffer)
        elif slot is not None:
            session.keep(buffer, slot)
            self._kept.add(slot)


def _hand(hand: Hand, left: Event, out: Bytes, rows: Range) -> None:
    """Wait until something has left the device, and hand it on."""
    left.synchronize()
    with np.errstate(all="ignore"):
        hand(out, rows)


def _end(job: Future[None]) -> None:
    """Wait for a job. Raises its error."""
    while wait([job], SIGNAL_SECONDS, FIRST_EXCEPTION).not_done:
        pass
    job.result()
