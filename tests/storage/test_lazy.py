"""Inputs that are no Zarr arrays: the memory limit holds for them, too, and what they raise is said."""

import subprocess
import sys

import numpy as np
import pytest
import zarr
from conftest import make

from ooc_gemm import BudgetError, InputError, StoreError, multiply, plan, verify

ALONE = """
import sys
import numpy as np
{}
from ooc_gemm import multiply

n, limit, folder = 2400, int(sys.argv[1]) << 20, sys.argv[2]
a, b = operand(1), operand(2)
result = multiply(a, b, folder + "/c", memory_limit=limit, device="cpu")
import zarr
right = np.asarray(a[:40]).astype("f8") @ np.asarray(b[:, 100:140])
found = zarr.open_array(folder + "/c", mode="r")[:40, 100:140]
assert np.allclose(found, right, rtol=1e-3, atol=1e-3 * np.abs(right).max())
print(result.peak_host_bytes, limit, result.plan.ledger["lazy inputs"])
"""

DASK = """
import dask.array as da
def operand(seed):
    x = da.random.default_rng(seed).standard_normal((n, n), chunks=({}), dtype="f4")
    return {}
"""
H5PY = """
import h5py
def operand(seed):
    values = np.random.default_rng(seed).standard_normal((n, n)).astype("f4")
    with h5py.File(f"{{folder}}/{{seed}}.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=({}), compression={}, compression_opts={})
    return h5py.File(f"{{folder}}/{{seed}}.h5")["x"]
"""
XARRAY = """
import xarray
def operand(seed):
    values = np.random.default_rng(seed).standard_normal((n, n)).astype("f4")
    array = xarray.DataArray(values, dims=("i", "j"), name="x")
    array.encoding = {"chunks": (800, 800)}
    array.to_dataset().to_zarr(f"{folder}/{seed}", consolidated=False)
    return xarray.open_zarr(f"{folder}/{seed}", chunks=None, consolidated=False)["x"]
"""
XARRAY_DASK = """
import dask.array, xarray
def operand(seed):
    x = dask.array.random.default_rng(seed).standard_normal((n, n), chunks=(800, 800), dtype="f4")
    return xarray.DataArray(x + 1, dims=("i", "j"), coords={"i": np.arange(n)})
"""
MEMMAP = """
def operand(seed):
    np.save(f"{folder}/{seed}.npy", np.random.default_rng(seed).standard_normal((n, n)).astype("f4"))
    return np.load(f"{folder}/{seed}.npy", mmap_mode="r").T
"""
KINDS = {
    "dask": DASK.format("1200, 1200", "x"),
    "dask, computed": DASK.format("800, 800", "(x * 2).rechunk((1200, 600)).map_blocks(np.sin)"),
    "dask, product": DASK.format("800, 800", "x @ x.T"),
    "h5py": H5PY.format("1200, 1200", "'gzip'", "1"),
    "xarray": XARRAY,
    "xarray of dask": XARRAY_DASK,
    "memory map": MEMMAP,
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is measured in /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_holds_for_lazy_inputs(tmp_path, kind):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE.format(KINDS[kind]), "270", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    peak, limit, lazy = map(int, done.stdout.split())
    assert 0 < lazy < limit
    assert peak <= limit


class Lazy:
    """An array that makes what is asked for, counts that, and fails at the call of this number."""

    def __init__(self, values, fails_at=0, error=None, chunks=None):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.calls, self.fails_at, self.error = 0, fails_at, error
        if chunks:
            self.chunks = chunks

    def __getitem__(self, at):
        self.calls += 1
        if self.error is not None and self.calls >= self.fails_at:
            raise self.error
        return self.values[at]


A = np.random.default_rng(3).integers(-9, 9, (50, 40)).astype("f4")
B = np.random.default_rng(4).integers(-9, 9, (40, 30)).astype("f4")


@pytest.mark.parametrize("error", [StopIteration("end"), SystemExit(3), GeneratorExit(), KeyError("x")])
@pytest.mark.parametrize("late", [False, True])
def test_what_an_input_raises_is_a_store_error_that_names_it(tmp_path, error, late):
    calls = Lazy(A)
    plan(calls, B, device="cpu")
    lazy = Lazy(A, calls.calls + 1 if late else 1, error)
    with pytest.raises(StoreError, match=r"A: rows 0–49 × columns 0–39 cannot be read") as raised:
        multiply(lazy, B, tmp_path / "c", device="cpu")
    assert raised.value.__cause__ is error
    assert type(error).__name__ in str(raised.value)


@pytest.mark.parametrize("chunks", [None, (7, 9), ((20, 30), (5, 35)), (50, 40)])
@pytest.mark.parametrize("side", ["a", "b"])
def test_lazy_inputs_of_any_chunks_are_right_and_their_bytes_predicted(chunks, side):
    values = A if side == "a" else B
    lazy = Lazy(values, chunks=chunks)
    operands = (lazy, B) if side == "a" else (A, lazy)
    result = multiply(*operands, device="cpu", chunks=(8, 8))
    assert np.array_equal(result.array, A @ B)
    assert result.bytes_read == result.plan.bytes_read
    turned = multiply(Lazy(values, chunks=chunks), values, device="cpu", transpose_a=True)
    assert np.array_equal(turned.array, values.T @ values)


def test_verify_reads_lazy_arrays(tmp_path):
    c = make(tmp_path / "c", A @ B, chunks=(20, 20))
    assert verify(Lazy(A, chunks=(7, 9)), Lazy(B), c).ok
    assert not verify(Lazy(A + 1, chunks=(7, 9)), Lazy(B), c).ok


def test_a_chunk_that_cannot_fit_the_limit_is_not_made():
    lazy = Lazy(np.broadcast_to(np.float32(1), (1 << 15, 1 << 15)), chunks=(1 << 15, 1 << 15))
    with pytest.raises(BudgetError, match="A: a chunk of it takes 4294967296 bytes") as raised:
        plan(lazy, lazy, memory_limit="1GiB", device="cpu")
    assert lazy.calls == 0
    least = raised.value.minimum_memory_limit
    assert least >= 2 << 32
    assert plan(lazy, lazy, memory_limit=least, device="cpu").host_bytes <= least


@pytest.mark.parametrize("chunks", [(7, 9), (50, 5), (50, 40)])
def test_the_limit_that_a_refusal_names_is_enough(chunks):
    """Also before any piece was made."""
    values = np.broadcast_to(np.float32(2), (4000, 3000))
    lazy = Lazy(values, chunks=(80 * chunks[0], 75 * chunks[1]))
    with pytest.raises(
        BudgetError, match=r"A: a chunk of it takes [0-9]+ bytes, .* will do, and less may"
    ) as raised:
        plan(lazy, lazy, transpose_b=True, memory_limit="1MiB", device="cpu")
    assert lazy.calls == 0
    least = raised.value.minimum_memory_limit
    assert plan(lazy, lazy, transpose_b=True, memory_limit=least, device="cpu").host_bytes <= least


def test_a_lazy_input_that_multiplies_itself_does_not_wait_for_itself():
    class Product(Lazy):
        def __getitem__(self, at):
            return multiply(Lazy(A), Lazy(B), device="cpu").array[at]

    assert np.array_equal(multiply(Product(A @ B), np.eye(30, dtype="f4"), device="cpu").array, A @ B)


@pytest.mark.parametrize("wrong", ["shape", "type", "sparse"])
def test_slices_that_are_not_what_was_promised_are_refused(wrong):
    class Wrong(Lazy):
        def __getitem__(self, at):
            found = super().__getitem__(at)
            return {"shape": found[1:], "type": found.astype("c8"), "sparse": object()}[wrong]

    with pytest.raises(StoreError, match="A: rows 0–49"):
        multiply(Wrong(A), B, device="cpu")


def test_unknown_extents_are_said():
    da = pytest.importorskip("dask.array")
    x = da.from_array(A)
    with pytest.raises(InputError, match="compute_chunk_sizes"):
        multiply(x[x[:, 0] > 0], B, device="cpu")


def test_a_private_memory_map_keeps_what_was_written_to_it(tmp_path):
    np.save(tmp_path / "a.npy", A)
    private = np.load(tmp_path / "a.npy", mmap_mode="c")
    private[3] = 5
    right = np.array(private) @ B
    assert np.array_equal(multiply(private, B, device="cpu").array, right)
    assert np.array_equal(private @ B, right)
    shared = np.load(tmp_path / "a.npy", mmap_mode="r+")
    shared[4] = 6
    assert np.array_equal(multiply(shared, B, device="cpu").array, np.array(shared) @ B)
    assert (shared[4] == 6).all()


def test_a_store_in_memory_is_no_lazy_input():
    array = zarr.create_array(zarr.storage.MemoryStore(), shape=A.shape, dtype="f4", chunks=(7, 7))
    array[...] = A
    result = multiply(array, B, device="cpu")
    assert result.plan.ledger["lazy inputs"] == 0
    assert np.array_equal(result.array, A @ B)


def test_the_limit_that_verify_names_does_for_all_operands():
    lazy = Lazy(np.ones((4000, 600)), chunks=(1000, 600))
    arrays = lazy, np.ones((600, 2)), np.full((4000, 2), 600.0)
    with pytest.raises(BudgetError) as raised:
        verify(*arrays, memory_limit="1MiB")
    assert verify(*arrays, memory_limit=raised.value.minimum_memory_limit).ok
