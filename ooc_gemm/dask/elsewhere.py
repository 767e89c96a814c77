"""What carries out requests on the workers of a cluster (`Elsewhere`)."""

from collections.abc import Mapping
from typing import Any

from ..run.elsewhere import only_here
from ..run.request import Request
from ..storage.read import addresses
from ..support.errors import BudgetError, InputError
from ..support.intervals import ceil_div
from ..support.memory import baseline_bytes, memory_limit_of, parse_size
from .cluster import Cluster, portable
from .pool import WorkerPool
from .workers import Workers, name_of_device

CLIENT_BYTES = 160 << 20
"""Memory in bytes that a process holds which is the client of a cluster, with a scheduler in it."""


class OnWorkers:
    """Carries out requests on the workers of a cluster."""

    def __init__(
        self,
        client: Any,
        memory_limit: str | int | None = None,
        device: str = "auto",
        shares: bool = False,
    ):
        """client: that of the cluster; None for the current one. memory_limit, device: those of each worker
        where a request has none. shares: the workers and this process share one memory limit."""
        self._client, self._limit, self._device, self.shares = client, memory_limit, device, shares

    def workers(self, device: object = "auto", **options: Any) -> Workers:
        """Find out what workers there are. device: that a request asks for. options: of `Workers`. Raises
        InputError and DeviceError."""
        name = name_of_device(device)
        return Workers(self._client, self._device if name == "auto" else name, **options)

    def memory_limit(self, given: str | int | None) -> int:
        """Returns that of the smallest worker where none is given."""
        given = self._limit if given is None else given
        return self.workers().memory_limit if given is None else parse_size(given)

    def beside(self, given: str | int | None, nbytes: int) -> int:
        """Returns an equal share of what this process holds where all processes share a limit."""
        if self.shares:
            return ceil_div(nbytes, len(self.workers().known))
        limit = memory_limit_of(self._limit if given is None else given)
        least = baseline_bytes(CLIENT_BYTES) + nbytes
        if limit < least:
            raise BudgetError(
                f"a memory limit of {limit} bytes is too small for what comes together in this process; the "
                f"smallest that would do is {least} bytes ({ceil_div(least, 1 << 20)}MiB)",
                minimum_memory_limit=least,
            )
        return 0

    def check(self, request: Request) -> None:
        """Refuses what workers cannot open, and a C whose chunks they cannot write."""
        name_of_device(request.device)
        if request.rechunk:
            only_here("rechunk")
        if request.writes and request.reduced is None:
            _check_shared(request.c, "C")
        for operand in (request.a, request.b):
            portable(operand)

    def executor(self, request: Request) -> Cluster:
        """Returns what carries out one plan, or several of them one after the other."""
        return Cluster(self.workers(request.device), {"a": request.a, "b": request.b})

    def pool(
        self, inputs: Mapping[str, Any], out: tuple[str, Any], device: object, limit: int, resumes: bool
    ) -> WorkerPool:
        """Returns the workers as a pool."""
        _check_shared(out[1], out[0])
        place = addresses.local_path(out[1])
        assert place is not None, "it was checked"
        workers = self.workers(device) if resumes else self.workers(device, again="run again")
        return WorkerPool(workers, inputs, place, addresses.describe(out[1]), limit)


def _check_shared(spec: Any, name: str) -> None:
    """Raise InputError for a place that is in no folder. name: how messages call what has no place."""
    if spec is None or addresses.local_path(spec) is None:
        said = name if spec is None else addresses.describe(spec)
        raise InputError(f"{said} is not in a folder that workers share; give the path of one")
