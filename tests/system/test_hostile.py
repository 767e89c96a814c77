"""Metadata and chunks that somebody made up: each is a clean error, soon, with little memory, and nothing is
written. `fuzz.py` makes them by mutation; the attacks that have names are below it."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import random
import shutil
import struct
import threading
import zlib
from functools import cache
from pathlib import Path

import fuzz
import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
from conftest import ooc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outcome import assert_one_sentence, snapshot

import ooc_gemm
from examples import examples
from ooc_gemm.planning.schedule import cut
from ooc_gemm.storage.read import inputs

MiB = 1 << 20
BOMB = 128 * MiB
LITTLE = 64 * MiB
"""More than reading a chunk of 64 bytes takes, less than any bomb."""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    return fuzz.make_layouts(tmp_path_factory.mktemp("valid"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@settings(
    max_examples=examples(300), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_the_metadata_says(tmp_path_factory, layouts, seed):
    """What `python tests/helpers/fuzz.py --seed SEED --count 1` does in a process of its own."""
    place = tmp_path_factory.mktemp("hostile") / "a"
    name = fuzz.make_hostile(random.Random(seed), layouts, place)
    before = snapshot_of_names(place.parent)
    outcome, seconds, growth = fuzz.peak_of(lambda: fuzz.attempt(place))
    assert outcome in ("read", "open", "InputError", "BudgetError", "StoreError"), name
    assert seconds < 10 * fuzz.SECONDS  # of a machine that has other things to do
    assert growth < fuzz.GROWTH
    assert snapshot_of_names(place.parent) == before
    shutil.rmtree(place.parent)


def snapshot_of_names(folder):
    return sorted((str(path), path.lstat().st_size) for path in folder.rglob("*"))


def test_valid_arrays_are_read(layouts):
    values = np.random.default_rng(0).integers(-99, 99, (12, 10))
    for name, path in layouts.items():
        assert fuzz.attempt(path) == "read", name
        found = ooc_gemm.multiply(path, np.eye(10), device="cpu").array
        assert np.array_equal(found, values), name


# ---------------------------------------------------------------------------------------------- metadata


def copied(layouts, name, change=None):
    """An array of a layout as `a`; `change` goes through its metadata."""
    shutil.copytree(layouts[name], "a")
    file = Path("a", ".zarray" if name.startswith("v2") else "zarr.json")
    if change is not None:
        described = json.loads(file.read_text())
        text = change(described)
        file.write_text(json.dumps(described) if text is None else text)
    return file


def refused(*words):
    """The array `a` as an operand, and where C should be: exit status 2 and nothing happens."""
    before = snapshot_of_names(Path())
    for command in (["multiply", "a", "a", "c", "--transpose-b"], ["plan", "a", "a"], ["gram", "a", "c"]):
        done, seconds, growth = fuzz.peak_of(lambda command=command: ooc(*command, "-d", "cpu"))
        assert done.code == 2
        assert_one_sentence(done.err, "a", *words)
        assert seconds < 10
        assert growth < fuzz.GROWTH
        assert snapshot_of_names(Path()) == before


def test_metadata_that_is_too_long(here, layouts):
    file = copied(layouts, "raw")
    os.truncate(file, 1 << 40)
    refused("more than 2 MiB")
    file.write_text('{"a":' * 60_000)
    refused("not JSON")
    file.write_text('{"a":' * 400_000)
    refused("more than 65536 lists and objects")


@pytest.mark.parametrize("what", ["pipe", "device", "loop"])
@pytest.mark.parametrize("name", ["raw", "v2"])
def test_metadata_that_is_no_file(here, layouts, name, what):
    file = copied(layouts, name)
    file.unlink()
    {
        "pipe": lambda: os.mkfifo(file),
        "device": lambda: file.symlink_to("/dev/zero"),
        "loop": lambda: file.symlink_to(file.name),
    }[what]()
    refused("repair")
    # Nor is it waited for where C is to be.
    done = ooc("multiply", np_array("b", np.ones((3, 3))), "b", "a", "-f", "-d", "cpu")
    assert done.code == 2
    assert_one_sentence(done.err, "a exists and cannot be opened", "left alone")


def np_array(name, values, **options):
    zarr.create_array(name, data=values, **options)
    return name


def test_what_is_not_needed_is_not_read(here, layouts):
    copied(layouts, "v2 zstd")
    os.remove("a/.zattrs")
    for name in (".zattrs", ".zmetadata", ".zgroup"):
        os.mkfifo(f"a/{name}")
    assert ooc("multiply", "a", "a", "c", "--transpose-b", "-d", "cpu").code == 0


def test_a_group_with_much_in_it(here):
    Path("a").mkdir()
    consolidated = {f"x{i}": {"attributes": {}, "node_type": "group"} for i in range(20_000)}
    document = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": {"metadata": consolidated}}
    Path("a/zarr.json").write_text(json.dumps(document))
    refused("a is a Zarr group")


def test_codecs_that_run_code_are_not_asked(here, layouts):
    """numcodecs's pickle does what the chunk says."""
    for where in ("compressor", "filters"):
        one = {"id": "pickle", "protocol": 5}
        copied(
            layouts,
            "v2",
            lambda d, one=one, where=where: d.update({where: [one] if where == "filters" else one}),
        )
        Path("a/0.0").write_bytes(pickle.dumps(Trap()))
        refused("codec pickle", "rewrite")
        assert not Path("trapped").exists()
        shutil.rmtree("a")


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def codecs(*chain):
    return lambda described: described.update(codecs=list(chain))


