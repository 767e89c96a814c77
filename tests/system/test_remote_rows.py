"""`topk` and `threshold` write to an object store, and are continued there. The oracle is brute force; the
arrays hold small integers, whose scores (dot products) are exact."""

import itertools
import json
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import s3
import zarr
from conftest import ooc
from shelf import keys, put, wait_for

import ooc_gemm
from ooc_gemm.statistics import compared
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.read import addresses
from ooc_gemm.storage.write import rows as stored

pytestmark = pytest.mark.skipif(bool(s3.missing()), reason=s3.missing() or "-")

RNG = np.random.default_rng(41)
A, B = RNG.integers(-9, 9, (90, 12)).astype("f4"), RNG.integers(-9, 9, (130, 12)).astype("f4")
SCORES = A.astype("f8") @ B.T
LEAST, K = 150.0, 4
CHUNK_ROWS = 16
CHUNKS = -(-len(A) // CHUNK_ROWS)


@pytest.fixture
def rows(shelf, proxy, monkeypatch):
    """The addresses of A, B and the result, which has small chunks."""
    monkeypatch.setattr(compared, "CHUNK_ROWS", CHUNK_ROWS)
    monkeypatch.setattr(stored, "SPARSE_CHUNK", 64)
    put(f"{shelf}/a", A, chunks=(32, 12))
    put(f"{shelf}/b", B, chunks=(32, 12))
    proxy.seen.clear()
    return f"{shelf}/a", f"{shelf}/b", f"{shelf}/out"


def topk(rows, **options):
    options = {"k": K, "metric": "dot", "graph": True, "device": "cpu", "memory_limit": "600MiB", **options}
    return ooc_gemm.topk(*rows, **options)


def threshold(rows, **options):
    options = {"least": LEAST, "metric": "dot", "device": "cpu", "memory_limit": "600MiB", **options}
    return ooc_gemm.threshold(*rows, **options)


BOTH = pytest.mark.parametrize("find", [topk, threshold], ids=["topk", "threshold"])


def group_at(url):
    return zarr.open_group(addresses.remote_place(url), mode="r")


def assert_topk(url, k=K, graph=True):
    order = np.lexsort((np.broadcast_to(np.arange(len(B)), SCORES.shape), -SCORES), axis=1)[:, :k]
    group = group_at(url)
    assert np.array_equal(group["indices"][...], order)
    assert np.array_equal(group["values"][...], np.take_along_axis(SCORES, order, 1))
    if graph:
        assert_csr(group["graph"], np.take_along_axis(SCORES, np.sort(order), 1), np.sort(order))


def assert_csr(group, values, columns):
    """values, columns: of each row, in order."""
    assert np.array_equal(group["data"][...], np.concatenate([*values]))
    assert np.array_equal(group["indices"][...], np.concatenate([*columns]))
    assert np.array_equal(group["indptr"][...], np.cumsum([0, *(len(row) for row in columns)]))
    assert group.attrs["encoding-type"] == "csr_matrix"
    assert group.attrs["shape"] == [len(A), len(B)]


def assert_right(find, url):
    if find is topk:
        assert_topk(url)
        assert_no_more(url, "graph/data", "graph/indices", "graph/indptr", "indices", "values")
    else:
        columns = [np.flatnonzero(row >= LEAST) for row in SCORES]
        assert_csr(group_at(url), [row[at] for row, at in zip(SCORES, columns, strict=True)], columns)
        assert_no_more(url, "data", "indices", "indptr")


def assert_no_more(url, *arrays):
    """Nothing is left of how it was made."""
    nodes = {"", *(f"{array}/" for array in arrays), *(f"{array.rpartition('/')[0]}/" for array in arrays)}
    left = {key for key in keys(url) if "/c/" not in key}
    assert left == {f"{node}zarr.json".lstrip("/") for node in nodes}


def puts(proxy):
    """Puts of chunks of rows."""
    wanted = ("/indices/c/", "/values/c/", "/parts/")
    return sum(method == "PUT" and any(one in path for one in wanted) for method, path in proxy.seen)


def failing_after(count):
    """A fault of all puts of files but the first so many."""
    left, lock = itertools.count(), threading.Lock()

    def fault(method, path):
        with lock:
            file = method == "PUT" and "/out/" in path and unfinished.JOURNAL not in path
            return 403 if file and next(left) >= count else None

    return fault


@BOTH
def test_a_result_in_a_store(rows, find):
    found = find(rows, verify=True)
    assert (found.verified, found.rows_resumed) == (True, 0)
    assert found.bytes_read == found.plan.bytes_read
    assert_right(find, rows[-1])
    if find is topk:
        assert found.bytes_written == found.plan.bytes_written
        assert np.array_equal(found.values[...], group_at(rows[-1])["values"][...])
    local = find((*rows[:2], "local"))
    for mine, theirs in zip(found.csr(), local.csr(), strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("there", ["store", "folder"])
def test_half_of_a_chunk_of_rows_is_made_again(rows, monkeypatch, there):
    """Another device may have found other rows, so indices and values are those of one run."""
    write = stored.RowArrays.write

    def half(self, row, arrays):
        write(self, row, {"indices": arrays["indices"] * 0})
        raise ooc_gemm.StoreError("the plug is pulled")

    rows = rows if there == "store" else (*rows[:2], "out")
    with monkeypatch.context() as patch:
        patch.setattr(stored.RowArrays, "write", half)
        with pytest.raises(ooc_gemm.StoreError, match="plug"):
            topk(rows)
    found = topk(rows, resume=True)
    assert found.rows_resumed == 0
    assert np.array_equal(found.indices[...], topk((*rows[:2], None), graph=False).indices)


def test_nothing_reaches_the_value(rows):
    assert threshold(rows, least=1e9).count == 0
    assert group_at(rows[-1])["indptr"][...].tolist() == [0] * (len(A) + 1)


@BOTH
def test_the_group_is_none_until_it_is_finished(rows, proxy, find):
    seen = []

    def look(method, path):
        ours = unfinished.JOURNAL in path or path.endswith("/out/zarr.json")
        if method == "PUT" and "/out/" in path and not ours:
            seen.append(addresses.objects_at(rows[-1]).has("zarr.json"))

    proxy.fault = look
    find(rows)
    assert seen
    assert not any(seen)


@BOTH
@pytest.mark.slow
def test_an_interrupted_run_is_continued(rows, proxy, find):
    resume = False
    for count in (5, 0, 7):
        proxy.fault = failing_after(count)
        with pytest.raises(ooc_gemm.StoreError, match="check its store, then continue with resume=True"):
            find(rows, resume=resume)
        resume = True
    proxy.fault = lambda method, path: None
    for more, said in (
        ({}, r"unfinished result of a run .* resume=True"),
        ({"resume": True, "metric": "cosine"}, "metric was dot and is cosine"),
        ({"resume": True, "a": A}, "cannot be known again"),
    ):
        arrays = (more.pop("a", rows[0]), *rows[1:])
        with pytest.raises(ooc_gemm.InputError, match=said):
            find(arrays, **more)
    done = ooc("multiply", *rows, "-d", "cpu", "--transpose-b", "-f")
    assert (done.code, "cannot be opened as a Zarr array; it is left alone" in done.err) == (2, True)
    proxy.seen.clear()
    found = find(rows, resume=True, verify=True)
    assert found.rows_resumed >= CHUNK_ROWS
    assert found.bytes_read == found.plan.bytes_read
    assert found.verified
    assert_right(find, rows[-1])
    proxy.seen.clear()
    said = []
    again = find(rows, resume=True, notice=said.append)
    assert (again.rows_resumed, again.bytes_written) == (len(A), 0)
    assert "finished already" in said[0]
    assert not any(method == "PUT" for method, _ in proxy.seen)
    with pytest.raises(ooc_gemm.InputError, match=r"is finished, and another result: .*metric was dot"):
        find(rows, resume=True, metric="cosine")


@pytest.mark.slow
def test_what_is_there(rows, monkeypatch):
    a, b, out = rows
    said = []
    topk(rows)
    with pytest.raises(ooc_gemm.InputError, match="out exists; give force=True to replace it"):
        topk(rows)
    addresses.objects_at(out).put("mine/notes.txt", b"mine")
    threshold(rows, force=True, notice=said.append)
    assert "is removed before its replacement is made: an object store cannot set it aside" in said[0]
    assert addresses.objects_at(out).read("mine/notes.txt", 9) == b"mine"
    addresses.objects_at(out).delete(["mine/notes.txt"])
    assert_right(threshold, out)
    for place, why in ((a, "input"), (f"{a}/x", "input"), (f"{out}/indices", "no such result; it is left")):
        with pytest.raises(ooc_gemm.InputError, match=why):
            topk((b, a, place), force=True)
    put(f"{out}x", A, chunks=(9, 9))
    with pytest.raises(ooc_gemm.InputError, match="outx exists and is no such result; it is left alone"):
        topk((a, b, f"{out}x"), force=True)


def test_what_a_trial_has_left_is_not_in_the_way(rows, proxy):
    """A process is killed after it has tried whether it can write, and before it has removed what it put."""
    proxy.fault = lambda method, path: 403 if method in ("POST", "DELETE") else None
    with pytest.raises(ooc_gemm.InputError):
        topk(rows)
    proxy.fault = lambda method, path: None
    assert keys(rows[-1]) == [unfinished.TRIAL]
    with pytest.raises(ooc_gemm.InputError, match="k is 1000"):
        topk(rows, k=1000)
    ooc_gemm.multiply(rows[0], A.T.copy(), rows[-1], device="cpu", memory_limit="600MiB")
    assert unfinished.TRIAL not in keys(rows[-1])
    addresses.objects_at(rows[-1]).delete(keys(rows[-1]))
    addresses.objects_at(rows[-1]).put(unfinished.TRIAL, b"1")
    topk(rows)
    assert_right(topk, rows[-1])


@BOTH
def test_a_result_that_cannot_be_replaced_is_refused_before_anything_is_read(rows, proxy, find):
    find(rows)
    proxy.fault = lambda method, path: 403 if method == "PUT" else None
    proxy.seen.clear()
    with pytest.raises(ooc_gemm.InputError, match="out cannot be reached"):
        find(rows, force=True)
    assert not any("/c/" in path for _, path in proxy.seen)
    find(rows, resume=True)  # nothing is written
    assert_right(find, rows[-1])


@pytest.mark.slow
def test_an_answer_that_is_lost(rows, proxy):
    lost, lock = set(), threading.Lock()

    def fault(method, path):
        with lock:
            if method == "PUT" and "/c/" in path and path not in lost:
                lost.add(path)
                return proxy.send
        return None

    proxy.fault = fault
    topk(rows, graph=False)
    assert len(lost) == 2 * CHUNKS
    assert_topk(rows[-1], graph=False)


def test_the_command_line(rows):
    a, b, out = rows
    done = ooc("topk", a, b, out, "-k", K, "--metric", "dot", "-d", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["shape"] == [len(A), len(B)]
    assert_topk(out, graph=False)
    done = ooc("threshold", a, b, out, "--least", LEAST, "--metric", "dot", "-d", "cpu")
    assert (done.code, "--force" in done.err) == (2, True)


# ------------------------------------------------------------------------------------------------- kill -9

PROGRAM = """
import json, sys
import ooc_gemm
from ooc_gemm.statistics import compared
from ooc_gemm.storage.write import rows
compared.CHUNK_ROWS, rows.SPARSE_CHUNK = {rows}, {sparse}
name, options = sys.argv[1], json.loads(sys.argv[2])
found = getattr(ooc_gemm, name)(**options)
print(found.peak_host_bytes, found.rows_resumed)
"""


def process(find, rows, chunk_rows=CHUNK_ROWS, sparse=64, **more):
    a, b, out = rows
    options = {"a": a, "b": b, "out": out, "metric": "dot", "device": "cpu", **more}
    options |= {"k": K, "graph": True, **more} if find is topk else {"least": LEAST}
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            PROGRAM.format(rows=chunk_rows, sparse=sparse),
            find.__name__,
            json.dumps(options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def at_request(proxy, number, find, rows, act, **more):
    """A process for which `act(process, request)` is called at its so manieth request that writes something;
    then the request is not passed on."""
    count, lock, running = itertools.count(), threading.Lock(), []

    def fault(method, path):
        started.wait(60)
        with lock:
            if method in ("PUT", "POST", "DELETE") and next(count) == number:
                return lambda request: act(running[0], request)
        return None

    started = threading.Event()
    proxy.fault = fault
    running.append(process(find, rows, **more))
    started.set()
    return running[0]


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [False, True], ids=["not put", "put"])
@BOTH
def test_kill_at_any_request(rows, proxy, find, arrives):
    def kill(running, request):
        running.kill()
        running.wait()
        if arrives:
            proxy.send(request)

    out = addresses.objects_at(rows[-1])
    for number in itertools.count(0, 3):
        out.delete(keys(rows[-1]))
        running = at_request(proxy, number, find, rows, kill)
        _, said = running.communicate(timeout=200)
        proxy.fault = lambda method, path: None
        assert running.returncode in (0, -signal.SIGKILL), said
        if running.returncode == 0:
            break
        find(rows, resume=True)
        assert_right(find, rows[-1])
    assert number > 2 * CHUNKS


@pytest.mark.slow
@pytest.mark.parametrize("number", [6, 11])
def test_a_client_that_wakes_up_when_another_result_is_made(rows, proxy, number):
    asleep = threading.Event()

    def stop(running, request):
        running.send_signal(signal.SIGSTOP)
        proxy.send(request)
        asleep.set()

    first = at_request(proxy, number, topk, rows, stop)
    wait_for(lambda: asleep.is_set() or first.poll() is not None)
    proxy.fault = lambda method, path: None
    assert first.poll() is None
    topk(rows, k=K + 1, force=True)
    first.send_signal(signal.SIGCONT)
    _, said = first.communicate(timeout=200)
    assert first.returncode == 1
    assert "somebody else has put" in said or "is being written by another process" in said
    assert_topk(rows[-1], K + 1)


@pytest.mark.slow
@BOTH
def test_a_process_keeps_its_limit(rows, find):
    x = np.random.default_rng(5).integers(-9, 9, (6000, 16)).astype("f4")
    a = put(rows[0] + "x", x, chunks=(1000, 16))
    running = process(find, (a, None, rows[-1]), 1024, 1 << 18, memory_limit=256 << 20)
    said, error = running.communicate(timeout=200)
    assert running.returncode == 0, error
    assert int(said.split()[0]) <= 256 << 20
