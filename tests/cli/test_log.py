"""Lines off a terminal, the log file, and the status that SIGUSR1 prints, of real processes."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime

import numpy as np
import pytest
from conftest import make, ooc
from outcome import snapshot

import ooc_gemm
from ooc_gemm.support import meter

LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d z: \d+ %(, .*)?"
PROCESS = """
import sys, time
from ooc_gemm.support import meter
from ooc_gemm.engine import execute
meter.LOG_SECONDS = float(sys.argv.pop(1))
wait, pause = execute.wait_for_all, float(sys.argv.pop(1))
execute.wait_for_all = lambda *given: (time.sleep(pause), wait(*given))
from ooc_gemm.cli import main
main()
"""
"""`ooc-gemm` with another interval between lines, and a pause before each step."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in "xy":
        make(name, rng.standard_normal((64, 64), np.float32), chunks=(16, 16))
    return tmp_path


def begun(*args, every=0.05, pause=0.1):
    """A process that multiplies slowly. All of its output goes to pipes."""
    command = [sys.executable, "-c", PROCESS, str(every), str(pause), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_off_a_terminal_a_run_prints_plain_lines_and_keeps_a_log(here):
    """And the status on SIGUSR1. One process shows all three, because starting one takes long."""
    with begun("multiply", "x", "y", "z", "-d", "cpu", "--log-file", "log") as process:
        while not (here / "log").exists() or "progress" not in (here / "log").read_text("utf-8"):
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate()
    assert process.returncode == 0
    assert out.startswith("z: 64×64 float32")
    assert "\x1b" not in err + out
    lines = [line for line in err.splitlines() if not line.startswith("Note: ")]
    assert lines
    assert all(re.fullmatch(LINE, line) for line in lines), lines
    found = [json.loads(line) for line in (here / "log").read_text("utf-8").splitlines()]
    events = [one["event"] for one in found]
    assert events[0] == "start"
    assert events[-1] == "end"
    assert {"plan", "progress", "done"} <= set(events)
    assert all(datetime.fromisoformat(one["time"]).tzinfo for one in found)
    assert len(lines) == events.count("progress") + 1  # the status
    told = next(one for one in found if one["event"] == "progress")
    keys = "work percent bytes_read bytes_in_all bytes_per_second flops_per_second seconds seconds_left"
    assert set(keys.split()) <= told.keys()
    assert 0 <= told["percent"] <= 100
    assert found[events.index("plan")]["plan"]["blocks"] >= 1
    assert found[0]["arguments"][:3] == ["multiply", "x", "y"]
    assert (found[-1]["status"], "error" in found[-1]) == (0, False)


def test_a_log_ends_with_the_error(here):
    for _ in range(2):  # it is appended to
        done = ooc("multiply", "x", "no", "z", "--log-file", "log")
        assert done.code == 2
    found = [json.loads(line) for line in (here / "log").read_text("utf-8").splitlines()]
    assert [one["event"] for one in found] == ["start", "end"] * 2
    assert found[-1]["status"] == 2
    assert done.err == f"Error: {found[-1]['error']}\n"
    assert not meter.log.handlers


def test_a_log_that_cannot_be_written_is_refused(here):
    done = ooc("multiply", "x", "y", "z", "--log-file", "missing/log")
    assert done.code == 2
    assert "missing/log" in done.err
    assert not (here / "z").exists()


@pytest.mark.parametrize(
    "run",
    [
        lambda told: ooc_gemm.multiply("x", "y", "c", device="cpu", progress=told),
        lambda told: ooc_gemm.topk("x", "y", "c", k=3, device="cpu", progress=told),
        lambda told: ooc_gemm.threshold("x", out="c", least=0.1, device="cpu", progress=told),
    ],
    ids=["multiply", "topk", "threshold"],
)
def test_everything_is_done_when_all_is_written(here, run):
    seen = []

    def told(fraction, plan, trace):
        percents = [str(one).partition(" %")[0].rpartition(" ")[2] for one in meter.Meter.under_way]
        seen.append((fraction, (here / "c" / "zarr.json").exists()))
        assert not {"100"} & set(percents)

    run(told)
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert all((fraction == 1) == there for fraction, there in seen)


@pytest.mark.parametrize("files", [("report", "trace"), ("trace", "log-file"), ("report", "log-file")])
def test_two_options_do_not_write_one_file(here, files):
    one, other = files
    done = ooc("multiply", "x", "y", "z", "-d", "cpu", f"--{one}", "f.html", f"--{other}", "./f.html")
    assert done.code == 2
    assert f"--{one} and --{other} name the same file, ./f.html;" in done.err
    assert not (here / "z").exists()
    if "log-file" not in files:
        assert not (here / "f.html").exists()
        assert ooc("multiply", "x", "y", "z", "-d", "cpu", "--report", "f.html", "--trace", "g").code == 0


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", ["zarr.json", ".zarray", "run.log", "c/0/0"])
def test_a_log_does_not_go_into_an_array(here, name, version):
    make("held", np.ones((4, 4)), zarr_format=version, chunks=(2, 2))
    before = snapshot("held")
    done = ooc("multiply", "held", "held", "made", "--log-file", f"held/{name}")
    assert done.code == 2
    assert "lies inside the array" in " ".join(done.err.split())
    assert snapshot("held") == before
    assert not os.path.exists("made")


def test_credentials_are_not_in_the_log(here):
    ooc("verify", "s3://KEYNAME:hidden-word@bucket/a", "y", "y", "--log-file", "log")
    assert "hidden-word" not in (here / "log").read_text("utf-8")


def test_python_logs_without_handlers_of_its_own(here, caplog, monkeypatch):
    assert not meter.log.handlers
    monkeypatch.setattr(meter, "LOG_SECONDS", 0.01)
    with caplog.at_level(logging.INFO, "ooc_gemm"):
        ooc_gemm.multiply("x", "y", "z", device="cpu", progress=lambda *_: time.sleep(0.05))
    kinds = [record.event for record in caplog.records]
    assert kinds[0] == "plan"
    assert "progress" in kinds
    assert kinds[-1] == "done"
    caplog.clear()
    ooc_gemm.multiply("x", "y", "z", device="cpu", force=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["random", "z", "--shape", "64,64", "--chunks", "8,8"], "random z: "),
        (["verify", "x", "y", "x"], "verify: "),
        (["pca", "x", "z", "-k", "2"], "components of x: "),
        (["lstsq", "x", "y", "z"], "fit a model to x: "),
        (["corrcoef", "x", "z", "-d", "cpu"], "find the means of x: "),
        (["topk", "x", "y", "z", "-d", "cpu"], "comparison of rows: "),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_every_command_says_how_far_it_is(here, monkeypatch, command, said):
    monkeypatch.setattr(meter, "LOG_SECONDS", 0.001)
    call = meter.Meter.__call__

    def slowly(self, fraction):
        call(self, fraction)
        time.sleep(0.005)

    monkeypatch.setattr(meter.Meter, "__call__", slowly)
    shown = ooc(*command).err
    assert said in shown
    assert not meter.Meter.under_way
    assert said not in ooc(*command, "-f" if command[0] != "verify" else "-Q", "-Q").err


EARLY = """
import os, signal, sys
from ooc_gemm import cli

class Sends:
    def find_spec(self, name, *rest):
        if name == "click":
            sent.append(os.kill(os.getpid(), signal.SIGUSR1))

sent = []
sys.meta_path.insert(0, Sends())
sys.argv = ["ooc-gemm", "--version"]
try:
    cli.main()
finally:
    assert sent
"""


def test_a_signal_that_comes_while_libraries_are_imported_does_not_end_the_process():
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
