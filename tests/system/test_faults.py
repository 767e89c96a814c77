"""Disks that are full or fail, chunks that rot, memory that is not there, threads that die, signals, stores
that hang: each ends with its exit status and one sentence. After every test here no thread, open file or
temporary file may be left, and BLAS has its threads back."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make, ooc
from outcome import assert_one_sentence
from sessions import device_with
from threadpoolctl import threadpool_info
from zarr.codecs import Crc32cCodec, GzipCodec, ZstdCodec
from zarr.codecs.numcodecs import Fletcher32
from zarr.storage import MemoryStore, WrapperStore

import ooc_gemm
from ooc_gemm.cli import entry as cli
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.engine.ports import Failure
from ooc_gemm.run import executor, generate
from ooc_gemm.storage.io import answers, background, files, listing
from ooc_gemm.storage.read import compressed, inputs
from ooc_gemm.storage.read.compressed import CompressedSource
from ooc_gemm.storage.read.raw import RawSource
from ooc_gemm.storage.write import publication, staging_folder, target
from ooc_gemm.support.errors import OutOfMemoryError

MiB = 1 << 20
RNG = np.random.default_rng(5)
A, B = RNG.integers(-9, 9, (300, 400)).astype("f4"), RNG.integers(-9, 9, (400, 260)).astype("f4")
C = A.astype("f8") @ B  # every sum is exact
OLD = RNG.integers(-9, 9, C.shape).astype("f4")


@pytest.fixture(autouse=True)
def here(request, tmp_path, monkeypatch, no_thread_left):
    """A folder with a, b; and a look at what is left in the end."""
    monkeypatch.chdir(tmp_path)
    make("a", A, chunks=(50, 50), compressors=None)
    make("b", B, chunks=(50, 50), compressors=None)
    # A driver opens what it wants, when it wants.
    folder = str(tmp_path) if request.node.get_closest_marker("gpu") else ""
    before, blas = open_files(folder), threadpool_info()
    yield tmp_path
    assert set(open_files(folder)) <= set(before)  # what earlier tests have left may be closed meanwhile
    assert threadpool_info() == blas
    assert left(tmp_path) == []


def open_files(folder):
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append((number, os.readlink(f"/proc/self/fd/{number}")))
    return sorted(entry for entry in found if entry[1].startswith(folder) and not entry[1].endswith("/fd"))


def left(folder):
    """Temporary files and folders, and chunks that wait for a run that will never continue."""
    names = [path for path in Path(folder).rglob("*") if ".tmp" in path.name or ".ooc-gemm-" in path.name]
    pending = Path(folder).rglob("*" + staging_folder.PENDING)
    return names + [path for path in pending if not (path.parents[2] / "ooc-gemm.journal").exists()]


def failed(*args, words, code=1):
    """`multiply a b c ARGS` fails, and leaves no result."""
    done = ooc("multiply", "a", "b", *(args if args and not args[0].startswith("-") else ("c", *args)))
    assert (done.code, done.out) == (code, "")
    assert_one_sentence(done.err, *words)
    assert not Path("c/zarr.json").exists()


def many_blocks(a="a", b="b", **options):
    """A limit that makes several blocks and a short ring."""
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.plan(a, b, memory_limit=1, device="cpu", **options)
    limit = small.value.minimum_memory_limit + 100_000
    plan = ooc_gemm.plan(a, b, memory_limit=limit, device="cpu", **options)
    assert plan.block_count > 4
    return limit


def script(text, **options):
    """A Python process of its own."""
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=200, **options
    )


# ------------------------------------------------------------------------------------------------- disks


@pytest.fixture
def disk(here):
    """A disk of 200 KB."""
    Path("disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", "disk"]
    if shutil.which("mount") is None or (done := subprocess.run(mount, capture_output=True)).returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield "disk"
    finally:
        subprocess.run(["umount", "-l", here / "disk"], check=True)


STORED = {
    "raw": [],
    "zstd": ["--compressor", "zstd"],
    "shards": ["--chunks", "30,26", "--shards", "60,52"],
}


@pytest.mark.parametrize("stored", STORED)
def test_a_full_disk(disk, stored):
    args = "multiply", "a", "b", "disk/c", "-d", "cpu", "--chunks", "60,52", *STORED[stored]
    args = args if stored != "shards" else (*args[:6], *STORED[stored])
    if stored == "zstd":
        Path("disk/other").write_bytes(bytes(100_000))
    done = ooc(*args)
    assert (done.code, done.out) == (1, "")
    assert_one_sentence(
        done.err, "disk/c: chunk c/", "No space left on device", "make room there", "--resume"
    )
    assert not Path("disk/c/zarr.json").exists()
    subprocess.run(["mount", "-o", "remount,size=4m", "disk"], check=True)
    assert ooc(*args, "--resume").code == 0
    assert np.array_equal(zarr.open_array("disk/c", mode="r")[:], C)
    assert left("disk") == []


def test_random_on_a_full_disk_leaves_nothing(disk):
    """Nobody could continue it."""
    done = ooc("random", "disk/r", "--shape", "2000,2000", "--chunks", "60,52")
    assert (done.code, done.out) == (1, "")
    assert_one_sentence(done.err, "disk/r: chunk c/", "No space left on device")
    assert not Path("disk/r").exists()
    assert left("disk") == []


def test_random_that_fails_leaves_the_array_that_it_was_to_replace(here, monkeypatch):
    make("old", OLD[:20, :20], chunks=(20, 20))
    drawn = []

    def draw(*args):
        drawn.append(args)
        if len(drawn) > 3:
            raise OSError(errno.EIO, "Input/output error")
        return np.zeros((10, 10), "f4")

    monkeypatch.setattr(generate, "_draw", draw)
    done = ooc("random", "old", "--shape", "200,200", "--chunks", "10,10", "--force")
    assert done.code == 1
    assert np.array_equal(zarr.open_array("old", mode="r")[:], OLD[:20, :20])
    assert sorted(entry.name for entry in Path("old").iterdir()) == ["c", "zarr.json"]


def test_a_disk_that_is_full_at_once(disk):
    make("disk/old", OLD[:20, :20], chunks=(20, 20))
    make("x", A[:20, :20], chunks=(20, 20))
    with contextlib.suppress(OSError), open("disk/other", "wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    failed("disk/c", "-d", "cpu", words=["disk/c cannot be created", "No space left"], code=2)
    done = ooc("multiply", "x", "x", "disk/old", "--beta", "1", "-d", "cpu")
    assert done.code == 2
    assert_one_sentence(done.err, "disk/old cannot be updated: No space left", "it is as it was")
    assert np.array_equal(zarr.open_array("disk/old", mode="r")[:], OLD[:20, :20])
    assert not Path("disk/old/ooc-gemm.journal").exists()
    done = ooc("multiply", "a", "b", "c", "-d", "cpu", "--trace", "disk/trace.json")
    assert done.code == 0, "the result is finished"
    assert "the trace disk/trace.json cannot be written: No space left" in done.err
    assert "the result itself is finished" in done.err
    assert not Path("disk/trace.json").exists()
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C)


def test_a_limit_on_files(here):
    text = """
