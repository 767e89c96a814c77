"""Provides a cluster for one command: one that is running already, or worker processes on this machine."""

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import dask
import distributed
from distributed.security import Security

from ..devices.cpu.device import CPU
from ..run.elsewhere import computing
from ..support.errors import BudgetError, DeviceError, InputError
from ..support.intervals import ceil_div
from ..support.memory import STEP, baseline_bytes, memory_limit_of
from ..support.shared import in_thread
from . import workers as alike
from .elsewhere import CLIENT_BYTES, OnWorkers
from .internals import LoopRunner

GUARD = "; they import the script that is running, so it has to use them below if __name__ == '__main__':"
"""What programs are told where worker processes on this machine cannot be started."""

LONGEST_START = 20.0
"""The most seconds that a run that was interrupted waits for processes that are being started."""


@contextmanager
def on(
    scheduler: distributed.Client | str | None = None,
    *,
    memory_limit: str | int | None = None,
    device: str = "auto",
) -> Iterator[None]:
    """Compute products and statistics of this thread on the workers of a cluster.

    `with ooc_gemm.dask.on(client): ooc_gemm.cov("x.zarr", "c.zarr")`. This concerns `multiply`, `gram` and
    all statistics, which keep their arguments; what workers cannot compute is refused. Inputs are arrays that
    all workers can open, and outputs are paths in a folder that they share with this process, as of
    `ooc_gemm.dask.multiply`: no result is returned in memory. Peaks of results are those of the worker that
    held most.

    Parameters
    ----------
    scheduler : distributed.Client or str, optional
        Client of the cluster, the address of its scheduler, or `"local:N"` for N processes on this machine
        that end with this context. By default the current client. The processes of `"local:N"` import the
        script that is running, so it uses this below `if __name__ == "__main__":`.
    memory_limit : str or int, optional
        Most host memory that each worker may hold resident, in bytes or as `"8GiB"`; of `"local:N"` what all
        processes may hold together. By default what a worker may hold before `distributed` begins to spill,
        and 60 % of what this process may use.
    device : str, default "auto"
        Name of the device that each worker opens, as of `ooc_gemm.multiply`.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    InputError, DeviceError
        There is no such cluster, or it does not answer.
    """
    device = alike.name_of_device(device)
    if not isinstance(scheduler, str):
        with computing(OnWorkers(scheduler, memory_limit, device)):
            yield
        return
    with (
        connected(scheduler, memory_limit, device, GUARD) as (client, limit),
        computing(OnWorkers(client, limit, device, scheduler.startswith("local:"))),
    ):
        yield


@contextmanager
def connected(
    scheduler: str, memory_limit: str | int | None, device: str, also: str = ""
) -> Iterator[tuple[distributed.Client, str | int | None]]:
    """Yield the client of the cluster at an address, or of N worker processes on this machine (`local:N`)
    that end with this context, and the memory limit of each worker; None is its default.

    The processes of this machine share the cores, and the memory limit less what this process holds. also:
    what the message adds where they cannot be started. Raises InputError, DeviceError, and BudgetError with
    the smallest limit that would do for all workers together.
    """
    kind, _, number = scheduler.partition(":")
    if kind != "local":
        try:
            client = distributed.Client(scheduler, timeout=alike.TIMEOUT / 2, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"no scheduler answers at {scheduler} ({error}); check the address") from error
        with _silent(), client:
            yield client, memory_limit
        return
    if not number.isdecimal() or int(number) < 1:
        raise InputError(f"{scheduler!r} is not a cluster; give the address of a scheduler, or local:N")
    count = int(number)
    limit = memory_limit_of(memory_limit)
    own, threads = baseline_bytes(CLIENT_BYTES), CPU().threads
    each = max(STEP, (limit - own) // count)
    usual = {"nthreads": max(1, threads // count), "memory_limit": each}
    with _local_cluster([{**usual, **own_gpu} for own_gpu in _gpus(count, device)], also) as client:
        client.wait_for_workers(count, timeout=alike.TIMEOUT)
        try:
            yield client, None
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


@contextmanager
def _silent() -> Iterator[None]:
    """Keep loggers silent that tell of a scheduler that is gone with tracebacks. Messages of the run say it
    in a sentence."""
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client", "asyncio")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _gpus(count: int, device: str) -> list[dict[str, Any]]:
    """Return for each worker on this machine the settings that give it a GPU of its own, where it is to have
    one."""
    found = 0
    if device != "cpu":
        from ..devices.cuda.gpus import count as gpu_count

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
def _local_cluster(workers: list[dict[str, Any]], also: str = "") -> Iterator[distributed.Client]:
    """The client of a scheduler in this process and of worker processes. It is not made the current client.

    workers: for each worker the options of its `distributed.Nanny`. also: what the message adds where they
    cannot be started.

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
    # Python before 3.11.9 may hang where the profiler looks at threads while the engine starts some
    # (python/cpython#106883), and nobody sees what it finds.
    config |= {"distributed.worker.profile.enabled": False}
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
        index: {"cls": distributed.Nanny, "options": {**options, "silence_logs": logging.CRITICAL, **own}}
        for index, own in enumerate(workers)
    }
    scheduler = {"cls": distributed.Scheduler, "options": {**options, "port": 0}}
    # `distributed` imports modules from its temporary folder, also in this process. Its usual one, below
    # /tmp, may belong to another user.
    with (
        tempfile.TemporaryDirectory(prefix="ooc-gemm-", ignore_cleanup_errors=True) as folder,
        dask.config.set(config | {"temporary-directory": folder}),
        _loop() as loop,
        _begun(nannies, scheduler, security, loop, also) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@contextmanager
def _loop() -> Iterator[Any]:
    """Run an event loop on a thread that blocks SIGINT, as processes that are started there do: Ctrl-C
    reaches them, too, and the client acts on it."""
    resource_tracker.ensure_running()  # by the first process that is started, which would unblock SIGINT
    runner = LoopRunner()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        runner.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield runner.loop
    finally:
        runner.stop()


def _begun(workers: Any, scheduler: Any, security: Security, loop: Any, also: str) -> distributed.SpecCluster:
    """Start the processes. also: what a message adds. Ctrl-C waits until they have started, and ends them:
    those that are being started would say at length that what they need is gone. Raises DeviceError where
    that fails."""
    make = partial(
        distributed.SpecCluster, workers, scheduler, security=security, loop=loop,
        silence_logs=logging.CRITICAL, shutdown_on_close=False,
    )  # fmt: skip
    starting = in_thread("cluster", make)
    try:
        return starting.result()
    except (RuntimeError, OSError) as error:
        raise DeviceError(
            f"the worker processes of local:{len(workers)} cannot be started ({error}); give fewer, or leave "
            f"out the scheduler{also}"
        ) from error
    except BaseException as error:
        if not isinstance(error, Exception):
            with suppress(Exception):
                starting.result(LONGEST_START).close()
        raise


def dask_setup(server: Any) -> None:
    """`distributed` calls this when the scheduler or a worker of such a cluster starts."""
    server.http_server.stop()
