"""The lower triangle of A·Aᵀ alone, against NumPy in float64 and the whole of it."""

import json
import os

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from arrays import assert_close, matrix
from conftest import make, ooc
from interruption import interrupted

import ooc_gemm
from ooc_gemm import Operand
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.several import Several

LIMIT = "1GiB"


def files(c):
    """Places of the chunks that are stored."""
    return sorted(tuple(map(int, (i, j))) for i in os.listdir(f"{c}/c") for j in os.listdir(f"{c}/c/{i}"))


@pytest.mark.parametrize(
    "layout", [{"chunks": (32, 32)}, {"chunks": (16, 64)}, {"chunks": (48, 20)}, {"chunks": (67, 31)}, {}]
)
@pytest.mark.parametrize("transpose", [False, True])
def test_layouts(tmp_path, layout, transpose):
    x = matrix((190, 45), "f4", 1)
    a, c = make(tmp_path / "a", x.T.copy() if transpose else x, chunks=(32, 16)), str(tmp_path / "c")
    options = {"transpose": transpose, "memory_limit": LIMIT, "device": "cpu", **layout}
    ooc_gemm.gram(a, c, **options)
    whole = zarr.open_array(c)[:]
    found = ooc_gemm.gram(a, c, triangle="lower", verify=True, force=True, **options)
    stored = zarr.open_array(c)
    assert stored[:].tobytes() == np.tril(whole).tobytes()
    assert_close(stored[:], np.tril(x.astype("f8") @ x.T.astype("f8")), 1e-6)
    height, width = stored.chunks
    down, across = -(-190 // height), -(-190 // width)
    assert files(c) == [(i, j) for i in range(down) for j in range(across) if (i + 1) * height > j * width]
    assert found.bytes_written == found.plan.bytes_written == len(files(c)) * height * width * 4
    assert found.bytes_read == found.plan.bytes_read
    assert found.blocks_resumed == 0


@pytest.mark.parametrize("options", [{"shards": (64, 64), "chunks": (16, 16)}, {"compressor": "zstd"}])
@pytest.mark.parametrize("dtype", ["i1", "f8", "c8"])
def test_types_and_encodings(tmp_path, dtype, options):
    """In a store and in memory. Their blocks differ, and with them the order in which floats are added."""
    x, c = matrix((150, 40), dtype, 2), str(tmp_path / "c")
    expected = np.tril(x.astype("c16") @ x.T.astype("c16"))
    ooc_gemm.gram(x, c, triangle="lower", memory_limit=LIMIT, device="cpu", **options)
    in_memory = ooc_gemm.gram(x, triangle="lower", memory_limit=LIMIT, device="cpu").array
    for found in (zarr.open_array(c)[:], in_memory):
        assert_close(found, expected, 1e-6)
        assert np.array_equal(found, np.tril(found))
        assert dtype != "i1" or np.array_equal(found, expected)


def devices(name):
    return {"several": lambda: Several([CPU(1), CPU(1), CPU(1)], [2, 1, 3]), "stand-in": CUDA}[name]()


@pytest.mark.parametrize("name", ["several", "stand-in"])
def test_other_devices(tmp_path, monkeypatch, name):
    if name == "stand-in":
        cupy_on_cpu.install(monkeypatch)
    x, c = matrix((170, 60), "f4", 3), str(tmp_path / "c")
    found = ooc_gemm.gram(
        x, c, triangle="lower", chunks=(32, 32), memory_limit=LIMIT, device=devices(name), verify=True
    )
    assert_close(zarr.open_array(c)[:], np.tril(x.astype("f8") @ x.T.astype("f8")), 1e-6)
    assert found.bytes_written == found.plan.bytes_written
    assert found.bytes_downloaded == found.plan.bytes_downloaded


def test_a_transformed_operand_and_nan(tmp_path):
    x = matrix((90, 20), "f4", 4) + 100
    x[80, 3] = np.nan
    found = ooc_gemm.gram(
        Operand(x, center="columns", missing=np.nan), triangle="lower", memory_limit=LIMIT, device="cpu"
    )
    wide = np.ma.masked_invalid(x.astype("f8"))
    z = (wide - wide.mean(axis=0)).filled(0)
    assert_close(found.array, np.tril(z @ z.T), 1e-5)
    found = ooc_gemm.gram(x, triangle="lower", memory_limit=LIMIT, device="cpu").array
    assert np.isnan(found[80, :81]).all()
    assert (found[:80, 80] == 0).all()


@pytest.mark.parametrize("count", [0, 4])
def test_a_run_is_continued_and_no_other_is(tmp_path, monkeypatch, count):
    a, c = make(tmp_path / "a", matrix((200, 90), "f4", 5), chunks=(32, 32)), str(tmp_path / "c")
    options = {"memory_limit": LIMIT, "chunks": (32, 32), "device": "cpu"}
    ooc_gemm.gram(a, c + "1", triangle="lower", **options)
    interrupted(monkeypatch, count, a, c, run=ooc_gemm.gram, triangle="lower", **options)
    if count:
        with pytest.raises(ooc_gemm.InputError, match="lower triangle of gram"):
            ooc_gemm.gram(a, c, resume=True, **options)
    result = ooc_gemm.gram(a, c, triangle="lower", resume=True, **options)
    assert result.bytes_written == (28 - count) * 32 * 32 * 4
    assert zarr.open_array(c)[:].tobytes() == zarr.open_array(c + "1")[:].tobytes()
    again = ooc_gemm.gram(a, c, triangle="lower", resume=True, **options)
    assert again.bytes_written == 0
    with pytest.raises(ooc_gemm.InputError, match="not the result asked for"):
        ooc_gemm.gram(a, c, resume=True, **options)
    with pytest.raises(ooc_gemm.InputError, match="not a plain product"):
        ooc_gemm.verify(a, a, c)


def test_what_cannot_be_is_refused(tmp_path):
    x, c = np.ones((9, 4), "f4"), make(tmp_path / "c", np.zeros((9, 9), "f4"), chunks=(4, 4))
    for options, said in (
        ({"triangle": "upper"}, "give 'lower'"),
        ({"c": c, "beta": 1.0, "force": True}, "leave out triangle or beta"),
        ({"c": zarr.open_array(c), "force": True}, "give a path"),
    ):
        with pytest.raises(ooc_gemm.InputError, match=said):
            ooc_gemm.gram(x, **{"triangle": "lower", "memory_limit": LIMIT, **options})


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = matrix((100, 30), "f4", 6)
    make("a", x, chunks=(32, 32))
    options = ("--triangle", "lower", "--chunks", "16,16", "-M", "1GiB", "-d", "cpu", "--json")
    planned = json.loads(ooc("plan", "a", "--gram", *options).out)
    done = ooc("gram", "a", "c", *options)
    assert done.code == 0, done.err
    assert json.loads(done.out)["bytes_written"] == planned["bytes_written"] == 28 * 16 * 16 * 4
    assert_close(zarr.open_array("c")[:], np.tril(x.astype("f8") @ x.T.astype("f8")), 1e-6)
    assert "is for --gram" in ooc("plan", "a", "a", "--triangle", "lower").err
