"""A fixed ring of host buffers between the store and the device, which limits how far readers read ahead.

A slot belongs to one reader at a time, or to the conductor:

    free ──acquire──► filled ──admit──► its piece is being uploaded ──release──► free

`release` hands over the event that guards the upload; whoever acquires the slot next waits for it, so
nobody polls and no buffer is overwritten while it is still being copied.

Pieces belong to turns, each of which fills a pair of panels (or a C block). Readers read ahead as far as
there are slots; `admit` lets them upload when the conductor has opened the turn, or leaves what comes before
to the conductor, who waits until all pieces of a turn are on their way.

A piece that the plan keeps holds on to its slot, and comes in its turn again without being read:

    filled ──► uploaded ──release──► kept ─ ─ ─ its next turn, with any reader ─ ─ ─► uploaded

The plan keeps at most as many pieces at once as the ring has slots beyond those that go round.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..planning.schedule import Piece

Bytes = npt.NDArray[np.uint8]

SIGNAL_SECONDS = 0.5
"""The longest that the main thread waits without a break, in seconds. A signal that arrives just as a wait
begins is handled only after that wait."""


class Event(Protocol):
    """A point in a device's stream."""

    @property
    def done(self) -> bool:
        """Whether everything before this point is done."""

    def synchronize(self) -> None:
        """Return once everything before this point is done."""


class Stopped(Exception):
    """The ring was closed, because the work is done or somebody failed."""


class Task(NamedTuple):
    """A piece to be read and uploaded, and the number of its turn."""

    turn: int
    piece: Piece


@dataclass
class Slot:
    """One buffer, and the event after which it may be written again."""

    data: Bytes
    view: npt.NDArray[Any] | None = field(default=None, repr=False)
    """The data of the slot's piece, in `data` or wherever the store has put it; None while the slot is
    free."""
    guard: Event | None = None

    def is_free(self) -> bool:
        """Whether the slot may be written now."""
        return self.guard is None or self.guard.done


