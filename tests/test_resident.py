"""Panels of op(A) that stay on the device while a row of blocks is made."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make

import ooc_gemm
from ooc_gemm import api, planner
from ooc_gemm.devices.cpu import CPU
from ooc_gemm.devices.several import Several
from ooc_gemm.plan import Budget, Matrix, Problem, Rates

RNG = np.random.default_rng(0)
RESIDENT = """
import sys
from ooc_gemm import planner, api
"""


@pytest.fixture
def resident(monkeypatch):
    """Every plan that can be made so is made so: blocks of these columns and panels this deep."""

    def with_sizes(bm, bn, bk):
        def make_plan(problem, budget, rates):
            if not problem.keeps_a:
                return planner.make_plan(problem, budget, rates)
            c, ring = planner._outputs(problem)[0], planner._rings(budget)[0]
            rows, cols = min(bm, problem.m), min(bn, problem.n)
            x = planner._Candidate(c, rows, cols, bk, 2, ring, resident=True)
            return planner._finish(problem, budget, rates, x)

        monkeypatch.setattr(api, "make_plan", make_plan)

    return with_sizes


def devices():
    yield pytest.param(lambda: CPU(2), id="cpu")
    yield pytest.param(lambda: Several([CPU(1) for _ in range(3)], [1, 2, 1]), id="several")
    yield pytest.param(lambda: ooc_gemm.devices.open_device("cuda"), id="cuda", marks=pytest.mark.gpu)
    yield pytest.param(lambda: ooc_gemm.devices.open_device("cuda:all"), id="all", marks=pytest.mark.gpu)


@pytest.fixture(params=devices())
def device(request):
    if "cuda" in request.node.callspec.id or "all" in request.node.callspec.id:
        if why := gpu_missing():
            pytest.skip(why)
    return request.param()


@pytest.mark.parametrize("beta", [0, 3])
@pytest.mark.parametrize("transpose", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "i1", "f8"])
def test_products(tmp_path, device, resident, transpose, beta, dtype):
    resident(300, 200, 128)
    a, b, c = (
        RNG.integers(-4, 5, shape).astype(dtype) for shape in ((700, 500), (500, 900), (700, 900))
    )
    want = 2 * (a.astype("i8") @ b.astype("i8")) + beta * c.astype("i8")
    make(tmp_path / "a", a.T if "a" in transpose else a, chunks=(90, 70))
    make(tmp_path / "b", b.T if "b" in transpose else b, chunks=(64, 128))
    out = {"i1": "i4", "f2": "f4"}.get(dtype, dtype)
    make(tmp_path / "c", c.astype(out), chunks=(100, 100))
    options = {"beta": beta} if beta else {"force": True, "chunks": (100, 100)}
    result = ooc_gemm.multiply(
        *(str(tmp_path / name) for name in "abc"), alpha=2, device=device, out_dtype=out,
        transpose_a="a" in transpose, transpose_b="b" in transpose, verify=True, **options,
    )  # fmt: skip
    plan = result.plan
    assert plan.resident
    assert (plan.block_count, plan.panel_count) == (15, 4)
    assert np.array_equal(zarr.open_array(tmp_path / "c")[...], want)
    for what in ("bytes_read", "bytes_written", "bytes_uploaded", "bytes_downloaded"):
        assert getattr(result, what) == getattr(plan, what), what
