"""Rates that cannot be true: how they came about, and that none is believed, remembered or shown."""

import json

import numpy as np
import pytest
from conftest import make, ooc

from ooc_gemm.bench import chunks, info, kernel_rate
from ooc_gemm.bench import engine as bench_engine
from ooc_gemm.cuda_kernels import roofline
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.devices.several import Several
from ooc_gemm.run import rates
from ooc_gemm.support import remembered

H200 = (9, 0), 132, 1.98e9


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Chip(CPU):
    """A GPU as its own events time it: a kernel does not begin before the host has started it, which takes a
    while, and so does what surrounds its products."""

    flops, host, around = 92e9, 150e-6, 5e-6
    most = 120e9

    def __init__(self):
        super().__init__(1)
        self.model = "Chip"

    def most_flops(self, kernel, panel):
        return self.most

    def working(self, block, panel):
        """Seconds of a product as events time it."""
        products = 2 * block.rows * block.cols * (panel[1] - panel[0])
        return max(self.host, self.around + products / self.flops)

    def open(self, plan, operation, trace):
        return ChipSession(self, plan, operation, trace)

    def reaches(self, other):
        return False


class ChipSession(CPUSession):
    """A run on `Chip`."""

    def __init__(self, device, *args):
        super().__init__(device, *args)
        self._chip = device

    def multiply(self, block, panel, p, c, first):
        self._trace.add("compute", 1.0, 1.0 + self._chip.working(block, panel))


SIDE = 64
EACH = 2 * SIDE * SIDE / Chip.flops


