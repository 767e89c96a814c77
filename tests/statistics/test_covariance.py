"""Covariance and correlation, against numpy.cov and numpy.corrcoef of the same data in float64."""

import numpy as np
import pytest
import zarr
from arrays import LAYOUTS, matrix
from conftest import make
from interruption import interrupted

import ooc_gemm
from ooc_gemm.run.observer import Observer
from ooc_gemm.run.prepare import prepare
from ooc_gemm.run.request import Operand, Request
from ooc_gemm.statistics.covariance import planned

LIMIT = "300MiB"


def close(found, wanted, bound=1e-6):
    assert found.shape == wanted.shape
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert np.nanmax(np.abs(found - wanted), initial=0) <= bound * np.nanmax(np.abs(wanted), initial=1e-300)


def variables(shape, seed, means=1e4):
    """Observations of variables along columns, whose means are large beside their deviations."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) @ (np.eye(shape[1]) + rng.standard_normal((shape[1], shape[1])) / 8)
    return (x + means * rng.standard_normal(shape[1])).astype("f4")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rowvar", [True, False])
def test_layouts(tmp_path, layout, rowvar):
    x = variables((301, 77), 1)
    stored = make(tmp_path / "x", x.T if rowvar else x, **LAYOUTS[layout])
    wide = x.astype("f8")
    found = ooc_gemm.cov(stored, str(tmp_path / "c"), rowvar=rowvar, memory_limit=LIMIT, verify=True)
    close(zarr.open_array(tmp_path / "c")[:], np.cov(wide, rowvar=False))
    assert np.allclose(found.mean, wide.mean(axis=0), rtol=1e-12, atol=0)
    assert found.verified
    assert found.bytes_passed > 0
    found = ooc_gemm.corrcoef(stored, rowvar=rowvar, memory_limit=LIMIT, verify=True)
    close(found.array, np.corrcoef(wide, rowvar=False))
    assert (np.diag(found.array) == 1).all()
    assert np.abs(found.array).max() == 1
    assert np.array_equal(found.array, found.array.T)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8"])
def test_types(dtype):
    x = matrix((400, 9), dtype, 2)
    wide, narrow = x.astype("f8"), np.dtype(dtype).itemsize < 4 or dtype == "f4"
    found = ooc_gemm.cov(x, rowvar=False, memory_limit=LIMIT)
    assert found.array.dtype == ("f4" if narrow else "f8")
    # The rounding of a sum of 400 float32; the processor decides in which order BLAS adds.
    rounding = len(x) ** 0.5 * float(np.finfo("f4").eps)
    close(found.array, np.cov(wide, rowvar=False), rounding if narrow else 1e-13)
    found = ooc_gemm.cov(x, rowvar=False, memory_limit=LIMIT, out_dtype="f8")
    close(found.array, np.cov(wide, rowvar=False), 1e-13)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"ddof": 0}, {"ddof": 3, "bias": True}])
@pytest.mark.parametrize("weighted", [False, True])
def test_divisors_and_weights_are_those_of_numpy(options, weighted):
    x = variables((50, 6), 3)
    weights = {"aweights": np.random.default_rng(4).random(50)} if weighted else {}
    found = ooc_gemm.cov(x, rowvar=False, memory_limit=LIMIT, **options, **weights)
    close(found.array, np.cov(x.astype("f8"), rowvar=False, **options, **weights))
    average = np.average(x.astype("f8"), axis=0, weights=weights.get("aweights"))
    assert np.allclose(found.mean, average, rtol=1e-12, atol=0)


@pytest.mark.parametrize("factor", [1e-200, 1e-30, 1e36, 1e200])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_only_the_ratios_of_weights_matter(factor, dtype):
    rng = np.random.default_rng(3)
    x, weights = rng.normal(size=(4, 50)).astype(dtype), rng.random(50)
    for ddof in (0, 1):
        found = ooc_gemm.cov(x, aweights=weights * factor, ddof=ddof).array
        near = {"rtol": 1e-5 if dtype == "f4" else 1e-12, "atol": 1e-6 if dtype == "f4" else 1e-14}
        assert np.allclose(found, np.cov(x.astype("f8"), aweights=weights, ddof=ddof), **near)


@pytest.mark.parametrize("large", [9.969209968386869e36, 1e20, 1e10])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_large_observation_without_weight_counts_for_nothing(tmp_path, large, dtype):
    x, weights = np.random.default_rng(0).standard_normal((60, 4)).astype(dtype), np.ones(60)
    x[[0, 2, 33]], weights[[0, 2, 33]] = large, 0
    wide, bound = x.astype("f8"), 1e-6 if dtype == "f4" else 1e-13
    stored = make(tmp_path / "x", x, chunks=(16, 3))
    found = ooc_gemm.cov(stored, rowvar=False, aweights=weights, memory_limit=LIMIT)
    assert np.allclose(found.mean, np.average(wide, axis=0, weights=weights), rtol=1e-13, atol=1e-15)
    close(found.array, np.cov(wide, rowvar=False, aweights=weights), bound)
    x[2, 1] = np.nan  # as in NumPy
    found = ooc_gemm.cov(x, rowvar=False, aweights=weights, memory_limit=LIMIT)
    assert np.isnan(found.mean).tolist() == [False, True, False, False]
    assert np.isnan(found.array).sum() == 7


def test_weights_that_float32_does_not_hold(tmp_path):
    x, weights, said = np.ones((5, 3), "f4"), np.array([1, 1e-100, 0.5, 1, 0]), []
    x[:, 0], x[1, 2] = range(5), 1e38
    found = ooc_gemm.cov(x, rowvar=False, aweights=weights, memory_limit=LIMIT, notice=said.append)
    close(found.array, np.cov(x.astype("f8"), rowvar=False, aweights=weights), 1e-13)
    assert any("some aweights are too small" in text for text in said)


def test_correlations_need_observations():
    with pytest.raises(ooc_gemm.InputError, match="has no observations; give"):
        ooc_gemm.corrcoef(np.ones((5, 0)))


def test_nan_and_infinity_spread_as_in_numpy():
    x = variables((60, 7), 5)
    x[3, 1], x[4, 2], x[5, 6] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        wanted = np.cov(x.astype("f8"), rowvar=False), np.corrcoef(x.astype("f8"), rowvar=False)
    close(ooc_gemm.cov(x, rowvar=False, memory_limit=LIMIT, verify=True).array, wanted[0])
    close(ooc_gemm.corrcoef(x, rowvar=False, memory_limit=LIMIT).array, wanted[1])


def test_a_constant_variable_correlates_with_nothing_and_a_notice_says_so():
    x, said = variables((60, 5), 6), []
    x[:, 2] = 1 / 3
    found = ooc_gemm.corrcoef(x, rowvar=False, memory_limit=LIMIT, notice=said.append).array
    assert np.isnan(found[2]).all()
    assert np.isnan(found[:, 2]).all()
    assert np.isfinite(np.delete(np.delete(found, 2, 0), 2, 1)).all()
    assert any("1 of the 5 variables in X never change" in text for text in said)
    assert ooc_gemm.cov(x, rowvar=False, memory_limit=LIMIT).array[2, 2] <= 1e-12


def test_observations_that_are_proportional_stay_within_one():
    x = np.outer(np.random.default_rng(7).standard_normal(1000), np.arange(1, 40)).astype("f4")
    found = ooc_gemm.corrcoef(x, rowvar=False, memory_limit=LIMIT).array
    assert found.max() == 1
    assert np.abs(found - 1).max() <= 1e-6


@pytest.mark.parametrize(
    ("x", "options", "word"),
    [
        (np.ones((5, 3), "c8"), {}, "complex64"),
        (np.ones((5, 1), "f4"), {}, "degrees of freedom"),
        (np.ones((1, 5), "f4"), {"ddof": 5}, "ddof=5"),
        (np.ones((5, 3), "f4"), {"aweights": [1, 2]}, "aweights are 2"),
        (np.ones((5, 3), "f4"), {"aweights": [1, -2, 1]}, "negative"),
        (np.ones((5, 3), "f4"), {"aweights": [[1, 2, 3]]}, "dimensions"),
        (np.ones((5, 3), "f4"), {"aweights": "abc"}, "no real numbers"),
        (np.ones((5, 3), "f4"), {"aweights": [0, 0, 0]}, "aweights are 0, all of them"),
        (np.ones((5, 3), "f4"), {"precision": "best"}, "precision"),
    ],
)
def test_what_cannot_be_is_refused(x, options, word):
    with pytest.raises(ooc_gemm.InputError, match=word):
        ooc_gemm.cov(x, **options)


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_that_overflow_before_they_are_divided(tmp_path, weighted):
    """Variables of one array whose sums do and do not overflow in float32."""
    x = variables((3000, 5), 21) * np.array([1e18, 3e17, 1, 1e-9, 1e18], "f4")
    weights = np.linspace(1, 2, 3000) if weighted else None
    wanted = np.cov(x.astype("f8"), rowvar=False, aweights=weights)
    a = make(tmp_path / "x", x, chunks=(1000, 5))
    found = ooc_gemm.cov(a, rowvar=False, aweights=weights, memory_limit=LIMIT, verify=True)
    assert found.array.dtype == "f4"
    size = np.sqrt(np.diag(wanted))
    assert (np.abs(found.array - wanted) <= 1e-5 * size * size[:, None]).all()
    x[:, 1] *= 1e10
    wanted = np.cov(x.astype("f8"), rowvar=False, aweights=weights)
    for out in (None, "float32"):
        with pytest.warns(UserWarning, match="1 of the 5 variables in .* too large for float32"):
            found = ooc_gemm.cov(x, rowvar=False, aweights=weights, memory_limit=LIMIT, out_dtype=out)
    assert np.isinf(found.array[1, 1])
    others = [0, 2, 3, 4]
    close = np.abs(found.array - wanted) <= 1e-5 * size * size[:, None]
    assert close[np.ix_(others, others)].all()


@pytest.mark.parametrize("out_dtype", [None, "float64"])
def test_variances_that_float64_does_not_hold_are_told_of(out_dtype):
    x = np.random.default_rng(3).standard_normal((60, 4)) * [1, 1e160, 1, 1]
    options = {"rowvar": False, "memory_limit": LIMIT, "out_dtype": out_dtype}
    for second in (1.0, np.inf):  # an infinite element is no finding
        x[7, 2] *= second
        with (
            np.errstate(all="ignore"),
            pytest.warns(UserWarning, match="1 of the 4 .* float64, and become inf"),
        ):
            found = ooc_gemm.cov(x, **options).array
        assert np.isinf(found[1, 1])
        with np.errstate(all="ignore"):
            some = np.ix_([0, 3], [0, 3])
            close(found[some], np.cov(x, rowvar=False)[some], 1e-13)


def test_no_pass_is_made_where_the_plan_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("ooc_gemm.statistics.covariance.column_moments", None)
    x = make(tmp_path / "x", variables((300, 40), 1), chunks=(64, 64))
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.corrcoef(x, str(tmp_path / "c"), memory_limit=1)
    assert small.value.minimum_memory_limit
    make(tmp_path / "c", np.zeros((2, 2)), chunks=(2, 2))
    with pytest.raises(ooc_gemm.InputError, match="force=True"):
        ooc_gemm.corrcoef(x, str(tmp_path / "c"), memory_limit=LIMIT)


@pytest.mark.parametrize("rowvar", [True, False])
def test_correlations_of_variables_whose_squares_float64_does_not_hold(tmp_path, rowvar):
    x, said = np.random.default_rng(22).standard_normal((300, 9)) + 3, []
    x[:, 8] = x[:, 7] = 2
    with np.errstate(invalid="ignore"):
        wanted = np.corrcoef(x, rowvar=False)
    x *= [1, 2.0**600, 2.0**-600, 2.0**1000, 2.0**-900, 2.0**520, 2.0**-520, 2.0**-700, 0]
    stored = make(tmp_path / "x", x.T if rowvar else x, chunks=(64, 5))
    found = ooc_gemm.corrcoef(stored, rowvar=rowvar, memory_limit=LIMIT, notice=said.append)
    close(found.array, wanted)
    assert found.bytes_passed == 3 * found.bytes_read
    assert [text[:23] for text in said if "never change" in text] == ["2 of the 9 variables in"]


@pytest.mark.parametrize("factor", [1e-165, 1e-300, 1e-162])
def test_correlations_of_variables_whose_mean_and_squares_are_zero(factor):
    x, said = np.array([[1, -1, 2, -2.0], [3, 1, 2, -6], [0, 0, 0, 0]]), []
    found = ooc_gemm.corrcoef(x * [[factor], [1], [1]], memory_limit=LIMIT, notice=said.append)
    close(found.array[:2, :2], np.corrcoef(x[:2]))
    assert [text[:23] for text in said if "never change" in text] == ["1 of the 3 variables in"]


@pytest.mark.parametrize(
    "row", [[0, 1e-309, 5e-309, 2e-309], [1.7e308, -1.7e308, 1.7e308, 1.7e308], [0, 0, 0, 5e-324]]
)
def test_variables_that_float64_does_not_hold_are_told_of(recwarn, row):
    x, said = np.array([row, [1, 2, -1, 0.0], [3, 1, 2, -6]]), []
    found = ooc_gemm.corrcoef(x, memory_limit=LIMIT, notice=said.append).array
    assert np.isnan(found[0]).all()
    close(found[1:, 1:], np.corrcoef(x[1:]))
    assert [text for text in said if "1 of the 3 variables in X deviate by too" in text]
    assert not [text for text in said if "never change" in text]
    assert not list(recwarn)


def test_variables_that_float32_does_not_hold_are_refused():
    for some in ([3.4e38, -3.4e38, 3.4e38, 0], [1e-40, 2e-40, 0, 0]):
        x = np.array([some, [1, 2, -1, 0]], "f4")
        with pytest.raises(
            ooc_gemm.InputError, match=r"1 of the 2 variables in X deviate .* float32; give out"
        ):
            ooc_gemm.corrcoef(x, memory_limit=LIMIT)
        found = ooc_gemm.corrcoef(x, memory_limit=LIMIT, out_dtype="float64").array
        close(found, np.corrcoef(x.astype("f8")), 1e-12)
    far = np.full((2, 100), 2e38, "f4")  # one difference is beyond float32, their deviation is not
    far[0, 5], far[1, ::2] = -2e38, 1
    with pytest.raises(ooc_gemm.InputError, match="1 of the 2 variables in X deviate"):
        ooc_gemm.corrcoef(far / np.array([[1], [1e38]], "f4"), memory_limit=LIMIT)


def test_the_plan_before_the_pass_counts_factors_of_variables(tmp_path, monkeypatch):
    """Whether sums overflow is known after the pass."""
    x = make(tmp_path / "x", variables((3000, 50), 21) * np.float32(1e18), chunks=(1000, 50))
    made = []

    def carry_out(request, observer):
        made.append(prepare(request.check()).plan)
        raise StopIteration

    monkeypatch.setattr("ooc_gemm.statistics.covariance.carry_out", carry_out)
    with pytest.raises(StopIteration):
        ooc_gemm.cov(x, rowvar=False, memory_limit=LIMIT)
    request = Request(Operand(x), Operand(x), memory_limit=LIMIT)
    plan = planned(request, False, 1, Observer(notice=lambda said: None))
    assert plan.ledger["transforms"] == made[0].ledger["transforms"]


@pytest.mark.parametrize("count", [0, 3])
def test_a_run_is_continued_and_no_other_is(tmp_path, monkeypatch, count):
    x = make(tmp_path / "x", variables((300, 90), 8), chunks=(64, 64))
    options = {"rowvar": False, "memory_limit": LIMIT, "chunks": (32, 32)}
    c = str(tmp_path / "c")
    ooc_gemm.corrcoef(x, c + "1", **options)
    interrupted(monkeypatch, count, x, c, run=ooc_gemm.corrcoef, **options)
    if count:
        for other in (ooc_gemm.cov, ooc_gemm.gram):
            less = {key: value for key, value in options.items() if key != "rowvar" or other is ooc_gemm.cov}
            with pytest.raises(ooc_gemm.InputError, match="cannot be continued"):
                other(x, c, resume=True, **less)
    result = ooc_gemm.corrcoef(x, c, resume=True, **options)
    assert result.bytes_written == (9 - count) * 32 * 32 * 4
    assert zarr.open_array(c)[:].tobytes() == zarr.open_array(c + "1")[:].tobytes()
    with pytest.raises(ooc_gemm.InputError, match="not a plain product"):
        ooc_gemm.verify(x, x, c)


def test_json_holds_no_arrays():
    found = ooc_gemm.cov(variables((30, 4), 9), memory_limit=LIMIT).to_dict()
    assert "mean" not in found
    assert "array" not in found
    assert found["m"] == found["n"] == 30


@pytest.mark.parametrize("rowvar", [True, False])
def test_an_array_of_xarray_keeps_its_dimension_and_coordinates(rowvar):
    xr = pytest.importorskip("xarray")
    x = variables((40, 5), 10)
    names = {"gene": list("abcde"), "length": ("gene", np.arange(5)), "day": np.arange(40), "run": 3}
    table = xr.DataArray(x, dims=("day", "gene"), coords=names)
    for function, theirs in ((ooc_gemm.cov, np.cov), (ooc_gemm.corrcoef, np.corrcoef)):
        found = function(table.T if rowvar else table, rowvar=rowvar, memory_limit="1GiB")
        assert found.array.dims == ("gene_0", "gene_1")
        assert sorted(found.array.coords) == ["gene_0", "gene_1", "length_0", "length_1"]
        assert found.array.name == theirs.__name__
        close(found.array.values, theirs(x.astype("f8"), rowvar=False))
        assert found.array.sel(gene_0="b", gene_1="d").item() == found.array.values[1, 3]
        assert found.mean.dims == ("gene",)
        assert np.allclose(found.mean.sel(gene="c"), x[:, 2].astype("f8").mean(), rtol=1e-12, atol=0)
        assert sorted(found.mean.coords) == ["gene", "length"]
    plain = ooc_gemm.cov(xr.DataArray(x), rowvar=False, memory_limit="1GiB")
    assert plain.array.dims == ("dim_1_0", "dim_1_1")


def test_a_matrix_that_is_stored_has_no_labels(tmp_path):
    xr = pytest.importorskip("xarray")
    x = xr.DataArray(variables((40, 5), 11), dims=("day", "gene"))
    found = ooc_gemm.cov(x, str(tmp_path / "c"), rowvar=False, memory_limit="1GiB")
    assert isinstance(found.array, zarr.Array)
    close(zarr.open_array(tmp_path / "c")[:], np.cov(x.values.astype("f8"), rowvar=False))
