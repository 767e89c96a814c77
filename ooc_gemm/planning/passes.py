"""Plans passes over one matrix B on a device with memory of its own: how B is cut into panels and pieces, and
what holds how many bytes.

    Y = P·V for each panel P of rows of B and a few vectors V;  Z += Pᵀ·Y
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..support.errors import BudgetError
from ..support.intervals import ceil_div, round_up
from .ledger import Ledger, piece_bytes
from .machine import Budget
from .problem import Matrix, MiB
from .stream_plan import Cut

PANEL_BYTES = 256 * MiB
"""Approximate bytes of a panel where memory allows it. The Python code of a panel's way takes less than a
millisecond, in which a bus moves a fifth as many bytes."""
PIECE_BYTES = 16 * MiB
"""Most bytes of a piece where chunks can be read in part, and where memory allows it …"""
IN_MEMORY_PIECE_BYTES = 32 * MiB
"""… of files in memory, all of which one thread starts to read: the larger pieces are, the less it does."""
PIECES = 8
"""A panel has about so many pieces, or more."""
LEVELS = 9
"""How often panels are halved, and pieces with them, where memory does not allow larger ones."""
LEAST = 14
"""The smallest panels are those that are halved so often: still smaller ones would take longer to hand on
than to work on."""
MOST_ROWS = 1 << 20
"""Most rows of a panel, for which vectors of float64 are held."""
PANELS = 2
"""Panels on the device: one is filled while the other is multiplied."""
SLOTS_PER_READER = 3
"""Slots of the ring for each reader: one that is read, one that waits for its turn, one that is uploaded."""
LEAVING = 2
"""Slots for what leaves the device: one is filled while the other is handed on."""
RUN = 512
"""Terms that are added up in the type of panels; sums of so many are added up in another step. BLAS on a CPU
adds up panels of about as many rows."""
LOAD_BYTES = 16
"""Rows of panels, and of vectors that lie side by side, start at multiples of this many bytes."""
VECTORS = 5
"""Vectors of float64 on the device that are as long as a panel is wide or high."""


@dataclass(frozen=True)
class PassProblem:
    """Passes over one matrix, described by numbers. Sizes in bytes."""

    name: str
    """How messages call the array."""
    matrix: Matrix
    """The stored matrix; B is op(S)."""
    itemsize: int
    """Bytes of an element of a panel."""
    converted: bool
    """Whether elements are converted when they are uploaded."""
    vectors: int
    """Most vectors that B is multiplied by."""
    fixed: int
    """Host memory for results, and for what is computed from them."""
    passes: int = 1
    """Passes that are made with the same buffers."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of B."""
        s = self.matrix
        return (s.cols, s.rows) if s.transposed else (s.rows, s.cols)


