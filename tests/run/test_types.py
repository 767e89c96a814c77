"""The type of C: what it is, where that is said, and what becomes of results that it cannot hold."""

import itertools
import json
import warnings

import numpy as np
import pytest
import zarr
from conftest import make, ooc

import ooc_gemm
from ooc_gemm import multiply

INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
OTHERS = ["f2", "f4", "f8", "c8", "c16"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("a", "b"), list(itertools.product(INTEGERS + OTHERS, repeat=2)))
def test_the_type_of_c(a, b):
    result = multiply(np.full((2, 3), 5, a), np.full((3, 2), 7, b), device="cpu")
    if a in INTEGERS and b in INTEGERS:
        expected = "int32" if a[1] == b[1] == "1" else "int64"
    else:
        expected = np.result_type(a, b).name
    assert result.out_dtype == result.array.dtype.name == expected
    assert np.all(result.array == 105)
    assert f"type of C      {expected}, of {np.dtype(a)} · {np.dtype(b)}" in str(result.plan)


def test_the_command_shows_the_type(here):
    make("a", np.full((4, 3), 300, "i2"), chunks=(4, 3))
    make("b", np.full((3, 5), 300, "i2"), chunks=(3, 5))
    table = ooc("plan", "a", "b", "-d", "cpu").out
    assert "type of C      int64, of int16 · int16; sums are exact" in table
    assert json.loads(ooc("plan", "a", "b", "-d", "cpu", "--json").out)["out_dtype"] == "int64"
    done = ooc("multiply", "a", "b", "c", "-d", "cpu")
    assert done.out.startswith("c: 4×5 int64 = 4×3 · 3×5 int16\n")
    assert zarr.open_array("c")[0, 0] == 270_000  # int16 ends at 32767
    narrow = ooc("multiply", "a", "b", "d", "-d", "cpu", "--out-dtype", "int16")
    assert narrow.code == 1
    assert "does not fit int16" in narrow.err


@pytest.mark.parametrize("dtype", INTEGERS)
def test_no_integer_wraps_when_c_is_updated(here, dtype):
    """β·C may pass int64 although no product does."""
    ones = np.ones((4, 4), dtype)
    old = make("c", np.full((4, 4), 2**62), chunks=(4, 4))
    with pytest.raises(ooc_gemm.RangeError):
        multiply(ones, ones, old, beta=2, device="cpu")
    old = make("d", np.full((4, 4), 2**61), chunks=(4, 4))
    multiply(ones, ones, old, beta=2, device="cpu")
    assert np.all(zarr.open_array(old)[...] == 2**62 + 4)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_no_integer_wraps_by_a_large_alpha(dtype):
    ones = np.ones((4, 4), dtype)
    with pytest.raises(ooc_gemm.RangeError):
        multiply(ones, ones, alpha=2**62, device="cpu", out_dtype="i8")
    assert np.all(multiply(ones, ones, alpha=2**60, device="cpu", out_dtype="i8").array == 2**62)


# --------------------------------------------------------------------------------- finite, but not in C


NARROW = [("f2", None), ("f4", "f2"), ("f8", "f4"), ("f8", "f2"), ("c16", "c8")]


def beyond(dtype, out):
    """A and B of which three results are past `out`, and one is infinite in A already."""
    a = np.ones((70, 50), dtype)
    a[[3, 64, 69]] = float(np.finfo(out or dtype).max) / 8
    a[5, 0] = np.inf
    b = np.zeros((50, 40), dtype)
    b[:, 2] = 1
    return a, b


@pytest.mark.parametrize(("dtype", "out"), NARROW)
@pytest.mark.parametrize("layout", ["array", "plain", "zstd", "shards", "memory"])
def test_results_that_became_infinite_are_counted(here, dtype, out, layout):
    a, b = beyond(dtype, out)
    options = {
        "array": {"c": None},
        "plain": {"c": "c", "chunks": (32, 32)},
        "zstd": {"c": "c", "chunks": (32, 32), "compressor": "zstd"},
        "shards": {"c": "c", "chunks": (16, 16), "shards": (32, 32), "compressor": "zstd"},
        "memory": {"c": "memory"},
    }[layout]
    if layout == "memory":
        options["c"] = zarr.create_array(
            zarr.storage.MemoryStore(), shape=(70, 40), chunks=(32, 32), dtype=np.dtype(out or dtype)
        )
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = multiply(
            a, b, device="cpu", out_dtype=out, force=layout == "memory", notice=said.append, **options
        )
    assert result.overflowed == result.to_dict()["overflowed"] == 3
    name = {"array": "C", "memory": "memory://"}.get(layout, "c")
    wider = {"f2": "float32", "f4": "float64", "c8": "complex128"}[out or dtype]
    (text,) = said
    assert text.startswith(f"3 elements are infinite in {name}")
    assert text.endswith(f"give out_dtype='{wider}' to keep them")


@pytest.mark.parametrize(("dtype", "out"), NARROW)
def test_without_a_notice_it_is_a_warning(dtype, out):
    a, b = beyond(dtype, out)
    with pytest.warns(UserWarning, match="3 elements are infinite in C, although") as caught:
        result = multiply(a, b, device="cpu", out_dtype=out)
    assert caught[0].filename == __file__
    assert np.all(np.isinf(result.array[[3, 64, 69], 2]))


def test_the_command_says_how_many_became_infinite(here):
    a, b = beyond("f2", None)
    make("a", a, chunks=(32, 32))
    make("b", b, chunks=(32, 32))
    done = ooc("multiply", "a", "b", "c", "-d", "cpu", "--json")
    assert done.code == 0
    assert json.loads(done.out)["overflowed"] == 3
    assert done.err == (
        "Note: 3 elements are infinite in c, although the product is finite there: float16 ends at 65504; "
        "give --out-dtype float32 to keep them\n"
    )


@pytest.mark.parametrize("out", [None, "f4"])
def test_nothing_is_said_of_what_fits(out):
    a = np.full((70, 50), 10, "f2")
    a[1] = np.inf
    assert multiply(a, a.T, device="cpu", out_dtype=out).overflowed == 0
