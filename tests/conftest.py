"""What several files of tests use: devices, stored arrays, the command line in this process."""

import collections
import contextlib
import functools
import gc
import hashlib
import io
import logging
import math
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import s3
import zarr

import examples
from ooc_gemm.cli import main
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.engine.ports import COMPUTE, UPLOAD
from ooc_gemm.run import prepare, rates_first, rates_learned
from ooc_gemm.storage.io import answers
from ooc_gemm.support import memory as limits

pytest_plugins = ["copying_threads", "left_over", "sent_chunks"]


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def ooc(*args):
    """`ooc-gemm ARGS` in this process, from the arguments to the exit status."""
    out, err = io.StringIO(), io.StringIO()
    answers.abandoned.clear()  # by a test before: the command line would end this process
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return Done(end.value.code, out.getvalue(), err.getvalue())


stored = tempfile.TemporaryDirectory(prefix="ooc-gemm-tests-")
"""Arrays that several tests of this process begin with, as zarr has stored them."""
seen = set()
MOST_KEPT = 1 << 21
"""Bytes of an array; a larger one is always stored by zarr."""


def make(path, values, **options):
    """Store `values` with zarr's options; the path. From the second time on the files of the same array are
    copied, which takes a tenth of the time."""
    shared = os.access(stored.name, os.W_OK, effective_ids=True)  # not by a test that has become nobody
    if os.path.lexists(path) or values.nbytes > MOST_KEPT or not shared:
        store(path, values, options)
        return str(path)
    described = f"{values.dtype.str} {values.shape} {sorted(options.items(), key=str)}"
    key = hashlib.sha256(described.encode() + values.tobytes()).hexdigest()
    place = Path(stored.name, key)
    if key in seen and not place.exists():
        store(place, values, options)
    if key in seen:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        copy(place, path)
    else:
        store(path, values, options)
        seen.add(key)
    return str(path)


def store(path, values, options):
    array = zarr.create_array(str(path), shape=values.shape, dtype=values.dtype, **options)
    array[...] = values


def copy(folder, to):
    """Copy what is stored; unlike shutil.copytree, with times of its own."""
    os.mkdir(to)
    for entry in os.scandir(folder):
        (copy if entry.is_dir() else shutil.copyfile)(entry.path, os.path.join(to, entry.name))


class Recording(CPU):
    """Computes on the CPU, and checks and logs the order it is given work in, as a device with real streams
    would need it: all that is known of another stream is what has been waited for."""

    name = "recording"

    def open(self, plan, operation, trace):
        session = RecordingSession(self, plan, operation, trace)
        self.log = session.log
        return session


class RecordingSession(CPUSession):
    """A run on the device `recording`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.log = []
        self.marks = {}
        self.used = {}  # panel buffer → events recorded on COMPUTE after its last multiplication
        self.filled = {}  # panel buffer or block → uploads not yet waited for by COMPUTE
        self.waited = set()
        self.finished = {}  # block buffer → block that has been given all its work

    def upload(self, source, piece, buffer):
        kind = "c" if piece.operand == "c" else "panel"
        if kind == "panel" and buffer in self.used:
            assert self.used[buffer] & self.waited, (
                "a panel is overwritten before its multiplication is waited for"
            )
        self.filled[kind, buffer] = True
        self.log.append(("upload", kind, buffer))
        return super().upload(source, piece, buffer)

    def multiply(self, block, panel, pair, c, first):
        p = pair[1]
        assert not self.filled.get(("panel", p)), "a panel is used before its uploads are waited for"
        self.used[p] = set()
        self.finished.pop(c, None)
        self.log.append(("multiply", p, c, first))
        super().multiply(block, panel, pair, c, first)

    def mirror(self, block, c):
        assert block.diagonal
        self.log.append(("mirror", c))
        super().mirror(block, c)

    def finish(self, block, c):
        self.finished[c] = block
        super().finish(block, c)

    def download(self, block, part, c, target):
        assert self.finished.get(c) == block, "a block is downloaded before it is finished"
        self.log.append(("download", block.index, part.chunk))
        return super().download(block, part, c, target)

    def record(self, stream, pair=None):
        event = super().record(stream, pair)
        self.marks[id(event)] = (stream, event, list(self.filled) if stream == UPLOAD else [])
        if stream == COMPUTE:
            for events in self.used.values():
                events.add(id(event))
        self.log.append(("record", stream))
        return event

    def wait(self, stream, event):
        recorded, _, filled = self.marks[id(event)]
        if stream == COMPUTE:
            assert recorded == UPLOAD
            for what in filled:
                self.filled.pop(what, None)
        else:
            assert (stream, recorded) == (UPLOAD, COMPUTE)
            self.waited.add(id(event))
        self.log.append(("wait", stream))
        super().wait(stream, event)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache."""
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Memory limits count as in a process that has done nothing yet, whatever tests ran before, nor is a plan
    remembered of them; and no run measures this machine, which it would say, but for tests that want it. No
    command line knows what that of another test has measured, unless a GPU needs the cache for kernels."""
    prepare._remembered.cache_clear()
    monkeypatch.setattr(limits, "resident_bytes", lambda: 0)
    monkeypatch.setattr(rates_first, "SHARE", 0.0)
    monkeypatch.setattr(rates_learned, "MULTIPLIED_SECONDS", math.inf)
    if gpu_missing():
        monkeypatch.setenv("OOC_GEMM_CACHE", tempfile.mkdtemp(dir=os.environ[SHARED_CACHE]))
    logging.disable(logging.NOTSET)  # an interrupted command line disables it for the rest of its process


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ooc-gemm")]


@pytest.fixture
def no_thread_left():
    """Fails a test that leaves a thread of ooc-gemm. The thread of lazy arrays ends with the last of them;
    one that an earlier test has left in a reference cycle ends first."""
    gc.collect()
    for thread in our_threads():
        thread.join(10)
    assert our_threads() == [], "left by an earlier test"
    yield
    assert our_threads() == []


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The port of a real S3 server, one for all tests of a process."""
    if why := s3.missing():
        pytest.skip(why)
    with s3.server(tmp_path_factory.mktemp("s3") / "server") as port:
        yield port


