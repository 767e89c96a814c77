"""What is measured of a machine, remembered, and used by the planner; and what the benchmarks make of it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import make, ooc

from ooc_gemm.bench import chunks, info, kernel_rate
from ooc_gemm.bench import engine as bench_engine
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.several import Several
from ooc_gemm.run import rates
from ooc_gemm.support import remembered

MiB = 1 << 20


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache; measurements that take no time."""
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(chunks, "SIDE", 64)
    monkeypatch.setattr(chunks, "FOLDER_BYTES", MiB)
    monkeypatch.setattr(kernel_rate, "STEADY", 0.001)
    monkeypatch.setattr(kernel_rate, "SIDES", (64,))
    monkeypatch.setattr(kernel_rate, "DEPTHS", (32, 64))
    monkeypatch.setattr(info, "TOUCHED_BYTES", MiB)
    return tmp_path / "cache"


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    make("a", rng.standard_normal((60, 40), "f4"), chunks=(20, 20), compressors=None)
    make("b", rng.standard_normal((40, 100), "f4"), chunks=(20, 50))
    return tmp_path


def known_here(folder, **changes):
    """A record of this machine as info would make it, for a folder's file system."""
    own = {
        "date": "2026-01-02",
        "read_bytes_per_second": 1e6,
        "cached_bytes_per_second": 1e9,
        "write_bytes_per_second": 5e5,
        "write_cached_bytes_per_second": 1e6,
        "decode_bytes_per_second": 1e9,
        "turns": 0.75,
        "piece_seconds": 1e-6,
    }
    record = {
        "date": "2026-01-03",
        "flops": {"blas float32": {"flops": 3e9, "thin": 5.0}},
        "upload_bytes_per_second": 1e9,
        "download_bytes_per_second": 2e9,
        "touch_bytes_per_second": 3e9,
        "piece_seconds": 1e-6,
        "start_seconds": 0.25,
        "folders": {rates.file_system(Path(folder)): own | changes},
    }
    remembered.remember(rates.FILE, CPU().model, record)


def predicted(*options):
    done = ooc("plan", "a", "b", "-d", "cpu", "-M", "4GiB", "--json", *options)
    assert done.code == 0, done
    return json.loads(done.out)


def test_info_measures_and_remembers(cache, arrays):
    assert json.loads(ooc("info", "--json").out)["rates"] == {}
    before = sorted(path for path in arrays.iterdir())
    done = ooc("info", "--measure", "--json", arrays)
    assert done.code == 0, done
    own = json.loads(done.out)["rates"][CPU().model]
    assert {"blas float32", "blas float64", "blas complex64", "blas float32 to int32"} <= own["flops"].keys()
    assert all(speed["flops"] > 1e6 and speed["thin"] >= 0 for speed in own["flops"].values())
    (system,) = own["folders"]
    assert system == rates.file_system(arrays)
    folder = own["folders"][system]
    for record in (own, folder):
        speeds = [value for key, value in record.items() if key.endswith("_bytes_per_second")]
        assert speeds
        assert all(speed > 1e4 for speed in speeds)
    assert 0.5 <= folder["turns"] <= 1
    assert 0 < folder["create_seconds"] < folder["begin_seconds"] < 5
    assert folder["read_bytes_per_second"] <= folder["cached_bytes_per_second"]
    assert sorted(path for path in arrays.iterdir() if path != cache) == before, "nothing is left behind"
    assert json.loads(ooc("info", "--json").out)["rates"] == {CPU().model: own}
    shown = ooc("info").out
    assert f"{CPU().model}, measured {own['date']}" in shown
    assert predicted()["rates"] == f"measured {own['date']}"


def test_several_devices_have_readers_and_writers_of_their_own(cache, arrays):
    known_here(arrays)
    several = Several([CPU(), CPU()])
    info.measure_places(several, [arrays])
    (own,) = remembered.recall(rates.FILE)[CPU().model]["folders_of_several"].values()
    f4, place = np.dtype("f4"), (arrays / "a", 9600)
    kernel = CPU().arithmetic(f4, f4, f4, (60, 100, 40), 0, "auto", "highest")
    written = [rates.known(device, kernel, [place], place).write for device in (CPU(), several)]
    assert written == [1e6, own["write_cached_bytes_per_second"]]
    assert ", several GPUs" in ooc("info").out