import resource
from ooc_gemm.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
main(["multiply", "a", "b", "c", "-d", "cpu", "--chunks", "60,52"])
"""
    done = script(text)
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_sentence(done.stderr, "c: chunk c/", "cannot be written: File too large", "--resume")
    assert not Path("c/zarr.json").exists()


@pytest.mark.parametrize("call", ["write", "replace", "fsync"])
def test_a_disk_that_fails_on_writing(here, monkeypatch, call):
    calls, real = iter(range(1000)), getattr(os, call)

    def fail(*args, **options):
        if next(calls) < (3 if call == "fsync" else 5):  # the journal's head must be on the disk
            return real(*args, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(background, "THERE", False)
        patched.setattr(listing, "_library", None)
        patched.setattr(publication, "SAVED_SECONDS", 0)
        patched.setattr(os, call, fail)
        failed(
            "-d",
            "cpu",
            "--chunks",
            "30,26",
            words=["Error: c", "Input/output error", "check its disk", "--resume"],
        )
    assert ooc("multiply", "a", "b", "c", "-d", "cpu", "--chunks", "30,26", "--resume").code == 0
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C)


@pytest.mark.parametrize("options", [{"compressors": None}, {}], ids=["raw", "zstd"])
def test_a_disk_that_fails_on_reading(here, monkeypatch, options):
    make("a", A, chunks=(50, 50), overwrite=True, **options)
    calls, real = iter(range(1000)), os.preadv

    def fail(*args):
        if next(calls) < 7:
            return real(*args)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(background, "THERE", False)
        patched.setattr(os, "preadv", fail)
        failed("-d", "cpu", words=[": chunk c/", "cannot be read", "Input/output error", "write it again"])


@pytest.mark.slow
def test_a_folder_without_permission():
    """A process that nobody owns: the interpreter may be root's, so everything is imported before."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    folder = tempfile.mkdtemp()
    try:
        for name in "ab":
            shutil.copytree(name, f"{folder}/{name}")
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/mine")
        os.chown(f"{folder}/mine", 65534, 65534)
        os.chmod(f"{folder}/b/c/1/1", 0)
        text = """
import os, sys
from ooc_gemm.cli import main
def run(*args):
    try:
        main(args)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
run("multiply", "a", "a", "mine/warm", "--transpose-b", "-d", "cpu")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
run("multiply", "a", "a", "c", "--transpose-b", "-d", "cpu")
run("multiply", "a", "b", "mine/c", "-d", "cpu")
"""
        done = script(text, cwd=folder)
        first, second, third, fourth, fifth = done.stderr.splitlines()
        assert (first, third, fifth) == ("0", "2", "1")
        assert "c cannot be created" in second
        assert "not a writable folder" in second
        assert "b: chunk c/1/1 cannot be read: Permission denied" in fourth
        assert not os.path.exists(f"{folder}/c")
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------------------------- chunks

