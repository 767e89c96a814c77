"""Arrays in stores that are neither folders nor archives nor object stores: what is read of them is what the
plan says."""

import asyncio
import json
import time

import fsspec
import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore, LoggingStore, MemoryStore, WrapperStore, ZipStore

import ooc_gemm
from ooc_gemm.storage.read import inputs, sizes

A = np.random.default_rng(1).integers(-9, 9, (190, 130)).astype("f4")
A[:50, 40:80] = 0  # a chunk that is not stored
A[:100, 80:] = 0  # a shard that is not stored
B = np.random.default_rng(2).integers(-9, 9, (130, 70)).astype("f4")
CPU = {"device": "cpu", "memory_limit": "1GiB"}
LAYOUTS = {
    "raw": {"compressors": None},
    "zstd": {},
    "version 2": {"zarr_format": 2},
    "checksums": {"compressors": zarr.codecs.Crc32cCodec()},
    "big-endian": {"serializer": zarr.codecs.BytesCodec(endian="big")},
    "Fortran": {"filters": zarr.codecs.TransposeCodec(order=(1, 0))},
    "shards": {"shards": (100, 80)},
    "shards of one chunk": {"shards": (50, 40)},
    "shards of raw chunks": {"shards": (100, 80), "compressors": None},
    "shards with their index in front": {
        "shards": {"shape": (100, 80), "index_location": "start"},
    },
}


def in_memory(tmp_path):
    return MemoryStore()


def in_fsspec(tmp_path):
    """A file system of fsspec's; it is the same in all tests."""
    return FsspecStore.from_url(f"memory://{tmp_path}")


def below_no_path(tmp_path):
    return FsspecStore.from_url("memory://")


def logged(tmp_path):
    return LoggingStore(MemoryStore(), log_level="ERROR")


def in_an_archive(tmp_path):
    """One that is being written."""
    return ZipStore(tmp_path / "a.zip", mode="w")


def in_icechunk(tmp_path):
    icechunk = pytest.importorskip("icechunk")
    found = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "repository")))
    return found.writable_session("main").store


STORES = [in_memory, in_fsspec, below_no_path, logged, in_an_archive, in_icechunk]


def product(x):
    """Multiply, and compare what was read with the plan; the result. How often zarr reads the index of a
    shard depends on its version."""
    result = ooc_gemm.multiply(x, B, **CPU)
    assert np.array_equal(result.array, A @ B)
    shards = isinstance(x, zarr.Array) and x.shards not in (None, x.chunks)
    assert ("estimate" in result.plan.table()) == shards
    if shards:
        assert B.nbytes < result.bytes_read <= result.plan.bytes_read
    else:
        assert result.bytes_read == result.plan.bytes_read
    return result


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_is_what_the_plan_says(tmp_path, layout, store):
    if (layout, store) == ("version 2", in_icechunk):
        pytest.skip("Icechunk stores version 3 only")
    options = {"chunks": (50, 40), "overwrite": store is below_no_path, **LAYOUTS[layout]}
    product(zarr.create_array(store(tmp_path), name="deep/a", data=A, **options))


@pytest.mark.parametrize("store", [in_memory, in_fsspec])
def test_an_array_at_the_top_of_its_store(tmp_path, store):
    product(zarr.create_array(store(tmp_path), data=A, chunks=(50, 40)))


def test_what_beta_reads_is_in_the_plan():
    old = np.arange(190 * 70, dtype="f4").reshape(190, 70)
    c = zarr.create_array(MemoryStore(), data=old, chunks=(60, 70))
    result = ooc_gemm.multiply(A, B, c, beta=2, force=True, **CPU)
    assert np.array_equal(c[...], A @ B + 2 * old)
    assert result.bytes_read == result.plan.bytes_read


