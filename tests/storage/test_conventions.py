"""Inputs that say how to decode their values get a notice that it is not done; no matrices."""

import base64
import struct

import dask.array as da
import numpy as np
import pytest
import zarr
from conftest import make, ooc

import ooc_gemm
from ooc_gemm import InputError, gram, multiply, plan

CPU = {"device": "cpu"}
VALUES = np.arange(6, dtype="i2").reshape(2, 3)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("b", np.ones((3, 2), "i2"), chunks=(3, 2))
    return tmp_path


def notices(a, b="b", **options):
    said = []
    result = multiply(a, b, notice=said.append, **CPU, **options)
    assert np.array_equal(result.array, VALUES @ np.ones((3, 2)))  # raw values, whatever is said
    return said


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"scale_factor": 0.1}, "scale_factor"),
        ({"add_offset": 273.15, "scale_factor": 0.1}, "scale_factor and add_offset"),
        ({"_FillValue": -9999, "units": "K"}, "_FillValue"),
        ({"missing_value": -1}, "missing_value"),
        ({"_FillValue": "NaN"}, None),
        ({"_FillValue": base64.b64encode(struct.pack("<d", float("nan"))).decode()}, None),
        ({"units": "K"}, None),
    ],
)
def test_attributes(here, version, opened, attributes, words):
    array = zarr.open_array(make("a", VALUES, chunks=(2, 3), zarr_format=version))
    array.attrs.update(attributes)
    said = notices(zarr.open_array("a") if opened else "a")
    name = here / "a" if opened else "a"
    text = f"{name} has {words} in its attributes, which are not applied; "
    text += "its values are multiplied as they are stored"
    assert said == ([text] if words else [])


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    ("fill", "attributes", "words"),
    [
        (-9999, {"_ARRAY_DIMENSIONS": ["x", "y"]}, "_FillValue"),
        (-9999, {"scale_factor": 0.1}, "scale_factor and _FillValue"),
        (-9999, {"units": "K"}, None),
        (0, {"_ARRAY_DIMENSIONS": ["x", "y"]}, None),
        (0, {"scale_factor": 0.1}, "scale_factor"),
        (None, {"_ARRAY_DIMENSIONS": ["x", "y"]}, None),
    ],
)
def test_the_fill_value_of_version_2_is_that_of_xarray(here, opened, fill, attributes, words):
    array = zarr.open_array(make("a", VALUES, chunks=(2, 3), zarr_format=2, fill_value=fill))
    array.attrs.update(attributes)
    said = notices(zarr.open_array("a") if opened else "a")
    assert len(said) == (words is not None)
    assert all(f"a has {words} in its attributes, which are not applied; " in text for text in said)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("missing", "count"), [(np.float32(-9999), 1), (np.float32("nan"), 0), (None, 0)])
def test_what_xarray_has_written(here, version, missing, count):
    xarray = pytest.importorskip("xarray")
    values = xarray.Dataset({"t": (("x", "y"), np.array([[1, np.nan], [2, 3]], "f4"))})
    values.to_zarr("f", zarr_format=version, encoding={"t": {"_FillValue": missing}}, consolidated=False)
    said = []
    gram("f/t", notice=said.append, **CPU)
    assert [text.partition(",")[0] for text in said] == ["f/t has _FillValue in its attributes"] * count
    said.clear()
    gram(ooc_gemm.Operand("f/t", decode_cf=True), notice=said.append, **CPU)
    assert said == []


def test_the_command_and_gram(here):
    zarr.open_array(make("a", VALUES, chunks=(2, 3))).attrs["scale_factor"] = 2
    done = ooc("multiply", "a", "b", "c", "-d", "cpu")
    assert done.code == 0
    assert done.err.startswith("Note: a has scale_factor in its attributes, which are not applied")
    assert ooc("gram", "a", "g", "-d", "cpu").err.count("scale_factor") == 1
    with pytest.warns(UserWarning, match="a has scale_factor") as caught:
        gram("a", **CPU)
    assert caught[0].filename == __file__


def test_a_mask(here):
    masked = np.ma.masked_equal(VALUES, 3)
    assert notices(masked) == [
        "A has a mask, which is not applied; the values under it are multiplied like others"
    ]
    assert notices(da.from_array(masked, chunks=2)) != []
    assert notices(np.ma.masked_equal(VALUES, 77)) == []


