"""Chunks between files and memory: past the page cache or through it, encoded or not; hardly any engine."""

import ctypes
import errno
import mmap
import os
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.bench import io as bench_io
from ooc_gemm.planning.schedule import Part, cut
from ooc_gemm.storage.format import codec as codec
from ooc_gemm.storage.io import files
from ooc_gemm.storage.read import decoded, inputs
from ooc_gemm.storage.read.compressed import CompressedSource
from ooc_gemm.storage.read.held import HeldSource
from ooc_gemm.storage.read.raw import RawSource
from ooc_gemm.storage.write import opening
from ooc_gemm.support.buffers import PAGE, page_aligned, scratch

MiB = 1 << 20


@pytest.fixture(autouse=True)
def forget():
    """What is known of file systems is learnt anew."""
    files._buffered.clear()
    files._blind.clear()
    yield
    files._buffered.clear()
    files._blind.clear()


@pytest.fixture
def chunk(tmp_path):
    """A file of 1 MiB and 100 bytes, not in the page cache, on a disk that can be read past it."""
    values = np.random.default_rng(0).integers(0, 256, MiB + 100, np.uint8)
    path = tmp_path / "chunk"
    path.write_bytes(values.tobytes())
    with files.ChunkFile(str(path)) as file:
        if not file._direct or not files._turn(file._fd, file._system, files.DIRECT):
            pytest.skip("this file system cannot be read past the page cache")
    bench_io.drop([str(path)])
    return str(path), values


class Calls:
    """Counts reads by what they are, and lets some fail."""

    def __init__(self, monkeypatch):
        self.log, self.fails = [], {}
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, fd, buffers, offset, flags=0):
        import fcntl

        kind = "ask" if flags else "direct" if fcntl.fcntl(fd, fcntl.F_GETFL) & files.DIRECT else "buffered"
        if kind in self.fails:
            raise OSError(self.fails[kind], os.strerror(self.fails[kind]))
        self.log.append((kind, len(buffers[0])))
        return self._preadv(fd, buffers, offset, flags)

    def kinds(self):
        return [kind for kind, _ in self.log]


def test_a_cold_chunk_is_one_read_past_the_page_cache(chunk, monkeypatch):
    path, values = chunk
    calls, into = Calls(monkeypatch), page_aligned(1, MiB)[0]
    with files.ChunkFile(path) as file:
        calls.fails["ask"] = errno.EAGAIN
        file.read(into, 0)
    assert calls.log == [("direct", MiB)]
    assert (into == values[:MiB]).all()


def test_what_is_in_memory_is_read_by_all_at_once(monkeypatch):
    """tmpfs takes O_DIRECT (Linux 6.6), which is for a few readers of a disk."""
    place = Path("/dev/shm")
    if not place.is_dir() or not files.in_memory(place.stat().st_dev):
        pytest.skip("there is no tmpfs here")
    with tempfile.NamedTemporaryFile(dir=place) as file:
        values = np.random.default_rng(0).integers(0, 256, MiB, np.uint8)
        files.write(file.name, values)
        calls, into = Calls(monkeypatch), page_aligned(1, MiB)[0]
        with files.ChunkFile(file.name) as chunk:
            chunk.read(into, 0)
    assert calls.kinds() == ["buffered"]
    assert (into == values).all()


