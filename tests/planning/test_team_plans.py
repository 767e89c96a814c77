"""Teams of workers that read each piece once between them: what they read, hand over and hold, and when there
are none."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import check_plan, planned, problems

import ooc_gemm.planning.search
from examples import examples
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import make_plan
from ooc_gemm.planning.teams import ALONE, members, shapes
from ooc_gemm.planning.traffic import lower_bound_bytes
from ooc_gemm.support.errors import BudgetError

MiB, GiB = 1 << 20, 1 << 30
SLOW_STORE = Rates(1e13, 1e8, 1e9, 5e9, 5e9, shared=False, network=1e10)
"""Reading takes all of the time, and the network hardly any."""


@pytest.fixture
def no_task_seconds(monkeypatch):
    """Small products are spread as if they were large."""
    monkeypatch.setattr("ooc_gemm.planning.cost.TASK_SECONDS", 0.0)


def square(n, itemsize=4, chunk=1024, **more):
    s = Matrix(n, n, itemsize, chunk, chunk)
    return Problem(n, n, n, s, s, replace(s, itemsize=4), itemsize, 4, **more)


def gram(n, k, chunk=1024):
    a = Matrix(n, k, 4, chunk, chunk)
    return Problem(n, n, k, a, replace(a, transposed=True), Matrix(n, n, 4, 1, 1), 4, 4, symmetric=True)


def alone(problem, budget, rates, monkeypatch):
    """The plan without teams."""
    with monkeypatch.context() as patch:
        patch.setattr(ooc_gemm.planning.search, "shapes", lambda p, workers: [])
        return make_plan(problem, budget, rates)


def test_plans_with_teams_are_complete_and_count_every_byte(no_task_seconds):
    """Each piece is read by one worker of a group, and handed to all others of it that need it."""

    @settings(max_examples=examples(60), deadline=None)
    @given(problems(), st.integers(2, 9), st.data())
    def check(case, workers, data):
        problem, budget, rates = case
        problem = replace(problem, reads_c=False)
        rates = replace(rates, read=1e3, network=1e12, one_store=data.draw(st.booleans()))
        for plan in planned((problem, replace(budget, workers=workers), rates)):
            if plan.problem.parts > 1:
                continue
            check_plan(plan)
            p, team = plan.problem, plan.team
            assert members(p, plan.bm, plan.bn, team) <= workers
            assert max(map(len, plan.groups())) == members(p, plan.bm, plan.bn, team)
            apart = replace(plan, team=ALONE).without(frozenset())
            assert plan.bytes_read <= apart.bytes_read
            assert (apart.bytes_exchanged, plan.bytes_uploaded) == (0, apart.bytes_uploaded)
            whole = p.a.stored_bytes + (0 if p.symmetric else p.b.stored_bytes)
            assert plan.bytes_read >= whole
            assert ("handed over" in plan.ledger) == ("exchange" in plan.stage_seconds) == (team != ALONE)
            if team != ALONE:
                assert plan.ledger["handed over"] == plan.readers * plan.slot_bytes
            again = plan.without(frozenset())
            assert (again.bytes_read, again.bytes_exchanged) == (plan.bytes_read, plan.bytes_exchanged)

    check()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("workers", [2, 6, 9])
def test_large_groups_and_small_ones(no_task_seconds, whole, workers):
    """The number of blocks is no multiple of that of the workers, and chunks lie across edges of blocks."""
    a = Matrix(700, 300, 4, 64, 37, whole=whole)
    c = Matrix(700, 700, 4, 23, 23)
    general = Problem(
        700, 500, 300, a, Matrix(300, 500, 4, 41, 53, whole=whole), replace(c, cols=500), 4, 4,
        free_chunks=False,
    )  # fmt: skip
    b = replace(a, transposed=True)
    symmetric = Problem(700, 700, 300, a, b, c, 4, 4, free_chunks=False, symmetric=True)
    for problem in (general, symmetric):
        plan = make_plan(problem, Budget(600_000, 0, None, workers=workers), replace(SLOW_STORE, read=1e4))
        check_plan(replace(plan, lower_bound_bytes=0))
        assert plan.problem.symmetric == problem.symmetric
        assert (plan.team != ALONE) == (workers > 2 or not problem.symmetric)
        assert len(plan.groups()) > 1


def test_what_is_left_of_a_plan_is_counted_too(no_task_seconds):
    @settings(max_examples=examples(30), deadline=None)
    @given(problems(), st.integers(2, 9), st.data())
    def check(case, workers, data):
        problem, budget, rates = case
        rates = replace(rates, read=1e3, network=1e12)
        for plan in planned((problem, replace(budget, workers=workers), rates)):
            if plan.problem.parts > 1:
                continue
            chunks = sorted({part.chunk for block in plan.blocks() for part in plan.parts(block)})
            done = frozenset(data.draw(st.lists(st.sampled_from(chunks), max_size=len(chunks))))
            left, read, exchanged = plan.without(done), 0, 0
            for group in left.groups():
                needed = {}
                for block in group:
                    read += sum((left.problem.c.chunk_bytes if left.problem.c.whole else (
                        (piece.rows[1] - piece.rows[0]) * (piece.span[1] - piece.span[0])
                        * left.problem.c.itemsize
                    )) for piece in left.block_pieces(block))  # fmt: skip
                    for panel in left.panels():
                        for piece in left.pieces(block, panel):
                            needed.setdefault(piece.place, []).append(piece)
                for pieces in needed.values():
                    piece, s = pieces[0], {"a": left.problem.a, "b": left.problem.b}[pieces[0].operand]
                    rows, cols = piece.rows[1] - piece.rows[0], piece.cols[1] - piece.cols[0]
                    span = piece.span[1] - piece.span[0]
                    read += s.chunk_bytes if s.whole else rows * span * s.itemsize
                    exchanged += (len(pieces) - 1) * rows * cols * s.itemsize
            assert (left.bytes_read, left.bytes_exchanged) == (read, exchanged)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 8, 12, 64])
@pytest.mark.parametrize("device", [None, 4 * GiB])
def test_what_is_read_falls_with_the_memory_of_all_workers(workers, device):
    """C is seven groups down and seven across, if blocks of C take 85 % of the memory."""
    memory = 4 * GiB
    n = int(7 * np.sqrt(0.85 * workers * memory / 4)) // 1024 * 1024
    budget = Budget(memory, 0, device, workers=workers)
    plan = make_plan(square(n), budget, SLOW_STORE)
    bound = lower_bound_bytes(plan.problem, workers * memory)
    assert plan.lower_bound_bytes == bound
    assert np.prod(plan.team) > workers / 2
    assert plan.bytes_read <= 1.2 * bound


@pytest.mark.parametrize("workers", [4, 8, 64])
def test_a_c_that_all_workers_hold_together_takes_each_input_once(workers):
    plan = make_plan(square(16384, chunk=512), Budget(GiB, 0, None, workers=workers), SLOW_STORE)
    assert plan.bytes_read == 2 * 16384**2 * 4
    assert len(plan.groups()) == 1
    plan = make_plan(gram(16384, 32768, chunk=512), Budget(GiB, 0, None, workers=workers), SLOW_STORE)
    assert plan.problem.symmetric
    assert plan.bytes_read == 16384 * 32768 * 4
    assert len(plan.groups()) == 1
    assert "workers make as many blocks at the same time, and hand" in str(plan).replace("\n", " ")
    assert plan.to_dict()["team"] == list(plan.team)


@pytest.mark.slow
def test_a_slow_network_leaves_the_plan_as_it_was(monkeypatch):
    problem, budget = square(32768), Budget(GiB, 0, None, workers=8)
    before = alone(problem, budget, SLOW_STORE, monkeypatch)
    fast = make_plan(problem, budget, SLOW_STORE)
    slow = make_plan(problem, budget, replace(SLOW_STORE, network=1e6))
    assert fast.team != ALONE
    assert fast.bytes_read < 0.6 * before.bytes_read
    assert fast.predicted_seconds < before.predicted_seconds
    assert replace(slow, used_rates=before.used_rates) == before


@pytest.mark.slow
def test_a_store_behind_the_same_network_gains_nothing(monkeypatch):
    """Where pieces come over one network either way, a worker may as well read them."""
    problem, budget = square(32768), Budget(GiB, 0, None, workers=4)
    far = replace(SLOW_STORE, latency=0.01, network=SLOW_STORE.read)
    assert make_plan(problem, budget, far).predicted_seconds == pytest.approx(
        alone(problem, budget, far, monkeypatch).predicted_seconds, rel=0.1
    )


def test_workers_share_one_file_system():
    problem, budget = square(8192), Budget(GiB, 0, None, workers=4)
    each = make_plan(problem, budget, SLOW_STORE)
    together = make_plan(problem, budget, replace(SLOW_STORE, one_store=True))
    alone = make_plan(problem, replace(budget, workers=1), SLOW_STORE)
    assert together.predicted_seconds > 3 * each.predicted_seconds
    assert together.predicted_seconds >= 0.8 * alone.predicted_seconds


def test_products_that_are_reduced_have_no_teams():
    assert shapes(square(8192, row_bytes=8), 8) == []
    assert shapes(square(8192), 1) == []


def test_devices_of_unequal_speed_make_no_symmetric_product_in_teams():
    """Their strips of A come in another order as op(A) than as op(B)."""
    budget = Budget(GiB, 0, GiB, workers=4, weights=(2, 1))
    plan = make_plan(gram(16384, 32768), budget, SLOW_STORE)
    assert (plan.problem.symmetric, plan.team) == (True, ALONE)


@pytest.mark.parametrize("workers", [2, 3, 5, 6, 7, 8, 12, 64])
def test_shapes_use_the_workers(workers):
    problem = square(65536)
    found = shapes(problem, workers)
    assert all(1 < np.prod(team) <= workers for team in found)
    assert workers in [np.prod(team) for team in found]
    wide = shapes(replace(problem, m=1024, a=replace(problem.a, rows=1024)), workers)
    assert (1, workers) in wide


def test_the_smallest_limit_holds_for_workers_too():
    problem = square(2048)
    with pytest.raises(BudgetError) as refused:
        make_plan(problem, Budget(1, 0, None, workers=4), SLOW_STORE)
    least = refused.value.minimum_memory_limit
    check_plan(
        replace(make_plan(problem, Budget(least, 0, None, workers=4), SLOW_STORE), lower_bound_bytes=0)
    )