class WithAttributes:
    """An array as h5py and xarray have them: attributes in `attrs`."""

    def __init__(self, values, **attrs):
        self.values, self.attrs = values, attrs
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, key):
        return self.values[key]


def test_attributes_of_other_libraries(here):
    assert notices(WithAttributes(VALUES, scale_factor=np.float32(2)))[0].startswith("A has scale_factor in")
    assert notices(WithAttributes(VALUES, _FillValue=np.array([-1], "i2")))[0].startswith(
        "A has _FillValue in"
    )
    assert notices(WithAttributes(VALUES, _FillValue=np.float64("nan"))) == []


def test_damaged_attributes_are_no_error(here):
    make("a", VALUES, chunks=(2, 3), zarr_format=2)
    (here / "a" / ".zattrs").write_text('{"scale_factor": ')
    assert notices("a") == []


# ----------------------------------------------------------------------------------------- no matrices


@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4)])
def test_what_has_not_two_dimensions(shape):
    with pytest.raises(InputError, match=r"^B has shape .*, but a matrix has two dimensions; reshape it"):
        multiply(np.ones((3, 5)), np.ones(shape), **CPU)


def test_sparse_matrices():
    sparse = pytest.importorskip("scipy.sparse")
    for kind in ("csr_array", "csc_matrix", "coo_array"):
        x = getattr(sparse, kind)(np.eye(3))
        with pytest.raises(InputError, match=rf"^A is sparse \({kind}\), .* such as x\.toarray\(\)"):
            multiply(x, np.eye(3), **CPU)


def test_what_is_not_an_array_is_named():
    frame = pytest.importorskip("pandas").DataFrame(np.eye(2))
    for given, advice in ((frame, r"DataFrame\); .* x\.to_numpy"), ([[1.0]], r"list\); .* numpy\.asarray")):
        with pytest.raises(InputError, match=rf"^A is no array \(its type is {advice}\("):
            multiply(given, np.eye(2), **CPU)


def test_shapes_name_both_operands():
    words = r"the inner dimensions of A and B differ: op\(A\) is 5×3 and op\(B\) is 4×2"
    with pytest.raises(InputError, match=words):
        multiply(np.ones((3, 5)), np.ones((4, 2)), transpose_a=True, **CPU)


@pytest.mark.parametrize("name", ["multiply", "gram", "plan", "verify", "random"])
def test_an_unknown_keyword_names_the_function_that_was_called(name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'chunk'"):
        getattr(ooc_gemm, name)(np.ones((2, 2)), np.ones((2, 2)), *[1] * (name == "verify"), chunk=1)


def test_an_unknown_keyword_of_the_cluster():
    dask = pytest.importorskip("ooc_gemm.dask")
    with pytest.raises(TypeError, match=r"^multiply\(\) got an unexpected keyword argument 'trace'"):
        dask.multiply("a", "b", "c", trace="t")


def test_the_repr_of_a_result_is_short(here):
    make("a", np.ones((25, 25), "i2"), chunks=(25, 1), compressors=None)
    make("d", np.ones((25, 25), "i2"), chunks=(1, 1))  # compressed: the size of each chunk is known
    result = multiply("a", "d", **CPU)
    assert len(repr(result)) < 1500
    assert len(repr(result.plan)) < 4000
    assert "bytes_read=" in repr(result)
    assert len(repr(plan("a", "d", **CPU).problem)) < 2000


def test_statistics_say_so_too(here):
    """Each once, also where an array is compared with itself."""
    values = np.random.default_rng(1).integers(-99, 99, (40, 6)).astype("i2")
    zarr.open_array(make("packed", values, chunks=(20, 6))).attrs["scale_factor"] = 0.5
    for run in (
        lambda **options: ooc_gemm.topk("packed", k=3, **options),
        lambda **options: ooc_gemm.topk(np.ones((2, 6)), "packed", k=3, **options),
        lambda **options: ooc_gemm.threshold("packed", least=0.5, **options),
        lambda **options: ooc_gemm.threshold("packed", least=5, metric="dot", **options),
        lambda **options: ooc_gemm.cov("packed", rowvar=False, **options),
        lambda **options: ooc_gemm.pca("packed", 2, **options),
    ):
        said = []
        run(notice=said.append, **CPU)
        assert sum("packed has scale_factor in its attributes" in text for text in said) == 1
