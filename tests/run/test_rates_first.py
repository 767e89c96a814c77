"""What the first run on a machine and in a folder finds out: what is measured, remembered and said."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.bench.tables import rates_tables
from ooc_gemm.devices.cpu import integers
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import HostMemory
from ooc_gemm.devices.cuda import choice
from ooc_gemm.devices.cuda import rates as gpu_rates
from ooc_gemm.planning.cost import CostModel
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import _Search, make_plan
from ooc_gemm.planning.traits import StoreTraits
from ooc_gemm.run import rates, rates_first, rates_learned
from ooc_gemm.storage.read.inputs import open_input
from ooc_gemm.support import remembered
from ooc_gemm.support.trace import Trace

MiB = 1 << 20
SHARE, LONGEST = rates_first.SHARE, rates_first.LONGEST  # which tests change
F4 = np.dtype("f4")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache."""
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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


class OnTheBus(CPU):
    """A device whose files are read at the rate of a disk by default."""

    def rates(self, arithmetic):
        return Rates(1e12, 3e9, 3e9, 5e10, 5e10, shared=False)


def test_files_in_memory_are_expected_to_be_as_fast_as_copies(arrays, cache, monkeypatch):
    monkeypatch.setattr(rates, "cores", lambda: 8)
    kernel = CPU().arithmetic(F4, F4, F4, (96, 96, 96), 0, "auto", "highest")
    places = [(rates.Path("a").resolve(), MiB)], (rates.Path("c").resolve(), MiB)
    monkeypatch.setattr(rates, "cached_share", lambda folder: 0.0)
    on_disk = rates.known(OnTheBus(), kernel, *places)
    assert (on_disk.read, on_disk.write, on_disk.cached) == (3e9, 3e9, 0)
    assert on_disk.decode == 8e9
    monkeypatch.setattr(rates, "cached_share", lambda folder: 1.0)
    in_cache = rates.known(OnTheBus(), kernel, *places)
    assert (in_cache.read, in_cache.cached) == (pytest.approx(32e9), 1)
    unknown = [*places[0], (None, 3 * MiB)], places[1]
    assert rates.known(OnTheBus(), kernel, *unknown).cached == 0.25, "nobody has looked at the other input"
    monkeypatch.setattr(rates, "file_system", lambda place: "tmpfs 0:99")
    monkeypatch.setattr(rates, "cached_share", lambda folder: pytest.fail("files in memory are not cached"))
    in_memory = rates.known(OnTheBus(), kernel, *places)
    assert (in_memory.read, in_memory.cached) == (pytest.approx(32e9), 1)
    assert 3e9 < in_memory.write < 32e9
    assert in_memory.note == rates.NOT_MEASURED


# ---------------------------------------------------------------------------------------- learning


def planned(devices=1, side=4096):
    """A plan for devices with memory of their own."""
    s = Matrix(side, side, 4, side, side)
    problem = Problem(side, side, side, s, s, s, 4, 4)
    speeds = replace(OnTheBus().rates(None), flops=devices * 1e12, devices=devices)
    return make_plan(problem, Budget(1 << 32, 0, 1 << 32, weights=(1,) * devices), speeds)


def slowed(plan, factor, devices=1):
    """The plan of a run whose kernels have worked for 0.1 s on all devices together, `factor` times as long
    as predicted."""
    return replace(plan, stage_seconds={"compute": 0.1 / factor / devices})


