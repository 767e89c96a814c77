"""A plan as an object: frozen, printed, as JSON, without what is done."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis.strategies import data, integers
from plans import planned, problems

from examples import examples
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import make_plan


def plan_of(**options):
    a = Matrix(1000, 2000, 4, 500, 500)
    b, c = dataclasses.replace(a, rows=2000, cols=1500), Matrix(1000, 1500, 4, 500, 500)
    problem = Problem(1000, 1500, 2000, a, b, c, 4, 4, **options)
    return make_plan(
        problem, Budget(1 << 30, 1 << 20, 64 << 20), Rates(1e12, 1e9, 1e9, 1e10, 1e10, shared=False)
    )


def test_a_plan_is_frozen():
    plan = plan_of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.bm = 1


@settings(max_examples=examples(15), deadline=None)
@given(problems())
def test_a_plan_is_json(case):
    for plan in planned(case):
        told = plan.to_dict()
        assert json.loads(json.dumps(told)) == told
        assert told["host_bytes"] == sum(told["ledger"].values()) <= told["memory_limit"]
        assert (told["bk"], told["panels"]) == (plan.bk, len(list(plan.panels())))
        assert told["blocks"] == len(list(plan.blocks()))


def test_the_table_has_a_line_for_all_that_counts():
    plan = plan_of(kernel="fp16x3: the fastest", types=("float32", "float32", "float32"))
    lines = dict(line.split(None, 1) for line in str(plan).splitlines() if not line.startswith(" "))
    assert str(plan) == plan.table()
    assert lines["product"] == "1000×2000 · 2000×1500"
    assert lines["kernel"] == "fp16x3: the fastest"
    assert lines["type"] == "of C      float32, of float32 · float32"
    assert f"{plan.block_count} of {plan.bm}×{plan.bn}" in str(plan)
    for title in ("read", "written", "lower", "predicted", "host", "device"):
        assert title in lines
    for name, size in plan.ledger.items():
        assert (f"  {name} " in str(plan)) == bool(size)


@settings(max_examples=examples(60), deadline=None)
@given(problems(), data())
def test_operations_are_those_of_the_blocks(case, some):
    """Blocks at an edge are smaller, and later ones may be narrower."""
    for plan in planned(case):
        p, blocks = plan.problem, list(plan.blocks())
        each = [block.flops(p.k) for block in blocks]
        assert sum(each) == plan.flops == p.flops
        count = some.draw(integers(0, len(blocks)))
        left = plan.without(plan.all_but(blocks[count:]))
        assert left.flops == sum(each[count:])
        for stage, seconds in plan.stage_seconds.items():
            assert left.stage_seconds[stage] == pytest.approx(seconds * left.flops / max(1, plan.flops))


def test_nothing_is_left_of_a_plan_that_is_done():
    plan = plan_of()
    down, across = plan.problem.c.grid
    left = plan.without(frozenset((i, j) for i in range(down) for j in range(across)))
    assert list(left.blocks()) == []
    assert (left.bytes_read, left.bytes_written, left.bytes_uploaded, left.predicted_seconds) == (0, 0, 0, 0)
    assert plan.without(frozenset()).to_dict() == plan.to_dict()
