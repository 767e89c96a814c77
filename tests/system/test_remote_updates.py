"""β·C of a C in an object store: it is added once to every chunk, whatever ends a run, and whenever. The
arrays hold small integers, so that every result is exact."""

import itertools
import signal
import threading
from functools import partial
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import s3
import zarr
from conftest import ooc
from faults import Failing, with_blocks
from shelf import got, keys, put, slowly, wait_for

import ooc_gemm
import ooc_gemm.run.prepare
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.several import Several
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.read import addresses
from ooc_gemm.storage.write import publication, staging_store

pytestmark = pytest.mark.skipif(bool(s3.missing()), reason=s3.missing() or "-")

RNG = np.random.default_rng(23)
A, B = RNG.integers(-9, 9, (190, 60)).astype("f4"), RNG.integers(-9, 9, (60, 170)).astype("f4")
OLD = RNG.integers(-9, 9, (190, 170)).astype("f4")
OLD[50:100, 100:150] = 0  # a chunk that is not stored
BETA = -3
WANTED = A.astype("f8") @ B + BETA * OLD.astype("f8")
CHUNKS = 16
LAYOUTS = {
    "raw": {},
    "zstd": {"compressors": zarr.codecs.ZstdCodec()},
    "checksum": {"compressors": [zarr.codecs.Crc32cCodec()]},
    "v2": {"zarr_format": 2},
}


@pytest.fixture
def update(shelf, proxy):
    """A, B and the old C in the store; how to update C."""
    put(f"{shelf}/a", A)
    put(f"{shelf}/b", B)

    def made(layout="raw"):
        put(f"{shelf}/c", OLD, **{"chunks": (50, 50), "overwrite": True, **LAYOUTS[layout]})

    made()
    c = f"{shelf}/c"
    proxy.seen.clear()
    return SimpleNamespace(
        a=f"{shelf}/a",
        b=f"{shelf}/b",
        c=c,
        made=made,
        args=("multiply", f"{shelf}/a", f"{shelf}/b", c, "-d", "cpu", "--beta", str(BETA)),
        there=addresses.objects_at(c),
    )


def run(update, **options):
    options = {"beta": BETA, "device": "cpu", "memory_limit": "600MiB", **options}
    return ooc_gemm.multiply(update.a, update.b, update.c, **options)


def is_chunk(key):
    """Whether a key below C's address is that of a chunk, of version 3 or 2."""
    return key.startswith("c/") or key.replace(".", "").isdecimal()


def puts_chunk(update, method, path):
    inside = path.partition("?")[0].partition(update.c.removeprefix("s3:/") + "/")[2]
    return method == "PUT" and is_chunk(inside)


def chunk_puts(update, proxy):
    return sum(puts_chunk(update, *request) for request in proxy.seen)


def after(update, count, fault):
    """A fault of every put of a chunk but the first so many."""
    left, lock = itertools.count(), threading.Lock()

    def found(method, path):
        if puts_chunk(update, method, path):
            with lock:
                return fault if next(left) >= count else None
        return None

    return found


def assert_updated(update):
    assert np.array_equal(got(update.c), WANTED)
    left = {key for key in keys(update.c) if not is_chunk(key)}
    assert left in ({"zarr.json"}, {".zarray", ".zattrs"})


# ------------------------------------------------------------------------------------------- interruptions


