"""--resume: however paths are spelled, with options that are not given again, and of a C that is finished."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make, ooc
from interruption import interrupted, old_c

import ooc_gemm
from ooc_gemm import InputError
from ooc_gemm.planning import candidates
from ooc_gemm.storage.format import unfinished

M, N, K = 300, 260, 200
A, B, OLD = (
    np.random.default_rng(7).integers(-9, 9, shape).astype("f4") for shape in ((M, K), (K, N), (M, N))
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a and b; all sums are exact."""
    monkeypatch.chdir(tmp_path)
    make("a", A, chunks=(64, 64), compressors=None)
    make("b", B, chunks=(64, 64), compressors=None)
    return tmp_path


# ------------------------------------------------------------------------------------ how a path is spelled


@pytest.mark.parametrize("begun", ["plain", "absolute"])
@pytest.mark.parametrize("spelled", ["dot", "absolute", "link", "folder", "url", "opened", "slash"])
def test_paths_may_be_spelled_differently(here, monkeypatch, begun, spelled):
    first = [str(here / name) if begun == "absolute" else name for name in "abc"]
    interrupted(monkeypatch, 7, *first, chunks=(50, 52))
    paths = {
        "dot": lambda name: f"./{name}",
        "absolute": lambda name: str(here / name),
        "link": lambda name: f"link-{name}",
        "folder": lambda name: f"../{name}",
        "url": lambda name: f"file://{here}/{name}",
        "opened": lambda name: zarr.open_array(name, mode="r") if name in "ab" else name,
        "slash": lambda name: f"{name}/",
    }
    for name in "abc":
        Path(f"link-{name}").symlink_to(name)
    if spelled == "folder":
        Path("elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
    result = ooc_gemm.multiply(*map(paths[spelled], "abc"), resume=True, chunks=(50, 52))
    assert result.bytes_written == 23 * 50 * 52 * 4
    assert np.array_equal(zarr.open_array(here / "c", mode="r")[...], A @ B)


def test_beta_and_paths_spelled_differently(here, monkeypatch):
    old_c("c", OLD)
    interrupted(monkeypatch, 7, "a", "b", "c", beta=2)
    ooc_gemm.multiply("./a", here / "b", here / "c", resume=True, beta=2)
    assert np.array_equal(zarr.open_array("c", mode="r")[...], A @ B + 2 * OLD)


def test_the_name_of_an_input_does_not_make_it_the_same(here, monkeypatch):
    interrupted(monkeypatch, 7, "a", "b", "c", chunks=(50, 52))
    Path("elsewhere").mkdir()
    shutil.copytree("a", "elsewhere/a")
    shutil.copytree("b", "elsewhere/b")
    monkeypatch.chdir("elsewhere")
    with pytest.raises(InputError, match=r"a was changed since, or is another array; b was changed since"):
        ooc_gemm.multiply("a", "b", "../c", resume=True)


def test_no_place_is_written_down(here):
    """What a finished C says of its inputs goes with it to others."""
    ooc_gemm.multiply(str(here / "a"), "b", "c")
    record = zarr.open_array("c", mode="r").attrs["ooc-gemm"]
    assert record["inputs"]["b"]["name"] == "b"
    ooc_gemm.multiply("a", "b", "c", force=True)
    assert str(here) not in Path("c/zarr.json").read_text()


def test_a_copy_without_its_times_says_so(here, monkeypatch):
    interrupted(monkeypatch, 7, "a", "b", "c", chunks=(50, 52))
    shutil.copytree("c", "d", copy_function=shutil.copy)
    for path in Path("d").rglob("*"):
        os.utime(path)
    with pytest.raises(InputError, match=r"d cannot be continued: .*copied without its times.*cp -a"):
        ooc_gemm.multiply("a", "b", "d", resume=True)
    shutil.copytree("c", "e")
    ooc_gemm.multiply("a", "b", "e", resume=True)
    assert np.array_equal(zarr.open_array("e", mode="r")[...], A @ B)


# -------------------------------------------------------------------------- options that are not given again


def stored(path):
    array = zarr.open_array(path, mode="r")
    return array.chunks, array.shards, array.dtype, array.metadata.codecs


OPTIONS = [
    {"chunks": (50, 52)},
    {"chunks": (25, 26), "shards": (50, 52)},
    {"compressor": "zstd:5", "chunks": (64, 64)},
    {"out_dtype": "f8", "chunks": (64, 64)},
    {"alpha": 2, "chunks": (50, 52)},
    {"alpha": -0.25, "compressor": "blosc", "chunks": (50, 52), "out_dtype": "complex128"},
    {"alpha": 1 - 2j, "out_dtype": "complex64", "chunks": (50, 52)},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("product", ["multiply", "gram"])
def test_what_is_not_given_again_is_as_it_was_begun(here, monkeypatch, options, product):
    operands, run = (("a", "b"), ooc_gemm.multiply) if product == "multiply" else (("a",), ooc_gemm.gram)
    whole = run(*operands, "whole", **options)
    interrupted(monkeypatch, 4, *operands, "c", run=run, **options)
    result = run(*operands, "c", resume=True)
    assert 0 < result.bytes_written < whole.bytes_written
    assert stored("c") == stored("whole")
    assert np.array_equal(zarr.open_array("c", mode="r")[...], zarr.open_array("whole", mode="r")[...])


@pytest.mark.parametrize("product", ["multiply", "gram"])
def test_beta_is_not_given_again(here, monkeypatch, product):
    operands, run = (("a", "b"), ooc_gemm.multiply) if product == "multiply" else (("a",), ooc_gemm.gram)
    old = OLD if product == "multiply" else OLD[:, :1] + OLD[:, :1].T
    old_c("c", old)
    interrupted(monkeypatch, 4, *operands, "c", run=run, beta=3, alpha=2)
    run(*operands, "c", resume=True)
    expected = 2 * (A @ B if product == "multiply" else A @ A.T) + 3 * old
    assert np.array_equal(zarr.open_array("c", mode="r")[...], expected)


def test_the_layout_that_c_has_may_be_given(here, monkeypatch):
    """Also where it was not given first."""
    monkeypatch.setattr(candidates, "CHUNK_BYTES", (64 << 10, 32 << 10, 16 << 10))
    interrupted(monkeypatch, 2, "a", "b", "c")
    metadata = json.loads(Path("c/zarr.json.partial").read_text())
    chunks = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
    assert chunks != (M, N)
    ooc_gemm.multiply("a", "b", "c", resume=True, chunks=chunks, out_dtype="f4", alpha=1, compressor="none")
    assert np.array_equal(zarr.open_array("c", mode="r")[...], A @ B)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--alpha", "1"], "alpha was 2.0 and is 1.0"),
        (["--compressor", "none"], "compressor was zstd and is none"),
        (["--chunks", "50,50"], "chunks was [50, 52] and is [50, 50]"),
        (["--out-dtype", "float32"], "--out-dtype was float64 and is float32"),
        (["--beta", "1"], "beta was 0.0 and is 1.0"),
    ],
)
def test_what_is_given_must_be_the_same_even_if_it_is_the_default(here, monkeypatch, args, said):
    options = {"alpha": 2, "compressor": "zstd", "chunks": (50, 52), "out_dtype": "f8"}
    interrupted(monkeypatch, 7, "a", "b", "c", **options)
    done = ooc("multiply", "a", "b", "c", "--resume", *args)
    assert (done.code, said in done.err) == (2, True), done
    assert ooc("multiply", "a", "b", "c", "--resume").code == 0
    assert np.array_equal(zarr.open_array("c", mode="r")[...], 2 * (A.astype("f8") @ B))