@pytest.fixture
def proxy(server, monkeypatch, tmp_path, no_thread_left):
    """What the environment leads to, and nothing else does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answers, "abandoned", threading.Event())  # which would end this process
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with s3.Proxy(server) as found:
        for name, value in s3.environment(found.port).items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
def shelf(proxy, request):
    """Where nothing is yet."""
    return f"s3://{s3.BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}"


FAST = "not slow"
"""What `make test` says of the marks of the tests that it runs."""


SHARED_CACHE = "TESTS_CACHE"
"""Variable of the environment with the cache folder that all processes of tests share, for its kernels. Those
of single tests are in it."""


def pytest_configure(config):
    # With it, Python before 3.11.9 may hang where threads are started (python/cpython#106883).
    os.environ.setdefault("DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED", "False")
    if not hasattr(config, "workerinput"):  # the first process; the others get its environment
        os.environ["OOC_GEMM_CACHE"] = os.environ[SHARED_CACHE] = tempfile.mkdtemp(prefix="ooc-gemm-cache-")
    examples.share = 0.1 if config.getoption("markexpr") == FAST else 1.0


gc.disable()


def pytest_collection_finish():
    """What has been imported and collected stays: searching it for garbage takes 5 % of the time."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config):
    stored.cleanup()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[SHARED_CACHE], ignore_errors=True)


CASES = 2
"""Of a test with more cases `make test` runs so many, the first and the last among them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the other cases as slow: each is quick, but they are three quarters of all tests and find their
    mistakes in `make test-all`. Puts tests that share an object store first."""
    cases = collections.defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("gpu")):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        last = len(found) - 1
        kept = {round(i * last / (CASES - 1)) for i in range(CASES)} if last >= CASES else range(last + 1)
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.slow)
    # Processes begin with the tests next to each other: those of the object store with one, which starts it.
    items.sort(key=lambda item: "server" not in getattr(item, "fixturenames", ()))


def pytest_runtest_setup(item):
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) > 1
    if beside and item.get_closest_marker("alone") and not gpu_missing():
        pytest.skip("it fills or counts all memory of the GPU; run it alone, with -n 0 -m alone")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One process more than this one may use cores, as tests also wait for disks and for other processes; one
    where there is a GPU, whose memory some tests fill."""
    return len(os.sched_getaffinity(0)) + 1 if gpu_missing() else 1


def pytest_terminal_summary(terminalreporter):
    """Tell why tests were skipped, in a line for each reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(str(report.longrepr[-1]).removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@functools.cache
def gpu_missing(count=1):
    """Why there are fewer than so many GPUs; None where there are as many."""
    try:
        import cupy

        there = cupy.cuda.runtime.getDeviceCount()
        return None if there >= count else f"there are no {count} GPUs here" if there else "there is no GPU"
    except Exception as error:
        return f"there is no GPU here: {error}"


@pytest.fixture(params=["cpu", "recording", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """What `device=` takes."""
    if request.param == "cuda" and (why := gpu_missing()):
        pytest.skip(why)
    return Recording() if request.param == "recording" else request.param


@pytest.fixture(params=["cpu", "gpu"])
def cpu_or_emulated_gpu(request, monkeypatch):
    """What `device=` takes: the CPU, and a GPU that stands on the CPU."""
    import cupy_on_cpu

    from ooc_gemm.devices.cuda.device import CUDA

    if request.param == "cpu":
        return request.param
    cupy_on_cpu.install(monkeypatch, "90")
    return CUDA()
