"""Least squares agree with NumPy's lstsq in float64, and refuse what normal equations cannot do."""

import json
import subprocess
import sys

import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import make, ooc
from models import close, exact, problem

import ooc_gemm
from ooc_gemm import BudgetError, InputError, StoreError, lstsq

LIMIT = {"memory_limit": "2GiB"}


@pytest.mark.parametrize("kind", ["numpy", "dask", "xarray", "h5py", *LAYOUTS])
@pytest.mark.parametrize("flat", [False, True])
def test_every_input(tmp_path, kind, flat):
    x, y = problem(133, 21, 3, 1)
    y = y[:, 0] if flat else y
    chunks = (64,) if flat else (64, 2)
    if kind == "dask":
        da = pytest.importorskip("dask.array")
        given = da.from_array(x, chunks=(50, 10)), da.from_array(y, chunks=chunks)
    elif kind == "xarray":
        xr = pytest.importorskip("xarray")
        given = xr.DataArray(x, dims=("a", "b")), xr.DataArray(y, dims=("a", "c")[: y.ndim])
    elif kind == "h5py":
        file = pytest.importorskip("h5py").File(tmp_path / "a.h5", "w")
        given = (
            file.create_dataset("x", data=x, chunks=(64, 5)),
            file.create_dataset("y", data=y, chunks=chunks),
        )
    elif kind == "numpy":
        given = x, y
    else:
        version = LAYOUTS[kind].get("zarr_format", 3)
        other = make(tmp_path / "y", y, chunks=chunks, zarr_format=version)
        given = make(tmp_path / "x", x, **LAYOUTS[kind]), other
    found = lstsq(*given, **LIMIT)
    close(found.array, exact(x, y)[0], x)
    assert np.shape(found.intercept) == (() if flat else (3,))
    assert isinstance(found.intercept, float if flat else np.ndarray)
    assert (found.intercept == 0).all()


@pytest.mark.parametrize("ridge", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_ridge_and_intercept(ridge, intercept, dtype):
    x, y = problem(5000, 13, 2, 2, dtype=dtype)
    found = lstsq(x, y, ridge=ridge, intercept=intercept, **LIMIT)
    w, constant = exact(x, y, ridge, intercept)
    close(found.array, w, x)
    np.testing.assert_allclose(found.intercept, constant, rtol=1e-6)
    assert found.passes == 1
    assert found.bytes_read == x.nbytes + y.nbytes


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_means_of_ten_thousand_deviations(tmp_path, dtype):
    x, y = problem(3000, 9, 1, 3, mean=1e4, dtype=dtype)
    path = make(tmp_path / "x", x, chunks=(100, 9))
    found = lstsq(path, y, intercept=True, **LIMIT)
    w, constant = exact(x, y, intercept=True)
    close(found.array, w, x - x.mean(axis=0), 1e-6)
    np.testing.assert_allclose(found.intercept, constant, rtol=1e-5)
    assert found.condition < 2


@pytest.mark.parametrize("dtype", ["i1", "u2", "i8", "f2"])
def test_every_type(dtype):
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 50, (200, 6)).astype(dtype), rng.integers(0, 9, 200).astype(dtype)
    close(lstsq(x, y, **LIMIT).array, exact(x, y)[0], x)


def test_the_condition_is_that_of_scaled_columns():
    x, y = problem(300, 8, 1, 5)
    scaled = x / np.linalg.norm(x, axis=0)
    assert lstsq(x, y, **LIMIT).condition == pytest.approx(np.linalg.cond(scaled))


@pytest.mark.parametrize("intercept", [False, True])
def test_columns_that_are_nearly_dependent(intercept):
    x, y = problem(500, 8, 1, 6)
    for apart, works in ((1e-2, True), (1e-4, True), (1e-7, False), (0.0, False)):
        noise = np.random.default_rng(7).standard_normal(500)
        x[:, 5] = x[:, 2] * 3 + apart * np.abs(x[:, 2]).mean() * noise
        if works:
            close(lstsq(x, y, intercept=intercept, **LIMIT).array, exact(x, y, 0, intercept)[0], x, 1e-5)
            continue
        with pytest.raises(InputError, match=r"too nearly dependent .* columns 2 and 5 most of all"):
            lstsq(x, y, intercept=intercept, **LIMIT)
    close(lstsq(x, y, ridge=1.0, **LIMIT).array, exact(x, y, 1.0)[0], x, 1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e9])
def test_constant_columns(value):
    x, y = problem(500, 5, 1, 8)
    x[:, 3] = value
    with pytest.raises(InputError, match=r"column 3 is (constant|zero); leave it out, or give a ridge"):
        lstsq(x, y, intercept=True, **LIMIT)
    found = lstsq(x, y, ridge=1e-3, intercept=True, **LIMIT)
    assert np.abs(found.array[3]).max() <= 1e-6
    if value == 0:
        with pytest.raises(InputError, match="column 3 is zero"):
            lstsq(x, y, **LIMIT)
    else:
        close(lstsq(x, y, **LIMIT).array, exact(x, y)[0], x)


