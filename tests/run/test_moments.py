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
    opened = open_operand(path, "A")
    found, nbytes = column_moments(opened.transpose() if transpose else opened, LIMIT)
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


@pytest.mark.parametrize("chunks", [(64, 16), (300, 16), (10, 3)])
@pytest.mark.parametrize("large", [1e10, 1e20, 9.969209968386869e36, -1.7e308])
@pytest.mark.parametrize("weight", [0, 1e-30])
def test_large_elements_of_little_weight(tmp_path, monkeypatch, chunks, large, weight):
    """Nothing of the others is lost, wherever the large elements are."""
    monkeypatch.setattr("ooc_gemm.run.moments.STRIP_ELEMENTS", 200)
    rng = np.random.default_rng(8)
    values, weights = rng.standard_normal((300, 23)), rng.random(300)
    values[[0, 7, 63, 64, 65, 250]] = large
    values[100:180] = large  # whole chunks
    weights[values[:, 0] == large] = weight
    path = make(tmp_path / "a", values, chunks=chunks)
    found, _ = column_moments(open_operand(path, "A"), LIMIT, weights=weights)
    mean = np.average(values, axis=0, weights=weights)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12, atol=1e-15 + 1e-15 * np.abs(mean).max())
    with np.errstate(over="ignore"):
        squares = (weights[:, None] * np.where(weights[:, None] == 0, 0, values - mean) ** 2).sum(axis=0)
    if np.isfinite(squares).all():
        np.testing.assert_allclose(found.squares, squares, rtol=1e-12)


@pytest.mark.parametrize("chunks", [(64, 3), (10, 3)])
def test_an_observation_without_weight_spreads_nan_as_in_numpy(tmp_path, chunks):
    values, weights = np.random.default_rng(9).standard_normal((64, 3)), np.ones(64)
    values[3, 1], values[4, 2] = np.nan, np.inf
    weights[:10] = 0
    found, _ = column_moments(
        open_operand(make(tmp_path / "a", values, chunks=chunks), "A"), LIMIT, weights=weights
    )
    with np.errstate(invalid="ignore"):
        wanted = np.average(values, axis=0, weights=weights)
    np.testing.assert_allclose(found.mean, wanted, rtol=1e-13)
    assert np.isnan(found.squares[1:]).all()


def test_columns_that_begin_with_missing_elements(monkeypatch):
    monkeypatch.setattr("ooc_gemm.run.moments.STRIP_ELEMENTS", 40)
    values = np.random.default_rng(10).standard_normal((300, 4)) + 1e9
    values[:, 1], values[:, 3] = 1 / 3, np.nan
    values[:100, :2] = np.nan
    found = of_columns(values, missing=np.nan)
    check(found, values, missing=np.nan, rtol=1e-6)
    assert found.squares[1] == 0


@pytest.mark.parametrize("pieces", [1, 4])
def test_squares_that_are_too_small_for_float64_are_not_zero(pieces):
    values = np.zeros((8, 6))
    values[:, :4] = np.array([1, -1, 2, -2, 1, -1, 2, -2])[:, None] * [1e-165, 1e-300, 5e-324, 1]
    values[:, 4], values[4:, 5] = 1e-170, 1e-165
    found = Moments.none(6)
    for part in np.split(values, pieces):
        found.include(0, of_columns(part))
    assert (found.squares > 0).tolist() == [True, True, True, True, False, True]
    again = of_columns(np.array([[5e-324, np.nan], [np.nan, np.nan]]), missing=np.nan)
    assert (again.squares == 0).all()


@pytest.mark.parametrize("pieces", [1, 4])
def test_means_of_elements_whose_sum_is_too_large_for_float64(pieces):
    values = np.array([[1.7e308, -1.7e308, 1.7e308, 1.7e308], [1.7e308, 1.7e308, 1.7e308, np.inf]]).T
    found = Moments.none(2)
    for part in np.split(values, pieces):
        found.include(0, of_columns(part))
    np.testing.assert_allclose(found.mean, [0.85e308, np.inf], rtol=1e-14)
    assert not np.isfinite(found.squares).any()
