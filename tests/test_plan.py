"""A plan is complete, exact in its bytes, and within its budgets, whatever the problem."""

import ast
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ooc_gemm
from ooc_gemm.errors import BudgetError
from ooc_gemm.plan import Budget, Matrix, Plan, Problem, Rates, make_plan

SHARED = Rates(1e11, 4e9, 1e9, 5e9, 5e9, shared=True)
APART = Rates(1e13, 3e9, 3e9, 5e10, 5e10, shared=False)
QUICK = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def matrices(draw, rows, cols, transposed=False):
    if transposed:
        rows, cols = cols, rows
    side = st.one_of(st.integers(1, 70), st.sampled_from([1, 16, 100_000]))
    chunk_rows, chunk_cols = draw(side), draw(side)
    found = Matrix(
        rows, cols, draw(st.sampled_from([1, 2, 4, 8, 16])), chunk_rows, chunk_cols,
        transposed=transposed, whole=draw(st.booleans()) and chunk_rows * chunk_cols < 1 << 20,
    )  # fmt: skip
    count = found.grid[0] * found.grid[1]
    kind = draw(st.sampled_from(["full", "full", "missing"]))
    if kind == "full" or count > 500:
        return found
    sizes = [0, 7, 100] if found.whole else [0, found.chunk_bytes]
    stored = tuple(draw(st.lists(st.sampled_from(sizes), min_size=count, max_size=count)))
    return Matrix(**{**found.__dict__, "stored": stored})


@st.composite
def problems(draw):
    m, n, k = (draw(st.integers(0, 50)) for _ in range(3))
    a, b = draw(matrices(m, k, draw(st.booleans()))), draw(matrices(k, n, draw(st.booleans())))
    item = draw(st.sampled_from([1, 4, 8]))
    reads_c, free = draw(st.sampled_from([(False, True), (False, False), (True, False)]))
    c = Matrix(m, n, item, draw(st.integers(1, 60)), draw(st.integers(1, 60)), whole=draw(st.booleans()))
    return Problem(
        m, n, k, a, b, c, draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 8])), reads_c, free
    )


@st.composite
def budgets(draw):
    return {
        "host_baseline": draw(st.sampled_from([0, 12_345])),
        "device_baseline": draw(st.sampled_from([0, 777])),
        "workspace": draw(st.sampled_from([0, 1000])),
        "staged": draw(st.booleans()),
        "readers": draw(st.integers(1, 6)),
        "writers": draw(st.integers(1, 4)),
    }


def minimum(problem, options, separate, rates):
    """(host, device): the limits that refusals tell."""
    device = None
    if separate:
        with pytest.raises(BudgetError) as refused:
            make_plan(problem, Budget(host=1 << 50, device=1, **options), rates)
        device = refused.value.minimum_device_memory_limit
    with pytest.raises(BudgetError) as refused:
        make_plan(problem, Budget(host=1, device=device, **options), rates)
    return refused.value.minimum_memory_limit, device


def moved(s, piece):
    if s.stored is not None and not s.stored[piece.chunk[0] * s.grid[1] + piece.chunk[1]]:
        return 0
    if s.whole:
        return s.chunk_bytes if s.stored is None else s.stored[piece.chunk[0] * s.grid[1] + piece.chunk[1]]
    return (piece.rows[1] - piece.rows[0]) * (piece.span[1] - piece.span[0]) * s.itemsize


def filled(plan, pieces, shapes):
    """Check pieces and what they fill, once each; the bytes they read, and the elements."""
    places = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    read = elements = 0
    for piece in pieces:
        s = getattr(plan.problem, piece.operand)
        (row, row_stop), (col, col_stop) = piece.rows, piece.cols
        assert piece.panel == shapes[piece.operand]
        assert 0 <= row < row_stop <= s.rows
        assert 0 <= col < col_stop <= s.cols
        assert row // s.chunk_rows == (row_stop - 1) // s.chunk_rows == piece.chunk[0]
        assert col // s.chunk_cols == (col_stop - 1) // s.chunk_cols == piece.chunk[1]
        assert piece.span[0] <= col < col_stop <= piece.span[1]
        assert (row_stop - row) * (piece.span[1] - piece.span[0]) * s.itemsize <= plan.slot_bytes
        into = piece.into
        places[piece.operand][into[0] : into[0] + row_stop - row, into[1] : into[1] + col_stop - col] += 1
        read += moved(s, piece)
        elements += (row_stop - row) * (col_stop - col) * s.itemsize
    assert all((place == 1).all() for place in places.values())
    return read, elements