def resident(path):
    """How many pages of a file the page cache has; asking brings in none."""
    libc, found = ctypes.CDLL(None, use_errno=True), (ctypes.c_ubyte * -(-os.path.getsize(path) // PAGE))()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        values = np.frombuffer(mapped, np.uint8)
        assert libc.mincore(ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(len(values)), found) == 0
        del values
    return sum(state & 1 for state in found)


def test_asking_the_page_cache_brings_in_next_to_nothing(chunk):
    """A fast disk may have brought the page by the time of the answer, so the answer is either."""
    path, _ = chunk
    into, brought = page_aligned(1, MiB)[0], []
    for _ in range(3):  # pages that happen to lie side by side look like a file that is read in order
        for _ in range(500):
            bench_io.drop([path])
            if not resident(path):
                break
            time.sleep(0.01)  # the system is still reading ahead
        else:
            pytest.skip("the system keeps the file in its page cache")
        with files.ChunkFile(path) as file:
            for _ in range(25):
                file._is_cached(into, 0, MiB)
        brought.append(resident(path))
    assert min(brought) <= 64  # each asks for one of 255 pages


def test_what_the_page_cache_has_is_taken_from_it(chunk, monkeypatch):
    path, values = chunk
    Path(path).read_bytes()
    calls, into = Calls(monkeypatch), page_aligned(1, MiB)[0]
    with files.ChunkFile(path) as file:
        file.read(into, 0)
    assert "direct" not in calls.kinds()
    assert calls.log[-1] == ("buffered", MiB)
    assert (into == values[:MiB]).all()


@pytest.mark.parametrize(
    ("offset", "shift", "length"),
    [
        (1, 0, MiB),
        (0, 1, MiB),
        (0, 0, 1000),
        (PAGE, 0, MiB - PAGE),
        (0, 0, MiB + 100),
        (PAGE, 0, MiB - PAGE + 100),
    ],
)
def test_every_part_is_read_as_it_is(chunk, monkeypatch, offset, shift, length):
    path, values = chunk
    calls = Calls(monkeypatch)
    calls.fails["ask"] = errno.EAGAIN
    into = page_aligned(1, 2 * MiB)[0][shift : shift + length]
    with files.ChunkFile(path) as file:
        file.read(into, offset)
    assert (into == values[offset : offset + length]).all()
    aligned = offset % PAGE == shift % PAGE == 0 and length > PAGE
    assert ("direct" in calls.kinds()) == aligned
    assert len(calls.log) <= 2


def test_a_whole_file_is_one_read_whatever_its_length(chunk, monkeypatch):
    path, values = chunk
    calls = Calls(monkeypatch)
    calls.fails["ask"] = errno.EAGAIN
    with files.ChunkFile(path) as file:
        assert (file.read_range(scratch("file", file.size), 0, file.size) == values).all()
    assert calls.kinds() == ["direct"]


def test_a_file_system_that_cannot_is_asked_once(chunk, monkeypatch):
    path, values = chunk
    calls, into = Calls(monkeypatch), page_aligned(1, MiB)[0]
    calls.fails = {"ask": errno.EOPNOTSUPP, "direct": errno.EINVAL}
    for _ in range(3):
        into[:] = 0
        with files.ChunkFile(path) as file:
            file.read(into, 0)
        assert (into == values[:MiB]).all()
    assert calls.log == [("buffered", MiB)] * 3
    assert len(files._buffered) == len(files._blind) == 1


def test_a_disk_that_fails_is_not_hidden(chunk, monkeypatch):
    path, _ = chunk
    calls = Calls(monkeypatch)
    calls.fails = {"ask": errno.EAGAIN, "direct": errno.EIO}
    with files.ChunkFile(path) as file, pytest.raises(OSError, match="Input/output"):
        file.read(page_aligned(1, MiB)[0], 0)


def test_a_file_that_ends_too_early(chunk):
    path, _ = chunk
    with files.ChunkFile(path) as file, pytest.raises(OSError, match="shorter"):
        file.read(page_aligned(1, 2 * MiB)[0], 0)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("length", [0, 100, MiB, MiB + 100])
def test_files_are_replaced_whole(tmp_path, monkeypatch, direct, length):
    import fcntl

    values = page_aligned(1, 2 * MiB)[0][:length]
    values[:] = np.random.default_rng(0).integers(0, 256, length, np.uint8)
    kinds, write = [], os.write

    def watched(fd, data):
        kinds.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & files.DIRECT))
        return write(fd, data)

    monkeypatch.setattr(os, "write", watched)
    path = tmp_path / "chunk"
    path.write_bytes(b"old")
    files.write(str(path), values, direct)
    assert path.read_bytes() == values.tobytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["chunk"]
    if not files._buffered:
        assert (True in kinds) == (direct and length >= MiB)


@pytest.mark.parametrize("direct", [False, True])
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, direct):
    path = tmp_path / "chunk"

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.write(str(path), page_aligned(1, MiB)[0], direct)
    assert not list(tmp_path.iterdir())


def test_a_write_past_the_page_cache_that_cannot_be(tmp_path, monkeypatch):
    import fcntl

    write = os.write

    def picky(fd, data):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & files.DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(fd, data)

    monkeypatch.setattr(os, "write", picky)
    values = page_aligned(1, MiB)[0]
    values[:] = 7
    files.write(str(tmp_path / "chunk"), values, True)
    assert (tmp_path / "chunk").read_bytes() == values.tobytes()