UNITS = [1e-305, 1e-165, 1e-161, 1e-160, 1e-130, 1e150, 1e155, 1e250, 1e306]


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_units_of_columns_do_not_matter(intercept, unit):
    """Also where squares of a column are too large or too small for float64, and the mean is, too."""
    x, y = problem(3000, 4, 2, 14, mean=1)
    x /= np.abs(x).max(axis=0)
    wanted = lstsq(x, y, intercept=intercept, **LIMIT)
    found = lstsq(x * [1, unit, 1, 1], y, intercept=intercept, **LIMIT)
    close(found.array * np.array([1, unit, 1, 1])[:, None], wanted.array, x)
    np.testing.assert_allclose(found.intercept, wanted.intercept, rtol=1e-9)
    assert (found.passes, found.condition) == (2 - (unit in (1e-130, 1e150)), pytest.approx(wanted.condition))
    assert found.bytes_read == found.passes * x.nbytes + y.nbytes
    y /= np.abs(y).max(axis=0)
    target, small = unit * np.array([1, 0.1]), unit < 1e-300
    wanted = lstsq(x, y, ridge=1e-3, intercept=intercept, **LIMIT)
    found = lstsq(x, y * target, ridge=1e-3, intercept=intercept, **LIMIT)
    close(found.array / target, wanted.array, x, 1e-6 if small else 1e-9)


def test_small_numbers_beside_others():
    """A column may be small in some rows only, or constant, or zero: that costs no pass."""
    x, y = problem(3000, 4, 1, 15)
    x[:2000, 1] *= 1e-200
    x[:, 3] = 0
    for intercept in (False, True):
        found = lstsq(x, y, ridge=1e-2, intercept=intercept, **LIMIT)
        close(found.array, exact(x, y, 1e-2, intercept)[0], x + (x == 0))
        assert found.passes == 1
    x[:, 3] = 1e-200
    with pytest.raises(InputError, match="column 3 is constant"):
        lstsq(x, y, intercept=True, **LIMIT)
    x[:, 3] = 1e-200 * y[:, 0]
    close(lstsq(x, y, **LIMIT).array * [[1], [1], [1], [1e-200]], np.eye(4)[3:].T, np.ones((1, 4)), 1e-6)


def test_coefficients_that_float64_does_not_hold():
    x, y = problem(300, 2, 1, 16)
    constant = lstsq(x, np.full(300, 1e308), intercept=True, **LIMIT)
    assert np.abs(constant.array * x).max() <= 1e298
    assert constant.intercept == pytest.approx(1e308)
    with pytest.raises(InputError, match="coefficients of x for y are too large for float64"):
        lstsq(x * 1e-200, y * 1e200, **LIMIT)
    with pytest.raises(InputError, match="coefficient of column 0 is too small for float64"):
        lstsq(x * 1e200, y * 1e-200, **LIMIT)


def test_what_is_not_finite_is_refused():
    x, y = problem(50, 4, 2, 9)
    for bad in (np.nan, np.inf):
        broken = x.copy()
        broken[7, 2] = bad
        with pytest.raises(InputError, match="x: column 2 holds NaN"):
            lstsq(broken, y, **LIMIT)
        broken = y.copy()
        broken[7, 1] = bad
        for intercept in (False, True):
            with pytest.raises(InputError, match="y holds NaN or infinite numbers"):
                lstsq(x, broken, intercept=intercept, **LIMIT)


@pytest.mark.parametrize(
    ("shapes", "options", "said"),
    [
        (((5, 2), (6,)), {}, "x has 5 rows, but y has 6; give as many of both"),
        (((2, 5), (2,)), {}, "x has 2 rows for 5 coefficients.* give a ridge"),
        (((5, 5), (5,)), {"intercept": True}, "x has 5 rows for 6 coefficients"),
        (((5, 0), (5,)), {}, "give some elements"),
        (((5, 2), (5,)), {"ridge": -1.0}, "ridge is -1.0; it must be 0 or more"),
        (((5, 2), (5,)), {"ridge": np.nan}, "ridge is nan"),
        (((5, 2), (5, 1, 1)), {}, "two dimensions"),
        (((5,), (5,)), {}, "two dimensions"),
    ],
)
def test_what_cannot_be(shapes, options, said):
    with pytest.raises(InputError, match=said):
        lstsq(*(np.ones(shape) for shape in shapes), **options, **LIMIT)
    with pytest.raises(InputError, match="y is complex"):
        lstsq(np.ones((5, 2)), np.ones(5) * 1j, **LIMIT)


