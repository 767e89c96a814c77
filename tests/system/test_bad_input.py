"""Bad input: exit status 2, one sentence that names what is wrong and says what to do, no file touched.
A chunk that turns out to be bad while running: exit status 1, and its name."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import zarr
from conftest import make, ooc
from fsspec.implementations.memory import MemoryFileSystem
from outcome import assert_one_sentence, snapshot

import ooc_gemm

V3, V2 = "zarr.json", ".zarray"
CHUNK = ("chunk_grid", "configuration", "chunk_shape")


def refused(*args, words):
    before = snapshot(".")
    done = ooc(*args)
    assert done.code == 2, done
    assert_one_sentence(done.err, "; ", *words)
    assert done.out == ""
    assert snapshot(".") == before


def corrupted(name, change, file=V3):
    """A 50×40 array, right as the second operand, whose metadata `change` has gone through."""
    options = {"zarr_format": 2} if file == V2 else {}
    make(name, np.ones((50, 40), "f4"), chunks=(20, 20), **options)
    place = Path(name) / file
    described = json.loads(place.read_text())
    place.write_text(change(described) or json.dumps(described))


def put(*keys, value):
    def change(described):
        for key in keys[:-1]:
            described = described[key]
        described[keys[-1]] = value

    return change


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×50), b (50×40), and an old result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    make("a", np.arange(3000, dtype="f4").reshape(60, 50), chunks=(20, 20), compressors=None)
    make("b", np.ones((50, 40), "f4"), chunks=(20, 20))
    make("old", np.full((60, 40), 7, "f4"), chunks=(20, 20))
    return tmp_path


# ---------------------------------------------------------------------------------------------- operands


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope", "b"], ["nope does not exist", "check the path"]),
        (["a", "file:///nope/b"], ["file:///nope/b does not exist"]),
        (["a", "dangling"], ["dangling does not exist"]),
        (["", "b"], ["'' is not a Zarr array"]),
        (["group", "b"], ["group is a Zarr group", "name one of the arrays"]),
        (["plain", "b"], ["plain is not a Zarr array", "check the path"]),
        (["empty", "b"], ["empty is not a Zarr array"]),
        (["a", "file"], ["file is not a Zarr array"]),
        (["a", "vector"], ["vector has shape (50,)", "two dimensions", "reshape"]),
        (["cube", "b"], ["cube has shape (2, 3, 4)", "two dimensions"]),
        (["scalar", "b"], ["scalar has shape ()", "two dimensions"]),
        (["a", "bools"], ["bools holds bool", "convert it to one of float16"]),
        (["a", "dates"], ["dates holds datetime64", "convert"]),
        (["a", "bytes"], ["bytes holds", "convert"]),
        (["a", "unfinished"], ["unfinished is the unfinished result", "make it again"]),
    ],
)
@pytest.mark.parametrize("command", ["multiply", "plan", "verify"])
def test_operands(here, command, args, words):
    zarr.create_group("group")
    Path("plain").mkdir()
    Path("plain/mine").write_text("mine")
    Path("empty").mkdir()
    Path("file").write_text("mine")
    Path("dangling").symlink_to("nowhere")
    make("vector", np.ones(50), chunks=(5,))
    make("cube", np.ones((2, 3, 4)), chunks=(2, 3, 4))
    make("scalar", np.ones(()))
    make("bools", np.ones((50, 40), bool), chunks=(20, 20))
    make("dates", np.zeros((50, 40), "M8[s]"), chunks=(20, 20))
    make("bytes", np.zeros((50, 40), "S4"), chunks=(20, 20), zarr_format=2)
    make("unfinished", np.ones((50, 40)), chunks=(20, 20))
    Path("unfinished", V3).rename(f"unfinished/{V3}.partial")
    c = {"multiply": ["c"], "plan": [], "verify": ["old"]}[command]
    refused(command, *args, *c, words=words)
    if command == "multiply":
        refused("gram", args[0] if args[0] != "a" else args[1], "c", words=words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["a", "a"], ["op(a) is 60×50 and op(a) is 60×50", "inner dimensions", "transpose"]),
        (["a", "b", "--transpose-a"], ["op(a) is 50×60 and op(b) is 50×40", "transpose"]),
        (["a", "b", "--transpose-a", "--adjoint-a"], ["give one of the two"]),
    ],
)
def test_shapes(here, args, words):
    refused("multiply", *args, "c", words=words)
    refused("plan", *args, words=words)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "r16", "string", "variable_length_bytes"])
def test_types_of_version_3(here, name):
    codec = {"string": "vlen-utf8", "variable_length_bytes": "vlen-bytes"}.get(name, "bytes")
    corrupted("odd", lambda d: d.update(data_type=name, codecs=[{"name": codec}], fill_value=""))
    refused("multiply", "a", "odd", "c", words=["odd", "convert it to one of float16"])


@pytest.mark.parametrize("name", ["|O", "bfloat16", "<f16", "<c32", "<U4"])
def test_types_of_version_2(here, name):
    corrupted("odd", lambda described: described.update(dtype=name, fill_value=None), V2)
    refused("multiply", "a", "odd", "c", words=["odd", "convert it to one of float16"])


# ---------------------------------------------------------------------------------------------- metadata


def text(content):
    return lambda described: content


METADATA = {
    "cut off": text('{"zarr_format": 3, "nod'),
    "blank": text(" "),
    "a list": text("[1, 2]"),
    "null": text("null"),
    "no type": put("data_type", value=None),
    "no shape": lambda described: described.pop("shape") and None,
    "format 7": put("zarr_format", value=7),
    "no codec": put("codecs", value=[]),
    "a codec of nobody's": put("codecs", value=[{"name": "nonsense"}]),
    "an irregular grid": put("chunk_grid", value={"name": "rectilinear", "configuration": {}}),
    "chunks of 2^60 bytes": put(*CHUNK, value=[1 << 29, 1 << 29]),
    "chunks past 64 bits": put(*CHUNK, value=[1 << 60, 1 << 60]),
    "long chunks": put(*CHUNK, value=[20, 1 << 60]),
    "negative chunks": put(*CHUNK, value=[-20, 20]),
    "zero chunks": put(*CHUNK, value=[0, 20]),
    "half chunks": put(*CHUNK, value=[20.5, 20]),
    "chunks of words": put(*CHUNK, value=["x", 20]),
    "one chunk size": put(*CHUNK, value=[20]),
    "a long shape": put("shape", value=[50, 1 << 62]),
    "a shape past 64 bits": put("shape", value=[50, 1 << 70]),
    "a huge shape of few chunks": lambda d: (
        put("shape", value=[50, 1 << 62])(d) or put(*CHUNK, value=[1, 1 << 44])(d)
    ),
    "too many chunks": put("shape", value=[50, 1 << 40]),
    "a negative shape": put("shape", value=[-50, 40]),
    "no number as shape": put("shape", value=None),
    "half a shape": put("shape", value=[50.5, 40]),
}
METADATA_2 = {
    "cut off": text('{"zarr_format": 2, "sha'),
    "chunks of 2^60 bytes": put("chunks", value=[1 << 29, 1 << 29]),
    "zero chunks": put("chunks", value=[20, 0]),
    "negative chunks": put("chunks", value=[-20, 20]),
    "a long shape": put("shape", value=[50, 1 << 62]),
    "a compressor of nobody's": put("compressor", value={"id": "nonsense"}),
    "order Z": put("order", value="Z"),
}


@pytest.mark.parametrize("fault", METADATA)
def test_metadata_of_version_3(here, fault):
    corrupted("bad", METADATA[fault])
    refused("multiply", "a", "bad", "c", words=["bad"])
    refused("plan", "bad", "b", words=["bad"])
    refused("multiply", "a", "b", "bad", words=["bad"])


@pytest.mark.parametrize("fault", METADATA_2)
def test_metadata_of_version_2(here, fault):
    corrupted("bad", METADATA_2[fault], V2)
    refused("multiply", "a", "bad", "c", words=["bad"])


def test_metadata_that_is_no_text(here):
    corrupted("bad", text("{}"))
    Path("bad", V3).write_bytes(b"\xff\xfe\x00")
    refused("multiply", "a", "bad", "c", words=["bad", "repair"])
    Path("bad", V3).unlink()
    Path("bad", V3).mkdir()
    refused("multiply", "a", "bad", "c", words=["bad is not a Zarr array"])


def test_a_chunk_that_cannot_be_held_is_not_decoded(here):
    corrupted("large", put(*CHUNK, value=[1 << 19, 1 << 19]))
    refused("multiply", "a", "large", "c", words=["chunk of B takes 1099511627776 bytes", "smallest"])


def test_shards_of_very_many_chunks(here):
    zarr.create_array("s", shape=(50, 1 << 40), chunks=(50, 16), shards=(50, 1 << 38), dtype="f4")
    refused("plan", "a", "s", words=["s has 1×68719476736 chunks", "rechunk"])


def test_a_product_that_nothing_can_hold(here):
    zarr.create_array("tall", shape=(1 << 40, 1), chunks=(1 << 38, 1), dtype="f4", compressors=None)
    words = ["op(tall)·op(tall) is 1099511627776×1099511627776", "transpose"]
    refused("multiply", "tall", "tall", "c", "--transpose-b", words=words)


# ----------------------------------------------------------------------------------------------- where C is


@pytest.mark.parametrize(
    ("c", "force", "words"),
    [
        ("old", "", ["old exists", "-f"]),
        ("a", "-f", ["a is, contains or lies inside the input a", "somewhere else"]),
        ("b", "-f", ["input b"]),
        ("link", "-f", ["link", "input a"]),
        ("links/a", "-f", ["links/a", "input a"]),
        ("old/../a", "-f", ["old/../a", "input a"]),
        ("a/", "-f", ["input a"]),
        ("file://{here}/a", "-f", ["file://", "input a"]),
        ("file://{here}/old/%2e%2e/a", "-f", ["input a"]),
        ("local://{here}/a", "-f", ["input a"]),
        (".", "-f", ["contains", "input a"]),
        ("a/c", "-f", ["a/c", "input a"]),
        ("a/c/0", "-f", ["input a"]),
        ("link/deep/inside", "", ["link/deep/inside", "input a"]),
        ("old/inside", "", ["old/inside lies inside the Zarr array", "choose another place"]),
        ("old/very/deep/inside", "-f", ["lies inside the Zarr array"]),
        ("group", "-f", ["group is a Zarr group", "group/c"]),
        ("group2", "-f", ["group2 is a Zarr group"]),
        ("group/empty", "-f", ["group/empty is a Zarr group"]),
        ("plain", "", ["plain exists", "left alone", "another place"]),
        ("plain", "-f", ["plain exists", "left alone"]),
        ("file", "-f", ["file exists", "left alone"]),
        ("corrupt", "-f", ["corrupt exists", "left alone"]),
        ("file/c", "", ["file/c cannot be created", "not a writable folder"]),
        ("file/deep/c", "", ["file/deep/c cannot be created"]),
        ("/dev/null/c", "", ["/dev/null/c cannot be created"]),
        ("/proc/c", "", ["/proc/c cannot be created", "another place"]),
        ("x" * 300, "", ["too long", "another place"]),
        ("unfinished", "", ["unfinished is the unfinished result", "-f"]),
        ("", "-f", ["''", "input a"]),
    ],
)
def test_the_place_of_c(here, c, force, words):
    Path("link").symlink_to("a")
    Path("links").symlink_to(".")
    zarr.create_group("group").create_group("empty")
    zarr.create_group("group2", zarr_format=2)
    Path("plain").mkdir()
    Path("plain/mine").write_text("mine")
    Path("file").write_text("mine")
    corrupted("corrupt", METADATA["cut off"])
    make("unfinished", np.ones((60, 40)), chunks=(20, 20))
    Path("unfinished", V3).rename(f"unfinished/{V3}.partial")
    refused("multiply", "a", "b", c.format(here=here), *force.split(), words=words)


def test_a_group_that_holds_an_input(here):
    zarr.create_group("g")
    make("g/a", np.ones((60, 50), "f4"), chunks=(20, 20))
    refused("multiply", "g/a", "b", "g", "-f", words=["g is, contains or lies inside the input g/a"])
    Path("alias").symlink_to("g")
    refused("multiply", "alias/a", "b", "g/a", "-f", words=["input alias/a"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["a", "old"], ["old exists", "-f"]),
        (["a", "a", "-f"], ["inside the input a", "somewhere else"]),
        (["a", "c", "--beta", "1"], ["c does not exist", "beta is not 0"]),
        (["a", "old", "--beta", "1"], ["old has shape (60, 40) but the product is 60×60"]),
        (["a", "old", "--transpose", "--beta", "1"], ["old has shape (60, 40) but the product is 50×50"]),
    ],
)
def test_gram(here, args, words):
    refused("gram", *args, words=words)


@pytest.mark.parametrize("refusal", [["-M", "1MiB"], ["-d", "tpu"], ["--kernel", "x"], ["--chunks", "0,1"]])
def test_an_old_c_outlives_a_refusal(here, refusal):
    refused("multiply", "a", "b", "old", "-f", *refusal, words=[])


@pytest.mark.parametrize(
    ("c", "words"),
    [
        ("c", ["c does not exist, and beta is not 0", "make C first"]),
        ("file", ["file is not a Zarr array"]),
        ("group", ["group is a Zarr group"]),
        ("vector", ["vector has shape (5,)"]),
        ("a", ["input a"]),
        ("wide", ["wide has shape (60, 41)", "60×40", "another C"]),
        ("sharded", ["sharded", "cannot be updated in place"]),
        ("odd", ["odd", "convert"]),
    ],
)
def test_a_c_that_cannot_be_updated(here, c, words):
    Path("file").write_text("mine")
    zarr.create_group("group")
    make("vector", np.ones(5), chunks=(5,))
    make("wide", np.ones((60, 41), "f4"), chunks=(20, 20))
    make("sharded", np.ones((60, 40), "f4"), chunks=(20, 20), shards=(40, 40))
    corrupted("odd", put("data_type", value="bfloat16"))
    refused("multiply", "a", "b", c, "--beta", "2", words=words)
    refused("multiply", "a", "b", c, "--beta", "2", "-f", words=words)


@pytest.fixture
def unprivileged(here):
    """Root may write anywhere: work as nobody, in a folder of nobody's."""
    if os.geteuid():
        yield here
        return
    assert ooc("multiply", "a", "b", "warm").code == 0  # everything is imported while it may be
    folder, nobody = tempfile.mkdtemp(), 65534
    for name in ("a", "b", "old"):
        shutil.copytree(name, f"{folder}/{name}")
    for path in (folder, *map(str, Path(folder).rglob("*"))):
        os.chown(path, nobody, nobody)
    os.chdir(folder)
    os.setresuid(nobody, nobody, 0)
    try:
        yield Path(folder)
    finally:
        os.setresuid(0, 0, 0)
        os.chdir(here)
        shutil.rmtree(folder)