@pytest.mark.parametrize("inline", [False, True])
def test_references_are_planned_with_the_sizes_of_what_they_refer_to(tmp_path, inline):
    zarr.create_array(str(tmp_path / "a"), data=A, chunks=(50, 40), zarr_format=2)
    refs = {}
    for path in (tmp_path / "a").iterdir():
        whole = inline or path.name.startswith(".")
        refs[f"x/{path.name}"] = path.read_bytes() if whole else [str(path), 0, path.stat().st_size]
    refs["x/0.0"] = [str(tmp_path / "a/0.0")]  # a whole file, whose size the references do not have
    local = {"remote_protocol": "file", "remote_options": {"asynchronous": True}}
    system = fsspec.filesystem("reference", fo=refs, asynchronous=True, **local)
    store = FsspecStore(system, read_only=True, path="")
    product(zarr.open_array(store, path="x", mode="r", zarr_format=2))


class Counts(MemoryStore):
    """Counts the questions for sizes."""

    asked = 0

    async def getsize(self, key):
        self.asked += 1
        return await super().getsize(key)


@pytest.mark.parametrize("layout", ["zstd", "shards"])
def test_of_very_many_chunks_a_sample_is_asked_for(monkeypatch, layout):
    monkeypatch.setattr(sizes, "MOST_ASKED", 100)
    monkeypatch.setattr(sizes, "SAMPLE", 40)
    values = np.random.default_rng(5).integers(0, 5, (300, 400)).astype("f8")
    store, shards = Counts(), (20, 20) if layout == "shards" else None
    x = zarr.create_array(store, data=values, chunks=(10, 10), shards=shards)
    opened = inputs.open_input(x)
    assert store.asked == (0 if shards else 40)
    assert opened.matrix.estimated
    plan = ooc_gemm.plan(x, x, transpose_b=True, **CPU)
    assert "estimate" in plan.table().replace("\n", " ")
    assert plan.to_dict()["bytes_read_estimated"] is True
    result = ooc_gemm.multiply(x, x, transpose_b=True, **CPU)
    assert np.array_equal(result.array, values @ values.T)
    assert result.bytes_read <= 1.02 * result.plan.bytes_read
    assert shards or result.bytes_read == pytest.approx(result.plan.bytes_read, rel=0.02)


def over_a_network(tmp_path, monkeypatch):
    """A file system that seems to be a web server: it lists nothing. And the files that it is asked for."""
    store, asked = in_fsspec(tmp_path), []
    get, info = store.fs._cat_file, store.fs._info

    async def nothing(*args, **options):
        await asyncio.sleep(0)
        return {}

    async def noted_info(path, **options):
        asked.append(path)
        return await info(path, **options)

    async def noted_get(path, **options):
        asked.append(path)
        return await get(path, **options)

    monkeypatch.setattr(store.fs, "protocol", ("http", "https"))
    monkeypatch.setattr(store.fs, "_find", nothing)
    monkeypatch.setattr(store.fs, "_info", noted_info)
    monkeypatch.setattr(store.fs, "_cat_file", noted_get)
    return store, asked


