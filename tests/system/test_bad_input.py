"""Bad input: exit status 2, one sentence that names what is wrong and says what to do, no file touched."""

from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make
from refusals import CHUNK, METADATA, V2, V3, corrupted, make_arrays, put, refused, text


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×50), b (50×40), and an old result."""
    make_arrays(tmp_path, monkeypatch)
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
