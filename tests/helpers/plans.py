"""Plans of random problems; what holds for every plan, counted piece by piece."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st

from ooc_gemm.planning.candidates import Candidate, outputs, rings
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.panels import MORE_BUFFERS, Panels
from ooc_gemm.planning.plan import Plan
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import finish, make_plan
from ooc_gemm.support.errors import BudgetError

RATES = Rates(1e11, 4e9, 1e9, 5e9, 5e9, shared=True)


def staying_plan(depth, strips, together=False):
    """What stands for `make_plan`: blocks of 300 × 200, panels of this depth, and those of op(A) stay, of one
    row of blocks, or if in `strips` of all with those of two columns of op(B). together: the first blocks are
    made at the same time, where that is possible."""

    def made(problem, budget, rates):
        assert problem.keeps_a
        panels = Panels(problem.k, depth, problem.k_chunk, resident=True, buffers=MORE_BUFFERS)
        if strips:
            panels = replace(panels, rows=-(-problem.m // 300), columns=2)
        if together and not (problem.reads_c or problem.check_itemsize):
            panels = replace(panels, interleaved=min(2, panels.rows) * 2)
        c, ring = outputs(problem)[0], rings(budget)[0]
        x = Candidate(c, min(300, problem.m), 200, panels, max(2, panels.interleaved), ring)
        return finish(problem, budget, rates, x)

    return made


def check_plan(plan: Plan, some: bool = False) -> None:
    """Check what holds for every plan. `some`: of chunks some are done already."""
    p = plan.problem
    seen = np.zeros((p.m, p.n), int)
    read, exchanged, stays, fetched, held, step = 0, 0, set(), set(), {}, 0
    number_of = {block.index: number for number, group in enumerate(plan.groups()) for block in group}
    assert sorted(number_of) == list(range(plan.block_count))
    for block in plan.blocks():
        assert block.diagonal == (p.symmetric and block.row == block.col)
        for part in plan.parts(block):
            corner = (block.col, block.row) if part.mirrored else (block.row, block.col)
            row, col = corner[0] + part.row, corner[1] + part.col
            assert (row, col) == (part.chunk[0] * p.c.chunk_rows, part.chunk[1] * p.c.chunk_cols)
            seen[row : row + part.rows, col : col + part.cols] += 1
    for blocks in plan.together():
        assert len({plan.c_buffer(block) for block in blocks}) == len(blocks)
        for panel, block in product(plan.panels(), blocks):
            k = panel[1] - panel[0]
            shape = {"a": (k, block.rows) if p.a.transposed else (block.rows, k)}
            if not block.diagonal:
                shape["b"] = (block.cols, k) if p.b.transposed else (k, block.cols)
            filled = {name: np.zeros(size, int) for name, size in shape.items()}
            touched = set()
            for piece in plan.pieces(block, panel):
                s = {"a": p.a, "b": p.b}[piece.operand]
                rows, cols = piece.rows[1] - piece.rows[0], piece.cols[1] - piece.cols[0]
                row, col = piece.into
                filled[piece.operand][row : row + rows, col : col + cols] += 1
                assert piece.panel == shape[piece.operand]
                size = rows * (piece.span[1] - piece.span[0]) * s.itemsize
                assert size <= plan.slot_bytes
                touched.add((piece.operand, piece.chunk))
                assert piece.place[0] == ("a" if p.symmetric else piece.operand)
                assert piece.found == (piece.place in stays)
                stays = stays | {piece.place} if piece.kept else stays - {piece.place}
                assert len(stays) <= plan.cache_slots
                if (number_of[block.index], piece.place) in fetched:  # another worker of the team has it
                    exchanged += rows * cols * s.itemsize
                elif not piece.found:
                    fetched.add((number_of[block.index], piece.place))
                    read += s.chunk_bytes if s.whole else size
            brings, needed = plan.brings(block.index), {"a": block.row, "b": block.col}
            for name, comes, buffer in zip("ab", brings, plan.pair(step), strict=True):
                if name in filled:
                    assert (filled[name] == comes).all()
                    if comes:
                        held[name, buffer] = needed[name], panel
                    assert held[name, buffer] == (needed[name], panel)
            step += 1
    assert (seen <= 1).all() if some else (seen == 1).all()
    assert not stays
    assert [k for panel in plan.panels() for k in range(*panel)] == list(range(p.k))
    assert read == plan.bytes_read
    assert exchanged == plan.bytes_exchanged
    assert plan.host_bytes <= plan.budget.host
    assert plan.budget.device is None or plan.device_bytes <= plan.budget.device
    assert some or plan.lower_bound_bytes <= plan.bytes_read + plan.bytes_written


@st.composite
def problems(draw):
    """A small problem, a budget without limits yet, and rates: of the CPU or of devices with memory of their
    own, transposed or not, general or symmetric, with β or without."""
    m, n = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    k = draw(st.one_of(st.integers(1, 60), st.integers(257, 1024)))
    side, either = st.integers(1, 70), st.booleans()
    item, separate, symmetric = draw(st.sampled_from([1, 4, 16])), draw(either), draw(either)

    def operand(rows, cols):
        turned = draw(either)
        shape = (cols, rows) if turned else (rows, cols)
        return Matrix(*shape, item, draw(side), draw(side), transposed=turned, whole=draw(either))

    n = m if symmetric else n
    a = operand(m, k)
    b = replace(a, transposed=not a.transposed) if symmetric else operand(k, n)
    reads_c = not symmetric and draw(either)
    c = Matrix(m, n, item, draw(side), draw(side))
    problem = Problem(
        m, n, k, a, b, c, item, item, reads_c=reads_c, free_chunks=not reads_c and draw(either),
        symmetric=symmetric, keeps_a=separate,
    )  # fmt: skip
    budget = Budget(
        1, draw(st.sampled_from([0, 1000])), 1 if separate else None,
        weights=draw(st.sampled_from([(1,), (1, 1), (2, 1, 1)])) if separate else (1,),
    )  # fmt: skip
    speeds = [10 ** draw(st.floats(6, 9)) for _ in range(2)]
    return problem, budget, Rates(1e11, *speeds, 5e9, 5e9, shared=not separate)


def smallest(problem, budget, rates):
    """The budget with the smallest limits, as refusals name them."""
    if budget.device is not None:
        with pytest.raises(BudgetError) as refused:
            make_plan(problem, replace(budget, device=1), rates)
        budget = replace(budget, device=refused.value.minimum_device_memory_limit)
    with pytest.raises(BudgetError) as refused:
        make_plan(problem, replace(budget, host=1), rates)
    return replace(budget, host=refused.value.minimum_memory_limit)


def planned(case):
    """Plans of a problem with the smallest limits, and with more and more memory."""
    problem, budget, rates = case
    least = smallest(problem, budget, rates)
    for spare in (0, 1 << 16, 1 << 30):
        device = None if least.device is None else least.device + spare
        yield make_plan(problem, replace(least, host=least.host + spare, device=device), rates)
