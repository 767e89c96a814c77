"""Zarr arrays in zip archives: what is read of them is what the plan says."""

import zipfile

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm import StoreError
from ooc_gemm.storage.io.archive import Archive
from ooc_gemm.storage.read import inputs
from ooc_gemm.storage.read.compressed import CompressedSource
from ooc_gemm.storage.read.decoded import DecodedSource
from ooc_gemm.storage.read.held import HeldSource
from ooc_gemm.storage.read.raw import RawSource

A = np.random.default_rng(1).integers(-9, 9, (190, 130)).astype("f4")
A[:50, 40:80] = 0  # a chunk that is not stored
B = np.random.default_rng(2).integers(-9, 9, (130, 70)).astype("f4")
CPU = {"device": "cpu", "memory_limit": "1GiB"}
LAYOUTS = {
    "raw": ({"compressors": None}, RawSource),
    "zstd": ({}, CompressedSource),
    "gzip": ({"compressors": zarr.codecs.GzipCodec(level=1)}, CompressedSource),
    "version 2": ({"zarr_format": 2}, CompressedSource),
    "checksums": ({"compressors": zarr.codecs.Crc32cCodec()}, DecodedSource),
    "big-endian": (
        {"serializer": zarr.codecs.BytesCodec(endian="big"), "compressors": zarr.codecs.ZstdCodec()},
        DecodedSource,
    ),
    "Fortran": ({"filters": zarr.codecs.TransposeCodec(order=(1, 0))}, CompressedSource),
    "shards of raw chunks": ({"shards": (100, 80), "compressors": None}, RawSource),
    "shards": ({"shards": (100, 80)}, CompressedSource),
    "shards of checksums": ({"shards": (100, 80), "compressors": zarr.codecs.Crc32cCodec()}, HeldSource),
}
METHODS = {"stored": zipfile.ZIP_STORED, "deflated": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2}


def packed(folder, method=zipfile.ZIP_STORED):
    """Put the array in a folder into an archive beside it; the archive's path."""
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w", method) as file:
        for one in sorted(folder.rglob("*")):
            if one.is_file():
                file.write(one, f"deep/{one.relative_to(folder)}")
    return path


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_is_what_the_plan_says(tmp_path, layout, method):
    options, kind = LAYOUTS[layout]
    make(tmp_path / "a", A, chunks=(50, 40), **options)
    path = packed(tmp_path / "a", METHODS[method])
    opened, unpacked = inputs.open_input(f"{path}::deep"), method != "stored"
    in_shards = "shards" in options
    assert isinstance(opened.source, HeldSource if in_shards and unpacked else kind)
    assert opened.matrix.whole == (unpacked or kind is not RawSource)
    result = ooc_gemm.multiply(f"{path}::deep", B, **CPU)
    assert np.array_equal(result.array, A @ B)
    assert result.bytes_read == result.plan.bytes_read
    files = [one for one in (tmp_path / "a").rglob("*") if one.is_file() and one.name[0] not in ".z"]
    shards = len(files) if in_shards and not unpacked else 0  # of which indices are not read again
    stored = sum(one.stat().st_size for one in files) - shards * (4 * 16 + 4)
    assert opened.matrix.stored_bytes == stored
    if opened.matrix.whole:
        assert result.bytes_read - B.nbytes == stored


def test_a_chunk_that_differs_from_its_checksum_is_an_error(tmp_path):
    make(tmp_path / "a", A, chunks=(50, 40), compressors=None)
    path = packed(tmp_path / "a")
    data = bytearray(path.read_bytes())
    data[data.index((tmp_path / "a/c/1/0").read_bytes()) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"chunk c/1/0 cannot be read: its checksum is wrong"):
        ooc_gemm.multiply(f"{path}::deep", B, **CPU)


def test_an_open_archive_is_an_input_that_is_noticed_to_change(tmp_path):
    make(tmp_path / "a", A, chunks=(50, 40))
    path = packed(tmp_path / "a")
    with zarr.storage.ZipStore(path, mode="r") as store:
        array = zarr.open_array(store, path="deep", mode="r")
        assert ooc_gemm.gram(array, tmp_path / "c", **CPU).bytes_read > 0
        assert ooc_gemm.gram(array, tmp_path / "c", resume=True, **CPU).bytes_read == 0
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("other", b"")
        with pytest.raises(ooc_gemm.InputError, match="was changed since"):
            ooc_gemm.gram(array, tmp_path / "c", resume=True, **CPU)


def test_an_archive_that_is_being_written_is_an_input(tmp_path):
    with zarr.storage.ZipStore(tmp_path / "a.zip", mode="w") as store:
        array = zarr.create_array(store, data=A, chunks=(50, 40))
        assert np.array_equal(ooc_gemm.multiply(array, B, **CPU).array, A @ B)


def test_parts_of_files_in_an_archive(tmp_path):
    data = np.random.default_rng(3).integers(0, 256, 300_000, np.uint8)
    for name, method in METHODS.items():
        with zipfile.ZipFile(tmp_path / name, "w", method) as file:
            file.writestr("x/1", data.tobytes())
            file.writestr("x/1.other", b"")
        with zipfile.ZipFile(tmp_path / name) as archive:
            place = Archive(archive, "x")
            assert [(places.tolist(), stamps[:, 0].tolist()) for places, stamps in place.listed("*")] == [
                ([[1]], [len(data)])
            ]
            with place.open("1") as file:
                assert file.size == len(data)
                into = np.zeros(100_000, np.uint8)
                for at in (0, 150_000, 199_999, 1000, 200_000):
                    file.read(into, at)
                    assert np.array_equal(into, data[at : at + len(into)])
                assert np.array_equal(file.read_range(np.zeros(len(data), np.uint8), 0, len(data)), data)
                with pytest.raises(OSError, match="became shorter"):
                    file.read(into, 250_000)
            with pytest.raises(FileNotFoundError):
                place.open("2")


@pytest.mark.parametrize("layout", ["raw", "shards of raw chunks", "shards"])
def test_a_packed_file_is_unpacked_once(tmp_path, monkeypatch, layout):
    """And not for each row or chunk of it, from its beginning on."""
    options, _ = LAYOUTS[layout]
    make(tmp_path / "a", A, chunks=(50, 40), **options)
    path = packed(tmp_path / "a", zipfile.ZIP_DEFLATED)
    opened, real = [], zipfile.ZipFile.open

    def noted(self, name, *args, **kwargs):
        opened.append(getattr(name, "filename", name))
        return real(self, name, *args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, "open", noted)
    result = ooc_gemm.multiply(f"{path}::deep", B, **CPU)
    assert np.array_equal(result.array, A @ B)
    chunks = [one for one in opened if "/c/" in one]
    assert len(chunks) == len(set(chunks)) > 0
