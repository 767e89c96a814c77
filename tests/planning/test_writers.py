"""How many writers a plan has."""

from dataclasses import replace

import pytest

from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import make_plan

GiB = 1 << 30


@pytest.mark.parametrize(("n", "writers"), [(768, 1), (1536, 4), (8192, 20)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_there_is_no_writer_without_a_chunk(n, writers, symmetric):
    """Each has a slot, which is touched and pinned before the first block is finished."""
    a, c = Matrix(n, 65536, 4, n, 4096), Matrix(n, n, 4, 768, 768)
    problem = Problem(n, n, 65536, a, replace(a, transposed=True), c, 4, 4, free_chunks=False)
    budget = Budget(8 * GiB, GiB, 8 * GiB, GiB, readers=8, writers=20)
    rates = Rates(5e13, 5e10, 4e10, 5e10, 5e10, shared=False)
    plan = make_plan(replace(problem, symmetric=symmetric), budget, rates)
    assert plan.writers == writers
    assert plan.ledger["write slots"] == writers * 768 * 768 * 4
