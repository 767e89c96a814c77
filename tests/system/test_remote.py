"""Arrays in an object store: a real S3 server, and before it a proxy that is slow and fails as asked."""

import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import s3
import zarr
from conftest import ooc
from shelf import got, keys, put, start

import ooc_gemm
from ooc_gemm.planning.schedule import cut
from ooc_gemm.storage.io import answers, client, objects, requests
from ooc_gemm.storage.read import addresses, inputs

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


def test_an_event_loop_of_the_callers_is_no_matter(shelf):
    """As in a notebook."""
    import asyncio

    a = RNG.integers(-9, 9, (150, 120)).astype("f4")
    put(f"{shelf}/a", a)

    async def cell():
        ooc_gemm.multiply(f"{shelf}/a", f"{shelf}/a", f"{shelf}/c", transpose_b=True, device="cpu")
        assert ooc_gemm.verify(f"{shelf}/a", f"{shelf}/a", f"{shelf}/c", transpose_b=True).ok

    asyncio.run(cell())
