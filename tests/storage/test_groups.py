"""C among labelled arrays: names of its dimensions, the groups above it, and what messages say of groups."""

import json
import warnings

import numpy as np
import pytest
import s3
import zarr
from conftest import make, ooc

import ooc_gemm
from ooc_gemm.storage.read import metadata

A = np.random.default_rng(1).integers(-9, 9, (30, 20)).astype("f4")
B = np.random.default_rng(2).integers(-9, 9, (20, 10)).astype("f4")
CPU = {"device": "cpu", "memory_limit": "1GiB"}
IN_3 = {"dimension_names": ("sample", "gene")}
IN_2 = {"attributes": {"_ARRAY_DIMENSIONS": ["sample", "gene"]}, "zarr_format": 2}
NAMED = {3: IN_3, 2: IN_2, "wrong": {"attributes": {"_ARRAY_DIMENSIONS": ["a" * 999, 7]}, "zarr_format": 2}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(path):
    return zarr.open_array(path, mode="r").metadata.dimension_names


@pytest.mark.parametrize("version", NAMED)
def test_c_has_the_names_of_its_operands_dimensions(here, version):
    named = version != "wrong"
    make("a", A, chunks=(9, 9), **NAMED[version])
    b = make("b", B, chunks=(9, 9), dimension_names=("gene", "score"))
    for i, a in enumerate(("a", zarr.open_array("a"))):
        ooc_gemm.multiply(a, b, f"c{i}", **CPU)
        assert names(f"c{i}") == ("sample" if named else "dim_0", "score")
        ooc_gemm.multiply(a, B, f"left{i}", **CPU)
        assert names(f"left{i}") == (("sample", "dim_1") if named else None)
        ooc_gemm.multiply(b, a, f"turned{i}", transpose_a=True, transpose_b=True, **CPU)
        assert names(f"turned{i}") == ("score", "sample" if named else "dim_1")
        ooc_gemm.gram(a, f"gram{i}", transpose=True, **CPU)
        assert names(f"gram{i}") == (("gene_0", "gene_1") if named else None)
    ooc_gemm.cov("a", "cov", **CPU)
    assert names("cov") == (("sample_0", "sample_1") if named else None)


def test_names_of_dimensions_do_not_make_another_input_of_an_array(here):
    make("a", A, chunks=(9, 9), compressors=None)
    ooc_gemm.gram("a", "c", **CPU)
    described = json.loads((here / "a/zarr.json").read_text())
    (here / "a/zarr.json").write_text(json.dumps({**described, "dimension_names": ["x", "y"]}))
    assert ooc_gemm.gram("a", "c", resume=True, **CPU).bytes_read == 0


def kinds(folder):
    """The groups of version 3 below a folder, by path."""
    return sorted(
        path.parent.relative_to(folder).as_posix()
        for path in folder.rglob("zarr.json")
        if json.loads(path.read_text())["node_type"] == "group"
    )


@pytest.mark.parametrize(
    ("c", "made"),
    [
        ("plain/c.zarr", []),
        ("plain/deep/c", []),
        ("data.zarr/c", ["data.zarr"]),
        ("plain/data.zarr/sub/c", ["plain/data.zarr", "plain/data.zarr/sub"]),
        ("group/sub/deep/c", ["group", "group/sub", "group/sub/deep"]),
        ("group/data.zarr/c", ["group", "group/data.zarr"]),
        ("old/sub/c", []),
        ("old/data.zarr/c", ["old/data.zarr"]),
    ],
)
def test_folders_above_c_are_made_groups_where_they_belong_to_a_store(here, c, made):
    zarr.create_group("group" if c.startswith("group") else "old.zarr", zarr_format=3)
    if c.startswith("old"):
        zarr.create_group("old", zarr_format=2)
    (here / "old.zarr/zarr.json").unlink(missing_ok=True)
    (here / "plain").mkdir()
    ooc_gemm.multiply(A, B, c, **CPU)
    assert kinds(here) == made
    if made:
        assert (zarr.open_group(made[0], mode="r")[c.removeprefix(made[0] + "/")][...] == A @ B).all()


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_xarray_sees_c_through_new_groups_and_consolidated_metadata(here):
    xr = pytest.importorskip("xarray")
    data = xr.Dataset({"x": (("sample", "gene"), A)}, coords={"sample": np.arange(30)})
    for consolidated in (False, True):
        place = f"data{consolidated}"
        data.to_zarr(place, consolidated=consolidated)
        ooc_gemm.gram(f"{place}/x", f"{place}/made/here/k", **CPU)
        ooc_gemm.multiply(f"{place}/x", B, f"{place}/y", **CPU)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = xr.open_zarr(place, consolidated=consolidated)
            assert (found["y"].values == A @ B).all()
            assert found["y"].dims == ("sample", "dim_1")
            below = xr.open_zarr(place, group="made/here", consolidated=consolidated)
        assert below["k"].dims == ("sample_0", "sample_1")
        assert (below["k"].values == A @ A.T).all()


def test_a_group_in_an_object_store_is_made(server, monkeypatch):
    for name, value in s3.environment(server).items():
        monkeypatch.setenv(name, value)
    address = f"s3://{s3.BUCKET}/groups"
    ooc_gemm.multiply(A, B, f"{address}/data.zarr/sub/c", **CPU)
    for group in ("data.zarr", "data.zarr/sub"):
        found = ooc("plan", f"{address}/{group}", f"{address}/{group}")
        assert found.code == 2
        assert "is a Zarr group" in found.err


@pytest.mark.parametrize("version", [3, 2])
def test_a_group_says_which_arrays_it_holds(here, version):
    group = zarr.create_group("g", zarr_format=version)
    for number in range(12):
        group.create_array(f"sub/x{number:02}", shape=(3, 4 + number), chunks=(2, 2), dtype="f4")
    group.create_array("coordinate", shape=(3,), chunks=(2,), dtype="f4")
    with pytest.raises(ooc_gemm.InputError) as raised:
        ooc_gemm.plan("g", "g", **CPU)
    said = str(raised.value)
    assert "name one of the arrays in it, such as g/sub/x00. It holds sub/x00 (3×4), sub/x01 (3×5)" in said
    assert said.endswith("sub/x07 (3×11), …")
    assert "coordinate" not in said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata("g")
    with pytest.raises(ooc_gemm.InputError) as again:
        ooc_gemm.plan("g", "g", **CPU)
    assert str(again.value) == said
    zarr.create_group("empty", zarr_format=version)
    assert ooc("plan", "empty", "empty").err.rstrip().endswith("not an array; name one of the arrays in it")


def test_a_huge_group_is_not_looked_through(here, monkeypatch):
    zarr.create_group("g")
    for number in range(1000):
        (here / f"g/x{number}").mkdir()
    looked, kind = [], metadata.documents.kind
    monkeypatch.setattr(metadata.documents, "kind", lambda *given: looked.append(given) or kind(*given))
    with pytest.raises(ooc_gemm.InputError, match="name one of the arrays in it"):
        ooc_gemm.plan("g", "g", **CPU)
    assert len(looked) < 250
