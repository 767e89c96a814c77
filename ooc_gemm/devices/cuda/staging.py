"""Memory of a GPU in which pieces lie as they are stored, until the device converts, transposes or transforms
them into their panels."""

from collections import deque
from threading import Lock
from typing import Any

from ...engine.ring import Event


class Staging:
    """One area for pieces that come from slots, one after the other, and some for pieces that come from
    places of threads, several at a time."""

    def __init__(self, memory: Any, size: int, count: int):
        """memory: an array on the device. size: bytes of an area. count: areas besides the first."""
        self.memory, self.first, self.lock = memory, memory.data.ptr, Lock()
        """The lock is held while work on an area is given to a stream."""
        self._free = deque[tuple[int, Event | None]](
            (self.first + size * number, None) for number in range(1, count + 1)
        )

    def take(self) -> int | None:
        """Return the address of an area, which is then the caller's; None where all are taken. Waits for what
        the device still does with it."""
        with self.lock:
            if not self._free:
                return None
            at, before = self._free.popleft()
        if before:
            before.synchronize()
        return at

    def give(self, at: int, after: Event | None = None) -> None:
        """Give an area back. after: when the device no longer needs it."""
        with self.lock:
            self._free.append((at, after))
