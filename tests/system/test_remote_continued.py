"""Runs in an object store that are interrupted, and go on; and what changes during one."""

import contextlib
import json
import signal
import threading

import numpy as np
import pytest
import s3
from conftest import Done, ooc
from long_runs import interrupted, long_run, puts
from shelf import got, keys, put, slowly, start, wait_for

from ooc_gemm.storage.read import addresses
from ooc_gemm.storage.write import logs

pytestmark = pytest.mark.skipif(bool(s3.missing()), reason=s3.missing() or "-")

MiB = 1 << 20
RNG = np.random.default_rng(11)


@pytest.fixture
def long(shelf, monkeypatch, proxy):
    """A, B, and how to make C in many chunks, slowly."""
    return long_run(shelf, RNG)


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
