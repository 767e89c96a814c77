"""Products of xarray's arrays keep their dimensions and coordinates."""

import json

import numpy as np
import pytest
import zarr

import ooc_gemm

xr = pytest.importorskip("xarray")
pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
CPU = {"device": "cpu", "memory_limit": "1GiB"}
A = np.random.default_rng(1).integers(-9, 9, (30, 20)).astype("f4")
B = np.random.default_rng(2).integers(-9, 9, (20, 10)).astype("f4")


@pytest.fixture(params=["numpy", "dask", "zarr"])
def arrays(request, tmp_path):
    """Two arrays in memory, of dask, and read from a store when they are used."""
    names = [f"s{i}" for i in range(30)]
    a = xr.DataArray(A, dims=("sample", "gene"), coords={"sample": names, "age": ("sample", np.arange(30))})
    b = xr.DataArray(B, dims=("gene", "score"), coords={"score": ("score", np.arange(10) * 2, {"unit": "m"})})
    a = a.assign_coords(gene=np.arange(20) * 3)
    b = b.assign_coords(gene=np.arange(20) * 3)
    if request.param == "zarr":
        xr.Dataset({"a": a}).to_zarr(tmp_path / "a", consolidated=False)
        a = xr.open_zarr(tmp_path / "a", chunks=None, consolidated=False)["a"]
    return (a.chunk({"sample": 7}), b.chunk({"gene": 6})) if request.param == "dask" else (a, b)


def test_a_product_is_labelled(arrays):
    a, b = arrays
    found = ooc_gemm.multiply(a, b, **CPU).array
    xr.testing.assert_identical(found, xr.dot(a, b, dim="gene").rename(None).compute())
    turned = ooc_gemm.multiply(b, a, transpose_a=True, transpose_b=True, **CPU).array
    xr.testing.assert_identical(turned, found.T)
    half = ooc_gemm.multiply(a, B, **CPU).array
    assert half.dims == ("sample", "dim_1")
    assert sorted(half.coords) == ["age", "sample"]
    assert (ooc_gemm.multiply(A, b, **CPU).array["score"] == b["score"]).all()
    assert isinstance(ooc_gemm.multiply(A, B, **CPU).array, np.ndarray)


def test_gram_is_labelled_on_both_sides(arrays, tmp_path):
    a, _ = arrays
    found = ooc_gemm.gram(a, **CPU).array
    assert found.dims == ("sample_0", "sample_1")
    assert sorted(found.coords) == ["age_0", "age_1", "sample_0", "sample_1"]
    assert (found.sel(sample_0="s3", sample_1="s4") == A[3] @ A[4]).all()
    assert ooc_gemm.gram(a, transpose=True, **CPU).array.dims == ("gene_0", "gene_1")
    stored = ooc_gemm.gram(a, tmp_path / "c", **CPU).array
    assert isinstance(stored, zarr.Array)
    assert stored.metadata.dimension_names == ("sample_0", "sample_1")


def test_arrays_with_other_coordinates_along_k_are_refused(arrays):
    a, b = arrays
    with pytest.raises(ooc_gemm.InputError, match=r"along 'gene' differ.*xarray\.align"):
        ooc_gemm.multiply(a, b.isel(gene=slice(None, None, -1)), **CPU)
    with pytest.raises(ooc_gemm.InputError, match="the inner dimensions of A and B differ"):
        ooc_gemm.multiply(a, b.isel(gene=slice(3)), **CPU)
    other = b.rename(gene="other").assign_coords(other=np.arange(20))
    assert ooc_gemm.multiply(a, other, **CPU).array.dims == ("sample", "score")


def test_statistics_of_dask_arrays_are_labelled(arrays):
    found = ooc_gemm.corrcoef(arrays[0], memory_limit="1GiB")
    np.testing.assert_allclose(found.array, np.corrcoef(A), atol=1e-6)
    assert found.array.dims == ("sample_0", "sample_1")


