"""Sets of chunks of C are sets, and take a byte for each chunk."""

import pickle
import sys
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from ooc_gemm.planning.chunk_set import ChunkSet

GRIDS = st.tuples(st.integers(0, 7), st.integers(0, 7))


@settings(max_examples=examples(200), deadline=None)
@given(GRIDS, st.data(), st.booleans())
def test_it_is_a_set(grid, data, inverted):
    every = {(i, j) for i in range(grid[0]) for j in range(grid[1])}
    chunks = data.draw(st.sets(st.sampled_from(sorted(every)))) if every else set()
    expected = every - chunks if inverted else chunks
    found = ChunkSet(grid, iter(chunks), inverted)
    assert found == expected == pickle.loads(pickle.dumps(found))
    assert list(found) == sorted(expected)
    assert len(found) == len(expected)
    assert bool(found) == bool(expected)
    assert all((chunk in found) == (chunk in expected) for chunk in every)
    for outside in ((-1, 0), (0, -1), (grid[0], 0), (0, grid[1]), (grid[0] - 1, grid[1])):
        assert outside not in found
    assert found | {(9, 9)} == expected | {(9, 9)}


def test_a_byte_for_each_chunk():
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        found = ChunkSet((1000, 1000), ((i, i) for i in range(1000)), inverted=True)
        held, peak = (now - before for now in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert len(found) == 999_000
    assert held < 1_010_000
    assert peak < 2_010_000
    assert len(pickle.dumps(found)) < 1_010_000
    assert sys.getsizeof(found) < 200