@pytest.mark.slow
@pytest.mark.parametrize("noted", [True, False], ids=["noted", "killed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_fails_goes_on(update, proxy, monkeypatch, layout, noted):
    """`killed`: nobody could put the journal, so only the chunks say what is done."""
    update.made(layout)
    resume, done = False, 0
    for count in (5, 0, 4):
        proxy.fault = after(update, count, 403)
        with monkeypatch.context() as patch:
            if not noted:
                patch.setattr(publication.Publication, "pause", lambda self: self._log.close())
            with pytest.raises(ooc_gemm.StoreError, match="continue with resume=True"):
                run(update, resume=resume)
        resume, done = True, done + count
    proxy.fault = lambda method, path: None
    for force in (False, True):
        with pytest.raises(ooc_gemm.InputError, match=r"unfinished result .* resume=True"):
            run(update, force=force)
    proxy.seen.clear()
    result = run(update, resume=True, beta=None)  # which the journal knows
    assert chunk_puts(update, proxy) == CHUNKS - done
    assert result.bytes_written == result.plan.bytes_written == (CHUNKS - done) * 50 * 50 * 4
    assert result.bytes_read == result.plan.bytes_read
    assert_updated(update)
    proxy.seen.clear()
    assert "finished already" in ooc(*update.args, "--resume").err
    assert chunk_puts(update, proxy) == 0


def test_an_answer_that_is_lost_is_no_reason_to_add_twice(update, proxy):
    """The client sends the put again, and the store refuses it: the first one has replaced the chunk."""
    lost, lock = [], threading.Lock()

    def fault(method, path):
        with lock:
            if puts_chunk(update, method, path) and path not in lost and len(lost) < CHUNKS // 2:
                lost.append(path)
                return proxy.send
        return None

    proxy.fault = fault
    run(update)
    assert len(lost) == CHUNKS // 2
    assert_updated(update)


@pytest.mark.parametrize("when", ["before", "meanwhile", "afterwards"])
def test_puts_of_a_client_that_is_gone_arrive_late(update, proxy, monkeypatch, when):
    """`meanwhile`: when the run that continues has read the old C, and before it puts anything."""
    late, lock = {}, threading.Lock()

    def keep(method, path):
        with lock:
            if not puts_chunk(update, method, path) or len(late) == 6 or path in late:
                return 403 if puts_chunk(update, method, path) else None
            return partial(late.__setitem__, path)

    def deliver():
        with lock:
            answers.extend(proxy.send(request) for request in late.values())
            late.clear()

    def deliver_first(method, path):
        if puts_chunk(update, method, path):
            deliver()

    answers = []
    proxy.fault = keep
    monkeypatch.setattr(publication.Publication, "pause", lambda self: self._log.close())
    with pytest.raises(ooc_gemm.StoreError):
        run(update)
    count = len(late)
    assert count
    proxy.fault = deliver_first if when == "meanwhile" else lambda method, path: None
    if when == "before":
        deliver()
    proxy.seen.clear()
    run(update, resume=True)
    sent = chunk_puts(update, proxy)
    # Meanwhile: some are found before they are put, others are refused.
    assert CHUNKS - count <= sent <= CHUNKS
    assert when == "meanwhile" or sent == (CHUNKS - count if when == "before" else CHUNKS)
    if when == "afterwards":
        deliver()
    assert answers == [412 if when == "afterwards" else 200] * count
    assert_updated(update)


def test_what_somebody_else_writes_during_the_run_is_not_overwritten(update, proxy):
    other = np.full((50, 50), 7, "<f4").tobytes()
    left = [update.there.put]

    def change(method, path):
        if puts_chunk(update, method, path) and left:
            left.pop()("c/3/1", other)

    proxy.fault = change
    with pytest.raises(ooc_gemm.StoreError, match=r"somebody else has changed its chunk c/3/1 while C was "):
        run(update, memory_limit="600MiB")
    assert update.there.read("c/3/1", 1 << 20) == other
    with pytest.raises(ooc_gemm.InputError, match="/c was changed since, or is another array"):
        run(update, resume=True)


@pytest.mark.parametrize("given", ["arrays", "open"])
def test_a_c_without_a_journal_and_one_that_is_given_open(update, proxy, given):
    """Nobody could tell whether NumPy arrays are the same again, so such a run has no journal."""
    operands = (A, B) if given == "arrays" else (update.a, update.b)
    c = zarr.open_array(addresses.remote_place(update.c)) if given == "open" else update.c
    ooc_gemm.multiply(*operands, c, beta=BETA, device="cpu", memory_limit="600MiB")
    noted = any(method == "PUT" and path.endswith(unfinished.JOURNAL) for method, path in proxy.seen)
    assert noted == (given == "open")
    assert_updated(update)


def test_a_c_that_cannot_be_continued_has_to_be_put_back(update, proxy):
    proxy.fault = after(update, 5, 403)
    with pytest.raises(ooc_gemm.StoreError, match="; check its store and start over from a C as it was"):
        ooc_gemm.multiply(A, B, update.c, beta=BETA, device="cpu", memory_limit="600MiB")


def test_a_run_that_was_killed_before_it_changed_c(update):
    update.there.put(unfinished.JOURNAL, b'{"version": 1, "inputs": {}, "options": {}}\n')
    with pytest.raises(ooc_gemm.InputError, match=r"/c has the journal of a run .*; continue it with resume"):
        run(update)
    assert np.array_equal(got(update.c), OLD)
    run(update, resume=True)
    assert_updated(update)
    update.made()
    update.there.put(unfinished.JOURNAL, b'{"version": 1, "inputs": {}, "options": {}}\n')
    run(update, force=True)
    assert_updated(update)


def test_a_store_without_conditional_requests(tmp_path, monkeypatch):
    """Nor does it keep metadata of objects. So only what the journal has is done, and where the journal lacks
    a chunk that was put, the run is not continued."""
    obstore = pytest.importorskip("obstore")
    place = zarr.storage.ObjectStore(obstore.store.LocalStore(tmp_path))
    for name, values in (("a", A), ("b", B)):
        zarr.create_array(place, name=name, data=values, chunks=(50, 50), compressors=None)
    options = {"beta": BETA, "device": "cpu", "memory_limit": "600MiB"}
    write, lock = staging_store.ObjectStaging.write, threading.Lock()

    def interrupted(count, **more):
        left = iter(range(count))

        def limited(self, *args):
            with lock:  # no put is under way when the run ends
                if next(left, None) is None:
                    raise OSError("the plug is pulled")
                write(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(staging_store.ObjectStaging, "write", limited)
            for name, value in more.items():
                patch.setattr(publication.Publication, name, value)
            with pytest.raises(ooc_gemm.StoreError, match="plug"):
                ooc_gemm.multiply(a, b, c, **options)

    for count, more in ((5, {}), (1, {"pause": lambda self: self._log.close()})):
        zarr.create_array(place, name="c", data=OLD, chunks=(50, 50), compressors=None, overwrite=True)
        a, b, c = (zarr.open_array(place, path=name) for name in "abc")
        interrupted(count, **more)
        if more:
            with pytest.raises(ooc_gemm.InputError, match="/c was changed since, or is another array"):
                ooc_gemm.multiply(a, b, c, resume=True, **options)
            continue
        result = ooc_gemm.multiply(a, b, c, resume=True, **options)
        assert result.bytes_written == (CHUNKS - 5) * 50 * 50 * 4
        assert np.array_equal(zarr.open_array(place, path="c")[...], WANTED)


@pytest.mark.parametrize("beta", [0, BETA])
def test_a_device_that_fails_leaves_its_work_to_the_others(update, monkeypatch, beta):
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(100, 50, 60))
    notes = []
    run(
        update,
        beta=beta,
        device=Several([Failing(1, 3), CPU(1)]),
        notice=notes.append,
        **({} if beta else {"force": True, "chunks": (50, 50)}),
    )
    assert [note for note in notes if "fallen off the bus" in note and "the run continues on cpu" in note]
    assert [note for note in notes if "blocks are done already" in note]
    assert np.array_equal(got(update.c), WANTED if beta else A.astype("f8") @ B)


# ------------------------------------------------------------------------------------------------- kill -9


def writes(method):
    return method in ("PUT", "POST", "DELETE")


def killed(update, proxy, args, number, arrives, saved):
    """A process that is killed at its so manieth request that writes something, which arrives or does not;
    whether it was killed before it ended."""
    count, lock, process = itertools.count(), threading.Lock(), []

    def kill(request):
        process[0].kill()
        process[0].wait()
        if arrives:
            proxy.send(request)

    def fault(method, path):
        with lock:
            return kill if writes(method) and next(count) == number else None

    started = threading.Event()
    proxy.fault = lambda method, path: started.wait(60) and fault(method, path)
    process.append(slowly(*args, saved=saved))
    started.set()
    _, said = process[0].communicate(timeout=200)
    proxy.fault = lambda method, path: None
    assert process[0].returncode in (0, -signal.SIGKILL), said
    return process[0].returncode != 0


def go_on(update):
    """The arguments of a run that continues; None where nothing was begun, or the result is there."""
    return (*update.args, "--resume") if unfinished.is_begun(update.there) else None


@pytest.mark.slow
@pytest.mark.parametrize("saved", [0, 60], ids=["every chunk is noted", "none is noted"])
@pytest.mark.parametrize("arrives", [False, True], ids=["not put", "put"])
def test_kill_at_every_request(update, proxy, arrives, saved):
    """Every other one, in two of the four cases the others: each is put and is not put, and is of either way
    to note chunks."""
    for number in itertools.count(arrives ^ (saved > 0), 2):
        update.made()
        left = killed(update, proxy, update.args, number, arrives, saved)
        if not left:
            break
        if args := go_on(update):
            done = ooc(*args)
            assert done.code == 0, (number, done.err)
        elif np.array_equal(got(update.c), OLD):
            assert number == 0
            continue
        assert_updated(update)
    assert number >= CHUNKS + 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_after_run_is_killed(update, proxy, layout, seed):
    random, kills = np.random.default_rng(seed), 0
    update.made(layout)
    args = update.args
    while args and killed(
        update, proxy, args, int(random.integers(1, 9)), random.random() < 0.5, random.choice([0, 60])
    ):
        kills += 1
        args = go_on(update)
    assert kills >= 3
    assert_updated(update)


# ------------------------------------------------------------------------- a client that counts as dead


def stopped(update, proxy, number, saved=60):
    """A process that is stopped at its so manieth request that writes something, whose answer it gets when
    it is woken."""
    count, lock, process, asleep = itertools.count(), threading.Lock(), [], threading.Event()

    def fault(method, path):
        with lock:
            if writes(method) and next(count) == number:
                process[0].send_signal(signal.SIGSTOP)
                asleep.set()

    started = threading.Event()
    proxy.fault = lambda method, path: started.wait(60) and fault(method, path)
    process.append(slowly(*update.args, saved=saved))
    started.set()
    wait_for(lambda: asleep.is_set() or process[0].poll() is not None)
    proxy.fault = lambda method, path: None
    return process[0]


def wake(process):
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=200)
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 4, 9, 15, 18])
@pytest.mark.parametrize("woken", ["afterwards", "meanwhile"])
def test_a_client_that_wakes_up(update, proxy, number, woken):
    """`meanwhile`: both make C at the same time."""
    first = stopped(update, proxy, number)
    assert first.poll() is None
    if woken == "meanwhile":
        first.send_signal(signal.SIGCONT)
    done = ooc(*update.args, "--resume")
    code, said = wake(first)
    if woken == "afterwards":
        assert (done.code, code) == (0, 1), (done.err, said)
        assert "is being written by another process" in said or "somebody else has changed" in said
    elif done.code:  # C was finished by the first before the second looked
        assert code == 0, (done.err, said)
    if unfinished.is_begun(update.there):
        assert ooc(*update.args, "--resume").code == 0
    assert_updated(update)


