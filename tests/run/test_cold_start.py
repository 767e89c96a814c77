"""What a process takes to make a GPU ready is part of the prediction of its first product there."""

import math
import re
import subprocess
import sys
from dataclasses import replace

import cupy_on_cpu
import numpy as np
import pytest
from conftest import make

import ooc_gemm
from ooc_gemm.bench import info
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.run import cold_start
from ooc_gemm.run.rates import FILE
from ooc_gemm.support.remembered import recall, remember


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has used no device, on a machine that remembers nothing."""
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cold_start, "_ready", set())
    cupy_on_cpu.install(monkeypatch)


@pytest.fixture
def product(tmp_path):
    make(tmp_path / "a", np.arange(64, dtype="f4").reshape(8, 8), chunks=(4, 4))
    options = {"device": "cuda", "kernel": "cublas", "memory_limit": "1GiB"}
    return lambda: ooc_gemm.multiply(*[str(tmp_path / "a")] * 2, **options).plan


def test_only_the_first_product_of_a_process_makes_its_device_ready(product):
    first, second = product(), product()
    assert first.starting_seconds == cold_start.USUAL_SECONDS
    assert second.starting_seconds == 0
    assert first.predicted_seconds > second.predicted_seconds
    left = first.without(first.all_but([]))
    assert left.predicted_seconds == first.starting_seconds, "it takes as long where little is left"
    told, later = (" ".join(str(plan).split()) for plan in (first, second))
    assert f"{first.starting_seconds:.2f} s of it to make the device ready for this process" in told
    assert "ready" not in later


def test_a_process_that_has_measured_its_device_has_made_it_ready(product, tmp_path):
    info.measure_places(CUDA(), [tmp_path], seconds=0.1)
    assert product().starting_seconds == 0


def test_what_it_takes_is_learned(product, monkeypatch):
    product()
    found = recall(FILE)[CUDA().model][cold_start.FIELD]
    least = cold_start.USUAL_SECONDS / math.sqrt(cold_start.MOST_CHANGED)
    assert least <= found < cold_start.USUAL_SECONDS, "nothing of it is needed here"
    monkeypatch.setattr(cold_start, "_ready", set())
    assert product().starting_seconds == found


@pytest.mark.parametrize("kept", ["nan", None, -1.0, 0, math.inf])
def test_what_cannot_be_true_is_not_believed(product, kept):
    remember(FILE, CUDA().model, {cold_start.FIELD: kept})
    assert product().starting_seconds == cold_start.USUAL_SECONDS


@pytest.mark.parametrize(
    ("warm", "seconds", "now"),
    [(0.1, 0.6, 0.25 * math.sqrt(2)), (0.1, 60.0, 0.25 * math.sqrt(2)), (5.0, 9.0, None)],
)
def test_one_run_changes_little_and_a_long_one_nothing(product, monkeypatch, warm, seconds, now):
    device, plan = CUDA(), product()
    remember(FILE, device.model, {cold_start.FIELD: None})
    plan = replace(plan, starting_seconds=0.25, predicted_seconds=warm + 0.25)
    cold_start.learn(device, plan, seconds)
    assert recall(FILE)[device.model][cold_start.FIELD] == pytest.approx(now)


def test_a_product_on_the_cpu_has_no_such_start(tmp_path):
    make(tmp_path / "a", np.eye(8, dtype="f4"), chunks=(4, 4))
    assert ooc_gemm.multiply(*[str(tmp_path / "a")] * 2, device="cpu").plan.starting_seconds == 0


@pytest.mark.parametrize("device", ["cpu.device", "cuda.device", "several"])
def test_a_device_imports_what_makes_passes_only_for_a_pass(device):
    """Importing is a large part of what the first product of a process takes."""
    code = f"import sys, ooc_gemm.devices.{device}; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert f"ooc_gemm.devices.{device}" in imported
    assert not [name for name in imported if re.search(r"passes|stream_plan|scoring", name)]
