"""Files in memory, and products of them on a stand-in for a GPU, to and from which threads without the
interpreter copy."""

import shutil
import tempfile
from pathlib import Path

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.planning import candidates
from ooc_gemm.run import budget
from ooc_gemm.storage.io import files

RNG = np.random.default_rng(5)


@pytest.fixture
def memory(monkeypatch):
    """A folder in memory, from which parts of any size are read by other threads."""
    if not files.in_background("/dev/shm"):
        pytest.skip("there are no files in memory here, or there was no C compiler")
    monkeypatch.setattr(files, "FEW_CORES", 0)
    monkeypatch.setattr(files, "LEAST_PART", 4096)
    monkeypatch.setattr(candidates, "AMPLE_DEVICE_SLOTS", (100_000, 50_000))  # so slots are used again
    monkeypatch.setattr(candidates, "STEPPED_SLOT", 200_000)
    cupy_on_cpu.install(monkeypatch)
    monkeypatch.setattr(budget, "STEP_BYTES", 1100)  # threads keep what the first test gives them
    folder = Path(tempfile.mkdtemp(prefix="ooc-gemm-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def product(memory, shape=(500, 300, 400), **options):
    """Multiply, and return the result and whether C is right."""
    m, k, n = shape
    a, b = (RNG.integers(-9, 9, size).astype("f4") for size in ((m, k), (k, n)))
    for name, x in (("a", a), ("b", b)):
        make(memory / name, x, compressors=None, chunks=(50, 50))
    options = {"kernel": "cublas", "device": "cuda", "compressor": "none", "chunks": (100, 80)} | options
    found = ooc_gemm.multiply(*(str(memory / name) for name in "abc"), **options)
    c = zarr.open_array(memory / "c")
    return found, np.array_equal(c[:], (a @ b).astype(c.dtype))