def test_plans_say_where_rates_are_from(cache, arrays):
    assert predicted()["rates"].startswith(
        "default rates (not measured); measure with `ooc-gemm info --measure`"
    )
    assert "rates " in ooc("plan", "a", "b", "-d", "cpu").out
    known_here(arrays)
    assert predicted()["rates"] == "measured 2026-01-02"  # the older of the two
    remembered.remember(rates.FILE, CPU().model, {"folders": {}})
    assert predicted()["rates"].startswith("measured 2026-01-03, default rates for ")
    assert "for blas float64" in predicted("--out-dtype", "float64")["rates"]


def test_remembered_rates_are_used(cache, arrays):
    slow, usual = 60 * 100 * 40 * 2 / 3e9, predicted()["stage_seconds"]["compute"]
    known_here(arrays)
    found = predicted()
    assert found["stage_seconds"]["compute"] == pytest.approx(slow * (1 + 5 / 40 + 64 / 60 + 64 / 100))
    assert found["stage_seconds"]["compute"] != usual
    one_chunk = 2e-6  # of piece_seconds, of the device and of the folder
    assert found["stage_seconds"]["write"] == pytest.approx(60 * 100 * 4 / 1e6 + one_chunk, rel=1e-9)
    assert found["predicted_seconds"] >= 0.25


def test_what_the_page_cache_holds_is_read_at_its_rate(cache, arrays):
    known_here(arrays)
    assert rates.cached_share(arrays / "a") == rates.cached_share(arrays / "b") == 1
    fast = predicted()["stage_seconds"]["read"]
    os.sync()
    chunks.forget(arrays / "a")
    if rates.cached_share(arrays / "a"):
        pytest.skip("this file system cannot forget")
    for _ in range(2):  # asking brings nothing in
        assert rates.cached_share(arrays / "a") == 0
        slow = predicted()["stage_seconds"]["read"]
        assert slow - fast == pytest.approx(60 * 40 * 4 * (1e-6 - 1e-9), rel=0.01)
    chunks.keep(arrays / "a")
    assert predicted()["stage_seconds"]["read"] == pytest.approx(fast)


def test_only_files_are_asked_whether_the_page_cache_holds_them(tmp_path, monkeypatch):
    """A pipe in their place is not waited for, and nobody is led out of the array, nor in circles."""
    monkeypatch.setattr(rates, "in_memory", lambda system: False)  # wherever this test runs
    os.mkfifo(tmp_path / "0.0")
    (tmp_path / "0.1").symlink_to("/dev/zero")
    assert rates.cached_share(tmp_path) == 0
    (tmp_path / "c" / "0").mkdir(parents=True)
    (tmp_path / "c" / "0" / "0").write_bytes(bytes(4096))
    (tmp_path / "c" / "1").symlink_to(tmp_path)
    assert rates.cached_share(tmp_path / "c") == 1


def test_files_in_memory_are_not_looked_at(arrays, monkeypatch):
    monkeypatch.setattr(rates, "in_memory", lambda system: True)
    monkeypatch.setattr(rates, "_sample", lambda folder: pytest.fail("they need no cache"))
    assert rates.cached_share(arrays / "a") == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}'])
def test_a_damaged_file_is_no_file(cache, arrays, text):
    known_here(arrays)
    (cache / rates.FILE).write_text(text)
    assert predicted()["rates"].startswith("default rates")


def test_a_file_of_another_version_is_no_file(cache, arrays):
    remembered.remember(rates.FILE, CPU().model, {"date": "2026-01-01", "flops": 3})
    assert predicted()["rates"].startswith("default rates")


def test_a_folder_that_cannot_be_written_to_is_refused(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode, **options: mode != os.W_OK)
    for command in (("info", "--measure"), ("bench", "io"), ("bench", "engine")):
        done = ooc(*command, tmp_path)
        assert done.code == 2
        assert "is not writable" in done.err


# ------------------------------------------------------------------------------------------------ bench


