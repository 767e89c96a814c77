"""In which order a plan brings panels and pieces."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from plans import check_plan, planned, problems

from examples import examples
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.panels import Panels
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.schedule import column_edges, count_blocks, cut, last_place, places
from ooc_gemm.planning.search import make_plan
from ooc_gemm.planning.traits import LOCAL
from ooc_gemm.support.intervals import band_edges, growing_panels


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("down", [1, 2, 3])
@pytest.mark.parametrize("across", [1, 2, 3])
def test_the_last_place_is_the_last_of_places(down, across, by_columns):
    found = list(places(device_problem(down, across, 1), 1, 1, by_columns))
    assert last_place(down, across, by_columns) == found[-1]
    for together in 1, 2:
        *_, last = places(device_problem(down, across, 1), 1, 1, by_columns, together=together)
        assert last_place(down, across, by_columns, together) == last


def device_problem(m, n, k, chunk=256):
    """Of float32, for a device with memory of its own."""
    a, b = Matrix(m, k, 4, chunk, chunk), Matrix(k, n, 4, chunk, chunk)
    return Problem(m, n, k, a, b, Matrix(m, n, 4, chunk, chunk), 4, 4, free_chunks=False)


@pytest.mark.parametrize("k", [4096, 5000, 8192])
def test_panels_grow_where_the_first_and_the_last_count(k):
    """One block, which reading and writing take about as long as multiplying."""
    rates = Rates(1e10, 4e8, 4e8, 5e10, 5e10, shared=False, piece_seconds=0.0)
    plan = make_plan(device_problem(512, 512, k), Budget(1 << 30, 0, 1 << 30), rates)
    check_plan(plan)
    depths = [stop - start for start, stop in plan.panels()]
    assert plan.k_panels.growth > 1
    assert plan.block_count == 1
    assert plan.panel_count == len(depths) > 2
    assert depths[0] == 512
    assert max(depths) <= plan.bk
    assert all(start % 256 == 0 for start, _ in plan.panels())
    assert depths[-2] > depths[0]
    assert "panels of up to" in plan.table()
    resumed = plan.without(frozenset({(0, 0)}))
    check_read = sum(
        (piece.rows[1] - piece.rows[0]) * (piece.span[1] - piece.span[0]) * 4
        for block in resumed.blocks()
        for panel in resumed.panels()
        for piece in resumed.pieces(block, panel)
    )
    assert check_read == resumed.bytes_read


def test_growing_panels_cover_k_once():
    for k, deepest, unit, growth in itertools.product(
        (1, 511, 513, 5000, 65_536), (512, 2048, 8192), (1, 256, 512), (1.25, 1.5)
    ):
        panels = growing_panels(k, deepest, unit, growth)
        assert [0, *(stop for _, stop in panels)] == [*(start for start, _ in panels), k]
        depths = [stop - start for start, stop in panels]
        assert min(depths) > 0
        assert max(depths) <= deepest
        assert depths[:-1] == sorted(depths[:-1])
        assert all(start % unit == 0 for start, _ in panels)
        if k > 4 * deepest:
            assert deepest - max(unit, 512) < depths[-2] <= deepest


@pytest.mark.slow
def test_several_devices_are_sent_to_in_turns():
    rates = Rates(1e12, 4e9, 4e9, 5e9, 5e9, shared=False)
    budget = Budget(1 << 30, 0, 1 << 30, weights=(1, 1, 1, 1))
    plan = make_plan(device_problem(4096, 4096, 4096), budget, rates)
    check_plan(plan)
    assert plan.block_count == 1
    (block,) = plan.blocks()
    for panel in plan.panels():
        pieces = list(plan.pieces(block, panel))
        for operand, axis in (("a", 0), ("b", 1)):
            bands = [piece.into[axis] // 1024 for piece in pieces if piece.operand == operand]
            assert bands == [0, 1, 2, 3] * (len(bands) // 4)


@settings(max_examples=examples(25), deadline=None)
@given(problems())
def test_every_chunk_of_c_is_made_by_one_block(case):
    """And by one block of what is left, unless it is done."""
    for plan in planned(case):
        down, across = plan.problem.c.grid
        every = [(i, j) for i in range(down) for j in range(across)]
        done = frozenset(every[::3])
        for left, expected in ((plan, every), (plan.without(done), sorted({*every} - done))):
            made = [part.chunk for block in left.blocks() for part in left.parts(block)]
            assert sorted(made) == expected
            assert [block.index for block in left.blocks()] == list(range(left.block_count))


@settings(max_examples=examples(25), deadline=None)
@given(problems())
def test_a_schedule_can_be_walked_twice(case):
    for plan in planned(case):
        walks = [
            [(block, panel, *plan.pieces(block, panel)) for block in plan.blocks() for panel in plan.panels()]
            for _ in range(2)
        ]
        assert walks[0] == walks[1]


def test_panels_of_a_that_stay_have_a_buffer_each():
    panels = Panels(1000, 300, 1, resident=True, buffers=4)
    assert list(panels) == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert [panels.pair((2, 1), number, 16 + number) for number in range(4)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert [panels.pair((3, 1), number, 21 + number)[1] for number in range(4)] == [1, 2, 3, 0]
    assert (len(panels), panels.a_buffers, panels.b_buffers) == (4, 4, 4)
    changing = Panels(1000, 300, 1)
    assert [changing.pair((0, 0), number, number) for number in range(4)] == [(0, 0), (1, 1), (0, 0), (1, 1)]
    assert changing.a_buffers == changing.b_buffers == 2


def test_panels_of_b_that_stay_have_a_buffer_each():
    panels = Panels(1000, 300, 1, resident=True, rows=3, columns=2)
    assert (panels.a_buffers, panels.b_buffers) == (12, 8)
    pairs = {
        (i, j): [panels.pair((i, j), number, 0) for number in range(4)] for i in range(3) for j in range(4)
    }
    assert {a for pair in pairs.values() for a, _ in pair} == set(range(12))
    assert pairs[2, 1] == [(8, 4), (9, 5), (10, 6), (11, 7)]
    assert pairs[2, 3] == pairs[2, 1]  # the column after the next takes the buffers over


def test_the_last_strip_has_no_room_for_lines_past_c():
    panels = Panels(1000, 300, 1, resident=True, rows=3, columns=2)
    assert panels.rooms("a", 40, 100) == [(lines, k) for lines in (40, 40, 20) for k in (300, 300, 300, 100)]
    assert panels.rooms("b", 50, 170) == [(50, k) for k in (300, 300, 300, 100)] * 2, "others come later"
    assert [lines for lines, _ in panels.rooms("b", 90, 90)] == [90] * 4 + [0] * 4
    passing = replace(panels, resident=False, columns=0)
    assert passing.rooms("a", 40, 100) == [(40, 300)] * 2


@pytest.mark.parametrize("columns", [1, 2, 3, 7])
def test_the_first_columns_of_strips_are_made_row_by_row(columns):
    a = Matrix(70, 50, 4, 10, 10)
    problem = Problem(70, 50, 50, a, replace(a, rows=50), replace(a), 4, 4)
    order = list(places(problem, 30, 10, by_columns=False, together=columns))
    assert sorted(order) == [(i, j) for i in range(3) for j in range(5)]
    first = [(i, j) for i in range(3) for j in range(min(columns, 5))]
    assert order == [*first, *((i, j) for j in range(columns, 5) for i in range(3))]


@pytest.mark.parametrize("n", [1, 7, 64, 100, 1000, 65536])
@pytest.mark.parametrize("chunk", [1, 3, 16, 2048])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9])
def test_blocks_that_become_narrower_cover_c_once(n, chunk, parts):
    p = device_problem(10, n, 10, chunk)
    bn = min(n, -(-n // parts // chunk) * chunk)
    edges = column_edges(p, bn, True)
    widths = np.diff(edges)
    assert (edges[0], edges[1], edges[-1]) == (0, bn, n)
    assert (widths > 0).all()
    assert widths.max() == bn
    assert all(edge % chunk == 0 for edge in edges[:-1])
    assert len(list(places(p, 10, bn, False, True))) == count_blocks(p, 10, bn, True) == len(widths)
    if bn >= 4 * chunk:
        assert (np.diff(widths) <= 0).all()
        assert (widths[:-1] >= bn // 4).all()
    else:
        assert len(widths) == -(-n // bn)


def test_blocks_begin_where_chunks_of_b_begin():
    p = device_problem(10, 65536, 10, 2048)
    assert column_edges(p, 32768, True) == (0, 32768, 49152, 57344, 65536)
    assert column_edges(p, 22528, True) == (0, 22528, 45056, 55296, 65536)
    apart = replace(p, b=replace(p.b, chunk_cols=6144))
    assert all(edge % 6144 == 0 for edge in column_edges(apart, 30720, True)[:-1])
    assert column_edges(apart, 32768, True) == (0, 32768, 65536)


@pytest.mark.parametrize("chunk", [2048, 3072, 4096, 6144])
def test_blocks_that_become_narrower_read_what_is_predicted(chunk):
    p = replace(device_problem(65536, 65536, 65536, 2048), keeps_a=True)
    p = replace(p, b=replace(p.b, chunk_cols=chunk))
    budget = Budget(host=24 << 30, host_baseline=0, device=130 << 30, weights=(1,) * 4, linked=True)
    plan = make_plan(p, budget, Rates(9e14, 68e9, 51e9, 150e9, 150e9, False))
    assert plan.k_panels.resident
    assert plan.bytes_read == plan.without(frozenset())._traffic().read


@pytest.mark.parametrize(
    ("whole", "asynchronous", "starts"),
    [
        (False, True, [0, 300, 600, 750, 900]),
        (False, False, [0, 300, 600, 700, 800, 900]),
        (True, True, [0, 300, 600, 700, 800, 900]),
    ],
)
def test_pieces_end_where_bands_of_devices_begin(whole, asynchronous, starts):
    """A chunk that must be decoded whole, or goes through a slot anyway, is a piece of its own where a band
    begins within it."""
    traits = replace(LOCAL, stackable=True, asynchronous=asynchronous)
    matrix = Matrix(1200, 100, 4, 100, 100, whole=whole, traits=traits)
    pieces = list(cut("a", matrix, (0, 1200), (0, 100), 3 * 100 * 100 * 4, edges=(750, 900)))
    assert [piece.rows[0] for piece in pieces] == starts
    assert [piece.rows[1] for piece in pieces] == [*starts[1:], 1200]


def test_bands_begin_at_multiples_of_128_rows():
    assert band_edges((100, 700), (1, 1, 1)) == (356, 612)
    assert band_edges((100, 700), (1,)) == ()