def test_folders_that_cannot_be_written(unprivileged):
    Path("shut").mkdir()
    make("shut/old", np.ones((60, 40)), chunks=(20, 20))
    Path("shut").chmod(0o555)
    refused("multiply", "a", "b", "shut/c", words=["shut/c cannot be created", "not a writable folder"])
    refused("multiply", "a", "b", "shut/deep/c", words=["shut/deep/c", "not a writable folder"])
    Path("old").chmod(0o555)
    refused("multiply", "a", "b", "old", "-f", words=["old", "not a writable folder"])
    refused("multiply", "a", "b", "old", "--beta", "1", words=["old", "permission denied"])
    # Its own folder can be written: it can be replaced although it cannot be removed.
    assert ooc("multiply", "a", "b", "shut/old", "-f").code == 0
    assert zarr.open_array("shut/old", mode="r").dtype == np.float32
    Path("shut").chmod(0o755)


def test_files_that_cannot_be_read(unprivileged):
    Path("a", V3).chmod(0)
    done = ooc("multiply", "a", "b", "c")
    assert done.code == 2
    assert_one_sentence(done.err, "a cannot be read", "permission")
    Path("a", V3).chmod(0o644)
    Path("a/c/1/1").chmod(0)
    done = ooc("multiply", "a", "b", "c")
    assert done.code == 1
    assert_one_sentence(done.err, "a: chunk c/1/1 cannot be read")


