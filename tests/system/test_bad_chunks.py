"""Chunks that turn out to be bad while running: exit status 1, and their names; and what a process says."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make, ooc
from outcome import assert_one_sentence, snapshot
from refusals import V2, corrupted, make_arrays, refused


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a (60×50), b (50×40), and an old result."""
    make_arrays(tmp_path, monkeypatch)
    return tmp_path


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
