"""Pieces of several small compressed chunks: the right elements, the bytes of the plan, and errors that name
the chunk."""

import os
import shutil

import numcodecs
import numpy as np
import obstore.store
import pytest
import zarr
from conftest import make
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

import ooc_gemm
from ooc_gemm.planning.problem import STACKED
from ooc_gemm.planning.schedule import cut
from ooc_gemm.planning.traffic import piece_read_bytes
from ooc_gemm.storage.format import zstd
from ooc_gemm.storage.io import files
from ooc_gemm.storage.read import compressed, inputs
from ooc_gemm.support.buffers import page_aligned

RNG = np.random.default_rng(6)
TWO = {"zarr_format": 2, "chunks": (16, 24)}
LAYOUTS = {
    "zstd": {"chunks": (16, 24), "compressors": ZstdCodec(level=1)},
    "ragged zstd": {"chunks": (17, 23), "compressors": ZstdCodec(level=1, checksum=True)},
    "strips": {"chunks": (3, 444), "compressors": ZstdCodec(level=1)},
    "shards": {"chunks": (16, 24), "shards": (64, 48), "compressors": ZstdCodec(level=1)},
    "shards of gzip": {"chunks": (16, 24), "shards": (64, 48), "compressors": GzipCodec(level=1)},
    "blosc": {"chunks": (16, 24), "compressors": BloscCodec(cname="lz4")},
    "lz4": {**TWO, "compressors": numcodecs.LZ4()},
    "zlib": {**TWO, "compressors": numcodecs.Zlib(1)},
    "fortran": {**TWO, "order": "F", "compressors": numcodecs.Zstd(1)},
}


def open_files():
    return len(os.listdir("/proc/self/fd"))


def pieces(source, rows, cols, slot_bytes):
    """Every piece of some rows and columns, read."""
    (slot,), found = page_aligned(1, slot_bytes), []
    for piece in cut("a", source.matrix, rows, cols, slot_bytes):
        view, nbytes = source.start(piece, slot)()
        found.append((piece, view.copy(), nbytes))
    return found


