"""When workers of a cluster cut k and not C, and what the plans of the ranges read."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from plans import RATES, check_plan, planned, problems

import ooc_gemm.planning.cost
from examples import examples
from ooc_gemm.planning.machine import Budget
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import make_plan, predict

GiB = 1 << 30


def gram(m, k, chunk, **more):
    """AᵀA of a stored k×m array in chunks of so many rows."""
    a = Matrix(k, m, 4, chunk, m, transposed=True)
    return Problem(m, m, k, a, replace(a, transposed=False), Matrix(m, m, 4, 1, 1), 4, 4, **more)


def planned_for(problem, workers, host=GiB):
    return make_plan(problem, Budget(host, 0, None, workers=workers), RATES)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_small_c_of_tall_data_is_cut_along_k(symmetric):
    problem = gram(256, 2_000_000, 16384, symmetric=symmetric)
    alone, two, eight = (planned_for(problem, workers) for workers in (1, 2, 8))
    assert (alone.problem.parts, "partial sums" in alone.ledger) == (1, False)
    assert two.problem.parts >= 2
    assert eight.problem.parts >= 8
    assert two.predicted_seconds < 0.6 * alone.predicted_seconds
    assert eight.predicted_seconds < 0.2 * alone.predicted_seconds
    assert two.bytes_read == eight.bytes_read == alone.bytes_read
    assert two.ledger["partial sums"] == 3 * 256 * 256 * 4
    assert two.host_bytes == sum(two.ledger.values()) <= GiB
    assert "workers add up their blocks" in str(two).replace("\n", " ")
    assert two.to_dict()["k_ranges"] == len(two.problem.k_ranges)
    assert predict(problem, two.budget, RATES) == pytest.approx(two.predicted_seconds)


def test_a_large_c_is_cut_itself():
    a = Matrix(16384, 16384, 4, 1024, 1024)
    problem = Problem(16384, 16384, 16384, a, a, a, 4, 4)
    assert planned_for(problem, 4).problem.parts == 1


def test_where_k_cannot_be_cut_c_is():
    assert planned_for(gram(256, 2_000_000, 2_000_000), 2).problem.parts == 1


def test_sums_that_take_long_to_give_on_are_not_made(monkeypatch):
    problem = gram(256, 2_000_000, 16384)
    monkeypatch.setattr(ooc_gemm.planning.cost, "TASK_SECONDS", 1000.0)
    assert planned_for(problem, 2).problem.parts == 1


def test_the_ranges_of_a_plan_are_plans_that_cover_k():
    @settings(max_examples=examples(30), deadline=None)
    @given(problems())
    def check(case):
        problem, budget, rates = case
        problem = replace(problem, parts=3)
        parts = problem.k_ranges
        assert [k for start, stop in parts for k in range(start, stop)] == list(range(problem.k))
        assert len(parts) <= 3
        for plan in planned((problem, budget, rates)):
            moved = []
            for start, stop in parts:
                found = plan.within(start, stop)
                found = replace(found, bytes_read=found._traffic().read)
                assert found.problem.reads_c == (problem.reads_c and start == 0)
                if not found.problem.reads_c:
                    check_plan(replace(found, lower_bound_bytes=0))
                moved.append(found.bytes_read)
            assert sum(moved) == plan.without(frozenset()).bytes_read

    check()
