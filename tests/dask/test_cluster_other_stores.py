"""Arrays in stores that zarr reads: the client alone asks such a store how large chunks are."""

import threading

import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore

pytest.importorskip("distributed")

import dask.array as da
from worker_clusters import cluster

import ooc_gemm
from ooc_gemm.storage.read import inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LIMITS = {"memory_limit": "2GiB", "device": "cpu"}
A = np.random.default_rng(1).integers(0, 9, (300, 40)).astype("f4")
A[:50, :20] = 0  # a chunk that is not stored


@pytest.fixture
def x(tmp_path):
    """In a file system of fsspec's, which all threads of this process see."""
    store = FsspecStore.from_url(f"memory://{tmp_path}")
    return zarr.create_array(store, name="x", data=A, chunks=(50, 20))


@pytest.fixture
def looks(monkeypatch):
    """The threads in which a store was asked for the sizes of chunks."""
    found, sized = [], inputs.sized

    def noted(*given):
        found.append(threading.current_thread())
        return sized(*given)

    monkeypatch.setattr(inputs, "sized", noted)
    return found


WORK = {
    "multiply": lambda x, out: ooc_gemm.dask.multiply(x, x, out, transpose_b=True, chunks=(50, 50), **LIMITS),
    "threshold": lambda x, out: ooc_gemm.threshold(x, out=out, least=0.5),
    "topk": lambda x, out: ooc_gemm.topk(x, out=out, k=3),
    "pca": lambda x, out: ooc_gemm.pca(x, 3, scores=out),
    "lstsq": lambda x, out: ooc_gemm.lstsq(x, x, out, ridge=1.0),
}


@pytest.mark.parametrize("work", WORK)
def test_workers_do_not_ask_for_the_sizes_of_chunks(tmp_path, x, looks, work):
    with cluster(2) as client, client.as_current(), ooc_gemm.dask.on(client, **LIMITS):
        found = WORK[work](x, tmp_path / "out")
    assert set(looks) == {threading.current_thread()}
    if work in ("multiply", "threshold", "topk"):
        assert found.bytes_read == found.plan.bytes_read


def test_tasks_of_dask_arrays_do_not_ask_for_the_sizes_of_chunks(x, looks):
    y = zarr.create_array(x.store_path.store, name="y", data=A.T.copy(), chunks=(20, 50))
    z = ooc_gemm.dask.matmul(da.from_zarr(x), da.from_zarr(y))
    assert np.array_equal(z.compute(scheduler="threads"), A @ A.T)
    assert not looks
