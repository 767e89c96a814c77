"""Means and squared deviations of columns agree with NumPy's in float64, whatever the means are."""

import numpy as np
import pytest
from arrays import LAYOUTS
from conftest import make

from ooc_gemm.run.moments import Moments, column_moments, of_columns
from ooc_gemm.run.operands import open_operand

LIMIT = 512 << 20


def check(found, values, missing=None, rtol=1e-12):
    """Against what NumPy finds column by column, in its widest float."""
    wide = values.astype(np.longdouble)
    for j, column in enumerate(wide.T):
        gone = np.zeros(len(column), bool)
        if missing is not None:
            gone = np.isnan(column) if np.isnan(missing) else column == missing
        some = column[~gone]
        assert found.count[j] == len(some)
        if not len(some):
            assert np.isnan(found.mean[j])
            assert found.squares[j] == 0
            continue
        np.testing.assert_allclose(found.mean[j], float(some.mean()), rtol=1e-12, atol=1e-14)
        expected = float(np.square(some - some.mean()).sum())
        np.testing.assert_allclose(found.squares[j], expected, rtol=rtol, atol=1e-300)


@pytest.mark.parametrize("mean", [0, 1e4, -1e7])
@pytest.mark.parametrize("layout", ["tiny", "zstd", "v2-fortran"])
@pytest.mark.parametrize("transpose", [False, True])
def test_large_means_lose_nothing(tmp_path, layout, mean, transpose):
    values = np.random.default_rng(1).standard_normal((133, 71)) + mean
    path = make(tmp_path / "a", values, **LAYOUTS[layout])
    found, nbytes = column_moments(open_operand(path, "A", transpose), LIMIT)
    check(found, values.T if transpose else values, rtol=1e-12 + 1e-15 * abs(mean))
    assert nbytes > 0


def test_columns_that_drift():
    """The first rows tell nothing of the others."""
    rows = np.arange(40_000.0)[:, None]
    values = np.hstack([rows, 1e6 + rows**2, np.where(rows < 20_000, 0.0, 1e8)])
    check(of_columns(values), values, rtol=1e-10)
    check(column_moments(open_operand(values, "A"), LIMIT)[0], values, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["i1", "u2", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_type(dtype, order):
    rng = np.random.default_rng(2)
    values = np.asarray(rng.integers(0, 100, (257, 31)).astype(dtype), order=order)
    check(of_columns(values), values)
    check(of_columns(values, missing=7), values, missing=7)


@pytest.mark.parametrize("missing", [np.nan, -1, -1.5, 300])
def test_missing_values_do_not_count(tmp_path, missing):
    rng = np.random.default_rng(3)
    values = rng.standard_normal((500, 40)) + 1e3
    values[rng.random(values.shape) < 0.2] = missing
    values[:, 5] = missing
    values[:400, 6] = missing
    values[0] = missing
    path = make(tmp_path / "a", values, chunks=(64, 16))
    check(column_moments(open_operand(path, "A"), LIMIT, missing)[0], values, missing, rtol=1e-10)


def test_integers_that_are_missing():
    values = np.random.default_rng(4).integers(-1, 3, (1000, 20)).astype("i1")
    check(of_columns(values, missing=-1), values, missing=-1)
    check(of_columns(values, missing=1000), values, missing=1000)
    check(of_columns(values, missing=np.nan), values)


def test_equal_elements_deviate_by_nothing():
    for value in (0.1, 1 / 3, 1e300, -7e-200):
        values = np.full((10_000, 5), value)
        values[::3, 2] = np.nan
        found, _ = column_moments(open_operand(values, "A"), LIMIT, missing=np.nan)
        assert (found.squares == 0).all()
        assert (found.mean == value).all()


def test_nan_and_infinity_spoil_their_columns_alone():
    values = np.random.default_rng(5).standard_normal((5000, 6))
    values[0, 0], values[4999, 1], values[2500, 2], values[7, 3] = np.nan, np.nan, np.inf, -np.inf
    found, _ = column_moments(open_operand(values, "A"), LIMIT)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(np.isnan(found.mean), np.isnan(values.mean(axis=0)))
        np.testing.assert_array_equal(np.isnan(found.squares), np.isnan(values.var(axis=0)))
    assert (found.mean[2], found.mean[3]) == (np.inf, -np.inf)
    check(Moments(found.count[4:], found.mean[4:], found.squares[4:]), values[:, 4:])


def test_the_result_does_not_depend_on_the_threads(tmp_path):
    values = np.random.default_rng(6).standard_normal((3000, 30)).astype("f4")
    path = make(tmp_path / "a", values, chunks=(50, 10))
    least = 90 << 20
    first, *others = (column_moments(open_operand(path, "A"), limit)[0] for limit in (least, LIMIT, LIMIT))
    for other in others:
        assert first.mean.tobytes() == other.mean.tobytes()
        assert first.squares.tobytes() == other.squares.tobytes()


def test_no_rows():
    found, _ = column_moments(open_operand(np.zeros((0, 4)), "A"), LIMIT)
    assert (found.count == 0).all()
    assert np.isnan(found.mean).all()


@pytest.mark.parametrize("missing", [None, -1])
@pytest.mark.parametrize("mean", [0, 1e4])
def test_rows_with_weights(tmp_path, missing, mean):
    rng = np.random.default_rng(7)
    values, weights = rng.standard_normal((700, 23)) + mean, rng.random(700) / 100
    weights[:90] = 0
    values[rng.random(values.shape) < 0.1] = -1
    values[:, 4] = -1
    path = make(tmp_path / "a", values, chunks=(64, 16))
    found, _ = column_moments(open_operand(path, "A"), LIMIT, missing, weights=weights)
    some = np.ma.array(values, mask=values == (np.inf if missing is None else missing))
    total = np.ma.array(np.repeat(weights[:, None], 23, 1), mask=some.mask).sum(axis=0)
    mean = np.ma.average(some, axis=0, weights=weights)
    squares = (np.square(some - mean) * weights[:, None]).sum(axis=0)
    for one, wanted in ((found.count, total), (found.mean, mean), (found.squares, squares)):
        wanted = np.ma.filled(wanted, np.nan if one is found.mean else 0)
        np.testing.assert_allclose(one, wanted, rtol=1e-10, atol=1e-15)
    deviation = np.ma.filled(np.sqrt(squares / total), 0)
    np.testing.assert_allclose(found.deviation, deviation, rtol=1e-10, atol=1e-9 * (missing is None))