CHECKED = {
    "crc32c": {"compressors": [Crc32cCodec()]},
    "zstd and crc32c": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "fletcher32": {"compressors": Fletcher32},
    "v2 fletcher32": {"zarr_format": 2, "filters": [numcodecs.Fletcher32()], "compressors": None},
    "v2 crc32c": {"zarr_format": 2, "compressors": numcodecs.CRC32C()},
    "shards of crc32c": {"chunks": (25, 25), "shards": (50, 50), "compressors": [Crc32cCodec()]},
    "zstd": {"compressors": [ZstdCodec(checksum=True)]},
    "gzip": {"compressors": [GzipCodec()]},
}


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
@pytest.mark.parametrize("layout", CHECKED)
def test_a_flipped_bit_under_a_checksum(here, layout):
    """Wherever it is, the chunk is refused, or it did not matter (as in the date in gzip's head)."""
    options = {"chunks": (50, 50), **CHECKED[layout]}
    if layout == "fletcher32":
        options["compressors"] = [Fletcher32()]  # which warns
    key = "1.1" if options.get("zarr_format") == 2 else "c/1/1"
    chunk = Path(make("bad", A, **options), key)
    assert not isinstance(inputs.open_input("bad").source, RawSource)
    held = chunk.read_bytes()
    places = np.linspace(0, len(held) - 1, 6).astype(int)
    refused = 0
    for place in places:
        rotten = bytearray(held)
        rotten[place] ^= 1 << int(place) % 8
        chunk.write_bytes(rotten)
        done = ooc("multiply", "bad", "b", "c", "-f", "-d", "cpu")
        if done.code == 0:
            assert np.array_equal(zarr.open_array("c", mode="r")[:], C), place
        else:
            assert done.code == 1
            assert_one_sentence(done.err, f"bad: chunk {key} cannot be read or decoded")
            assert not Path("c/zarr.json").exists()
            refused += 1
    assert refused >= (len(places) if layout not in ("zstd", "gzip") else len(places) - 2)
    chunk.write_bytes(held)
    assert ooc("multiply", "bad", "b", "c", "-f", "-d", "cpu").code == 0
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C)


def test_a_flipped_bit_in_the_index_of_a_shard(here):
    chunk = Path(make("bad", A, chunks=(25, 25), shards=(50, 50), compressors=None), "c/1/1")
    assert isinstance(inputs.open_input("bad").source, RawSource)
    held = chunk.read_bytes()
    for place in range(len(held) - 4 * 16 - 4, len(held), 11):
        rotten = bytearray(held)
        rotten[place] ^= 1
        chunk.write_bytes(rotten)
        done = ooc("multiply", "bad", "b", "c", "-f", "-d", "cpu")
        assert done.code == 1
        assert_one_sentence(done.err, "bad: chunk c/1/1", "checksum of its index", "write it again")


VANISHING = {
    "raw": {"compressors": None},
    "zstd": {"compressors": [ZstdCodec()]},
    "crc32c": {"compressors": [Crc32cCodec()]},
    "shards": {"chunks": (25, 25), "shards": (50, 50), "compressors": None},
}


