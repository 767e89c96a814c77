"""Places of C that are refused, local and remote: one sentence, and no file is touched."""

import os
import shutil
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
from refusals import METADATA, V3, corrupted, make_arrays, put, refused

import ooc_gemm


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×50), b (50×40), and an old result."""
    make_arrays(tmp_path, monkeypatch)
    return tmp_path


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


X = np.ones((5, 5), "f4")


@pytest.mark.parametrize("mode", ["w", "r"])
@pytest.mark.parametrize(
    "write",
    [
        lambda c: ooc_gemm.multiply(X, X, c, device="cpu"),
        lambda c: ooc_gemm.multiply(X, X, c, beta=2, device="cpu"),
    ],
    ids=["multiply", "beta"],
)
def test_c_is_not_written_to_archives(tmp_path, write, mode):
    with zarr.storage.ZipStore(tmp_path / "z.zip", mode="w") as store:
        zarr.create_array(store, name="c", shape=(5, 5), chunks=(5, 5), dtype="f4")
    before = (tmp_path / "z.zip").read_bytes()
    with zarr.storage.ZipStore(tmp_path / "z.zip", mode="a" if mode == "w" else "r") as store:
        c = zarr.open_array(store, path="c", mode="r+" if mode == "w" else "r")
        with pytest.raises(ooc_gemm.InputError, match=r"c is in an archive .*, and C is not written there"):
            write(c)
    assert (tmp_path / "z.zip").read_bytes() == before


@pytest.mark.parametrize(
    "write",
    [
        lambda c: ooc_gemm.pca(X, 5, scores=c, force=True, device="cpu"),
        lambda c: ooc_gemm.svd(X, 5, u=c, force=True, device="cpu"),
        lambda c: ooc_gemm.lstsq(X[:, :2], X, out=c, force=True),
        lambda c: ooc_gemm.random(c, (5, 5), force=True),
        lambda c: ooc_gemm.topk(X, k=2, out=c, force=True, device="cpu"),
    ],
    ids=["pca", "svd", "lstsq", "random", "topk"],
)
def test_an_open_array_is_no_place_for_what_replaces_it(write):
    """It would keep the metadata of the array that is replaced, and read the new one's chunks by them."""
    c = zarr.create_array(zarr.storage.MemoryStore(), shape=(5, 5), chunks=(2, 5), dtype="f4", fill_value=3)
    with pytest.raises(ooc_gemm.InputError, match="is no place for this result; give a path, or an address"):
        write(c)
    assert (c[...] == 3).all()


@pytest.mark.parametrize("path", ["x\0y", "x\ud800y", "x.h5::a\0b", "file:///x%00y", Path("x\0y")])
@pytest.mark.parametrize(
    "run",
    [
        lambda path: ooc_gemm.gram(path, device="cpu"),
        lambda path: ooc_gemm.gram(X, path, device="cpu"),
        lambda path: ooc_gemm.plan(path, X, device="cpu"),
        lambda path: ooc_gemm.verify(path, X, X),
        lambda path: ooc_gemm.topk(X, k=2, out=path, device="cpu"),
        lambda path: ooc_gemm.pca(X, 2, scores=path, device="cpu"),
        lambda path: ooc_gemm.random(path, (5, 5)),
        lambda path: ooc_gemm.gram(ooc_gemm.Operand(X, weights=path), device="cpu"),
    ],
)
def test_what_cannot_be_a_path(tmp_path, monkeypatch, run, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ooc_gemm.InputError, match="cannot be a path: it holds a null byte, or half of a"):
        run(path)
    assert not list(tmp_path.iterdir())
