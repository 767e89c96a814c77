"""Pieces that go from files in memory to a device without the interpreter."""

import shutil
import tempfile
from pathlib import Path

import cupy_on_cpu
import numpy as np
import pytest
from conftest import make
from sessions import device_with

import ooc_gemm
from ooc_gemm.cuda_kernels import driver
from ooc_gemm.devices import several
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.session import CUDASession
from ooc_gemm.planning import candidates
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
    cupy_on_cpu.install(monkeypatch)
    limit = files.background._found.quick.transfers_limit
    limit(files.background.THREADS, 1000)
    folder = Path(tempfile.mkdtemp(prefix="ooc-gemm-test-", dir="/dev/shm"))
    yield folder
    limit(files.background.THREADS, files.background.STEP_BYTES)
    shutil.rmtree(folder)


LAYOUTS = {
    "chunks": {"chunks": (64, 64)},
    "small chunks": {"chunks": (16, 16)},
    "row strips": {"chunks": (32, 1000)},
    "rows wide apart": {"chunks": (50, 4000)},
    "misaligned": {"chunks": (70, 90)},
    "shards": {"chunks": (32, 32), "shards": (128, 64)},
}


@pytest.mark.parametrize("transpose", ["", "a", "b"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(memory, layout, transpose):
    k = 4000 if layout == "rows wide apart" else 1000
    a, b = (RNG.integers(-9, 9, shape).astype("f4") for shape in ((500, k), (k, 400)))
    want, options = a @ b, {"kernel": "cublas", "memory_limit": "1GiB"}
    a, b = (a.T if transpose == "a" else a), (b.T if transpose == "b" else b)
    for name, x in (("a", a), ("b", b)):
        make(memory / name, x, compressors=None, **LAYOUTS[layout])
    options |= {"transpose_a": transpose == "a", "transpose_b": transpose == "b"}
    found = ooc_gemm.multiply(str(memory / "a"), str(memory / "b"), device="cuda", **options)
    assert np.array_equal(found.array, want)
    assert found.bytes_read == found.plan.bytes_read
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    assert cupy_on_cpu.sent


@pytest.mark.parametrize("what", ["read", "copy", "record"])
def test_what_fails_is_read_and_uploaded_again(memory, monkeypatch, what):
    """The plain ways say what the matter is, or there is nothing the matter any more."""
    a = RNG.integers(-9, 9, (300, 300)).astype("f4")
    make(memory / "a", a, compressors=None, chunks=(50, 50))
    if what == "read":
        real = files.background.Transfer.end
        monkeypatch.setattr(files.background.Transfer, "end", lambda self: real(self) and False)
    else:
        sending = list(cupy_on_cpu.SENDING)
        sending[("use", "copy", "record").index(what)] = cupy_on_cpu.SENDING[0]  # it fails for other numbers
        monkeypatch.setattr(driver, "_sending", lambda: tuple(sending))
    found = ooc_gemm.multiply(str(memory / "a"), str(memory / "a"), device="cuda", kernel="cublas")
    assert np.array_equal(found.array, a @ a)
    assert found.bytes_uploaded == found.plan.bytes_uploaded


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("converted", {"out_dtype": "float64"}),
        ("transformed", {}),
        ("integers that may overflow", {}),
    ],
)
def test_pieces_that_upload_must_see(memory, what, options):
    dtype = "i8" if what.startswith("integers") else "f4"
    a = RNG.integers(-9, 9, (300, 300)).astype(dtype)
    make(memory / "a", a, compressors=None, chunks=(50, 50))
    left = ooc_gemm.Operand(str(memory / "a"), scale="rows" if what == "transformed" else None)
    found = ooc_gemm.multiply(left, left, device="cuda", **options)
    assert found.array.shape == (300, 300)
    assert not cupy_on_cpu.sent


def test_a_slot_that_is_not_pinned_is_uploaded(memory, monkeypatch):
    a = RNG.integers(-9, 9, (300, 300)).astype("f4")
    make(memory / "a", a, compressors=None, chunks=(50, 50))
    asked = []

    class Session(CUDASession):
        def prepared(self, buffer):
            asked.append(super().prepared(buffer))
            return asked[-1]

        def onward(self, piece, dtype, buffer):
            assert asked[-1]
            return super().onward(piece, dtype, buffer)

    device = device_with(Session, CUDA)()
    found = ooc_gemm.multiply(str(memory / "a"), str(memory / "a"), device=device, kernel="cublas")
    assert np.array_equal(found.array, a @ a)
    assert not asked[0]
    assert any(asked)


@pytest.mark.parametrize("what", ["multiply", "gram", "beta"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("linked", [False, True])
def test_several_devices(memory, monkeypatch, what, transpose, linked):
    """A piece goes to the device whose band it is in, or to the one that passes it on to the others. Pieces
    that two bands share are uploaded to both."""
    cupy_on_cpu.install(monkeypatch, devices=3)
    monkeypatch.setattr(several, "MOST_READERS", 8)
    monkeypatch.setattr(candidates, "AMPLE_DEVICE_SLOTS", (12_000, 12_000))
    monkeypatch.setattr(CUDA, "reaches", lambda *_: linked)
    a, b = (RNG.integers(-9, 9, (900, 900)).astype("f4") for _ in range(2))
    for name, x in (("a", a), ("b", b), ("c", b)):
        make(memory / name, x, compressors=None, chunks=(60, 50))
    options = {"device": "cuda:0,1,2", "kernel": "cublas"}
    left = a.T if transpose else a
    if what == "gram":
        found = ooc_gemm.gram(str(memory / "a"), transpose=transpose, **options)
        want = left @ left.T
    else:
        found = ooc_gemm.multiply(
            str(memory / "a"), str(memory / "b"), str(memory / "c"), transpose_a=transpose,
            **({"beta": -1} if what == "beta" else {"force": True}), **options,
        )  # fmt: skip
        want = left @ b - (b if what == "beta" else 0)
    assert np.array_equal(np.asarray(found.array), want)
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    assert bool(cupy_on_cpu.sent) == (linked or what != "gram")  # all devices need the strip otherwise
