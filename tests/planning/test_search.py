"""Which plan is chosen, and which limit is named where none fits."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import RATES, check_plan, planned, problems, smallest

import ooc_gemm
from examples import examples
from ooc_gemm.planning.candidates import MAX_DEPTH, MIN_DEPTH, Candidate, Ring, outputs, rings
from ooc_gemm.planning.chunk_set import ChunkSet
from ooc_gemm.planning.cost import CostModel
from ooc_gemm.planning.ledger import decoders
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.panels import MORE_BUFFERS, Panels
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import (
    NEAR_IDEAL,
    WORTH_KEEPING,
    WORTH_LESS,
    finish,
    least_seconds,
    make_plan,
    predict,
)
from ooc_gemm.support.intervals import reuses

GiB = 1 << 30


def test_every_plan_is_complete_and_within_its_budget():

    size, side = st.integers(1, 60), st.integers(1, 70)
    deep = st.one_of(size, st.integers(MIN_DEPTH + 1, 4 * MIN_DEPTH))

    @settings(max_examples=examples(150), deadline=None)
    @given(size, size, deep, st.tuples(side, side, side, side), st.booleans(), st.booleans(), st.booleans(),
           st.booleans(), st.sampled_from([1, 4, 16]), st.integers(0, 100_000), st.booleans())  # fmt: skip
    def check(m, n, k, chunks, ta, tb, wa, wb, item, spare, separate):
        a = Matrix(*((k, m) if ta else (m, k)), item, *chunks[:2], transposed=ta, whole=wa)
        b = Matrix(*((n, k) if tb else (k, n)), item, *chunks[2:], transposed=tb, whole=wb)
        problem = Problem(m, n, k, a, b, Matrix(m, n, item, 1, 1), item, item)
        try:
            make_plan(problem, Budget(1, 0, 1 if separate else None), RATES)
            raise AssertionError("one byte cannot be enough")
        except ooc_gemm.BudgetError as error:
            device = error.minimum_device_memory_limit
        try:
            make_plan(problem, Budget(1, 0, device), RATES)
            raise AssertionError("one byte cannot be enough")
        except ooc_gemm.BudgetError as error:
            host = error.minimum_memory_limit
        check_plan(make_plan(problem, Budget(host, 0, device), RATES))
        check_plan(make_plan(problem, Budget(host + spare, 0, device + spare if device else None), RATES))

    check()


def test_a_very_large_plan():
    n = 400_000
    s = Matrix(n, n, 2, 2048, 2048)
    plan = make_plan(Problem(n, n, n, s, s, s, 2, 4), Budget(64 << 30, 0, 80 << 30), RATES)
    assert plan.bytes_read >= 2 * n * n * 2


size, side = st.integers(1, 60), st.integers(1, 70)


@settings(max_examples=examples(60), deadline=None)
@given(size, st.one_of(size, st.integers(257, 1000)), st.tuples(side, side), st.tuples(side, side),
       st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 4, 16]), st.integers(0, 100_000),
       st.booleans())  # fmt: skip
def test_every_symmetric_plan_is_complete_and_within_its_budget(
    m, k, chunks, out, free, transposed, whole, item, spare, separate
):
    a = Matrix(*((k, m) if transposed else (m, k)), item, *chunks, transposed=transposed, whole=whole)
    c = Matrix(m, m, item, *out)
    b = replace(a, transposed=not transposed)
    problem = Problem(m, m, k, a, b, c, item, item, free_chunks=free, symmetric=True)
    rates = replace(RATES, read=1e7)
    with pytest.raises(ooc_gemm.BudgetError) as small:
        make_plan(problem, Budget(1, 0, 1 if separate else None), rates)
    device = small.value.minimum_device_memory_limit
    with pytest.raises(ooc_gemm.BudgetError) as small:
        make_plan(problem, Budget(1, 0, device), rates)
    host = small.value.minimum_memory_limit
    check_plan(make_plan(problem, Budget(host, 0, device), rates))
    plan = make_plan(problem, Budget(host + spare, 0, device + spare if device else None), rates)
    check_plan(plan)
    check_plan(make_plan(problem, Budget(1 << 40, 0, None), rates))
    one = replace(problem, whole=True)
    with pytest.raises(ooc_gemm.BudgetError) as small:
        make_plan(one, Budget(1, 0, None), rates)
    plan = make_plan(one, Budget(small.value.minimum_memory_limit, 0, None), rates)
    check_plan(plan)
    assert plan.block_count == 1
    with pytest.raises(ooc_gemm.BudgetError):
        make_plan(one, Budget(small.value.minimum_memory_limit - 1, 0, None), rates)


@pytest.mark.slow
def test_a_very_large_symmetric_plan():
    n, k = 100_000, 1_000_000
    a = Matrix(n, k, 1, 4096, 4096)
    c = Matrix(n, n, 4, 1, 1)
    problem = Problem(n, n, k, a, replace(a, transposed=True), c, 1, 4, symmetric=True)
    budget, rates = Budget(64 << 30, 0, 24 << 30), Rates(1.2e15, 3.4e9, 2.9e9, 5e10, 5e10, shared=False)
    plan, whole = (make_plan(replace(problem, symmetric=x), budget, rates) for x in (True, False))
    assert plan.bytes_read <= 0.6 * whole.bytes_read
    assert plan.predicted_seconds <= 0.6 * whole.predicted_seconds


FOUR_GPUS = Rates(9e14, 9.5e10, 5.4e10, 1.6e11, 1.5e11, shared=False, thin=440, turns=1.0)


def large_problem(n=65536, **options):
    a = Matrix(n, n, 4, 2048, 2048)
    return Problem(n, n, n, a, a, replace(a), panel_itemsize=4, block_itemsize=4, keeps_a=True, **options)


def test_op_a_stays_on_the_device_where_writing_takes_long():
    """What four H200 do with files in memory: reads and writes are half of the time, and share it."""
    rates = replace(FOUR_GPUS, piece_seconds=170e-6, touch=1.2e10, devices=4, at_once=3)
    budget = Budget(24 * GiB, GiB, 126 * GiB, GiB, readers=8, writers=32, weights=(1,) * 4)
    plan = make_plan(large_problem(), budget, rates)
    alone = make_plan(replace(large_problem(), keeps_a=False), budget, rates)
    assert plan.k_panels.resident
    assert not alone.k_panels.resident
    assert plan.predicted_seconds < 0.95 * alone.predicted_seconds
    assert plan.bytes_read == alone.bytes_read == plan.problem.a.stored_bytes * 2
    assert plan.device_bytes <= plan.budget.device
    for other in (replace(budget, workers=4), replace(budget, device=None)):
        assert not make_plan(large_problem(), other, rates).k_panels.resident
    assert not make_plan(replace(large_problem(), symmetric=True), budget, rates).k_panels.resident


def two_gpus():
    """Two H200 with files in memory, which multiply for longer than they are sent anything."""
    rates = replace(
        FOUR_GPUS, flops=4.6e14, read=7.9e10, write=4.8e10, upload=1e11, download=1e11, thin=366, devices=2
    )
    budget = Budget(24 * GiB, GiB, 126 * GiB, GiB, readers=16, writers=40, weights=(1, 1), step=1 << 20)
    return replace(budget, in_memory=True), rates


def test_panels_grow_while_op_a_comes_to_stay():
    budget, rates = two_gpus()
    plan = make_plan(large_problem(), budget, rates)
    assert plan.k_panels.resident
    depths = [stop - start for start, stop in plan.panels()]
    assert depths[0] == 2048 < depths[-1] == plan.bk
    assert plan.bytes_read == plan.problem.a.stored_bytes * 2
    rooms, (rows, size) = plan.rooms(), (plan.bm // 2, 4)
    elements = sum(lines // 2 * depth for lines, depth in rooms["a"]) + sum(map(math.prod, rooms["b"]))
    assert plan.device_ledger["panels"] == elements * size
    assert plan.device_ledger["C blocks"] == sum(plan.block_rooms()) * rows * size
    even = replace(plan.k_panels, growth=1.0, deepest=8192, buffers=MORE_BUFFERS)
    cost = CostModel(large_problem(), budget, rates)
    ring = Ring(plan.readers, plan.writers, plan.slots, 64 << 20)
    x = Candidate(plan.problem.c, plan.bm, plan.bn, plan.k_panels, plan.c_buffers, ring)
    assert cost.estimate(x).seconds < cost.estimate(x._replace(panels=even)).seconds


def test_panels_that_grow_come_in_time():
    """Two H200 bring 58 GB/s, and take 1.45 times as long to multiply what comes (measured 2026-11-29)."""
    plan = make_plan(large_problem(), *two_gpus())
    bring = (plan.bm + plan.bn) * 4 / 58e9
    came = done = waited = 0.0
    for start, stop in plan.panels():
        came += (stop - start) * bring
        waited += max(0.0, came - done)
        done = max(came, done) + 1.45 * (stop - start) * bring
    assert waited < 0.025


def test_panels_that_grow_are_not_so_deep_where_they_are_brought_slowly():
    """By rates that were measured on two H200, on 2026-11-29, the fastest of three that were tried there."""
    budget, rates = two_gpus()
    slow = replace(rates, flops=4.73e14, read=4.85e10, write=4.13e10, thin=415, turns=0.92)
    assert make_plan(large_problem(), budget, slow).bk == 12288
    assert make_plan(large_problem(), budget, replace(slow, read=7.2e10)).bk == 16384


@pytest.mark.parametrize("done", [(), (0,), (1,), (0, 2), (1, 2)])
def test_blocks_fit_their_buffers(done):
    """Also of a run that goes on, and of one of several devices, which has fewer rows."""
    plan = make_plan(large_problem(), *two_gpus())
    assert plan.k_panels.resident
    assert len(set(plan.block_rooms())) > 1
    made = [part.chunk for block in plan.blocks() if block.index in done for part in plan.parts(block)]
    left = plan.without(ChunkSet(plan.problem.c.grid, made))
    buffers = [left.c_buffer(block) for block in left.blocks()]
    assert all(block.cols <= left.block_rooms()[c] for block, c in zip(left.blocks(), buffers, strict=True))
    assert done or all(before != after for before, after in itertools.pairwise(buffers))
    assert replace(left, bm=left.bm // 2).block_rooms() == left.block_rooms()


def test_there_are_as_many_blocks_of_c_on_the_device_as_are_of_use():
    problem, budget, rates = one_gpu()
    assert make_plan(problem, replace(budget, device=126 * GiB), replace(rates, write=1e13)).c_buffers == 1
    few = Matrix(8192, 8192, 16, 1024, 1024)
    small = Problem(
        8192, 8192, 8192, few, few, few, panel_itemsize=16, block_itemsize=16, keeps_a=True, least=(600, 256)
    )
    plan = make_plan(small, replace(budget, device=3 * GiB), replace(rates, flops=3e13, thin=1099))
    each = plan.bm // 1024 * (plan.bn // 1024)
    assert plan.k_panels.columns
    assert plan.c_buffers == 1 + -(-plan.writers // each) > 3


def one_gpu():
    """One H200 with files in memory: reads and writes share the store, and take as long as multiplying."""
    a = Matrix(32768, 32768, 4, 2048, 2048)
    problem = Problem(
        32768, 32768, 32768, a, a, a, panel_itemsize=4, block_itemsize=4, keeps_a=True, least=(600, 256)
    )
    budget = Budget(8 * GiB, GiB, 8 * GiB, GiB // 2, readers=16, writers=20, step=1 << 20, in_memory=True)
    rates = Rates(
        2.3e14, 6e10, 2.9e10, 5.1e10, 4.9e10, shared=False, thin=343, turns=1.0, entering=0.6, leaving=0.6
    )
    return problem, budget, rates


def test_strips_of_both_operands_stay_where_the_first_block_would_wait_for_all_of_a():
    problem, budget, rates = one_gpu()
    plan = make_plan(problem, budget, rates)
    panels = plan.k_panels
    assert panels.resident
    assert panels.rows == -(-problem.m // plan.bm) > 1
    assert panels.columns == 2
    assert plan.bytes_read == plan.bytes_uploaded == 2 * problem.a.stored_bytes
    assert plan.device_bytes <= budget.device
    without = make_plan(problem, replace(budget, weights=(1, 1)), replace(rates, devices=2))
    assert not without.k_panels.columns
    for other in (replace(budget, workers=4), replace(budget, device=None)):
        assert not make_plan(problem, other, rates).k_panels.columns
    for change in ({"symmetric": True}, {"keeps_a": False}):
        assert not make_plan(replace(problem, **change), budget, rates).k_panels.columns


def test_a_third_pair_of_panels_is_filled_while_threads_send_pieces_on():
    """They read nothing whose turn has not come, and with two pairs would stop at each."""
    _, budget, rates = one_gpu()
    tall = Matrix(131072, 16384, 1, 4096, 4096, transposed=True)
    c = Matrix(16384, 16384, 4, 2048, 2048)
    problem = Problem(
        16384,
        16384,
        131072,
        tall,
        replace(tall, transposed=False),
        c,
        1,
        4,
        symmetric=True,
        along_k=(True, True),
    )
    rates = replace(rates, flops=1.4e15, thin=1600)
    plan = make_plan(problem, budget, rates)
    assert plan.bm == 16384
    assert plan.panel_buffers == 3
    assert plan.device_bytes <= budget.device


def test_the_first_blocks_are_made_at_the_same_time_where_they_would_wait_for_what_they_need():
    problem, budget, rates = one_gpu()
    budget = replace(budget, device=8 * GiB + GiB // 4)
    plan = make_plan(problem, budget, rates)
    assert [len(blocks) for blocks in plan.together()][:2] == [4, 1]
    assert plan.c_buffers >= 4
    assert plan.device_bytes <= budget.device
    assert "the first 4 blocks are made at the same time" in " ".join(str(plan).split())
    assert plan.to_dict()["interleaved"] == 4
    others = replace(problem, reads_c=True), replace(problem, check_itemsize=8)
    for other in others:  # the old C would come in another order, and one block at a time is checked
        panels = make_plan(other, budget, rates).k_panels
        assert panels.columns
        assert panels.interleaved == 1


@pytest.mark.parametrize(("columns", "interleaved"), [(1, 1), (2, 1), (3, 1), (2, 4), (3, 6), (1, 2)])
@pytest.mark.parametrize("done", [(), (0,), (0, 3, 4, 5, 9), (1, 2, 6, 11), range(1, 15), range(15)])
def test_strips_are_where_blocks_need_them(columns, interleaved, done):
    """Also of a run that goes on, in which some blocks are made already."""
    a = Matrix(70, 50, 4, 10, 10)
    problem = Problem(70, 50, 50, a, replace(a, rows=50), replace(a), 4, 4, keeps_a=True)
    budget, rates = Budget(GiB, 0, GiB), Rates(1e11, 1e8, 1e8, 5e9, 5e9, shared=False)
    panels = Panels(50, 20, 10, resident=True, rows=3, columns=columns, interleaved=interleaved)
    x = Candidate(outputs(problem)[0], 30, 10, panels, max(2, interleaved), rings(budget)[0])
    problem = replace(problem, c=replace(a, cols=50))
    plan = finish(problem, budget, rates, x._replace(c=problem.c))
    check_plan(plan)
    assert plan.bytes_read == plan.bytes_uploaded == (70 + 50) * 50 * 4
    made = [part.chunk for block in plan.blocks() if block.index in done for part in plan.parts(block)]
    left = plan.without(ChunkSet(problem.c.grid, made))
    check_plan(left, left.block_count < plan.block_count)
    assert left.block_count == plan.block_count - len(done)


def test_op_a_stays_only_beside_blocks_for_which_the_kernel_pays():
    budget = Budget(24 * GiB, GiB, 126 * GiB, GiB, readers=8, writers=32)
    plan = make_plan(large_problem(), budget, FOUR_GPUS)
    assert plan.k_panels.resident
    m, n, k = plan.bm, plan.bn, plan.bk
    for least in ((m * n // (m + n) + 1, 0), (0, k + 1)):
        other = make_plan(large_problem(least=least), budget, FOUR_GPUS)
        assert not other.k_panels.resident or reuses(other.bm, other.bn, other.bk, least)


def test_op_a_does_not_stay_where_there_is_no_room():
    budget = Budget(24 * GiB, GiB, 12 * GiB, GiB, readers=8, writers=32)
    assert not make_plan(large_problem(), budget, FOUR_GPUS).k_panels.resident  # A takes 16 GiB


@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_the_smallest_limit_is_the_smallest(case):
    """It is enough, and one byte less is refused, and told the same limit."""
    problem, budget, rates = case
    least = smallest(problem, budget, rates)
    make_plan(problem, least, rates)
    with pytest.raises(ooc_gemm.BudgetError) as refused:
        make_plan(problem, replace(least, host=least.host - 1), rates)
    assert refused.value.minimum_memory_limit == least.host
    assert str(least.host) in str(refused.value)
    if least.device is not None:
        with pytest.raises(ooc_gemm.BudgetError) as refused:
            make_plan(problem, replace(least, device=least.device - 1), rates)
        assert refused.value.minimum_device_memory_limit == least.device


def compared(plan):
    """Seconds that the search compares plans by: hidden stages count, too."""
    share = plan.used_rates.hidden_cost * (2 if plan.problem.symmetric else 1)
    return plan.predicted_seconds + share * sum(plan.stage_seconds.values())


def test_a_cache_costs_no_more_memory_than_it_holds():
    """More memory is left for the cache than there are pieces: it is not all touched."""
    a = Matrix(3, 1, 16, 2, 4)
    b = replace(a, transposed=True)
    problem = Problem(3, 3, 1, a, b, Matrix(3, 3, 16, 1, 1), 16, 16, free_chunks=True, symmetric=True)
    rates = Rates(1e11, 1e6, 1e6, 5e9, 5e9, shared=False, turn_seconds=0.0)
    _, more, most = planned((problem, Budget(1, 0, 1), rates))
    assert more.cache_slots == most.cache_slots > 0
    assert more.predicted_seconds == most.predicted_seconds


@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_more_memory_is_not_slower(case):
    """But for what a search gives away (to plans that are nearly ideal, to ample rings and chunks, to op(A)
    that moves), and for the time that it takes to have the memory that is used more."""
    before = None
    for plan in planned(case):
        if before and before.problem.symmetric == plan.problem.symmetric:
            had = max(0, plan.host_bytes - before.host_bytes) / case[2].touch
            assert compared(plan) <= compared(before) * NEAR_IDEAL / WORTH_LESS / WORTH_KEEPING + had
        before = plan


@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_predictions_agree(case):
    """With and without making the plan; and no plan is faster than one with memory without end."""
    problem, _, rates = case
    for plan in planned(case):
        if plan.problem.symmetric == problem.symmetric:
            assert predict(problem, plan.budget, rates) == plan.predicted_seconds
        assert plan.predicted_seconds > 0
        assert least_seconds(problem, plan.budget, rates) > 0


@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_no_plan_moves_less_than_the_lower_bound(case):
    for plan in planned(case):
        p = plan.problem
        least = p.a.stored_bytes + (0 if p.symmetric else p.b.stored_bytes)
        assert plan.bytes_read + plan.bytes_written >= plan.lower_bound_bytes >= least


def test_panels_of_a_small_c_are_deep():
    """AᵀA of a million rows: turns of a few MiB would take longer to hand over than to fill."""
    a = Matrix(1 << 20, 500, 4, 4096, 500, transposed=True)
    problem = Problem(500, 500, 1 << 20, a, replace(a, transposed=False), Matrix(500, 500, 4, 500, 500), 4, 4,
                      symmetric=True, free_chunks=False)  # fmt: skip
    rates = Rates(5e13, 3e10, 1e10, 5e10, 5e10, shared=False)
    budget = Budget(8 * GiB, 0, 8 * GiB, readers=4, writers=8, in_memory=True)
    plan = make_plan(problem, budget, rates)
    assert 2 * MAX_DEPTH <= plan.bk <= 8 * MAX_DEPTH
    assert make_plan(problem, budget, replace(rates, turn_seconds=0.0)).bk < plan.bk


extent = st.sampled_from([24, 768, 5000, 16384, 40000])
chunk = st.sampled_from([128, 512, 2048, 5000])


@settings(max_examples=examples(60), deadline=None)
@example(16384, 40000, 16384, (128, 128, 512, 128), 4, False, True, 33, 13.0, 8.5, 11.0, 32.0, False, 0,
         (0.5, 0.5, 0.5), 0.0)  # fmt: skip
@given(extent, extent, extent, st.tuples(chunk, chunk, chunk, chunk), st.sampled_from([1, 4, 8]),
       st.booleans(), st.booleans(), st.integers(28, 34), st.floats(10.0, 14.5), st.floats(8.5, 11.0),
       st.floats(9.5, 11.0), st.sampled_from([32.0, 500.0]), st.booleans(),
       st.sampled_from([0, 2]), st.tuples(*[st.floats(0.4, 1.2)] * 3),
       st.sampled_from([0.0, 1e7, 5e8]))  # fmt: skip
def test_no_candidate_that_is_left_out_would_be_faster(
    m, n, k, chunks, item, symmetric, device, room, flops, store, bus, thin, keeps, lanes, sharing, unpack
):
    """The search leaves out candidates whose bound is above the best so far. Without bounds it finds the
    same."""
    if symmetric:
        a, b = Matrix(m, k, item, *chunks[:2]), Matrix(m, k, item, *chunks[:2], transposed=True)
        n = m
    else:
        a, b = Matrix(m, k, item, *chunks[:2]), Matrix(k, n, item, *chunks[2:])
    if unpack:
        a = replace(a, whole=True, stored=(a.chunk_bytes // 3,) * math.prod(a.grid))
        a = replace(a, encoded="blosc" if device else "")
        b = replace(a, transposed=True) if symmetric else b
    problem = Problem(
        m,
        n,
        k,
        a,
        b,
        Matrix(m, n, 4, 2048, 2048),
        item,
        4,
        symmetric=symmetric,
        keeps_a=keeps and not symmetric,
    )
    budget = Budget(
        1 << room, 0, (1 << room) if device else None, readers=16, writers=8, lanes=0 if device else lanes
    )
    budget = replace(budget, decodes=256 if device else 0)
    if not decoders(problem, budget).chunks:
        problem = replace(problem, a=replace(a, encoded=""))
    rates = Rates(10**flops, 10**store, 10**store / 2, 10**bus, 10**bus, shared=not device, thin=thin)
    turns, entering, leaving = sharing
    rates = replace(rates, turns=turns, entering=entering, leaving=leaving, decode=3e9, unpack=unpack)
    found = predict(problem, budget, rates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostModel, "least", lambda self, x, may_grow=True: 0.0)
        patch.setattr(CostModel, "least_with_cache", lambda self, x, without: 0.0)
        assert found == pytest.approx(predict(problem, budget, rates), rel=1e-9)