@pytest.mark.slow
def test_a_client_that_wakes_up_when_c_is_updated_once_more(update, proxy):
    """It was stopped when it had seen that all chunks are its own, and must not publish C now."""
    first, asleep = [], threading.Event()

    def fault(method, path):
        below = parse_qs(urlsplit(path).query).get("prefix", [""])[0]
        listed = below.endswith("/c/") and chunk_puts(update, proxy) >= CHUNKS
        if listed and not asleep.is_set():
            first[0].send_signal(signal.SIGSTOP)
            asleep.set()

    proxy.fault = lambda method, path: started.wait(60) and fault(method, path)
    started = threading.Event()
    first.append(slowly(*update.args))
    started.set()
    wait_for(lambda: asleep.is_set() or first[0].poll() is not None)
    assert first[0].poll() is None
    assert ooc(*update.args, "--resume").code == 0
    assert_updated(update)
    proxy.fault = after(update, 5, 403)
    with pytest.raises(ooc_gemm.StoreError):
        run(update)
    proxy.fault = lambda method, path: None
    code, said = wake(first[0])
    assert (code, "is being written by another process" in said) == (1, True), said
    assert ooc(*update.args, "--resume").code == 0
    assert np.array_equal(got(update.c), A.astype("f8") @ B + BETA * WANTED)
