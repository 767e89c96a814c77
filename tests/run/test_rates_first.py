"""What the first run on a machine and in a folder finds out: what is measured, remembered and said."""

import json
import os
import shutil

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.bench.tables import rates_tables
from ooc_gemm.devices.cpu import integers
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import HostMemory
from ooc_gemm.planning.machine import Budget
from ooc_gemm.planning.problem import Matrix
from ooc_gemm.planning.traits import StoreTraits
from ooc_gemm.run import rates, rates_first
from ooc_gemm.support import remembered

MiB = 1 << 20
SHARE, LONGEST = rates_first.SHARE, rates_first.LONGEST  # which tests change
F4 = np.dtype("f4")


@pytest.fixture
def worth_it(monkeypatch):
    """Every run counts as long enough to measure first, and what is measured is small. The time for it ends
    on no machine."""
    monkeypatch.setattr(rates_first, "LONGEST", 60.0)
    monkeypatch.setattr(rates_first, "WRITTEN_BYTES", 16 * 4096)
    monkeypatch.setattr(rates_first, "SHARE", 1e9)
    monkeypatch.setattr(rates_first, "SIDES", (64,))
    monkeypatch.setattr(rates_first, "LEAST_CHUNK", 1)
    monkeypatch.setattr(rates_first, "PIECE_BYTES", 4096)


@pytest.fixture
def arrays(cache, tmp_path, monkeypatch):
    place = tmp_path / "arrays"
    place.mkdir()
    monkeypatch.chdir(place)
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal((96, 96), "f4") for name in "ab"}
    for name, array in values.items():
        make(name, array, chunks=(32, 32), compressors=None if name == "a" else "auto")
    return values


def run(**options):
    """The result of a product, and the sentences said."""
    said = []
    done = ooc_gemm.multiply("a", "b", "c", device="cpu", force=True, notice=said.append, **options)
    return done, [text for text in said if "remembered" in text]


def test_the_first_run_measures_remembers_and_says_so(arrays, worth_it, cache):
    _, (said,) = run()
    assert "and are remembered: blas float32, fresh memory, reading" in said
    assert "decoding zstd 0 float32 in" in said
    assert "writing to" in said
    np.testing.assert_allclose(ooc_gemm_read("c"), arrays["a"] @ arrays["b"], rtol=1e-4, atol=1e-4)
    assert sorted(os.listdir()) == ["a", "b", "c"], "nothing else is left"
    own = json.loads((cache / rates.FILE).read_text())[CPU().model]
    assert own["brief"]
    assert 0 < own["flops"]["blas float32"]["flops"] <= CPU().most_flops("blas", "float32")
    (folder,) = own["folders"].values()
    names = "cached", "decode zstd 0 float32", "write_cached"
    assert {f"{name}_bytes_per_second" for name in names} <= set(folder)
    again, nothing = run()
    assert nothing == []
    assert again.plan.used_rates.note.startswith("measured briefly 20")
    assert again.plan.used_rates.flops == own["flops"]["blas float32"]["flops"]
    assert again.plan.used_rates.write == folder["write_cached_bytes_per_second"]


@pytest.mark.parametrize(("dtype", "key"), [("i4", "slices float64 to int64"), ("i8", "slices int64")])
def test_integers_that_may_be_cut_are_timed_as_such(arrays, worth_it, cache, monkeypatch, dtype, key):
    """What is timed is cut in slices every time, as most such integers are. Those of the run are small."""
    cut, choose = [], integers.parts_of

    def parts_of(*given):
        found = choose(*given)
        cut.append(found.cut is not None)
        return found

    monkeypatch.setattr(integers, "parts_of", parts_of)
    make("x", np.arange(96 * 96, dtype=dtype).reshape(96, 96) % 10, chunks=(32, 32))
    done = ooc_gemm.multiply("x", "x", "z", device="cpu")
    timed = rates_first.ROUNDS[1]
    assert cut[:timed] == [True] * timed
    assert not any(cut[timed:])
    known = json.loads((cache / rates.FILE).read_text())[CPU().model]["flops"]
    assert 0 < known[key]["flops"] == done.plan.used_rates.flops