def test_y_is_called_by_its_path(tmp_path):
    x, y = problem(50, 4, 1, 9)
    y[3] = np.nan
    with pytest.raises(InputError, match=r"/y holds NaN or infinite numbers"):
        lstsq(x, make(tmp_path / "y", y, chunks=(50, 1)), **LIMIT)


def test_a_wide_array_with_a_ridge():
    x, y = problem(20, 50, 2, 10)
    x /= np.linalg.norm(x, axis=0)
    close(lstsq(x, y, ridge=0.1, **LIMIT).array, exact(x, y, 0.1)[0], x)


def test_a_limit_that_is_too_small(tmp_path):
    x, y = problem(3000, 40, 2, 11)
    path = make(tmp_path / "x", x, chunks=(100, 40))
    with pytest.raises(BudgetError, match="too small to fit a model to") as error:
        lstsq(path, y, memory_limit="81MiB")
    least = error.value.minimum_memory_limit
    with pytest.raises(BudgetError):
        lstsq(path, y, memory_limit=least - 1)
    close(lstsq(path, y, memory_limit=least).array, exact(x, y)[0], x)


def test_the_smallest_limit_that_is_named_does_for_y(tmp_path, monkeypatch):
    """One chunk of y takes more than the pass over x."""
    monkeypatch.setattr("ooc_gemm.run.stream.baseline_bytes", lambda least: 100 << 20)
    x, y = problem(300_000, 3, 1, 13)
    path, other = make(tmp_path / "x", x, chunks=(1000, 3)), make(tmp_path / "y", y, chunks=(300_000, 1))
    with pytest.raises(BudgetError) as error:
        lstsq(path, other, memory_limit=1000)
    least = error.value.minimum_memory_limit
    with pytest.raises(BudgetError):
        lstsq(path, other, memory_limit=least - 1)
    close(lstsq(path, other, memory_limit=least).array, exact(x, y)[0], x)
    make(tmp_path / "flat", y[:, 0], chunks=(300_000,))  # what reading takes shows in a trial
    with pytest.raises(BudgetError) as error:
        lstsq(path, str(tmp_path / "flat"), memory_limit=1000)
    lstsq(path, str(tmp_path / "flat"), memory_limit=error.value.minimum_memory_limit)


def test_written_coefficients_and_a_failed_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = problem(300, 7, 2, 12)
    make("x", x, chunks=(50, 7))
    make("y", y, chunks=(50, 2))
    make("y1", y[:, 1], chunks=(50,))
    fractions = []
    done = lstsq("x", "y", "w", progress=fractions.append, **LIMIT)
    assert done.array.shape == (7, 2)
    assert fractions[-1] == 1
    close(zarr.open_array("w", mode="r")[...], exact(x, y)[0], x)
    with pytest.raises(InputError, match="w exists; give force=True"):
        lstsq("x", "y", "w", **LIMIT)
    found = json.loads(ooc("lstsq", "x", "y1", "w", "-f", "--json", "--intercept", "-M", "2GiB").out)
    w, constant = exact(x, y[:, 1], intercept=True)
    close(zarr.open_array("w", mode="r")[:, 0], w, x)
    assert found["intercept"] == pytest.approx([constant])
    alone = lstsq("x", "y1", intercept=True, **LIMIT)
    assert (alone.intercept, alone.to_dict()["intercept"]) == (pytest.approx(constant), found["intercept"])
    said = ooc("lstsq", "x", "y", "w", "-f", "--intercept", "-M", "2GiB").out
    assert "w: coefficients, condition number" in said
    assert "; intercept " in said
    assert ooc("lstsq", "x", "y", "w").code == 2
    (tmp_path / "x" / "c" / "3" / "0").write_bytes(b"no frame")
    with pytest.raises(StoreError, match="chunk c/3/0"):
        lstsq("x", "y", "new", **LIMIT)
    assert not (tmp_path / "new").exists()


PROGRAM = """
import sys, ooc_gemm
found = ooc_gemm.lstsq(sys.argv[1], sys.argv[2], intercept=True, memory_limit=int(sys.argv[3]))
print(found.peak_host_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [190 << 20, 400 << 20])
@pytest.mark.parametrize("layout", [{"chunks": (2048, 800)}, {"chunks": (1000, 300), "compressor": "zstd"}])
def test_the_process_keeps_within_its_limit(tmp_path, layout, limit):
    x, y = str(tmp_path / "x"), str(tmp_path / "y")
    ooc_gemm.random(x, (60_000, 800), distribution="uniform", **layout)
    ooc_gemm.random(y, (60_000, 2), distribution="uniform", seed=1)
    command = [sys.executable, "-c", PROGRAM, x, y, str(limit)]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peak <= limit
