"""Rates where none were measured: what is expected of files in memory, and plans that are made so."""

from dataclasses import replace

import numpy as np
import pytest
from on_the_bus import OnTheBus

from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cuda import choice
from ooc_gemm.devices.cuda import rates as gpu_rates
from ooc_gemm.planning.cost import CostModel
from ooc_gemm.planning.machine import Budget
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import _Search
from ooc_gemm.run import rates

MiB = 1 << 20
F4 = np.dtype("f4")


def test_files_in_memory_are_expected_to_be_as_fast_as_copies(cache, monkeypatch):
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
