"""Small matrices whose chunks a GPU decodes, on a stand-in for one."""

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.devices.cuda import rates
from ooc_gemm.planning import ledger
from ooc_gemm.run import rates_learned
from ooc_gemm.storage.read import compressed

RNG = np.random.default_rng(8)
ZSTD = zarr.codecs.ZstdCodec(level=3)
BLOSC = zarr.codecs.BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle")
LZ4 = zarr.codecs.BloscCodec(cname="lz4", clevel=3)
CHECKSUM = zarr.codecs.ZstdCodec(level=3, checksum=True)
CHUNKS = 64, 72


@pytest.fixture(params=["alone", "stacked"])
def small_chunks(request, tmp_path, monkeypatch):
    """A folder. Smaller chunks than usual go to the device, each alone or several in a piece."""
    monkeypatch.setattr(compressed, "LEAST_SENT", 1000)
    if request.param == "alone":
        monkeypatch.setattr(compressed, "STACKED_BYTES", 1000)
    monkeypatch.setattr(ledger, "DECODING_ROOM", 1 << 16)
    cupy_on_cpu.install(monkeypatch)
    monkeypatch.setattr(rates, "UNPACK", 1e12)
    monkeypatch.setattr(rates_learned, "learn_unpacking", lambda *given: "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def matrices(dtype="f4", shape=(300, 360, 310), ops=(False, False)):
    """Operands as they are stored, and their product, in which every sum is exact."""
    m, k, n = shape
    x, y = (RNG.integers(-9, 9, size).astype(dtype) for size in ((m, k), (k, n)))
    wanted = x.astype("c16") @ y.astype("c16")
    return (x.T if ops[0] else x), (y.T if ops[1] else y), wanted


def stored(x, y, codecs=(ZSTD, ZSTD), chunks=CHUNKS):
    for name, values, codec in (("a", x, codecs[0]), ("b", y, codecs[1])):
        make(name, np.ascontiguousarray(values), compressors=codec, chunks=chunks)


def product(**options):
    """Multiply, and return the result and C."""
    found = ooc_gemm.multiply("a", "b", "c", **{"device": "cuda"} | options)
    return found, zarr.open_array("c", mode="r")[...]


def before_each(monkeypatch, kernel, look):
    """Calls `look` with the arguments and the stream of each launch of a kernel."""
    launch = cupy_on_cpu.Kernel.__call__

    def launches(self, grid, block, args, stream, shared_bytes=0):
        if self.name == kernel:
            look(args, stream)
        return launch(self, grid, block, args, stream, shared_bytes)

    monkeypatch.setattr(cupy_on_cpu.Kernel, "__call__", launches)


def decoded(compressor="zstd"):
    """How often the device was given chunks to decode."""
    return cupy_on_cpu.Kernel.launched.count(compressor)
