"""Options that are refused, on the command line and in Python: one sentence, and no file is touched."""

import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make, ooc
from outcome import snapshot
from refusals import make_arrays, refused

import ooc_gemm


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×50), b (50×40), and an old result."""
    make_arrays(tmp_path, monkeypatch)
    return tmp_path


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *((["-M", size], ["not a size", "512MiB"]) for size in ("lots", "-5MiB", "0", "", "nan", "MiB")),
        *((["-M", size], ["not a size", "512MiB"]) for size in ("1e400", "5 parsecs", "1,5GiB")),
        (["-D", "much"], ["'much' is not a size"]),
        (["-M", "1MiB"], ["smallest that would do is", "MiB)"]),
        (["-d", "tpu"], ["'tpu' is not a device", "auto, cpu, cuda"]),
        (["-d", ""], ["'' is not a device"]),
        (["-d", "cuda:0,0"], ["'cuda:0,0'", "cuda:0,1 or cuda:all"]),
        (["-d", "cpu", "--kernel", "nonsense"], ["'nonsense'", "'auto'"]),
        (["-d", "cpu", "--kernel", "cublas"], ["'cublas' cannot multiply float32", "'blas' or 'auto'"]),
        (["--out-dtype", "nope"], ["'nope'", "choose one of float16"]),
        (["--out-dtype", "bfloat16"], ["'bfloat16'", "choose one of float16"]),
        (["--out-dtype", "O"], ["'O'", "choose one of"]),
        (["--out-dtype", "int32"], ["C cannot hold float32 results as int32", "--out-dtype"]),
        (["--chunks", "0,5"], ["chunks (0, 5)", "two positive numbers"]),
        (["--shards", "10,10"], ["shards (10, 10)", "--chunks"]),
        (["--chunks", "3,3", "--shards", "10,10"], ["shards (10, 10)", "divide"]),
        (["--chunks", f"{1 << 62},1"], ["smallest that would do"]),
        *((["--compressor", name], [name, "choose none, zstd"]) for name in ("lzma", "zstd:x", "zstd:99")),
        (["--alpha", "nan"], ["alpha is nan", "finite"]),
        (["--alpha", "1j"], ["alpha is complex", "--out-dtype"]),
    ],
)  # fmt: skip
def test_options(here, options, words):
    refused("multiply", "a", "b", "c", *options, words=words)
    refused("plan", "a", "b", *options, words=words)
    refused("gram", "a", "c", *options, words=words)


def test_a_device_that_is_not_here(here):
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception:
        refused("multiply", "a", "b", "c", "-d", "cuda", words=["there is no", "--device cpu"])
    else:
        refused("multiply", "a", "b", "c", "-d", f"cuda:{count}", words=[f"no GPU {count}"])


def test_a_kernel_that_cannot_do_the_type(here):
    make("ints", np.ones((50, 60), "i8"), chunks=(20, 20))
    for command in (["multiply", "ints", "ints", "c"], ["plan", "ints", "ints"]):
        refused(*command, "--transpose-b", "-d", "cpu", "--kernel", "blas", words=["int64", "'auto'"])
    alpha = ["--alpha", "0.5"]
    refused("multiply", "ints", "ints", "c", "--transpose-b", *alpha, words=["alpha is 0.5", "--out-dtype"])


@pytest.mark.parametrize("trace", ["a/zarr.json", "old/t", "nowhere/t", "folder", "b/new"])
def test_a_trace_that_has_no_place(here, trace):
    Path("folder").mkdir()
    refused("multiply", "a", "b", "old", "-f", "--trace", trace, words=[f"the trace {trace}"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["old"], ["old exists", "-f"]),
        (["group", "-f"], ["group is a Zarr group"]),
        (["file", "-f"], ["file exists", "left alone"]),
        (["r", "--dtype", "bool"], ["'bool'", "choose one of"]),
        (["r", "--dtype", "x"], ["'x'", "choose one of"]),
        (["r", "-M", "1MiB"], ["smallest that would do"]),
        (["r", "--seed", "-1"], ["seed -1 is negative", "0 or more"]),
        (["r", "--chunks", "0,3"], ["chunks (0, 3)"]),
        (["r", "--shards", "3,3"], ["shards (3, 3)"]),
        (["r", "--compressor", "lzma"], ["lzma"]),
    ],
)
def test_random(here, args, words):
    zarr.create_group("group")
    Path("file").write_text("mine")
    refused("random", "--shape", "5,5", *args, words=words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["verify", "a", "b", "a"], ["the shapes do not fit", "a 60×50", "check the arrays"]),
        (["verify", "a", "b", "old", "--rounds", "0"], ["rounds is 0", "1 or more"]),
        (["verify", "a", "b", "old", "--seed", "-1"], ["seed is -1", "0 or more"]),
        (["verify", "a", "b", "old", "-M", "1MiB"], ["smallest that would do"]),
        (["bench", "kernels", "--from", "a/zarr.json/.."], None),
        (["bench", "kernels", "--from", "text"], ["text is not a report that --json printed"]),
        (["bench", "kernels", "--from", "other"], ["other is not a report that this command"]),
        (["bench", "engine", "--from", "other"], ["other is not a report that this command"]),
        (["bench", "stress", "--from", "other"], ["other is not a report that this command"]),
    ],
)
def test_other_commands(here, args, words):
    Path("text").write_text("no JSON")
    Path("other").write_text('{"rows": [{}]}')
    if words is None:
        assert ooc(*args).code == 2
    else:
        refused(*args, words=words)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["multiply"],
        ["multiply", "a", "b"],
        ["gram", "a"],
        ["gram", "a", "c", "d"],
        ["gram", "a", "c", "--transpose-a"],
        ["multiply", "a", "b", "c", "d"],
        ["multiply", "a", "b", "c", "--nope"],
        ["multiply", "a", "b", "c", "--chunks", "5"],
        ["multiply", "a", "b", "c", "--chunks", "²,5"],
        ["multiply", "a", "b", "c", "--alpha", "x"],
        ["multiply", "a", "b", "c", "--precision", "low"],
        ["random", "r"],
        ["random", "r", "--shape", "5,-1"],
        ["info", "--measure", "nope"],
        ["info", "."],
        ["bench", "io", "nope"],
        ["bench", "engine", "--m", "3"],
        ["bench", "engine", "--layout", "nope"],
        ["bench", "nonsense"],
    ],
)
def test_usage(here, args):
    before = snapshot(".")
    done = ooc(*args)
    assert done.code == 2
    assert done.out == ""
    assert "Usage: ooc-gemm" in done.err
    assert "Traceback" not in done.err
    assert snapshot(".") == before


# ------------------------------------------------------------------------------------------------ in Python


def test_errors_are_also_the_builtin_that_fits(here):
    with pytest.raises(ValueError, match="nope does not exist"):
        ooc_gemm.multiply("nope", "b")
    with pytest.raises(MemoryError, match="smallest"):
        ooc_gemm.plan("a", "b", memory_limit="1MiB")
    os.truncate("a/c/1/1", 100)
    with pytest.raises(OSError, match="c/1/1"):
        ooc_gemm.multiply("a", "b")
    for c in (5, np.zeros((60, 40))):
        with pytest.raises(ooc_gemm.InputError, match="cannot be written to"):
            ooc_gemm.multiply("a", "b", c)
    with pytest.raises(ooc_gemm.InputError, match=r"A is no array \(its type is int\); give one"):
        ooc_gemm.multiply(5, "b")


def test_an_array_in_memory_is_filled():
    c = zarr.create_array(zarr.storage.MemoryStore(), shape=(3, 4), chunks=(3, 4), dtype="f8")
    c[...] = 7
    a, b = np.ones((3, 2)), np.ones((2, 4))
    with pytest.raises(ooc_gemm.InputError, match="has shape"):
        ooc_gemm.multiply(a, np.ones((2, 5)), c)
    assert (c[:] == 7).all()
    for options in ({}, {"force": True}):
        c[...] = 7
        ooc_gemm.multiply(a, b, c, **options)
        assert (c[:] == 2).all()
        assert (zarr.open_array(c.store, mode="r")[:] == 2).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"c": np.ones((3, 3)), "beta": 1}, "the ndarray given cannot be written to; give a path"),
        ({"c": 5}, "the int given cannot be written to; give a path"),
        ({"chunks": 2}, "chunks 2 must be two positive numbers"),
        ({"chunks": (2, "b")}, "must be two positive numbers"),
        ({"shards": (2, 2, 2)}, r"shards \(2, 2, 2\) must be two positive numbers"),
        ({"device": 3}, "'3' is not a device; choose auto"),
        ({"chunks": np.array([2, 0])}, "two positive numbers"),
        ({"c": "made", "compressor": 3}, "3 is not a compressor"),
        ({"c": "made", "compressor": b"zstd"}, "b'zstd' is not a compressor"),
        ({"alpha": 10**400}, "finite in double precision"),
        ({"beta": -(10**400), "c": "made"}, "finite in double precision"),
        ({"a": ooc_gemm.Operand(np.ones((3, 3)), missing="x")}, "missing is 'x'; give a number"),
        ({"a": ooc_gemm.Operand(np.ones((3, 3)), missing=[1])}, "give a number"),
        ({"a": ooc_gemm.Operand(np.ones((3, 3)), center=("rows", 10**400))}, "center holds no real numbers"),
        ({"a": ooc_gemm.Operand(np.ones((3, 3), "i1"), table=[[1], [1, 2]])}, "table holds no numbers"),
    ],
)
def test_options_of_other_types_in_python(here, options, words):
    x = np.ones((3, 3))
    with pytest.raises(ooc_gemm.InputError, match=words):
        ooc_gemm.multiply(**{"a": x, "b": x, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": "x"}, "alpha is 'x', which is not a number"),
        ({"alpha": [1]}, "which is not a number"),
        ({"rounds": 1.5}, "rounds is 1.5; give an integer of 1 or more"),
        ({"rounds": None}, "rounds is None; give an integer"),
        ({"seed": "x"}, "seed is 'x'; give an integer of 0 or more"),
    ],
)
def test_numbers_of_verify_that_are_none(options, words):
    x = np.eye(3)
    assert ooc_gemm.verify(x, x, x, alpha=1).ok
    assert not ooc_gemm.verify(x, x, x, alpha=2**70).ok
    with pytest.raises(ooc_gemm.InputError, match=words):
        ooc_gemm.verify(x, x, x, **options)


def test_chunks_may_be_an_array_of_numpy(here):
    x = np.ones((5, 5))
    assert ooc_gemm.multiply(x, x, "made", chunks=np.array([2, 3])).array.chunks == (2, 3)


def test_a_statistic_on_a_device_that_is_none():
    with pytest.raises(ooc_gemm.InputError, match="'3' is not a device; choose auto"):
        ooc_gemm.pca(np.eye(5), 2, device=3)