def test_a_c_whose_replacement_is_interrupted(here, monkeypatch):
    """As it begins: then the old array is there again."""

    def interrupt(*args):
        raise KeyboardInterrupt

    before = {path: path.read_bytes() for path in Path("old").rglob("*") if path.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", interrupt)
        done = ooc("multiply", "a", "b", "old", "-f")
    assert done.code == 130
    assert "Interrupted: an output that was begun stays unfinished; run again with --resume" in done.err
    assert {path: path.read_bytes() for path in Path("old").rglob("*") if path.is_file()} == before
    assert ooc("multiply", "a", "b", "old", "-f").code == 0
    assert ooc("verify", "a", "b", "old").code == 0


# ------------------------------------------------------------------------------------------------- remote


class Far(MemoryFileSystem):
    """A file system that is not this machine's."""

    protocol = "far"
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("far://", "memory://"))


class Broken(Far):
    """One that never answers."""

    protocol = "broken"

    def cat_file(self, path, start=None, end=None, **options):
        raise TimeoutError("no answer")


@pytest.fixture
def far(here):
    for kind in (Far, Broken):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    Far.store.clear()
    return "far://shelf"


def test_a_remote_c(far):
    assert ooc("multiply", "a", "b", f"{far}/c").code == 0
    before = dict(Far.store)
    refused("multiply", "a", "b", f"{far}/c", words=["far://shelf/c exists", "-f"])
    refused("multiply", f"{far}/c", "b", f"{far}/c", "-f", "--transpose-a", words=["far://shelf/c"])
    assert Far.store == before
    assert ooc("multiply", "a", "b", f"{far}/c", "-f", "--alpha", "2").code == 0
    # Columns of this product are alike, and one time in 64 the signs of both rounds add up to nothing.
    assert ooc("verify", "a", "b", f"{far}/c", "--seed", "1").code == 0
    assert ooc("verify", "a", "b", f"{far}/c", "--seed", "1", "--alpha", "1").code == 3
    expected = 2 * zarr.open_array("a")[:].astype("f8") @ zarr.open_array("b")[:]
    assert np.array_equal(zarr.open_array(f"{far}/c", mode="r")[:], expected)


