"""Runs that end in order before a time, and are continued. The oracle is an uninterrupted run."""

import json
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import zarr
from conftest import make, ooc

import ooc_gemm
from ooc_gemm.cli import stop
from ooc_gemm.support import errors

SLOW = """
import sys, time
from ooc_gemm.engine import execute
from ooc_gemm.run import rates_first
rates_first.SHARE = 0.0
wait, pause = execute.wait_for_all, float(sys.argv.pop(1))
execute.wait_for_all = lambda *given: (time.sleep(pause), wait(*given))
from ooc_gemm.cli import main
main()
"""
"""`ooc-gemm` with a pause before each step."""
LIMIT = "108MiB"


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """Two inputs, and their product by an uninterrupted run of several blocks."""
    folder = tmp_path_factory.mktemp("stop")
    for name, seed in (("a", 1), ("b", 2)):
        ooc_gemm.random(folder / name, (1500, 1500), chunks=(250, 250), seed=seed)
    return folder


def options(folder, *more):
    """The arguments of a product of several blocks."""
    return ["multiply", f"{folder}/a", f"{folder}/b", "c", "-d", "cpu", "-M", LIMIT, *more]


def stopped(folder, pause, seconds):
    """What a process leaves behind that has to stop in so many seconds, and how many are left when it has."""
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    given = ["--stop-before", at.isoformat(), "--chunks", "250,250", "--log-file", "log"]
    command = [sys.executable, "-c", SLOW, str(pause), *options(folder, *given)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done, at.timestamp() - time.time()


def continued(folder):
    """The result of a run that continues, whose C must be that of an uninterrupted one."""
    again = ooc(*options(folder, "--resume", "--json"))
    assert again.code == 0, again
    run = {"device": "cpu", "memory_limit": LIMIT, "chunks": (250, 250)}
    ooc_gemm.multiply(folder / "a", folder / "b", "whole", **run)
    assert np.array_equal(zarr.open_array("c")[...], zarr.open_array("whole")[...])
    return json.loads(again.out)


@pytest.mark.slow
def test_a_process_stops_before_the_time_and_is_continued(arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done, left = stopped(arrays, 0.2, 14)  # all of it would take 22 s, a block 1.2 s; 5 s are kept free
    assert done.returncode == 143, done
    assert left > 0
    assert "Stopped: the run ended in order after" in done.stderr
    assert "continue with --resume" in done.stderr
    assert continued(arrays)["blocks_resumed"] > 0


@pytest.mark.slow
def test_a_block_that_takes_too_long_is_given_up(arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done, _ = stopped(arrays, 60, 6)
    assert done.returncode == 143, done
    assert "--stop-before is reached" in done.stderr
    assert "--resume" in done.stderr
    assert continued(arrays)["blocks_resumed"] == 0


def test_a_command_stops_where_the_next_block_may_take_too_long(arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(stop, "CAUTION", 1e9)
        done = ooc(*options(arrays, "--stop-before", "2h", "--chunks", "250,250", "--log-file", "log"))
    assert (done.code, done.out) == (143, "")
    said = r"Stopped: the run ended in order after 1 of \d+ blocks; continue with --resume\n"
    assert re.fullmatch(said, done.err)
    last = json.loads((tmp_path / "log").read_text("utf-8").splitlines()[-1])
    assert (last["event"], last["status"]) == ("end", 143)
    assert continued(arrays)["blocks_resumed"] == 1


@pytest.mark.parametrize("last", [1, 3])
def test_the_block_under_way_is_finished(arrays, tmp_path, monkeypatch, last):
    monkeypatch.chdir(tmp_path)

    def enough(fraction, plan, trace):
        return errors.ENOUGH if fraction * plan.block_count > last - 0.5 else None

    run = {"device": "cpu", "memory_limit": LIMIT, "chunks": (250, 250)}
    with pytest.raises(errors.StoppedError, match=f"after {last} of "):
        ooc_gemm.multiply(arrays / "a", arrays / "b", "c", progress=enough, **run)
    result = ooc_gemm.multiply(arrays / "a", arrays / "b", "c", resume=True, **run)
    assert result.blocks_resumed == last
    # The answer does not matter after the last block.
    whole = ooc_gemm.multiply(
        arrays / "a",
        arrays / "b",
        "whole",
        progress=lambda fraction, *_: errors.ENOUGH if fraction == 1 else None,
        **run,
    )
    assert whole.blocks_resumed == 0
    assert np.array_equal(zarr.open_array("c")[...], zarr.open_array("whole")[...])


@pytest.mark.slow
def test_neighbours_are_continued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("a", np.random.default_rng(0).standard_normal((9000, 16), np.float32), chunks=(1000, 16))
    run = {"k": 3, "memory_limit": "178MiB", "device": "cpu"}
    seen = []

    def enough(fraction, plan, trace):
        seen.append(fraction)
        return errors.ENOUGH if fraction > 0.3 else None

    with pytest.raises(errors.StoppedError) as failed:
        ooc_gemm.topk("a", None, "n", progress=enough, **run)
    assert failed.value.__cause__ is not failed.value
    assert seen[-1] < 1
    again = ooc_gemm.topk("a", None, "n", resume=True, **run)
    assert 0 < again.rows_resumed < 9000
    whole = ooc_gemm.topk("a", **run)
    assert np.array_equal(again.indices[...], whole.indices)


class Plan:
    """What is asked of a plan."""

    block_count, c_buffers, writers = 10, 2, 2


class Trace:
    """Blocks that take so many seconds each."""

    def __init__(self):
        self.now, self.seconds = 0.0, {"download": 0.0, "write": 0.0}

    def age(self):
        return self.now


@pytest.mark.parametrize(("left", "blocks"), [(1000, 10), (65, 5), (26, 2), (12, 1)])
def test_no_block_begins_that_may_not_end_in_time(monkeypatch, left, blocks):
    """Each takes 10 s, and to write it takes 2 s. (5 s are kept free, or a tenth.)"""
    clock, trace = [1e9], Trace()
    monkeypatch.setattr(stop.time, "time", lambda: clock[0])
    until = stop.Until(1e9 + left)
    for number in range(1, 11):
        trace.now += 10
        clock[0] += 10
        trace.seconds["write"] += 2 * Plan.writers if number > 1 else 0
        assert until.look((number - 0.5) / 10, Plan, trace) is None
        if until.look(number / 10, Plan, trace) is errors.ENOUGH:
            break
    assert number == blocks


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1d2h", 93600)],
)
def test_durations(given, seconds):
    assert stop.Moment().convert(given, None, None) == pytest.approx(time.time() + seconds, abs=1)


@pytest.mark.parametrize("given", ["2030-01-02T03:04:05Z", "2030-01-02T04:04:05+01:00"])
def test_times(given):
    assert stop.Moment().convert(given, None, None) == datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("given", ["", "soon", "0s", "2001-01-01", "5", "1e9", "-3h"])
def test_what_is_no_time_to_come_is_refused(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    done = ooc("multiply", "a", "b", "c", "--stop-before", given)
    assert done.code == 2
    assert "--stop-before" in done.err


def test_the_watch_ends_with_the_command(tmp_path, monkeypatch):
    """So that it does not end a process that goes on."""
    monkeypatch.chdir(tmp_path)
    make("a", np.eye(4))
    monkeypatch.setattr(stop, "RESERVE_SHARE", 0.9)
    called = []
    monkeypatch.setattr(stop.os, "kill", lambda *given: called.append(given))
    assert ooc("multiply", "a", "a", "c", "-d", "cpu", "--stop-before", "4s").code == 0
    time.sleep(0.5)
    assert not called
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
