"""What a device offers for passes over one matrix B, each panel P of which is multiplied by a few vectors V.

    Y = P·V        YᵀY, Z += Pᵀ·Y        or        Y = P·V, YᵀY, and Y leaves the device

Panels have two buffers, in which they lie as they are stored (`PassPlan`). Where memory allows it, some are
kept from pass to pass: they are copied within the device's memory instead of being uploaded again. Streams
and events are those of `Session`.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..planning.passes import PassPlan
from ..support.buffers import Bytes
from .ports import Failure, Limits, Uploads
from .ring import Event

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PassWork:
    """What one pass does with each panel."""

    vectors: Floats
    """V: columns of B × vectors. They are rounded to the type of panels."""
    shift: Floats | None = None
    """What is subtracted from each row of B; None: nothing."""
    own: Literal["columns", "rows"] | None = None
    """Of what in each panel its own mean is subtracted; None: of nothing."""
    first: bool = False
    """Whether the means of each panel leave the device, and squares of all elements are added up."""
    projects: bool = False
    """Whether Y leaves the device, and Pᵀ·Y is not computed."""
    exponent: int = 0
    """Elements of panels are multiplied by 2 to this power before anything else is done with them."""


@dataclass(frozen=True)
class PassSums:
    """What a pass has added up, in float64."""

    product: Floats
    """BᵀB·V."""
    gram: Floats
    """YᵀY."""
    squares: float
    """Sum of the squares of all elements of the panels, after they were centred."""


class PassSession(Uploads, Protocol):
    """Passes over one matrix on a device, with all of their buffers. Any thread may call `upload`; one thread
    calls all other methods."""

    def begin(self, work: PassWork) -> None:
        """Begin a pass. The one before must be over."""

    def keep(self, buffer: int, slot: int) -> None:
        """Copy a panel, which is being uploaded, to one of the places for kept ones, in the upload stream."""

    def bring(self, slot: int, buffer: int) -> None:
        """Copy a kept panel to a buffer, in the upload stream."""

    def apply(self, buffer: int, count: int, out: Bytes) -> Event:
        """Do what the pass does with the first `count` rows of a panel. What leaves the device lies at the
        beginning of `out` when the event has completed."""

    def sums(self) -> PassSums:
        """Wait for the pass, and return its sums."""

    def record(self, stream: str) -> Event:
        """Return an event that completes when `stream` has done all work that it has been given so far."""

    def wait(self, stream: str, event: Any) -> None:
        """Make `stream` wait for `event` before it does anything that it is given later."""

    def peak_bytes(self) -> int:
        """Return the most device memory that was held, in bytes. This may be called after `close`."""

    def close(self) -> None:
        """Finish or drop the work under way, and free every buffer."""


@runtime_checkable
class PassDevice(Protocol):
    """A device that makes passes. Others are given products only."""

    name: str

    def pass_limits(self, device_memory_limit: int | None) -> Limits:
        """Return what the device needs, and how much of its memory may be used."""

    def open_passes(self, plan: PassPlan, stored: np.dtype[Any], panel: np.dtype[Any]) -> PassSession:
        """Allocate every buffer of the plan. `stored`, `panel`: the types of elements as they are stored, and
        in panels. If that fails, what has been allocated is freed."""

    def explain(self, error: Exception) -> Failure | None:
        """As of `Device`."""