def ooc_gemm_read(name):
    import zarr

    return zarr.open_array(name)[...]


def test_the_share_of_a_run(arrays, worth_it, monkeypatch):
    """A tenth of what it takes, and never more than half a second."""
    assert SHARE == 0.1
    assert LONGEST == 0.5
    monkeypatch.setattr(rates_first, "LONGEST", LONGEST)
    given = []
    monkeypatch.setattr(rates_first, "SHARE", SHARE)
    monkeypatch.setattr(rates_first._First, "all", lambda self: given.append(self._left()))
    monkeypatch.setattr(rates_first.time, "perf_counter", lambda: 100.0)
    kernel = CPU().arithmetic(F4, F4, F4, (96, 96, 96), 0, "auto", "highest")
    for seconds in (0.1, 0.6, 1000.0):
        budget = Budget(1 << 30, 0, None)
        assert not rates_first.measure(rates_first.Wanted(CPU(), kernel, (), (None, 0), budget, 1e9, seconds))
    assert given == [pytest.approx(0.06), pytest.approx(0.5)]


def test_a_plan_measures_what_it_can_without_writing(arrays, worth_it):
    before = {path: os.stat(path).st_mtime_ns for path in (".", "a", "b")}
    plan = ooc_gemm.plan("a", "b", device="cpu")
    assert plan.used_rates.note.startswith("measured briefly")
    assert {path: os.stat(path).st_mtime_ns for path in before} == before
    (folder,) = remembered.recall(rates.FILE)[CPU().model]["folders"].values()
    assert not any("write" in name for name in folder)


def test_a_short_run_measures_nothing(arrays, cache, monkeypatch):
    monkeypatch.setattr(rates_first, "SHARE", SHARE)
    done, said = run()
    assert said == []
    assert not (cache / rates.FILE).exists()
    assert done.plan.used_rates.note.startswith("default rates (not measured)")


def test_what_info_has_measured_is_not_measured_again(arrays, worth_it, monkeypatch):
    speeds = ("read", "cached", "write", "write_cached", "decode", "decode zstd 0 float32")
    folder = {f"{name}_bytes_per_second": 1e9 for name in speeds}
    folder |= {"date": "2026-01-01", "turns": 0.5, "piece_seconds": 0.0}
    known = {
        "date": "2026-01-01", "brief": False, "touch_bytes_per_second": 1e9, "upload_bytes_per_second": 1e9,
        "download_bytes_per_second": 1e9, "piece_seconds": 1e-6, "start_seconds": 0.0,
        "flops": {"blas float32": {"flops": 1e9, "thin": 1.0}},
        "folders": {rates.file_system(rates.Path.cwd()): folder},
    }  # fmt: skip
    remembered.remember(rates.FILE, CPU().model, known)
    done, said = run()
    assert said == []
    assert done.plan.used_rates.note == "measured 2026-01-01"
    _, (said,) = run(out_dtype="float64")  # a kernel that is not known yet
    assert "remembered: blas float64;" in said
    found = remembered.recall(rates.FILE)[CPU().model]
    assert found["folders"] == known["folders"]
    assert found["flops"].keys() == {"blas float32", "blas float64"}
    assert found["brief"] is False