def test_large_results_go_past_the_page_cache(tmp_path, monkeypatch):
    asked = []
    write = files.write

    def watched(path, data, direct=False):
        asked.append(direct)
        write(path, data, direct)

    monkeypatch.setattr(files, "write", watched)
    for side, large in ((100, False), (8192, True)):
        array = zarr.create_array(
            tmp_path / str(side), shape=(side, side), chunks=(50, 50), dtype="f4", compressors=None
        )
        target = opening.target_at(array, "c", np.dtype("f4"), None)
        part = Part((0, 0), 0, 0, 50, 50)
        target.write(part, page_aligned(1, 50 * 50 * 4)[0])
        assert asked.pop() == large


# ------------------------------------------------------------------------------------------------- compressed

COMPRESSED = {
    "zstd": {},
    "zstd with a checksum": {"compressors": [zarr.codecs.ZstdCodec(level=1, checksum=True)]},
    "blosc": {"compressors": [zarr.codecs.BloscCodec(cname="lz4")]},
    "gzip": {"compressors": [zarr.codecs.GzipCodec(level=1)]},
    "transposed": {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
    "v2": {"zarr_format": 2},
    "v2 Fortran": {"zarr_format": 2, "order": "F"},
    **{
        f"v2 {name}": {"zarr_format": 2, "compressors": one}
        for name, one in {
            "blosc": codec.numcodecs.Blosc(),
            "lz4": codec.numcodecs.LZ4(),
            "gzip": codec.numcodecs.GZip(1),
            "zlib": codec.numcodecs.Zlib(1),
        }.items()
    },
}


def file_of(source, i, j):
    return source._chunks.place.root / source._chunks.key(i, j)


@pytest.mark.parametrize("layout", COMPRESSED)
def test_compressed_chunks_are_read_without_zarr(tmp_path, monkeypatch, layout):
    values = np.random.default_rng(0).standard_normal((70, 90)).astype("f4")
    path = make(tmp_path / "a", values, chunks=(30, 40), **COMPRESSED[layout])
    source = inputs.open_input(path).source
    assert isinstance(source, CompressedSource)
    s = source.matrix
    monkeypatch.setattr(zarr.Array, "__getitem__", None)
    found = np.zeros((s.rows, s.cols), "f4")
    for step in (7, 35, 100):  # parts of chunks, and whole ones
        found[:] = 0
        for row in range(0, s.rows, step):
            rows, moved = (row, min(s.rows, row + step)), 0
            for piece in cut("a", s, rows, (0, s.cols), s.chunk_bytes):
                view, nbytes = source.read(piece, np.empty(s.chunk_bytes, np.uint8))
                found[slice(*piece.rows), slice(*piece.cols)] = view
                moved += nbytes
                i, j = piece.chunk
                assert nbytes == os.path.getsize(file_of(source, i, j)) == s.stored[i * s.grid[1] + j]
        assert (found == (values.T if s.transposed else values)).all()


def test_a_missing_compressed_chunk_is_the_fill_value(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(50, 50), chunks=(20, 20), dtype="f4", fill_value=2)
    array[20:40, 20:40] = 1
    result = ooc_gemm.multiply(array, array, device="cpu")
    assert np.allclose(result.array, array[:] @ array[:])
    assert result.bytes_read == result.plan.bytes_read < 1000


@pytest.mark.parametrize("layout", COMPRESSED)
@pytest.mark.parametrize("size", [0, 1, 4799, 4801, 9600])
def test_a_chunk_of_another_size_is_refused(tmp_path, layout, size):
    values = np.random.default_rng(0).standard_normal((60, 80)).astype("f4")
    source = inputs.open_input(make(tmp_path / "a", values, chunks=(30, 40), **COMPRESSED[layout])).source
    data = np.zeros(size, np.uint8)
    file_of(source, 1, 1).write_bytes(bytes(source.compressor.codec.encode(data)))
    pieces = list(cut("a", source.matrix, (0, source.matrix.rows), (0, source.matrix.cols), 1 << 20))
    with pytest.raises(ooc_gemm.StoreError, match=r"chunk \S+ cannot be read or decoded .*write it again"):
        source.read(pieces[-1], np.empty(1 << 20, np.uint8))


def test_a_zstd_stream_that_does_not_say_its_size(tmp_path):
    """As other writers make them: the flag in the frame's head and the size cut out."""
    zstd = codec.find("zstd", {"level": 1})
    values = np.arange(1200, dtype="f4")
    data = bytearray(zstd.encode(values))
    assert data[4] >> 6 == 1
    assert data[4] & 0x20  # one segment: no window, a size of two bytes
    window = 0x58  # 2 MiB
    stream = bytes(data[:4]) + bytes([data[4] & 0x1F, window]) + bytes(data[7:])
    out = np.empty(4800, np.uint8)
    zstd.decode(np.frombuffer(stream, np.uint8), out)
    assert (out.view("f4") == values).all()
    with pytest.raises(RuntimeError, match="expected to decompress 4804, got 4800"):
        zstd.decode(np.frombuffer(stream, np.uint8), np.empty(4804, np.uint8))


@pytest.mark.parametrize("name", ["zstd", "blosc", "gzip", "lz4", "zlib"])
def test_decoding_lets_other_threads_run(name, request):
    """The interpreter lock is free meanwhile: otherwise sixteen readers decode like one."""
    import functools
    import sys
    import threading

    one = codec.find(name, {})
    values = np.round(np.random.default_rng(0).standard_normal(1 << 20).astype("f4"), 2)
    data, out = np.frombuffer(one.encode(values), np.uint8), np.empty(values.nbytes, np.uint8)
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1000)  # no thread has to give the lock to another one, which is not so usually
    go, ran = threading.Event(), []

    def other():
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    go.set()
    assert ran == []
    for _ in range(200):  # until the system has had a core for the other thread
        one.decode(data, out)
        if ran:
            break
    assert ran
    thread.join()
    assert (out.view("f4") == values).all()


