"""Commands that are refused, and arrays whose metadata are wrong."""

import json
from pathlib import Path

import numpy as np
from conftest import make, ooc
from outcome import assert_one_sentence, snapshot

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


def make_arrays(folder, monkeypatch):
    """Work in a folder with a (60×50), b (50×40), and an old result."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    make("a", np.arange(3000, dtype="f4").reshape(60, 50), chunks=(20, 20), compressors=None)
    make("b", np.ones((50, 40), "f4"), chunks=(20, 20))
    make("old", np.full((60, 40), 7, "f4"), chunks=(20, 20))


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
