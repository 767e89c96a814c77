"""What runs on the workers of a cluster: answers for the planner, and superblocks of C. A worker holds one
superblock, a run of consecutive blocks of the plan, at a time and has all of its memory, threads and GPU for
that. It writes chunks into a folder of the run, from which the client takes them."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import distributed
from distributed.core import Status

from ..devices import open_device
from ..devices.cpu.device import CPU
from ..engine.ports import Arithmetic, Device, Failure, Limits, Operation
from ..planning.chunk_set import Chunk
from ..planning.plan import Plan
from ..planning.schedule import Block
from ..run.executor import Local
from ..run.finish import Finished
from ..run.plans import completed
from ..storage.io import locks
from ..storage.read import inputs
from ..storage.read.dataset import open_dataset
from ..storage.read.source import Opened
from ..storage.read.table import as_table, tabled
from ..storage.write import reopen
from ..storage.write.share import Share, Written
from ..storage.write.staging_folder import DIRECT_BYTES
from ..storage.write.target import Target
from ..support.buffers import give_back
from ..support.errors import StoreError, letting_go
from ..support.memory import baseline_bytes, default_memory_limit, resident_bytes
from ..support.trace import EXCHANGE, Trace
from .desk import desk_of
from .large import Large
from .team import SharedSource, Team, seated

SECONDS = 1.0
"""Seconds between two progress reports of a worker."""


def memory_of(worker: Any) -> int | None:
    """Return the bytes that a worker may hold resident before `distributed` begins to spill or to pause."""
    found = worker.memory_manager
    fractions = (found.memory_spill_fraction, found.memory_pause_fraction)
    return int(found.memory_limit * min([f for f in fractions if f] or [1.0])) if found.memory_limit else None


def task_room(most: int | None) -> int:
    """Return the bytes that one more task may take in this process, which need not be a worker: its share of
    what is left, and no more than `most`."""
    try:
        worker = distributed.get_worker()
    except ValueError:
        limit, threads = default_memory_limit(), CPU().threads
    else:
        limit, threads = memory_of(worker) or default_memory_limit(), worker.state.nthreads
    left = max(1, limit - resident_bytes()) // threads
    return left if most is None else min(left, most)


class CPUOfTask(CPU):
    """The CPU for a task that shares its process with others. A memory limit of its products does not count
    what the process holds, which the other tasks change all the time."""

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """Returns limits by which the process holds nothing."""
        return replace(super().limits(arithmetic, device_memory_limit), host_baseline=0, workers=1)


def open_here(name: str, threads: int) -> Device:
    """Open the device of this worker. `threads`: how many multiply, where the device is the CPU."""
    device = open_device(name)
    if device.name != "cpu":
        return device
    return CPU(threads)


@dataclass(frozen=True)
class About:
    """What the client knows of a worker."""

    memory: int
    """Bytes that the worker may hold resident."""
    resident: int
    """Bytes that the worker holds now."""
    threads: int
    gpu: bool
    """Whether the worker has the resource `GPU`."""


def about(on_this_host: int, dask_worker: Any) -> About:
    """Describe this worker. From now on it answers to others, and gives freed memory back to the system,
    which a worker of a nanny does anyway. `on_this_host`: how many workers of the cluster share its host."""
    desk_of(dask_worker)
    give_back()
    memory = memory_of(dask_worker) or default_memory_limit() // on_this_host
    state = dask_worker.state
    return About(memory, resident_bytes(), state.nthreads, "GPU" in state.total_resources)


def stands_still(dask_worker: Any) -> bool:
    """Return whether `distributed` has paused this worker, and the worker computes nothing."""
    return dask_worker.status is Status.paused and not dask_worker.state.executing_count


Question = tuple[Any, ...]
"""A method of a device, and its arguments."""


async def ask(
    device: str, threads: int, method: str, *arguments: Any
) -> tuple[Any, dict[Question, Any], Exception | None]:
    """Return what a method of this worker's device returns, the answers to what is asked next, and the error
    where there is one; the device's name and model where `method` is empty. This is no task, because the
    scheduler would take several times as long to hand it out."""
    try:
        return *await asyncio.to_thread(_answers, device, threads, method, *arguments), None
    except Exception as error:
        return None, {}, error


def _answers(device: str, threads: int, method: str, *arguments: Any) -> tuple[Any, dict[Question, Any]]:
    found = open_here(device, threads)
    if not method:
        return (found.name, found.model), {}
    answer, others = _answered(found, method, *arguments), dict[Question, Any]()
    if isinstance(answer, Arithmetic):
        for one in filter(None, (answer, answer.other)):
            for question in ("limits", one, None), ("rates", one), ("most_flops", one.kernel, one.panel.name):
                with suppress(Exception):  # which concerns whoever asks that
                    others[question] = _answered(found, *question)
    return answer, others


def _answered(device: Device, method: str, *arguments: Any) -> Any:
    answer = getattr(device, method)(*arguments)
    if isinstance(answer, Limits):
        return replace(answer, host_baseline=baseline_bytes(answer.host_baseline))
    return answer


@dataclass(frozen=True)
class Input:
    """What a worker opens an operand by."""

    spec: Any
    """A path, a URL or a zarr array."""
    table: Any = None
    """What becomes of its elements (`Operand`)."""
    genotypes: bool = False
    """Whether it may hold calls, which are opened as a matrix (`open_dataset`)."""


@dataclass(frozen=True)
class Work:
    """What all tasks of a run have in common."""

    inputs: dict[str, Input | None]
    """A and B, and None for the old C where it is read."""
    c: str
    name: str
    """How messages call C."""
    folder: str
    """Folder of the run, to which chunks are written until the client takes them."""
    plan: Plan
    operation: Operation
    """Without its transforms."""
    transforms: Large
    """The transforms, by operand."""
    finish: Large | None
    """What is done to the elements of a finished C (`Finish`); None for nothing."""
    device: str
    topic: str
    """The topic under which reports are sent."""
    boot: str
    """Identifies the start of the system on which the client runs."""


@dataclass(frozen=True)
class Report:
    """The outcome of a task."""

    written: Written
    wrong: list[Block]
    moved: defaultdict[str, int]
    """Bytes that each stage has moved."""
    seconds: defaultdict[str, float]
    """Seconds that each stage was busy."""
    peak: int
    """The largest resident set of the worker, in bytes."""
    peak_device: int
    """The most memory of the worker's device that was held, in bytes."""
    overflowed: int = 0
    """Elements that became infinite in C's type."""


