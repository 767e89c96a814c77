"""Predicted seconds."""

from dataclasses import replace
from itertools import product

import pytest

from ooc_gemm.planning.candidates import Candidate, Ring
from ooc_gemm.planning.cost import CostModel, taking_turns
from ooc_gemm.planning.ledger import DECODED, DECODING_ROOM, decoders, parts_of
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.panels import Panels
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.schedule import count_blocks
from ooc_gemm.planning.search import finish, make_plan

MiB = 1 << 20


def test_taking_turns():
    assert taking_turns(3, 2, 1.0) == 5
    assert taking_turns(3, 2, 0.5) == 3
    assert taking_turns(0, 2, 1.0) == taking_turns(2, 0, 0.5) == 2


def test_prediction_on_a_device_of_its_own():
    """Against a hand-made schedule: what hides behind what."""
    side = 4096
    matrix = Matrix(side, side, 4, 1024, 1024)
    problem = Problem(side, side, side, matrix, matrix, matrix, 4, 4, free_chunks=False)
    budget = Budget(host=1 << 30, host_baseline=0, device=160 * MiB, readers=8, writers=4)
    size = side * side * 4

    def seconds(**changes):
        usual = {"flops": 1e30, "read": 1e30, "write": 1e30, "upload": 1e30, "download": 1e30}
        quiet = {"read_seconds": 0.0, "piece_seconds": 0.0, "turn_seconds": 0.0, "thin": 0.0, "touch": 1e30}
        made = make_plan(problem, budget, Rates(**{**usual, **quiet, "shared": False, **changes}))
        return made, made.predicted_seconds

    made, found = seconds(start=2.0)
    assert found == pytest.approx(2)
    made, found = seconds(read=1e9)
    assert found == pytest.approx(made.bytes_read / 1e9, rel=1e-6)
    made, hidden = seconds(read=1e9, begin=0.9 * found)
    assert hidden == found, "C is begun while panels are read"
    made, found = seconds(read=1e9, begin=2.0)
    assert found == 2
    made, found = seconds(read=1e9, begin=2.0, shared=True)
    assert found == pytest.approx(made.bytes_read / 1e9 + 2, rel=1e-6)
    made, found = seconds(write=1e9)
    assert found == pytest.approx(size / 1e9, rel=1e-6)
    made, together = seconds(read=1e9, write=1e9, turns=1.0)
    assert together == pytest.approx((made.bytes_read + size) / 1e9, rel=1e-6)
    made, apart = seconds(read=1e9, write=1e9, turns=0.5)
    assert made.bytes_read / 1e9 < apart < together
    made, found = seconds(flops=1e12, read=1e10)
    assert found > made.stage_seconds["compute"]


@pytest.mark.parametrize("in_memory", [True, False])
def test_slots_that_threads_pass_by_take_no_time(in_memory):
    """What they read from memory goes to a device through places of their own."""
    side = 4096
    matrix = Matrix(side, side, 4, 1024, 1024)
    problem = Problem(side, side, side, matrix, matrix, matrix, 4, 4, free_chunks=False)
    budget = Budget(1 << 30, 0, 160 * MiB, readers=8, writers=4, in_memory=in_memory, step=MiB)
    rates = Rates(1e30, 1e30, 1e30, 1e30, 1e30, shared=False, turn_seconds=0.0, thin=0.0)
    candidate = Candidate(matrix, side, side, Panels(side, 1024, 1024), 1, Ring(8, 4, 10, 4 * MiB))
    slow, fast = (
        CostModel(problem, budget, replace(rates, touch=touch)).estimate(candidate).alone
        for touch in (1e9, 1e30)
    )
    taken = (4 + 10 * (not in_memory)) * 4 * MiB / 8
    assert slow - fast == pytest.approx(taken / 1e9, rel=1e-3)


def test_the_last_block_counts_with_its_own_size():
    """Of two plans with as many blocks, of which the last is written after all else, the one whose last block
    is smaller ends so much earlier."""
    side = 4096
    matrix = Matrix(side, side, 4, 1024, 1024)
    problem = Problem(side, side, side, matrix, matrix, matrix, 4, 4, free_chunks=False)
    rates = Rates(
        1e12, 1e30, 1.4e9, 1e30, 1e30, shared=False, thin=0.0, edge=0.0, piece_seconds=0.0, read_seconds=0.0
    )
    model = CostModel(problem, Budget(1 << 30, 0, 1 << 30), rates)

    def seconds(bn):
        return model.estimate(
            Candidate(matrix, side, bn, Panels(side, 1024, 1024), 2, Ring(8, 4, 4, MiB))
        ).seconds

    assert seconds(1366) - seconds(1536) == pytest.approx((1364 - 1024) * side * 4 / rates.write)


