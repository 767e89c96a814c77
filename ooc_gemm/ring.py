"""A fixed ring of host buffers: the back-pressure between readers and the device.

A slot goes round:

    free ──acquire──► a reader fills it ──► full, in the order acquired ──take──► uploaded ──release──► free

`release` hands over the event that guards the upload; whoever acquires the slot next waits for it, so
nobody polls and no buffer is overwritten while it is still being copied.

A piece that the plan keeps holds on to its slot, and comes in its turn again without being read:

    full ──take──► uploaded ──release──► kept ─ ─ ─ its next turn ─ ─ ─► full, after those before it

The plan keeps at most as many pieces at once as the ring has slots beyond those that go round.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .plan import Piece

Bytes = npt.NDArray[np.uint8]

SIGNAL_SECONDS = 0.5
"""A signal that comes just as the main thread begins to wait is seen only after it: so no wait is longer."""


class Event(Protocol):
    """A point in a device's stream."""

    def synchronize(self) -> None:
        """Return once everything before this point is done."""


class Stopped(Exception):
    """The ring was closed, because the work is done or somebody failed."""


@dataclass
class Slot:
    """One buffer, and the event after which it may be written again."""

    data: Bytes
    view: npt.NDArray[Any] = field(init=False, repr=False)
    """What the reader put there, or found elsewhere: until the slot is free."""
    guard: Event | None = None
    filled: bool = field(default=False, repr=False)


class Ring:
    """Slots, what is to be read into them, and the order in which they are handed on."""

    def __init__(self, buffers: list[Bytes], tasks: Iterator[Piece]):
        """`tasks` yields the pieces in schedule order."""
        self._free = deque(Slot(data) for data in buffers)
        self._full: deque[Slot] = deque()
        self._tasks = tasks
        self._kept: dict[Any, Slot] = {}
        # One lock, and a condition for either side: a slot that becomes free is news for one reader, and
        # waking all of 64 would cost more than the reading.
        self._lock = Lock()
        self._freed, self._filled = Condition(self._lock), Condition(self._lock)
        self._closed = False
        self._error: BaseException | None = None

    def acquire(self) -> tuple[Slot, Piece]:
        """For readers: a free slot and the next piece to read into it. The pair is taken as one, so the
        earliest unread piece always has a slot and the ring cannot deadlock. Raises Stopped."""
        with self._lock:
            self._freed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise Stopped
            while (task := next(self._tasks, None)) is not None and task.found:
                # Its slot may still be on its way through the ring, or even be read; it keeps its turn.
                at = self._kept[task.place] if task.kept else self._kept.pop(task.place)
                self._full.append(at)
                self._filled.notify()
            if task is None:
                raise Stopped
            slot = self._free.popleft()
            slot.filled = False
            self._full.append(slot)
            if task.kept:
                self._kept[task.place] = slot
        if slot.guard is not None:
            slot.guard.synchronize()
            slot.guard = None
        return slot, task

    def fill(self, slot: Slot) -> None:
        """For readers: the slot holds its piece."""
        with self._lock:
            slot.filled = True
            self._filled.notify()

    def take(self) -> Slot:
        """The slot of the next piece in schedule order, once filled. Raises what a reader failed with."""
        with self._lock:
            while not self._filled.wait_for(
                lambda: (self._full and self._full[0].filled) or self._closed, SIGNAL_SECONDS
            ):
                pass
            if self._closed:
                raise self._error or Stopped()
            return self._full.popleft()

    def release(self, slot: Slot, guard: Event, kept: bool = False) -> None:
        """The slot is free once `guard` has completed, unless its piece is kept."""
        if kept:
            return
        slot.guard = guard
        del slot.view
        with self._lock:
            self._free.append(slot)
            self._freed.notify()

    def close(self, error: BaseException | None = None) -> None:
        """Wake everybody who waits: they get Stopped, and who takes gets `error`, the first one given."""
        with self._lock:
            self._closed = True
            self._error = self._error or error
            self._freed.notify_all()
            self._filled.notify_all()