@pytest.mark.parametrize("fault", ["vanishes", "is cut off"])
@pytest.mark.parametrize("layout", VANISHING)
def test_a_chunk_that_changes_while_running(here, monkeypatch, layout, fault):
    """A chunk that is missing from the start counts as the fill value. One that was there does not."""
    chunk = Path(make("bad", A, **{"chunks": (50, 50), **VANISHING[layout]}), "c/1/1")
    run = executor.execute

    def spoil(*args, **options):
        chunk.unlink() if fault == "vanishes" else os.truncate(chunk, 60)
        return run(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(executor, "execute", spoil)
        done = ooc("multiply", "bad", "b", "c", "-d", "cpu")
    assert done.code == 1
    assert_one_sentence(done.err, "bad: chunk c/1/1", "put it back" if fault == "vanishes" else "again")


# ------------------------------------------------------------------------------------------------- threads


class Odd(BaseException):
    """Of a kind nobody expects."""


DYING = {
    "reader": (files, "read"),
    "decoding reader": (CompressedSource, "read"),
    "writer": (target.Target, "write"),
    "compute": (CPUSession, "_tile"),
    "uploading": (CPUSession, "upload"),
    "downloading": (CPUSession, "download"),
}


@pytest.mark.parametrize("error", [SystemExit(0), Odd("?"), MemoryError(), ValueError("odd")], ids=repr)
@pytest.mark.parametrize("thread", DYING)
def test_a_thread_that_dies(here, monkeypatch, thread, error):
    """While others wait for it, for slots, and for a block to be free."""
    monkeypatch.setattr(background, "THERE", False)
    if thread == "decoding reader":
        make("a", A, chunks=(50, 50), overwrite=True)
    limit = many_blocks(chunks=(50, 50))
    kind, name = DYING[thread]
    calls, real = iter(range(10_000)), getattr(kind, name)

    def die(*args):
        if next(calls) >= 5:
            raise error
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(kind, name, die)
        done = ooc("multiply", "a", "b", "c", "-d", "cpu", "-M", limit, "--chunks", "50,50")
    assert done.code == 1
    said = {MemoryError: "no more memory", ValueError: "ValueError: odd"}
    died = f"thread died of {error!r}"
    assert_one_sentence(done.err, said.get(type(error), died))
    assert not Path("c/zarr.json").exists()
    done = ooc("multiply", "a", "b", "c", "-d", "cpu", "-M", limit, "--chunks", "50,50", "--resume")
    assert done.code == 0
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C)


@pytest.mark.parametrize("command", ["random", "verify", "rechunk"])
def test_a_thread_that_dies_elsewhere(here, monkeypatch, command):
    def die(*args):
        raise SystemExit(0)

    args = {
        "random": ["random", "r", "--shape", "90,90", "--chunks", "30,30"],
        "verify": ["verify", "a", "b", "c"],
    }
    assert ooc("multiply", "a", "b", "c", "-d", "cpu").code == 0
    with monkeypatch.context() as patched:
        if command == "rechunk":
            from ooc_gemm.run.rechunk import each

            with pytest.raises(ooc_gemm.Error, match=r"thread died of SystemExit\(0\)"), pool(2) as threads:
                each(threads, [b"", b""], range(9), die)
            return
        patched.setattr(target.Target if command == "random" else RawSource, "write", die, raising=False)
        patched.setattr(RawSource, "read", die)
        done = ooc(*args[command])
    assert done.code == 1
    assert_one_sentence(done.err, "thread died of SystemExit(0)")


def pool(count):
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(count)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Odd(), ValueError("odd")], ids=repr)
def test_a_conductor_that_fails_while_writers_wait(here, monkeypatch, error):
    write = target.Target.write

    def slow(*args):
        time.sleep(0.05)
        return write(*args)

    def fail(fraction, plan, trace):
        if fraction > 0.3:
            raise error

    monkeypatch.setattr(target.Target, "write", slow)
    limit = many_blocks(chunks=(25, 25))
    with pytest.raises(type(error)):
        ooc_gemm.multiply("a", "b", "c", memory_limit=limit, device="cpu", chunks=(25, 25), progress=fail)
    assert not Path("c/zarr.json").exists()


