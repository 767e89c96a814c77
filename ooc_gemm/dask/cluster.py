"""A `distributed` cluster as a device: its workers make blocks of C, this process, the client, the rest.

The only importer of distributed. A worker holds one superblock, a run of consecutive blocks of the plan, at a
time and has all of its memory, threads and GPU for that. It writes chunks into a folder of the run's; the
client takes them over when the superblock is done, and knows what is.
"""

import logging
import os
import queue
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dask
import distributed
from distributed.comm import CommClosedError
from distributed.core import RPCClosed
from distributed.security import Security

from ..devices import open_device
from ..devices.cpu.device import CPU
from ..engine.execute import execute
from ..engine.ports import Arithmetic, Device, Limits, Operation
from ..planning.machine import Rates
from ..planning.plan import Plan
from ..planning.schedule import Block
from ..storage.io import locks
from ..storage.read import store
from ..storage.read.local import Source
from ..storage.write import reopen
from ..storage.write.share import Share
from ..storage.write.staging_folder import DIRECT_BYTES
from ..storage.write.target import Target
from ..support.errors import BudgetError, DeviceError, Error, InputError, StoreError
from ..support.intervals import ceil_div
from ..support.memory import (
    STEP,
    baseline_bytes,
    default_memory_limit,
    parse_size,
    peak_resident_bytes,
    resident_bytes,
)
from ..support.trace import Trace

SUPERBLOCKS = 16
"""Most of them for each worker: so many keep all busy to the end, nearly."""
SECONDS = 1.0
"""Between two looks at who is there, and two reports of how far a worker is."""
TIMEOUT = 60.0
"""After so long without any worker, or an answer of the scheduler's, the run ends."""
CLIENT_BYTES = 160 << 20
"""What this process holds with a scheduler in it."""
ANSWER = 10.0
"""Seconds for the report of a superblock to come from its worker."""
SHARE = 0.7
"""Of a worker's memory, that tasks of `matmul` are made for: from there on `distributed` usually spills."""
DEATHS = 5
"""Workers that may die of one superblock before it is taken for the reason."""

Chunk = tuple[int, int]


# ------------------------------------------------------------------------------------------ on the workers


def _memory(worker: Any) -> int | None:
    """Bytes that it may hold resident before `distributed` begins to spill or to pause."""
    found = worker.memory_manager
    fractions = (found.memory_spill_fraction, found.memory_pause_fraction)
    return int(found.memory_limit * min([f for f in fractions if f] or [1.0])) if found.memory_limit else None


def task_limit() -> int:
    """Bytes that this process, a worker or not, may hold resident while one task more runs in it."""
    held = resident_bytes()
    try:
        worker = distributed.get_worker()
    except ValueError:
        most, threads = default_memory_limit(), CPU().threads
    else:
        most, threads = _memory(worker) or default_memory_limit(), worker.state.nthreads
    return held + max(0, most - held) // threads


