"""The command line: what each command prints, as JSON and for people, and how it ends."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
import numpy as np
import psutil
import pytest
import zarr
from conftest import Done, make, ooc
from threadpoolctl import threadpool_info

import ooc_gemm
from ooc_gemm.cli import show
from ooc_gemm.cli.group import cli
from ooc_gemm.run import retry
from ooc_gemm.storage.io import background

MiB = 1 << 20
CPU = ("-d", "cpu")
RESULT = """m n k dtype out_dtype device kernel precision seconds tflops bytes_read bytes_written
bytes_uploaded bytes_downloaded lower_bound_bytes peak_host_bytes peak_device_bytes stage_seconds
blocks blocks_resumed verified overflowed rechunked bytes_passed bytes_exchanged plan"""


def stored_bytes(path):
    """Of the chunks of an array."""
    return sum(
        file.stat().st_size
        for file in Path(path).rglob("*")
        if file.is_file() and file.name not in ("zarr.json", ".zarray", ".zattrs")
    )


def parsed(done):
    """The one JSON object on standard output, next to which nothing is said."""
    assert done.code == 0, done
    assert done.err == ""
    assert done.out.count("\n") == 1
    return json.loads(done.out)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×40, raw), b (40×100, compressed) and their product c."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((60, 40), "f4"), rng.standard_normal((40, 100), "f4")
    make("a", a, chunks=(20, 20), compressors=None)
    make("b", b, chunks=(30, 30))
    make("c", a @ b, chunks=(30, 30))
    return tmp_path


# --------------------------------------------------------------------------------------------------- JSON


def test_multiply_json(here):
    before = stored_bytes("a") + stored_bytes("b")
    found = parsed(ooc("multiply", "a", "b", "new", *CPU, "--json", "--chunks", "30,50", "-M", "4GiB"))
    assert list(found) == RESULT.split()
    assert (found["m"], found["n"], found["k"]) == (60, 100, 40)
    assert (found["dtype"], found["out_dtype"]) == ("float32", "float32")
    assert (found["device"], found["kernel"], found["precision"]) == ("cpu", "blas", "highest")
    assert found["seconds"] > 0
    assert found["tflops"] == pytest.approx(2 * 60 * 100 * 40 / found["seconds"] / 1e12)
    # The chunks of a fit it evenly, those of b are read whole, and all of C is one block.
    assert found["bytes_read"] == before
    assert found["bytes_written"] == stored_bytes("new") == 60 * 100 * 4
    assert found["lower_bound_bytes"] == before + 60 * 100 * 4
    assert found["bytes_uploaded"] == found["bytes_downloaded"] == found["peak_device_bytes"] == 0
    own = psutil.Process().memory_info().rss
    assert own / 2 < found["peak_host_bytes"] < 100 * own
    assert list(found["stage_seconds"]) == ["read", "upload", "compute", "download", "write"]
    assert all(seconds >= 0 for seconds in found["stage_seconds"].values())
    assert found["stage_seconds"]["compute"] > 0
    assert (found["blocks"], found["blocks_resumed"], found["verified"]) == (1, 0, None)
    plan = found["plan"]
    assert (plan["bm"], plan["bn"], plan["bk"]) == (60, 100, 40)
    assert plan["bytes_read"] == found["bytes_read"]
    assert plan["bytes_written"] == found["bytes_written"]
    assert plan["predicted_seconds"] > 0
    assert plan["memory_limit"] == 4 << 30
    assert plan["chunks"] == [30, 50]
    assert sum(plan["ledger"].values()) == plan["host_bytes"] <= 4 << 30
    assert all(type(size) is int for size in plan["ledger"].values())


def test_plan_json_is_the_plan_of_the_run(here):
    """And it writes nothing."""
    before = sorted(here.rglob("*"))
    planned = parsed(ooc("plan", "a", "b", *CPU, "--json", "-M", "4GiB"))
    assert sorted(here.rglob("*")) == before
    assert planned.pop("feasible") is True
    assert planned == parsed(ooc("multiply", "a", "b", "new", *CPU, "--json", "-M", "4GiB"))["plan"]


def test_plan_json_of_what_does_not_fit(here):
    done = ooc("plan", "a", "b", *CPU, "--json", "-M", "1MiB")
    assert done.code == 2
    assert done.err.startswith("Error: a memory limit of 1048576 bytes is too small")
    found = json.loads(done.out)
    assert found.keys() == {"feasible", "minimum_memory_limit"}
    assert found["feasible"] is False
    least = found["minimum_memory_limit"]
    assert f"{least} bytes" in done.err
    assert parsed(ooc("plan", "a", "b", *CPU, "--json", "-M", least))["feasible"] is True
    assert ooc("plan", "a", "b", *CPU, "--json", "-M", least - 1).code == 2


def test_plan_of_gram_is_the_plan_of_the_run(here):
    for options, run in (([], []), (["--transpose-a"], ["--transpose"])):
        planned = parsed(ooc("plan", "--gram", "a", *options, *CPU, "--json", "-M", "4GiB"))
        assert planned.pop("feasible") is True
        assert planned["symmetric"] is True
        assert planned == parsed(ooc("gram", "a", "new", *run, *CPU, "--json", "-M", "4GiB", "-f"))["plan"]
    assert "product        60×40 · 40×60, symmetric: one half is computed\n" in ooc("plan", "--gram", "a").out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["a", "b", "--gram"], "leave out B or --gram"),
        (["a"], "Missing argument 'B'"),
        (["a", "--gram", "--transpose-b"], "--transpose-b does not go with --gram"),
        (["a", "--gram", "--adjoint-a"], "--adjoint-a does not go with --gram"),
    ],
)
def test_usage_of_plan(here, args, said):
    done = ooc("plan", *args)
    assert done.code == 2
    assert said in done.err


def test_gram_json(here):
    found = parsed(ooc("gram", "a", "new", *CPU, "--json", "-M", "4GiB", "--alpha", "2", "--trace", "t.json"))
    assert list(found) == RESULT.split()
    assert (found["m"], found["n"], found["k"]) == (60, 60, 40)
    assert found["tflops"] == pytest.approx(60 * 61 * 40 / found["seconds"] / 1e12)
    assert found["bytes_read"] == stored_bytes("a") == found["plan"]["bytes_read"]
    assert found["bytes_written"] == stored_bytes("new") == found["plan"]["bytes_written"]
    assert found["lower_bound_bytes"] == stored_bytes("a") + 60 * 60 * 4
    assert found["plan"]["symmetric"] is True
    a, new = (zarr.open_array(name, mode="r")[:] for name in ("a", "new"))
    assert np.array_equal(new, new.T)
    assert np.abs(new - 2 * (a @ a.T)).max() < 1e-4
    assert Path("t.json").exists()
    found = parsed(ooc("gram", "b", "new", "--transpose", *CPU, "--json", "-f", "--chunks", "30,20"))
    assert (found["m"], found["n"], found["k"]) == (100, 100, 40)
    assert ooc("verify", "b", "b", "new", "--transpose-a").code == 0
    assert not parsed(ooc("gram", "b", "new", "--transpose", *CPU, "--json", "--beta", "1"))["plan"][
        "symmetric"
    ]


def test_verify_json(here):
    found = parsed(ooc("verify", "a", "b", "c", "--json", "--rounds", "3", "--seed", "1"))
    assert found == {
        "ok": True,
        "rounds": 3,
        "rows_wrong": 0,
        "first_wrong": None,
        "worst": pytest.approx(0.5, abs=0.5),
        "rows_not_finite": 0,
        "bytes_read": sum(map(stored_bytes, "abc")),
        "alpha": 1,
        "beta": 0,
        "formula": "A·B",
    }
    wrong = zarr.open_array("c", mode="r+")
    wrong[7, 8] += 1
    wrong[9, 0] = np.nan
    done = ooc("verify", "a", "b", "c", "--json")
    assert done.code == 3
    found = json.loads(done.out)
    assert (found["ok"], found["rows_wrong"], found["first_wrong"]) == (False, 2, 7)
    assert found["worst"] > 100


def test_random_json(here):
    found = parsed(ooc("random", "r", "--shape", "70,30", "--dtype", "int16", "--chunks", "35,30", "--json"))
    assert found == {"shape": [70, 30], "dtype": "int16", "bytes_written": 70 * 30 * 2}
    assert stored_bytes("r") == 70 * 30 * 2
    r = zarr.open_array("r", mode="r")
    assert (r.shape, r.dtype, r.chunks) == ((70, 30), np.int16, (35, 30))


def test_info_json(here, monkeypatch):
    found = parsed(ooc("info", "--json"))
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] == psutil.virtual_memory().total
    assert 0 < found["default_memory_limit_bytes"] <= found["memory_bytes"]
    assert found["processor"]
    assert found["blas"]
    for there in (True, False):
        monkeypatch.setattr(background, "THERE", there)
        said = parsed(ooc("info", "--json"))["files_in_memory"]
        assert ("a compiled library" in said, "no C compiler" in said) == (there, not there)
    assert "gpus" in found or found["gpu"].startswith("none (")


# ----------------------------------------------------------------------------------------------- for people


def test_what_people_read(here):
    options = [*CPU, "-M", "4GiB", "--chunks", "60,50"]
    done = ooc("multiply", "a", "b", "new", *options)
    assert (done.code, done.err) == (0, "")
    product, speed, moved = done.out.splitlines()
    assert product == "new: 60×100 float32 = 60×40 · 40×100 float32"
    assert speed.endswith("FLOP/s (blas on cpu)")
    assert "wrote 23.44 KiB" in moved
    assert moved.endswith("of 4.00 GiB host memory")
    assert max(map(len, (product, speed, moved))) <= 80
    table = ooc("plan", "a", "b", *options).out
    assert "blocks of C    1 of 60×100, each in 1 panel of 40\n" in table
    assert "written        23.4 KiB\n" in table
    assert ooc("multiply", "a", "b", "new", *options, "-f", "-v").out.startswith(table)
    done = ooc("gram", "a", "square", *CPU, "-v")
    assert "product        60×40 · 40×60, symmetric: one half is computed\n" in done.out
    assert "(the input holds 9.4 KiB)" in done.out
    assert "\n\nsquare: 60×60 float32 = 60×40 · 40×60 float32\n" in done.out
    assert ooc("random", "r", "--shape", "60,50").out == "r: 60×50 float32, wrote 11.72 KiB\n"
    assert ooc("verify", "a", "b", "new").out.startswith("new is the product, to rounding (worst row at ")
    assert ["cores", str(len(os.sched_getaffinity(0)))] in map(str.split, ooc("info").out.splitlines())
    assert ooc("--version").out == f"ooc-gemm, version {ooc_gemm.__version__}\n"


def test_what_people_read_of_wrong_results(here):
    c = zarr.open_array("c", mode="r+")
    c[7, 8] += 1
    done = ooc("verify", "a", "b", "c")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("Error: c is not the product: 1 row is wrong, the first is row 7 (error ")
    assert done.err.endswith("at worst); compute it again\n")
    c[9, 8] += 1
    assert "2 rows are wrong, the first is row 7" in ooc("verify", "a", "b", "c").err
    a = zarr.open_array("a", mode="r+")
    a[3, 3] = np.nan
    assert ooc("multiply", "a", "b", "c", "-f").code == 0
    assert ooc("verify", "a", "b", "c").out.endswith("; 1 row is NaN or infinite on both sides\n")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * MiB),
        ("8GB", 8 * 10**9),
        ("1.5GiB", 1536 * MiB),
        (".5 GiB", 512 * MiB),
        ("1e9", 10**9),
        ("2gib", 2048 * MiB),
        ("300000000", 300_000_000),
    ],
)
def test_sizes(here, text, size):
    assert parsed(ooc("plan", "a", "b", *CPU, "--json", "-M", text))["memory_limit"] == size


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 MFLOP/s"),
        (2.5e6, "2.5 MFLOP/s"),
        (999.4e6, "999 MFLOP/s"),
        (999.9e6, "1 GFLOP/s"),
        (137e9, "137 GFLOP/s"),
        (51.25e12, "51.2 TFLOP/s"),
    ],
)
def test_rates(flops, text):
    assert show.rate(flops) == text


# ------------------------------------------------------------------------------------------------- options


def test_operations(here):
    a, b = (zarr.open_array(name, mode="r")[:].astype("f8") for name in "ab")
    old = np.random.default_rng(1).standard_normal((100, 60))
    make("t", old, chunks=(30, 30))
    options = ["--transpose-a", "--adjoint-b", "--alpha", "-0.5", "--beta", "2"]
    assert ooc("multiply", "b", "a", "t", *options, *CPU).code == 0
    found = zarr.open_array("t", mode="r")
    expected = -0.5 * b.T @ a.T + 2 * old
    assert found.dtype == np.float64
    assert np.abs(found[:] - expected).max() < 1e-5
    assert ooc("multiply", "a", "b", "z", *CPU, "--alpha", "1+2j", "--out-dtype", "complex64").code == 0
    assert np.abs(zarr.open_array("z", mode="r")[:] - (1 + 2j) * (a @ b)).max() < 1e-4


@pytest.mark.parametrize(
    ("options", "chunks", "shards"),
    [
        (["--chunks", "7, 9"], (7, 9), None),
        (["--chunks", "7,9", "--shards", "14,36"], (7, 9), (14, 36)),
        (["--compressor", "zstd"], None, None),
        (["--compressor", "zstd:-1", "--chunks", "30,30"], (30, 30), None),
        (["--compressor", "blosc"], None, None),
    ],
)
def test_how_c_is_stored(here, options, chunks, shards):
    assert ooc("multiply", "a", "b", "new", *CPU, *options).code == 0
    new = zarr.open_array("new", mode="r")
    assert chunks is None or new.chunks == chunks
    assert new.shards == shards
    assert bool(new.compressors) == ("--compressor" in options)
    assert np.abs(new[:] - zarr.open_array("c", mode="r")[:]).max() < 1e-4
    assert ooc("verify", "a", "b", "new").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("old", ["larger", "version 2", "sharded", "link", "unfinished"])
def test_force_leaves_nothing_of_what_was_there(here, old):
    options = {"version 2": {"zarr_format": 2}, "sharded": {"shards": (50, 50)}}.get(old, {})
    make("real" if old == "link" else "new", np.ones((500, 500)), chunks=(10, 10), **options)
    if old == "link":
        Path("new").symlink_to("real")
    if old == "unfinished":
        Path("new/zarr.json").rename("new/zarr.json.partial")
    assert ooc("multiply", "a", "b", "new", *CPU).code == 2
    assert ooc("multiply", "a", "b", "new", *CPU, "-f", "--chunks", "60,100").code == 0
    assert sorted(str(p.relative_to("new")) for p in Path("new").rglob("*") if p.is_file()) == [
        "c/0/0",
        "zarr.json",
    ]
    assert ooc("verify", "a", "b", "new").code == 0
    assert ooc("random", "new", "--shape", "5,5").code == 2
    assert ooc("random", "new", "--shape", "5,5", "-f").code == 0
    assert zarr.open_array("new", mode="r").shape == (5, 5)


def test_an_empty_folder_is_no_result(here):
    Path("new").mkdir()
    assert ooc("multiply", "a", "b", "new", *CPU).code == 0
    assert ooc("verify", "a", "b", "new").code == 0


def test_urls_and_groups(here):
    zarr.create_group("g")
    assert ooc("multiply", f"file://{here}/a", "b", f"file://{here}/g/deep%20down", *CPU).code == 0
    assert ooc("verify", "a", "b", "g/deep down").code == 0
    assert zarr.open_group("g", mode="r")["deep down"].shape == (60, 100)


def test_trace(here):
    for _ in range(2):  # the second replaces the first's
        assert ooc("multiply", "a", "b", "new", "-f", *CPU, "--trace", "t.json").code == 0
    events = json.loads(Path("t.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    stages = {event["name"].split()[0] for event in events if event["ph"] == "X"}
    assert {"read", "compute", "write"} <= stages


# ----------------------------------------------------------------------------------------------------- help


def commands(command, path=()):
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize("path", list(commands(cli)), ids=" ".join)
def test_help(path):
    done = ooc(*path, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: {' '.join(('ooc-gemm', *path))} ")
    assert ooc(*path, "-h") == done
    assert max(map(len, done.out.splitlines())) <= 80
    assert "..." not in done.out.partition("Commands:")[2]  # each short help is whole
    command = cli
    for name in path:
        command = command.commands[name]
        assert name in ooc(*path[: path.index(name)], "--help").out
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.opts[0] in done.out
            assert parameter.help, f"{parameter.name} has no help"
            assert re.match(r"[A-Z][a-z]+ ", parameter.help), parameter.help


def test_commands_are_those_promised():
    assert {"multiply", "plan", "info", "random", "verify", "bench"} <= set(cli.commands)


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["multiply", "--help"], ["bench", "kernels", "-h"], ["multiply", "a"]]
)
def test_help_imports_nothing_heavy(args):
    code = (
        "import sys, atexit\n"
        "from ooc_gemm.cli import main\n"
        "atexit.register(lambda: print('imported', *sys.modules))\n"
        "main()"
    )
    out = subprocess.check_output if args != ["multiply", "a"] else _output_of_failure
    found = out([sys.executable, "-c", code, *args], text=True)
    imported = {name.partition(".")[0] for name in found.split("imported ")[1].split()}
    assert "click" in imported
    heavy = {"numpy", "zarr", "dask", "rich", "psutil", "threadpoolctl", "cupy", "cuda", "numcodecs"}
    assert not imported & (heavy | {"fsspec", "asyncio", "matplotlib", "concurrent"})


def _output_of_failure(command, text):
    done = subprocess.run(command, capture_output=True, text=text)
    assert done.returncode == 2
    return done.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("mul", ["plain,multiply"]),
        ("bench k", ["plain,kernels"]),
        ("multiply --prec", ["plain,--precision"]),
        ("multiply --precision me", ["plain,medium"]),
        ("multiply some/arr", ["file,some/arr"]),
    ],
)
def test_shell_completion(words, found):
    """What click's script for bash asks for."""
    line = ["ooc-gemm", *words.split()]
    environment = {
        **os.environ, "_OOC_GEMM_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(line),
        "COMP_CWORD": str(len(line) - 1),
    }  # fmt: skip
    command = [sys.executable, "-m", "ooc_gemm.cli"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == found


def test_the_script_for_completion_is_one_of_bash(tmp_path):
    environment = {**os.environ, "_OOC_GEMM_COMPLETE": "bash_source"}
    command = [sys.executable, "-m", "ooc_gemm.cli"]
    script = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "ooc-gemm" in script
    if bash := shutil.which("bash"):
        subprocess.run([bash, "-n", "-c", script], check=True)


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