def stored_dataset(path, **options):
    """A dataset of two variables with coordinates, stored by xarray; what it holds."""
    coords = {"sample": np.arange("2000-01-01", "2000-01-31", dtype="M8[D]").astype("M8[ns]")}
    coords |= {"gene": [f"g{i}" for i in range(20)], "length": ("gene", np.arange(20.0))}
    held = xr.Dataset({"x": (("sample", "gene"), A), "y": ("gene", A[0])}, coords=coords)
    held.to_zarr(path, **options)
    return held


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_c_in_the_dataset_of_its_operand_gets_its_coordinates(tmp_path, consolidated):
    held = stored_dataset(tmp_path / "d", consolidated=consolidated)
    x = f"{tmp_path}/d/x"
    ooc_gemm.gram(x, f"{tmp_path}/d/k", transpose=True, **CPU)
    ooc_gemm.corrcoef(zarr.open_array(x), f"{tmp_path}/d/r", **CPU)
    ooc_gemm.multiply(x, B, f"{tmp_path}/d/p", **CPU)
    found = xr.open_zarr(tmp_path / "d", consolidated=consolidated)
    for side in ("_0", "_1"):
        assert list(found[f"gene{side}"].values) == list(held["gene"].values)
        assert (found[f"sample{side}"].values == held["sample"].values).all()
    assert found["k"].sel(gene_0="g3", gene_1="g4") == A[:, 3] @ A[:, 4]
    assert (found["p"]["sample"] == held["sample"]).all()
    assert found["p"].dims == ("sample", "dim_1")


def test_a_stored_c_of_dataarrays_gets_their_coordinates(arrays, tmp_path):
    a, b = arrays
    ooc_gemm.multiply(a, b, tmp_path / "new.zarr" / "p", **CPU)
    found = xr.open_zarr(tmp_path / "new.zarr", consolidated=False)["p"]
    assert (found.sel(sample="s3", score=4) == A[3] @ B[:, 2]).all()
    assert found["score"].attrs == {"unit": "m"}
    ooc_gemm.multiply(a, b, tmp_path / "alone", **CPU)
    assert not (tmp_path / "sample").exists()


def test_coordinates_overwrite_nothing(tmp_path):
    stored_dataset(tmp_path / "d", consolidated=False)
    other = zarr.create_array(tmp_path / "d" / "gene_0", shape=(20,), dtype="i4", dimension_names=("gene_0",))
    other[...] = 7
    (tmp_path / "d" / "gene_1").mkdir()
    (tmp_path / "d" / "gene_1" / "notes").write_text("mine")
    ooc_gemm.gram(tmp_path / "d" / "x", tmp_path / "d" / "k", transpose=True, **CPU)
    assert (zarr.open_array(tmp_path / "d" / "gene_0")[...] == 7).all()
    assert [file.name for file in (tmp_path / "d" / "gene_1").iterdir()] == ["notes"]


@pytest.mark.parametrize(
    "wrong", [{"shape": [19]}, {"shape": 0}, {"dimension_names": ["sample"]}, {"chunk_grid": 7}]
)
def test_what_is_no_coordinate_is_not_copied(tmp_path, wrong):
    stored_dataset(tmp_path / "d", consolidated=False)
    document = tmp_path / "d" / "gene" / "zarr.json"
    document.write_text(json.dumps({**json.loads(document.read_text()), **wrong}))
    ooc_gemm.gram(tmp_path / "d" / "x", tmp_path / "d" / "k", transpose=True, **CPU)
    assert not (tmp_path / "d" / "gene_0").exists()


def test_a_coordinate_that_cannot_be_stored_is_told_and_c_stays(tmp_path):
    index = pytest.importorskip("pandas").MultiIndex.from_product([range(5), range(6)])
    said = []
    a = xr.DataArray(A, dims=("sample", "gene"))
    a = a.assign_coords(xr.Coordinates.from_pandas_multiindex(index, "sample"))
    found = ooc_gemm.gram(a, tmp_path / "new.zarr" / "k", notice=said.append, **CPU)
    assert np.array_equal(found.array[...], A @ A.T)
    assert ["is finished, but the coordinate sample_1" in one for one in said] == [True]


def test_a_c_in_a_group_of_version_2_is_announced(tmp_path):
    stored_dataset(tmp_path / "d", zarr_format=2, consolidated=False)
    said = []
    ooc_gemm.gram(tmp_path / "d" / "x", tmp_path / "d" / "k", notice=said.append, **CPU)
    assert [one for one in said if "in the group d of version 2" in one]
    assert np.array_equal(zarr.open_array(tmp_path / "d" / "k")[...], A @ A.T)
