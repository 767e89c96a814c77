"""The workers of a cluster as a pool, whose processes call functions with parts of the work. The client deals
the parts, and takes what was found of each of them once."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import distributed

from ..run.pool import Function, Take
from ..run.request import Operand
from ..storage.write.share import run_folder_beside
from ..support.errors import DeviceError, StoreError, remedy
from ..support.trace import Trace
from .calls import Answer, Calls, Team, asked, called
from .cluster import portable
from .dealing import DEATHS, Dealing, Task, Unit
from .large import Large
from .workers import Workers

ASKED = 10.0
"""Seconds without an answer, after which the client looks whether the worker that it asked still exists."""


class WorkerPool:
    """A `Pool` of the workers of a cluster."""

    def __init__(
        self, workers: Workers, inputs: Mapping[str, Any], place: Path, name: str, memory_limit: int
    ):
        """inputs: what workers open, by name. place: of what is made, in a folder that they share with this
        process. name: how messages call that. memory_limit: of each worker, in bytes. Raises InputError where
        workers cannot open an input."""
        self.hardware = self._workers = workers
        operands = {key: portable(Operand(one)) for key, one in inputs.items()}
        self._team = Team(operands, workers.device, memory_limit)
        self._place, self._name, self._held = place, name, ExitStack()
        self._folder: Path | None = None
        self.trace = Trace()
        self.peak_host_bytes = self.peak_device_bytes = 0

    @property
    def count(self) -> int:
        """The number of workers."""
        return len(self._workers.known)

    @property
    def threads(self) -> int:
        """The most threads of a worker."""
        return self._workers.threads

    def ask(self, function: Function, shared: Any, part: Any) -> Any:
        """Asks the worker with the least memory, or another one where that has died."""
        workers = self._workers
        with workers.reached():
            for _ in range(DEATHS):
                address = workers.smallest()
                future = workers.client.submit(
                    asked, self._team, function, shared, part, workers=[address], pure=False
                )
                while address in workers.known:
                    try:
                        return future.result(ASKED)
                    except TimeoutError:  # it may take as long to list the chunks of an array
                        workers.look()
                        if address in workers.known and workers.paused():
                            raise DeviceError(workers.stopped) from None
                    except distributed.KilledWorker:
                        break
        raise DeviceError(
            f"{DEATHS} workers have died while they opened the inputs; give them more memory, "
            f"and {workers.again}"
        )

    def each(
        self,
        function: Function,
        shared: Any,
        parts: Sequence[Any],
        take: Take,
        progress: Callable[[float], object],
    ) -> None:
        """Gives each idle worker a part."""
        folder = self._folder_of_run()
        with self._workers.reached():
            sent = Large.written(shared, folder / uuid4().hex)
            topic = f"ooc-gemm-{os.urandom(8).hex()}"
            calls = Calls(self._team, function, sent, str(folder), self._name, topic)
            dealt = _Parts(self._workers, calls, parts, take, self.trace)
            try:
                dealt.to_the_end(progress)
            finally:
                dealt.forget()
                self.peak_host_bytes = max(self.peak_host_bytes, dealt.peaks[0])
                self.peak_device_bytes = max(self.peak_device_bytes, dealt.peaks[1])
                with suppress(OSError):
                    os.unlink(sent.file)

    def _folder_of_run(self) -> Path:
        """The folder of the run, which is made when it is first needed."""
        if self._folder is None:
            self._folder = self._held.enter_context(run_folder_beside(self._place, self._name))
        return self._folder

    def close(self) -> None:
        """Removes the folder of the run."""
        self._folder = None
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Parts(Dealing):
    """The tasks of one pass: one for each part of the work."""

    def __init__(self, workers: Workers, calls: Calls, parts: Sequence[Any], take: Take, trace: Trace):
        self._calls, self._parts, self._taker = calls, parts, take
        units = [Unit(number, 1.0) for number in range(len(parts))]
        self._todo = list(units)
        super().__init__(workers, calls.topic, units, None, trace)

    def _left(self) -> bool:
        """Whether a part is left to do."""
        return bool(self._todo or self._running)

    def _hand_out(self) -> None:
        """Give every idle worker a part, the first ones first."""
        for address in sorted(self._idle())[: len(self._todo)]:
            unit = self._todo.pop(0)
            future = self._submit(address, called, self._calls, unit.number, self._parts[unit.number])
            done, died = partial(self._found, unit.number), partial(self._died, unit)
            self._start(future, Task((address,), done, died, unit))

    def _died(self, unit: Unit) -> None:
        """Have the part of a worker that has died made by another."""
        self._todo.insert(0, unit)
        unit.died(self._workers.again)

    def _found(self, number: int, answer: Answer) -> None:
        """Hand on what was found of a part."""
        assert answer.found is not None, "the function has returned"
        self._taker(number, partial(self._read_once, answer.found))

    def _read_once(self, found: Large) -> Any:
        """Read what a worker has found, and remove its file. Raises StoreError."""
        try:
            what = found.read()
        except OSError as error:
            raise StoreError(
                f"{self._calls.name}: what a worker has found cannot be read from {found.file} "
                f"({error.strerror}); {remedy(error, 'check its disk')}, and {self._workers.again}"
            ) from error
        with suppress(OSError):
            os.unlink(found.file)
        return what