def test_a_device_that_finds_the_best_of_a_block_reads_it_once_more():
    side, depth = 4096, 512
    a, b, c = (
        Matrix(side, depth, 4, 1024, depth),
        Matrix(depth, side, 4, depth, 1024),
        Matrix(side, side, 0, 1024, 1024),
    )
    problem = Problem(side, side, depth, a, b, c, 4, 4, free_chunks=False, row_bytes=8)
    rates = Rates(1e12, 1e30, 1e30, 1e30, 1e30, shared=False, thin=256.0, edge=0.0, piece_seconds=0.0)
    budget = Budget(host=1 << 30, host_baseline=0, device=1 << 30, readers=8, writers=4)
    product = 2 * side * side / rates.flops
    for found_bytes, depths in ((0, depth + 256), (80, depth + 256 + 128)):
        plan = make_plan(replace(problem, found_bytes=found_bytes), budget, rates)
        assert plan.panel_count == 1
        assert plan.stage_seconds["compute"] == pytest.approx(product * depths)


def test_kernels_take_no_less_time_than_their_calls():
    """On a device whose products take no time, each of a symmetric product's strips is a call."""
    side = 8192
    matrix, old = Matrix(side, side, 1, 1024, 1024), Matrix(side, side, 4, 1024, 1024)
    budget = Budget(host=1 << 30, host_baseline=0, device=2 << 30, readers=8, writers=4)
    rates = Rates(1e30, 1e30, 1e30, 1e30, 1e30, shared=False, thin=0.0, piece_seconds=1e-3)
    for symmetric in (False, True):
        problem = Problem(side, side, side, matrix, matrix, old, 1, 4, free_chunks=False, symmetric=symmetric)
        made = make_plan(problem, budget, rates)
        strips = side // 1024 if symmetric else 1
        assert made.block_count == 1
        assert made.stage_seconds["compute"] == pytest.approx(1e-3 * strips * len(list(made.panels())))


def test_chunks_that_a_device_decodes():
    """They are uploaded as they are stored, and as many are decoded at a time as a turn brings, within those
    that the device decodes at a time. It multiplies nothing meanwhile."""
    side, chunk, stored = 4096, 512 * 512 * 4, 300_000
    raw = Matrix(side, side, 4, 512, 512)
    whole = replace(raw, whole=True, stored=(stored,) * 64)
    rates = Rates(
        1e30, 1e30, 1e30, 1e9, 1e30, shared=False, thin=0.0, piece_seconds=0.0, decode=1e8, unpack=1e7
    )
    x = Candidate(raw, side, side, Panels(side, 1024, 512), 1, Ring(4, 2, 8, 4 * MiB))

    def stages(a, b, decodes):
        budget = Budget(4 << 30, 0, 4 << 30, decodes=decodes)
        return CostModel(Problem(side, side, side, a, b, raw, 4, 4), budget, rates).estimate(x).stages

    sent = replace(whole, encoded="zstd")
    here, there = stages(whole, raw, 100), stages(sent, raw, 100)
    assert here["read"] == pytest.approx(64 * chunk / 1e8, rel=1e-2)
    assert there["read"] < 0.01 * here["read"]
    assert here["upload"] == pytest.approx(2 * 64 * chunk / 1e9)
    assert there["upload"] == pytest.approx(64 * (chunk + stored) / 1e9)
    assert there["compute"] == pytest.approx(64 * chunk / (16 * 1e7))  # a panel has 16 chunks
    assert stages(sent, raw, 4)["compute"] == pytest.approx(64 * chunk / (4 * 1e7))
    both = stages(sent, sent, 100)
    assert both["upload"] == pytest.approx(2 * 64 * stored / 1e9)
    assert both["compute"] == pytest.approx(2 * 64 * chunk / (32 * 1e7))


