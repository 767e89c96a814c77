"""What is learned of rates from a run: of kernels, BLAS and decoding."""

from dataclasses import replace

import numpy as np
import pytest
import zarr
from conftest import make
from on_the_bus import OnTheBus

from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.planning.machine import Budget
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import make_plan
from ooc_gemm.run import rates, rates_learned
from ooc_gemm.storage.read.inputs import open_input
from ooc_gemm.support import remembered
from ooc_gemm.support.trace import Trace

MiB = 1 << 20
F4 = np.dtype("f4")


@pytest.fixture
def folder(cache, tmp_path, monkeypatch):
    """The working folder; nothing is remembered."""
    place = tmp_path / "arrays"
    place.mkdir()
    monkeypatch.chdir(place)


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
def test_how_fast_a_device_decodes_chunks_is_remembered(folder, cache, monkeypatch, codec, parts):
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
def test_a_run_that_decodes_faster_than_expected_is_remembered(folder, cache, faster):
    """Sixteen readers read and decode 320 MB in 50 ms. What takes longer than expected shows nothing."""
    device, kernel = OnTheBus(), OnTheBus().arithmetic(F4, F4, F4, (512, 512, 512), 0, "auto", "highest")
    make("a", np.ones((96, 96), "f4"), chunks=(32, 32), compressors=None)
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
