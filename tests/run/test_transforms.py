"""Operands that are centred, scaled and weighted on their way into a product, against NumPy in float64."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import zarr
from arrays import LAYOUTS, assert_close, matrix
from conftest import make
from interruption import interrupted
from least import least_limit

import ooc_gemm
from ooc_gemm import Operand
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.several import Several
from ooc_gemm.storage.read import table

LIMIT = "300MiB"


class Plain(CPU):
    """Multiplies what is stored, as a device that transforms nothing."""

    def limits(self, *asked):
        return replace(super().limits(*asked), transforms=False)


def standard(x, axis, scaled=True):
    k = 0 if axis == "columns" else 1
    x = np.ma.masked_invalid(x.astype("f8"))
    x = x - x.mean(axis=k, keepdims=True)
    if scaled:
        deviation = x.std(axis=k, keepdims=True)
        x = x / np.where(deviation == 0, 1, deviation)
    return x.filled(0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("transpose", [False, True])
def test_gram_of_standardised_arrays(tmp_path, layout, axis, transpose):
    x = matrix((130, 75), "f4", 1) + 100
    x[3, 4] = x[100, 60] = np.nan
    a = make(tmp_path / "a", x, **LAYOUTS[layout])
    operand = Operand(a, center=axis, scale=axis, missing=np.nan)
    found = ooc_gemm.gram(operand, transpose=transpose, memory_limit=LIMIT, verify=True)
    wanted = standard(x, axis)
    assert_close(found.array, wanted.T @ wanted if transpose else wanted @ wanted.T, 2e-6)
    assert found.plan.problem.symmetric
    assert found.verified
    assert found.bytes_passed > 0


@pytest.mark.parametrize("dtype", ["i1", "i4", "f2", "f4", "f8"])
def test_products_of_operands(tmp_path, dtype):
    x, y = matrix((61, 83), dtype, 2), matrix((83, 45), "f4", 3)
    a, b = (make(tmp_path / name, v, chunks=(32, 16)) for name, v in (("a", x), ("b", y)))
    weights = np.linspace(-1, 2, 83)
    left, right = Operand(a, center="rows", weights=weights), Operand(b, scale="columns")
    found = ooc_gemm.multiply(left, right, memory_limit=LIMIT, verify=True).array
    deviation = y.astype("f8").std(axis=0)
    wanted = (standard(x, "rows", scaled=False) * weights) @ (y / deviation)
    assert_close(found, wanted, 2e-6)
    assert found.dtype == ("f8" if dtype in ("i4", "f8") else "f4")
    turned = Operand(b, transpose=True, scale="columns")
    found = ooc_gemm.multiply(turned, left, transpose_b=True, memory_limit=LIMIT).array
    assert_close(found, wanted.T, 2e-6)


def test_given_numbers_and_an_old_c(tmp_path):
    x, old = matrix((40, 30), "f4", 4), matrix((30, 30), "f4", 5)
    a, c = make(tmp_path / "a", x, chunks=(16, 16)), make(tmp_path / "c", old, chunks=(8, 8))
    shift, scale, weights = np.arange(30.0), np.arange(1, 41.0), np.arange(40.0)
    operand = Operand(a, center=("columns", shift), scale=("rows", scale), weights=weights)
    ooc_gemm.gram(operand, c, transpose=True, beta=0.5, force=True, memory_limit=LIMIT)
    wide = (x.astype("f8") - shift) / scale[:, None]
    assert_close(zarr.open_array(c)[:], wide.T @ (wide * weights[:, None]) + 0.5 * old, 1e-6)


def test_a_constant_column_is_not_divided():
    x = matrix((20, 3), "f4", 6)
    x[:, 1] = 5
    found = ooc_gemm.gram(Operand(x, center="columns", scale="columns"), transpose=True, memory_limit=LIMIT)
    assert np.abs(found.array[1]).max() == 0
    assert np.isclose(found.array[0, 0], 20, rtol=1e-6)


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_deviations_whose_squares_float64_does_not_hold(tmp_path, axis):
    x = np.random.default_rng(13).standard_normal((6, 90))
    x[2, 5] = x[4, 7] = np.nan
    wanted = standard(x, "rows")
    x *= np.array([1, 1e200, 1e-161, 1e-200, 1e-165, 1e300])[:, None]
    x[1] -= x[1].mean()
    a = make(tmp_path / "a", x if axis == "rows" else x.T, chunks=(4, 4))
    operand = Operand(a, center=axis, scale=axis, missing=np.nan)
    found = ooc_gemm.gram(operand, transpose=axis == "columns", memory_limit=LIMIT)
    assert_close(found.array, wanted @ wanted.T, 1e-13)
    assert found.bytes_passed == 3 * found.bytes_read


@pytest.mark.parametrize(
    "asked",
    [
        {"weights": [1e-50, 1, 1]},
        {"weights": [1, -1e39, 1]},
        {"scale": ("columns", [1, 1e-39, 1])},
        {"scale": ("columns", [1, 1e20, 1]), "weights": [1, 1e-20, 1]},
        {"center": ("columns", [1, -1e39, 1])},
    ],
)
def test_numbers_that_float32_does_not_hold_are_refused(asked):
    a, b = np.array([[1e30, 1, 2]], "f4"), np.array([[1e30], [1], [1]], "f4")
    with pytest.raises(ooc_gemm.InputError, match=r'of A has numbers .* float32; give out_dtype="float64"'):
        ooc_gemm.multiply(Operand(a, **asked), b, memory_limit=LIMIT)
    found = ooc_gemm.multiply(Operand(a, **asked), b, memory_limit=LIMIT, out_dtype="float64").array
    wanted = (a - asked.get("center", (0, 0.0))[1]) / asked.get("scale", (0, 1.0))[1]
    assert_close(found, (wanted * asked.get("weights", 1)) @ b.astype("f8"), 1e-14)


def test_numbers_that_fit_together_and_zeros_are_taken():
    a, b = np.array([[1e30, 1, 2]], "f4"), np.ones((3, 1), "f4")
    together = Operand(a, scale=("columns", [1e-50, 1, np.inf]), weights=[1e-50, 0, 1])
    assert np.isclose(ooc_gemm.multiply(together, b, memory_limit=LIMIT).array, 1e30)
    wide = Operand(a.astype("f8"), weights=[1e-320, 0, 1])  # float64 holds what is given in float64
    assert ooc_gemm.multiply(wide, b, memory_limit=LIMIT).array == 1e30 * 1e-320 + 2
    for scale in ([1e-309, 1, 1], "rows"):
        lines = scale if scale == "rows" else ("columns", scale)
        with pytest.raises(ooc_gemm.InputError, match=r"of A has .* float64; change the unit"):
            ooc_gemm.multiply(Operand(np.array([[0, 1, 2]]) * 1e-309, scale=lines), b, memory_limit=LIMIT)


def test_a_number_stands_for_missing_elements_of_float32():
    x, eye = np.array([[16777216, 1, 0, 1e20, -999.9, np.inf]], "f4"), np.eye(6, dtype="f4")
    x[0, 5] = 7
    for missing, at in ((16777216, 0), (1e20, 3), (-999.9, 4), (1e-60, None), (1e39, None), (0, 2)):
        wanted = x.copy()
        wanted[0, [] if at is None else at] = 0
        found = ooc_gemm.multiply(Operand(x, missing=missing), eye, memory_limit=LIMIT).array
        assert np.array_equal(found, wanted)
    for missing in (16777217, -16777217.0):
        with pytest.raises(ooc_gemm.InputError, match="which float32 does not hold; give the number that A"):
            ooc_gemm.multiply(Operand(x, missing=missing), eye, memory_limit=LIMIT)


def test_what_is_missing_adds_nothing():
    x = np.array([[1, -9, 2], [-9, 3, 4]], "i1")
    found = ooc_gemm.gram(Operand(x, missing=-9), memory_limit=LIMIT).array
    assert np.array_equal(found, [[5, 8], [8, 25]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["i1", "u1"])
def test_a_table_maps_integers_exactly(tmp_path, monkeypatch, layout, dtype):
    monkeypatch.setattr(table, "STRIP", 100)
    x = np.random.default_rng(8).integers(0, 256, (130, 75)).astype("u1").view(dtype)
    one, other = np.arange(256) - 128, np.arange(256) % 7
    a = make(tmp_path / "a", x, **LAYOUTS[layout])
    left, right = one[x.astype("i8")], other[x.astype("i8")]
    found = ooc_gemm.multiply(
        Operand(a, table=one), Operand(a, table=other), transpose_b=True, memory_limit=LIMIT
    )
    assert found.array.dtype == np.int32
    assert np.array_equal(found.array, left @ right.T)
    found = ooc_gemm.gram(Operand(a, table=one), transpose=True, memory_limit=LIMIT)
    assert np.array_equal(found.array, left.T @ left)
    found = ooc_gemm.gram(Operand(a, table=other, center="rows"), memory_limit=LIMIT)
    apart = right - right.mean(axis=1, keepdims=True)
    assert_close(found.array, apart @ apart.T, 2e-6)
    found = ooc_gemm.gram(Operand(x, table=np.arange(256)[::-1]), memory_limit=LIMIT)  # as uint8
    wide = np.arange(256)[::-1][x.astype("i8")]
    assert np.array_equal(found.array, wide @ wide.T)


def test_runs_with_other_tables_are_not_continued(tmp_path, monkeypatch):
    x, c = np.ones((90, 20), "i1"), str(tmp_path / "c")
    a, options = make(tmp_path / "a", x), {"memory_limit": LIMIT, "chunks": (32, 32)}
    shifted = [*range(-1, 127), *range(-128, 0)]
    interrupted(monkeypatch, 3, Operand(a, table=shifted), c, run=ooc_gemm.gram, **options)
    with pytest.raises(ooc_gemm.InputError, match="cannot be continued"):
        ooc_gemm.gram(a, c, resume=True, **options)
    with pytest.raises(ooc_gemm.InputError, match="cannot be continued"):
        ooc_gemm.gram(Operand(a, table=np.arange(256)), c, resume=True, **options)
    ooc_gemm.gram(Operand(a, table=shifted), c, resume=True, **options)
    assert not zarr.open_array(c)[:].any()
    with pytest.raises(ooc_gemm.InputError):
        ooc_gemm.verify(a, a, c, transpose_b=True)


@pytest.mark.parametrize(
    ("dtype", "given", "word"),
    [
        ("i2", np.zeros(256, int), "integers of 8 bits"),
        ("i1", np.zeros(255, int), "give 256 integers"),
        ("i1", np.zeros(256), "give 256 integers"),
        ("i1", np.arange(256) + 1, "fit 8 bits"),
        ("i1", np.arange(256) - 5, "fit 8 bits"),
    ],
)
def test_tables_that_cannot_be_are_refused(dtype, given, word):
    with pytest.raises(ooc_gemm.InputError, match=word):
        ooc_gemm.gram(Operand(np.ones((4, 6), dtype), table=given), memory_limit=LIMIT)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"center": "cols"}, "give 'rows' or 'columns'"),
        ({"center": ("x", [1])}, "give 'rows' or 'columns'"),
        ({"scale": 3}, "scale is 3"),
        ({"center": ("rows", [1, 2])}, "needs 4 numbers"),
        ({"scale": ("columns", ["a"])}, "no real numbers"),
        ({"weights": [1, 2, 3, 4]}, "needs 6 numbers"),
        ({"weights": [1, 2, 3, np.nan, 1, 1]}, "finite"),
        ({"weights": -np.ones(6)}, "negative"),
    ],
)
def test_what_cannot_be_is_refused(asked, word):
    with pytest.raises(ooc_gemm.InputError, match=word):
        ooc_gemm.gram(Operand(np.ones((4, 6), "f4"), **asked), memory_limit=LIMIT)


def test_complex_arrays_and_other_devices_are_refused(tmp_path):
    with pytest.raises(ooc_gemm.InputError, match="only real arrays"):
        ooc_gemm.gram(Operand(np.ones((4, 6), "c8"), center="rows"), memory_limit=LIMIT)
    a = Operand(np.ones((4, 6), "f4"), center="rows")
    b = Operand(np.ones((4, 6), "i1"), table=np.zeros(256, int))
    for device, one in ((Plain(1), a), (Several([CPU(1), Plain(1)]), a), (Plain(1), b)):
        with pytest.raises(ooc_gemm.InputError, match=r"cpu.* does not centre, .* another device"):
            ooc_gemm.gram(one, device=device, memory_limit=LIMIT)
    with pytest.raises(ooc_gemm.InputError, match="one of the two"):
        ooc_gemm.multiply(Operand(np.ones((4, 6)), adjoint=True), np.ones((4, 6)), transpose_a=True)


def test_the_plan_counts_the_vectors_and_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ooc_gemm.run.moments.column_moments", None)
    a = make(tmp_path / "a", matrix((300, 200), "f4", 7), chunks=(64, 64))
    plain = ooc_gemm.plan(a, a, transpose_b=True, memory_limit=LIMIT)
    found = ooc_gemm.plan(Operand(a, center="rows", scale="rows"), a, transpose_b=True, memory_limit=LIMIT)
    assert plain.ledger["transforms"] == 0
    assert found.ledger["transforms"] >= 3 * 300 * 4


def test_the_smallest_limit_does_for_the_pass_that_finds_means(tmp_path):
    """It takes more than the product here."""
    x = matrix((2, 1_000_000), "f4", 12)
    a = make(tmp_path / "a", x, chunks=(2, 1_000_000), compressors=None)
    centred, scaled = Operand(a, center="columns"), Operand(a, scale="columns")
    least, found = least_limit(partial(ooc_gemm.multiply, centred, scaled, transpose_b=True, device="cpu"))
    wanted = standard(x, "columns", scaled=False) @ (x / x.astype("f8").std(axis=0)).T
    assert_close(found.array, wanted, 2e-6)
    with pytest.raises(ooc_gemm.BudgetError, match="to find the means of"):
        ooc_gemm.plan(centred, scaled, transpose_b=True, memory_limit=least - 1)


def test_a_run_with_another_transform_is_not_continued(tmp_path, monkeypatch):
    a, c = make(tmp_path / "a", matrix((200, 90), "f4", 8), chunks=(32, 32)), str(tmp_path / "c")
    options = {"memory_limit": LIMIT, "chunks": (32, 32)}
    operand = Operand(a, center="rows")
    ooc_gemm.gram(operand, c + "1", **options)
    interrupted(monkeypatch, 4, operand, c, run=ooc_gemm.gram, **options)
    others = (a, Operand(a, center="columns"), Operand(a, center="rows", missing=0))
    for other in (
        *others,
        Operand(a, center=("rows", np.ones(200))),
        Operand(a, center="rows", scale="rows"),
    ):
        with pytest.raises(ooc_gemm.InputError, match="elements of A"):
            ooc_gemm.gram(other, c, resume=True, **options)
    assert ooc_gemm.gram(operand, c, resume=True, **options).bytes_written == (49 - 4) * 32 * 32 * 4
    assert zarr.open_array(c)[:].tobytes() == zarr.open_array(c + "1")[:].tobytes()
    assert "elements of A" in zarr.open_array(c).attrs["ooc-gemm"]["options"]
    with pytest.raises(ooc_gemm.InputError, match="not the result asked for"):
        ooc_gemm.gram(a, c, resume=True, **options)
    with pytest.raises(ooc_gemm.InputError, match="not a plain product"):
        ooc_gemm.verify(a, a, c)


def test_a_plain_result_is_not_that_of_a_transform(tmp_path):
    a, c = make(tmp_path / "a", matrix((60, 50), "f4", 9), chunks=(32, 32)), str(tmp_path / "c")
    ooc_gemm.gram(a, c, memory_limit=LIMIT)
    with pytest.raises(ooc_gemm.InputError, match="elements of A"):
        ooc_gemm.gram(Operand(a, center="rows"), c, resume=True, memory_limit=LIMIT)