def test_remote_places_overlap(far):
    assert ooc("random", f"{far}/a", "--shape", "60,50").code == 0
    for c in (f"{far}/a", f"{far}/a/", f"{far}/a/inside", far):
        refused("multiply", f"{far}/a", "b", c, "-f", words=["input far://shelf/a"])
    refused("multiply", f"{far}/nope", "b", "c", words=["far://shelf/nope is not a Zarr array"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("broken://shelf/x", ["cannot be reached", "check its address and credentials"]),
        ("nonsense://shelf/x", ["are not known", "an address that begins with s3://"]),
    ],
)
def test_remote_places_out_of_reach(far, url, words):
    refused("multiply", url, "b", "c", words=[url, *words])
    refused("multiply", "a", "b", url, words=[url, *words])


def test_a_remote_store_whose_package_is_missing(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    for args in (["s3://bucket/a", "b", "c"], ["a", "b", "s3://bucket/c"]):
        before = snapshot(".")
        done = ooc("multiply", *args)
        assert done.code == 2
        assert_one_sentence(done.err, "s3://bucket/", "not installed", "pip install 'ooc-gemm[remote]'")
        assert snapshot(".") == before


def test_a_bucket_without_credentials(here, monkeypatch):
    pytest.importorskip("obstore")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(here))
    refused("multiply", "a", "b", "s3://no-such-bucket/c", words=["s3://no-such-bucket/c", "credentials"])
    refused("multiply", "s3://no-such-bucket/a", "b", "c", words=["s3://no-such-bucket/a", "credentials"])


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


