"""A C that is given as an open zarr.Array is filled: only its values change."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import s3
import zarr
from conftest import make
from interruption import interrupted

import ooc_gemm
from ooc_gemm import InputError
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.io import answers
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.read import addresses

A, B = (np.random.default_rng(7).integers(-9, 9, shape).astype("f4") for shape in ((60, 50), (50, 40)))
C = A @ B


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("a", A, chunks=(20, 20), compressors=None)
    make("b", B, chunks=(20, 20), compressors=None)
    return tmp_path


LAYOUTS = {
    "raw": {"compressors": None},
    "default": {},
    "zstd": {"compressors": zarr.codecs.ZstdCodec(level=7)},
    "blosc": {"compressors": zarr.codecs.BloscCodec()},
    "shards": {"chunks": (10, 5), "shards": (20, 20)},
    "checksum": {"compressors": [zarr.codecs.Crc32cCodec()]},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
    "Fortran": {"filters": zarr.codecs.TransposeCodec(order=(1, 0)), "compressors": None},
    "big-endian": {"serializer": zarr.codecs.BytesCodec(endian="big"), "compressors": None},
    "dots": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "version 2": {"zarr_format": 2},
    "version 2, Fortran": {"zarr_format": 2, "order": "F"},
    "chunks larger than C": {"chunks": (100, 200)},
}


def opened(path, layout, dtype="f4", shape=(60, 40)):
    """An array full of 7, with attributes and a fill value."""
    options = {"chunks": (17, 13), "fill_value": 3, "attributes": {"mine": [1, 2]}} | LAYOUTS[layout]
    array = zarr.create_array(path, shape=shape, dtype=dtype, **options)
    array[...] = 7
    return array


def described(path):
    """Its metadata, but for what it was made of."""
    documents = {}
    for name in ("zarr.json", ".zarray", ".zattrs"):
        if Path(path, name).exists():
            found = json.loads(Path(path, name).read_text())
            found.get("attributes", found).pop("ooc-gemm", None)
            documents[name] = found
    return documents


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", ["multiply", "gram"])
def test_every_layout(here, layout, product):
    shape = (60, 40) if product == "multiply" else (60, 60)
    c = opened("c", layout, shape=shape)
    Path("c/notes.txt").write_text("mine")
    before = described("c")
    if product == "multiply":
        ooc_gemm.multiply("a", "b", c, device="cpu")
        assert np.array_equal(c[...], C)
    else:
        ooc_gemm.gram("a", c, device="cpu")
        assert np.array_equal(c[...], A @ A.T)
    assert np.array_equal(zarr.open_array("c", mode="r")[...], c[...])
    assert described("c") == before
    assert zarr.open_array("c", mode="r").attrs["mine"] == [1, 2]
    assert Path("c/notes.txt").read_text() == "mine"
    # Again, with another alpha.
    ooc_gemm.gram("a", c, alpha=2) if product == "gram" else ooc_gemm.multiply("a", "b", c, alpha=2)
    assert np.array_equal(c[...], 2 * (C if product == "multiply" else A @ A.T))


@pytest.mark.parametrize(
    ("dtype", "shape", "options", "said"),
    [
        ("f4", (60, 41), {}, r"has shape \(60, 41\) but the result is 60×40"),
        ("f4", (40, 60), {}, "has shape"),
        ("f8", (60, 40), {}, "holds float64 but the result is float32; .*out_dtype='float64'"),
        ("i4", (60, 40), {}, "holds int32 but the result is float32"),
        ("c8", (60, 40), {}, "holds complex64"),
        ("f4", (60, 40), {"out_dtype": "f8"}, "holds float32 but the result is float64"),
        ("f4", (60, 40), {"chunks": (20, 20)}, "keeps its chunks; leave out chunks"),
        ("f4", (60, 40), {"shards": (34, 26), "chunks": (17, 13)}, "keeps its shards"),
        ("f4", (60, 40), {"compressor": "zstd"}, "keeps its compressor"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_does_not_match(here, dtype, shape, options, said, force):
    c = opened("c", "default", dtype, shape)
    before = {path: path.read_bytes() for path in Path("c").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=said):
        ooc_gemm.multiply("a", "b", c, force=force, **options)
    assert {path: path.read_bytes() for path in Path("c").rglob("*") if path.is_file()} == before


def test_what_matches_when_it_is_said(here):
    c = opened("c", "default", "f8")
    ooc_gemm.multiply("a", "b", c, out_dtype="f8", chunks=(17, 13), force=True)
    assert np.array_equal(c[...], A.astype("f8") @ B)
    assert c.attrs["mine"] == [1, 2]


def test_an_array_open_for_reading(here):
    opened("c", "default")
    with pytest.raises(InputError, match="is open for reading only"):
        ooc_gemm.multiply("a", "b", zarr.open_array("c", mode="r"))
    with pytest.raises(InputError, match="is, contains or lies inside the input a"):
        ooc_gemm.multiply("a", "b", zarr.open_array("a"))
    assert (zarr.open_array("c", mode="r")[...] == 7).all()
    assert np.array_equal(zarr.open_array("a", mode="r")[...], A)


@pytest.mark.parametrize("layout", ["raw", "zstd", "shards", "version 2", "Fortran"])
@pytest.mark.parametrize("by", ["path", "array"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_fill_that_is_interrupted(here, monkeypatch, layout, by, count):
    c = opened("c", layout)
    before = described("c")
    interrupted(monkeypatch, count, "a", "b", c)
    assert unfinished.is_partial(Folder(here / "c"))
    with pytest.raises(InputError, match=r"unfinished result .*resume=True"):
        ooc_gemm.multiply("a", "b", c)
    result = ooc_gemm.multiply("a", "b", c if by == "array" else "c", resume=True)
    assert result.bytes_written > 0
    assert np.array_equal(c[...], C)
    assert described("c") == before
    again = ooc_gemm.multiply("a", "b", c, resume=True)
    assert again.bytes_written == 0


def test_a_fill_that_is_begun_anew(here, monkeypatch):
    c = opened("c", "zstd")
    before = described("c")
    interrupted(monkeypatch, 3, "a", "b", c)
    ooc_gemm.multiply("a", "b", c, alpha=3, force=True)
    assert np.array_equal(c[...], 3 * C)
    assert described("c") == before


def test_in_a_group(here):
    group = zarr.create_group("g")
    c = group.create_array("sub/c", shape=(60, 40), chunks=(20, 20), dtype="f4")
    ooc_gemm.multiply("a", "b", c)
    assert np.array_equal(zarr.open_group("g", mode="r")["sub/c"][...], C)


def test_in_an_object_store(here, monkeypatch, server):
    for name, value in s3.environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(answers, "abandoned", threading.Event())
    for layout in ("raw", "shards", "version 2"):
        place = addresses.remote_place(f"s3://{s3.BUCKET}/{layout.replace(' ', '-')}")
        c = opened(place, layout)
        ooc_gemm.multiply("a", "b", c, device="cpu")
        again = zarr.open_array(place, mode="r")
        assert np.array_equal(again[...], C)
        assert (again.attrs["mine"], again.metadata.fill_value) == ([1, 2], 3)
        assert ooc_gemm.multiply("a", "b", c, device="cpu", resume=True).bytes_written == 0
