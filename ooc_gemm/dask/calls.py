"""What runs on the workers of a cluster where they call functions with parts of the work (`run/pool.py`).
What a function finds goes into a file of the run's folder, from which the client takes it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import distributed

from ..engine.ports import Failure
from ..run.executor import Local
from ..run.pool import Function, Here
from ..storage.read.dataset import open_dataset
from ..storage.read.source import Opened
from ..storage.read.vectors import open_vector
from ..storage.write.share import Written
from ..support.errors import NO_MEMORY, Error, OutOfMemoryError, StoreError, no_memory, remedy
from ..support.memory import peak_resident_bytes
from ..support.trace import Trace
from .large import Large
from .on_worker import SECONDS, Input, Report, check_folder, open_here


@dataclass(frozen=True)
class Team:
    """What all calls of a pool have in common."""

    inputs: Mapping[str, Input]
    device: str
    memory_limit: int


@dataclass(frozen=True)
class Calls:
    """What all tasks of one pass have in common."""

    team: Team
    function: Function
    shared: Large
    folder: str
    name: str
    """How messages call what is made."""
    topic: str
    """The topic under which reports are sent."""


@dataclass(frozen=True)
class Answer(Report):
    """The outcome of a task."""

    found: Large | None = None
    """What the function has returned."""


def asked(team: Team, function: Function, shared: Any, part: Any) -> Any:
    """Call a function once, and return what it returns."""
    return function(_here(team, Path(), Trace(recorded=False), lambda fraction: None), shared, part)


def called(calls: Calls, number: int, part: Any) -> Answer | Failure:
    """Call a function with a part of the work. number: that of the task, for the client."""
    check_folder(calls)
    trace = Trace(recorded=False)
    here = _here(calls.team, Path(calls.folder), trace, _teller(calls, number, trace))
    try:
        found = calls.function(here, calls.shared.read(), part)
    except Exception as error:
        failure = Local(here.device).explain(error)
        if failure is not None:
            return replace(failure, left=None)  # a device stays in its process
        if not isinstance(error, Error) and no_memory(error):
            raise OutOfMemoryError(NO_MEMORY) from error
        raise
    try:
        sent = Large.written(found, Path(calls.folder) / uuid4().hex)
    except OSError as error:
        raise StoreError(
            f"{calls.name}: what a worker has found cannot be written to {calls.folder} ({error.strerror}); "
            f"{remedy(error, 'check its disk')}"
        ) from error
    peak = peak_resident_bytes()
    return Answer(Written(), [], trace.bytes, trace.seconds, peak, here.peak_device_bytes, found=sent)


def _here(team: Team, folder: Path, trace: Trace, tell: Callable[[float], None]) -> Here:
    """Open the inputs and the device of this worker."""
    threads = distributed.get_worker().state.nthreads
    opened = {name: _opened(one) for name, one in team.inputs.items()}
    return Here(opened, open_here(team.device, threads), threads, team.memory_limit, folder, trace, tell)


def _opened(one: Input) -> Opened:
    """Open an input, which may have one dimension. Workers do not ask stores for the sizes of chunks: the
    client has planned with them."""
    if one.genotypes:
        return open_dataset(one.spec, "G").opened
    return open_vector(one.spec, str(one.spec), sizes=False)[0]


def _teller(calls: Calls, number: int, trace: Trace) -> Callable[[float], None]:
    """Return what tells the client now and then how far a task is, and ends the task where the run is
    over."""
    worker, folder, said = distributed.get_worker(), Path(calls.folder), time.monotonic()

    def tell(fraction: float) -> None:
        nonlocal said
        if time.monotonic() > said + SECONDS:
            said = time.monotonic()
            if not folder.is_dir():
                raise StoreError(f"{calls.name}: the run that this part belongs to is over")
            worker.log_event(calls.topic, (number, fraction, trace.bytes["read"]))

    return tell