def check(plan: Plan) -> None:
    p = plan.problem
    made, written, read, uploaded, written_chunks = np.zeros((p.m, p.n), int), 0, 0, 0, set()
    for index, block in enumerate(plan.blocks()):
        assert block.index == index
        assert 0 < block.rows <= plan.bm
        assert 0 < block.cols <= plan.bn
        made[block.row : block.row + block.rows, block.col : block.col + block.cols] += 1
        parts = np.zeros((block.rows, block.cols), int)
        for part in plan.parts(block):
            parts[part.row : part.row + part.rows, part.col : part.col + part.cols] += 1
            assert (block.row + part.row, block.col + part.col) == (
                part.chunk[0] * p.c.chunk_rows,
                part.chunk[1] * p.c.chunk_cols,
            )
            assert part.rows == min(p.c.chunk_rows, p.m - block.row - part.row)
            assert part.cols == min(p.c.chunk_cols, p.n - block.col - part.col)
            assert part.chunk not in written_chunks
            written_chunks.add(part.chunk)
            written += p.c.chunk_bytes
        assert (parts == 1).all()
        if p.reads_c:
            found = filled(plan, plan.block_pieces(block), {"c": (block.rows, block.cols)})
            read, uploaded = read + found[0], uploaded + found[1]
        for start, stop in plan.panels():
            k = stop - start
            assert 0 < k <= plan.bk
            shapes = {"a": (k, block.rows) if p.a.transposed else (block.rows, k)}
            shapes["b"] = (block.cols, k) if p.b.transposed else (k, block.cols)
            found = filled(plan, plan.pieces(block, (start, stop)), shapes)
            read, uploaded = read + found[0], uploaded + found[1]
    assert (made == 1).all()
    assert index + 1 == plan.block_count if p.m and p.n else plan.block_count == 0
    assert [k for panel in plan.panels() for k in range(*panel)] == list(range(p.k))
    assert read == plan.bytes_read
    assert written == plan.bytes_written
    assert len(written_chunks) == p.c.grid[0] * p.c.grid[1]
    if plan.budget.device is not None:
        assert uploaded == plan.bytes_uploaded
        assert plan.bytes_downloaded == p.m * p.n * p.block_itemsize
        assert plan.device_bytes == sum(plan.device_ledger.values()) <= plan.budget.device
    assert plan.host_bytes == sum(plan.ledger.values()) <= plan.budget.host
    assert all(size >= 0 for size in [*plan.ledger.values(), *plan.device_ledger.values()])
    assert math.isfinite(plan.predicted_seconds)
    assert list(plan.blocks()) == list(plan.blocks())
    assert str(plan) == plan.table()


@given(problems(), budgets(), st.booleans(), st.sampled_from([0, 0, 5000, 100_000, 1 << 24]), st.data())
@settings(QUICK, max_examples=250)
def test_every_plan_is_complete_exact_and_within_its_budgets(problem, options, separate, spare, data):
    rates = APART if separate else SHARED
    host, device = minimum(problem, options, separate, rates)
    plan = make_plan(
        problem,
        Budget(host=host + spare, device=None if device is None else device + spare, **options),
        rates,
    )
    check(plan)
    assert plan == make_plan(problem, plan.budget, rates)


@given(problems(), budgets(), st.booleans())
@settings(QUICK, max_examples=60)
def test_one_byte_less_than_the_least_limit_is_refused(problem, options, separate):
    rates = APART if separate else SHARED
    host, device = minimum(problem, options, separate, rates)
    make_plan(problem, Budget(host=host, device=device, **options), rates)
    with pytest.raises(BudgetError, match=str(host)):
        make_plan(problem, Budget(host=host - 1, device=device, **options), rates)


side = st.integers(1, 400)


@given(
    side,
    side,
    side,
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from([0, 10_000, 1 << 20]),
    st.booleans(),
)
@settings(QUICK, max_examples=80)
def test_no_plan_moves_less_than_the_lower_bound(m, n, k, chunk_a, chunk_b, spare, separate):
    a, b = Matrix(m, k, 4, chunk_a, chunk_b), Matrix(k, n, 4, chunk_b, chunk_a)
    check_bound(Problem(m, n, k, a, b, Matrix(m, n, 4, 1, 1), 4, 4), spare, separate)


