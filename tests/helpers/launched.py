"""The processes of a cluster as users start them, which a test may kill one by one, and what kills workers
while a run goes on."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import dask
import distributed
import slow_disk

from ooc_gemm.storage.format import unfinished


def process(*arguments, log):
    """Start a module of Python as a process."""
    return subprocess.Popen([sys.executable, "-m", *arguments], stdout=log, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def launched(folder, monkeypatch, slow):
    """A scheduler and two workers: its address, and its process. slow: an expression with a plugin of
    `slow_disk`, which makes the workers slow. Processes that are started later find `tests/helpers`, too."""
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(slow_disk.__file__), prepend=os.pathsep)
    file, preload = folder / "scheduler.json", folder / "slow.py"
    preload.write_text(f"import slow_disk\nslow_disk.{slow}.setup(None)\n")
    here = ["--no-dashboard", "--scheduler-file", str(file)]
    more = ["--nthreads", "1", "--no-nanny", "--memory-limit", "1GiB", "--preload", str(preload)]
    with open(folder / "log", "wb") as log:
        started = [process("dask", "scheduler", "--host", "127.0.0.1", "--port", "0", *here, log=log)]
        started += [
            process("dask", "worker", *here, *more, "--local-directory", str(folder), log=log)
            for _ in range(2)
        ]
        try:
            while not file.exists():
                assert started[0].poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
            with distributed.Client(scheduler_file=str(file), set_as_default=False, timeout=200) as client:
                client.wait_for_workers(2, timeout=200)
                address = client.scheduler.address
            yield address, started[0]
        finally:
            for one in started:
                one.kill()
                one.wait()


def patient():
    """A context in which a `LocalCluster` waits for the worker that takes the place of a dead one.

    Else it gives up a place that is empty 15 seconds after a death: the next worker starts slowly, or it has
    been killed, too.
    """
    return dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})


class Killer:
    """Told of a run's progress, it kills one worker after the other: each when so much of the run is done."""

    def __init__(self, pids, fractions):
        self.left = list(zip(sorted(fractions), pids, strict=True))

    def __call__(self, fraction, plan, trace):
        if self.left and fraction >= self.left[0][0]:
            os.kill(self.left.pop(0)[1], signal.SIGKILL)


def chunks(c):
    """The number of lines of the journal of C that note a chunk."""
    log = c / unfinished.JOURNAL
    return log.read_bytes().count(b'"chunk"') if log.exists() else 0


def more_are_done(c, run):
    """Wait until a run has finished a chunk of C more. It must not end before."""
    before = chunks(c)
    while chunks(c) <= before:
        assert run.poll() is None, run.communicate()[0].decode()
        time.sleep(0.02)
