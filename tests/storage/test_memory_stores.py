"""C in a store that is memory of this process."""

import json
import subprocess
import sys

import numpy as np
import pytest
import zarr
from obstore.store import MemoryStore as ObstoreMemory
from zarr.storage import FsspecStore, LocalStore, LoggingStore, MemoryStore, ObjectStore

import ooc_gemm
from ooc_gemm.storage.read.addresses import in_memory

MiB = 1 << 20
STORES = {
    "memory": MemoryStore,
    "logged": lambda: LoggingStore(MemoryStore(), log_level="ERROR"),
    "fsspec": lambda: FsspecStore.from_url("memory://memory_stores"),
    "obstore": lambda: ObjectStore(ObstoreMemory()),
}
A = np.random.default_rng(3).integers(-9, 9, (600, 50)).astype("f4")


def new(store, shape=(600, 600), chunks=(100, 100), **layout):
    return zarr.create_array(
        STORES[store](), name="c", shape=shape, chunks=chunks, dtype="f4", overwrite=True, **layout
    )


def least(function, *args):
    """The smallest memory limit that a function accepts, in bytes."""
    with pytest.raises(ooc_gemm.BudgetError) as refused:
        function(*args, memory_limit=1, device="cpu")
    return refused.value.minimum_memory_limit


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("codecs", [{"compressors": None}, {}], ids=["raw", "compressed"])
def test_c_is_what_was_computed(store, codecs):
    """A store that keeps what it is given does not see the chunks that come after."""
    c = new(store, **codecs)
    ooc_gemm.gram(A, c, device="cpu")
    assert np.array_equal(c[...], A @ A.T)
    ooc_gemm.gram(A, c, beta=2, device="cpu")
    assert np.array_equal(c[...], 3 * (A @ A.T))


@pytest.mark.parametrize("function", [ooc_gemm.gram, ooc_gemm.cov, ooc_gemm.grm])
@pytest.mark.parametrize("store", STORES)
def test_a_c_in_memory_counts_in_the_limit(tmp_path, function, store):
    x = np.random.default_rng(4).integers(0, 3, (64, 4096)).astype("f4")
    x = np.ascontiguousarray(x.T) if function is not ooc_gemm.grm else x
    shape, counted = (4096, 4096), 64 * MiB
    layout = {"shape": shape, "chunks": (500, 500), "compressors": None}
    here = least(function, x, new(store, **layout))
    there = least(function, x, zarr.create_array(tmp_path / "c", dtype="f4", **layout))
    assert counted < here - there < 1.4 * counted  # chunks at the edge are whole ones


def test_what_is_in_memory(tmp_path):
    assert all(in_memory(new(store)) for store in STORES)
    assert not in_memory(zarr.create_array(LocalStore(tmp_path / "c"), shape=(5, 5), dtype="f4"))
    assert not in_memory(str(tmp_path / "c"))
    assert not in_memory(None)


PEAKS = """
import json, sys
import test_memory_stores
import numpy as np, ooc_gemm
x = np.random.default_rng(0).standard_normal((6000, 50)).astype("f4")
c = test_memory_stores.new(sys.argv[1], (6000, 6000), (500, 500), compressors=None)
found = []
for _ in range(3):
    limit = test_memory_stores.least(ooc_gemm.gram, x, c)
    found.append((ooc_gemm.gram(x, c, memory_limit=limit, device="cpu").peak_host_bytes, limit))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_a_c_in_memory_is_filled_again_and_again_within_the_limit(store, request):
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, store], capture_output=True, text=True, cwd=request.path.parent
    )
    assert done.returncode == 0, done.stderr
    for peak, limit in json.loads(done.stdout):
        assert 6000 * 6000 * 4 < peak <= limit
