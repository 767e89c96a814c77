"""Operands that are decoded by the CF conventions, against xarray and NumPy in float64."""

import numpy as np
import pytest
import zarr
from arrays import assert_close
from conftest import make

import ooc_gemm
from ooc_gemm import Operand

xr = pytest.importorskip("xarray")
LIMIT = "1GiB"


def packed(path, version=3, shape=(57, 31), **encoding):
    """A table with missing elements that xarray packs and stores; the path, and what xarray makes of it."""
    rng = np.random.default_rng(1)
    values = 280 + 10 * rng.standard_normal(shape)
    values[rng.random(shape) < 0.1] = np.nan
    table = xr.Dataset({"t": (("time", "place"), values)})
    table.to_zarr(
        path, zarr_format=version, consolidated=False, encoding={"t": {"chunks": (16, 8), **encoding}}
    )
    return f"{path}/t", xr.open_zarr(path, consolidated=False).t.values.astype("f8")


PACKED = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -32768}


def there(x):
    return np.ma.masked_invalid(x)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "encoding",
    [
        PACKED,
        {**PACKED, "scale_factor": -0.5},
        {"dtype": "u1", "add_offset": 200.0, "_FillValue": 0},
        {"dtype": "f4", "_FillValue": np.float32(9.96921e36)},
        {"dtype": "f8"},
    ],
)
def test_decoded_arrays_are_those_of_xarray(tmp_path, version, encoding):
    x, wide = packed(tmp_path / "x.zarr", version, **encoding)
    found = ooc_gemm.multiply(Operand(x, decode_cf=True), np.eye(31, dtype="f4"), memory_limit=LIMIT)
    assert_close(found.array, np.nan_to_num(wide), 1e-6)
    operand = Operand(x, center="columns", scale="columns", decode_cf=True)
    found = ooc_gemm.gram(operand, transpose=True, memory_limit=LIMIT, verify=True).array
    z = ((there(wide) - there(wide).mean(axis=0)) / there(wide).std(axis=0)).filled(0)
    assert_close(found, z.T @ z, 1e-5)


@pytest.mark.parametrize(
    "asked",
    [
        {"center": "rows"},
        {"scale": "rows"},
        {"center": ("columns", np.arange(31) * 9)},
        {"scale": ("rows", np.arange(1, 58)), "center": "columns"},
        {"center": ("rows", np.arange(57)), "scale": ("columns", np.arange(1, 32)), "weights": np.arange(31)},
    ],
)
def test_transforms_are_of_decoded_elements(tmp_path, asked):
    x, wide = packed(tmp_path / "x.zarr", **{**PACKED, "scale_factor": -0.01})
    found = ooc_gemm.multiply(Operand(x, decode_cf=True, **asked), np.eye(31), memory_limit=LIMIT).array
    wanted = there(wide)
    for word in ("center", "scale"):
        lines = asked.get(word)
        if isinstance(lines, str):
            k = 0 if lines == "columns" else 1
            by = there(wide).mean(axis=k) if word == "center" else there(wide).std(axis=k)
            lines = lines, by
        if lines:
            by = np.asarray(lines[1])[(slice(None), None) if lines[0] == "rows" else (None, slice(None))]
            wanted = wanted - by if word == "center" else wanted / by
    wanted = wanted.filled(0) * asked.get("weights", 1)
    assert_close(found, wanted, 1e-6)


def test_an_array_of_xarray_and_one_in_fortran_order(tmp_path):
    x, wide = packed(tmp_path / "x.zarr", **PACKED)
    kept = xr.open_zarr(tmp_path / "x.zarr", consolidated=False, mask_and_scale=False).t
    stored = zarr.open_array(x)
    turned = zarr.create_array(str(tmp_path / "f"), shape=stored.shape, dtype="i2", chunks=(16, 8), order="F",
                               zarr_format=2, fill_value=0)  # fmt: skip
    turned[...] = stored[...]
    turned.attrs.update(dict(stored.attrs))
    for array in (kept, str(tmp_path / "f")):
        found = ooc_gemm.multiply(np.eye(57), Operand(array, decode_cf=True), memory_limit=LIMIT).array
        assert_close(found, np.nan_to_num(wide), 1e-6)


def test_an_array_without_such_attributes_is_multiplied_as_it_is():
    x = np.arange(12, dtype="i1").reshape(3, 4)
    found = ooc_gemm.gram(Operand(x, decode_cf=True), memory_limit=LIMIT).array
    assert found.dtype == "i4"
    assert np.array_equal(found, x.astype("i4") @ x.T.astype("i4"))