@pytest.fixture
def quick(monkeypatch):
    """Measurements of small blocks, in no time."""
    for module, name, value in (
        (kernel_rate, "STEADY", 0.0), (kernel_rate, "SIDES", (SIDE,)),
        (kernel_rate, "LARGEST_PANEL", 8 << 20),
        (info, "TOUCHED_BYTES", 1 << 20), (info, "_ring_seconds", lambda device: (1e-6, 1e-6)),
        (chunks, "SIDE", 64), (chunks, "FOLDER_BYTES", 1 << 20),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(("dtype", "host", "around"), [
    ("int8", 0.0, 0.0), ("int8", 150e-6, 5e-6), ("int8", 400e-6, 100e-6), ("float32", 20e-6, 100e-6),
    ("float16", 300e-6, 0.0),
])  # fmt: skip
def test_the_time_to_start_a_kernel_is_no_speed(quick, dtype, host, around):
    chip = Chip()
    chip.host, chip.around = host, around
    found, _ = kernel_rate.kernel_rate(chip, dtype, "highest", "auto", SIDE)
    assert found["flops"] == pytest.approx(chip.flops, rel=0.05)
    assert found["thin"] == pytest.approx(around / EACH, rel=0.05, abs=100)


def test_a_device_whose_start_takes_longest_is_measured_too_slow_not_too_fast(quick):
    chip = Chip()
    chip.host = 1.0
    found, _ = kernel_rate.kernel_rate(chip, "int8", "highest", "auto", SIDE)
    assert 0 < found["flops"] < chip.flops
    assert found["thin"] == 0


def test_panels_are_not_made_deeper_than_there_is_time_for(quick):
    asked = []

    def seconds(depth):
        asked.append(depth)
        return 1.0  # noise hides what a deeper panel costs

    each, once = kernel_rate.line(seconds, 1 << 30, 1.0 * kernel_rate.DEEPER - 0.1)
    assert asked == list(kernel_rate.DEPTHS)
    assert (each, once) == (1.0 / kernel_rate.DEPTHS[-1], 0.0)


def test_panels_are_as_deep_as_a_kernel_needs(quick):
    """Where they are less deep, a product is made by another kernel, of which the slope would tell."""
    first, second = kernel_rate.DEPTHS
    assert kernel_rate.depths_from(0) == kernel_rate.depths_from(first) == (first, second)
    deeper = first * kernel_rate.DEEPER, second * kernel_rate.DEEPER
    assert kernel_rate.depths_from(first + 1) == deeper

    def seconds(depth):
        return depth * (1.0 if depth > first else 3.0)

    assert kernel_rate.line(seconds, 1 << 30, depths=deeper) == (1.0, 0.0)


def test_noise_never_makes_a_rate_faster_than_its_deepest_panel(quick):
    rng = np.random.default_rng(0)
    for _ in range(200):
        times = {}

        def seconds(depth, times=times):
            times[depth] = (1e-4 + depth * 1e-7) * rng.uniform(0.3, 3)
            return times[depth]

        each, once = kernel_rate.line(seconds, 1 << 17)
        deepest = max(times)
        assert each > 0 <= once
        assert each * deepest >= (1 - kernel_rate.LARGEST_SHARE) * times[deepest] * (1 - 1e-9)


def test_of_several_devices_the_rate_of_one_is_measured(quick):
    """Planning multiplies it by their number."""
    several = Several([Chip() for _ in range(4)])
    (found,) = info.measure_device(several, dtypes=["int8"])["flops"].values()
    assert found["flops"] == pytest.approx(Chip.flops, rel=0.05)


def test_a_rate_above_the_peak_is_refused_and_what_was_remembered_of_it_goes(quick):
    chip = Chip()
    info.measure_with(chip, [], dtypes=["int8"])
    (key,) = remembered.recall(rates.FILE)["Chip"]["flops"]
    chip.most = 80e9
    (said,) = info.measure_with(chip, [], dtypes=["int8"])
    assert said.startswith(f"{key} was measured at 0.09")
    assert "0.08 at most" in said
    assert remembered.recall(rates.FILE)["Chip"]["flops"] == {}


@pytest.mark.parametrize("seconds", [0.0, -1e-3])
def test_a_clock_that_stands_still_gives_no_rate(quick, seconds):
    class Broken(Chip):
        def working(self, block, panel):
            return seconds

        def most_flops(self, kernel, panel):
            return float("inf")

    record = info.measure_device(Broken(), dtypes=["int8"])
    assert record["flops"] == {}
    assert len(record["refused"]) == 1


def test_remembered_rates_above_the_peak_are_not_used_and_not_shown(tmp_path, monkeypatch):
    """Older versions remembered them."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        make(name, np.ones((64, 64), "f4"), chunks=(32, 32))
    cpu = CPU()
    speed = {"blas float32": {"flops": 1.01 * cpu.most_flops("blas", "float32"), "thin": 0.0}}
    other = {"blas float64": {"flops": 0.99 * cpu.most_flops("blas", "float64"), "thin": 0.0}}
    record = {
        "date": "2026-01-03", "flops": speed | other, "upload_bytes_per_second": 1e9,
        "download_bytes_per_second": 2e9, "touch_bytes_per_second": 3e9,
        "piece_seconds": 1e-6, "start_seconds": 0.25,
    }  # fmt: skip
    remembered.remember(rates.FILE, cpu.model, record)
    found = json.loads(ooc("plan", "a", "b", "-d", "cpu", "--json").out)
    assert "for blas float32" in found["rates"]
    assert json.loads(ooc("info", "--json").out)["rates"][cpu.model]["flops"] == other
    found = json.loads(ooc("plan", "a", "b", "-d", "cpu", "--out-dtype", "float64", "--json").out)
    assert "of blas float64" not in found["rates"]


def test_the_most_that_a_gpu_can_do():
    def most(kernel, dtype):
        return roofline.most_flops(kernel, dtype, *H200)

    assert most("int8", "int8") == most("int8", "uint8") == pytest.approx(2141e12, rel=1e-3)
    assert most("fp16x3", "float32") == pytest.approx(1070.5e12 / 3, rel=1e-3)
    assert most("fp16x3", "complex64") == most("fp16x3", "float32") / 4
    assert most("cublas", "float32") == pytest.approx(66.9e12, rel=1e-3)
    assert most("cublas", "complex128") == most("cublas", "float64") / 4
    assert most("ffma", "int64") == most("int8", "int8"), "not in the tables"
    assert most("int8", "int8") < 5830e12, "what was reported once"
    future = roofline.most_flops("int8", "int8", (42, 0), 132, 1.98e9)
    assert 4 * most("int8", "int8") <= future < float("inf")
    assert roofline.most_flops("int8", "int8", (9, 0), 132, 0) == float("inf")
    boosted = roofline.most_flops("cublas", "float32", (8, 6), 82, 1.695e9)
    assert boosted == pytest.approx(1.1 * 35.6e12, rel=0.01)


def test_rates_measured_on_gpus_are_below_the_most():
    """Whatever was measured on an H200 passes: benchmarks/results/kernels_h200.json."""
    from pathlib import Path

    report = json.loads(
        (Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "kernels_h200.json").read_text()
    )
    rows = [row for row in report["rows"] if row.get("tflops")]
    assert len(rows) > 100
    for row in rows:
        parts = 4 if row["dtype"].startswith("complex") else 1
        flops = 1e12 * row["tflops"] / parts
        assert flops < roofline.most_flops(row["kernel"], row["dtype"], *H200), row


def test_what_a_cpu_measures_is_far_below_its_bound(monkeypatch):
    monkeypatch.setattr(kernel_rate, "STEADY", 0.01)
    cpu = CPU()
    found, _ = kernel_rate.kernel_rate(cpu, "float32", "highest", "auto", 512)
    assert 0 < found["flops"] < 0.8 * cpu.most_flops("blas", "float32")


@pytest.mark.parametrize("device", ["cpu", Several([Chip(), Chip()])], ids=["cpu", "several"])
def test_bench_engine_leaves_remembered_rates_as_they_are(quick, cache, tmp_path, monkeypatch, device):
    remembered.remember(rates.FILE, CPU().model, {"date": "2026-01-03", "flops": {}})
    remembered.remember(rates.FILE, "Chip", {"date": "2026-01-03", "flops": {}})
    before = (cache / rates.FILE).read_bytes()
    if device != "cpu":
        monkeypatch.setattr(bench_engine, "open_device", lambda name: device)
    case = bench_engine.Case(100, 100, 100, "float32", "squares")
    report = bench_engine.run([case], str(tmp_path), repeat=1, device="cpu")
    assert report["rows"][0]["seconds"] > 0
    if device == "cpu":
        assert report["rows"][0]["rates"].startswith("measured "), "the runs themselves use what was found"
    assert (cache / rates.FILE).read_bytes() == before
    assert remembered.recall(rates.FILE)["Chip"]["flops"] == {}


def test_a_folder_s_rate_above_what_memory_can_do_is_refused(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "MOST_BYTES", 1.0)
    said = info.measure_places(Chip(), [tmp_path])
    assert any(text.startswith("read was measured at ") and str(tmp_path) in text for text in said)
    (folder,) = remembered.recall(rates.FILE)["Chip"]["folders"].values()
    assert not [name for name in folder if name.endswith("_bytes_per_second")]
    assert folder["turns"] <= 1


def test_the_time_of_all_measurements_is_dealt(quick, tmp_path, monkeypatch):
    """Each kernel and folder gets a share of what is left, also where others took longer."""
    given, clock = [], [100.0]
    monkeypatch.setattr(info.time, "perf_counter", lambda: clock[0])

    def kernel(device, dtype, precision, name, side, steady, least):
        given.append(steady)
        clock[0] += 3.0
        return {"flops": 1e9, "thin": 0.0}, {}

    def folder(place, device, longest):
        given.append(longest)
        clock[0] += info.STEPS * longest
        return {}

    monkeypatch.setattr(kernel_rate, "kernel_rate", kernel)
    monkeypatch.setattr(info, "_touch_rate", lambda device: 1e9)
    monkeypatch.setattr(info, "measure_folder", folder)
    monkeypatch.setattr(kernel_rate, "STEADY", 9.0)
    monkeypatch.setattr(info, "_devices", lambda: iter([Chip()]))
    info.measure([str(tmp_path)], seconds=10.0)
    kernels = given[:-1]
    assert len(kernels) >= 4
    assert min(kernels) >= kernel_rate.LEAST_STEADY, "in less, only small blocks would be timed"
    assert kernels == sorted(kernels, reverse=True), "each took longer than its share"
    assert sum(kernels) * info.DEPTHS <= 10.0 * (1 - info.IN_FOLDERS)
    assert given[-1] * info.STEPS <= max(10.0 - 3.0 * len(kernels), 10.0 * info.IN_FOLDERS / 2)
