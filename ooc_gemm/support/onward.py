"""Where a piece goes on to, and where a part of C comes from, for what copies without the interpreter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Onward:
    """The place of a piece in the memory of a device."""

    packed: bytes
    """The beginning of `Device` of transfers.c: functions, context, stream, event, address and pitch. The
    event is recorded after the piece."""
    sent: Callable[[], Any]
    """Takes note that the piece has been sent, and returns the event (`engine.ring.Event`) after which it is
    in its panel."""
    dropped: Callable[[], None] = lambda: None
    """Takes note that the piece will not be sent."""
    step: int = 0
    """Bytes that are read at a time and then sent on from a place of the thread; 0: there are none."""
    pinned: bool = True
    """Whether a device can copy from the slot while the host goes on. If not, only what goes on from places
    of threads can be sent."""
    taken: bool = False
    """Whether the piece goes there without `Uploads.upload`."""

    def ended(self) -> Any:
        """Return the event after which the piece is in its panel; None if it was not taken, and goes there by
        `Uploads.upload`. This must be called once, when the read has ended."""
        if self.taken:
            return self.sent()
        self.dropped()
        return None


@dataclass(frozen=True)
class Inward:
    """The place of parts of C in the memory of a device, which lie beside each other."""

    packed: bytes
    """As of `Onward`."""
    shape: tuple[int, int]
    """Rows of a chunk, and bytes of a row."""
    held: tuple[int, int]
    """The same of each part, which is smaller at the edges of C. The rest of the chunk is 0."""
    apart: int
    """Bytes between the first rows of two parts."""
    finished: Any
    """The event (`engine.ring.Event`) after which the parts may be copied."""
    step: int
    """Bytes that are on their way at a time."""
    brought: Callable[[], None]
    """Takes note that the parts have been copied."""