@given(
    side,
    side,
    side,
    st.sampled_from([0, 10_000, 1 << 20]),
    st.booleans(),
    st.sampled_from([(1, 4), (2, 8), (4, 8)]),
)
@settings(QUICK, max_examples=80)
def test_the_lower_bound_holds_where_panels_are_wider_than_what_is_stored(m, n, k, spare, separate, sizes):
    stored, panel = sizes
    a, b = Matrix(m, k, stored, 64, 64), Matrix(k, n, stored, 64, 64)
    check_bound(Problem(m, n, k, a, b, Matrix(m, n, 4, 1, 1), panel, 4), spare, separate)


def test_the_lower_bound_holds_for_large_int8():
    n = 20_000
    s = Matrix(n, n, 1, 1000, 1000)
    problem = Problem(n, n, n, s, s, Matrix(n, n, 4, 1, 1), 4, 4)
    plan = make_plan(problem, Budget(host=64 << 20, host_baseline=0, device=None), SHARED)
    assert plan.lower_bound_bytes <= plan.bytes_read + plan.bytes_written


def check_bound(problem, spare, separate):
    options = {"host_baseline": 0}
    rates = APART if separate else SHARED
    host, device = minimum(problem, options, separate, rates)
    plan = make_plan(
        problem,
        Budget(host=host + spare, device=None if device is None else device + spare, **options),
        rates,
    )
    assert 0 < plan.lower_bound_bytes <= plan.bytes_read + plan.bytes_written


@pytest.mark.parametrize(("host", "device"), [(64 << 30, 80 << 30), (64 << 30, None), (2 << 30, 2 << 30)])
@pytest.mark.parametrize("side", [400_000, 1_000_000])
def test_a_very_large_product(side, host, device):
    s = Matrix(side, side, 2, 2048, 2048)
    problem = Problem(side, side, side, s, s, Matrix(side, side, 2, 1, 1), 2, 4)
    plan = make_plan(problem, Budget(host, 0, device), APART if device else SHARED)
    assert plan.host_bytes <= host
    assert plan.lower_bound_bytes <= plan.bytes_read + plan.bytes_written
    first = next(plan.blocks())
    assert sum(1 for _ in plan.pieces(first, next(plan.panels()))) > 0
    assert plan.bytes_read >= 2 * side * side * 2


def test_more_memory_never_reads_much_more():
    s = Matrix(8192, 8192, 4, 1024, 1024)
    problem = Problem(8192, 8192, 8192, s, s, s, 4, 4)
    read = [
        make_plan(problem, Budget(limit << 20, 0, None), SHARED).bytes_read
        for limit in (40, 80, 160, 320, 2000)
    ]
    assert read == sorted(read, reverse=True)
    assert read[-1] == 2 * 8192 * 8192 * 4


def test_the_widest_block_is_taken_whatever_the_chunks():
    """Row strips, one huge chunk and misaligned grids still make large blocks."""
    for chunks in ((256, 8192), (8192, 256), (1000, 700), (8192, 8192)):
        s = Matrix(8192, 8192, 4, *chunks)
        problem = Problem(8192, 8192, 8192, s, s, s, 4, 4)
        plan = make_plan(problem, Budget(256 << 20, 0, None), SHARED)
        assert plan.bytes_read <= 6 * 8192 * 8192 * 4


# ---------------------------------------------------------------------------------------- who imports whom

PACKAGE = Path(ooc_gemm.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(file):
    """Absolute names' first parts, and this package's modules, that a file imports anywhere."""
    outside, inside = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            inside |= {name.split(".")[0] for name in names}
    return outside, inside


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    outside, inside = imported(file)
    name = file.relative_to(PACKAGE).as_posix()
    only = {
        "zarr": {"store.py"},
        "cupy": {"devices/cuda.py", "nvrtc.py"},
        "cuda": {"nvrtc.py", "devices/cuda.py"},
        "click": {"cli.py"},
        "rich": {"cli.py"},
        "zarrs": {"store.py"},
    }
    for library, files in only.items():
        assert library not in outside or name in files, library
    if name in ("plan.py", "tiles.py"):
        assert outside <= set(sys.stdlib_module_names)
        assert inside <= {"errors", "tiles"}
    above = {"api", "cli", "dask", "freivalds", "generate", "info"}
    if name not in {f"{module}.py" for module in above} | {"__init__.py"}:
        assert not inside & above
    if name == "execute.py":
        assert inside <= {"devices", "plan", "ring", "trace"}
    if name.startswith("devices/"):
        assert "store" not in inside
        assert "execute" not in inside
    if name == "store.py":
        assert inside <= {"errors", "plan", "ring", "tiles"}
    if name != "cli.py":
        assert "cli" not in inside
