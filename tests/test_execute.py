"""The engine alone: what it orders, what it holds back, and how it ends when something fails."""

import threading
import time

import numpy as np
import pytest
from conftest import Ordered

import ooc_gemm
from ooc_gemm.devices import COMPUTE, DOWNLOAD, UPLOAD, Operation
from ooc_gemm.devices.cpu import CPU
from ooc_gemm.execute import execute
from ooc_gemm.plan import Budget, Matrix, Problem, Rates, make_plan
from ooc_gemm.store import ArraySource, ArrayTarget
from ooc_gemm.trace import Trace

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_threads_left")]
MODES = ["late", "early", "cpu"]
M, N, K, CHUNK = 90, 70, 110, 16


class Source(ArraySource):
    """A NumPy array in chunks; `before` is called with the number of each read."""

    def __init__(self, name, values, before=lambda number: None):
        matrix = Matrix(*values.shape, values.itemsize, CHUNK, values.shape[1])
        super().__init__(name, values, matrix)
        self.before, self.reads, self.lock = before, 0, threading.Lock()

    def read(self, piece, slot):
        with self.lock:
            self.reads += 1
            number = self.reads
        self.before(number)
        return super().read(piece, slot)


class Target(ArrayTarget):
    """A NumPy array; `before` is called with the number of each write."""

    def __init__(self, out, matrix, log, before=lambda number: None):
        super().__init__(out, matrix, out.dtype)
        self.log, self.before, self.writes, self.lock = log, before, 0, threading.Lock()

    def write(self, part, slot):
        with self.lock:
            self.writes += 1
            number = self.writes
        self.before(number)
        moved = super().write(part, slot)
        self.log.append(("written", part.chunk))
        return moved


class Run:
    """One product, ready to be executed."""

    def __init__(self, mode, beta=0.0, read=lambda number: None, write=lambda number: None, device=None):
        rng = np.random.default_rng(1)
        self.a, self.b, self.c = (rng.standard_normal(shape) for shape in ((M, K), (K, N), (M, N)))
        self.device = device or (CPU(2) if mode == "cpu" else Ordered(mode))
        sources = {"a": Source("A", self.a, read), "b": Source("B", self.b, read)}
        if beta:
            sources["c"] = Source("C", self.c.copy())
        self.sources = sources
        c = Matrix(M, N, 8, CHUNK, CHUNK) if not beta else Matrix(M, N, 8, CHUNK, N)
        dims = (M, N, K, sources["a"].matrix, sources["b"].matrix, c, 8, 8)
        problem = Problem(*dims, reads_c=bool(beta), free_chunks=False)
        limit = 60_000
        budget = Budget(
            host=limit if mode == "cpu" else 1 << 30, host_baseline=0, device=None if mode == "cpu" else limit,
            readers=3, writers=2,
        )  # fmt: skip
        self.plan = make_plan(problem, budget, Rates(1e12, 3e9, 3e9, 5e10, 5e10, shared=mode == "cpu"))
        assert self.plan.block_count >= 4
        assert self.plan.panel_count >= 3
        kind = np.dtype("f8")
        arithmetic = self.device.arithmetic(kind, kind, kind, 0, "auto", "highest")
        self.operation = Operation(arithmetic, alpha=2.0, beta=beta)
        self.out = np.full((M, N), np.nan)
        self.log = self.device.log if mode != "cpu" else []
        self.target = Target(self.out, c, self.log, write)

    def execute(self, progress=lambda fraction: None):
        trace = Trace()
        try:
            self.device.start(self.plan, self.operation, trace)
            execute(self.plan, self.device, self.sources, self.target, trace, progress)
        finally:
            self.device.close()
        return trace

    def check(self):
        expected = 2 * (self.a @ self.b) + self.operation.beta * self.c
        assert np.allclose(self.out, expected, rtol=0, atol=1e-12 * np.linalg.norm(expected))


@pytest.mark.parametrize("beta", [0.0, -1.5])
@pytest.mark.parametrize("mode", MODES)
def test_the_product_is_right_in_the_worst_order_that_the_events_allow(mode, beta):
    run = Run(mode, beta)
    fractions = []
    trace = run.execute(fractions.append)
    run.check()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    assert trace.bytes["read"] == run.plan.bytes_read
    assert run.target.writes == len([p for b in run.plan.blocks() for p in run.plan.parts(b)])


@pytest.mark.parametrize("mode", MODES)
def test_it_does_not_matter_who_is_slow(mode):
    rng = np.random.default_rng(2)
    waits = rng.random(1000) * 0.004

    def stall(number):
        time.sleep(waits[number % 1000])

    for options in ({"read": stall}, {"write": lambda number: time.sleep(0.02)}):
        run = Run(mode, -1.5, **options)
        run.execute()
        run.check()