def small(path, **options):
    """20 chunks of 16 × 24, one below the other, whose zstd frames are not all equal."""
    values = RNG.integers(0, 99, (320, 24)).astype("f4")
    make(path, values, **{"chunks": (16, 24), "compressors": ZstdCodec(level=1), **options})
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("missing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_element_is_read_once(tmp_path, layout, missing):
    values = RNG.integers(0, 1 << 12, (333, 444)).astype("f4")
    make(tmp_path / "a", values, **LAYOUTS[layout])
    if missing:
        for path in (*tmp_path.glob("a/c/1"), *tmp_path.glob("a/3.*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        values = zarr.open_array(tmp_path / "a")[...]
    source = inputs.open_input(str(tmp_path / "a")).source
    s = source.matrix
    values = values.T if s.fortran else values
    assert isinstance(source, compressed.CompressedSource)
    before, (first, rows), (left, cols) = open_files(), (7, s.rows - 5), (9, s.cols - 50)
    found, counts = np.full(values.shape, np.nan), []
    for piece, view, nbytes in pieces(source, (first, rows), (left, cols), 1 << 16):
        found[slice(*piece.rows), slice(*piece.cols)] = view
        assert nbytes == piece_read_bytes(s, piece)
        counts.append(-(-(piece.rows[1] - piece.rows[0]) // s.chunk_rows))
    assert 1 < max(counts) <= STACKED
    assert np.array_equal(found[first:rows, left:cols], values[first:rows, left:cols])
    assert np.isnan(found).sum() == values.size - (rows - first) * (cols - left)
    assert open_files() == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_products_move_the_bytes_of_the_plan(tmp_path, layout, transposed):
    a, b = RNG.integers(-9, 9, (333, 444)).astype("f4"), RNG.integers(-9, 9, (444, 130)).astype("f4")
    stored = a.T.copy() if transposed else a
    make(tmp_path / "a", stored, **LAYOUTS[layout])
    make(tmp_path / "b", b, chunks=(50, 40))
    args = str(tmp_path / "a"), str(tmp_path / "b")
    with pytest.raises(ooc_gemm.BudgetError) as refused:
        ooc_gemm.plan(*args, memory_limit=1, device="cpu", transpose_a=transposed)
    for limit in (refused.value.minimum_memory_limit, 1 << 30):
        options = {"device": "cpu", "transpose_a": transposed, "force": True}
        result = ooc_gemm.multiply(*args, str(tmp_path / "c"), memory_limit=limit, **options)
        assert np.array_equal(zarr.open_array(tmp_path / "c")[...], a @ b)
        assert result.bytes_read == result.plan.bytes_read


@pytest.mark.parametrize("shards", [None, (1024, 1024)])
def test_readers_take_a_task_for_several_small_chunks(tmp_path, monkeypatch, shards):
    make(tmp_path / "a", np.eye(1024, dtype="f4"), chunks=(64, 64), shards=shards, compressors=ZstdCodec())
    tasks, read = [], compressed.CompressedSource.read

    def counted(self, piece, slot):
        tasks.append(piece)
        return read(self, piece, slot)

    monkeypatch.setattr(compressed.CompressedSource, "read", counted)
    b = np.ones((1024, 8), "f4")
    result = ooc_gemm.multiply(str(tmp_path / "a"), b, device="cpu", verify=False)
    assert np.array_equal(result.array, b)
    assert len(tasks) <= 256 // 8


def test_small_chunks_come_in_stacks_and_large_ones_alone(tmp_path):
    counts = {}
    for rows in (16, 64, 65, 128):
        make(tmp_path / str(rows), np.zeros((1040, 1024), "f4"), chunks=(rows, 1024), fill_value=1)
        matrix = inputs.open_input(str(tmp_path / str(rows))).matrix
        counts[rows] = len(list(cut("a", matrix, (0, 1040), (0, 1024), 4 << 20)))
    assert counts == {16: 5, 64: 2, 65: 16, 128: 9}


def test_objects_are_not_stacked():
    store = zarr.storage.ObjectStore(obstore.store.MemoryStore())
    array = zarr.create_array(store, shape=(64, 8), chunks=(8, 8), dtype="f4", compressors=ZstdCodec())
    array[...] = 1
    assert not inputs.open_input(array).matrix.traits.stackable


FAULTS = ["short", "rotten", "empty", "longer", "other", "gone", "pipe", "folder"]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_names_the_chunk(tmp_path, fault):
    small(tmp_path / "a")
    source = inputs.open_input(str(tmp_path / "a")).source
    chunk, before = tmp_path / "a" / "c" / "5" / "0", open_files()
    data = chunk.read_bytes()
    chunk.unlink()
    other = bytes(numcodecs.Zstd(1).encode(RNG.bytes(15 * 24 * 4)))
    wrong = {"short": data[:-1], "rotten": data[:12] + bytes(len(data) - 12), "empty": b""}
    wrong |= {"longer": data + b"x", "other": other}
    if fault in wrong:
        chunk.write_bytes(wrong[fault])
    elif fault == "pipe":
        os.mkfifo(chunk)
    elif fault == "folder":
        chunk.mkdir()
    with pytest.raises(ooc_gemm.StoreError, match="chunk c/5/0 "):
        pieces(source, (0, 320), (0, 24), 1 << 20)
    assert open_files() == before


def test_an_error_names_the_shard(tmp_path):
    small(tmp_path / "a", shards=(64, 24))
    source = inputs.open_input(str(tmp_path / "a")).source
    shard, (offset, size) = tmp_path / "a" / "c" / "1" / "0", source._chunks.extent(5, 0)
    data = bytearray(shard.read_bytes())
    data[offset + 8 : offset + size] = bytes(size - 8)
    shard.write_bytes(data)
    with pytest.raises(ooc_gemm.StoreError, match="chunk c/1/0 "):
        pieces(source, (0, 320), (0, 24), 1 << 20)


def test_a_chunk_that_was_written_again_is_read_as_it_is_now(tmp_path):
    """It has another size than when the array was opened."""
    values = small(tmp_path / "a")
    source = inputs.open_input(str(tmp_path / "a")).source
    zarr.open_array(tmp_path / "a")[80:96] = values[80:96] = 7
    found = np.concatenate([view for _, view, _ in pieces(source, (0, 320), (0, 24), 1 << 20)])
    assert np.array_equal(found, values)


def test_chunks_that_do_not_compress_are_read_past_the_page_cache(tmp_path):
    values = np.frombuffer(RNG.bytes(1 << 20), "u1").reshape(2048, 512)
    make(tmp_path / "a", values, chunks=(512, 512), compressors=ZstdCodec())
    source = inputs.open_input(str(tmp_path / "a")).source
    assert min(source.matrix.stored) > files.LEAST_DIRECT
    ((_, view, nbytes),) = pieces(source, (0, 2048), (0, 512), 1 << 20)
    assert np.array_equal(view, values)
    assert nbytes == sum(source.matrix.stored)


def test_a_window_is_read_in_stacks(tmp_path):
    values = RNG.integers(0, 99, (333, 444)).astype("f4")
    make(tmp_path / "a", values, **LAYOUTS["zstd"])
    opened = inputs.open_input(str(tmp_path / "a")).window((32, 333), (48, 200))
    found = pieces(opened.source, (0, 301), (0, 152), 1 << 20)
    assert len(found) < 301 // 16 * 2
    for piece, view, _ in found:
        rows, cols = (slice(at + some[0], at + some[1]) for at, some in ((32, piece.rows), (48, piece.cols)))
        assert np.array_equal(view, values[rows, cols])


@pytest.mark.parametrize("there", [True, False])
def test_zstd_decodes_with_and_without_the_library_of_numcodecs(tmp_path, monkeypatch, there):
    if not there:
        monkeypatch.setattr(zstd, "_library", lambda: None)
    values = small(tmp_path / "a")
    source = inputs.open_input(str(tmp_path / "a")).source
    found = np.concatenate([view for _, view, _ in pieces(source, (0, 320), (0, 24), 1 << 20)])
    assert np.array_equal(found, values)


def test_zstd_fills_its_place_exactly_or_says_no():
    assert zstd._library() is not None, "numcodecs shows the functions of zstd"
    values = np.frombuffer(RNG.bytes(1000), "u1")
    data = np.frombuffer(numcodecs.Zstd(1).encode(values), "u1")
    for size in (999, 1000, 1001):
        memory = np.full(1100, 7, "u1")
        assert zstd.decode(data, memory[:size]) == (size == 1000)
        assert (memory[size:] == 7).all()
        assert size != 1000 or np.array_equal(memory[:1000], values)
    for wrong in (data[:-1], data[1:], data[:0], data[:4], np.append(data, data)):
        assert not zstd.decode(wrong, np.empty(1000, "u1"))


def test_parts_of_chunks_in_a_stack_are_read_once(tmp_path, monkeypatch):
    """`encoded` reads a chunk alone, where something is odd about it."""
    values = small(tmp_path / "a")
    source = inputs.open_input(str(tmp_path / "a")).source
    monkeypatch.setattr(source, "encoded", lambda i, j: pytest.fail(f"chunk {i}, {j} is read again"))
    for rows, cols in ((0, 320), (0, 24)), ((5, 315), (0, 24)), ((0, 320), (3, 20)):
        found = pieces(source, rows, cols, 1 << 20)
        assert all(np.array_equal(view, values[slice(*x.rows), slice(*x.cols)]) for x, view, _ in found)