def tasks_at_a_time() -> tuple[int, int]:
    """On the workers of the current client, or in this process: how many tasks run at once, and the bytes
    that one has."""
    try:
        client = distributed.get_client()
        workers = [] if client.asynchronous else _info(client)
    except ValueError:
        workers = []
    threads = sum(worker["nthreads"] for worker in workers) or CPU().threads
    least = min((int(SHARE * worker["memory_limit"]) // worker["nthreads"] for worker in workers), default=0)
    return threads, least or default_memory_limit() // threads


def _info(client: Any) -> list[dict[str, Any]]:
    try:
        found = client.scheduler_info(n_workers=-1)
    except TypeError:  # distributed before 2025.2
        found = client.scheduler_info()
    return list(found["workers"].values())


def open_here(name: str, threads: int) -> Device:
    """A device of this worker, on which `threads` multiply where that is the CPU."""
    device = open_device(name)
    if device.name != "cpu":
        return device
    return CPU(threads)


@dataclass(frozen=True)
class About:
    """What the client knows of a worker."""

    memory: int
    """It may hold resident, in bytes."""
    resident: int
    """It holds now."""
    threads: int
    gpu: bool
    """It says so: it has the resource `GPU`."""


def _about(on_this_host: int, dask_worker: Any) -> About:
    memory = _memory(dask_worker) or default_memory_limit() // on_this_host
    state = dask_worker.state
    return About(memory, resident_bytes(), state.nthreads, "GPU" in state.total_resources)


def _ask(device: str, threads: int, method: str, *arguments: Any) -> Any:
    """What a device of this worker says."""
    found = open_here(device, threads)
    if not method:
        return found.name, found.model
    answer = getattr(found, method)(*arguments)
    if isinstance(answer, Limits):
        return replace(answer, host_baseline=baseline_bytes(answer.host_baseline))
    return answer


@dataclass(frozen=True)
class Work:
    """What all superblocks of a run have in common."""

    inputs: dict[str, Any]
    """Paths, URLs or zarr arrays of A and B, also of the C that was."""
    c: str
    name: str
    """How messages call it."""
    folder: str
    """Of the run."""
    plan: Plan
    operation: Operation
    device: str
    verify: bool
    topic: str
    """What reports are sent under."""
    boot: str
    """Which start of which system the client runs in."""


@dataclass(frozen=True)
class Report:
    """What came of a superblock."""

    written: list[tuple[Chunk, str]]
    wrong: list[Block]
    moved: defaultdict[str, int]
    """Bytes of each stage."""
    seconds: defaultdict[str, float]
    """Of each stage."""
    peak: int
    peak_device: int
    overflowed: int
    """Elements that became infinite in C's type."""


def _superblock(work: Work, number: int, done: frozenset[Chunk]) -> Report:
    """Make all chunks of C that are not `done`, into the folder of the run."""
    worker, folder = distributed.get_worker(), Path(work.folder)
    if not folder.is_dir():
        raise StoreError(
            f"{work.name} cannot be written: worker {worker.address} does not see the folder {folder}; "
            "choose a place that all workers share"
        )
    sources = {name: _source(work, name) for name in work.inputs}
    found: dict[str, Any] = {name: source.matrix for name, source in sources.items()}
    plan = replace(work.plan, problem=replace(work.plan.problem, **found)).without(done)
    c = reopen.open_partial(work.c)
    share = Share(folder, direct=c.nbytes >= DIRECT_BYTES)
    target = Target(c, work.name, work.operation.arithmetic.block, share)
    device, trace, said = open_here(work.device, worker.state.nthreads), Trace(), time.monotonic()

    def tell(fraction: float) -> None:
        nonlocal said
        if time.monotonic() > said + SECONDS:
            said = time.monotonic()
            if not folder.is_dir():
                raise StoreError(f"{work.name}: the run that this superblock belongs to is over")
            worker.log_event(work.topic, (number, fraction, trace.bytes["read"]))

    try:
        device.start(plan, work.operation, trace)
        wrong = execute(plan, device, sources, target, trace, tell, work.verify)
        if work.boot != locks.boot_id():
            share.flush()
        return Report(
            share.written,
            wrong,
            trace.bytes,
            trace.seconds,
            peak_resident_bytes(),
            device.peak_bytes(),
            target.overflowed,
        )
    except Exception as error:
        device.close()
        meant = None if isinstance(error, Error) else device.explain(error)
        if meant is None:
            raise
        raise meant from error
    finally:
        device.close()


def _source(work: Work, name: str) -> Source:
    """An input, as the plan knows it."""
    spec = reopen.open_partial(work.c) if name == "c" else work.inputs[name]
    source = store.open_source(spec, work.name if name == "c" else None)
    turned = {"a": work.operation.transpose_a, "b": work.operation.transpose_b, "c": False}[name]
    source.matrix = replace(source.matrix, transposed=turned)
    return source


# ------------------------------------------------------------------------------------------ on the client


@dataclass
class _Superblock:
    """One that is not done yet."""

    number: int
    blocks: list[Block]
    chunks: frozenset[Chunk]
    flops: float
    deaths: int = 0
    fraction: float = 0.0
    """Of it that is done."""
    bytes_read: int = 0


class Cluster:
    """The workers of a client's cluster that are alike: a `Device` as far as planning goes, and an `execute`.
    With GPU workers among them (`dask-cuda`'s resource `GPU`) these alone."""

    def __init__(self, client: Any, specs: Mapping[str, Any], device: str = "auto"):
        """`specs`: of A and B, which the workers open themselves. Raises InputError and DeviceError."""
        if client is None:
            try:
                client = distributed.get_client()
            except ValueError:
                raise InputError("there is no client of a cluster; give client=") from None
        if client.asynchronous:
            raise InputError("the client is asynchronous; give one that is not")
        self.client, self._kind = client, device
        self._specs = {name: _portable(spec) for name, spec in specs.items()}
        self.workers: dict[str, About] = {}
        with self._reached():
            client.wait_for_workers(1, timeout=TIMEOUT)
            self._look()
        if not self.workers:
            raise DeviceError("the cluster has no workers that answer; add some")
        self._first = min(self.workers, key=lambda address: self.workers[address].memory)
        about = self.workers[self._first]
        self.memory_limit = about.memory
        self.kind, self.model = self._asked("")
        self.name = f"{self.kind} on {len(self.workers)} workers"
        self.predicted_bytes_read = 0
        self.peak_host = self._peak_device = 0
        self._operation: Operation | None = None

    # What planning asks.

    def arithmetic(self, *arguments: Any) -> Arithmetic:
        """As a worker's device does."""
        found: Arithmetic = self._asked("arithmetic", *arguments)
        return found

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """Of each worker."""
        found: Limits = self._asked("limits", arithmetic, device_memory_limit)
        baseline = max(found.host_baseline, *(about.resident for about in self.workers.values()))
        return replace(found, host_baseline=baseline, workers=len(self.workers))

    def rates(self, arithmetic: Arithmetic) -> Rates:
        """Of each worker."""
        found: Rates = self._asked("rates", arithmetic)
        return found

    def most_flops(self, kernel: str, panel: str) -> float:
        """Of each worker."""
        found: float = self._asked("most_flops", kernel, panel)
        return found

    def start(self, plan: Plan, operation: Operation, trace: Trace) -> None:
        """Workers start their devices for each superblock."""
        self._operation = operation

    def close(self) -> None:
        """Nothing is held between superblocks."""

    def explain(self, error: Exception) -> DeviceError | None:
        """Workers explain their own."""
        if isinstance(error, OSError | CommClosedError) and self.client.status != "running":
            return DeviceError(_GONE)
        return None

    def peak_bytes(self) -> int:
        """Of the worker's device that held most."""
        return self._peak_device

    def _asked(self, method: str, *arguments: Any) -> Any:
        threads = self.workers[self._first].threads
        with self._reached():
            # Answers belong together: another worker is asked only where that one has died.
            where = {"workers": [self._first], "allow_other_workers": True}
            future = self.client.submit(_ask, self._kind, threads, method, *arguments, **where, pure=False)
            try:
                return future.result(TIMEOUT)
            except TimeoutError:
                raise DeviceError("no worker of the cluster answers; restart them") from None

    # What running does.

    def execute(
        self,
        plan: Plan,
        device: Any,
        sources: Mapping[str, Source],
        target: Any,
        trace: Trace,
        progress: Callable[[float], None] = lambda fraction: None,
        verify: bool = False,
    ) -> list[Block]:
        """As `execute.execute`, on the workers."""
        assert self._operation
        topic, wrong = f"ooc-gemm-{os.urandom(8).hex()}", list[Block]()
        todo, rest = _cut(plan, len(self.workers))
        self.predicted_bytes_read += sum(plan.without(rest - x.chunks).bytes_read for x in todo)
        by_number = {x.number: x for x in todo}
        flops = sum(x.flops for x in todo) or 1.0
        read = trace.bytes["read"]
        reports: queue.SimpleQueue[tuple[int, float, int]] = queue.SimpleQueue()
        finished: queue.SimpleQueue[distributed.Future] = queue.SimpleQueue()
        running: dict[distributed.Future, tuple[str, _Superblock]] = {}
        with self._reached(), target.sink.run_folder() as folder:
            work = Work(
                inputs={name: self._specs.get(name) for name in sources},
                c=str(folder.parent),
                name=target.name,
                folder=str(folder),
                plan=_slim(plan),
                operation=self._operation,
                device=self._kind,
                verify=verify,
                topic=topic,
                boot=locks.boot_id(),
            )
            self.client.subscribe_topic(topic, lambda event: reports.put(event[1]))
            looked = seen = time.monotonic()
            try:
                while todo or running:
                    idle = set(self.workers) - {address for address, _ in running.values()}
                    while todo and idle:
                        address, one = idle.pop(), todo.pop(0)
                        future = self.client.submit(
                            _superblock, work, one.number, rest - one.chunks, workers=[address], pure=False,
                            key=f"{topic}-{one.number}-{one.deaths}",
                        )  # fmt: skip
                        running[future] = address, one
                        future.add_done_callback(finished.put)
                    for future in _some(finished, SECONDS):
                        if future not in running:
                            continue
                        address, one = running.pop(future)
                        report = self._result(future)
                        if report is None:
                            self._died(one, address, todo)
                            continue
                        for chunk, path in report.written:
                            target.sink.take(chunk, path)
                        wrong += report.wrong
                        target.overflowed += report.overflowed
                        trace.include(report.moved, report.seconds)
                        read += report.moved["read"]
                        self.peak_host = max(self.peak_host, report.peak)
                        self._peak_device = max(self._peak_device, report.peak_device)
                        one.fraction = 1.0
                    for number, fraction, nbytes in _some(reports, 0):
                        one = by_number[number]
                        one.fraction = max(one.fraction, fraction)
                        one.bytes_read = max(one.bytes_read, nbytes)
                    trace.bytes["read"] = read + sum(one.bytes_read for _, one in running.values())
                    progress(sum(x.fraction * x.flops for x in by_number.values()) / flops)
                    if time.monotonic() < looked + SECONDS:
                        continue
                    if self.client.status != "running":  # it would ask for long whether anybody is there
                        raise CommClosedError
                    self._look()
                    looked = time.monotonic()
                    for future, (address, one) in list(running.items()):
                        if address not in self.workers:
                            del running[future]
                            future.cancel()
                            self._died(one, address, todo)
                    seen = looked if self.workers else seen
                    if looked > seen + TIMEOUT:
                        raise DeviceError(
                            "the cluster has no workers any more; add some and continue with resume=True"
                        )
            finally:
                self._forget(topic, list(running))
        return sorted(wrong, key=lambda block: (block.row, block.col))

    def _result(self, future: Any) -> Report | None:
        """None where the worker has died; raises what it raised."""
        try:
            found: Report = future.result(ANSWER)
        except (distributed.KilledWorker, TimeoutError):
            return None
        except (distributed.CancelledError, CommClosedError):
            if self.client.status != "running":
                raise
            return None
        finally:
            future.release()
        return found

    def _died(self, one: _Superblock, address: str, todo: list[_Superblock]) -> None:
        """The worker with it: others make it again."""
        self.workers.pop(address, None)
        one.deaths, one.fraction, one.bytes_read = one.deaths + 1, 0.0, 0
        if one.deaths == DEATHS:
            raise DeviceError(
                f"{DEATHS} workers have died of the same blocks of C; give a smaller memory_limit "
                "and continue with resume=True"
            )
        todo.insert(0, one)

    def _look(self) -> None:
        """Who is there."""
        there = self.client.nthreads(callback_timeout=TIMEOUT)
        hosts = [_host(address) for address in there]
        for host in set(hosts):
            new = [address for address in there if address not in self.workers and _host(address) == host]
            if new:
                found = self.client.run(_about, hosts.count(host), workers=new, on_error="ignore")
                self.workers |= {address: about for address, about in found.items() if about is not None}
        gpus = any(about.gpu for about in self.workers.values())
        self.workers = {
            address: about
            for address, about in self.workers.items()
            if address in there and about.gpu == gpus
        }

    def _forget(self, topic: str, futures: list[Any]) -> None:
        """Nobody waits any longer."""
        if self.client.status != "running":
            return
        try:
            self.client.unsubscribe_topic(topic)
            self.client.cancel(futures, force=True)
        except (OSError, RuntimeError, ValueError, TimeoutError):  # the scheduler is gone
            pass

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Around what needs the scheduler. Raises DeviceError where it is gone."""
        try:
            yield
        except Error:
            raise
        except Exception as error:
            gone = (TimeoutError, CommClosedError, RPCClosed, distributed.CancelledError)
            if self.client.status == "running" and not isinstance(error, gone):
                raise
            raise DeviceError(_GONE) from error


@contextmanager
def connected(scheduler: str, memory_limit: str | int | None, device: str) -> Iterator[dict[str, Any]]:
    """Options of `dask.multiply` for the cluster at an address, or for one of N worker processes on this
    machine that lasts as long as this context (`local:N`). Those share the memory limit, less what this
    process holds, and the cores. Raises InputError, DeviceError, and BudgetError with the smallest limit that
    would do for all workers together."""
    kind, _, number = scheduler.partition(":")
    if kind != "local":
        try:
            client = distributed.Client(scheduler, timeout=TIMEOUT / 2, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"no scheduler answers at {scheduler} ({error}); check the address") from error
        with client:
            yield {"client": client, "memory_limit": memory_limit, "device": device}
        return
    if not number.isdecimal() or int(number) < 1:
        raise InputError(f"{scheduler!r} is no cluster; give the address of a scheduler, or local:N")
    count = int(number)
    limit = default_memory_limit() if memory_limit is None else parse_size(memory_limit)
    own, threads = baseline_bytes(CLIENT_BYTES), CPU().threads
    each = max(STEP, (limit - own) // count)
    usual = {"nthreads": max(1, threads // count), "memory_limit": each}
    with _local_cluster([{**usual, **own_gpu} for own_gpu in _gpus(count, device)]) as client:
        client.wait_for_workers(count, timeout=TIMEOUT)
        try:
            yield {"client": client, "memory_limit": None, "device": device}
        except BudgetError as error:
            least = error.minimum_memory_limit
            if least is None:
                raise
            total = own + least * count
            raise BudgetError(
                f"a memory limit of {limit} bytes is too small for {count} workers; the smallest that "
                f"would do is {total} bytes ({ceil_div(total, 1 << 20)}MiB)",
                minimum_memory_limit=total,
            ) from error


def _gpus(count: int, device: str) -> list[dict[str, Any]]:
    """For each worker on this machine: what makes one GPU its own, where it is to have one."""
    found = 0
    if device != "cpu":
        from ..devices.cuda.device import count as gpu_count

        try:
            found = gpu_count()
        except InputError:
            if device != "auto":
                raise
    if not found:
        return [{}] * count
    if count > found:
        raise InputError(f"there are {found} GPUs for {count} workers; give local:{found}, or device='cpu'")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(found)))).split(",")
    return [{"resources": {"GPU": 1}, "env": {"CUDA_VISIBLE_DEVICES": name}} for name in visible[:count]]


@contextmanager
def _local_cluster(workers: list[dict[str, Any]]) -> Iterator[distributed.Client]:
    """The client of a scheduler in this process and of worker processes. It is not made the current client.

    workers: for each worker the options of its `distributed.Nanny`.

    Whoever can talk to a scheduler or to a worker can run code as the user who started it, and other users of
    the machine reach its loopback ports. So every connection is encrypted, and both ends must show a
    certificate that was made for this run. The private key stays in memory, and in files of a folder that
    only this user can open for as long as it takes to load it. The HTTP servers, which know no certificates,
    are stopped.

    Raises InputError where the package `cryptography` is not installed.
    """
    try:
        security = Security.temporary()
    except ImportError as error:
        raise InputError(
            "--scheduler local:N needs the package cryptography to keep other users of this machine out; "
            "pip install 'ooc-gemm[distributed]'"
        ) from error
    # The engine keeps to its memory limit; `distributed` must not spill or pause on top of that.
    config: dict[str, Any] = {
        f"distributed.worker.memory.{what}": False for what in ("target", "spill", "pause", "terminate")
    }
    config |= {f"distributed.{server}.http.routes": [] for server in ("scheduler", "worker")}
    config |= {"distributed.worker.multiprocessing-method": "spawn"}
    options: dict[str, Any] = {
        "host": "127.0.0.1",
        "protocol": "tls://",
        "security": security,
        "dashboard": False,
        "dashboard_address": "127.0.0.1:0",
        "preload": [__name__],
    }
    nannies = {
        index: {"cls": distributed.Nanny, "options": {**options, "silence_logs": logging.ERROR, **own}}
        for index, own in enumerate(workers)
    }
    scheduler = {"cls": distributed.Scheduler, "options": {**options, "port": 0}}
    # `distributed` imports modules from its temporary folder, also in this process. Its usual one, below
    # /tmp, may belong to another user.
    with (
        tempfile.TemporaryDirectory(prefix="ooc-gemm-", ignore_cleanup_errors=True) as folder,
        dask.config.set(config | {"temporary-directory": folder}),
        distributed.SpecCluster(nannies, scheduler, security=security, silence_logs=logging.ERROR) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


def dask_setup(server: Any) -> None:
    """`distributed` calls this when the scheduler or a worker of such a cluster starts."""
    server.http_server.stop()
    if isinstance(server, distributed.Worker):
        # Ctrl-C reaches workers as well; the client acts on it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


_GONE = (
    "the scheduler of the cluster is gone or does not answer; start another one and continue with resume=True"
)


def _cut(plan: Plan, workers: int) -> tuple[list[_Superblock], frozenset[Chunk]]:
    """Runs of consecutive blocks, which share panels, and all chunks of C."""
    blocks = list(plan.blocks())
    count, (down, across) = max(1, len(blocks) // (SUPERBLOCKS * workers)), plan.problem.c.grid
    found = []
    for number in range(ceil_div(len(blocks), count)):
        some = blocks[number * count : (number + 1) * count]
        chunks = frozenset(part.chunk for block in some for part in plan.parts(block))
        flops = float(sum(block.rows * block.cols for block in some))
        found.append(_Superblock(number, some, chunks, flops))
    return found, frozenset((i, j) for i in range(down) for j in range(across))


def _slim(plan: Plan) -> Plan:
    """Without what workers find out when they open the arrays, or plan again for their part."""
    p = plan.problem
    a, b, c = (replace(matrix, stored=None) for matrix in (p.a, p.b, p.c))
    return replace(plan, problem=replace(p, a=a, b=b, c=c), found=(), kept=(), done=frozenset(), advice=None)


def _portable(spec: Any) -> Any:
    """An input as a worker finds it. Raises InputError."""
    found = store.portable(spec)
    if found is None and next(store.secrets_of(spec), None) is not None:
        raise InputError(
            f"{store.describe(spec)} has credentials in its address or in its store, which are not sent to "
            "workers; give its address without them and set them in the environment of the workers"
        )
    if found is None:
        raise InputError(
            f"{store.describe(spec)} is not where workers find it; store it as a Zarr array first"
        )
    return found


def _some(items: "queue.SimpleQueue[Any]", seconds: float) -> Iterator[Any]:
    """All there are, after waiting for the first."""
    try:
        yield items.get(timeout=seconds) if seconds else items.get_nowait()
        while True:
            yield items.get_nowait()
    except queue.Empty:
        return


def _host(address: str) -> str:
    return address.rpartition(":")[0]
