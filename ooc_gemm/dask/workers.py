"""Describes the workers of a cluster to the planner."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import dask
import distributed
from distributed.comm import CommClosedError
from distributed.core import RPCClosed

from ..devices.cpu.device import CPU
from ..engine.ports import Arithmetic, Limits
from ..planning.machine import Rates
from ..support.errors import DeviceError, Error, InputError
from ..support.memory import default_memory_limit
from .on_worker import About, Question, about, ask, stands_still

TIMEOUT = 60.0
"""Seconds without any worker that works, or without an answer of the scheduler, after which a run ends."""
AGAIN = 0.1
"""Seconds after which a worker that has not answered is asked again, or another one."""
SHARE = 0.7
"""Share of a worker's memory that tasks of `matmul` use. Beyond it `distributed` usually spills."""


def name_of_device(device: object) -> str:
    """Return the name of the device that each worker opens. Raises InputError if it is no name: a device that
    is open belongs to its process."""
    if isinstance(device, str):
        return device
    raise InputError(
        f"device is an object ({type(device).__name__}), but each worker opens its own; "
        "give a name, such as device='cpu'"
    )


def tasks_at_a_time(most: int | None) -> tuple[int, int]:
    """Return how many tasks run at a time on the workers of the current client, or in this process, and the
    bytes that each of them has. most: the bytes that all tasks of a process may take; None for no limit
    besides the worker's or the machine's."""
    try:
        client = distributed.get_client()
        workers = [] if client.asynchronous else _info(client)
    except ValueError:
        workers = []
    if not workers:
        threads = dask.config.get("num_workers", None) or CPU().threads
        return threads, (most or default_memory_limit()) // threads
    threads = sum(worker["nthreads"] for worker in workers)
    return threads, min(_room(worker, most) // worker["nthreads"] for worker in workers)


def _room(worker: dict[str, Any], most: int | None) -> int:
    """Return the bytes that all tasks of a worker may take together. A worker without a limit has 0."""
    limits = (int(SHARE * worker["memory_limit"]) or default_memory_limit(), most)
    return min(limit for limit in limits if limit)


def _info(client: Any) -> list[dict[str, Any]]:
    try:
        found = client.scheduler_info(n_workers=-1)
    except TypeError:  # distributed before 2025.2
        found = client.scheduler_info()
    return list(found["workers"].values())


class Workers:
    """Those workers of a client's cluster that are alike, as the planner's `Hardware`. Where some workers
    have a GPU (`dask-cuda`'s resource `GPU`), only these count."""

    def __init__(self, client: Any, device: str = "auto", again: str = "continue with resume=True"):
        """client: that of the cluster; None for the current one. device: which device each worker uses.
        again: how messages say that the user goes on after a failure. Raises InputError and DeviceError."""
        if client is None:
            try:
                client = distributed.get_client()
            except ValueError:
                raise InputError("there is no client of a cluster; give client=") from None
        if client.asynchronous:
            raise InputError("the client is asynchronous; give one that is not")
        self.client, self.device, self.again = client, device, again
        self.known: dict[str, About] = {}
        """What is known of each worker, by its address."""
        self._answers: dict[Question, Any] = {}
        """What a worker has answered beside what it was asked last."""
        with self.reached():
            self._first = self.smallest()
            if self.paused():
                raise DeviceError(self.stopped)
        self.memory_limit = self.known[self._first].memory
        """Bytes that the smallest worker may hold resident."""

    @property
    def name(self) -> str:
        """The name of each worker's device, and the number of workers."""
        return f"{self._kind[0]} on {len(self.known)} workers"

    @property
    def model(self) -> str:
        """The model of each worker's device."""
        return self._kind[1]

    @cached_property
    def _kind(self) -> tuple[str, str]:
        """The name and the model of each worker's device."""
        name, model = self._asked("")
        return name, model

    @property
    def threads(self) -> int:
        """The most threads of a worker."""
        return max(one.threads for one in self.known.values())

    @property
    def gone(self) -> str:
        """What the user is told where the scheduler is gone."""
        return f"the scheduler of the cluster is gone or does not answer; start another one and {self.again}"

    @property
    def stopped(self) -> str:
        """What the user is told where all workers are paused."""
        return (
            "dask has paused all workers of the cluster, because they hold more than its share of their "
            "memory (distributed.worker.memory.pause); restart them or give them more memory, and "
            f"{self.again}"
        )

    def arithmetic(self, *arguments: Any) -> Arithmetic:
        """Asks a worker how its device multiplies."""
        found: Arithmetic = self._asked("arithmetic", *arguments)
        return found

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """Returns the limits of each worker."""
        found: Limits = self._asked("limits", arithmetic, device_memory_limit)
        baseline = max(found.host_baseline, *(one.resident for one in self.known.values()))
        return replace(found, host_baseline=baseline, workers=len(self.known))

    def rates(self, arithmetic: Arithmetic) -> Rates:
        """Returns the default rates of each worker."""
        found: Rates = self._asked("rates", arithmetic)
        return found

    def most_flops(self, kernel: str, panel: str) -> float:
        """Returns the most operations per second of each worker's device."""
        found: float = self._asked("most_flops", kernel, panel)
        return found

    def smallest(self) -> str:
        """Return the address of the worker with the least memory. Waits for a worker where there is none.
        Raises DeviceError where none comes."""
        with suppress(TimeoutError):
            self.client.wait_for_workers(1, timeout=TIMEOUT)
        self.look()
        if not self.known:
            raise DeviceError("the cluster has no workers that answer; add some")
        return min(self.known, key=lambda address: self.known[address].memory)

    def _asked(self, method: str, *arguments: Any) -> Any:
        """Ask one worker, so that answers belong together; another one where that has died. An answer may
        have come with another one. Raises DeviceError where none answers."""
        if (method, *arguments) in self._answers:
            return self._answers[(method, *arguments)]
        end = time.monotonic() + TIMEOUT
        with self.reached():
            while time.monotonic() < end:
                first, threads = self._first, self.known[self._first].threads
                found = self.client.run(
                    ask, self.device, threads, method, *arguments, workers=[first], on_error="ignore"
                )
                if found.get(first) is not None:
                    answer, self._answers, error = found[first]
                    if error:
                        raise error
                    return answer
                time.sleep(AGAIN)
                self.look()
                if self._first not in self.known:
                    self._first = self.smallest()
            why = self.stopped if self.paused() else "no worker of the cluster answers; restart them"
            raise DeviceError(why)

    def look(self) -> None:
        """Find out which workers exist, and what memory they have."""
        there = self.client.nthreads(callback_timeout=TIMEOUT)
        hosts = [_host(address) for address in there]
        for host in set(hosts):
            new = [address for address in there if address not in self.known and _host(address) == host]
            if new:
                found = self.client.run(about, hosts.count(host), workers=new, on_error="ignore")
                self.known |= {address: one for address, one in found.items() if one is not None}
        gpus = any(one.gpu for one in self.known.values())
        self.known = {
            address: one for address, one in self.known.items() if address in there and one.gpu == gpus
        }

    def paused(self) -> bool:
        """Return whether `distributed` has paused all workers, and none of them computes anything."""
        found = self.client.run(stands_still, workers=list(self.known), on_error="ignore")
        return bool(found) and all(found.values())

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Raise DeviceError in the body where the scheduler is gone."""
        try:
            yield
        except Error:
            raise
        except Exception as error:
            gone = (TimeoutError, CommClosedError, RPCClosed, distributed.CancelledError)
            if self.client.status == "running" and not isinstance(error, gone):
                raise
            raise DeviceError(self.gone) from error


def _host(address: str) -> str:
    return address.rpartition(":")[0]
