"""Arrays in an object store: a real S3 server, and before it a proxy that is slow and fails as asked. Nothing
that is said, drawn or stored may show a credential."""

import contextlib
import http.server
import json
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import s3
import zarr
from conftest import Done, ooc
from shelf import got, keys, put, slowly, start, wait_for

import ooc_gemm
from ooc_gemm.planning.schedule import cut
from ooc_gemm.storage.io import answers, client, objects, requests
from ooc_gemm.storage.read import addresses, inputs
from ooc_gemm.storage.write import logs

pytestmark = pytest.mark.skipif(bool(s3.missing()), reason=s3.missing() or "-")

MiB = 1 << 20
RNG = np.random.default_rng(11)
A, B = RNG.integers(-9, 9, (300, 400)).astype("f4"), RNG.integers(-9, 9, (400, 260)).astype("f4")
C = A.astype("f8") @ B  # every sum is exact
CPU = {"device": "cpu", "memory_limit": "600MiB"}


LAYOUTS = {
    "raw": {},
    "zstd": {"compressors": zarr.codecs.ZstdCodec()},
    "shards": {"chunks": (50, 50), "shards": (100, 100)},
    "blosc in shards": {"chunks": (50, 50), "shards": (100, 100), "compressors": zarr.codecs.BloscCodec()},
    "Fortran": {"filters": zarr.codecs.TransposeCodec(order=(1, 0))},
    "only zarr's": {"serializer": zarr.codecs.BytesCodec(endian="big")},
    "version 2": {"zarr_format": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(shelf, layout):
    options = LAYOUTS[layout]
    a, b = A.copy(), B.copy()
    a[100:200, 200:300] = 0  # a chunk that is not stored
    put(f"{shelf}/a", a, **options)
    put(f"{shelf}/b", b, **options)
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.plan(f"{shelf}/a", f"{shelf}/b", device="cpu", memory_limit=1)
    for limit in ("2GiB", small.value.minimum_memory_limit + 100_000):
        result = ooc_gemm.multiply(
            f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", device="cpu", memory_limit=limit, force=True
        )
        assert np.array_equal(got(f"{shelf}/c"), a.astype("f8") @ b)
        if layout != "only zarr's":
            assert (result.bytes_read, result.bytes_written) == (
                result.plan.bytes_read,
                result.plan.bytes_written,
            )
    assert ooc_gemm.verify(f"{shelf}/a", f"{shelf}/b", f"{shelf}/c").ok


@pytest.mark.parametrize("stored", [{}, {"compressor": "zstd"}, {"chunks": (75, 65), "shards": (150, 130)}])
def test_commands(shelf, stored, proxy):
    text = [f"--{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in stored.items()]
    for name, shape in (("a", "300,400"), ("b", "400,260")):
        done = ooc("random", f"{shelf}/{name}", "--shape", shape, *text)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"{shelf}/{name}: ")
    assert ooc("plan", f"{shelf}/a", f"{shelf}/b", "-d", "cpu").code == 0
    assert ooc("multiply", f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", "-d", "cpu", *text).code == 0
    assert ooc("verify", f"{shelf}/a", f"{shelf}/b", f"{shelf}/c").code == 0
    assert ooc("gram", f"{shelf}/a", f"{shelf}/g", "-d", "cpu").code == 0
    assert ooc("verify", f"{shelf}/a", f"{shelf}/a", f"{shelf}/g", "--transpose-b").code == 0
    assert {key for key in keys(f"{shelf}/c") if not key.startswith("c/")} == {"zarr.json"}
    done = ooc("multiply", f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", "-d", "cpu")
    assert done.code == 2
    assert "exists; give --force" in done.err


def test_what_is_not_ours_is_left_alone(shelf):
    put(f"{shelf}/a", A)
    put(f"{shelf}/b", B)
    addresses.objects_at(shelf).put("c/notes.txt", b"mine")
    for more in ([], ["-f"]):
        done = ooc("multiply", f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", "-d", "cpu", *more)
        assert done.code == 2
        assert "exists and cannot be opened as a Zarr array; it is left alone" in done.err
    assert keys(f"{shelf}/c") == ["notes.txt"]
    for c in (f"{shelf}/a", f"{shelf}//a/", f"{shelf}/a".replace("s3:", "s3a:"), shelf, f"{shelf}/a/inside"):
        assert ooc("multiply", f"{shelf}/a", f"{shelf}/b", c, "-d", "cpu", "-f").code == 2
    opened = zarr.open_array(addresses.remote_place(f"{shelf}/a"), mode="r")
    for a, c in ((opened, f"{shelf}/a"), (f"{shelf}/a", opened), (opened, opened)):
        with pytest.raises(ooc_gemm.InputError, match="is, contains or lies inside the input"):
            ooc_gemm.multiply(a, f"{shelf}/b", c, force=True, **CPU)
    assert np.array_equal(got(f"{shelf}/a"), A)


def test_an_old_c_goes_with_all_its_chunks(shelf):
    put(f"{shelf}/a", A)
    put(f"{shelf}/b", B)
    put(f"{shelf}/c", RNG.random((900, 900)), chunks=(200, 200))
    ooc_gemm.multiply(f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", force=True, chunks=(100, 260), **CPU)
    assert keys(f"{shelf}/c") == ["c/0/0", "c/1/0", "c/2/0", "zarr.json"]
    assert np.array_equal(got(f"{shelf}/c"), C)


# ------------------------------------------------------------------------------------------------- faults


@pytest.mark.slow
def test_errors_now_and_then(shelf, proxy):
    put(f"{shelf}/a", A)
    put(f"{shelf}/b", B, compressors=zarr.codecs.ZstdCodec())
    rng = np.random.default_rng(3)
    proxy.latency = 0.005
    proxy.fault = lambda method, path: rng.choice([None, 500, 503, "drop"], p=[0.85, 0.05, 0.05, 0.05])
    result = ooc_gemm.multiply(f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", chunks=(60, 52), **CPU)
    proxy.fault = lambda method, path: None
    assert np.array_equal(got(f"{shelf}/c"), C)
    assert result.bytes_read == result.plan.bytes_read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "fault"),
    [(which, fault) for which in ("GET", "PUT") for fault in (503, 403, "hang", "drop")]
    + [("metadata", 403), ("metadata", "hang")],
)
def test_errors_that_last(shelf, proxy, monkeypatch, fault, which):
    put(f"{shelf}/a", A)
    put(f"{shelf}/b", B)
    monkeypatch.setattr(answers, "TIMEOUT", 2.0)

    def broken(method, path):
        if which == "metadata":
            return fault if path.endswith("/b/zarr.json") else None
        chunk = "/a/c/" if which == "GET" else "/c/c/"
        return fault if method == which and chunk in path else None

    proxy.fault = broken
    with pytest.raises(ooc_gemm.Error) as error:
        ooc_gemm.multiply(f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", chunks=(60, 52), **CPU)
    said = str(error.value)
    assert "\n" not in said
    assert s3.SECRET not in said
    if which == "metadata":
        assert isinstance(error.value, ooc_gemm.InputError)
        assert f"{shelf}/b cannot be reached" in said
    else:
        name = f"{shelf}/a: chunk c/" if which == "GET" else f"{shelf}/c: chunk c/"
        assert isinstance(error.value, ooc_gemm.StoreError)
        assert said.startswith(name)
        assert "check its store" in said
    if isinstance(fault, int):
        assert str(fault) in said
    monkeypatch.setattr(answers, "TIMEOUT", 60.0)
    proxy.fault = lambda method, path: None
    if which != "metadata":
        with pytest.raises(ooc_gemm.InputError, match=r"not a Zarr array|unfinished"):
            ooc_gemm.verify(f"{shelf}/a", f"{shelf}/b", f"{shelf}/c")
        ooc_gemm.multiply(f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", chunks=(60, 52), resume=True, **CPU)
        assert np.array_equal(got(f"{shelf}/c"), C)


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_store_that_hangs(shelf, proxy):
    put(f"{shelf}/a", A)
    put(f"{shelf}/b", B)
    asked = threading.Event()

    def hang(method, path):
        if "/a/c/" in path:
            asked.set()
            return "hang"
        return None

    proxy.fault = hang
    process = start("multiply", f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", "-d", "cpu")
    assert asked.wait(200)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 130
    assert said.strip().startswith("Interrupted: ")


def test_a_chunk_that_changes_while_running(shelf, proxy, monkeypatch):
    put(f"{shelf}/a", A, compressors=zarr.codecs.ZstdCodec())
    put(f"{shelf}/b", B)
    source = inputs.open_input(f"{shelf}/a").source
    addresses.objects_at(f"{shelf}/a").put("c/0/0", b"short")
    plan = ooc_gemm.plan(f"{shelf}/a", f"{shelf}/b", **CPU)
    piece = next(plan.pieces(next(plan.blocks()), next(plan.panels())))
    with pytest.raises(ooc_gemm.StoreError, match=r"/a: chunk c/0/0 gives 5 bytes instead of \d+"):
        source.read(piece, np.zeros(1 << 20, np.uint8))
    addresses.objects_at(f"{shelf}/a").delete(["c/0/0"])
    with pytest.raises(ooc_gemm.StoreError, match="/a: chunk c/0/0 is gone, it was there before"):
        source.read(piece, np.zeros(1 << 20, np.uint8))


# -------------------------------------------------------------------------------------------- concurrency


@pytest.mark.parametrize("layout", ["raw", "shards", "version 2"])
def test_pieces_stay_where_the_client_has_put_them(shelf, layout):
    source = inputs.open_input(put(f"{shelf}/a", A, **LAYOUTS[layout])).source
    side = source.matrix.chunk_rows
    for rows, cols in (((0, side), (0, side)), ((20, 40), (0, side)), ((20, 40), (10, 30))):
        for piece in cut("a", source.matrix, rows, cols, MiB):
            slot = np.zeros(MiB, np.uint8)
            for reads, lends in ((source, False), (source.lending(), True)):
                values, moved = reads.read(piece, slot)
                assert np.array_equal(values, A[slice(*rows), slice(*cols)])
                assert np.shares_memory(values, slot) != lends
                assert moved == (rows[1] - rows[0]) * side * 4, "whole rows of a chunk"


def test_a_b_and_c_are_asked_for_side_by_side(shelf, monkeypatch):
    for name, values in (("a", A), ("b", B)):
        put(f"{shelf}/{name}", values)
    client._client.cache_clear()
    together, asked, ask = threading.Barrier(3, timeout=60), set(), objects.Objects._timed

    def timed(self, question):
        here = threading.current_thread()
        if here.name.startswith(requests.OPENER) and here not in asked:
            asked.add(here)
            together.wait()
        return ask(self, question)

    monkeypatch.setattr(objects.Objects, "_timed", timed)
    ooc_gemm.multiply(*(f"{shelf}/{name}" for name in "abc"), **CPU)
    assert len(asked) == 3
    assert client._client.cache_info().misses == 1, "each has made a client of its own"
    assert np.array_equal(got(f"{shelf}/c"), C)


def test_requests_follow_latency():
    assert [requests.requests(latency, 4 * MiB) for latency in (1e-4, 0.02, 0.1, 1)] == [8, 16, 32, 64]
    assert requests.requests(0.02, 256 << 10) == 64
    assert requests.requests(0.02, 64 * MiB) == requests.requests(0.02, 4 * MiB)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["multiply", "verify"])
def test_many_requests_at_a_time_hide_latency(shelf, proxy, monkeypatch, operation):
    a = RNG.random((800, 800), "f4")
    put(f"{shelf}/a", a, chunks=(50, 50))
    put(f"{shelf}/c", a @ a, chunks=(50, 50))
    monkeypatch.setattr(objects, "_fastest", {})
    proxy.latency, proxy.most = 0.1, 0
    proxy.seen.clear()
    if operation == "multiply":
        ooc_gemm.gram(f"{shelf}/a", transpose=True, device="cpu", memory_limit="1GiB")
    else:
        ooc_gemm.verify(f"{shelf}/a", f"{shelf}/a", f"{shelf}/c", memory_limit="1GiB")
    assert 48 <= proxy.most <= 66


MEMORY = """
import sys
import ooc_gemm
a, b, c, limit = sys.argv[1:]
result = ooc_gemm.multiply(a, b, c, device="cpu", memory_limit=limit, chunks=(512, 512))
print(result.peak_host_bytes, result.plan.budget.host, result.plan.readers)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressor", "limit", "least"), [("none", "240MiB", 4), ("none", "500MiB", 16), ("zstd", "300MiB", 4)]
)
def test_memory_stays_within_its_limit(shelf, proxy, compressor, limit, least):
    for name in "ab":
        ooc_gemm.random(f"{shelf}/{name}", (1536, 1536), chunks=(512, 512), compressor=compressor)
    proxy.latency = 0.02
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", limit],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    peak, most, readers = map(int, done.stdout.split())
    assert peak <= most
    assert readers >= least


ENDS_FIRST = """
import asyncio, sys, threading, time
import ooc_gemm

class Slow(asyncio.SelectorEventLoop):  # threads that bring an answer lose their core before they return
    def _write_to_self(self):
        super()._write_to_self()
        if threading.get_ident() not in {thread.ident for thread in threading.enumerate()}:
            time.sleep(0.3)

asyncio.new_event_loop = Slow
a, b, c = sys.argv[1:]
ooc_gemm.multiply(a, b, c, device="cpu", memory_limit="600MiB")
"""


@pytest.mark.slow
def test_a_process_may_end_while_an_answer_is_handed_over(shelf):
    put(f"{shelf}/a", A)
    put(f"{shelf}/b", B)
    done = subprocess.run(
        [sys.executable, "-c", ENDS_FIRST, *(f"{shelf}/{name}" for name in "abc")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert np.array_equal(got(f"{shelf}/c"), C)


def test_nothing_is_left_of_an_impossible_result(shelf):
    """Genotypes are read while their product is computed, when C was begun."""
    put(f"{shelf}/g", np.full((50, 100), 7, "i1"))
    with pytest.raises(ooc_gemm.InputError, match="more than 2 alleles"):
        ooc_gemm.grm(f"{shelf}/g", f"{shelf}/k", **CPU)
    assert keys(f"{shelf}/k") == []


# --------------------------------------------------------------------------------------------- continuing


@pytest.fixture
def long(shelf, monkeypatch, proxy):
    """A, B, and how to make C in many chunks, slowly."""
    a, b = RNG.integers(-9, 9, (400, 100)).astype("f4"), RNG.integers(-9, 9, (100, 400)).astype("f4")
    put(f"{shelf}/a", a)
    put(f"{shelf}/b", b)
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.plan(f"{shelf}/a", f"{shelf}/b", memory_limit=1, device="cpu", chunks=(50, 50))
    limit = str(small.value.minimum_memory_limit + 100_000)
    args = ("multiply", f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", "-d", "cpu", "-M", limit)
    return (*args, "--chunks", "50,50"), a.astype("f8") @ b


def puts(proxy):
    return sum(method == "PUT" and "/c/c/" in path for method, path in proxy.seen)


def journal_puts(proxy):
    return sum(method == "PUT" and path.endswith("ooc-gemm.journal") for method, path in proxy.seen)


def interrupted(args, proxy, sent, saved=3):
    """A run that ends when some chunks are done, and the journal was put so many times."""
    proxy.latency = 0.03
    proxy.seen.clear()
    process = slowly(*args)
    wait_for(lambda: process.poll() is not None or (puts(proxy) >= 20 and journal_puts(proxy) >= saved))
    assert process.poll() is None, process.communicate()
    process.send_signal(sent)
    process.communicate(timeout=200)
    proxy.latency = 0
    proxy.seen.clear()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_interrupted_goes_on(long, shelf, proxy, sent):
    args, expected = long
    interrupted(args, proxy, sent)
    done = ooc("verify", f"{shelf}/a", f"{shelf}/b", f"{shelf}/c")
    assert (done.code, "unfinished result" in done.err) == (2, True)
    done = ooc(*args)
    assert (done.code, "unfinished result" in done.err) == (2, True)
    proxy.seen.clear()
    done = ooc(*args, "--resume", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["blocks_resumed"] > 0
    assert puts(proxy) < 64 - 8
    assert np.array_equal(got(f"{shelf}/c"), expected)
    assert {key for key in keys(f"{shelf}/c") if not key.startswith("c/")} == {"zarr.json"}


@pytest.mark.slow
def test_what_has_changed_is_noticed(long, shelf, proxy):
    args, expected = long
    interrupted(args, proxy, signal.SIGTERM)
    there = addresses.objects_at(f"{shelf}/c")
    was = there.read("c/0/0", MiB)
    there.put("c/0/0", bytes(len(was)))
    done = ooc(*args, "--resume")
    assert (done.code, "chunk c/0/0 was changed or removed since" in done.err) == (2, True)
    there.put("c/0/0", was)
    a = addresses.objects_at(f"{shelf}/a")
    old = a.read("c/1/0", MiB)
    a.put("c/1/0", old[::-1])
    done = ooc(*args, "--resume")
    assert (done.code, "/a was changed since, or is another array" in done.err) == (2, True)
    done = ooc(*args, "--resume", "--alpha", "2")
    assert (done.code, "alpha was 1.0 and is 2.0" in done.err) == (2, True)
    a.put("c/1/0", old)
    assert ooc(*args, "--resume").code == 0
    assert np.array_equal(got(f"{shelf}/c"), expected)
    proxy.seen.clear()
    done = ooc(*args, "--resume")
    assert (done.code, "is finished already" in done.err, puts(proxy)) == (0, True, 0)
    done = ooc(*args, "--resume", "--alpha", "2")
    assert (done.code, "alpha was 1.0 and is 2.0" in done.err) == (2, True)
    there.put("c/0/0", bytes(len(was)))
    done = ooc(*args, "--resume")
    assert (done.code, "is not the unfinished result" in done.err) == (2, True)


def test_a_finished_c_with_its_journal(long, shelf, proxy, monkeypatch):
    """A run was killed before it had removed the journal: C keeps its metadata when somebody goes on."""
    args, expected = long
    with monkeypatch.context() as patched:
        patched.setattr(logs.ObjectLog, "remove", logs.ObjectLog.close)
        assert ooc(*args).code == 0
    assert {"zarr.json", "ooc-gemm.journal"} <= {*keys(f"{shelf}/c")}
    proxy.seen.clear()
    done = ooc(*args, "--resume")
    assert (done.code, puts(proxy)) == (0, 0), done.err
    assert np.array_equal(got(f"{shelf}/c"), expected)
    assert {key for key in keys(f"{shelf}/c") if not key.startswith("c/")} == {"zarr.json"}


@pytest.mark.slow
def test_one_run_at_a_time(long, shelf, proxy):
    args, expected = long
    proxy.latency = 0.03
    first = slowly(*args)
    wait_for(lambda: puts(proxy) >= 10)
    first.send_signal(signal.SIGSTOP)
    proxy.latency = 0
    done = ooc(*args)
    assert (done.code, "still goes on" in done.err) == (2, True)
    assert ooc(*args, "-f").code == 0
    first.send_signal(signal.SIGCONT)
    _, said = first.communicate(timeout=200)
    assert first.returncode == 1, said
    assert "/c" in said
    assert "is being written by another process" in said or "somebody else" in said
    assert np.array_equal(got(f"{shelf}/c"), expected)


@pytest.mark.slow
def test_two_runs_that_begin_at_once(long, shelf, proxy):
    args, expected = long
    waiting = threading.Barrier(2, timeout=60)

    def together(method, path):
        if method == "PUT" and path.endswith("ooc-gemm.journal") and waiting.n_waiting < 2 and not done:
            with contextlib.suppress(threading.BrokenBarrierError):
                waiting.wait()
                done.append(1)
        return

    done = []
    proxy.fault = together
    both = [slowly(*args) for _ in range(2)]
    said = [one.communicate(timeout=200)[1] for one in both]
    codes = [one.returncode for one in both]
    assert sorted(codes) == [0, 2], said
    assert "is being written by another process" in said[codes.index(2)]
    assert np.array_equal(got(f"{shelf}/c"), expected)


# ------------------------------------------------------------------------------------ changes during a run


def when_some_are_done(proxy, change):
    """Calls `change` once, when some chunks of C are there and others are not."""
    left, lock = [change], threading.Lock()

    def fault(method, path):
        with lock:
            now = left.pop() if left and puts(proxy) >= 20 else None
        if now:
            now()

    proxy.seen.clear()
    proxy.fault = fault
    return left


def alone(*args):
    """In a process of its own, which ends without waiting for a store that it no longer needs."""
    process = start(*args)
    out, err = process.communicate(timeout=200)
    return Done(process.returncode, out, err)


def is_unfinished(url):
    there = keys(url)
    return "zarr.json" not in there and {"zarr.json.partial", "ooc-gemm.journal"} <= {*there}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["overwritten", "removed"])
@pytest.mark.parametrize("which", "ab")
def test_an_input_that_changes_during_the_run(long, shelf, proxy, which, change):
    args, expected = long
    source = addresses.objects_at(f"{shelf}/{which}")
    was = source.read("c/0/0", MiB)

    def write():
        if change == "overwritten":
            source.put("c/0/0", was[::-1])
        else:
            source.delete(["c/0/0"])

    left = when_some_are_done(proxy, write)
    done = alone(*args)
    assert (done.code, left) == (1, [])
    if change == "overwritten" or "was changed" in done.err:  # a chunk that is gone may be missed earlier
        assert f"{shelf}/{which} was changed while C was made of it, so C is not finished" in done.err
    else:
        assert f"{shelf}/{which}: chunk c/0/0 is gone, it was there before" in done.err
    assert is_unfinished(f"{shelf}/c")
    source.put("c/0/0", was)
    if "was changed" in done.err:  # chunks may have been made of what was there in between
        done = ooc(*args, "--resume")
        assert (done.code, f"{shelf}/{which} was changed while C was made of it" in done.err) == (2, True)
    assert ooc(*args, "-f").code == 0
    assert np.array_equal(got(f"{shelf}/c"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["overwritten", "removed"])
def test_a_chunk_of_c_that_changes_during_the_run(long, shelf, proxy, change):
    args, expected = long
    there, changed = addresses.objects_at(f"{shelf}/c"), []

    def write():
        changed.append(next(key for key in keys(f"{shelf}/c") if key.startswith("c/")))
        if change == "overwritten":
            there.put(changed[0], bytes(50 * 50 * 4))
        else:
            there.delete(changed)

    left = when_some_are_done(proxy, write)
    done = alone(*args)
    assert (done.code, left) == (1, [])
    assert f"{shelf}/c: somebody else has changed " in done.err
    assert f"chunk {changed[0]} " in done.err
    assert is_unfinished(f"{shelf}/c")
    done = ooc(*args, "--resume")
    assert (done.code, f"its chunk {changed[0]} was changed or removed since" in done.err) == (2, True)
    assert ooc(*args, "-f").code == 0
    assert np.array_equal(got(f"{shelf}/c"), expected)


@pytest.mark.slow
def test_an_old_c_is_removed_before_its_replacement_is_made(long, shelf, proxy):
    """As the help of -f says; where nothing was begun it stays."""
    args, expected = long
    old = RNG.random((120, 70))
    put(f"{shelf}/c", old, chunks=(10, 70))
    there = f"the array at {shelf}/c is removed before its replacement is made: an object store cannot set it"
    a = addresses.objects_at(f"{shelf}/a")
    described = a.read("zarr.json", MiB)
    a.delete(["zarr.json"])
    done = ooc(*args, "-f")
    assert (done.code, "is not a Zarr array" in done.err, there in done.err) == (2, True, False)
    assert np.array_equal(got(f"{shelf}/c"), old)
    a.put("zarr.json", described)
    proxy.fault = lambda method, path: 403 if method == "PUT" and "/c/c/" in path else None
    done = alone(*args, "-f")
    proxy.fault = lambda method, path: None
    assert (done.code, there in done.err) == (1, True)
    assert is_unfinished(f"{shelf}/c")
    assert not any(key.startswith("c/") for key in keys(f"{shelf}/c"))
    done = ooc(*args, "--resume")
    assert (done.code, there in done.err) == (0, False)
    assert np.array_equal(got(f"{shelf}/c"), expected)
    assert "In an object store C is removed first" in " ".join(ooc("multiply", "--help").out.split())


# -------------------------------------------------------------------------------------------- credentials


def test_credentials_from_the_usual_files(shelf, monkeypatch, tmp_path, proxy):
    put(f"{shelf}/a", A)
    for name in s3.environment(0):
        if name != "AWS_EC2_METADATA_DISABLED":
            monkeypatch.delenv(name)
    done = ooc("plan", f"{shelf}/a", f"{shelf}/a", "--transpose-b")
    assert done.code == 2
    assert f"{shelf}/a needs credentials, and there are none; set AWS_ACCESS_KEY_ID" in done.err
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text(
        f"[work]\naws_access_key_id = {s3.KEY}\naws_secret_access_key = {s3.SECRET}\n"
    )
    endpoint = f"endpoint_url = http://127.0.0.1:{proxy.port}"
    (folder / "config").write_text(f"[profile work]\nregion = us-east-1\n{endpoint}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert ooc("plan", f"{shelf}/a", f"{shelf}/a", "--transpose-b").code == 0
    monkeypatch.setenv("AWS_PROFILE", "play")
    done = ooc("plan", f"{shelf}/a", f"{shelf}/a", "--transpose-b")
    assert done.code == 2
    assert "a cannot be asked for: The config profile (play) could not be found; repair ~/.aws" in done.err


@pytest.mark.slow
def test_credentials_are_nowhere(long, shelf, proxy, monkeypatch):
    args, _ = long
    interrupted(args, proxy, signal.SIGTERM)
    left = b"".join(
        addresses.objects_at(f"{shelf}/c").read(key, MiB) for key in keys(f"{shelf}/c") if key[0] != "c"
    )
    done = ooc(*args, "--resume", "-v", "--trace", "trace.json", "--json")
    assert done.code == 0
    said = [left.decode(), done.out, done.err, Path("trace.json").read_text()]
    said.append(addresses.objects_at(f"{shelf}/c").read("zarr.json", MiB).decode())
    assert '"ooc-gemm"' in said[-1]
    proxy.fault = lambda method, path: 403 if "/a/c/" in path else None
    said += failing(*args, "-f", "-v")
    proxy.fault = lambda method, path: None
    wrong = "wrong/secret+that-nobody-sees"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    said += failing(*args, "-f", "-v")
    assert "cannot be reached" in said[-1]
    for text in said:
        for secret in (s3.KEY, s3.SECRET, wrong):
            assert secret not in text


def failing(*args):
    process = start(*args)
    out, err = process.communicate(timeout=200)
    assert process.returncode in (1, 2), err
    assert "Traceback" in err
    return [out, err]


@pytest.mark.parametrize("url", [f"s3://{s3.KEY}:pass-word@shelf/a", "s3://shelf/a?token=pass-word"])
def test_credentials_in_an_address(proxy, url):
    done = ooc("multiply", url, url, "c", "-v")
    assert done.code == 2
    assert "credentials do not belong in this address" in done.err
    assert "pass-word" not in done.err
    assert s3.KEY not in done.err


class Files(http.server.SimpleHTTPRequestHandler):
    """Files, for those who know the password and the token."""

    def do_GET(self):
        known = self.headers.get("Authorization") == "Basic YW5uOnMzLXBhc3M="  # ann:s3-pass
        if not known or not self.path.endswith("?sig=token-word"):
            self.send_error(403, f"{self.path} is not for {self.headers.get('Authorization')}")
        else:
            super().do_GET()

    do_HEAD = do_GET

    def send_head(self):
        if self.command == "HEAD":
            found = Path(self.translate_path(self.path))
            self.send_response(200 if found.is_file() else 404)
            self.send_header("Content-Length", str(found.stat().st_size if found.is_file() else 0))
            self.send_header("Last-Modified", self.date_time_string())
            self.end_headers()
            return None
        return super().send_head()

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_the_web(proxy, tmp_path):
    zarr.create_array("a", data=A, chunks=(100, 100))
    zarr.create_array("b", data=B, chunks=(100, 100), fill_value=7)
    Path("b/c/0/0").unlink()
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(tmp_path)))
    threading.Thread(target=served.serve_forever, daemon=True).start()
    port = served.server_address[1]
    try:
        a, b = (f"http://ann:s3-pass@127.0.0.1:{port}/{name}?sig=token-word" for name in "ab")
        result = ooc("multiply", a, b, "c", "-d", "cpu", "-v", "--trace", "trace.json")
        assert result.code == 0, result.err
        other = B.copy()
        other[:100, :100] = 7
        assert np.array_equal(zarr.open_array("c")[:], A.astype("f8") @ other)
        texts = [result.out, result.err, Path("c/zarr.json").read_text(), Path("trace.json").read_text()]
        wrong = a.replace("token-word", "other-word")
        done = ooc("multiply", wrong, b, "d", "-d", "cpu", "-v")
        assert done.code == 2
        assert f"http://***@127.0.0.1:{port}/a?*** cannot be reached" in done.err
        texts += [done.out, done.err]
    finally:
        served.shutdown()
        served.server_close()
    for text in texts:
        for secret in ("s3-pass", "token-word", "other-word", "YW5uOnMzLXBhc3M="):
            assert secret not in text


def test_an_event_loop_of_the_callers_is_no_matter(shelf):
    """As in a notebook."""
    import asyncio

    a = RNG.integers(-9, 9, (150, 120)).astype("f4")
    put(f"{shelf}/a", a)

    async def cell():
        ooc_gemm.multiply(f"{shelf}/a", f"{shelf}/a", f"{shelf}/c", transpose_b=True, device="cpu")
        assert ooc_gemm.verify(f"{shelf}/a", f"{shelf}/a", f"{shelf}/c", transpose_b=True).ok

    asyncio.run(cell())