def test_many_failing_runs_leave_nothing(here, monkeypatch):
    os.truncate("a/c/5/7", 17)
    before = threading.active_count()
    for _ in range(20):
        with pytest.raises(ooc_gemm.StoreError, match="c/5/7 holds 17 bytes"):
            ooc_gemm.multiply("a", "b", "c", device="cpu", force=True)
    assert threading.active_count() < before + 20  # zarr's own pool


# ------------------------------------------------------------------------------------------------- signals


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Arrays that take some seconds to multiply."""
    folder = tmp_path_factory.mktemp("big")
    for name, seed in (("a", 1), ("b", 2)):
        ooc_gemm.random(str(folder / name), (4000, 4000), chunks=(500, 500), seed=seed)
    return folder


SIGNALS = {
    "SIGINT": ([signal.SIGINT], 130, "Interrupted"),
    "SIGTERM": ([signal.SIGTERM], 143, "Terminated"),
    "SIGINT twice": ([signal.SIGINT] * 2, 130, "Interrupted"),
    "SIGTERM and more": ([signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGTERM], 143, "Terminated"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sent", SIGNALS)
def test_signals(big, here, sent):
    numbers, code, word = SIGNALS[sent]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ooc_gemm.cli",
            "multiply",
            big / "a",
            big / "b",
            "c",
            "-d",
            "cpu",
            "-M",
            "160MiB",
        ],
        stderr=subprocess.PIPE,
        text=True,
        # As in a terminal: what a shell starts in the background, perhaps these tests, ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(here.glob("c/c/*/*")):
        assert process.poll() is None
        time.sleep(0.01)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.02)
    _, said = process.communicate(timeout=200)
    assert process.returncode == code
    said = [x for x in said.splitlines() if x and not x.startswith("Note: rates were measured")]
    assert len(said) == 1
    assert said[0].startswith(f"{word}: ")
    assert not Path("c/zarr.json").exists()


@pytest.mark.slow
def test_sigterm_while_operands_are_copied(here):
    """The hidden folder goes too."""
    ooc_gemm.random("wide", (4000, 4000), chunks=(2, 4000), seed=1)
    text = """
import sys
from ooc_gemm.cli import main
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.planning.machine import Rates
from ooc_gemm.run import rates, rates_first
CPU.rates = lambda self, arithmetic: Rates(1e15, 1e6, 1e9, 1e9, 1e9, shared=False)
rates._known, rates_first.SHARE = lambda usual, *others: usual, 0.0  # not those of files in the page cache
main(["multiply", "wide", "wide", "c", "-d", "cpu", "-M", "180MiB", "--rechunk"])
"""
    process = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)
    while not list(here.glob(".ooc-gemm-*/*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 143
    assert "Terminated: " in said


# ------------------------------------------------------------------------------------------------- memory


class Small(CPU):
    """Has memory of its own, of which somebody has taken the most when the plan is carried out."""

    name = "small"

    def __init__(self, times, at=0, limit=None):
        super().__init__()
        self.times, self.at, self.limit, self.plans = times, at, limit, []

    def limits(self, arithmetic, device_memory_limit):
        found = super().limits(arithmetic, device_memory_limit)
        return replace(found, device=device_memory_limit or 64 * MiB, workspace=0)

    def open(self, plan, operation, trace):
        self.plans.append(plan)
        self.calls = 0
        self.fail_at(0)
        return SmallSession(self, plan, operation, trace)

    def fail_at(self, call):
        if call == self.at and len(self.plans) <= self.times:
            raise MemoryError("small is full")

    def explain(self, error):
        if isinstance(error, MemoryError):
            limit = self.limit or self.plans[-1].device_bytes // 2
            return Failure(OutOfMemoryError("small is full; give it less"), limit)
        return None


class SmallSession(CPUSession):
    """A run on the device `small`."""

    def __init__(self, device, *args):
        self.device = device
        super().__init__(device, *args)

    def multiply(self, *args, **options):
        self.device.calls += 1
        self.device.fail_at(self.device.calls)
        super().multiply(*args, **options)


@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_device_that_runs_out_of_memory_gets_a_smaller_plan(here, at, beta):
    device, notes, options = Small(1, at), [], {} if beta else {"chunks": (50, 50)}
    if beta:
        make("c", OLD, chunks=(50, 50), compressors=None)
    result = ooc_gemm.multiply(
        "a", "b", "c", device=device, beta=beta, notice=notes.append, device_memory_limit=600_000, **options
    )
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C + beta * OLD)
    first, second = device.plans
    assert second.device_bytes <= first.device_bytes // 2 == second.budget.device
    assert result.plan == second
    assert [note for note in notes if "small is full" in note and str(second.budget.device) in note]


@pytest.mark.parametrize("at", [0, 1])
def test_a_smaller_plan_is_made_once(here, at):
    device, notes = Small(2, at), []
    with pytest.raises(ooc_gemm.DeviceError, match="small is full; give it less"):
        ooc_gemm.multiply("a", "b", "c", device=device, notice=notes.append, chunks=(50, 50))
    assert len(device.plans) == 2
    assert len([note for note in notes if "small is full" in note]) == 1
    assert Path("c").exists() == bool(at)


def test_a_smaller_plan_that_cannot_be(here):
    """The error is the device's: no limit was wrong."""
    for limit in (1, None):
        with pytest.raises(ooc_gemm.DeviceError, match="small is full"):
            ooc_gemm.multiply("a", "b", "c", device=Small(9, limit=limit))
    assert not Path("c").exists()


