"""Where a piece goes on to from its slot, for what can send it there without the interpreter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Onward:
    """The place of a piece in the memory of a device."""

    packed: bytes
    """The beginning of `Onward` of transfers.c: functions, context, stream, event, address and pitch."""
    arrived: Any
    """The event (`engine.ring.Event`) that is recorded after the piece."""
    sent: Callable[[], None] = lambda: None
    """Takes note that the piece has been sent."""
    taken: bool = False
    """Whether the piece goes there without `Uploads.upload`."""