@pytest.mark.parametrize("layout", ["zstd", "shards"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_few_files_are_asked_for_where_each_is_a_request_over_a_network(
    tmp_path, monkeypatch, layout, wrapped
):
    monkeypatch.setattr(sizes, "FAR", 40)
    values = np.random.default_rng(5).integers(0, 5, (300, 400)).astype("f8")
    store, asked = over_a_network(tmp_path, monkeypatch)
    shards = (20, 20) if layout == "shards" else None
    zarr.create_array(store, data=values, chunks=(10, 10), shards=shards)
    x = zarr.open_array(LoggingStore(store, log_level="ERROR") if wrapped else store, mode="r")
    asked.clear()
    opened = inputs.open_input(x)
    assert len(asked) == 40
    assert opened.matrix.estimated
    result = ooc_gemm.multiply(x, x, transpose_b=True, **CPU)
    assert np.array_equal(result.array, values @ values.T)
    assert result.bytes_read <= 1.02 * result.plan.bytes_read
    assert shards or result.bytes_read == pytest.approx(result.plan.bytes_read, rel=0.02)


def test_a_list_without_sizes_does_not_save_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "FAR", 10)
    store, asked = over_a_network(tmp_path, monkeypatch)
    x = zarr.create_array(store, data=A, chunks=(20, 10))

    async def without_sizes(path, **options):
        await asyncio.sleep(0)
        found = store.fs.sync_fs.find(path)
        return {name: {"name": name, "size": None} for name in found}

    monkeypatch.setattr(store.fs, "_find", without_sizes)
    asked.clear()
    assert inputs.open_input(x).matrix.estimated
    assert 0 < len(asked) <= 10


@pytest.mark.parametrize("layout", ["zstd", "shards"])
@pytest.mark.parametrize("store", [in_memory, in_fsspec, logged, in_an_archive])
def test_all_files_are_asked_for_where_none_is_a_request_over_a_network(tmp_path, monkeypatch, layout, store):
    monkeypatch.setattr(sizes, "FAR", 1)
    options = {"chunks": (50, 40), **LAYOUTS[layout]}
    product(zarr.create_array(store(tmp_path), data=A, **options))


class Silent(WrapperStore):
    """Does not say how large files are without reading them."""

    read = 0

    async def get(self, key, prototype, byte_range=None):
        self.read += key.startswith("c/")
        return await super().get(key, prototype, byte_range)


def test_a_store_that_does_not_say_sizes_is_planned_with_decoded_ones():
    store = Silent(MemoryStore())
    x = zarr.create_array(store, data=A, chunks=(50, 40))
    store.read = 0
    plan = ooc_gemm.plan(x, B, **CPU)
    assert store.read == 0
    assert plan.to_dict()["bytes_read_estimated"] is True
    assert plan.bytes_read - B.nbytes >= A.nbytes
    assert np.array_equal(ooc_gemm.multiply(x, B, **CPU).array, A @ B)


class Answers(MemoryStore):
    """Gives the same answer to all questions for sizes, after a while."""

    asked = 0

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    async def getsize(self, key):
        self.asked += 1
        await asyncio.sleep(0.01)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [PermissionError("not for you"), None, -1, 1 << 70])
def test_a_store_that_does_not_say_sizes_as_it_should_is_read_all_the_same(answer):
    x = zarr.create_array(Answers(answer), data=A, chunks=(50, 40))
    plan = ooc_gemm.plan(x, B, **CPU)
    assert plan.to_dict()["bytes_read_estimated"] is True
    assert plan.bytes_read - B.nbytes >= A.nbytes
    assert np.array_equal(ooc_gemm.multiply(x, B, **CPU).array, A @ B)


@pytest.mark.parametrize("answer", [PermissionError("not for you"), None])
def test_a_store_that_does_not_say_a_size_is_not_asked_for_others(answer):
    store = Answers(answer)
    x = zarr.create_array(store, data=A, chunks=(5, 5))
    assert inputs.open_input(x).matrix.estimated
    time.sleep(0.1)
    assert store.asked <= sizes.AT_ONCE


@pytest.mark.parametrize("missing", [0, 1])
def test_sizes_of_chunks_that_are_all_there_and_raw_take_no_memory(missing):
    values = np.ones((100, 100), "f4")
    values[: 10 * missing, :10] = 0
    store = MemoryStore()
    x = zarr.create_array(store, data=values, chunks=(10, 10), compressors=None)
    stored = inputs.open_input(x).matrix.stored
    assert stored == ((0, *(400,) * 99) if missing else None)


def test_a_list_without_the_array_is_not_believed(tmp_path, monkeypatch):
    store = in_fsspec(tmp_path)
    x = zarr.create_array(store, data=A, chunks=(50, 40))

    async def nothing(*args, **options):
        await asyncio.sleep(0)
        return {}

    monkeypatch.setattr(store.fs, "_find", nothing)
    product(x)


def test_an_index_that_is_damaged_is_told_when_it_is_read():
    store = MemoryStore()
    x = zarr.create_array(store, data=A, chunks=(50, 40), shards=(100, 80))
    data = bytearray(store._store_dict["c/0/0"].to_bytes())
    data[-1] ^= 1
    store._store_dict["c/0/0"] = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(bytes(data))
    with pytest.raises(ooc_gemm.StoreError, match="chunk c/0/0 cannot be read"):
        ooc_gemm.multiply(x, B, **CPU)


def test_the_plan_of_other_inputs_is_no_estimate():
    assert ooc_gemm.plan(A, B, **CPU).to_dict()["bytes_read_estimated"] is False
    json.dumps(ooc_gemm.plan(A, B, **CPU).to_dict())
