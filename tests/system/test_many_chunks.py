"""A C of very many chunks: what a run holds for each of them."""

import tracemalloc

import numpy as np
import pytest

from ooc_gemm import InputError
from ooc_gemm.storage.write import journal
from ooc_gemm.storage.write.done import Done


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
