"""`bench stress`: a short run of it, and that it notices what it is there to notice."""

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import ooc

from ooc_gemm.bench import random_products as stress
from ooc_gemm.bench import stress as bench_stress
from ooc_gemm.planning.problem import MiB

SMALL = ("--largest", "64MiB", "-d", "cpu", "--json")

WRAPPER = """
import sys
from ooc_gemm import cli
args = sys.argv[1:]
refused = any(arg.endswith("memory-limit=1") for arg in args)
if not refused:
    {before}
try:
    cli.main(args)
except SystemExit as end:
    if end.code == 0:
        {after}
    raise
"""


def wrapped(tmp_path, monkeypatch, before="pass", after="pass"):
    """`bench stress` runs a program that does something else beside."""
    (tmp_path / "wrapper.py").write_text(WRAPPER.format(before=before, after=after))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    command = [sys.executable, "-W", "ignore", str(tmp_path / "wrapper.py")]
    monkeypatch.setattr(bench_stress, "COMMAND", command)
    no_wall = contextlib.nullcontext(bench_stress.NO_WALL)
    monkeypatch.setattr(bench_stress, "wall", lambda device: no_wall)


def report_of(done):
    found = json.loads(done.out)
    assert found["suite"] == "stress"
    return found["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [1, 6])
def test_a_short_run_is_right_and_within_its_limits(tmp_path, cases):
    done = ooc("bench", "stress", tmp_path, "--cases", cases, "--seed", 4, *SMALL)
    rows = report_of(done)
    assert (done.code, done.err, len(rows)) == (0, "", cases)
    for row in rows:
        assert 0 < row["peak_reported"] <= row["limit"]
        assert 0 < row["peak"] <= row["limit"] >= row["minimum"]
        assert row["wrong"] is None
    assert cases == 1 or any(row["limit"] == row["minimum"] for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_far_more_data_than_memory(tmp_path):
    number = stress.LARGE_EVERY - 1
    done = ooc("bench", "stress", tmp_path, "--case", number, "--seed", 9, *SMALL)
    (row,) = report_of(done)
    assert (done.code, row["case"], row["failed"]) == (0, number, None)
    assert row["data_bytes"] > 10 * row["buffer_bytes"]


def test_a_case_is_the_same_again_and_others_differ():
    cases = [stress.draw(8, number, 64 * MiB) for number in range(60)]
    assert cases == [stress.draw(8, number, 64 * MiB) for number in range(60)]
    assert len(set(cases)) == 60
    assert stress.draw(9, 0, 64 * MiB) != cases[0]
    stored = [one for case in cases for one in (case.a, case.b, case.c) if one]
    assert {one.version for one in stored} == {2, 3}
    assert any(one.shards for one in stored)
    assert any(one.fortran for one in stored)
    assert any(one.big_endian for one in stored)
    assert any(one.holes for one in stored)
    assert {one.codec for one in stored} >= {"none", "zstd", "blosc", "gzip", "lz4", "crc32c"}
    assert {one.dtype for one in stored} >= set(stress.TYPES)
    assert {case.op_a + case.op_b for case in cases} >= {"NN", "NT", "TN", "TT"}
    assert any("C" in case.op_a + case.op_b for case in cases)
    assert any(case.beta for case in cases)
    assert any(case.b is None for case in cases)
    assert all(case.data_bytes <= 64 * MiB for case in cases)


def plain(tmp_path, dtype="float32", number=0):
    """C ← A·B of 30×20 and 20×10 small integers, with no surprises; the case and its right C."""
    a, b, c = (stress.Stored(shape, dtype, (16, 16)) for shape in ((30, 20), (20, 10), (30, 10)))
    case = stress.Case(1, number, 30, 10, 20, a, b, c, "N", "N", 1, 0, (), False, (0.0, 0.0))
    stress.store(case, tmp_path)
    a, b = (zarr.open_array(tmp_path / name, mode="r")[:] for name in "ab")
    return case, (a.astype("f8") @ b.astype("f8")).astype(dtype)


@pytest.mark.parametrize("number", [0, stress.LARGE_EVERY - 1], ids=["all of C", "by a vector"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.5])
def test_the_oracle_accepts_what_is_right_and_nothing_else(tmp_path, number, wrong):
    case, right = plain(tmp_path, number=number)
    zarr.create_array(tmp_path / "c", data=right)
    assert stress.check(case, tmp_path) is None
    right[29, 9] = right[29, 9] + wrong
    zarr.create_array(tmp_path / "c", data=right, overwrite=True)
    said = stress.check(case, tmp_path)
    assert said.startswith("1 elements are wrong, the first at (29, ")


def test_the_oracle_knows_the_shape_and_the_type(tmp_path):
    case, right = plain(tmp_path)
    for other in (right.astype("f8"), right[:29]):
        zarr.create_array(tmp_path / "c", data=other, overwrite=True)
        assert stress.check(case, tmp_path).startswith(f"C is {other.shape} {other.dtype}, not (30, 10)")


@pytest.mark.parametrize("wrong", [np.nan, 1e-2])
def test_the_oracle_of_normal_numbers_lets_no_nan_pass(tmp_path, wrong):
    from dataclasses import replace

    case, _ = plain(tmp_path)
    case = replace(case, normal=True)
    for name in "ab":
        stress.write(tmp_path / f"normal-{name}", getattr(case, name), (1, ord(name)), True)
        os.rename(tmp_path / name, tmp_path / f"old-{name}")
        os.rename(tmp_path / f"normal-{name}", tmp_path / name)
    a, b = (zarr.open_array(tmp_path / name, mode="r")[:] for name in "ab")
    right = (a.astype("f8") @ b).astype("f4")
    zarr.create_array(tmp_path / "c", data=right)
    assert stress.check(case, tmp_path) is None
    right[3, 4] += wrong
    zarr.create_array(tmp_path / "c", data=right, overwrite=True)
    assert stress.check(case, tmp_path).startswith("1 elements are wrong, the first at (3, 4)")


@pytest.mark.slow
def test_a_process_that_holds_more_than_its_limit_is_noticed(tmp_path, monkeypatch):
    hold = "import mmap; held = mmap.mmap(-1, 300 << 20); held.write(bytes(300 << 20)); held.close()"
    wrapped(tmp_path, monkeypatch, before=hold)
    done = ooc("bench", "stress", tmp_path, "--case", 1, "--seed", 4, *SMALL)
    (row,) = report_of(done)
    assert done.code == 1
    assert row["over"] is True
    assert row["peak"] > row["limit"]
    assert "passed its limit by" in row["failed"]
    assert "--seed 4" in done.err
    assert "--case 1" in done.err


def test_a_process_that_hides_its_peak_is_noticed():
    said = json.dumps({"peak_host_bytes": 10 * MiB, "peak_device_bytes": 5})
    program = f"held = bytearray(150 << 20); print('{said}')"
    ended = bench_stress.launch([sys.executable, "-S", "-c", program])
    assert ended.peak > 150 * MiB
    assert list(bench_stress.judge(ended, 300 * MiB)) == [
        f"it says that its peak was {10 * MiB:,} bytes, and the kernel says {ended.peak:,}"
    ]
    over, _ = bench_stress.judge(ended, ended.peak - 1)
    assert over == "it passed its limit by 1 bytes"
    *_, device = bench_stress.judge(ended, 300 * MiB, 4)
    assert device == "it passed its device limit by 1 bytes"


def test_the_peak_is_not_that_of_the_process_that_asks():
    held = np.ones(300 * MiB, np.uint8)
    ended = bench_stress.launch([sys.executable, "-S", "-c", "pass"])
    assert 0 < ended.peak < 50 * MiB
    assert held.all()


@pytest.mark.slow
def test_a_wrong_result_is_noticed(tmp_path, monkeypatch):
    spoil = "import zarr; c = zarr.open(args[3], mode='r+'); c[-1, -1] = c[-1, -1] + 1"
    wrapped(tmp_path, monkeypatch, after=spoil)
    number = next(
        number
        for number in range(100)
        if (case := stress.draw(4, number, 64 * MiB)).b and case.m and case.n and not case.normal
    )
    done = ooc("bench", "stress", tmp_path, "--case", number, "--seed", 4, *SMALL)
    (row,) = report_of(done)
    assert done.code == 3
    assert "1 elements are wrong" in row["wrong"]
    assert row["wrong"] in done.err


@pytest.mark.slow
def test_a_product_that_fails_is_told_with_its_last_word(tmp_path, monkeypatch):
    wrapped(tmp_path, monkeypatch, before="raise SystemExit('the disk is on fire')")
    done = ooc("bench", "stress", tmp_path, "--case", 0, "--seed", 4, *SMALL)
    (row,) = report_of(done)
    assert (done.code, row["failed"]) == (1, "the disk is on fire")


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
def test_the_wall_stops_private_memory():
    wall = bench_stress.Wall("RLIMIT_DATA", reserve=20 * MiB)
    hold = [sys.executable, "-S", "-c", "held = bytearray(60 << 20)"]
    assert bench_stress.launch(hold, wall, 100 * MiB).code == 0
    stopped = bench_stress.launch(hold, wall, 30 * MiB)
    assert (stopped.code, stopped.said) == (1, "MemoryError")


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(bench_stress, "TIMEOUT", 1)
    ended = bench_stress.launch([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    assert list(bench_stress.judge(ended, 100 * MiB)) == ["killed by signal 9"]


def test_the_control_group_is_made_where_memory_can_be_limited(tmp_path):
    """A picture of /sys/fs/cgroup: the real one needs a system that lets us."""
    root, listed = tmp_path / "cgroup", tmp_path / "listed"
    own = root / "user" / "app" / "shell"
    own.mkdir(parents=True)
    listed.write_text("1:memory:/old\n0::/user/app/shell\n")
    assert bench_stress.own_group(root, listed) is None
    (own / "cgroup.subtree_control").write_text("\n")
    for folder in (root, root / "user"):
        (folder / "cgroup.subtree_control").write_text("cpu memory\n")
    assert bench_stress.own_group(root, listed) is None  # no file to write the limit to
    assert sorted(path.name for path in (root / "user").iterdir()) == ["app", "cgroup.subtree_control"]
    (root / "user" / "cgroup.procs").touch()
    real = Path.mkdir

    def mkdir(self, *args, **kwargs):
        real(self, *args, **kwargs)
        (self / "memory.max").write_text("max")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        group = bench_stress.own_group(root, listed)
    assert group == root / "user" / f"ooc-gemm-{os.getpid()}"
    assert (group / "memory.swap.max").read_text() == "0"
    wall = bench_stress.Wall("cgroup", str(group))
    (group / "cgroup.procs").touch()
    ended = bench_stress.launch([sys.executable, "-S", "-c", "import os; print(os.getpid())"], wall, 123)
    assert (group / "memory.max").read_text() == "123"
    assert (group / "cgroup.procs").read_text() == ended.out.strip()


def test_the_table_tells_what_was_found(tmp_path):
    row = {
        "case": 7, "what": "A·Bᵀ", "m": 2, "n": 3, "k": 5, "types": "f4 f4 f4", "a": "1×1", "b": "4×4 zstd",
        "c": "as planned", "data_bytes": 1000, "minimum": 2 * MiB, "limit": 2 * MiB, "peak": 3 * MiB,
        "buffer_bytes": 10, "seconds": 1.5, "over": True, "wrong": None, "failed": "it passed its limit",
    }  # fmt: skip
    early = {key: row[key] for key in ("what", "m", "n", "k", "types", "a", "b", "c", "data_bytes")}
    report = {
        "suite": "stress", "seed": 5, "largest": 100, "device": "a CPU", "wall": "none", "seconds": 3.0,
        "place": {"mounted": "/", "type": "ext4"}, "interrupted": False,
        "rows": [row, {**early, "case": 8, "failed": "the disk is full"}],
    }  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(report))
    done = ooc("bench", "stress", "--from", tmp_path / "report.json")
    assert done.code == 1
    assert "seed 5; a CPU; arrays on / (ext4); wall: none" in done.out
    assert "150.0 %" in done.out
    assert "100×" in done.out
    assert "2 cases in 3 s, 1 of them within the smallest limit: 1 over their limit, 0 wrong, 2 failed" in (
        " ".join(done.out.split())
    )
    assert "case 8: the disk is full; repeat it with ooc-gemm bench stress --seed 5" in done.err


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_v2_arrays_of_foreign_byte_order(tmp_path, order, codec):
    """Found by case 32 of seed 1: zarrs refuses what zarr reads."""
    import numcodecs

    import ooc_gemm

    values = np.arange(15 * 7.0).reshape(15, 7)
    codec = codec and numcodecs.get_codec({"id": codec})
    array = zarr.create_array(
        tmp_path / "a",
        shape=(15, 7),
        chunks=(4, 3),
        dtype=">f8",
        zarr_format=2,
        order=order,
        compressors=codec,
    )
    array[...] = values
    assert np.array_equal(ooc_gemm.multiply(tmp_path / "a", np.eye(7)).array, values)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("fortran", [False, True])
def test_complex_numbers_of_foreign_byte_order(tmp_path, dtype, fortran):
    """Found by cases 64 and 188 of seed 2: zarrs decodes a part of such a chunk wrong."""
    import ooc_gemm

    stress.write(
        tmp_path / "a",
        stress.Stored(
            (10, 7), dtype, (4, 4), codec="gzip", level=3, version=3, fortran=fortran, big_endian=True
        ),
        (1,),
        False,
    )
    values = zarr.open_array(tmp_path / "a", mode="r")[:]
    assert np.array_equal(ooc_gemm.multiply(tmp_path / "a", np.eye(7, dtype=dtype)).array, values)


@pytest.mark.slow
def test_what_zarr_holds_while_it_decodes_is_in_the_ledger(tmp_path):
    """Decoders of zarr hold several chunks, and glibc kept more of them than are in use."""
    a = stress.Stored((1024, 4096), "float64", (1024, 1024), None, "zstd", 2, big_endian=True)
    b, c = (stress.Stored((rows, 8), "float64", (1024, 8)) for rows in (4096, 1024))
    case = stress.Case(1, 0, 1024, 8, 4096, a, b, c, "N", "N", 1, 0, (), True, (0.0, 0.0))
    row = bench_stress._case(case, tmp_path / "case", "cpu", bench_stress.NO_WALL)
    assert row["failed"] is None
    assert row["ledger"]["decoding"] == 2 * 5 * 8 * MiB
    assert row["limit"] == row["minimum"]
    assert row["peak"] < row["limit"]
