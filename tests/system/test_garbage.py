"""A call frees what it has held when it returns, and leaves nothing to Python's garbage collector."""

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make
from garbage import nothing_left_to_collect

import ooc_gemm
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.several import Several

RNG = np.random.default_rng(3)
X = RNG.integers(0, 3, (120, 90)).astype("f4")

CALLS = {
    "product": lambda a, c: ooc_gemm.multiply(a, a, c, transpose_b=True, verify=True),
    "in memory": lambda a, c: ooc_gemm.multiply(a, a, transpose_b=True),
    "continued": lambda a, c: [
        ooc_gemm.multiply(a, a, c, transpose_b=True),
        ooc_gemm.multiply(a, a, c, transpose_b=True, beta=1),
    ],
    "rechunked": lambda a, c: ooc_gemm.multiply(a, a, c, transpose_b=True, rechunk=True),
    "plan": lambda a, c: ooc_gemm.plan(a, a, transpose_b=True),
    "verify": lambda a, c: [
        ooc_gemm.multiply(a, a, c, transpose_b=True),
        ooc_gemm.verify(a, a, c, transpose_b=True),
    ],
    "gram": lambda a, c: ooc_gemm.gram(a, c),
    "cov": lambda a, c: ooc_gemm.cov(a, c),
    "corrcoef": lambda a, c: ooc_gemm.corrcoef(a, c),
    "grm": lambda a, c: ooc_gemm.grm(a, c),
    "king": lambda a, c: ooc_gemm.king(np.asarray(zarr.open_array(a)).astype("i1"), c),
    "lstsq": lambda a, c: ooc_gemm.lstsq(a, a, c, ridge=1.0),
    "pca": lambda a, c: ooc_gemm.pca(a, 3),
    "svd": lambda a, c: ooc_gemm.svd(a, 3),
    "random": lambda a, c: ooc_gemm.random(c, (90, 80), chunks=(50, 50)),
    "topk": lambda a, c: ooc_gemm.topk(a, out=c, k=3),
    "threshold": lambda a, c: ooc_gemm.threshold(a, out=c, least=0.9),
}
"""Calls with the path of an array, and of a result."""


def twice(call):
    """Make a call and then look at what another one leaves: what is remembered of the first stays."""
    call(0)
    with nothing_left_to_collect():
        call(1)


@pytest.mark.parametrize("name", CALLS)
def test_on_the_cpu(tmp_path, name):
    a = make(tmp_path / "a", X, chunks=(50, 40))
    twice(lambda time: CALLS[name](a, str(tmp_path / f"c{time}")))


@pytest.mark.parametrize("name", ["cov", "gram", "pca", "svd", "topk", "threshold", "grm"])
def test_statistics_on_a_gpu(tmp_path, monkeypatch, name):
    cupy_on_cpu.install(monkeypatch)
    a = make(tmp_path / "a", X, chunks=(50, 40))
    call = {
        "cov": lambda c: ooc_gemm.cov(a, c, device="cuda"),
        "gram": lambda c: ooc_gemm.gram(a, c, device="cuda", out_dtype="f2", verify=True),
        "pca": lambda c: ooc_gemm.pca(a, 3, device="cuda"),
        "svd": lambda c: ooc_gemm.svd(a, 3, device="cuda"),
        "topk": lambda c: ooc_gemm.topk(a, out=c, k=3, device="cuda"),
        "threshold": lambda c: ooc_gemm.threshold(a, out=c, least=0.9, device="cuda"),
        "grm": lambda c: ooc_gemm.grm(a, c, device="cuda"),
    }[name]
    twice(lambda time: call(str(tmp_path / f"c{time}")))


EMULATED = [
    ("cublas", "f4"),
    ("ffma", "f8"),
    ("dmma", "f8"),
    ("mma-fp16", "f2"),
    ("mma-tf32", "f4"),
    ("mma-int8", "i1"),
    ("mma-fp16x3", "f4"),
    ("ozaki2", "f8"),
    ("ozaki2", "c16"),
    ("ozaki2", "i4"),
]
KERNELS = [
    *EMULATED,
    ("ffma", "f4"),
    ("fp16", "f2"),
    ("tf32", "f4"),
    ("int8", "i1"),
    ("int8", "i2"),
    ("fp16x3", "f4"),
    ("fp16x3", "c8"),
]


@pytest.mark.parametrize("shape", [(120, 90), (90, 120)])
@pytest.mark.parametrize(("kernel", "dtype"), EMULATED)
def test_on_a_gpu(monkeypatch, kernel, dtype, shape):
    """The memory of a kernel on a device, too."""
    cupy_on_cpu.install(monkeypatch)
    x = RNG.integers(0, 9, shape).astype(dtype)
    precision = "medium" if "tf32" in kernel else "highest"
    options = {"kernel": kernel, "precision": precision}

    def call(_):
        ooc_gemm.multiply(x, x.T.copy(), device=CUDA(), **options)
        ooc_gemm.gram(x, device=CUDA(), **options)

    twice(call)


@pytest.mark.parametrize("compressor", ["none", "zstd"])
def test_files_in_memory(memory, compressor):
    """Threads without the interpreter copy them."""
    for name in "ab":
        make(memory / name, X[:, :80] if name == "a" else X[:80], chunks=(50, 40), compressors=None)
    a, b = str(memory / "a"), str(memory / "b")
    for device in "cpu", "cuda":
        c = f"{memory}/c-{device}"
        options = {"device": device, "compressor": compressor, "chunks": (50, 40)}
        twice(lambda time, c=c, options=options: ooc_gemm.multiply(a, b, f"{c}{time}", **options))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_memory_of_a_gpu(kernel, dtype):
    """What a session has held is free when it has ended."""
    if why := gpu_missing():
        pytest.skip(why)
    a, b = (RNG.integers(0, 9, shape).astype(dtype) for shape in ((3000, 2000), (2000, 3000)))
    options = {"kernel": kernel, "precision": "medium" if "tf32" in kernel else "highest"}
    device, free = CUDA(), []

    def call(_):
        for _ in range(2):
            ooc_gemm.multiply(a, b, device=device, **options)
            free.append(device.free_bytes())

    twice(call)
    assert free[1] == free[2] == free[3]


def test_on_several_gpus(monkeypatch):
    cupy_on_cpu.install(monkeypatch)
    twice(lambda _: ooc_gemm.multiply(X, X.T.copy(), device=Several([CUDA(), CUDA()]), chunks=(50, 40)))