# -------------------------------------------------------------------------------------------- while running

STORED = {
    "raw": ({"compressors": None}, "c/1/1"),
    "zstd": ({}, "c/1/1"),
    "blosc": ({"compressors": [zarr.codecs.BloscCodec()]}, "c/1/1"),
    "checksum": ({"compressors": [zarr.codecs.Crc32cCodec()]}, "c/1/1"),
    "shards": ({"chunks": (5, 5), "shards": (20, 20)}, "c/1/1"),
    "v2": ({"zarr_format": 2, "compressors": None}, "1.1"),
    "v2 zstd": ({"zarr_format": 2}, "1.1"),
    "v2 Fortran": ({"zarr_format": 2, "order": "F"}, "1.2"),
}


FAULTS = {(layout, fault) for layout in STORED for fault in ("cut off", "empty", "longer", "folder", "noise")}
FAULTS -= {("raw", "noise"), ("v2", "noise")}  # any bytes are numbers
FAULTS -= {("shards", "folder"), ("v2 Fortran", "folder")}  # zarr takes it for a missing chunk


@pytest.mark.parametrize(("layout", "fault"), sorted(FAULTS))
def test_a_bad_chunk(here, layout, fault):
    options, key = STORED[layout]
    values = np.random.default_rng(1).standard_normal((60, 50)).astype("f4")
    chunk = Path(make("bad", values, **{"chunks": (20, 20), **options}), key)
    held = chunk.read_bytes()
    if fault == "folder":
        chunk.unlink()
        chunk.mkdir()
    else:
        noise = np.random.default_rng(2).bytes(len(held))
        bad = {"cut off": held[:-7], "empty": b"", "longer": held + b"more", "noise": noise}
        chunk.write_bytes(bad[fault])
    done = ooc("multiply", "bad", "b", "c")
    assert done.code == 1
    assert_one_sentence(done.err, f"bad: chunk {key} ")
    assert_one_sentence(ooc("verify", "bad", "b", "old").err, f"bad: chunk {key} ")
    # What was begun is no array.
    with pytest.raises(FileNotFoundError):
        zarr.open_array("c", mode="r")
    refused("multiply", "a", "b", "c", words=["unfinished", "-f"])
    refused("verify", "a", "b", "c", words=["unfinished", "make it again"])
    assert not list(here.rglob("*.tmp"))
    assert ooc("multiply", "a", "b", "c", "-f").code == 0