@pytest.mark.parametrize("multiplying", [0.0, 1.0, 100.0])
def test_few_chunks_are_decoded_beside_multiplications(multiplying):
    """Four panels of 64 + 32 chunks, and then twelve of 32, of which the device decodes 128 at a time."""
    side, took = 8192, 0.5
    s = Matrix(side, side, 4, 512, 512, whole=True, stored=(300_000,) * 256, encoded="zstd")
    c = Matrix(side, side, 4, 512, 512)
    p = Problem(side, side, side, s, s, c, 4, 4)
    budget = Budget(8 << 30, 0, 40 << 30, decodes=128)
    rates = Rates(1e30, 1e30, 1e30, 1e30, 1e30, shared=False, thin=0.0, edge=0.0, piece_seconds=0.0)
    rates = replace(rates, flops=p.flops / multiplying if multiplying else 1e30, ready_again=0.0)
    rates = replace(rates, unpack=s.chunk_bytes / took)
    panels = Panels(side, 2048, 512, resident=True, buffers=4)
    x = Candidate(c, side, side // 2, panels, 3, Ring(4, 2, 8, 4 * MiB))
    found = CostModel(p, budget, rates).estimate(x).stages["compute"]
    turns, chunks = 4 * count_blocks(p, side, side // 2, True), 256 + 256 - 96
    assert found == pytest.approx(took + max(multiplying + chunks / 128 * took, (turns - 1) / 2 * took))


@pytest.mark.parametrize(("codec", "parts"), [("zstd", 1), ("blosc", 4)])
def test_parts_of_a_chunk_are_decoded_at_the_same_time(codec, parts):
    side, stored = 8192, 2 * MiB
    s = Matrix(side, side, 4, 1024, 2048, whole=True, stored=(stored,) * 32, encoded=codec)
    p = Problem(side, side, side, s, replace(s, encoded=""), s, 4, 4)
    found = decoders(p, Budget(4 << 30, 0, 4 << 30, decodes=32))
    assert parts_of(s) == parts
    assert found.parts == min(32, found.chunks * parts)
    assert found.chunks == {"zstd": 32, "blosc": 8}[codec]
    assert found.nbytes >= found.chunks * (2 * stored + 8 * MiB) + found.parts * DECODING_ROOM
    few = decoders(p, Budget(4 << 30, 0, 1 << 29, decodes=32))
    assert 0 < few.chunks < found.chunks
    assert 0 < few.nbytes - 512 <= (1 << 29) // DECODED


@pytest.mark.parametrize("interleaved", [1, 4])
@pytest.mark.parametrize("read", [2e10, 5e10, 2e11])
def test_blocks_of_strips_wait_for_what_they_need(interleaved, read):
    """The model says in two sums per block what this counts panel by panel."""
    side, depth, count = 8192, 1024, 8
    matrix = Matrix(side, side, 4, 1024, 1024)
    problem = Problem(side, side, side, matrix, matrix, matrix, 4, 4, free_chunks=False)
    rates = Rates(1e14, read, 1e30, 1e30, 1e30, shared=False, touch=1e30, thin=0.0, edge=0.0)
    rates = replace(rates, read_seconds=0.0, piece_seconds=0.0, turn_seconds=0.0, ready_again=0.0)
    panels = Panels(side, depth, 1024, resident=True, rows=4, columns=2, interleaved=interleaved)
    x = Candidate(matrix, 2048, 2048, panels, max(2, interleaved), Ring(4, 2, 6, 1 << 20))
    budget = Budget(host=1 << 30, host_baseline=0, device=1 << 30)
    plan = finish(problem, budget, rates, x)
    came = done = 0.0
    first_of_column = dict[int, float]()
    for blocks in plan.together():
        for number, block in product(range(count), blocks):
            column = block.col // 2048
            brings = plan.brings(block.index)
            if number == 0 and brings[1]:
                came = max(came, first_of_column.get(column - 2, 0.0))
            came += sum(brings) * 2048 * depth * 4 / read
            done = max(came, done) + 2 * 2048 * 2048 * depth / 1e14
            if number == 0:
                first_of_column[column] = done
    assert plan.predicted_seconds == pytest.approx(done, rel=1e-6)


def test_panels_that_are_not_prepared_once_where_they_lie_cost_time_for_each_block():
    """Complex numbers are embedded elsewhere: op(B) always, op(A) where its panels do not lie along k."""
    side = 4096
    matrix = Matrix(side, side, 8, 1024, 1024)
    problem = Problem(side, side, side, matrix, matrix, matrix, 8, 8, free_chunks=False)
    rates = Rates(1e12, 1e30, 1e30, 1e30, 1e30, shared=False, thin=0.0, edge=0.0, ready_again=100.0)
    panels = Panels(side, 1024, 1024, resident=True, rows=2, columns=2)
    x = Candidate(matrix, 2048, 1024, panels, 2, Ring(4, 2, 6, 1 << 20))
    of_a, of_b = 100 / 1024, 100 / 2048

    def overhead(**changes):
        made = replace(problem, **changes)
        budget = Budget(host=1 << 30, host_baseline=0, device=1 << 30)
        return CostModel(made, budget, rates).estimate(x).stages["compute"] / (2e-12 * side**3) - 1

    embedded = {"once": True, "scratch": (8, 16)}
    assert overhead() == pytest.approx(of_a + of_b)
    assert overhead(once=True) == pytest.approx(0)
    assert overhead(**embedded, along_k=(True, False)) == pytest.approx(of_b)
    assert overhead(**embedded, along_k=(False, False)) == pytest.approx(of_a + of_b)