@pytest.mark.parametrize("damage", ["1e999j", "two", None, [1]])
@pytest.mark.parametrize("option", ["alpha", "chunks", "compressor", "out_dtype"])
def test_a_journal_with_options_that_cannot_be(here, monkeypatch, option, damage):
    interrupted(monkeypatch, 7, "a", "b", "c", chunks=(50, 52))
    path = Path("c", unfinished.JOURNAL)
    head, *rest = path.read_text().splitlines(keepends=True)
    entry = json.loads(head)
    entry["options"][option] = damage
    path.write_text("".join([json.dumps(entry) + "\n", *rest]))
    if (option, damage) == ("chunks", None):
        assert ooc("multiply", "a", "b", "c", "--resume").code == 0
        return
    done = ooc("multiply", "a", "b", "c", "--resume")
    assert done.code == 2, done
    assert done.err.startswith("Error: ")
    assert done.err.count("\n") == 1


# ------------------------------------------------------------------------------------- a C that is finished


def files_of(folder):
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("options", [[], ["--chunks", "50,52"], ["--alpha", "2", "--compressor", "zstd"]])
@pytest.mark.parametrize("command", [["multiply", "a", "b", "c"], ["gram", "a", "c"]])
def test_the_same_line_again(here, command, options):
    line = [*command, *options, "--resume", "-d", "cpu"]
    assert ooc(*line).code == 0
    before = files_of("c")
    done = ooc(*line)
    assert done.code == 0
    assert "c is finished already" in done.err
    done = ooc(*line, "--json")
    result = json.loads(done.out)
    assert (result["bytes_read"], result["bytes_written"]) == (0, 0)
    assert result["blocks_resumed"] == result["blocks"] > 0
    assert ooc(*command, "--resume").code == 0
    assert files_of("c") == before