@pytest.mark.slow
def test_bench_engine(cache, arrays):
    done = ooc("bench", "engine", arrays, "-d", "cpu", "--size", 300, "--layout", "small", "--layout", "zstd",
               "--repeat", 2, "--peers", "--json")  # fmt: skip
    assert done.code == 0, done
    report = json.loads(done.out)
    assert [row["layout"] for row in report["rows"]] == ["small", "zstd"]
    for row in report["rows"]:
        assert (row["m"], row["n"], row["k"], row["kernel"]) == (300, 300, 300, "blas")
        assert len(row["seconds_all"]) == 2
        assert row["ratio"] == pytest.approx(row["seconds"] / row["limit_seconds"])
        assert row["limit_seconds"] == max(row["limits"].values()) == row["limits"][row["limit_by"]]
        assert row["stages"]["read"]["bytes"] == row["bytes_read"] == row["plan"]["bytes_read"]
        assert all(0 <= stage["busy_share"] <= 1 for stage in row["stages"].values())
        assert row["stages"]["compute"]["busy_seconds"] > 0
        assert all(peer["seconds"] > 0 for peer in row["peers"].values()), row["peers"]
    assert report["rows"][0]["bytes_read"] == 2 * 300 * 300 * 4
    left = sorted(path.name for path in arrays.iterdir())
    assert left == ["a", "b"], "nothing is left behind, and nothing is remembered"
    (arrays / "report.json").write_text(done.out)
    shown = ooc("bench", "engine", "--from", "report.json")
    assert "300³ float32, small: " in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    pytest.importorskip("matplotlib")
    picture = arrays / "timeline.svg"
    assert ooc("bench", "engine", "--from", "report.json", "--plot", picture).code == 0
    for word in ("read", "compute", "seconds", "300³ float32"):
        assert word in picture.read_text()


def test_busy_seconds_count_overlap_once():
    assert bench_engine.busy_seconds([]) == 0
    assert bench_engine.busy_seconds([(0, 2), (1, 3), (1.5, 1.7), (5, 6)]) == 4


def test_a_peer_that_fails_is_told(cache, arrays, monkeypatch):
    monkeypatch.setitem(bench_engine.PEERS, "broken", "def run(a, b, c): raise SystemExit('no such thing')")
    case = bench_engine.Case(8, 8, 8, "float32", "squares")
    assert bench_engine._peer("broken", case, "a", "b", "c", 1, False)["failed"] == "no such thing"


@pytest.mark.slow
def test_bench_io(cache, tmp_path):
    done = ooc("bench", "io", tmp_path, "-d", "cpu", "--json")
    assert done.code == 0, done
    report = json.loads(done.out)
    ways = [(row["group"], row["way"]) for row in report["rows"]]
    assert {("read", "engine"), ("read", "buffered"), ("write", "engine"), ("decode zstd", "engine")} <= set(
        ways
    )
    for row in report["rows"]:
        assert len(row["bytes_per_second"]) == len(report["threads"])
        assert all(
            (rate is None and row["way"] == "direct") or rate > 1e4 for rate in row["bytes_per_second"]
        )
    assert not list(tmp_path.iterdir())
    assert "decode zstd" in ooc("bench", "io", tmp_path, "-d", "cpu").out


@pytest.mark.parametrize(("first", "again", "rate"), [(3.0, 1.0, 4.0), (1.0, 1.0, 8.0), (0.5, 1.0, 8.0)])
def test_fresh_memory_is_no_faster_than_memory(first, again, rate):
    """Whatever else the machine does meanwhile."""
    assert rates.fresh_rate(8, first, again) == rate


def test_seconds_before_the_first_read_and_after_the_last_write(cache, arrays):
    """They are those of the folder, which contain those of the device, where these are more."""
    known_here(arrays, begin_seconds=0.1)
    usual = predicted()["predicted_seconds"]
    known_here(arrays, begin_seconds=2.25)
    assert predicted()["predicted_seconds"] == pytest.approx(usual + 2)
    known_here(arrays, begin_seconds=2.25, create_seconds=1.75)
    assert predicted()["predicted_seconds"] == pytest.approx(usual + 2)  # on a CPU nothing hides it
