"""Plans of passes: ledgers are kept, readers and panels shrink with memory, and no chunk is read twice."""

from dataclasses import replace

import pytest

from ooc_gemm import BudgetError
from ooc_gemm.planning.machine import Budget
from ooc_gemm.planning.passes import (
    IN_MEMORY_PIECE_BYTES,
    PANEL_BYTES,
    PIECE_BYTES,
    PIECES,
    PassProblem,
    make_pass_plan,
)
from ooc_gemm.planning.problem import Matrix, MiB
from ooc_gemm.planning.schedule import cut
from ooc_gemm.planning.traffic import piece_read_bytes
from ooc_gemm.planning.traits import StoreTraits

GiB = 1 << 30
TALL = Matrix(4_000_000, 4096, 4, 4096, 1024)
IN_MEMORY = replace(TALL, traits=StoreTraits(asynchronous=True, stackable=True))
WIDE = Matrix(4096, 4_000_000, 4, 1024, 4096, transposed=True)
BUDGET = Budget(host=8 * GiB, host_baseline=700 * MiB, device=8 * GiB, device_baseline=700 * MiB, readers=16)


def problem(matrix, **others):
    return PassProblem("x", matrix, 4, matrix.itemsize != 4, 60, 100 * MiB, **others)


@pytest.mark.parametrize("matrix", [TALL, WIDE])
def test_much_memory_makes_large_panels_of_whole_chunks(matrix):
    plan = make_pass_plan(problem(matrix), BUDGET)
    assert (plan.readers, plan.slots, plan.slot_bytes) == (16, 48, PIECE_BYTES)
    assert plan.height * 4096 * 4 == PANEL_BYTES
    assert plan.height % 4096 == 0
    assert plan.device["staging"] == 0


@pytest.mark.parametrize("matrix", [TALL, WIDE, replace(TALL, whole=True, stored=(1000,) * 3908)])
def test_a_pass_moves_the_bytes_of_its_pieces(matrix):
    plan = make_pass_plan(problem(matrix), BUDGET)
    found, extent = 0, plan.problem.shape[0]
    for start in range(0, extent, plan.height):
        rows = start, min(extent, start + plan.height)
        stored = ((0, matrix.rows), rows) if matrix.transposed else (rows, (0, matrix.cols))
        found += sum(piece_read_bytes(matrix, piece) for piece in cut("x", matrix, *stored, plan.cap))
    assert plan.cut.bytes_read == found
    assert plan.cut.device_ledger["panels"] > 0


@pytest.mark.parametrize(("readers", "slots"), [(2, 4), (4, 6), (16, 20)])
def test_files_in_memory_have_few_slots(readers, slots):
    """The device should find their data in the caches of the CPU."""
    plan = make_pass_plan(problem(IN_MEMORY), replace(BUDGET, readers=readers))
    assert (plan.readers, plan.slots, plan.slot_bytes) == (readers, slots, IN_MEMORY_PIECE_BYTES)
    assert plan.host["read ring"] == slots * plan.slot_bytes


def test_panels_shrink_before_pieces():
    """Where the device has little memory, pieces stay as large as several of them fit a panel."""
    larger = make_pass_plan(problem(TALL), BUDGET)
    limit = sum(larger.device.values())
    for _ in range(4):
        plan = make_pass_plan(problem(TALL), replace(BUDGET, device=limit - 1))
        assert plan.height == larger.height // 2
        assert plan.slot_bytes == min(PIECE_BYTES, plan.height * 4096 * 4 // PIECES)
        larger, limit = plan, sum(plan.device.values())


@pytest.mark.parametrize(
    "matrix",
    [
        TALL,
        WIDE,
        IN_MEMORY,
        replace(TALL, whole=True),
        replace(TALL, itemsize=1),
        Matrix(1000, 7, 4, 100, 3),
        Matrix(3, 100_000, 4, 3, 1000),
        Matrix(10**8, 1, 4, 10**6, 1),
    ],
)
def test_limits_are_kept_down_to_the_least(matrix):
    wanted = problem(matrix)
    with pytest.raises(BudgetError, match="a memory limit") as error:
        make_pass_plan(wanted, replace(BUDGET, host=1))
    host = error.value.minimum_memory_limit
    with pytest.raises(BudgetError, match="a device memory limit") as error:
        make_pass_plan(wanted, replace(BUDGET, device=1))
    device = error.value.minimum_device_memory_limit
    readers = 0
    for factor in (1.0, 1.01, 1.1, 1.5, 3, 10):
        budget = replace(BUDGET, host=int(host * factor), device=int(device * factor))
        plan = make_pass_plan(wanted, budget)
        assert sum(plan.host.values()) <= budget.host
        assert sum(plan.device.values()) <= budget.device
        assert plan.readers >= readers
        readers = plan.readers
        s, rows = matrix, (0, plan.height)
        stored = ((0, s.rows), rows) if s.transposed else (rows, (0, s.cols))
        for piece in cut("a", s, *stored, plan.cap):
            bytes_read = (piece.rows[1] - piece.rows[0]) * (piece.span[1] - piece.span[0]) * s.itemsize
            assert bytes_read <= plan.slot_bytes
    for budget in (replace(BUDGET, host=host - 1), replace(BUDGET, device=device - 1)):
        with pytest.raises(BudgetError):
            make_pass_plan(wanted, budget)
    assert readers == 16


def test_chunks_that_are_decoded_whole_are_read_once():
    plan = make_pass_plan(problem(Matrix(1_000_000, 400, 4, 700, 400, whole=True)), BUDGET)
    assert plan.height % 700 == 0
    least = make_pass_plan(problem(replace(TALL, whole=True)), replace(BUDGET, device=900 * MiB))
    assert least.height == 4096