def test_no_smaller_plan_where_beta_would_come_in_twice(here):
    """A C without a journal, in memory: it is known to be begun, and that is all."""
    c = zarr.create_array(MemoryStore(), shape=C.shape, chunks=(50, 50), dtype="f4")
    c[...] = OLD
    device = Small(1, 5)
    with pytest.raises(ooc_gemm.DeviceError, match="small is full"):
        ooc_gemm.multiply("a", "b", c, device=device, beta=2, device_memory_limit=600_000)
    assert len(device.plans) == 1


def within(megabytes):
    """A product, in a process that is given so much more address space when it has imported everything."""
    text = f"""
import resource
import ooc_gemm.api, ooc_gemm.devices.cpu.device, ooc_gemm.storage.read.inputs, numpy as np
from ooc_gemm.cli import main
from ooc_gemm.run import rates_first
rates_first.SHARE = 0.0  # measuring says so
free = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (free + ({megabytes} << 20),) * 2)
main(["multiply", "wide", "tall", "c", "-d", "cpu", "-M", "4GiB"])
"""
    shutil.rmtree("c", ignore_errors=True)
    for name, shape in (("wide", (12000, 10)), ("tall", (10, 12000))):
        zarr.create_array(name, shape=shape, chunks=shape, dtype="f4", fill_value=1, overwrite=True)
    return script(text)


def test_a_host_without_memory(here):
    """Address space runs out before the limit that was given."""
    done = within(300)
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_sentence(done.stderr, "no more memory", "smaller --memory-limit")
    assert not Path("c/zarr.json").exists()


@pytest.mark.slow
def test_whatever_the_address_space_the_process_ends_in_order(here):
    """BLAS ends the process where it finds no memory, and a thread that starts without memory hangs."""
    codes = set()
    for megabytes in range(100, 1500, 50):
        done = within(megabytes)
        codes.add(done.returncode)
        assert done.returncode in (0, 1), (megabytes, done)
        if done.returncode:
            assert_one_sentence(done.stderr, "no more memory", "smaller --memory-limit")
    assert codes == {0, 1}


@pytest.mark.parametrize("kilobytes", [100_000, 300_000, 800_000])
def test_too_little_address_space_is_said_before_blas_ends_the_process(here, kilobytes):
    command = f"ulimit -v {kilobytes}; exec {sys.executable} -m ooc_gemm.cli multiply a b c -d cpu"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_sentence(done.stderr, f"limited to {kilobytes >> 10} MiB", "ulimit -v", "--memory-limit")
    assert not Path("c").exists()


@pytest.mark.slow
def test_enough_address_space(here):
    least = (cli.ADDRESS_SPACE + cli.FOR_EACH_CORE * len(os.sched_getaffinity(0))) >> 10
    command = f"ulimit -v {least}; exec {sys.executable} -m ooc_gemm.cli multiply a b c -d cpu -M 200MiB"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C)


# ------------------------------------------------------------------------------------------------- far away


class Hanging(WrapperStore):
    """Answers no question about chunks of some kind, or one chunk."""

    hangs, keys, breaks = "", "c/", None

    def with_read_only(self, read_only=False):
        return self

    async def get(self, key, prototype, byte_range=None):
        if self.hangs == "get" and key.startswith(self.keys):
            await asyncio.Event().wait()
        if key == self.breaks:
            await asyncio.sleep(0.5)
            raise OSError("unplugged")
        return await super().get(key, prototype, byte_range)

    async def set(self, key, value):
        if self.hangs == "set" and key.startswith(self.keys):
            await asyncio.Event().wait()
        await super().set(key, value)


