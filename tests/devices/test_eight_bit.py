"""Products of 8-bit integers as they are, on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import zarr
from conftest import make
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc_gemm
from examples import examples
from ooc_gemm.devices.cpu import eight_bit, matmul_integer, tiles
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.eight_bit import DEPTH, LEAST_OPERATIONS, EightBit, scratch_bytes
from ooc_gemm.devices.cpu.tiles import TILE
from ooc_gemm.devices.several import Several

needs_it = pytest.mark.skipif(
    not matmul_integer.exact(), reason="no onnxruntime, or this processor has no dot products of bytes"
)
TYPES = [("i1", "i1"), ("u1", "u1"), ("i1", "u1"), ("u1", "i1")]
LARGE = 4096, 4096, 4096


def arithmetic(a, b, shape=LARGE, kernel="int8", bound=2**31 - 1):
    return CPU(1).arithmetic(np.dtype(a), np.dtype(b), np.dtype("i4"), shape, bound, kernel, "highest")


def random(rng, shape, dtype):
    """Values of the whole range, among them many of the largest."""
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max + 1, shape).astype(dtype)
    x[rng.random(shape) < 0.3] = info.max
    x[rng.random(shape) < 0.3] = info.min
    return x


def laid_out(x, by_rows):
    return np.ascontiguousarray(x) if by_rows else np.ascontiguousarray(x.T).T


@needs_it
@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 150), st.integers(1, 150),
    st.one_of(st.integers(1, 150), st.integers(DEPTH - 2, 2 * DEPTH + 3)),
    st.sampled_from(TYPES), st.booleans(), st.booleans(), st.sampled_from([1, -3]),
    st.sampled_from([0, 1, 2]), st.sampled_from(["i4", "i8"]), st.integers(0, 2**32),
)  # fmt: skip
def test_a_tile_of_every_layout(m, n, k, types, rows_a, rows_b, alpha, beta, block, seed):
    rng = np.random.default_rng(seed)
    a, b = (random(rng, shape, dtype) for shape, dtype in zip(((m, k), (k, n)), types, strict=True))
    whole = rng.integers(-1000, 1000, (m + 5, n + 7)).astype(block)
    out, old = whole[2 : m + 2, 3 : n + 3], whole.copy()
    work = EightBit(replace(arithmetic(*types), block=np.dtype(block)), 1).tile(
        laid_out(a, rows_a), laid_out(b, rows_b), alpha, beta, out
    )
    work(slice(0, m), slice(0, n))
    wanted = alpha * (a.astype(np.int64) @ b.astype(np.int64)) + beta * old[2 : m + 2, 3 : n + 3]
    if block == "i4":
        wanted = wanted.astype(np.int32)  # which wraps around as sums do
    assert (out == wanted).all()
    whole[2 : m + 2, 3 : n + 3] = old[2 : m + 2, 3 : n + 3]
    assert (whole == old).all()


@needs_it
def test_the_largest_tile_fits_its_scratch():
    a, b = np.full((TILE + 1, 2 * DEPTH), 255, "u1"), np.full((2 * DEPTH, TILE + 1), -128, "i1")
    found = arithmetic("u1", "i1", bound=2**40)
    assert found.block == np.int64
    out = np.empty((TILE + 1, TILE + 1), found.block)
    EightBit(found, 1).tile(a, b, 1, 0, out)(slice(0, TILE + 1), slice(0, TILE + 1))
    assert (out == -255 * 128 * 2 * DEPTH).all()
    assert scratch_bytes(found) < 24 << 20


@needs_it
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_arrays(types, transposed, tmp_path):
    rng = np.random.default_rng(1)
    a, b = random(rng, (70, 300), types[0]), random(rng, (300, 90), types[1])
    stored = [x.T if transposed else x for x in (a, b)]
    paths = [make(str(tmp_path / name), x, chunks=(40, 70)) for name, x in zip("ab", stored, strict=True)]
    operands = [ooc_gemm.Operand(path, transpose=transposed) for path in paths]
    c = str(tmp_path / "c")
    result = ooc_gemm.multiply(*operands, c, kernel="int8", device="cpu", verify=True)
    assert result.kernel == "int8"
    assert result.bytes_read == result.plan.bytes_read
    assert (zarr.open_array(c)[:] == a.astype(int) @ b.astype(int)).all()


@needs_it
@pytest.mark.parametrize("dtype", ["i1", "u1"])
@pytest.mark.parametrize("transpose", [False, True])
def test_gram_matrices(dtype, transpose, tmp_path):
    x = random(np.random.default_rng(2), (120, 230), dtype)
    result = ooc_gemm.gram(
        make(str(tmp_path / "a"), x, chunks=(50, 70)),
        None,
        kernel="int8",
        device="cpu",
        transpose=transpose,
        verify=True,
    )
    wide = x.astype(int)
    assert (result.array == (wide.T @ wide if transpose else wide @ wide.T)).all()


@needs_it
@pytest.mark.parametrize("kernel", ["int8", "auto"])
def test_several_devices(kernel, monkeypatch):
    monkeypatch.setattr(eight_bit, "LEAST_OPERATIONS", 1)
    rng = np.random.default_rng(3)
    a, b = random(rng, (300, 200), "i1"), random(rng, (200, 90), "u1")
    result = ooc_gemm.multiply(a, b, device=Several([CPU(1), CPU(1)]), kernel=kernel)
    assert result.kernel == "int8"
    assert (result.array == a.astype(int) @ b.astype(int)).all()


@needs_it
@pytest.mark.parametrize("types", TYPES)
def test_the_check_finds_a_wrong_bit(types, monkeypatch):
    rng = np.random.default_rng(4)
    a, b = random(rng, (60, 5000), types[0]), random(rng, (5000, 50), types[1])
    assert ooc_gemm.multiply(a, b, device=CPU(1), kernel="int8", verify=True).verified

    add = tiles.add

    def spoiled(products, *others):
        products[7, 3] += 1 << 9
        add(products, *others)

    monkeypatch.setattr(tiles, "add", spoiled)
    with pytest.raises(ooc_gemm.VerificationError):
        ooc_gemm.multiply(a, b, device=CPU(1), kernel="int8", verify=True)


@needs_it
def test_large_products_take_it_and_small_ones_do_not():
    assert arithmetic("i1", "u1", kernel="auto").kernel == "int8"
    assert arithmetic("i1", "u1", kernel="auto").panels == (np.int8, np.uint8)
    side = int((LEAST_OPERATIONS / 2) ** (1 / 3)) - 1
    assert arithmetic("i1", "u1", (side,) * 3, "auto").kernel == "blas"
    assert arithmetic("i1", "u1", kernel="blas").kernel == "blas"
    assert arithmetic("i2", "i2", kernel="auto").kernel == "blas"


@needs_it
def test_memory_too_small_for_it_is_enough_for_blas(tmp_path, monkeypatch):
    monkeypatch.setattr(matmul_integer, "HOST_BYTES", 1 << 40)
    monkeypatch.setattr(eight_bit, "LEAST_OPERATIONS", 1)
    a = np.ones((50, 60), "i1")
    result = ooc_gemm.multiply(a, a.T, device="cpu", memory_limit="1GiB")
    assert result.kernel == "blas"
    assert (result.array == 60).all()


@pytest.mark.parametrize(
    ("installed", "said"), [(False, "no onnxruntime"), (True, "not multiply bytes exactly")]
)
def test_what_is_not_exact_is_not_used(installed, said, monkeypatch):
    monkeypatch.setattr(matmul_integer, "installed", lambda: installed)
    monkeypatch.setattr(matmul_integer, "exact", lambda: False)
    found = arithmetic("i1", "i1", kernel="auto")
    assert found.kernel == "blas"
    assert ("ooc-gemm[int8]" in found.why) == (not installed)
    with pytest.raises(ooc_gemm.InputError, match=said):
        arithmetic("i1", "i1")


def test_products_that_saturate_are_noticed(monkeypatch):
    """What processors without these instructions do: pairs of products are added up in 16 bits."""

    def saturating(*_):
        def multiply(a, b, out):
            pairs = a.astype(int)[:, None, :] * b.astype(int).T[None]
            out[...] = np.clip(pairs.reshape(*pairs.shape[:2], -1, 2).sum(-1), -(2**15), 2**15 - 1).sum(-1)

        return multiply

    monkeypatch.setattr(matmul_integer, "installed", lambda: True)
    monkeypatch.setattr(matmul_integer, "model", saturating)
    assert not matmul_integer.exact.__wrapped__()


def test_other_kernels_are_refused_with_the_names_of_those_there_are():
    with pytest.raises(ooc_gemm.InputError, match="use 'blas' or 'auto'"):
        arithmetic("i2", "i1")
    with pytest.raises(ooc_gemm.InputError, match="use 'blas', 'int8' or 'auto'"):
        arithmetic("i1", "u1", kernel="slices")
