"""Who holds how much memory, and what a device can multiply at a time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from plans import planned, problems

from examples import examples
from ooc_gemm.planning import search
from ooc_gemm.planning.ledger import MOST_EXTENT, fits, least_device_bytes, ledgers
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import make_plan
from ooc_gemm.support.errors import BudgetError

GiB = 1 << 30
LONG = MOST_EXTENT


def problem(m, n, k):
    a, b = Matrix(m, k, 4, m, k), Matrix(k, n, 4, k, n)
    return Problem(m, n, k, a, b, Matrix(m, n, 4, 1, 1), panel_itemsize=4, block_itemsize=4)


RATES = Rates(5e13, 6e9, 3e9, 5e10, 5e10, shared=False)


BUDGET = Budget(900 * GiB, GiB, 192 * GiB, GiB, readers=8, writers=8)


@pytest.mark.parametrize("shape", [(4 * LONG, 1, 8), (1, 4 * LONG, 8), (2, 3, 16 * LONG)])
def test_no_block_of_a_plan_is_longer_than_kernels_count(shape):
    plan = make_plan(problem(*shape), BUDGET, RATES)
    assert max(plan.bm, plan.bn, plan.bk) <= MOST_EXTENT
    rates = replace(RATES, shared=True, touch=math.inf)  # so that large panels cost no time
    alone = make_plan(problem(*shape), replace(BUDGET, device=None), rates)
    assert max(alone.bm, alone.bn, alone.bk) > MOST_EXTENT, "a CPU's BLAS counts in 64 bits"


def test_chunks_of_c_that_are_too_long_are_refused():
    long = problem(4 * LONG, 1, 8)
    asked = replace(long, c=replace(long.c, chunk_rows=2 * LONG), free_chunks=False)
    with pytest.raises(BudgetError, match=r"chunks of C of 536870912×1 are longer .* give smaller chunks="):
        make_plan(asked, BUDGET, RATES)


@settings(max_examples=examples(30), deadline=None)
@given(problems())
def test_the_ledger_is_what_the_plan_promises(case):
    """Its sums stay within the limits, and its entries are the buffers that a run allocates."""
    for plan in planned(case):
        p, budget, panels = plan.problem, plan.budget, plan.k_panels
        assert plan.host_bytes == sum(plan.ledger.values()) <= budget.host
        assert plan.device_bytes == sum(plan.device_ledger.values()) <= (budget.device or 0)
        assert plan.ledger["baseline"] == budget.host_baseline
        assert plan.ledger["read ring"] == plan.slots * plan.slot_bytes
        assert plan.ledger["cache"] == plan.cache_slots * plan.slot_bytes
        assert plan.ledger["write slots"] >= plan.writers * p.c.chunk_bytes
        compute = plan.ledger if budget.device is None else plan.device_ledger
        rooms = plan.rooms()
        assert [len(rooms[name]) for name in "ab"] == [panels.a_buffers, panels.b_buffers]
        assert compute["panels"] == sum(map(math.prod, rooms["a"] + rooms["b"])) * p.panel_itemsize
        blocks = list(plan.blocks())
        for step in range(len(blocks) * plan.panel_count):
            index, number = divmod(step, plan.panel_count)
            block, (start, stop) = blocks[index], panels.ranges[number]
            for name, lines, buffer in zip("ab", (block.rows, block.cols), plan.pair(step), strict=True):
                assert lines <= rooms[name][buffer][0]
                assert stop - start <= rooms[name][buffer][1]
        assert compute["C blocks"] == plan.c_buffers * plan.bm * plan.bn * p.block_itemsize


def test_what_is_left_out_early_would_not_fit(monkeypatch):
    """The bound holds for all that is tried, whatever stays on the device, and leaves much of it out."""
    tried, left_out = 0, 0

    def asked(p, budget, x):
        nonlocal tried, left_out
        found, least = fits(p, budget, x), least_device_bytes(p, x)
        assert least <= sum(ledgers(p, budget, x)[1].values())
        tried, left_out = tried + 1, left_out + (least > budget.device)
        return found

    monkeypatch.setattr(search, "fits", asked)
    raw, s = problem(32768, 32768, 32768), Matrix(32768, 32768, 4, 3000, 1700)
    cut = replace(raw, a=s, b=replace(s, transposed=True), c=replace(raw.c, chunk_rows=1024, chunk_cols=1024))
    for asked_of in (replace(cut, keeps_a=True), replace(raw, symmetric=True), cut):
        for device in (2 * GiB, 8 * GiB, 40 * GiB):
            make_plan(asked_of, replace(BUDGET, device=device, device_baseline=GiB // 2), RATES)
    assert left_out > tried / 8 > 100
