"""What carries out a plan: a device of this process, or a cluster, which answers the same questions."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Protocol

from ..devices import GPU_HOST_BYTES, open_device, within
from ..engine.execute import execute
from ..engine.ports import Device, Failure, Hardware, Operation, Session, Source, Target
from ..planning.plan import Plan
from ..planning.schedule import Block
from ..support.errors import Error, let_go
from ..support.memory import memory_limit_of, peak_resident_bytes
from ..support.recording import note_plan
from ..support.shared import in_thread
from ..support.trace import Trace
from . import cold_start


class Executor(Protocol):
    """Carries out plans, one at a time."""

    @property
    def hardware(self) -> Hardware:
        """What the planner asks about the device or cluster."""

    def start(self, plan: Plan, operation: Operation, trace: Trace) -> None:
        """Allocate what the plan needs. C is not touched yet."""

    def execute(
        self,
        sources: Mapping[str, Source],
        target: Callable[[], Target],
        progress: Callable[[float], object],
        when_read: Callable[[], object] = lambda: None,
        begun: Callable[[], bool] = lambda: True,
    ) -> list[Block]:
        """Run the plan that was started. Returns the blocks that failed their check and are not written.

        sources: the opened operands, by name. target: returns the stored C once it is begun; it is called
        once. begun: starts to begin C, and returns whether `target` need not wait. progress: called with the
        fraction that is done. A device of this process ends the run where it returns `ENOUGH`. when_read:
        called on any thread when all operands have been read.
        """

    def close(self) -> None:
        """Finish or drop the work under way, and free what `start` has allocated."""

    def explain(self, error: Exception) -> Failure | None:
        """Return what an error of the hardware means; None for any other error. This is called after
        `close`."""

    def as_done(self, plan: Plan) -> Plan:
        """Return a plan with the bytes that it was expected to read here."""

    def peak_host_bytes(self) -> int:
        """The largest resident set of any process that took part, in bytes."""

    def peak_device_bytes(self) -> int:
        """The most device memory that was held, in bytes; 0 where devices compute in host memory."""


def open_local(device: str | Device, memory_limit: str | int | None, note: Callable[[str], None]) -> "Local":
    """Open what carries out plans in this process. device, memory_limit: as of `multiply`. note: called where
    a GPU is left out because of the limit. Raises InputError."""
    if not isinstance(device, str) and hasattr(device, "arithmetic"):
        return Local(device)
    name = within(device, memory_limit_of(memory_limit))
    if name != str(device) and find_spec("cupy") is not None:
        note(
            f"the CPU computes, because the libraries of a GPU take {GPU_HOST_BYTES >> 20} MiB of host "
            "memory, and the memory limit is lower"
        )
    return Local(open_device(name))


class Local:
    """Carries out plans on a device of this process."""

    def __init__(self, device: Device):
        self.hardware = self.device = device
        self._running: tuple[Session, Plan, Operation, Trace] | None = None
        self._closed: Future[None] | None = None
        """The end of the session, which is closed while C is being finished."""
        self._peak = 0

    def start(self, plan: Plan, operation: Operation, trace: Trace) -> None:
        """Opens a session of the device."""
        note_plan(plan, self.hardware.model)
        cold_start.note_used(self.device)
        self._running = self.device.open(plan, operation, trace), plan, operation, trace

    def execute(
        self,
        sources: Mapping[str, Source],
        target: Callable[[], Target],
        progress: Callable[[float], object],
        when_read: Callable[[], object] = lambda: None,
        begun: Callable[[], bool] = lambda: True,
    ) -> list[Block]:
        """Runs the plan with the engine's threads. A device takes some milliseconds to free memory of its
        own: that begins at the end, and `close` waits for it."""
        assert self._running, "it is started"
        session, plan, operation, trace = self._running
        wrong = execute(plan, session, sources, target, trace, progress, operation.verify, when_read, begun)
        if plan.budget.device is not None:
            self._closed = in_thread("closing", session.close)
        return wrong

    def close(self) -> None:
        """Closes the session, if one is open."""
        if self._running is None:
            return
        (session, *_), closed = self._running, self._closed
        self._running = self._closed = None
        try:
            if closed:
                closed.result()
            else:
                session.close()
        finally:
            self._peak = max(self._peak, session.peak_bytes())

    def explain(self, error: Exception) -> Failure | None:
        """Asks the device, unless the error is explained already."""
        if isinstance(error, Error):
            return None
        let_go(error)
        return self.device.explain(error)

    def as_done(self, plan: Plan) -> Plan:
        """Returns the plan as it is."""
        return plan

    def peak_host_bytes(self) -> int:
        """The largest resident set that this process has had."""
        return peak_resident_bytes()

    def peak_device_bytes(self) -> int:
        """The most memory of the device that its sessions have held, in bytes."""
        return self._peak