def superblock(
    work: Work, number: int, done: Set[Chunk], team: Team | None = None, me: str = ""
) -> Report | Failure:
    """Compute all chunks of C that are not `done`, and write them into the folder of the run. team: the
    workers with which pieces are exchanged. me: the address of this worker in the team."""
    check_folder(work)
    operands = {name: opened(work, name) for name in work.inputs}
    plan = plan_of(work, operands).without(done)
    operation, target = replace(work.operation, transforms=work.transforms.read()), share_of(work)
    sources: dict[str, Any] = {name: one.source for name, one in operands.items()}
    with ExitStack() as stack:
        if team is not None:
            seat = stack.enter_context(seated(distributed.get_worker(), work.topic, team, me))
            shared = [(name, one) for name, one in operands.items() if name != "c"]
            sources |= {name: SharedSource(one, plan, seat, team) for name, one in shared}
        found = carried_out(work, number, plan, operation, sources, finished(work, target))
        if team is not None and isinstance(found, Report):
            found.moved[EXCHANGE] = seat.bytes
    return found if isinstance(found, Failure) else handed_over(work, found, target)


def check_folder(work: Any) -> None:
    """Raise StoreError where this worker does not see the folder of a run. work: `Work`, or what else has a
    folder and the name of what is made."""
    if not Path(work.folder).is_dir():
        worker = distributed.get_worker().address
        raise StoreError(
            f"{work.name} cannot be written: worker {worker} does not see the folder {work.folder}; "
            "choose a place that all workers share"
        )


def plan_of(work: Work, operands: Mapping[str, Opened]) -> Plan:
    """Return the plan of the run with what opened operands tell of their matrices."""
    return completed(work.plan, operands)


def share_of(work: Work) -> Target[Share]:
    """Return the target that writes chunks of C into the folder of the run."""
    c = reopen.open_partial(work.c)
    share = Share(Path(work.folder), direct=c.nbytes >= DIRECT_BYTES)
    return Target(c, work.name, work.operation.leaves, share)


def finished(work: Work, target: Target[Share]) -> Any:
    """Return what finishes parts of C before the target stores them, if there is anything to be done."""
    c = work.plan.problem.c
    return Finished(target, work.finish.read(), (c.chunk_rows, c.chunk_cols)) if work.finish else target


def handed_over(work: Work, report: Report, target: Target[Share]) -> Report:
    """Return a report with the chunks that were written, which the client may take over now."""
    if work.boot != locks.boot_id():
        target.sink.flush()
    return replace(report, written=target.sink.written, overflowed=target.overflowed)


@letting_go()
def carried_out(
    work: Work,
    number: int,
    plan: Plan,
    operation: Operation,
    sources: Mapping[str, Any],
    target: Any,
) -> Report | Failure:
    """Run a plan on the device of this worker, and tell the client now and then how far it is.

    number: that of the task, for the client. sources, target: as of `Executor.execute`.
    """
    worker, folder = distributed.get_worker(), Path(work.folder)
    executor, trace = Local(open_here(work.device, worker.state.nthreads)), Trace()
    said = time.monotonic()

    def tell(fraction: float) -> None:
        nonlocal said
        if time.monotonic() > said + SECONDS:
            said = time.monotonic()
            if not folder.is_dir():
                raise StoreError(f"{work.name}: the run that these blocks belong to is over")
            worker.log_event(work.topic, (number, fraction, trace.bytes["read"]))

    try:
        executor.start(plan, operation, trace)
        wrong = executor.execute(sources, lambda: target, tell)
        executor.close()  # a session tells its peak once it is closed
        return Report(
            Written(),
            wrong,
            trace.bytes,
            trace.seconds,
            executor.peak_host_bytes(),
            executor.peak_device_bytes(),
        )
    except Exception as error:
        executor.close()
        failure = executor.explain(error)
        if failure is None:
            raise
        return replace(failure, left=None)  # a device stays in its process
    finally:
        executor.close()


def opened(work: Work, name: str) -> Opened:
    """Open an input, with the matrix that the plan has for it. Workers do not ask stores for the sizes of
    chunks: the client has planned with them."""
    one = work.inputs[name]
    if one is None:
        found = inputs.open_input(reopen.open_partial(work.c), work.name, sizes=False)
    elif one.genotypes:
        found = open_dataset(one.spec, "G").opened
    else:
        found = inputs.open_input(one.spec, sizes=False)
    if one is not None and one.table is not None:
        found = tabled(found, as_table(one.table))
    turned = {"a": work.operation.transpose_a, "b": work.operation.transpose_b, "c": False}[name]
    return found if found.matrix.transposed == turned else found.transpose()
