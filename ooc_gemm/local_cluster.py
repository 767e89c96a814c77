"""A `distributed` cluster on this machine that lasts for one run (`--scheduler local:N`).

Whoever can talk to a scheduler or to a worker can run code as the user who started it. Other users of the
machine reach its loopback ports, so every connection is encrypted, and both ends must show a certificate that
was made for this run. The private key stays in memory, and in files of a folder that only this user can open,
for as long as it takes to load it. The HTTP servers (dashboard), which know no certificates, are stopped.
"""

import logging
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import distributed
from distributed.security import Security

from .errors import InputError


@contextmanager
def local_cluster(workers: list[dict[str, Any]]) -> Iterator[distributed.Client]:
    """The client of a scheduler in this process and of worker processes. It is not made the current client.

    workers: for each worker the options of its `distributed.Nanny`.

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
