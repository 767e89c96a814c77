"""The command line: what commands print for people, their options, and their help."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import zarr
from commands import CPU, make_arrays, parsed
from conftest import make, ooc

import ooc_gemm
from ooc_gemm.cli import show
from ooc_gemm.cli.group import cli

MiB = 1 << 20


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×40, raw), b (40×100, compressed) and their product c."""
    make_arrays(tmp_path, monkeypatch)
    return tmp_path


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