def test_a_codec_of_another_kind_is_left_to_zarr(tmp_path):
    values = np.ones((20, 20), "f4")
    for name, options in {
        "big-endian": {"serializer": zarr.codecs.BytesCodec(endian="big")},
        "checksum": {"compressors": [zarr.codecs.Crc32cCodec()]},
        "two": {"compressors": [zarr.codecs.GzipCodec(), zarr.codecs.ZstdCodec()]},
    }.items():
        source = inputs.open_input(make(tmp_path / name, values, chunks=(10, 10), **options)).source
        assert isinstance(source, decoded.DecodedSource)


@pytest.mark.parametrize("compressor", ["zstd", "blosc"])
@pytest.mark.parametrize("out", ["f4", "f8"])
def test_compressed_results_are_written_without_zarr(tmp_path, monkeypatch, compressor, out):
    a = np.random.default_rng(0).standard_normal((70, 90)).astype("f4")
    b = np.random.default_rng(1).standard_normal((90, 50)).astype("f4")
    with monkeypatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", None)
        result = ooc_gemm.multiply(
            a, b, str(tmp_path / "c"), compressor=compressor, chunks=(30, 20), out_dtype=out, device="cpu"
        )
    found = zarr.open_array(tmp_path / "c")
    assert found.compressors
    assert np.allclose(found[:], a.astype("f8") @ b, atol=1e-4)
    assert result.bytes_written == result.plan.bytes_written
    assert not list(tmp_path.rglob("*.tmp"))
    assert sum(path.stat().st_size for path in (tmp_path / "c").rglob("c/*/*")) != result.bytes_written


def test_memory_for_a_purpose_is_the_threads_own():
    first = scratch("mine", 100)
    assert len(first) == PAGE
    assert first.ctypes.data % PAGE == 0
    assert scratch("mine", PAGE) is first
    assert scratch("other", 100) is not first
    assert len(scratch("mine", PAGE + 1, room=3 * PAGE)) == 3 * PAGE
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(scratch, "mine", 10).result() is not scratch("mine", 10)


