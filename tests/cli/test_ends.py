"""How commands end, and what they show meanwhile."""

import os
import pty
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import CPU, make_arrays
from conftest import Done, make, ooc
from threadpoolctl import threadpool_info

import ooc_gemm
from ooc_gemm.run import retry


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×40, raw), b (40×100, compressed) and their product c."""
    make_arrays(tmp_path, monkeypatch)
    return tmp_path


# --------------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "Interrupted: "),
        (ooc_gemm.InputError("x is wrong; mend it"), 2, "Error: x is wrong; mend it\n"),
        (ooc_gemm.BudgetError("too small", 1), 2, "Error: too small\n"),
        (ooc_gemm.StoreError("x: chunk c/0/0 is bad"), 1, "Error: x: chunk c/0/0 is bad\n"),
        (ooc_gemm.RangeError("too large"), 1, "Error: too large\n"),
        (ooc_gemm.DeviceError("it is gone"), 1, "Error: it is gone\n"),
        (ZeroDivisionError("by zero"), 1, "Error: ZeroDivisionError: by zero (-v shows where)\n"),
        (MemoryError(), 1, "Error: the system gives this process no more memory; give a smaller"),
    ],
)
def test_exit_status(here, monkeypatch, error, code, said):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(retry, "carry_out", fail)
    done = ooc("multiply", "a", "b", "new")
    assert isinstance(done, Done)
    assert (done.code, done.out) == (code, "")
    assert done.err.strip().startswith(said.strip())
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["multiply", "a", "b", "new"], "run again with --resume to go on"),
        (["random", "new", "--shape", "9,9"], "run the command again to start over"),
    ],
)
def test_an_interruption_says_how_to_go_on(here, monkeypatch, command, said):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(retry, "carry_out", stop)
    monkeypatch.setattr("ooc_gemm.run.generate.random", stop)
    done = ooc(*command)
    assert done.code == 130
    assert said in done.err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (MemoryError, 1)])
@pytest.mark.parametrize("step", ["blas.threadpool_limits", "workers.ThreadPoolExecutor", "session.Stream"])
def test_a_device_that_does_not_get_started(here, monkeypatch, step, error, code):
    def fail(*args, **options):
        raise error

    before = threadpool_info()
    with monkeypatch.context() as patched:
        patched.setattr(f"ooc_gemm.devices.cpu.{step}", fail)
        done = ooc("multiply", "a", "b", "new", *CPU)
    assert done.code == code
    assert done.err.strip().startswith("Interrupted: " if code == 130 else "Error: the system gives")
    assert threadpool_info() == before
    assert ooc("multiply", "a", "b", "new", *CPU, "-f").code == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", [("info",), ("info", "--json"), ("--help",), ("multiply", "a", "b", "new", "--json", *CPU)]
)
def test_output_that_cannot_be_written(here, command, unbuffered):
    call = [sys.executable, "-m", "ooc_gemm.cli", *command]
    with open("/dev/full", "w") as full:
        run = partial(subprocess.run, call, text=True, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
        done = run(stdout=full, stderr=subprocess.PIPE)
        assert run(stdout=subprocess.DEVNULL, stderr=full).returncode == (2 if "multiply" in command else 0)
    said = "Error: standard output cannot be written (No space left on device); send it to another place\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert (here / "new" / "zarr.json").exists() == ("multiply" in command)


def test_standard_streams_that_are_closed(here):
    done = subprocess.run(
        [sys.executable, "-m", "ooc_gemm.cli", "multiply", "a", "b", "new", *CPU],
        preexec_fn=lambda: (os.close(1), os.close(2)),
    )
    assert done.returncode == 0
    assert ooc("verify", "a", "b", "new").code == 0


def test_results_that_do_not_fit_are_an_error_while_running(here):
    make("big", np.full((3, 3), 2**40), chunks=(3, 3))
    done = ooc("multiply", "big", "big", "new", *CPU)
    assert done.code == 1
    assert "int64" in done.err
    assert not Path("new/zarr.json").exists()


# ------------------------------------------------------------------------------------------------- progress


def on_a_terminal(*args, columns, code=0):
    """Standard error of a process for which it is a terminal, and what standard output holds."""
    terminal, inside = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "ooc_gemm.cli", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=inside,
        env=environment,
    ) as process:
        os.close(inside)
        shown = b""
        while True:
            try:
                shown += (block := os.read(terminal, 4096))
            except OSError:  # the other side is closed
                break
            if not block:
                break
        out = process.stdout.read()
    os.close(terminal)
    assert process.returncode == code
    return shown.decode(), out.decode()


@pytest.mark.parametrize("args", [("b", "b", "new"), ("b", "none", "new")])
def test_errors_on_a_terminal_are_broken_between_words(here, args):
    args = ["multiply", *args, *CPU, "-Q"]
    shown, _ = on_a_terminal(*args, columns=40, code=2)
    lines, whole = shown.replace("\r", "").splitlines(), ooc(*args).err
    assert len(lines) > len(whole.splitlines())
    assert max(map(len, lines)) <= 40
    assert " ".join(lines).split() == whole.split()


def test_progress_of_random(here):
    seen = []
    ooc_gemm.random("r", (70, 30), dtype="int16", chunks=(25, 20), progress=lambda *found: seen.append(found))
    done = [first for first, _ in seen]
    assert len(seen) == 6  # the chunks
    assert done == sorted(set(done))
    assert done[-1] == 70 * 30 * 2
    assert {total for _, total in seen} == {70 * 30 * 2}


@pytest.mark.slow
def test_the_bar(here):
    for name, seed in (("x", 1), ("y", 2)):
        ooc_gemm.random(name, (1500, 1500), chunks=(250, 250), seed=seed)
    args = ["multiply", "x", "y", "z", "-f", *CPU, "-M", "112MiB"]
    for columns in (110, 60):
        shown, out = on_a_terminal(*args, columns=columns)
        assert "%" in shown
        assert "FLOP/s" in shown
        assert "read " in shown
        assert " left" in shown
        assert "…" not in shown  # nothing is cut off
        assert out.startswith("z: 1500×1500 float32")
    assert on_a_terminal(*args, "-Q", columns=110)[0] == ""
    piped = ooc(*args[:-2])
    assert (piped.code, piped.err) == (0, "")
    shown, out = on_a_terminal("random", "r", "--shape", "1500,1500", "--chunks", "100,1500", columns=80)
    for text in ("%", "B/s", "wrote ", " left"):
        assert text in shown
    assert out.startswith("r: 1500×1500 float32")
    assert on_a_terminal("random", "r", "-f", "--shape", "9,9", "-Q", columns=80)[0] == ""
    shown, out = on_a_terminal("verify", "x", "y", "z", columns=80)
    for text in ("%", "B/s", "read ", " left"):
        assert text in shown
    assert out.startswith("z is the product")
    assert on_a_terminal("verify", "x", "y", "z", "-Q", columns=80)[0] == ""