@pytest.mark.parametrize("beta", [0.0, -1.5])
@pytest.mark.parametrize("mode", ["late", "early"])
def test_streams_wait_for_each_other(mode, beta):
    """The log alone, without the results: every wait that a device needs is there, before the work it guards."""
    run = Run(mode, beta)
    run.execute()
    log, plan = run.log, run.plan
    made = {}  # block → log index of its last multiplication
    used = {}  # panel buffer → log index of the multiplication that read it last
    holds = {}  # C buffer → the block in it
    chunks = {block.index: {part.chunk for part in plan.parts(block)} for block in plan.blocks()}
    waits = {UPLOAD: [], COMPUTE: [], DOWNLOAD: []}  # stream → (of, up to log index)
    recorded, uploaded, written = {}, {}, set()

    def waited(stream, of, at):
        return any(other == of and upto > at for other, upto in waits[stream])

    for index, entry in enumerate(log):
        match entry:
            case "record", stream, point:
                recorded[id(point)] = (stream, index)
            case "wait", stream, point:
                of, upto = recorded[id(point)]
                waits[stream].append((of, upto))
            case "upload", "c", c:
                assert chunks[holds[c]] <= written if c in holds else True
                uploaded["c", c] = index
            case "upload", _, p:
                assert p not in used or waited(UPLOAD, COMPUTE, used[p])
                uploaded["panel", p] = index
            case "multiply", block, p, c, first:
                assert waited(COMPUTE, UPLOAD, uploaded["panel", p])
                if first and beta:
                    assert waited(COMPUTE, UPLOAD, uploaded["c", c])
                if first and c in holds:
                    assert chunks[holds[c]] <= written, "a block is overwritten before it is stored"
                holds[c] = block
                used[p] = made[block] = index
            case "download", block, _:
                assert waited(DOWNLOAD, COMPUTE, made[block])
            case "written", chunk:
                written.add(chunk)
    assert written == set.union(*chunks.values())
    assert [entry[4] for entry in log if entry[0] == "multiply"] == (
        [True] + [False] * (plan.panel_count - 1)
    ) * plan.block_count


@pytest.mark.parametrize("mode", MODES)
def test_readers_run_ahead_by_no_more_than_the_ring(mode):
    run, ahead = Run(mode), []
    per_step = [
        sum(1 for _ in run.plan.pieces(block, panel))
        for block in run.plan.blocks()
        for panel in run.plan.panels()
    ]
    steps = []

    def progress(fraction):
        steps.append(fraction)
        if len(steps) < 6:
            time.sleep(0.05)
        reads = sum(source.reads for source in run.sources.values())
        ahead.append(reads - sum(per_step[: len(steps)]))

    run.execute(progress)
    assert max(ahead) <= run.plan.slots
    assert sum(per_step) == sum(source.reads for source in run.sources.values())


class Broken(Exception):
    pass


def fail_at(wanted):
    def check(number):
        if number == wanted:
            raise Broken(f"at {wanted}")

    return check


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [1, 2, 7, 40])
@pytest.mark.parametrize(
    "who", ["read", "write", "upload", "multiply", "download", "record", "wait", "host_buffers"]
)
def test_a_failure_anywhere_ends_the_run_with_its_error(mode, who, at):
    if who == "host_buffers" and at > 2:
        pytest.skip("there are two")
    if who in ("read", "write"):
        run = Run(mode, **{who: fail_at(at)})
    else:
        run = Run(mode)
        if mode == "cpu" and who == "multiply":
            who = "_multiply"
        count, lock, inner = [0], threading.Lock(), getattr(run.device, who)

        def failing(*args, **options):
            with lock:
                count[0] += 1
                number = count[0]
            fail_at(min(at, 8))(number)
            return inner(*args, **options)

        setattr(run.device, who, failing)
    with pytest.raises(Broken):
        run.execute()


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_of_the_last_write_is_told(mode):
    total = len([p for b in Run(mode).plan.blocks() for p in Run(mode).plan.parts(b)])
    with pytest.raises(Broken):
        Run(mode, write=fail_at(total)).execute()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, Broken])
def test_an_interrupt_ends_the_run(mode, error):
    run = Run(mode, write=lambda number: time.sleep(0.01))

    def progress(fraction):
        if fraction > 0.4:
            raise error

    start = time.monotonic()
    with pytest.raises(error):
        run.execute(progress)
    assert time.monotonic() - start < 10
    assert run.target.writes < len([p for b in run.plan.blocks() for p in run.plan.parts(b)])


@pytest.mark.parametrize("mode", MODES)
def test_a_device_can_be_started_again(mode):
    device = CPU(2) if mode == "cpu" else Ordered(mode)
    for _ in range(2):
        run = Run(mode, device=device)
        device.log = run.log
        run.execute()
        run.check()


def test_a_cpu_that_cannot_start_tells_why(monkeypatch):
    def refuse(**options):
        raise MemoryError("not enough")

    monkeypatch.setattr("ooc_gemm.devices.cpu.threadpool_limits", refuse)
    with pytest.raises(MemoryError, match="not enough"):
        ooc_gemm.multiply(np.ones((3, 3)), np.ones((3, 3)), device="cpu")


def test_blas_gets_its_threads_back():
    from threadpoolctl import threadpool_info

    def threads():
        return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]

    before = threads()
    ooc_gemm.multiply(np.ones((30, 30)), np.ones((30, 30)), device="cpu")
    with pytest.raises(ooc_gemm.RangeError):
        ooc_gemm.multiply(np.full((2, 2), 2**40), np.full((2, 2), 2**40), device="cpu")
    assert threads() == before
