"""Panels that stay on a GPU and are split once, where they lie, for several products."""

from dataclasses import replace

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make
from plans import staying_plan

import ooc_gemm
from ooc_gemm.cuda_kernels import complex_gemm, tensor
from ooc_gemm.devices.cuda.session import CUDASession
from ooc_gemm.run import prepare
from ooc_gemm.run.request import Operand, Reduced, Request

RNG = np.random.default_rng(7)
M, N, K = 640, 900, 500
SAID = "the run continues with panels that are prepared for each block"


@pytest.fixture(params=[False, True], ids=["rows", "strips"])
def resident(request, monkeypatch):
    """Every plan has panels of 128, of which some stay."""
    monkeypatch.setattr(prepare, "make_plan", staying_plan(128, strips=request.param))


def operands(dtype="f4"):
    found = [RNG.standard_normal(shape) for shape in ((M, K), (K, N))]
    if dtype == "c8":
        found = [x + 1j * RNG.standard_normal(x.shape) for x in found]
    return [x.astype(dtype) for x in found]


def multiplied(folder, a, b, transpose="", device="cuda", **options):
    """The result, C, and whether the run had to go on in another way."""
    make(folder / "a", a.T if "a" in transpose else a, chunks=(90, 70))
    make(folder / "b", b.T if "b" in transpose else b, chunks=(64, 128))
    notes = []
    result = ooc_gemm.multiply(
        *(str(folder / name) for name in "abc"), device=device, chunks=(100, 100), force=True,
        transpose_a="a" in transpose, transpose_b="b" in transpose, notice=notes.append, **options,
    )  # fmt: skip
    assert result.plan.k_panels.resident
    return result, zarr.open_array(folder / "c")[...], any(SAID in note for note in notes)


def closeness(c, a, b):
    """The largest error, as a multiple of what float32 makes of a sum of such terms."""
    kind = "c16" if a.dtype.kind == "c" else "f8"
    a, b = a.astype(kind), b.astype(kind)
    with np.errstate(invalid="ignore"):
        exact, terms = a @ b, np.abs(a) @ np.abs(b)
    finite = np.isfinite(exact)
    assert np.array_equal(np.isfinite(c), finite)
    return np.max(np.abs(c[finite] - exact[finite]) / terms[finite]) / 2.0**-24


def device_of(name):
    if why := gpu_missing(1 + name.count(",")):
        pytest.skip(why)
    return name


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0,1"])
@pytest.mark.parametrize("transpose", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_the_result_is_that_of_panels_that_are_split_for_each_product(
    tmp_path, monkeypatch, resident, name, transpose, dtype
):
    """Checks need panels as they were uploaded, so with them each product splits its own."""
    monkeypatch.setattr(tensor, "split_pays", lambda m, n, k: True)
    monkeypatch.setattr(complex_gemm, "few_rows", lambda m, n, k: False)
    a, b = operands(dtype)
    options = {"kernel": "fp16x3", "device": device_of(name)}
    once, c, again = multiplied(tmp_path / "once", a, b, transpose, **options)
    each, other, _ = multiplied(tmp_path / "each", a, b, transpose, verify=True, **options)
    assert (once.plan.problem.once, each.plan.problem.once, again) == (True, False, False)
    assert closeness(c, a, b) < 20
    assert np.array_equal(c, other)


def with_nan_first(a, b):
    b[77, 3] = np.nan


def with_nan_last(a, b):
    b[77, N - 3] = np.nan


def with_nan_in_a(a, b):
    a[310, 77] = np.inf


def with_units_along_k(a, b):
    a[:, ::20] *= 2.0**-10  # of fewer equal terms float32 rounds less, and then nothing is split


def with_units_in_the_last_columns(a, b):
    b[::20, 800:] *= 2.0**-10


def with_few_terms_last(a, b):
    b[20:, 800:] = 0


def of_many_sizes(a, b):
    a *= (2.0 ** RNG.integers(-30, 30, a.shape)).astype("f4")


def of_parts_that_differ(a, b):
    a[:, 300:] *= 2.0**-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "again"),
    [
        (with_nan_first, None), (with_nan_last, True), (with_nan_in_a, None), (with_units_along_k, True),
        (with_units_in_the_last_columns, True), (with_few_terms_last, None), (of_many_sizes, None),
        (of_parts_that_differ, None),
    ],
)  # fmt: skip
def test_operands_for_which_panels_are_needed_as_they_were(tmp_path, resident, change, again):
    """Then the run goes on with panels that are split for each product. `again`: whether it must; None: it
    may."""
    a, b = operands()
    change(a, b)
    result, c, went_on = multiplied(tmp_path, a, b, kernel="fp16x3", device=device_of("cuda"))
    assert again in (None, went_on)
    assert result.plan.problem.once == (not went_on)
    assert closeness(c, a, b) < 20


@pytest.mark.gpu
def test_a_few_rows_below_and_columns_beside(tmp_path, resident):
    """For so few, fp16x3 does not pay, but their panels have been split."""
    a, b = operands()
    a, b = np.vstack([a[:600], a[:3]]), np.hstack([b[:, :800], b[:, :5]])
    result, c, again = multiplied(tmp_path, a, b, kernel="fp16x3", device=device_of("cuda"))
    assert result.plan.problem.once
    assert not again
    assert closeness(c, a, b) < 20


@pytest.mark.parametrize("fails", ["multiply", "lost"])
def test_a_run_that_lost_a_panel_goes_on(tmp_path, monkeypatch, resident, fails):
    """On a stand-in for a GPU whose kernel splits nothing."""
    cupy_on_cpu.install(monkeypatch)
    real, calls = getattr(CUDASession, fails), iter(range(100))
    seen = []
    real_open = CUDASession._open

    def opened(self, plan, operation, trace):
        real_open(self, plan, operation, trace)
        seen.append(self)

    def failing(self, *given, **named):
        if self is seen[0] and next(calls) > 2:
            self._lost = (1,)
        return real(self, *given, **named)

    monkeypatch.setattr(CUDASession, "_open", opened)
    monkeypatch.setattr(CUDASession, fails, failing)
    a, b = (RNG.integers(-4, 5, shape).astype("f4") for shape in ((M, K), (K, N)))
    _, c, again = multiplied(tmp_path, a, b, kernel="cublas")
    assert again
    assert len(seen) == 2
    assert np.array_equal(c, a @ b)


def test_what_needs_panels_as_they_are_has_them_so(tmp_path, monkeypatch, resident):
    """Checks read them, and a C with β, or a reduction, has had some blocks when a run begins anew."""
    cupy_on_cpu.install(monkeypatch, "90")
    a, b = operands()
    make(tmp_path / "a", a, chunks=(90, 70))
    make(tmp_path / "b", b, chunks=(64, 128))
    paths = [str(tmp_path / name) for name in "ab"]
    for options, once in (({}, True), ({"verify": True}, False), ({"beta": 2}, False)):
        plan = ooc_gemm.plan(*paths, kernel="fp16x3", device="cuda", **options)
        assert plan.problem.once == once
    request = Request(*map(Operand, paths), kernel="fp16x3", device="cuda", writes=False)
    for reduced, once in ((None, True), (Reduced(100, 8, 0), False)):
        job = prepare.prepare(replace(request, reduced=reduced).check())
        assert job.plan.problem.once == job.operation.arithmetic.once == once