def grid(shape, chunks):
    return lambda d: d.update(
        shape=shape, chunk_grid={"name": "regular", "configuration": {"chunk_shape": chunks}}
    )


def sharded(shape, shard, inner):
    def change(described):
        grid(shape, shard)(described)
        described["codecs"][0]["configuration"]["chunk_shape"] = inner

    return change


def separator(value, name="default"):
    encoding = {"name": name, "configuration": {"separator": value}}
    return lambda described: described.update(chunk_key_encoding=encoding)


PLAIN = fuzz.PLAIN
HOSTILE = {
    "a way out": ("raw", separator("../../x"), "keys of chunks"),
    "another way out": ("raw", separator("/", "../.."), "keys of chunks"),
    "a way out of v2": ("v2", lambda d: d.update(dimension_separator="/../"), "keys of chunks"),
    "an index of 2^40 chunks": ("shards", sharded([12, 10], [1 << 20, 1 << 20], [1, 1]), "shards of"),
    "shards within shards": (
        "shards",
        lambda d: d.update(
            codecs=json.loads(
                "".join(
                    [
                        '[{"name":"sharding_indexed","configuration":{'
                        '"chunk_shape":[1,1],"index_codecs":["bytes"],"codecs":'
                    ]
                    * 50
                )
                + "[]"
                + "}}]" * 50
            )
        ),
        "inside each other",
    ),
    "an index that is compressed": (
        "shards",
        lambda d: d["codecs"][0]["configuration"].update(index_codecs=[PLAIN, {"name": "gzip"}]),
        "index of its shards",
    ),
    "edges without end": (
        "raw",
        lambda d: d.update(
            chunk_grid={
                "name": "rectilinear",
                "configuration": {"kind": "inline", "chunk_shapes": [[[1, 1 << 40]]] * 2},
            }
        ),
        "irregular chunks",
    ),
    "many codecs": (
        "raw",
        codecs(PLAIN, *[{"name": "gzip", "configuration": {"level": 1}}] * 1000),
        "codecs",
    ),
    "words of 4 GiB": ("v2 filters", lambda d: d["filters"][0].update(astype="<U999999999"), "a codec makes"),
    "elements of 4 GiB": ("v2", lambda d: d.update(dtype="|V4294967296"), "cannot be multiplied"),
    "objects": ("v2", lambda d: d.update(dtype="|O", filters=[{"id": "vlen-utf8"}]), "cannot be multiplied"),
    "fields": ("v2", lambda d: d.update(dtype=[["x", "<f4"]] * 1000), "cannot be multiplied"),
    "control characters": ("raw", lambda d: d.update(data_type="\x1b[2J\ud800"), "cannot be multiplied"),
    "a number of 5000 digits": ("raw", lambda d: json.dumps(d).replace("12", "1" * 5000), "not JSON"),
    "a fill value of 2 MB": ("raw", lambda d: d.update(fill_value="9" * 2_000_000), "fill value"),
    "a dimension too many": ("raw", grid([1] * 100_000, [1] * 100_000), "two dimensions"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_metadata(here, layouts, attack):
    name, change, words = HOSTILE[attack]
    copied(layouts, name, change)
    refused(words)


@pytest.mark.parametrize("layout", ["raw", "zstd", "big endian", "shards"])
def test_millions_of_chunks_that_are_not_there(here, layouts, layout):
    change = sharded([1 << 21, 2], [1, 2], [1, 1]) if layout == "shards" else grid([1 << 22, 1], [1, 1])
    copied(layouts, layout, change)
    source, seconds, growth = fuzz.peak_of(lambda: inputs.open_input("a"))
    assert source.shape in ((1 << 22, 1), (1 << 21, 2))
    assert seconds < 10
    assert growth < fuzz.GROWTH


def test_an_extent_that_nothing_has(here, layouts):
    """One chunk of 32 TiB, of which any part could be read."""
    copied(layouts, "v2", lambda d: d.update(shape=[1, 1 << 44], chunks=[1, 1 << 43]))
    made, seconds, _ = fuzz.peak_of(lambda: ooc_gemm.plan("a", "a", transpose_b=True, memory_limit="1GiB"))
    assert made.problem.k == 1 << 44
    assert seconds < 10


def test_a_fill_value_of_null_is_0(here):
    """As for zarr."""
    array = zarr.create_array("a", shape=(4, 4), chunks=(2, 2), dtype="f4", zarr_format=2, fill_value=None)
    array[:2] = 1
    assert json.loads(Path("a/.zarray").read_text())["fill_value"] is None
    assert np.array_equal(ooc_gemm.multiply("a", np.eye(4), device="cpu").array, array[:])


# ------------------------------------------------------------------------------------------------- chunks


def chunk_of(path):
    return next(file for file in sorted(path.rglob("*")) if file.is_file() and file.name[0] in "0123456789")


def read_first(path):
    """The chunk in the corner."""
    source = inputs.open_input(path).source
    s = source.matrix
    piece = next(iter(cut("a", s, (0, s.rows), (0, s.cols), s.chunk_bytes)))
    return source.read(piece, np.empty(s.chunk_bytes, np.uint8))[0]


def unreadable(path):
    """The first chunk is an error that names it, made without the memory it asks for."""

    def work():
        with pytest.raises(ooc_gemm.StoreError, match=r"^a: chunk \S+ .*write it again|cannot be read"):
            read_first(path)

    found = []
    thread = threading.Thread(target=lambda: found.append(fuzz.peak_of(work)), daemon=True)
    thread.start()
    thread.join(20)
    assert found, "it hangs, or it is no StoreError"
    assert found[0][1] < 10
    assert found[0][2] < LITTLE


COMPRESS = {
    "gzip": lambda data: gzip.compress(data, 1),
    "zlib": lambda data: zlib.compress(data, 1),
    "bz2": lambda data: bz2.compress(data, 1),
    "lzma": lambda data: lzma.compress(data, preset=0),
    "zstd": numcodecs.Zstd(1).encode,
    "blosc": numcodecs.Blosc().encode,
    "lz4": numcodecs.LZ4().encode,
}


@cache
def zeros(compressor):
    """Many, compressed."""
    made = bytes(COMPRESS[compressor](bytes(BOMB)))
    assert len(made) < BOMB // 50
    return made


def rle(blocks, promised=None):
    """A zstd frame of blocks of 128 KiB that take 4 bytes each, and what it says that it holds."""
    size = b"" if promised is None else promised.to_bytes(8, "little")
    frame = b"\x28\xb5\x2f\xfd" + bytes([0 if promised is None else 0xC0, 0x70]) + size
    body = (((1 << 17) << 3) | 2).to_bytes(3, "little") + b"\x07"
    last = (((1 << 17) << 3) | 3).to_bytes(3, "little") + b"\x07"
    return frame + body * (blocks - 1) + last


def crc(data):
    return data + struct.pack("<I", google_crc32c.value(data))


@pytest.mark.parametrize(
    ("layout", "bomb"),
    [
        *((name, name) for name in ("zstd", "blosc", "gzip", "lzma", "bz2")),
        *((f"v2 {name}", name) for name in ("zstd", "blosc", "zlib", "lz4")),
        ("v2 filters", "bz2"),
        ("Fortran", "zstd"),
        ("delta", "zstd"),
        ("two codecs", "zstd with a checksum"),
        ("three codecs", "gzip in blosc"),
        ("three codecs", "blosc"),
        ("zstd", "zstd that does not say"),
        ("zstd", "zstd that lies"),
        ("two codecs", "zstd that does not say, with a checksum"),
        ("two codecs", "zstd that lies, with a checksum"),
    ],
)
def test_bombs(here, layouts, layout, bomb):
    """A chunk of 64 bytes becomes 128 MiB, or would."""
    shutil.copytree(layouts[layout], "a")
    made = {
        "zstd with a checksum": lambda: crc(zeros("zstd")),
        "gzip in blosc": lambda: bytes(numcodecs.Blosc().encode(zeros("gzip"))),
        "zstd that does not say": lambda: rle(BOMB >> 17),
        "zstd that lies": lambda: rle(BOMB >> 17, 64),
        "zstd that does not say, with a checksum": lambda: crc(rle(BOMB >> 17)),
        "zstd that lies, with a checksum": lambda: crc(rle(BOMB >> 17, 64)),
    }
    chunk_of(Path("a")).write_bytes(made.get(bomb, lambda: zeros(bomb))())
    unreadable("a")


@pytest.mark.parametrize("layout", fuzz.LAYOUTS)
def test_a_chunk_that_is_no_file(here, layouts, layout):
    shutil.copytree(layouts[layout], "a")
    chunk = chunk_of(Path("a"))
    for make in (
        lambda: os.mkfifo(chunk),
        lambda: chunk.symlink_to("/dev/zero"),
        lambda: chunk.symlink_to(chunk.name),
        chunk.mkdir,
        lambda: (chunk.touch(), os.truncate(chunk, 1 << 40)),
    ):
        chunk.rmdir() if chunk.is_dir() else chunk.unlink(missing_ok=True)
        make()
        unreadable("a")


def test_a_link_to_a_chunk_is_followed(here, layouts):
    """Where else chunks lie is up to who made the array."""
    shutil.copytree(layouts["zstd"], "a")
    chunk = chunk_of(Path("a"))
    chunk.rename("elsewhere")
    chunk.symlink_to(Path("elsewhere").absolute())
    assert np.array_equal(read_first("a"), zarr.open_array(layouts["zstd"])[:4, :4])


def index_of(path, change):
    """Rewrite the index of the first shard, with a good checksum."""
    shard = chunk_of(Path(path))
    held = shard.read_bytes()
    extents = np.frombuffer(held[-68:-4], "<u8").copy()
    change(extents)
    shard.write_bytes(held[:-68] + crc(extents.tobytes()))


@pytest.mark.parametrize("layout", ["shards", "zstd shards", "gzip shards"])
@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 1 << 40), (1 << 40, 64), (1 << 62, 64), ((1 << 64) - 32, 64), (1000, (1 << 64) - 900), (0, 1 << 63)],
)
def test_an_index_that_points_out_of_its_shard(here, layouts, layout, offset, length):
    shutil.copytree(layouts[layout], "a")

    def change(extents):
        extents[:2] = offset, length

    index_of("a", change)
    unreadable("a")


