"""Gives pieces of A and B to other workers and takes pieces from them, over connections of `distributed`.
So they are encrypted and checked as all others of the cluster are.

    worker that asks                                worker that has the piece
    ask for a place     ──────────────────────►     wait until it is offered
    copy it to a slot   ◄──────────────────────     its bytes, as they lie in the slot
    say so              ──────────────────────►     the last worker that says so frees the slot

Everything here runs in the event loop of the worker, and nothing else uses it.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from distributed.core import Status, send_recv

from ..support.buffers import Bytes
from .internals import to_serialize

OPERATION = "ooc_gemm_piece"
"""Name under which workers ask each other."""

Place = tuple[Any, ...]
"""What identifies a piece: its matrix, its rows and its columns."""
Key = tuple[str, int]
"""What identifies a team: its run, and its number there."""


class _News:
    """Wakes everybody who waits for something that may have happened."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened."""
        while not happened():
            await self._event.wait()

    def spread(self) -> None:
        """Let everybody who waits look again."""
        self._event.set()
        self._event = asyncio.Event()


@dataclass
class _Offer:
    """A piece that others may take."""

    data: Bytes
    left: set[str]
    """Addresses of the workers that have not taken it yet."""
    taking: dict[str, Any] = field(default_factory=dict)
    """The connections to those that are taking it now."""


class Table:
    """What this worker offers to the others of a team while its block is made."""

    def __init__(self, me: str) -> None:
        """me: address of this worker, as the others know it."""
        self.me, self.over = me, False
        self.gone = set[str]()
        """Addresses of workers with which nothing is exchanged any more."""
        self.watches = list[asyncio.Task[None]]()
        self.news = _News()
        self._offers = dict[Place, _Offer]()

    async def offer(self, place: Place, data: Bytes, takers: set[str], seconds: float) -> None:
        """Offer a piece until all have taken it. Those that have not after so many seconds are left out."""
        offer = self._offers[place] = _Offer(data, takers - self.gone)
        self.news.spread()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.news.until(lambda: not offer.left)
            for who in list(offer.left):
                self.leave_out(who)
        finally:
            self._withdraw(place)

    def _withdraw(self, place: Place) -> None:
        """Offer a piece no longer. What is still being sent of it is dropped, because its memory is about to
        be used for something else."""
        if offer := self._offers.pop(place, None):
            for comm in offer.taking.values():
                comm.abort()

    async def offered(self, place: Place, who: str) -> _Offer | None:
        """Return a piece when it is offered; None where this worker will not give it."""
        await self.news.until(lambda: place in self._offers or who in self.gone or self.over)
        return None if who in self.gone else self._offers.get(place)

    async def give(self, offer: _Offer, who: str, comm: Any, seconds: float) -> None:
        """Send a piece, and wait until it has been copied. A worker that does not take it is left out."""
        offer.taking[who], taken = comm, False
        try:
            with suppress(OSError):
                async with asyncio.timeout(seconds):
                    await comm.write({"data": to_serialize(offer.data)})
                    taken = await comm.read()
        finally:
            if not taken:
                self.leave_out(who)
            offer.taking.pop(who, None)
            offer.left.discard(who)
            self.news.spread()

    def leave_out(self, who: str) -> None:
        """Exchange nothing with a worker any more, and wait for it no longer."""
        self.gone.add(who)
        for offer in self._offers.values():
            if comm := offer.taking.pop(who, None):
                comm.abort()
            offer.left.discard(who)
        self.news.spread()

    def close(self) -> None:
        """Withdraw all offers, and let everybody who waits for one know that none will come."""
        self.over = True
        for watch in self.watches:
            watch.cancel()
        for place in list(self._offers):
            self._withdraw(place)
        self.news.spread()


class Desk:
    """Where a worker answers to the others of its teams, and asks them."""

    def __init__(self, worker: Any):
        self._pool, self._news = worker.rpc, _News()
        self._tables = dict[Key, Table]()
        self._last = dict[str, int]()
        """The last team of each run that this worker has joined. The teams of a run are numbered."""
        self._unreachable = set[tuple[str, str]]()
        """Runs with the addresses of workers to which there was no connection: no team of the run waits for
        one again."""

    async def join(self, key: Key, me: str, others: set[str], seconds: float) -> Table:
        """Begin to answer to those of a team with which pieces are exchanged. Those that have not joined it
        after so many seconds, and those that leave it, are left out."""
        table = self._tables[key] = Table(me)
        self._last[key[0]] = key[1]
        self._news.spread()
        table.watches = [asyncio.create_task(self._watch(key, table, who, seconds)) for who in others]
        return table

    async def leave(self, key: Key) -> None:
        """Answer to the others no longer."""
        self._tables.pop(key).close()

    async def _watch(self, key: Key, table: Table, who: str, seconds: float) -> None:
        """Leave a worker out when it has left the team or has died."""
        with suppress(OSError, RuntimeError):  # the latter where this worker ends
            await self.ask(key, table.me, who, None, seconds)
        table.leave_out(who)

    async def answer(
        self, comm: Any, run: str, number: int, who: str, place: Place | None, seconds: float
    ) -> Any:
        """Answer another worker: give it a piece, or nothing where that cannot be within so many seconds.

        run, number: identify the team. who: the address of the other worker. place: what identifies the
        piece; None to be answered when nothing is exchanged with that worker any more.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._news.until(lambda: self._last.get(run, -1) >= number)
                table = self._tables.get((run, number))
                if table is None:
                    return None
                offer = await table.offered(tuple(place), who) if place else None
        except TimeoutError:
            return None
        if place is None:
            await table.news.until(lambda: table.over or who in table.gone)
        if offer is None:
            return None
        await table.give(offer, who, comm, seconds)
        return Status.dont_reply

    async def ask(
        self, key: Key, me: str, owner: str, place: Place | None, seconds: float
    ) -> tuple[Bytes, Any]:
        """Ask another worker for a piece. Returns its bytes, and the connection for `thank`. Raises OSError
        where it gives nothing."""
        comm = await self._connected(key[0], owner)
        try:
            given = await send_recv(
                comm, op=OPERATION, run=key[0], number=key[1], who=me, place=place, seconds=seconds
            )
        except BaseException:
            comm.abort()
            self._pool.reuse(owner, comm)
            raise
        if given is None:
            self._pool.reuse(owner, comm)
            raise ConnectionError(f"worker {owner} gives nothing")
        return given["data"], comm

    async def _connected(self, run: str, owner: str) -> Any:
        """Return a connection to another worker. Raises OSError where there is none."""
        if (run, owner) in self._unreachable:
            raise ConnectionError(f"worker {owner} cannot be reached")
        try:
            return await self._pool.connect(owner)
        except OSError:
            self._unreachable.add((run, owner))
            raise

    async def thank(self, owner: str, comm: Any) -> None:
        """Tell another worker that its piece has been copied. Raises OSError where it has not waited for
        that, so that the bytes may not be those of the piece."""
        try:
            await comm.write(True)
        finally:
            self._pool.reuse(owner, comm)


def desk_of(worker: Any) -> Desk:
    """Return the desk of a worker, which has one from now on."""
    answer = worker.handlers.get(OPERATION)
    if answer is None:
        answer = worker.handlers[OPERATION] = Desk(worker).answer
    found: Desk = answer.__self__
    return found