@dataclass(frozen=True)
class PassPlan:
    """How passes are carried out. Panels lie as they are stored."""

    problem: PassProblem
    height: int
    """Rows of a panel of B; the last one may have fewer."""
    cap: int
    """Bytes at which pieces are cut, where chunks can be read in part."""
    readers: int
    host: Ledger
    """Bytes of the host budget, by holder."""
    device: Ledger
    """Bytes of the device's budget, by holder."""
    kept: int = 0
    """Number of panels that stay on the device after the first pass."""

    @property
    def cut(self) -> Cut:
        """How a pass cuts B, and what it takes."""
        s, rows, height = self.problem.matrix, self.problem.shape[0], self.height
        kept = [number for number in range(self.panels) if self.slot_of(number) is not None]
        return Cut(
            height,
            self.readers,
            s.pass_bytes(height),
            self.host,
            self.device,
            sum(min(height, rows - number * height) for number in kept),
            s.panels_bytes(height, kept),
        )

    @property
    def panels(self) -> int:
        """How many panels B is cut into; the last one may have fewer rows."""
        return ceil_div(self.problem.shape[0], self.height)

    @property
    def panel_bytes(self) -> int:
        """Bytes that a panel takes on the device, with what fills up its rows."""
        rows, pitch = self.panel_shape
        return rows * pitch * self.problem.itemsize

    def slot_of(self, number: int) -> int | None:
        """Return where a panel is kept on the device; None where it is not. Kept panels lie evenly among the
        others, which are read while the device works on kept ones."""
        slot, end = number * self.kept // self.panels, (number + 1) * self.kept // self.panels
        return slot if slot < end else None

    @property
    def width(self) -> int:
        """Number of vectors, with those of zeros that fill up their rows."""
        return round_up(self.problem.vectors, LOAD_BYTES // self.problem.itemsize)

    @property
    def panel_shape(self) -> tuple[int, int]:
        """Rows of a panel as it is stored, and the elements from one of them to the next."""
        _, cols = self.problem.shape
        rows, line = (cols, self.height) if self.problem.matrix.transposed else (self.height, cols)
        return rows, round_up(line, LOAD_BYTES // self.problem.itemsize)

    @property
    def slots(self) -> int:
        """Number of slots of the ring. For files in memory there are few, because the device should find
        their data in the caches of the CPU."""
        if self.problem.matrix.traits.asynchronous:
            return self.readers + max(2, self.readers // 4)
        return SLOTS_PER_READER * self.readers

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: those of the largest piece."""
        s = self.problem.matrix
        rows, cols = (s.rows, self.height) if s.transposed else (self.height, s.cols)
        return max(1, piece_bytes(s, min(rows, s.rows), min(cols, s.cols), self.cap))

    @property
    def leaving_bytes(self) -> int:
        """Bytes of a slot for what leaves the device: the products of a panel, or its means."""
        p = self.problem
        return max(self.height * p.vectors * p.itemsize, self.lines * 8)

    @property
    def lines(self) -> int:
        """Length of vectors on the device."""
        return max(*self.panel_shape, self.width)

    @property
    def parts_bytes(self) -> int:
        """Bytes of the partial sums of a product on the device."""
        cols, w, size = self.problem.shape[1], self.width, self.problem.itemsize
        down, across = ceil_div(self.height, RUN), ceil_div(cols, RUN)
        return max(across * self.height * w * size, down * cols * w * size, down * w * w * 8)


def make_pass_plan(problem: PassProblem, budget: Budget) -> PassPlan:
    """Return the plan with the most readers, and then the largest panels and pieces, that fits both limits.

    Raises BudgetError, with the smallest limit that would do, where none fits.
    """
    plan = None
    for plan in _candidates(problem, budget):
        host, device = sum(plan.host.values()), sum(plan.device.values())
        if host <= budget.host and device <= (budget.device or 0):
            return _keeping(plan, (budget.device or 0) - device)
    assert plan, "there is at least one candidate, and the last is the smallest"
    said = f"bytes is too small to decompose {problem.name}; the smallest that would do is"
    if host > budget.host:
        raise BudgetError(
            f"a memory limit of {budget.host} {said} {host} bytes ({ceil_div(host, MiB)}MiB)",
            minimum_memory_limit=host,
        )
    raise BudgetError(
        f"a device memory limit of {budget.device} {said} {device} bytes ({ceil_div(device, MiB)}MiB)",
        minimum_device_memory_limit=device,
    )


def _keeping(plan: PassPlan, spare: int) -> PassPlan:
    """Return the plan with as many panels kept on the device as fit `spare` bytes of its memory."""
    kept = 0 if plan.problem.passes == 1 else min(plan.panels, spare // plan.panel_bytes)
    return replace(plan, device={**plan.device, "kept panels": kept * plan.panel_bytes}, kept=kept)


def _candidates(problem: PassProblem, budget: Budget) -> Iterator[PassPlan]:
    """Yield plans with fewer and fewer readers, for each of which panels and pieces become smaller."""
    readers = budget.readers
    while True:
        for level in range(LEVELS + (readers == 1)):
            yield _plan(problem, budget, readers, level)
        if readers == 1:
            return
        readers //= 2


def _plan(problem: PassProblem, budget: Budget, readers: int, level: int) -> PassPlan:
    """Return one plan with its ledgers. level: how often panels and pieces are halved; at LEVELS they are as
    small as can be."""
    s, (rows, cols), least = problem.matrix, problem.shape, level == LEVELS
    chunk = s.chunk_cols if s.transposed else s.chunk_rows
    step = min(rows, chunk if s.transposed or s.whole else 1)  # or chunks would be read twice
    usual = max(1, (PANEL_BYTES >> (LEAST if least else level)) // (cols * problem.itemsize))
    usual = min(usual, MOST_ROWS)
    height = min(rows, max(step, usual // chunk * chunk if usual >= chunk else usual))
    most = IN_MEMORY_PIECE_BYTES if s.traits.asynchronous else PIECE_BYTES
    cap = 1 if least else min(most, (PANEL_BYTES >> level) // PIECES)
    plan = PassPlan(problem, height, cap, readers, {}, {})
    slot = plan.slot_bytes
    host = {
        "baseline": budget.host_baseline,
        "read ring": plan.slots * slot,
        "decoding": readers * s.beside(slot),
        "lazy inputs": s.apart,
        "connections": readers * budget.connection,
        "results": problem.fixed + plan.lines * 8,
        "write slots": LEAVING * plan.leaving_bytes,
    }
    panel, w = plan.panel_bytes, plan.width
    wide = 8 if problem.itemsize < 8 else 0
    device = {
        "baseline": budget.device_baseline,
        "panels": PANELS * panel,
        "staging": slot if problem.converted else 0,
        "vectors": cols * w * problem.itemsize + VECTORS * plan.lines * 8,
        "products": height * w * (problem.itemsize + wide) + cols * w * 8 + w * w * 8,
        "workspace": plan.parts_bytes,
    }
    return PassPlan(problem, height, plan.cap, readers, host, device)