def hanging(values, hangs):
    made = zarr.create_array(Hanging(MemoryStore()), shape=values.shape, chunks=(50, 50), dtype="f4")
    made[...] = values
    made.store_path.store.hangs = hangs
    return made


@pytest.fixture
def abandons(monkeypatch):
    """What the test leaves hanging is forgotten after it: the command line would end the process."""
    monkeypatch.setattr(answers, "abandoned", threading.Event())


def test_a_store_that_hangs(here, monkeypatch, abandons):
    monkeypatch.setattr(answers, "TIMEOUT", 0.3)
    a, c = hanging(A, "get"), hanging(OLD, "set")
    with pytest.raises(
        ooc_gemm.StoreError, match=r"chunk c/\d/\d cannot be fetched \(no answer within 0.\d+ s\)"
    ):
        ooc_gemm.multiply(a, "b", "c", device="cpu")
    with pytest.raises(
        ooc_gemm.StoreError, match=r"chunk c/\d/\d cannot be written: no answer within 0.\d+ s"
    ):
        ooc_gemm.multiply("a", "b", c, device="cpu", force=True)
    with pytest.raises(ooc_gemm.StoreError, match=r"chunk c/\d/\d cannot be fetched"):
        ooc_gemm.verify("a", "b", hanging(C, "get"))
    a.store_path.store.hangs = ""
    monkeypatch.setattr(answers, "TIMEOUT", 60)
    ooc_gemm.multiply(a, "b", "c", device="cpu", force=True)
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C)


def test_nobody_waits_for_a_store_that_hangs_once_the_run_has_failed(here, monkeypatch, abandons):
    monkeypatch.setattr(answers, "TIMEOUT", 3600)  # longer than any test may take
    a = hanging(A, "get")
    a.store_path.store.keys, a.store_path.store.breaks = "c/0/1", "c/0/0"
    with pytest.raises(ooc_gemm.StoreError, match=r"chunk c/0/0 .*unplugged"):
        ooc_gemm.multiply(a, "b", "c", device="cpu")


