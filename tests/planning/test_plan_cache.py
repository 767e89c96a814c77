"""What stays in host memory: the simulation against a search of all ways, and a run that follows it."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import zarr
from conftest import Recording, make
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc_gemm.run.rates
from examples import examples
from ooc_gemm.planning import cache


def most_found(visits, capacity):
    """The most pieces that any cache could find, by trying everything."""

    @functools.cache
    def best(number, there):
        if number == len(visits):
            return 0
        unit, pieces = visits[number]
        found = dict(there).get(unit, 0)
        after = dict(there) | {unit: pieces}
        return found + max(best(number + 1, kept) for kept in subsets(tuple(sorted(after.items()))))

    def subsets(items, room=capacity):
        if not items:
            yield ()
            return
        (unit, count), rest = items[0], items[1:]
        for kept in range(min(count, room) + 1):
            for others in subsets(rest, room - kept):
                yield ((unit, kept), *others) if kept else others

    return best(0, ())


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_no_cache_finds_more(data):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    visits = [(u, sizes[u]) for u in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))]
    capacity = data.draw(st.integers(0, 4))
    found = cache.hits(visits, capacity)
    assert sum(found) == most_found(tuple(visits), capacity)
    assert cache.most_kept(found, cache.kept(visits, found)) <= capacity


class Slow(Recording):
    """Reads as if from a disk, so that a cache pays."""

    def rates(self, arithmetic):
        return replace(super().rates(arithmetic), read=1e7, touch=1e10)


@pytest.mark.parametrize(
    "layout", [{"compressors": None}, pytest.param({}, marks=pytest.mark.slow)], ids=["raw", "zstd"]
)
@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_reads_what_the_plan_says(tmp_path, monkeypatch, layout, transposed):
    # Rates that were measured here do not count.
    monkeypatch.setattr(ooc_gemm.run.rates, "_known", lambda usual, *others: usual)
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((600, 500)), rng.standard_normal((500, 700))
    paths = [
        make(tmp_path / name, x.T if transposed else x, chunks=(64, 50), **layout)
        for name, x in (("a", a), ("b", b))
    ]
    options = {"transpose_a": transposed, "transpose_b": transposed, "chunks": (100, 100)}
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.plan(*paths, memory_limit=1, device=Slow(), **options)
    read = set()
    for spare in (0, 1 << 20, 2 << 20, 4 << 20):
        limit = small.value.minimum_memory_limit + spare
        c = str(tmp_path / "c")
        result = ooc_gemm.multiply(*paths, c, memory_limit=limit, device=Slow(), force=True, **options)
        assert np.allclose(zarr.open_array(c)[:], a @ b, rtol=1e-12, atol=1e-10)
        assert result.bytes_read == result.plan.bytes_read
        read.add((result.plan.cache_slots > 0, result.bytes_read))
    assert {cached for cached, _ in read} >= {True}