class Ring:
    """The slots, the pieces that are to be read into them, and how far that has come."""

    def __init__(self, buffers: list[Bytes], turns: Iterator[Iterable[Piece]]):
        """`turns` yields the pieces that fill one pair of panels (or C block) after the other."""
        self._free = deque(Slot(data) for data in buffers)
        self._tasks = (Task(turn, piece) for turn, pieces in enumerate(turns) for piece in pieces)
        self._next = next(self._tasks, None)
        self._kept: dict[Any, Slot] = {}
        self._open, self._waited = -1, 0
        """The last turn that is open, and the one for which the conductor waits next."""
        self._buffers: dict[int, tuple[int, int]] = {}
        """The panels that each turn fills, of turns that are open."""
        self._aside: dict[int, list[tuple[Slot, Task]]] = {}
        """Slots that hold pieces of a later turn, by the number of that turn."""
        self._under_way: Counter[int] = Counter()
        """Number of pieces of each turn that readers hold and have not uploaded yet."""
        # One lock, and a condition for whatever is waited for: a slot that becomes free is news for one
        # reader, and waking all of 64 would cost more than the reading.
        self._lock = Lock()
        self._freed, self._came, self._uploaded = (Condition(self._lock) for _ in range(3))
        self._closed = False
        self._error: BaseException | None = None

    def acquire(self, wait: bool = True, early: bool = True) -> tuple[Slot, Task] | None:
        """For readers: take the next piece together with a free slot, or with the slot that keeps the piece.
        `early`: also one whose turn has not come.

        Both are taken as one step, so the earliest unread piece always has a slot and the ring cannot
        deadlock. Returns None if there is no piece or slot now and `wait` is false. Raises Stopped when no
        piece is left.
        """
        with self._lock:
            open_now = self._next and not self._closed and self._goes_on(early)
            if not wait and not (open_now and self._free and self._free[0].is_free()):
                return None
            self._freed.wait_for(lambda: self._goes_on(early))
            task = self._next
            if self._closed or task is None:
                raise Stopped
            piece = task.piece
            if piece.found:
                slot = self._kept[piece.place] if piece.kept else self._kept.pop(piece.place)
            else:
                slot = self._free.popleft()
                if piece.kept:
                    self._kept[piece.place] = slot
            self._under_way[task.turn] += 1
            self._next = next(self._tasks, None)
            if self._next is None:
                self._freed.notify_all()
            elif self._next.piece.found:
                self._freed.notify()
        if slot.guard is not None:
            slot.guard.synchronize()
            slot.guard = None
        return slot, task

    def _goes_on(self, early: bool) -> bool:
        if self._closed or self._next is None:
            return True
        has_turn = early or self._next.turn <= self._open
        return has_turn and bool(self._next.piece.found or self._free)

    def admit(self, slot: Slot, task: Task, aside: bool = False) -> tuple[int, int] | None:
        """For readers: wait until the slot holds its piece (another reader may be reading it) and the turn of
        the piece has come. Returns the numbers of the panel of op(A), and of the panel of op(B) or C block,
        to fill.

        `aside`: if the turn has not come, leave the piece to the conductor and return None. Raises Stopped.
        """
        if task.piece.kept or task.piece.found or task.turn > self._open:
            with self._lock:
                self._came.notify_all()
                if aside and task.turn > self._open and not self._closed:
                    self._aside.setdefault(task.turn, []).append((slot, task))
                    return None
                self._came.wait_for(
                    lambda: self._closed or (task.turn <= self._open and slot.view is not None)
                )
        if self._closed:
            raise Stopped
        return self._buffers[task.turn]

    def admitted(self, task: Task) -> tuple[int, int] | None:
        """For readers: return what `admit` returns, if the turn of a piece has come and no other turn has the
        piece. Does not wait."""
        piece = task.piece
        if piece.kept or piece.found or task.turn > self._open or self._closed:
            return None
        return self._buffers[task.turn]

    def release(self, slot: Slot, task: Task, guard: Event) -> None:
        """For readers: note that the piece is being uploaded. Its slot is free once `guard` has completed,
        unless the plan keeps the piece."""
        with self._lock:
            if not task.piece.kept:
                slot.guard, slot.view = guard, None
                self._free.append(slot)
                self._freed.notify()
            self._under_way[task.turn] -= 1
            if self._has_all(task.turn):
                self._uploaded.notify()

    def open(self, buffers: tuple[int, int]) -> None:
        """For the conductor: open the next turn, whose pieces go to this panel of op(A) and this panel of
        op(B) or C block. Where the plan keeps pieces, all of the turn before must be being uploaded."""
        with self._lock:
            self._buffers[self._open + 1] = buffers
            self._open += 1  # in this order: `admit` does not lock
            self._came.notify_all()
            self._freed.notify()

    def aside(self) -> list[tuple[Slot, Task]]:
        """For the conductor: return the pieces that readers have put aside of the turn for which it waits
        next. It uploads and releases them."""
        with self._lock:
            return self._aside.pop(self._waited, [])

    def wait(self) -> None:
        """For the conductor: wait until all pieces of the first open turn for which it has not waited are
        being uploaded. Raises the error of a reader that failed."""
        with self._lock:
            while not self._uploaded.wait_for(
                lambda: self._has_all(self._waited) or self._closed, SIGNAL_SECONDS
            ):
                pass
            if self._closed:
                raise self._error or Stopped()
            del self._under_way[self._waited], self._buffers[self._waited]
            self._waited += 1

    def _has_all(self, turn: int) -> bool:
        return (self._next is None or self._next.turn > turn) and not self._under_way[turn]

    def close(self, error: BaseException | None = None) -> None:
        """Wake all threads that wait. Readers get Stopped; the conductor gets the first `error` that was
        given."""
        with self._lock:
            self._closed = True
            self._error = self._error or error
            for condition in (self._freed, self._came, self._uploaded):
                condition.notify_all()
