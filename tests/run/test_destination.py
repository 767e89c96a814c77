"""What is done while the last blocks are written."""

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.engine import writers
from ooc_gemm.storage.io import files
from ooc_gemm.storage.read.source import Opened
from ooc_gemm.storage.write.publication import Publication


@pytest.fixture(params=["on disk", "in memory"])
def folder(request, tmp_path):
    if request.param == "on disk":
        yield tmp_path
        return
    if not files.in_background("/dev/shm"):
        pytest.skip("there are no files in memory here, or there was no C compiler")
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-test-", dir="/dev/shm") as name:
        yield Path(name)


def test_inputs_are_looked_at_and_chunks_put_in_place(folder, monkeypatch):
    """The writes of the last block wait until inputs were looked at, and in memory until the chunks before
    have their names."""
    x = np.random.default_rng(0).integers(-9, 9, (300, 200)).astype("f4")
    make(folder / "x", x, chunks=(50, 50), compressors=None)
    in_memory, waits = files.in_background(folder), threading.Event()
    write, check, save = writers.write, Opened.check_unchanged, Publication.save

    def writing(session, target, block, *args):
        if block.last:
            assert waits.wait(30), "nothing is done before the last block is written"
        write(session, target, block, *args)

    def checked(self):
        check(self)
        if not in_memory:
            waits.set()

    def saved(self, *args, **options):
        save(self, *args, **options)
        waits.set()

    monkeypatch.setattr("ooc_gemm.engine.execute.write", writing)
    monkeypatch.setattr(Opened, "check_unchanged", checked)
    monkeypatch.setattr(Publication, "save", saved)
    ooc_gemm.multiply(folder / "x", folder / "x", folder / "c", transpose_b=True, device="cpu")
    assert np.array_equal(zarr.open_array(folder / "c")[...], x @ x.T)
