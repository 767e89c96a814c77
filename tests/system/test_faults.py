"""Disks that are full or fail, chunks that rot, threads that die, signals: each ends with its exit status and
one sentence. After every test no thread, open file or temporary file may be left, and BLAS has its threads
back."""

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
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from conftest import make, ooc
from left_over import OLD, A, C, failed, left, many_blocks, script
from outcome import assert_one_sentence
from zarr.codecs import Crc32cCodec, GzipCodec, ZstdCodec
from zarr.codecs.numcodecs import Fletcher32

import ooc_gemm
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.run import executor, generate
from ooc_gemm.storage.io import background, files, listing
from ooc_gemm.storage.read import inputs
from ooc_gemm.storage.read.compressed import CompressedSource
from ooc_gemm.storage.read.raw import RawSource
from ooc_gemm.storage.write import publication, target

pytestmark = pytest.mark.usefixtures("here")


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
