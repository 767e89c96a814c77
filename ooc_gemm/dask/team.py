"""A team of workers that make a group of blocks at the same time: which of them reads a piece from the store,
and how the others get it.

    piece that this worker reads        store ──► slot ──► others of the team, then its own panel
    piece that another worker reads     other worker ──► slot ──► panel
    no answer from that worker          store ──► slot ──► panel

Nobody waits in a circle. All workers of a team go through the same panels, and within each through the same
pieces in one order: those of op(A) before those of op(B), or of a symmetric product the strips of A from the
last to the first. A worker begins pieces in that order, each with a slot and a reader of its own. Of all
pieces that somebody waits for, take the first. Whoever reads it has all pieces before it, so it has or will
have a slot and a reader for it, and whoever needs it has the same; so it is read, handed over and done with.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..engine.ports import Source
from ..planning.plan import Plan
from ..planning.schedule import Block, Piece
from ..planning.teams import members
from ..storage.read.source import Opened
from ..support.buffers import Bytes, give_back
from ..support.errors import StoreError
from ..support.intervals import ceil_div
from ..support.onward import Onward
from .desk import Key, Place, Table, desk_of

T = TypeVar("T")
Array = npt.NDArray[Any]

PATIENCE = 60.0
"""Seconds that a worker waits for another one of its team in any case …"""
SLOWER = 10.0
"""… and how many times as long as a panel is expected to take it waits besides."""
LOOK = 5.0
"""Seconds after which a thread that waits for the event loop looks whether that still runs."""


@dataclass(frozen=True)
class Team:
    """Workers that make a group of blocks at the same time."""

    number: int
    """A later team of the same run has a higher one."""
    blocks: tuple[tuple[str, Block], ...]
    """The address of each worker, and its block."""
    patience: float
    """Seconds that a worker waits for another one (`patience`)."""
    symmetric: bool = False
    """Whether op(B) is op(A)ᵀ."""

    def needing(self, operand: str, address: str) -> tuple[str, ...]:
        """Return the workers that need the same pieces of an operand (`a` or `b`) as one of them does. Of a
        symmetric product some need them as the other operand."""
        strip = _strip(dict(self.blocks)[address], operand)
        return tuple(
            other
            for other, block in self.blocks
            if (strip in (block.row, block.col) if self.symmetric else strip == _strip(block, operand))
        )

    def partners(self, address: str) -> set[str]:
        """Return the workers with which one of them exchanges pieces."""
        return {other for operand in "ab" for other in self.needing(operand, address)} - {address}


def _strip(block: Block, operand: str) -> int:
    """Return the first row, or the first column, of a block."""
    return block.row if operand == "a" else block.col


class Seat:
    """The place of this worker in a team, while its block is made. Reader threads use it."""

    def __init__(self, worker: Any, key: Key, table: Table, seconds: float):
        """key: identifies the team. seconds: how long this worker waits for others."""
        self._desk, self._loop = desk_of(worker), worker.loop.asyncio_loop
        self._key, self._table, self._seconds, self.me = key, table, seconds, table.me
        self._lock, self._waiting, self._stopped = Lock(), set[Future[Any]](), False
        self.bytes = 0
        """Bytes that this worker has got from others."""

    def hand_over(self, place: Place, values: Array, takers: set[str]) -> None:
        """Offer a piece until others have taken it. Raises StoreError where the run has stopped."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._wait(self._table.offer(place, data, takers, self._seconds))

    def take(self, place: Place, owner: str, slot: Bytes) -> int:
        """Copy a piece of another worker into a slot. Returns its bytes; 0 where that worker does not give
        it, and will not be asked again. Raises StoreError where the run has stopped."""
        if owner in self._table.gone:
            return 0
        try:
            data, comm = self._wait(self._asked(place, owner))
            np.copyto(slot[: len(data)], data)
            thanked = asyncio.run_coroutine_threadsafe(self._desk.thank(owner, comm), self._loop)
            self._result(thanked)  # also where the run has stopped, or the connection would not be given back
        except StoreError:  # the run has stopped, for which there is no other way
            raise
        except (OSError, RuntimeError):  # the latter where this worker ends
            self._loop.call_soon_threadsafe(self._table.leave_out, owner)
            return 0
        with self._lock:
            self.bytes += len(data)
        return len(data)

    async def _asked(self, place: Place, owner: str) -> tuple[Bytes, Any]:
        async with asyncio.timeout(self._seconds):
            return await self._desk.ask(self._key, self._table.me, owner, place, self._seconds)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the event loop do something, and return its result."""
        with self._lock:
            if self._stopped:
                work.close()
                raise StoreError("the run has stopped")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._waiting.add(future)
        try:
            return self._result(future)
        except CancelledError:
            raise StoreError("the run has stopped") from None
        finally:
            with self._lock:
                self._waiting.discard(future)

    def _result(self, future: Future[T]) -> T:
        """Return what the event loop finds. Raises StoreError where that does not run any more."""
        while not wait([future], LOOK).done:
            if not self._loop.is_running():
                raise StoreError("the run has stopped")
        return future.result()

    def stop(self) -> None:
        """Let no thread wait any longer."""
        with self._lock:
            self._stopped = True
            for future in self._waiting:
                future.cancel()


def patience(plan: Plan) -> float:
    """Return how many seconds workers of a team wait for each other. One may be busy with a panel, or slower
    than the others; only one that brings nothing for much longer counts as gone."""
    p, workers = plan.problem, plan.budget.workers
    at_once = max(1, workers // members(p, plan.bm, plan.bn, plan.team))
    panels = ceil_div(len(plan.groups()), at_once) * plan.panel_count
    return PATIENCE + SLOWER * plan.predicted_seconds / max(1, panels)


@contextmanager
def seated(worker: Any, run: str, team: Team, me: str) -> Iterator[Seat]:
    """Take a place in a team. run: identifies the run. me: address of this worker in the team."""
    give_back()
    desk, loop, key = desk_of(worker), worker.loop.asyncio_loop, (run, team.number)
    joining = desk.join(key, me, team.partners(me), team.patience)
    table = asyncio.run_coroutine_threadsafe(joining, loop).result()
    seat = Seat(worker, key, table, team.patience)
    try:
        yield seat
    finally:
        seat.stop()
        asyncio.run_coroutine_threadsafe(desk.leave(key), loop).result()


class SharedSource:
    """Reads some pieces of an operand from the store and hands them to the others of a team, and gets the
    other pieces from them (the engine's `Source`)."""

    asynchronous = False

    def __init__(self, opened: Opened, plan: Plan, seat: Seat, team: Team):
        """opened: the operand. plan: that of this worker's block. seat: the worker's place in the team."""
        self._source: Source = opened.source
        self.dtype, self._plan, self._seat = opened.dtype, plan, seat
        self._needing = {operand: team.needing(operand, seat.me) for operand in "ab"}

    def start(
        self, piece: Piece, slot: Bytes, onward: Onward | None = None
    ) -> Callable[[], tuple[Array, int]]:
        """Starts to read a piece, where it is this worker that reads it or nobody else needs it."""
        needing = self._needing[piece.operand]
        owner = needing[(piece.number + self._panel(piece)) % len(needing)]
        place = (piece.source, *piece.rows, *piece.cols)
        if owner != self._seat.me:
            return lambda: self._taken(piece, place, owner, slot)
        end = self._source.start(piece, slot)
        takers = set(needing) - {owner}
        return (lambda: self._handed_over(place, end, takers)) if takers else end

    def _panel(self, piece: Piece) -> int:
        """Return the number of the panel to which a piece belongs. With it the pieces of each panel begin
        with another reader, so that all readers of a team have as much to read."""
        p = self._plan.problem
        turned = p.a.transposed if piece.operand == "a" else p.b.transposed
        k = int(turned != (piece.operand == "a"))
        start = (piece.rows, piece.cols)[k][0] - piece.into[k]
        return start // self._plan.bk

    def _handed_over(
        self, place: Place, end: Callable[[], tuple[Array, int]], takers: set[str]
    ) -> tuple[Array, int]:
        """Finish reading a piece, and hand it to the others that need it."""
        values, nbytes = end()
        self._seat.hand_over(place, values, takers)
        return values, nbytes

    def _taken(self, piece: Piece, place: Place, owner: str, slot: Bytes) -> tuple[Array, int]:
        """Get a piece from another worker, or else from the store."""
        nbytes = self._seat.take(place, owner, slot)
        shape = piece.shape
        if not nbytes:
            return self._source.start(piece, slot)()
        return slot[:nbytes].view(self.dtype).reshape(shape), 0

    def cancel(self) -> None:
        """Lets no reader wait any longer for the store or for another worker."""
        self._seat.stop()
        self._source.cancel()
