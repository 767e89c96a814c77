"""Pieces of several small chunks from a disk: the right elements, the bytes of the plan, and errors that name
the chunk."""

import os
import shutil

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.planning.problem import MOST_STACKED
from ooc_gemm.planning.schedule import cut
from ooc_gemm.planning.traffic import piece_read_bytes
from ooc_gemm.storage.io import background, files
from ooc_gemm.storage.read import inputs
from ooc_gemm.support.buffers import page_aligned

RNG = np.random.default_rng(5)
LAYOUTS = {
    "small": {"chunks": (16, 24)},
    "ragged": {"chunks": (17, 23)},
    "strips": {"chunks": (3, 444)},
    "shards": {"chunks": (16, 24), "shards": (64, 48)},
    "version 2": {"chunks": (16, 24), "zarr_format": 2},
    "fortran": {"chunks": (16, 24), "zarr_format": 2, "order": "F"},
}


@pytest.fixture(autouse=True)
def disk(monkeypatch):
    """No files lie in memory, wherever the tests run."""
    monkeypatch.setattr(files, "in_background", lambda folder: False)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def pieces(source, rows, cols, slot_bytes):
    """Every piece of some rows and columns, read."""
    (slot,), found = page_aligned(1, slot_bytes), []
    for piece in cut("a", source.matrix, rows, cols, slot_bytes):
        view, nbytes = source.start(piece, slot)()
        found.append((piece, view.copy(), nbytes))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("missing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_element_is_read_once(tmp_path, layout, missing):
    values = RNG.standard_normal((333, 444)).astype("f4")
    make(tmp_path / "a", values, compressors=None, **LAYOUTS[layout])
    if missing:
        for path in (*tmp_path.glob("a/c/1"), *tmp_path.glob("a/3.*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        values = zarr.open_array(tmp_path / "a")[...]
    source = inputs.open_input(str(tmp_path / "a")).source
    values = values.T if source.matrix.fortran else values
    assert source.matrix.traits.stackable
    assert not source.asynchronous
    before, height = open_files(), source.matrix.chunk_rows
    (first, rows), (left, cols) = ((7, values.shape[0] - 5), (9, values.shape[1] - 50))
    found = np.full(values.shape, np.nan)
    for piece, view, nbytes in pieces(source, (first, rows), (left, cols), 1 << 16):
        found[slice(*piece.rows), slice(*piece.cols)] = view
        assert nbytes == piece_read_bytes(source.matrix, piece)
        assert piece.rows[1] - piece.rows[0] <= MOST_STACKED * height
    assert np.array_equal(found[first:rows, left:cols], values[first:rows, left:cols])
    assert np.isnan(found).sum() == values.size - (rows - first) * (cols - left)
    assert open_files() == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_products_move_the_bytes_of_the_plan(tmp_path, layout, transposed):
    a, b = RNG.integers(-9, 9, (333, 444)).astype("f4"), RNG.integers(-9, 9, (444, 130)).astype("f4")
    stored = a.T.copy() if transposed else a
    make(tmp_path / "a", stored, compressors=None, **LAYOUTS[layout])
    make(tmp_path / "b", b, compressors=None, chunks=(50, 40))
    args = str(tmp_path / "a"), str(tmp_path / "b")
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.plan(*args, memory_limit=1, device="cpu", transpose_a=transposed)
    for limit in (small.value.minimum_memory_limit, 1 << 30):
        options = {"device": "cpu", "transpose_a": transposed, "force": True}
        result = ooc_gemm.multiply(*args, str(tmp_path / "c"), memory_limit=limit, **options)
        assert np.array_equal(zarr.open_array(tmp_path / "c")[...], a @ b)
        assert result.bytes_read == result.plan.bytes_read


def test_small_chunks_come_in_stacks_and_large_ones_alone(tmp_path):
    """Large ones are read past the page cache, each to the beginning of a page."""
    counts = {}
    for rows in (16, 63, 64, 512):
        make(tmp_path / str(rows), np.zeros((1024, 1024), "f4"), compressors=None, chunks=(rows, 1024))
        matrix = inputs.open_input(str(tmp_path / str(rows))).matrix
        assert matrix.traits.stackable == (matrix.chunk_bytes < files.LEAST_DIRECT)
        counts[rows] = len(list(cut("a", matrix, (0, 1024), (0, 1024), 16 << 20)))
    assert counts == {16: 1, 63: 2, 64: 16, 512: 2}


@pytest.mark.parametrize("fault", ["short", "gone", "pipe", "folder"])
def test_an_error_names_the_chunk(tmp_path, fault):
    make(tmp_path / "a", np.ones((320, 24), "f4"), compressors=None, chunks=(16, 24))
    source = inputs.open_input(str(tmp_path / "a")).source
    chunk, before = tmp_path / "a" / "c" / "5" / "0", open_files()
    data = chunk.read_bytes()
    chunk.unlink()
    if fault == "short":
        chunk.write_bytes(data[:-1])
    elif fault == "pipe":
        os.mkfifo(chunk)
    elif fault == "folder":
        chunk.mkdir()
    with pytest.raises(ooc_gemm.StoreError, match="chunk c/5/0 "):
        pieces(source, (0, 320), (0, 24), 1 << 20)
    assert open_files() == before


def test_a_window_is_read_in_stacks(tmp_path):
    values = RNG.standard_normal((333, 444)).astype("f4")
    make(tmp_path / "a", values, compressors=None, chunks=(16, 24))
    opened = inputs.open_input(str(tmp_path / "a")).window((32, 333), (48, 200))
    found = pieces(opened.source, (0, 301), (0, 152), 1 << 20)
    assert len(found) < 301 // 16 * 2
    for piece, view, _ in found:
        rows, cols = (slice(at + some[0], at + some[1]) for at, some in ((32, piece.rows), (48, piece.cols)))
        assert np.array_equal(view, values[rows, cols])


@pytest.mark.parametrize("missing", [False, True])
def test_parts_of_rows_are_read_with_one_call(tmp_path, monkeypatch, missing):
    """And not with one call of Python's for each row."""
    if not background.THERE:
        pytest.skip("there was no C compiler")
    values = RNG.standard_normal((200, 30_000)).astype("f4")
    values[64:128] = 0 if missing else values[64:128]
    make(tmp_path / "a", values, compressors=None, chunks=(64, 30_000), fill_value=0, overwrite=True)
    assert (tmp_path / "a" / "c" / "1").exists() != missing
    source = inputs.open_input(str(tmp_path / "a")).source
    calls, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(args) or real(*args))
    found = pieces(source, (3, 200), (10_000, 12_000), 1 << 20)
    assert calls == []
    for (piece, view, nbytes), (start, stop) in zip(
        found, [(3, 64), (64, 128), (128, 192), (192, 200)], strict=True
    ):
        assert piece.rows == (start, stop)
        assert np.array_equal(view, values[start:stop, 10_000:12_000])
        assert nbytes == (0 if missing and start == 64 else (stop - start) * 2000 * 4)


def test_parts_of_rows_of_a_chunk_that_was_cut_off(tmp_path):
    make(tmp_path / "a", np.ones((128, 30_000), "f4"), compressors=None, chunks=(64, 30_000))
    source = inputs.open_input(str(tmp_path / "a")).source
    chunk, before = tmp_path / "a" / "c" / "1" / "0", open_files()
    os.truncate(chunk, chunk.stat().st_size - 60_000 * 4)
    with pytest.raises(ooc_gemm.StoreError, match=r"chunk c/1/0 holds \d+ bytes instead of"):
        pieces(source, (0, 128), (10_000, 12_000), 1 << 20)
    assert open_files() == before
