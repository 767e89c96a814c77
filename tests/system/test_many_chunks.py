"""A C of very many chunks: what a run holds for each of them is in the ledger."""

import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import make

import ooc_gemm
from ooc_gemm import BudgetError, InputError
from ooc_gemm.storage.write import journal
from ooc_gemm.storage.write.done import IN_FOLDER, Done
from ooc_gemm.storage.write.provenance import Finished

RUN = """
import sys
import numpy as np, zarr, ooc_gemm
place, side, limit = sys.argv[1], int(sys.argv[2]), sys.argv[3]
x = np.random.default_rng(0).integers(0, 9, (side, 8)).astype("f4")
zarr.create_array(place + "/a", data=x, chunks=(side, 8), compressors=None)
zarr.create_array(place + "/b", data=x.T.copy(), chunks=(8, side), compressors=None)
result = ooc_gemm.multiply(
    place + "/a", place + "/b", place + "/c", chunks=(4, 4), device="cpu", memory_limit=limit
)
assert (result.array[:8] == x[:8] @ x.T).all()
print(result.peak_host_bytes, result.plan.host_bytes)
"""


@pytest.mark.slow
def test_a_run_that_makes_many_chunks_stays_within_its_plan(tmp_path):
    """In a process of its own: 122,500 files, which are made in memory where that is possible."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as place:
        done = subprocess.run(
            [sys.executable, "-c", RUN, place, "1400", "400MiB"], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    peak, planned = map(int, done.stdout.split())
    assert peak <= planned


def test_the_ledger_counts_the_chunks_of_a_stored_c(tmp_path):
    a = make(tmp_path / "a", np.ones((600, 16), "f4"))
    options = {"transpose_b": True, "chunks": (2, 3), "device": "cpu"}
    assert ooc_gemm.plan(a, a, **options).ledger["finished chunks"] == 300 * 200 * IN_FOLDER
    assert ooc_gemm.plan(a, a, **{**options, "chunks": (20, 30)}).ledger["finished chunks"] == 0
    assert ooc_gemm.multiply(a, a, **options).plan.ledger["finished chunks"] == 0, "C is one array in memory"
    with pytest.raises(BudgetError, match=r"C has 60000 chunks, .* give larger chunks") as error:
        ooc_gemm.multiply(a, a, tmp_path / "d", memory_limit="60MiB", **options)
    assert error.value.minimum_memory_limit > 300 * 200 * IN_FOLDER
    assert not (tmp_path / "d").exists()


def test_finished_chunks_take_a_few_bytes_each():
    grid = 400, 250
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        done = Done(grid)
        for i in range(grid[0]):
            for j in range(grid[1]):
                done[i, j] = (i + 1, j), (j, i)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(done) == 100_000
    assert held < 33 * 100_000


def test_finished_chunks_are_a_mapping():
    rng, grid = np.random.default_rng(5), (90, 100)
    done, expected = Done(grid), {}
    for i, j, size, time in rng.integers(0, (*grid, 3, 1 << 60), (20_000, 4)).tolist():
        if (i, j) in expected and size == 0:
            del done[i, j], expected[i, j]
        else:
            done[i, j] = expected[i, j] = (size, time + 1), (time, size)
        assert len(done) == len(expected)
    assert list(done.items()) == sorted(expected.items())
    assert done == expected
    assert bool(Done(grid)) is False
    for chunk in ((-1, 0), (0, 100), (90, 0)):
        assert chunk not in done
        with pytest.raises(KeyError):
            done[chunk] = (1, 2), (3, 4)
        with pytest.raises(KeyError):
            del done[chunk]


@pytest.mark.parametrize("chunk", [(7, 0), (0, -1), ("0", 0)])
def test_a_journal_of_chunks_that_c_does_not_have_is_refused(tmp_path, chunk):
    log = journal.begin_in_folder(tmp_path / "c", "c", {"options": {}})
    log.add(chunk, (1, 2), (0, 0))
    log.close()
    again = journal.resume_in_folder(tmp_path / "c", "c")
    with pytest.raises(InputError, match="the journal of c is damaged"):
        again.arrange((7, 1))
    again.close()


def test_a_finished_c_holds_nothing_for_each_chunk():
    record = {"inputs": {}, "options": {}}
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        done = Finished("c", record, (300, 400), changed=False).done
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 10_000
    assert len(done) == len(list(done)) == 120_000
    assert set(done.values()) == {((0, 0), (0, 0))}
    assert (299, 399) in done
    assert (300, 0) not in done