def test_chunks_of_a_shard_may_overlap(here, layouts):
    """That harms nobody."""
    shutil.copytree(layouts["zstd shards"], "a")

    def change(extents):
        extents[2:4] = extents[:2]

    index_of("a", change)
    values = zarr.open_array(layouts["zstd shards"])[:4, :4]
    found = ooc_gemm.multiply("a", np.eye(10), device="cpu").array
    assert np.array_equal(found[:4, :4], values)
    assert np.array_equal(found[:4, 4:8], values)


def test_a_bomb_ends_a_run(here, layouts):
    """The whole way: exit status 1, one sentence, and C is no array."""
    shutil.copytree(layouts["gzip"], "a")
    chunk_of(Path("a")).write_bytes(zeros("gzip"))
    before = snapshot("a")
    done = ooc("multiply", "a", "a", "c", "--transpose-b", "-d", "cpu")
    assert done.code == 1
    assert_one_sentence(done.err, "a: chunk c/0/0 cannot be read or decoded", "write it again")
    assert snapshot("a") == before
    assert not Path("c/zarr.json").exists()


# ------------------------------------------------------------------------------------------ where C is to be


@pytest.fixture
def old(here):
    """The product of `a` with itself is to be added to `c`; beside them a file that is somebody else's."""
    np_array("a", np.ones((4, 4)), chunks=(4, 4))
    np_array("c", np.ones((4, 4)), chunks=(4, 4), zarr_format=2, compressors=None)
    Path("victim").write_text("precious")
    yield "multiply", "a", "a", "c", "--beta", "1", "-d", "cpu"
    assert Path("victim").read_text() == "precious"