# ---------------------------------------------------------------------------------------------- as a process


def process(*args):
    return subprocess.run(
        [sys.executable, "-m", "ooc_gemm.cli", *args], capture_output=True, text=True, timeout=200
    )


def test_a_process_says_one_sentence(here):
    """Warnings of libraries, threads that fail, and interpreters that shut down add nothing to it."""
    before = snapshot(".")
    done = process("multiply", "a", "nope", "c")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: nope does not exist; check the path\n"
    corrupted("bytes", lambda described: described.update(dtype="|S4", fill_value=None), V2)
    before = snapshot(".")
    done = process("multiply", "a", "bytes", "c")
    assert done.returncode == 2
    assert_one_sentence(done.stderr, "bytes holds |S4")
    assert snapshot(".") == before


def test_a_process_names_a_bad_chunk(here):
    os.truncate("a/c/1/1", 100)
    done = process("multiply", "a", "b", "c")
    assert (done.returncode, done.stdout) == (1, "")
    assert_one_sentence(done.stderr, "a: chunk c/1/1 holds 100 bytes instead of 1600", "write it again")


def test_only_verbose_shows_a_traceback(here):
    done = ooc("multiply", "a", "nope", "c", "-v")
    assert done.code == 2
    assert done.err.startswith("Traceback")
    assert done.err.endswith("\nError: nope does not exist; check the path\n")


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
