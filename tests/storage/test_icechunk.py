"""Arrays in a repository of Icechunk, a store with transactions that takes no keys but Zarr's."""

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore, WrapperStore

import ooc_gemm
from ooc_gemm import Error, InputError

icechunk = pytest.importorskip("icechunk")

CPU = {"device": "cpu", "memory_limit": "1GiB"}
A = np.random.default_rng(1).integers(-9, 9, (300, 200)).astype("f4")


@pytest.fixture
def repository(tmp_path):
    found = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "repository")))
    session = found.writable_session("main")
    zarr.create_array(session.store, name="a", data=A, chunks=(70, 60))
    zarr.create_array(session.store, name="small", data=A, chunks=(9, 9))  # which lie in its manifests
    session.commit("inputs")
    return found


def read(repository, name):
    return zarr.open_array(repository.readonly_session("main").store, path=name, mode="r")


@pytest.mark.parametrize("name", ["a", "small"])
def test_inputs(repository, tmp_path, name):
    x = read(repository, name)
    result = ooc_gemm.multiply(x, x, tmp_path / "c", transpose_b=True, **CPU)
    assert np.array_equal(result.array[...], A @ A.T)
    assert ooc_gemm.verify(x, x, tmp_path / "c", transpose_b=True).ok


@pytest.mark.parametrize("beta", [0, 2])
def test_a_result_is_seen_once_its_session_is_committed(repository, beta):
    old = np.arange(90000, dtype="f4").reshape(300, 300)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="c", data=old, chunks=(100, 90))
    session.commit("c")
    session = repository.writable_session("main")
    x = read(repository, "a")
    c = zarr.open_array(session.store, path="c")
    result = ooc_gemm.multiply(x, x, c, transpose_b=True, beta=beta, force=True, **CPU)
    right = A @ A.T + beta * old
    assert np.array_equal(result.array[...], right)
    assert np.array_equal(read(repository, "c")[...], old)
    session.commit("product")
    assert np.array_equal(read(repository, "c")[...], right)
    assert "ooc-gemm" in read(repository, "c").attrs


def test_errors_name_the_array(repository):
    x = read(repository, "a")
    with pytest.raises(InputError, match=r"^IcechunkStore/a is open for reading only"):
        ooc_gemm.multiply(A @ A.T, A, x, force=True, **CPU)


class FailsOnce(WrapperStore):
    """Fails the first time that something is stored."""

    failed = False

    async def set(self, key, value):
        if not self.failed:
            self.failed = True
            raise ConnectionError("nobody answers")
        await super().set(key, value)


def test_a_store_that_fails_once_is_none_of_those():
    """There an unfinished C would be an array."""
    store = MemoryStore()
    zarr.create_array(store, name="c", data=np.ones((300, 300), "f4"), chunks=(100, 90))
    before = dict(store._store_dict)
    c = zarr.open_array(FailsOnce(store), path="c", mode="r+")
    with pytest.raises(Error, match="nobody answers"):
        ooc_gemm.multiply(A, A, c, transpose_b=True, force=True, **CPU)
    assert store._store_dict == before