def trap(path, what):
    Path(path).unlink(missing_ok=True)
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: Path(path).symlink_to("/dev/zero"),
        "link": lambda: Path(path).symlink_to(Path("victim").absolute()),
    }[what]()


@pytest.mark.parametrize("what", ["pipe", "device", "link"])
def test_a_journal_that_is_none(old, what):
    trap("c/ooc-gemm.journal", what)
    done = ooc(*old)
    assert done.code == 2
    assert_one_sentence(done.err, "c cannot be updated", "it is as it was")
    assert np.array_equal(zarr.open_array("c")[...], np.ones((4, 4)))
    done = ooc(*old[:4], "-f")
    assert done.code == 2
    assert_one_sentence(done.err, "c cannot be created", "another place")
    Path("c/.zarray").rename("c/.zarray.partial")
    done = ooc(*old, "--resume")
    assert done.code == 2
    assert_one_sentence(done.err, "the journal of c cannot be used", "start over")


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_nothing_is_written_through_a_link(old, what):
    trap("c/0.0.pending", what)
    done = ooc(*old)
    assert done.code == 1
    assert_one_sentence(done.err, "c: chunk 0.0 cannot be written", "--resume")


@pytest.mark.parametrize("what", ["pipe", "device", "link"])
def test_attributes_that_are_none(old, what):
    """They are kept, so they are looked at before C is touched."""
    trap("c/.zattrs", what)
    before = snapshot_of_names(Path("c"))
    done = ooc(*old)
    assert done.code == 2
    assert_one_sentence(done.err, "c: its", "metadata")
    assert snapshot_of_names(Path("c")) == before


@pytest.mark.parametrize("what", ["pipe", "device", "link"])
def test_metadata_that_stand_aside(old, what):
    """Those of a C that is to be continued."""
    file = Path("c/.zarray.partial")
    Path("c/.zarray").rename(file)
    # A journal that says that nothing is done.
    Path("c/ooc-gemm.journal").write_text('{"version": 1, "options": {}, "inputs": {}}\n')
    trap(file, what)
    done = ooc(*old, "--resume")
    assert done.code == 2
    assert_one_sentence(done.err, "c: its", "metadata")