def test_each_compressor_has_a_rate_of_its_own(arrays, worth_it, monkeypatch):
    """What it is for one is no estimate for another: blosc may decode ten times as fast as zstd."""
    run()
    place = rates.file_system(rates.Path.cwd())
    known = remembered.recall(rates.FILE)[CPU().model]
    known["folders"][place]["decode zstd 0 float32_bytes_per_second"] = 2e9
    remembered.remember(rates.FILE, CPU().model, known)
    packed = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")
    shutil.rmtree("b")
    make("b", arrays["b"], chunks=(32, 32), compressors=packed)
    done, (said,) = run()
    assert "remembered: decoding blosc lz4 5 shuffle float32 in " in said
    folder = remembered.recall(rates.FILE)[CPU().model]["folders"][place]
    (name,) = (name for name in folder if name.startswith("decode blosc"))
    assert name == "decode blosc lz4 5 shuffle float32_bytes_per_second"
    assert done.plan.used_rates.decode == folder[name] != 2e9
    *_, shown = rates_tables({CPU().model: remembered.recall(rates.FILE)[CPU().model]})
    (compressors, places, speeds) = (list(column.cells) for column in shown.columns)
    assert compressors == ["zstd 0 float32", "blosc lz4 5 shuffle float32"]
    assert len(set(places)) == 1
    assert speeds[0] == "2 GB/s"
    shutil.rmtree("b")
    make("b", arrays["b"], chunks=(32, 32), compressors="auto")
    done, said = run()
    assert said == []
    assert done.plan.used_rates.decode == 2e9


def test_small_chunks_do_not_show_how_fast_a_file_system_is(arrays, worth_it, monkeypatch):
    monkeypatch.setattr(rates_first, "LEAST_CHUNK", MiB)
    run()
    (folder,) = remembered.recall(rates.FILE)[CPU().model]["folders"].values()
    assert not [name for name in folder if name.startswith(("read", "cached", "decode"))]


def test_as_many_chunks_are_read_at_a_time_as_in_a_run():
    """Pieces of four chunks of 1 MiB, each once."""
    traits = StoreTraits(asynchronous=True, stackable=True)
    matrix = Matrix(5 * 2048 + 512, 8 * 512, 4, 512, 512, traits=traits)
    pieces = list(rates_first._spread(matrix, 64 * MiB))
    assert len({piece.place for piece in pieces}) == len(pieces) == 6 * 8
    assert {piece.shape for piece in pieces} == {(2048, 512), (512, 512)}
    assert sum(rows * cols for rows, cols in (piece.shape for piece in pieces)) == matrix.rows * matrix.cols


def test_measuring_holds_a_share_of_the_memory_limit(arrays, worth_it, monkeypatch):
    held = []

    class Counting(HostMemory):
        def host_buffers(self, count, nbytes):
            held.append(count * nbytes)
            return super().host_buffers(count, nbytes)

    monkeypatch.setattr(CPU, "host_memory", lambda self: Counting())
    monkeypatch.setattr(rates_first, "PIECE_BYTES", 4 * MiB)
    base = CPU().limits(CPU().arithmetic(F4, F4, F4, (1, 1, 1), 0, "auto", "highest"), None).host_baseline
    done, said = run(memory_limit=base + 256 * MiB)
    assert said
    assert 0 < sum(held) <= rates_first.HELD * 256 * MiB
    assert done.plan.host_bytes <= base + 256 * MiB


@pytest.mark.parametrize("broken", ["reading", "writing"])
def test_a_failure_while_measuring_is_left_to_the_run(arrays, worth_it, monkeypatch, broken):
    def fail(*args, **options):
        raise OSError("broken")

    where = {"reading": (rates_first, "_read"), "writing": (rates_first.os, "statvfs")}[broken]
    monkeypatch.setattr(*where, fail)
    done, _ = run()
    np.testing.assert_allclose(ooc_gemm_read("c"), arrays["a"] @ arrays["b"], rtol=1e-4, atol=1e-4)
    assert done.blocks >= 1


def test_rates_that_no_machine_has_are_neither_remembered_nor_used(arrays, worth_it, monkeypatch):
    monkeypatch.setattr(rates, "MOST_BYTES", 1.0)
    monkeypatch.setattr(CPU, "most_flops", lambda self, kernel, panel: 1.0)
    _, said = run()
    assert said == []
    assert CPU().model not in remembered.recall(rates.FILE)
    monkeypatch.setattr(rates, "MOST_BYTES", 512e9)
    cores = rates.cores()
    assert rates.sound(cores * 511e9)
    for rate in (cores * 513e9, 0.0, -1.0, float("inf"), float("nan"), None, "fast"):
        assert rates.sound(rate) == 0.0