def test_slots_lie_in_large_pages():
    """The system has them for memory that is private."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no large pages")
    slots = page_aligned(3, 16 * MiB)
    for slot in slots:
        slot[:] = 1
    held = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, stop = (int(number, 16) for number in line.split()[0].split("-"))
            here = start <= slots[1].ctypes.data < stop
        elif here and line.startswith("AnonHugePages"):
            held = int(line.split()[1]) << 10
    assert held >= 16 * MiB


def test_slots_of_the_cpu_are_page_aligned():
    from ooc_gemm.devices.cpu.device import CPU

    slots = CPU().host_memory().host_buffers(3, 5000)
    assert [len(slot) for slot in slots] == [5000] * 3
    assert all(slot.ctypes.data % PAGE == 0 for slot in slots)


# ----------------------------------------------------------------------------------------------------- shards


def nested(codecs=None, **options):
    """Shards of 30×40 elements that are made with these options of zarr's codec."""
    codecs = codecs or [zarr.codecs.BytesCodec()]
    sharding = zarr.codecs.ShardingCodec(chunk_shape=(15, 10), codecs=codecs, **options)
    return {"shards": None, "compressors": None, "chunks": (30, 40), "serializer": sharding}


SHARDED = {
    "raw": ({"compressors": None}, RawSource),
    "zstd": ({}, CompressedSource),
    "index first": (nested(index_location="start"), RawSource),
    "two codecs": (
        {"compressors": [zarr.codecs.GzipCodec(), zarr.codecs.ZstdCodec()]},
        HeldSource,
    ),
    "a checksum": ({"compressors": [zarr.codecs.Crc32cCodec()]}, HeldSource),
    "big-endian": ({"serializer": zarr.codecs.BytesCodec(endian="big"), "compressors": None}, HeldSource),
    "transposed": ({"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]}, HeldSource),
    "shards in shards": (
        nested([zarr.codecs.ShardingCodec(chunk_shape=(5, 5), codecs=[zarr.codecs.BytesCodec()])]),
        HeldSource,
    ),
    "index without a checksum": (nested(index_codecs=[zarr.codecs.BytesCodec()]), RawSource),
    "big-endian index": (
        nested(index_codecs=[zarr.codecs.BytesCodec(endian="big"), zarr.codecs.Crc32cCodec()]),
        RawSource,
    ),
    "two checksums": (
        nested(
            [zarr.codecs.BytesCodec(endian="big")],
            index_codecs=[zarr.codecs.BytesCodec(), *2 * [zarr.codecs.Crc32cCodec()]],
        ),
        HeldSource,
    ),
}


@pytest.mark.parametrize("layout", SHARDED)
def test_chunks_of_shards_are_read_by_themselves(tmp_path, layout):
    options, kind = SHARDED[layout]
    values = np.random.default_rng(0).standard_normal((70, 90)).astype("f4")
    values[:20, :20] = 0  # one chunk that is not stored, in a shard that is
    values[30:60, 40:80] = 0  # a shard that is not
    path = make(tmp_path / "a", values, **{"chunks": (15, 10), "shards": (30, 40), **options})
    source = inputs.open_input(path).source
    assert isinstance(source, kind)
    s = source.matrix
    assert (s.chunk_rows, s.chunk_cols) == (15, 10)
    found, moved = np.full((70, 90), np.nan, "f4"), 0
    for piece in cut("a", s, (0, 70), (0, 90), s.chunk_bytes):
        view, nbytes = source.read(piece, np.empty(s.chunk_bytes, np.uint8))
        found[slice(*piece.rows), slice(*piece.cols)] = view
        moved += nbytes
    assert (found == values).all()
    assert s.stored[0] == 0
    stored = [path.stat().st_size for path in (tmp_path / "a").glob("c/*/*")]
    checksums = {"index without a checksum": 0, "two checksums": 2}.get(layout, 1)
    assert sum(s.stored) == sum(stored) - len(stored) * (8 * 16 + 4 * checksums)
    if kind is not RawSource:
        assert moved == sum(s.stored)
    result = ooc_gemm.multiply(path, path, transpose_b=True, device="cpu")
    assert np.allclose(result.array, values @ values.T, atol=1e-4)
    assert result.bytes_read == result.plan.bytes_read


@pytest.mark.parametrize("layout", ["zstd", "two codecs", "a checksum", "big-endian", "transposed"])
def test_the_index_of_a_shard_is_read_once(tmp_path, monkeypatch, layout):
    values = np.random.default_rng(0).standard_normal((60, 40)).astype("f4")
    path = make(tmp_path / "a", values, chunks=(15, 10), shards=(30, 40), **SHARDED[layout][0])
    calls = Calls(monkeypatch)
    source = inputs.open_input(path).source
    assert calls.log == [("buffered", 8 * 16 + 4)] * 2
    calls.log.clear()
    for piece in cut("a", source.matrix, (0, 60), (0, 40), source.matrix.chunk_bytes):
        source.read(piece, np.empty(source.matrix.chunk_bytes, np.uint8))
    assert calls.kinds() == ["buffered"] * 16


def test_large_chunks_of_shards_go_past_the_page_cache(chunk, tmp_path, monkeypatch):
    values = np.random.default_rng(0).standard_normal((1024, 512)).astype("f4")
    for name, options in (("raw", {"compressors": None}), ("zstd", {})):
        path = make(tmp_path / name, values, chunks=(512, 256), shards=(1024, 512), **options)
        bench_io.drop([f"{path}/c/0/0"])
        source = inputs.open_input(path).source
        slot, calls = page_aligned(1, source.matrix.chunk_bytes)[0], Calls(monkeypatch)
        calls.fails["ask"] = errno.EAGAIN
        for piece in cut("a", source.matrix, (0, 1024), (0, 512), len(slot)):
            view, _ = source.read(piece, slot)
            assert (view == values[slice(*piece.rows), slice(*piece.cols)]).all()
        assert calls.kinds() == ["direct"] * 4
        monkeypatch.undo()


@pytest.mark.parametrize("options", [{"compressors": None}, {}, SHARDED["a checksum"][0]])
def test_a_damaged_index_is_an_error_when_its_shard_is_read(tmp_path, options):
    values = np.random.default_rng(0).standard_normal((60, 40)).astype("f4")
    path = make(tmp_path / "a", values, chunks=(15, 10), shards=(30, 40), **options)
    with open(f"{path}/c/1/0", "r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"\x01")
    source = inputs.open_input(path).source
    first, *_, last = cut("a", source.matrix, (0, 60), (0, 40), source.matrix.chunk_bytes)
    source.read(first, np.empty(source.matrix.chunk_bytes, np.uint8))
    with pytest.raises(ooc_gemm.StoreError, match=r"chunk c/1/0 cannot be read .*checksum of its index"):
        source.read(last, np.empty(source.matrix.chunk_bytes, np.uint8))


def test_a_vector_in_shards(tmp_path):
    x, y = np.random.default_rng(0).standard_normal((300, 3)), np.arange(300.0)
    path = make(tmp_path / "y", y, chunks=(50,), shards=(100,))
    assert np.array_equal(ooc_gemm.lstsq(x, path).array, ooc_gemm.lstsq(x, y).array)
    weighted = ooc_gemm.gram(ooc_gemm.Operand(x, weights=path), transpose=True, device="cpu").array
    assert np.allclose(weighted, (x.T * y) @ x)


# ------------------------------------------------------------------------------------------------ measuring


def test_rates(tmp_path):
    for direct in (True, False):
        assert bench_io.write_rate(tmp_path / "w", 2 * MiB, threads=2, direct=direct, chunk=MiB) > 0
        assert bench_io.read_rate(tmp_path / "w", threads=2, direct=direct) > 0
    assert bench_io.read_rate(tmp_path / "w", threads=2, cached=True) > 0
    values = np.arange(10_000, dtype="f4").reshape(100, 100)
    path = make(tmp_path / "a", values, chunks=(30, 40))
    raw = make(tmp_path / "raw", values, chunks=(30, 40), compressors=None)
    assert bench_io.decode_rate(path, threads=2, seconds=0.01) > 0
    assert bench_io.source_rate(path, threads=2) > 0
    assert bench_io.source_rate(raw, threads=2, cold=True) > 0
    with pytest.raises(ooc_gemm.InputError, match="no compressed chunks"):
        bench_io.decode_rate(raw)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ooc_gemm.InputError, match="no files"):
        bench_io.read_rate(tmp_path / "empty")


def test_who_waits_first_reads_first():
    order, queue = [], files.Queue(1)
    came, leave = threading.Event(), threading.Event()

    def first():
        with queue:
            came.set()
            leave.wait(10)
        with queue:  # at once again: a semaphore would let it in before those who wait
            order.append("first again")

    def other(name):
        with queue:
            order.append(name)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert came.wait(10)
    for number in range(3):
        threads.append(threading.Thread(target=other, args=(number,)))
        threads[-1].start()
        while len(queue._waiting) <= number:
            time.sleep(0.001)
    leave.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert order == [0, 1, 2, "first again"]
