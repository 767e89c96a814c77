"""Advice on chunks."""

from dataclasses import replace

import pytest

from ooc_gemm.planning import layouts
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import make_plan

MiB = 1 << 20


GPU = Rates(5e14, 3.4e9, 2.9e9, 5e10, 5e10, shared=False, decode=2e9)


def gpu_problem(a, b):
    n = 100_000
    return Problem(n, n, n, a, b, Matrix(n, n, 2, 1, 1), 2, 4), Budget(2 << 30, 0, 5 << 30)


GOOD = Matrix(100_000, 100_000, 2, 2048, 2048)


THIN = replace(GOOD, chunk_rows=1, chunk_cols=100_000, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (THIN, GOOD, "chunks of 1×100000 in A make"),
        (replace(THIN, fortran=True, transposed=True), GOOD, "chunks of 100000×1 in A make"),
        (GOOD, replace(THIN, transposed=True), "chunks of 1×100000 in B make"),
        (THIN, replace(THIN, transposed=True), "chunks of 1×100000 in A and 1×100000 in B make"),
    ],
)
def test_advice_is_what_a_plan_with_those_chunks_says(a, b, words):
    problem, budget = gpu_problem(a, b)
    plan = make_plan(problem, budget, GPU)
    advised = replace(plan, advice=layouts.advice(*layouts.Planned.by(plan)))
    assert advised.advice.startswith(words)
    times = float(advised.advice.split("this ")[1].split()[0])
    rows, cols = map(int, advised.advice.split("raw ones of ")[1].split()[0].split("×"))
    assert MiB <= rows * cols * 2 < 32 * MiB
    rows, cols = (cols, rows) if a.fortran else (rows, cols)
    better = replace(GOOD, chunk_rows=rows, chunk_cols=cols)
    after = replace(
        problem,
        a=replace(better, transposed=a.transposed) if "in A" in words else a,
        b=replace(better, transposed=b.transposed) if "in B" in words else b,
    )
    predicted = make_plan(after, budget, GPU).predicted_seconds
    assert plan.predicted_seconds / predicted == pytest.approx(times, rel=0.03)
    assert advised.advice in " ".join(advised.table().split())
    assert advised.to_dict()["advice"] == advised.advice


@pytest.mark.parametrize(
    "other", [GOOD, replace(GOOD, chunk_rows=4096, whole=True), replace(GOOD, chunk_cols=100_000)]
)
def test_no_advice_for_good_chunks_and_no_time_spent_on_it(other, monkeypatch):
    problem, budget = gpu_problem(GOOD, other)
    plan = make_plan(problem, budget, replace(GPU, flops=5e13))
    monkeypatch.setattr(layouts, "predict", None)
    assert layouts.advice(*layouts.Planned.by(plan)) is None
    assert plan.to_dict()["advice"] is None


@pytest.mark.slow
def test_no_operand_is_looked_at_alone_where_the_other_keeps_it_slow(monkeypatch):
    """It takes longer to decode one of them than all of the product with other chunks."""
    slow = replace(GOOD, chunk_rows=1024, chunk_cols=1024, whole=True)
    problem, budget = gpu_problem(slow, slow)
    plan, searches = make_plan(problem, budget, replace(GPU, decode=2e8)), []
    real = layouts.predict
    monkeypatch.setattr(layouts, "predict", lambda p, *rest: searches.append(p) or real(p, *rest))
    assert "in A and" in layouts.advice(*layouts.Planned.by(plan))
    assert searches
    assert all(p.a != problem.a and p.b != problem.b for p in searches)