BLOCKING = """
import os, sys, time
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from ooc_gemm.storage.io import answers
from ooc_gemm.cli import main

class Slow(MemoryFileSystem):
    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("slow://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        if "/c/" in path:
            os.write(1, b"asked\\n")
            time.sleep(1000)
        return super().cat_file(path, start, end, **options)

fsspec.register_implementation("slow", Slow)
answers.TIMEOUT = float(sys.argv[1])
from ooc_gemm import random
random("slow://shelf/a", (300, 400), chunks=(100, 100))
main(["multiply", "slow://shelf/a", "b", "c", "-d", "cpu"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by itself", "by Ctrl-C"])
def test_a_store_whose_threads_hang_does_not_keep_the_process(here, ends):
    seconds = "0.5" if ends == "by itself" else "60"
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKING, seconds],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline() == "asked\n"
        if ends == "by Ctrl-C":
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=200)
    finally:
        process.kill()
    if ends == "by itself":
        assert process.returncode == 1
        assert_one_sentence(said, "slow://shelf/a: chunk c/", "cannot be fetched")
    else:
        assert process.returncode == 130
        assert said.strip().startswith("Interrupted: ")


# ------------------------------------------------------------------------------------------------- the GPU


@pytest.fixture
def cupy():
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    return cupy


@pytest.mark.gpu
def test_failing_runs_give_gpu_memory_back(here, cupy):
    from ooc_gemm.devices.cuda.device import CUDA
    from ooc_gemm.devices.cuda.session import CUDASession

    class Kept(CUDASession):
        def __init__(self, *args):
            sessions.append(self)
            super().__init__(*args)

    os.truncate("a/c/5/7", 17)
    device, free, sessions = device_with(Kept, CUDA)(), [], []
    for _ in range(6):
        for kernel in ("auto", "cublas"):
            with pytest.raises(ooc_gemm.StoreError, match="c/5/7 holds 17 bytes"):
                ooc_gemm.multiply("a", "b", "c", device=device, kernel=kernel, force=True)
        assert sessions
        assert not any(session._pinned or session._arrays for session in sessions)
        sessions.clear()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert min(free[1:]) >= free[0] - 8 * MiB  # the first has loaded what stays


@pytest.mark.gpu
def test_events_of_many_pieces_do_not_pile_up(here, cupy, monkeypatch):
    from ooc_gemm.devices.cuda import timing
    from ooc_gemm.devices.cuda.device import CUDA
    from ooc_gemm.devices.cuda.session import CUDASession

    class Watched(CUDASession):
        def upload(self, source, piece, buffer):
            kept.append(len(self._timing.spans))
            return super().upload(source, piece, buffer)

    kept = []
    monkeypatch.setattr(timing, "SPANS", 16)
    x = RNG.standard_normal((1600, 1600))
    monkeypatch.setattr(compressed, "STACKED_BYTES", 0)  # chunks are uploaded one by one
    make("x", x, chunks=(32, 32))
    result = ooc_gemm.multiply("x", "x", device=device_with(Watched, CUDA)())
    np.testing.assert_allclose(result.array, x @ x, atol=1e-9)
    assert len(kept) >= 2 * 2500
    assert max(kept) < 500
    assert result.bytes_uploaded == result.plan.bytes_uploaded  # the trace has been told of all
    assert min(result.stage_seconds.values()) > 0


@pytest.mark.gpu
def test_a_gpu_whose_memory_somebody_takes(here, cupy):
    from ooc_gemm.devices.cuda.device import CUDA

    class Crowded(CUDA):
        taken = None

        def open(self, plan, operation, trace):
            plans.append(plan)
            if self.taken is None:
                left = plan.device_bytes // 4
                self.taken = cupy.cuda.Memory(cupy.cuda.runtime.memGetInfo()[0] - left)
            sessions.append(super().open(plan, operation, trace))
            return sessions[-1]

    plans, notes, sessions, device = [], [], [], Crowded()
    a = RNG.standard_normal((16384, 512)).astype("f4")
    result = ooc_gemm.multiply(a, a, device=device, transpose_b=True, notice=notes.append)
    first, second = plans
    assert first.device_bytes > second.device_bytes
    assert [note for note in notes if "does not have the memory" in note]
    rows = RNG.integers(0, len(a), 40)
    right = a[rows].astype("f8") @ a.T.astype("f8")
    assert np.abs(result.array[rows] - right).max() < 1e-3
    assert not any(session._pinned or session._arrays for session in sessions)
    device.taken = None  # now, and not when somebody collects garbage


@pytest.mark.gpu
def test_a_gpu_without_any_memory(here, cupy):
    from ooc_gemm.devices.cuda.device import CUDA

    device = CUDA()
    taken = cupy.cuda.Memory(cupy.cuda.runtime.memGetInfo()[0] - 64 * MiB)
    a = np.ones((8192, 512), "f4")
    with pytest.raises(ooc_gemm.DeviceError, match="does not have the memory that the plan counts on"):
        ooc_gemm.multiply(a, a, device=device, transpose_b=True)
    del taken
    result = ooc_gemm.multiply(a, a, device="cuda", transpose_b=True)
    assert (result.array == 512).all()


@pytest.mark.gpu
def test_a_gpu_without_memory_for_a_context(here, cupy):
    taken, size = [], 1 << 30
    while size >= MiB:  # all there is
        try:
            taken.append(cupy.cuda.Memory(size))
        except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError):
            size //= 2
    done = script("from ooc_gemm.cli import main; main(['multiply', 'a', 'b', 'c', '-d', 'cuda'])")
    del taken
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Error: cuda cannot be used (" in done.stderr
    assert not Path("c/zarr.json").exists()


@pytest.mark.gpu
def test_a_kernel_that_fails_on_the_gpu(here, cupy):
    """The context is lost with it: in a process of its own."""
    text = """
import numpy as np
from ooc_gemm.cli import main
from ooc_gemm.devices.cuda.session import CUDASession
import cupy
bad = cupy.RawKernel('extern "C" __global__ void bad(int* p) { p[1ll << 40] = 1; }', "bad")
real = CUDASession.multiply
def multiply(self, *args, **options):
    with self._streams["compute"]:
        bad((1,), (1,), (np.uintp(0),))
    return real(self, *args, **options)
CUDASession.multiply = multiply
main(["multiply", "a", "b", "c", "-d", "cuda"])
"""
    done = script(text)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Error: cuda failed (" in done.stderr  # CuPy may add what it could not free
    assert not Path("c/zarr.json").exists()