def test_the_same_call_again(here):
    notices = []
    for product, operands in ((ooc_gemm.multiply, ("a", "b", "c")), (ooc_gemm.gram, ("a", "g"))):
        product(*operands, resume=True)
        result = product(*operands, resume=True, notice=notices.append, verify=True)
        assert (result.bytes_read, result.bytes_written, result.verified) == (0, 0, None)
    assert [text.partition(",")[0] for text in notices] == ["c is finished already", "g is finished already"]


@pytest.mark.parametrize("version", [2, 3])
def test_beta_comes_in_once_although_the_line_is_run_again(here, version):
    old_c("c", OLD, zarr_format=version)
    for _ in range(3):
        ooc_gemm.multiply(
            "a", "b", "c", beta=2, resume=zarr.open_array("c").attrs.get("ooc-gemm") is not None
        )
    assert np.array_equal(zarr.open_array("c", mode="r")[...], A @ B + 2 * OLD)
    # Without resume it is another update.
    ooc_gemm.multiply("a", "b", "c", beta=2)
    assert np.array_equal(zarr.open_array("c", mode="r")[...], 3 * (A @ B) + 4 * OLD)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("input", "a was changed since, or is another array"),
        ("other", "b was changed since, or is another array"),
        ("alpha", "alpha was 1.0 and is 2.0"),
        ("operation", "op(A) was none and is transpose"),
        ("chunks", "chunks was"),
        ("chunk", "its chunks were changed since"),
        ("gone", "its chunks were changed since"),
        ("record", "is not the unfinished result"),
    ],
)
def test_a_finished_c_of_something_else_is_no_success(here, change, said):
    make("square", np.ones((K, K), "f4"), chunks=(64, 64))
    a, args = ("square", ["--transpose-a"]) if change == "operation" else ("a", [])
    assert ooc("multiply", a, "b", "c").code == 0
    if change == "operation":
        args = []
        assert ooc("multiply", a, "b", "c", "--transpose-a", "--resume").code == 2
        said = "op(A) was none and is transpose"
        args = ["--transpose-a"]
    elif change == "input":
        zarr.open_array("a")[0, 0] = 99
    elif change == "other":
        shutil.copytree("b", "b2")
        args = ["b2"]
    elif change == "alpha":
        args = ["--alpha", "2"]
    elif change == "chunks":
        args = ["--chunks", "7,9"]
    elif change == "chunk":
        zarr.open_array("c")[0, 0] += 1
    elif change == "gone":
        next(Path("c/c").rglob("0")).rename("elsewhere")
    elif change == "record":
        path = Path("c/zarr.json")
        found = json.loads(path.read_text())
        found["attributes"]["ooc-gemm"].pop("result")
        path.write_text(json.dumps(found))
    b = "b2" if args == ["b2"] else "b"
    before = files_of("c")
    done = ooc("multiply", a, b, "c", "--resume", *(arg for arg in args if arg != "b2"))
    assert (done.code, said in done.err) == (2, True), done
    assert "leave out --resume" in done.err
    assert done.err.count("\n") == 1
    assert files_of("c") == before


@pytest.mark.parametrize(
    "record", [7, [], {}, {"inputs": 3}, {"inputs": {"a": 1}, "options": {}, "result": ""}]
)
def test_a_record_that_is_none(here, record):
    ooc_gemm.multiply("a", "b", "c")
    array = zarr.open_array("c")
    array.attrs["ooc-gemm"] = record
    with pytest.raises(InputError, match="is not the unfinished result"):
        ooc_gemm.multiply("a", "b", "c", resume=True)