def watched(compute, upload=0.0, nbytes=0):
    trace = Trace()
    for stage, seconds, moved in (("compute", compute, 0), ("upload", upload, nbytes)):
        for _ in range(8 if seconds else 0):
            trace.add(stage, 0.0, seconds / 8, nbytes=moved // 8)
    return trace


@pytest.mark.parametrize("devices", [1, 4])
def test_a_gpu_s_rate_is_learned_from_its_run(cache, devices):
    """A run whose kernels take twice the time that was predicted, on all devices together."""
    device, kernel = OnTheBus(), OnTheBus().arithmetic(F4, F4, F4, (512, 512, 512), 0, "auto", "highest")
    plan = slowed(planned(devices), 2, devices)
    said = rates_learned.learn(device, kernel, plan, watched(0.1, 0.05, 2 * 10**9))
    assert "blas float32 at 0.5 Tflop/s, uploads at 40 GB/s" in said
    found = remembered.recall(rates.FILE)[device.model]
    assert found["flops"]["blas float32"]["flops"] == pytest.approx(0.5e12)
    assert rates.known(device, kernel, [], (None, 0)).flops == pytest.approx(0.5e12)
    assert rates.known(device, kernel, [], (None, 0)).upload == pytest.approx(40e9)
    assert rates_learned.learn(device, kernel, plan, watched(0.1, 0.05, 10**9)) == "", "once is enough"


def test_a_faster_run_replaces_the_rate_of_a_slower_one_but_not_a_measured_one(cache):
    device, kernel = OnTheBus(), OnTheBus().arithmetic(F4, F4, F4, (512, 512, 512), 0, "auto", "highest")

    def learned(factor):
        said = rates_learned.learn(device, kernel, slowed(planned(), factor), watched(0.1))
        return said, remembered.recall(rates.FILE)[device.model]["flops"]["blas float32"]["flops"]

    assert learned(2)[1] == pytest.approx(0.5e12)
    assert learned(3) == ("", pytest.approx(0.5e12))
    assert learned(1)[1] == pytest.approx(1e12)
    measured = {"blas float32": {"flops": 0.7e12, "thin": 3.0}}
    remembered.remember(rates.FILE, device.model, {"flops": measured})
    assert learned(1) == ("", 0.7e12)


def test_nothing_is_learned_of_moments_impossible_rates_and_shared_cores(cache, monkeypatch):
    device, kernel = OnTheBus(), OnTheBus().arithmetic(F4, F4, F4, (512, 512, 512), 0, "auto", "highest")
    plan = planned()
    assert rates_learned.learn(device, kernel, plan, watched(rates_learned.TRUSTED_SECONDS / 2)) == ""
    assert rates_learned.learn(device, kernel, planned(side=1024), watched(1.0)) == "", "small blocks"
    compiled = watched(0.1)
    compiled.add("compute", 0.0, 2.0)
    assert rates_learned.learn(device, kernel, plan, compiled) == "", "one multiplication has waited"
    sent = replace(plan.problem, b=replace(plan.problem.b, encoded="zstd"))
    decoded = rates_learned.learn(device, kernel, replace(plan, problem=sent), watched(0.1))
    assert decoded == "", "the device has decoded chunks, too"
    copied = rates_learned.learn(device, kernel, replace(plan, problem=sent), watched(0.0, 0.05, 2 * 10**9))
    assert copied == "", "and that between copies"
    copied = watched(0.0, 1.0, rates_learned.TRUSTED_BYTES - 8)
    assert rates_learned.learn(device, kernel, plan, copied) == "", "few bytes"
    monkeypatch.setattr(device, "most_flops", lambda kernel, panel: 1.0)
    assert rates_learned.learn(device, kernel, plan, watched(1.0)) == ""
    monkeypatch.undo()
    shared = replace(plan, used_rates=replace(plan.used_rates, shared=True))
    assert rates_learned.learn(device, kernel, shared, watched(1.0)) == ""


@pytest.mark.parametrize("factor", [0.5, 1.02, 1.3, 2.0])
def test_what_blas_reached_in_a_run_counts_as_much_as_what_was_known(cache, monkeypatch, factor):
    """Multiplying takes `factor` times what was predicted, and half a second is added, as predicted. What
    takes a moment shows nothing, nor does a run that did something else for long."""
    monkeypatch.setattr(rates_learned, "MULTIPLIED_SECONDS", 0.5)
    device, kernel = CPU(), CPU().arithmetic(F4, F4, F4, (512, 512, 512), 0, "auto", "highest")
    plan = planned()
    plan = replace(plan, stage_seconds={"compute": 4.0}, predicted_seconds=4.5)
    plan = replace(plan, budget=replace(plan.budget, device=None))
    plan = replace(plan, used_rates=replace(plan.used_rates, shared=True, flops=1e11))
    table = {"blas float32": {"flops": 1e11, "thin": 32.0}, "blas float64": {"flops": 5e10, "thin": 32.0}}

    def learned(seconds, brief=True, plan=plan, other=0.5):
        remembered.remember(rates.FILE, device.model, {"date": "2026-11-28", "brief": brief, "flops": table})
        # In the run itself it takes a little longer, because others use the cores.
        watch = watched(seconds + 0.4 if seconds > 1 else seconds)
        said = rates_learned.learn_blas(device, kernel, plan, watch, seconds + other)
        found = remembered.recall(rates.FILE)[device.model]["flops"]
        assert found["blas float64"] == table["blas float64"]
        return said, found["blas float32"]["flops"]

    said, flops = learned(4.0 * factor)
    assert flops == pytest.approx(1e11 if factor == 1.02 else 1e11 / factor**0.5)
    assert bool(said) is (factor in (0.5, 2.0))
    assert learned(4.0 * factor, brief=False) == ("", 1e11), "the user has measured it"
    assert learned(0.4, other=0.0) == ("", 1e11), "a moment"
    assert learned(4.0 * factor, plan=replace(plan, bn=64)) == ("", 1e11), "blocks are narrow"
    assert learned(4.0 * factor, other=9.0) == ("", 1e11), "it did something else"
    del table["blas float32"]
    assert learned(4.0 * factor)[1] == pytest.approx(1e11 / factor)
    assert learned(4.0 * factor, brief=False)[1] == pytest.approx(1e11 / factor), "nobody has measured it"
    table["blas float32"] = {"flops": 1e11}
    assert learned(4.0 * factor)[1] == pytest.approx(flops), "of another version"
    table["blas float32"] = {"flops": 1e11, "thin": 32.0}
    checked = replace(plan, problem=replace(plan.problem, check_itemsize=8))
    assert learned(4.0 * factor, plan=checked) == ("", 1e11), "checks multiply, too"


def test_lanes_that_multiply_as_fast_as_predicted_change_no_rate(cache, monkeypatch):
    """Two threads have each multiplied for 4 s, as predicted, and all else took a tenth of a second, not two:
    that says nothing of BLAS."""
    monkeypatch.setattr(rates_learned, "MULTIPLIED_SECONDS", 0.5)
    device, kernel = CPU(), CPU().arithmetic(F4, F4, F4, (512, 512, 512), 0, "auto", "highest")
    plan = replace(planned(), stage_seconds={"compute": 4.0}, predicted_seconds=6.0)
    plan = replace(plan, used_rates=replace(plan.used_rates, shared=True, flops=1e11))
    plan = replace(plan, budget=replace(plan.budget, device=None, lanes=2))
    plan = replace(plan, k_panels=replace(plan.k_panels, lanes=2))
    table = {"blas float32": {"flops": 1e11, "thin": 32.0, "brief": True}}
    remembered.remember(rates.FILE, device.model, {"date": "2026-11-29", "brief": True, "flops": table})
    assert rates_learned.learn_blas(device, kernel, plan, watched(8.0), 4.1) == ""
    assert remembered.recall(rates.FILE)[device.model]["flops"] == table


@pytest.mark.parametrize(("codec", "parts"), [("zstd", 1), ("blosc", 4)])
def test_how_fast_a_device_decodes_chunks_is_remembered(arrays, cache, monkeypatch, codec, parts):
    """The fastest of five launches has decoded parts of chunks at 9e8 bytes a second."""
    device, kernel = OnTheBus(), OnTheBus().arithmetic(F4, F4, F4, (512, 512, 512), 0, "auto", "highest")
    compressor = zarr.codecs.ZstdCodec() if codec == "zstd" else zarr.codecs.BloscCodec(cname="zstd")
    make("z", np.ones((512, 512), "f4"), chunks=(256, 256), compressors=compressor)
    opened, plan, usual = open_input("z"), planned(side=1024), device.rates(kernel)
    monkeypatch.setattr(OnTheBus, "rates", lambda self, arithmetic: replace(usual, unpack=1e8))
    s = replace(plan.problem.a, chunk_rows=1024, chunk_cols=2048, encoded=codec)
    plan = replace(plan, used_rates=replace(plan.used_rates, unpack=1e8), problem=replace(plan.problem, a=s))

    def learned(inputs, plan=plan, launches=5, rate=9e8):
        watch = Trace()
        for i in range(launches):
            watch.add("decode", 0.0, (1 + i) * (8 << 20) / parts / rate)
        return rates_learned.learn_unpacking(device, inputs, plan, watch)

    def known():
        places = [(opened.place, MiB)], (None, 0), [opened.source.codec]
        return rates.known(device, kernel, *places).unpack

    assert known() == 1e8
    assert learned([opened], launches=3) == ""
    assert learned([opened], replace(plan, problem=planned().problem)) == "", "the host has decoded"
    assert learned([opened], rate=1.04e8) == ""
    assert known() == 1e8
    two = replace(plan.problem, b=replace(s, chunk_rows=512))
    assert learned([opened, opened], replace(plan, problem=two)) == "", "of two sizes"
    for bad in (None, [1], {opened.source.codec: None}, {opened.source.codec: "x"}, {"other": 1e99}):
        remembered.remember(rates.FILE, device.model, {rates.UNPACK_RATES: bad})
        assert known() == 1e8
    assert opened.source.codec in learned([opened, opened])
    assert known() == pytest.approx(4e8), "one run shows no more than four times as much"
    plan = replace(plan, used_rates=replace(plan.used_rates, unpack=4e8))
    assert learned([opened], plan)
    assert known() == pytest.approx((4e8 * 9e8) ** 0.5), "later runs change it less"


@pytest.mark.parametrize("faster", [True, False])
def test_a_run_that_decodes_faster_than_expected_is_remembered(arrays, cache, faster):
    """Sixteen readers read and decode 320 MB in 50 ms. What takes longer than expected shows nothing."""
    device, kernel = OnTheBus(), OnTheBus().arithmetic(F4, F4, F4, (512, 512, 512), 0, "auto", "highest")
    make("z", np.ones((512, 512), "f4"), chunks=(256, 256), compressors=zarr.codecs.ZstdCodec(level=3))
    opened = open_input("z")
    plan = planned()
    plan = replace(plan, readers=16, used_rates=replace(plan.used_rates, decode=2e9 if faster else 7e9))

    def learned(inputs, plan=plan, reads=128):
        watch = watched(0.0, 0.1, 320 * 10**6)
        for _ in range(reads):
            watch.add("read", 0.0, 0.8 / reads)
        return rates_learned.learn_decoding(device, inputs, plan, watch)

    def known():
        places = [(opened.place, MiB)], (None, 0), [opened.source.codec]
        return rates.known(device, kernel, *places).decode

    assert learned([opened, opened], reads=127) == "", "some readers may have had nothing to read"
    before, said = known(), learned([opened, opened])
    assert ("chunks of zstd 3 float32 are decoded at 6.4 GB/s" in said) == bool(said) == faster
    assert known() == pytest.approx(6.4e9 if faster else before)
    raw = open_input("a")
    others = [raw], [opened, raw], [replace(opened, place=None)]
    changed = replace(plan, used_rates=replace(plan.used_rates, shared=True))
    assert [learned(inputs) for inputs in others] == ["", "", ""]
    assert learned([opened], changed) == ""


# ---------------------------------------------------------------------------------------- default rates

GIB = 1 << 30
H200 = {"multiProcessorCount": 132, "clockRate": 1_980_000, "major": 9, "minor": 0}


@pytest.mark.parametrize(
    ("chunk", "kernel", "n"),
    [((2048, 2048), "fp16x3", 32768), ((128, 32768), "fp16x3", 32768), ((512, 512), "fp16x3", 32768),
     ((3000, 1700), "fp16x3", 32768), ((2048, 2048), "cublas", 16384)],
)  # fmt: skip
def test_plans_with_default_rates_take_no_longer_than_others(cache, tmp_path, monkeypatch, chunk, kernel, n):
    """By the model, with rates that a machine with a GPU might have. Before defaults told files in memory
    from those on a disk, row strips took 1.8 times as long."""
    dtype = np.dtype("f8" if kernel == "cublas" else "f4")
    arithmetic = choice.arithmetic(kernel, choice.Case(dtype, dtype, dtype, (n, n, n), 0, "highest", 90), "")
    s = Matrix(n, n, dtype.itemsize, *chunk)
    c = Matrix(n, n, dtype.itemsize, 2048, 2048)
    problem = Problem(
        n, n, n, s, s, c, dtype.itemsize, dtype.itemsize, pitch=arithmetic.pitch,
        line_bytes=arithmetic.line_bytes, scratch=arithmetic.scratch, keeps_a=True,
    )  # fmt: skip
    budget = Budget(8 * GIB, 704 * MiB, 8 * GIB, 672 * MiB, readers=4, writers=8)

    class GPU(CPU):
        def rates(self, arithmetic):
            return gpu_rates.rates(H200, arithmetic)

    monkeypatch.setattr(rates, "cores", lambda: 16)
    monkeypatch.setattr(rates, "file_system", lambda place: "tmpfs 0:99")
    place = tmp_path, n * n * dtype.itemsize
    default = rates.known(GPU(), arithmetic, [place, place], place)
    measured = replace(
        default, flops=1.1 * default.flops, read=72e9, write=25e9, upload=54e9, download=54e9, touch=20e9,
        piece_seconds=30e-6, start=0.05,
    )  # fmt: skip
    cost = CostModel(problem, budget, measured)
    best = cost.estimate(_Search(problem, budget, measured).best()).seconds
    found = _Search(problem, budget, default).best()
    assert cost.estimate(found).seconds <= 1.15 * best
    assert CostModel(problem, budget, default).estimate(found).seconds == pytest.approx(best, rel=0.4)
