"""What each command prints as JSON."""

import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import zarr
from commands import CPU, make_arrays, parsed
from conftest import ooc

from ooc_gemm.storage.io import background

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


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×40, raw), b (40×100, compressed) and their product c."""
    make_arrays(tmp_path, monkeypatch)
    return tmp_path


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
