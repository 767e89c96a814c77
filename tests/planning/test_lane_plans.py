"""Plans with lanes: threads that multiply panels of their own."""

from dataclasses import replace

import pytest

from ooc_gemm.planning.candidates import LANE_BYTES, LANE_ELEMENTS
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.panels import SUMS_OF_LANE
from ooc_gemm.planning.problem import Matrix, MiB, Problem
from ooc_gemm.planning.search import make_plan

RATES = Rates(1e11, 5e9, 2e9, 8e9, 8e9, shared=True)
K = 1 << 20


def tall(m=256, k=K, chunk=4096, **more):
    a = Matrix(k, m, 4, chunk, m, transposed=True)
    return Problem(
        m, m, k, a, replace(a, transposed=False), Matrix(m, m, 4, m, m), 4, 4, symmetric=True, **more
    )


def budget(host=1024 * MiB, lanes=2, **more):
    return Budget(host, 0, None, lanes=lanes, **more)


def test_a_small_c_has_lanes_whose_panels_stay_in_the_caches():
    plan = make_plan(tall(), budget(in_memory=True), RATES)
    assert plan.k_panels.lanes == plan.readers == plan.slots == 2
    assert 256 * plan.bk * 4 <= LANE_BYTES
    at_full_rate = plan.problem.flops / RATES.flops
    assert at_full_rate < plan.stage_seconds["compute"] < 1.25 * at_full_rate
    assert not make_plan(tall(), budget(lanes=0), RATES).k_panels.lanes


def test_a_disk_has_as_many_lanes_as_readers():
    plan = make_plan(tall(), budget(readers=6), RATES)
    assert plan.k_panels.lanes == plan.readers == 6


@pytest.mark.parametrize(("cached", "lanes", "cores", "found"), [
    (0.5, 2, 2, 6), (0.95, 2, 2, 2), (1.0, 1, 2, 2), (1.0, 1, 0, 1), (1.0, 4, 16, 6), (1.0, 8, 16, 8),
])  # fmt: skip
def test_there_are_no_more_lanes_than_cores_where_nobody_waits_for_a_disk(cached, lanes, cores, found):
    """Where fewer threads multiply than there are cores, others read meanwhile."""
    rates = replace(RATES, cached=cached)
    assert make_plan(tall(), budget(readers=6, lanes=lanes, cores=cores), rates).k_panels.lanes == found


def test_workers_have_a_range_of_k_each_where_lanes_take_less_than_two_seconds():
    """Without lanes it would take longer, and each worker would have two."""
    rates = replace(RATES, flops=1.2e11, cached=1.0)
    problem = replace(tall(k=2_000_000), symmetric=False, same=True, read_alike=True)
    plans = [make_plan(problem, budget(lanes=lanes, workers=2), rates) for lanes in (1, 0)]
    assert [plan.problem.parts for plan in plans] == [2, 4]
    assert plans[0].predicted_seconds < 2.0


def test_sums_and_panels_are_in_the_ledger():
    plan = make_plan(tall(), budget(in_memory=True), RATES)
    block = 256 * 256 * 4
    assert plan.k_panels.sums == 2 * SUMS_OF_LANE
    assert plan.ledger["C blocks"] == plan.k_panels.sums * block
    assert plan.ledger["panels"] == 2 * 2 * 256 * plan.bk * 4
    assert plan.ledger["read ring"] == 2 * plan.slot_bytes


def test_pieces_of_an_array_that_is_both_operands_are_read_once():
    """Where one of them is transposed; each lane then has one slot."""
    other = replace(tall(), symmetric=False)
    each = (replace(other, same=True, read_alike=alike) for alike in (False, True))
    plans = [make_plan(one, budget(in_memory=True), RATES) for one in each]
    assert [plan.k_panels.lanes for plan in plans] == [2, 2]
    assert [plan.slots for plan in plans] == [4, 2]
    assert plans[0].bytes_read == 2 * plans[1].bytes_read == 2 * K * 256 * 4
    assert plans[1].stage_seconds["read"] < 0.6 * plans[0].stage_seconds["read"]
    for plan in plans:
        left = plan.without(frozenset())
        assert left.bytes_read == plan.bytes_read
        assert left.bytes_exchanged == plan.bytes_exchanged == 0


def test_an_operand_that_is_copied_to_other_chunks_is_read_by_itself():
    """Also where none is transposed, or both are."""
    p = replace(tall(), symmetric=False, same=True, read_alike=True)
    others = (
        replace(p, b=replace(p.b, chunk_rows=512)),
        replace(p, a=replace(p.a, whole=True)),
        replace(p, b=replace(p.b, rows=p.b.cols, cols=p.b.rows, chunk_rows=256, transposed=True)),
    )
    for one in others:
        plan = make_plan(one, budget(in_memory=True), RATES)
        assert plan.k_panels.lanes
        assert not plan.shares_pieces
        assert plan.bytes_read >= 2 * K * 256 * 4


def test_a_large_c_and_a_short_k_have_no_lanes():
    side = int(LANE_ELEMENTS**0.5)
    assert make_plan(tall(side, chunk=1024), budget(), RATES).k_panels.lanes
    assert not make_plan(tall(side + 8, chunk=1024), budget(), RATES).k_panels.lanes
    assert not make_plan(tall(k=512), budget(), RATES).k_panels.lanes


def test_panels_without_lanes_are_not_as_large_as_memory_allows():
    """The system would clear gigabytes of panels that are filled once."""
    plan = make_plan(tall(512), budget(64 * 1024 * MiB, lanes=0), RATES)
    assert plan.ledger["panels"] <= 512 * MiB


@pytest.mark.parametrize("depth", [1024, 32768])
def test_chunks_that_are_decoded_are_decoded_once(depth):
    """Panels of them may be deeper than the caches."""
    problem = tall(chunk=depth)
    stored = (depth * 256,) * (K // depth)
    a = replace(problem.a, whole=True, stored=stored)
    plan = make_plan(replace(problem, a=a, b=replace(a, transposed=False)), budget(), RATES)
    assert plan.k_panels.lanes
    assert plan.bk % depth == 0
    assert plan.bytes_read == sum(stored)
