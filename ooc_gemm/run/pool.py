"""Functions that processes elsewhere call with parts of the work, where no C is stored block by block: passes
over an array, and what a reduction keeps of C."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from ..engine.ports import Device, Hardware
from ..storage.read.source import Opened
from ..support.intervals import ceil_div, ranges, round_up
from ..support.trace import Trace

RANGES = 4
"""Parts of a pass for each process, so that none of them waits for long for the last."""


@dataclass
class Here:
    """What a process elsewhere gives to the function that it calls."""

    inputs: Mapping[str, Opened]
    """The inputs of the pool, opened in this process, by name."""
    device: Device
    threads: int
    """Number of threads that the call may use."""
    memory_limit: int
    """Host memory in bytes that the process may hold resident."""
    folder: Path
    """Folder of the run. The process that asked finds there what the function writes to it."""
    trace: Trace
    """Where the function notes the bytes that it moves."""
    tell: Callable[[float], None]
    """Called with the fraction of the part that is done. It raises StoreError where the run is over."""
    peak_device_bytes: int = 0
    """The most memory of the device that the function has held, where that has memory of its own."""


Function = Callable[[Here, Any, Any], Any]
"""Called with what all parts have in common, and with a part of the work; returns what is found. The process
elsewhere imports it by its name."""
Take = Callable[[int, Callable[[], Any]], None]
"""Called with the number of a part, when it is done, and with what reads what was found of it, once."""


class Pool(Protocol):
    """Processes elsewhere, which call functions with parts of the work, one at a time each. A part whose
    process has died is given to another one, and taken once."""

    @property
    def hardware(self) -> Hardware:
        """What the planner asks about the processes."""

    @property
    def count(self) -> int:
        """Number of processes."""

    @property
    def threads(self) -> int:
        """The most threads of a process."""

    @property
    def trace(self) -> Trace:
        """What all calls have moved."""

    @property
    def peak_host_bytes(self) -> int:
        """The largest resident set of a process that has called a function, in bytes."""

    @property
    def peak_device_bytes(self) -> int:
        """The most memory of a device that such a process has held, in bytes."""

    def ask(self, function: Function, shared: Any, part: Any) -> Any:
        """Have one process call a function, and return what that returns. Nothing is written. Raises what the
        function raises, and DeviceError."""

    def each(
        self,
        function: Function,
        shared: Any,
        parts: Sequence[Any],
        take: Take,
        progress: Callable[[float], object],
    ) -> None:
        """Have a function called with each part. progress: called with the fraction that is done. `take` and
        `progress` are called by this thread. Raises what the functions raise, StoreError and DeviceError."""

    def close(self) -> None:
        """Remove the folder of the run, if there is one. Processes that still work stop."""

    def __enter__(self) -> Self:
        """Returns the pool, which is closed at the end."""

    def __exit__(self, *error: object) -> None:
        """Closes the pool."""


class InOrder:
    """Takes what was found of parts in the order of their numbers, from 0, whichever is done first. So sums
    do not depend on that. What has to wait is not in memory."""

    def __init__(self, add: Callable[[int, Any], None]):
        """add: called with the number of each part and what was found of it."""
        self._add, self._next = add, 0
        self._waiting: dict[int, Callable[[], Any]] = {}

    def __call__(self, number: int, read: Callable[[], Any]) -> None:
        """Take a part (`Take`)."""
        self._waiting[number] = read
        while self._next in self._waiting:
            self._add(self._next, self._waiting.pop(self._next)())
            self._next += 1


def parts_of(opened: Opened, count: int) -> list[tuple[int, int]]:
    """Return [start, stop) of ranges of rows of op(X), about `count` of them and no more, which begin where
    chunks begin (`Opened.window`)."""
    s, extent = opened.matrix, opened.shape[0]
    chunk = s.chunk_cols if s.transposed else s.chunk_rows
    return list(ranges(extent, round_up(ceil_div(max(1, extent), count), chunk)))