def test_a_constant_column_is_exactly_zero():
    x = np.full((20, 2), 1000, "i2")
    x[:, 1] = np.arange(20)
    array = xr.DataArray(x, attrs={"scale_factor": 0.01, "add_offset": 273.15})
    operand = Operand(array, center="columns", scale="columns", decode_cf=True)
    found = ooc_gemm.gram(operand, transpose=True, memory_limit=LIMIT).array
    assert_close(found, np.diag([0.0, 20.0]), 1e-6)
    assert found[0, 0] == 0


def test_an_attribute_stands_for_the_element_that_its_type_makes_of_it():
    xr = pytest.importorskip("xarray")
    for fill in (-99999999, 1e20, -999.9):
        x = np.array([[np.float32(fill), 2]], "f4")
        operand = Operand(xr.DataArray(x, attrs={"missing_value": fill}), decode_cf=True)
        assert ooc_gemm.gram(operand, memory_limit=LIMIT).array == 4


def test_a_large_integer_that_stands_for_missing_is_found():
    fill = -(2**63) + 2
    x = np.array([[fill, 3], [4, fill]])
    array = xr.DataArray(x, attrs={"_FillValue": fill})
    found = ooc_gemm.multiply(Operand(array, decode_cf=True), np.eye(2), memory_limit=LIMIT).array
    assert np.array_equal(found, [[0, 3], [4, 0]])


@pytest.mark.parametrize(
    ("attributes", "asked", "word"),
    [
        ({"scale_factor": 0}, {}, "decode nothing"),
        ({"scale_factor": "NaN"}, {}, "decode nothing"),
        ({"add_offset": "Infinity"}, {}, "decode nothing"),
        ({"scale_factor": "a number"}, {}, "scale_factor that is not one number"),
        ({"scale_factor": [1.0, 2.0]}, {}, "scale_factor that is not one number"),
        ({"add_offset": True}, {}, "add_offset that is not one number"),
        ({"missing_value": [-1, -2]}, {}, "missing_value that is not one number"),
        ({"_FillValue": -1, "missing_value": -2}, {}, "only one number"),
        ({"_Unsigned": "true"}, {}, "_Unsigned"),
        ({"_FillValue": -1}, {"missing": -1.0}, "leave out missing"),
        ({"scale_factor": 2.0}, {"center": ("rows", [1.0])}, "needs 4 numbers"),
    ],
)
def test_what_cannot_be_decoded_is_refused(attributes, asked, word):
    x = xr.DataArray(np.ones((4, 6), "i2"), attrs=attributes)
    with pytest.raises(ooc_gemm.InputError, match=word):
        ooc_gemm.gram(Operand(x, decode_cf=True, **asked), memory_limit=LIMIT)


def test_a_mask_is_refused():
    x = np.ma.masked_equal(np.arange(6).reshape(2, 3), 3)
    with pytest.raises(ooc_gemm.InputError, match="filled"):
        ooc_gemm.gram(Operand(x, decode_cf=True), memory_limit=LIMIT)


def test_equal_fill_and_missing_values_are_one():
    x = xr.DataArray(np.array([[1, -1]], "i2"), attrs={"_FillValue": -1, "missing_value": np.array([-1])})
    assert ooc_gemm.gram(Operand(x, decode_cf=True), memory_limit=LIMIT).array[0, 0] == 1


def test_nothing_is_said_of_attributes_that_are_applied(tmp_path):
    x, _ = packed(tmp_path / "x.zarr", **PACKED)
    said = []
    ooc_gemm.gram(Operand(x, decode_cf=True), memory_limit=LIMIT, notice=said.append)
    assert said == []


def test_other_attributes_make_another_result(tmp_path):
    x = make(tmp_path / "x", np.ones((9, 9), "i2"), chunks=(4, 4))
    zarr.open_array(x).attrs["scale_factor"] = 2.0
    c = str(tmp_path / "c")
    ooc_gemm.gram(Operand(x, decode_cf=True), c, memory_limit=LIMIT)
    zarr.open_array(x).attrs["scale_factor"] = 3.0
    with pytest.raises(ooc_gemm.InputError, match="elements of A"):
        ooc_gemm.gram(Operand(x, decode_cf=True), c, memory_limit=LIMIT, resume=True)
