"""Lanes: threads each of which reads pairs of panels and multiplies them by itself.

    chunk → slot → (panel) → sum ──┐
    chunk → slot → (panel) → sum ──┼──► C block
    chunk → slot → (panel) → sum ──┘

Where C is small and k is long, handing each pair from readers to workers takes about as long as multiplying
it, and what was read is no longer in the caches of the core that needs it. So a thread does both. Pairs are
multiplied into a few sums in turns, and the sums are added up in order at the end: the result does not depend
on which thread is faster.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from threading import Condition

from ..planning.plan import Plan
from ..planning.schedule import Piece
from ..support.buffers import Bytes
from ..support.errors import on_thread
from ..support.trace import Trace
from .ports import LaneSession, Source
from .ring import Stopped

TELL_SECONDS = 0.1
"""Seconds between two looks at how far the lanes have come."""


class Lanes:
    """Starts the lanes of a plan of one block, waits until they have multiplied all of k, and stops them."""

    def __init__(
        self,
        plan: Plan,
        session: LaneSession,
        sources: Mapping[str, Source],
        slots: list[Bytes],
        trace: Trace,
        threads: ThreadPoolExecutor,
    ):
        """Let as many threads as the plan has lanes begin."""
        self._plan, self._session, self._sources, self._trace = plan, session, sources, trace
        (self._block,) = plan.blocks()
        self._turns = enumerate(plan.panels())
        self._next = [*range(plan.k_panels.sums)]
        """The turn that each sum waits for."""
        self._changed = Condition()
        self._stopped = False
        self._deep = 0
        """Places along k that are multiplied."""
        count = plan.k_panels.lanes
        each = len(slots) // count
        self._jobs: list[Future[None]] = [
            threads.submit(self._run, lane, slots[lane * each : (lane + 1) * each]) for lane in range(count)
        ]

    def wait(self, progress: Callable[[float], object]) -> None:
        """Wait until all is multiplied, and add up the sums. `progress` is called on this thread, with the
        share that is. Raises the error of a lane that failed."""
        while True:
            ended = wait(self._jobs, TELL_SECONDS, FIRST_EXCEPTION)
            for job in ended.done:
                job.result()
            if not ended.not_done:
                break
            progress(self._block.flops(self._deep) / self._plan.flops)
        self._session.add_up(self._block, min(len(self._next), self._plan.panel_count))
        progress(1.0)

    def stop(self) -> None:
        """Let each lane end after its current piece."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self, lane: int, slots: list[Bytes]) -> None:
        try:
            with on_thread("reader"):
                while True:
                    with self._changed:
                        number, panel = next(self._turns, (0, None))
                    if panel is None:
                        return
                    self._fill(lane, panel, slots)
                    self._multiply(lane, number, panel)
        except Stopped:
            pass
        except BaseException:
            self.stop()
            raise

    def _fill(self, lane: int, panel: tuple[int, int], slots: list[Bytes]) -> None:
        pieces = list(self._plan.pieces(self._block, panel))
        uses: Iterable[tuple[Piece, ...]] = ((piece,) for piece in pieces)
        if self._plan.shares_pieces:  # those of op(B) follow those of op(A)
            half = len(pieces) // 2
            uses = zip(pieces[:half], pieces[half:], strict=True)
        for piece, *others in uses:
            if self._stopped:
                raise Stopped
            start = time.perf_counter()
            view, nbytes = self._sources[piece.source].read(piece, slots[piece.operand != "a"])
            self._trace.add("read", start, nbytes=nbytes, operand=piece.operand, chunk=piece.chunk)
            for one in (piece, *others):
                self._session.upload(view, one, lane)

    def _multiply(self, lane: int, number: int, panel: tuple[int, int]) -> None:
        which = number % len(self._next)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._next[which] == number)
            if self._stopped:
                raise Stopped
        self._session.multiply_alone(self._block, panel, lane, which, first=number == which)
        with self._changed:
            self._next[which] += len(self._next)
            self._deep += panel[1] - panel[0]
            self._changed.notify_all()
