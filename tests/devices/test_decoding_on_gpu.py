"""Chunks that a GPU decodes: products of real arrays, beside those of chunks that the host decodes."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make
from faults import sent_if_any

import ooc_gemm
from ooc_gemm import StoreError
from ooc_gemm.devices.cuda import rates
from ooc_gemm.run import rates_learned

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(4)
CODECS = {
    "zstd": zarr.codecs.ZstdCodec(level=3),
    "zstd 19": zarr.codecs.ZstdCodec(level=19),
    "bits": zarr.codecs.BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle"),
    "bytes": zarr.codecs.BloscCodec(cname="zstd", clevel=5, shuffle="shuffle"),
}


@pytest.fixture(autouse=True, params=["disk", "memory"])
def here(request, tmp_path, monkeypatch):
    """A folder on a disk, or in memory, from which chunks are read in the background."""
    if why := gpu_missing():
        pytest.skip(why)
    monkeypatch.setattr(rates, "UNPACK", 1e10)
    monkeypatch.setattr(rates_learned, "learn_unpacking", lambda *given: "")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        monkeypatch.chdir(memory if request.param == "memory" else tmp_path)
        yield
        monkeypatch.chdir(tmp_path)


def stored(dtype, codec, shape=(2000, 2300, 1900), chunks=(400, 300), turned=False):
    m, k, n = shape
    for name, size in (("a", (m, k)), ("b", (k, n))):
        x = np.rint(RNG.standard_normal(size) * 16) / (1 if np.dtype(dtype).kind in "iu" else 16)
        make(
            name, np.ascontiguousarray(x.T if turned else x, dtype), compressors=CODECS[codec], chunks=chunks
        )


def product(name, **options):
    given = {"device": "cuda", "memory_limit": "4GiB"} | options
    found = ooc_gemm.multiply("a", "b", name, **given)
    return found, zarr.open_array(name, mode="r")[...]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "complex64"])
@pytest.mark.parametrize("ops", [(False, False), (True, True)])
def test_the_result_is_that_of_what_the_host_decodes(monkeypatch, codec, dtype, ops):
    chunks = (800, 600) if dtype == "int8" else (600, 500) if dtype == "float16" else (400, 300)
    stored(dtype, codec, chunks=chunks, turned=ops[0])
    options = {"transpose_a": ops[0], "transpose_b": ops[1]}
    found, c = product("c", **options)
    assert found.plan.problem.a.encoded
    assert found.plan.problem.b.encoded
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    monkeypatch.setattr(rates, "UNPACK", 0.0)
    other, wanted = product("d", **options)
    assert not other.plan.problem.a.encoded
    assert np.array_equal(c, wanted)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("chunks", [(256, 256), (64, 64), (130, 170)])
@pytest.mark.parametrize("turned", [False, True])
def test_pieces_of_several_chunks(monkeypatch, codec, chunks, turned):
    """Whether decoded chunks lie side by side or not."""
    monkeypatch.setattr(ooc_gemm.run.prepare, "_fastest", sent_if_any)
    stored("float32", codec, chunks=chunks, turned=turned)
    found, c = product("c", transpose_a=turned, transpose_b=turned)
    assert found.plan.problem.a.encoded
    assert found.plan.problem.a.chunks_of_piece(found.plan.slot_bytes, 1 << 20) > 1
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    monkeypatch.setattr(rates, "UNPACK", 0.0)
    _, wanted = product("d", transpose_a=turned, transpose_b=turned)
    assert np.allclose(c, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("codec", ["zstd", "bits"])
def test_many_panels_and_blocks(monkeypatch, codec):
    """Chunks are decoded again and again in the same memory."""
    monkeypatch.setattr(ooc_gemm.run.prepare, "_fastest", sent_if_any)
    stored("float32", codec, (4000, 4600, 3800), (512, 512) if codec == "zstd" else (1024, 1024))
    found, c = product("c", device_memory_limit="1400MiB", chunks=(512, 512))
    assert found.plan.problem.a.encoded
    monkeypatch.setattr(rates, "UNPACK", 0.0)
    _, wanted = product("d", device_memory_limit="1400MiB", chunks=(512, 512))
    assert np.allclose(c, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("codec", ["zstd", "bits"])
def test_a_damaged_chunk_is_named(codec):
    stored("float32", codec)
    path = Path("b/c/2/1")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(StoreError, match=r"b: chunk c/2/1 cannot be read or decoded"):
        product("c")
    path.write_bytes(data)
    found, _ = product("c", force=True)
    assert found.plan.problem.a.encoded
