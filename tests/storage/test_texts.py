"""Names of samples as they are stored, and as they may be damaged or forged."""

import json
import struct

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore, StorePath

import ooc_gemm
from ooc_gemm.storage.read.texts import read_texts

NAMES = ["a", "", "HG00096", "é" * 40, "x y"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # texts in zarr


def at(path):
    return StorePath(LocalStore(path))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", [str, "<U40"])
@pytest.mark.parametrize("packed", [True, False])
def test_names_are_read(tmp_path, version, dtype, packed):
    known = {2: numcodecs.Zstd(), 3: zarr.codecs.ZstdCodec()}
    options = {"zarr_format": version, "compressors": known[version] if packed else None}
    array = zarr.create_array(tmp_path / "n", shape=(5,), chunks=(2,), dtype=dtype, **options)
    array[...] = np.array(NAMES, array.dtype)
    assert read_texts(at(tmp_path / "n"), "n", 5) == NAMES
    with pytest.raises(ooc_gemm.InputError, match="there are 6 samples"):
        read_texts(at(tmp_path / "n"), "n", 6)


def stored(path, data, **changes):
    """An array of version 2 whose chunk is these bytes."""
    path.mkdir()
    described = {
        "zarr_format": 2,
        "shape": [5],
        "chunks": [5],
        "dtype": "|O",
        "filters": [{"id": "vlen-utf8"}],
        "compressor": None,
        "order": "C",
        "fill_value": "",
    }
    (path / ".zarray").write_text(json.dumps(described | changes))
    (path / "0").write_bytes(data)
    return at(path)


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        (b"", {}),
        (struct.pack("<I", 1 << 31), {}),
        (struct.pack("<III", 5, 1 << 30, 0), {}),
        (struct.pack("<II", 5, 1) + b"\xff" * 20, {}),
        (bytes(1 << 20), {}),
        (numcodecs.Zstd().encode(bytes(64 << 20)), {"compressor": {"id": "zstd"}}),
        (b"x", {"filters": [{"id": "pickle"}]}),
        (b"x", {"compressor": {"id": "pickle"}}),
        (b"x", {"chunks": [0]}),
        (b"x", {"chunks": None}),
        (b"x", {"dtype": "<U9999", "filters": None}),
        (b"x", {"dtype": "<f8", "filters": None}),
        (b"x", {"shape": [[5]]}),
        (b"x", {"compressor": 7}),
    ],
)
def test_damaged_names_are_refused(tmp_path, data, changes):
    with pytest.raises(ooc_gemm.InputError, match="n"):
        read_texts(stored(tmp_path / "n", data, **changes), "n", 5)
