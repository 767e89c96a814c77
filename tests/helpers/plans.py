"""What holds for every plan, counted piece by piece."""

import numpy as np

from ooc_gemm.planning.machine import Rates
from ooc_gemm.planning.plan import Plan

RATES = Rates(1e11, 4e9, 1e9, 5e9, 5e9, shared=True)


def check_plan(plan: Plan) -> None:
    p = plan.problem
    seen = np.zeros((p.m, p.n), int)
    read, stays = 0, set()
    for block in plan.blocks():
        assert block.diagonal == (p.symmetric and block.row == block.col)
        for part in plan.parts(block):
            corner = (block.col, block.row) if part.mirrored else (block.row, block.col)
            row, col = corner[0] + part.row, corner[1] + part.col
            assert (row, col) == (part.chunk[0] * p.c.chunk_rows, part.chunk[1] * p.c.chunk_cols)
            seen[row : row + part.rows, col : col + part.cols] += 1
        for panel in plan.panels():
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
                if not piece.found:
                    read += s.chunk_bytes if s.whole else size
            assert all((x == 1).all() for x in filled.values())
    assert (seen == 1).all()
    assert not stays
    assert [k for panel in plan.panels() for k in range(*panel)] == list(range(p.k))
    assert read == plan.bytes_read
    assert plan.host_bytes <= plan.budget.host
    assert plan.budget.device is None or plan.device_bytes <= plan.budget.device
    assert plan.lower_bound_bytes <= plan.bytes_read + plan.bytes_written
