"""Devices that the end-to-end tests run on."""

import threading
import time

import numpy as np
import pytest
import zarr

from ooc_gemm.devices import COMPUTE, DOWNLOAD, UPLOAD, Limits, Overflow
from ooc_gemm.devices.cpu import CPU
from ooc_gemm.plan import Rates
from ooc_gemm.ring import Stopped


class Recording(CPU):
    """Computes on the CPU, and checks and logs the order it is given work in, as a device with real streams
    would need it: all that is known of another stream is what has been waited for."""

    name = "recording"

    def start(self, plan, operation, trace):
        super().start(plan, operation, trace)
        self.log = []
        self.marks = {}
        self.used = {}  # panel buffer → events recorded on COMPUTE after its last multiplication
        self.filled = {}  # panel buffer or block → uploads not yet waited for by COMPUTE
        self.waited = set()

    def upload(self, source, piece, buffer):
        kind = "c" if piece.operand == "c" else "panel"
        if kind == "panel" and buffer in self.used:
            assert self.used[buffer] & self.waited, (
                "a panel is overwritten before its multiplication is waited for"
            )
        self.filled[kind, buffer] = True
        self.log.append(("upload", kind, buffer))
        return super().upload(source, piece, buffer)

    def multiply(self, block, panel, p, c, first):
        assert not self.filled.get(("panel", p)), "a panel is used before its uploads are waited for"
        self.used[p] = set()
        self.log.append(("multiply", p, c, first))
        super().multiply(block, panel, p, c, first)

    def download(self, block, part, c, target):
        self.log.append(("download", block.index, part.chunk))
        return super().download(block, part, c, target)

    def record(self, stream):
        event = super().record(stream)
        self.marks[id(event)] = (stream, event)
        if stream == COMPUTE:
            for events in self.used.values():
                events.add(id(event))
        self.log.append(("record", stream))
        return event

    def wait(self, stream, event):
        recorded, _ = self.marks[id(event)]
        if stream == COMPUTE:
            assert recorded == UPLOAD
            self.filled.clear()
        else:
            assert recorded == COMPUTE
            assert stream in (UPLOAD, DOWNLOAD)
            if stream == UPLOAD:
                self.waited.add(id(event))
        self.log.append(("wait", stream))
        super().wait(stream, event)


def gpu_missing():
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "there is no GPU"
    except Exception as error:
        return f"there is no GPU here: {error}"


@pytest.fixture(params=["cpu", "recording", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """What `device=` takes."""
    if request.param == "cuda" and (why := gpu_missing()):
        pytest.skip(why)
    return Recording() if request.param == "recording" else request.param


# ------------------------------------------------------------------------- a device whose order can be chosen


class Point:
    """An event: so much of one stream."""

    def __init__(self, device, stream, position):
        self.device, self.stream, self.position = device, stream, position

    def synchronize(self):
        self.device.reach(self.stream, self.position)


class Ordered:
    """Three streams in NumPy, with memory of its own, that run as `late` as the events allow (what nobody waits
    for does not happen) or copy as `early` as they allow. A missing wait gives a wrong product: buffers hold
    poison before they are filled and after they are used. `log` lists what was asked for, in order."""

    def __init__(self, mode, memory=1 << 30):
        self.name, self.early, self.memory = mode, mode == "early", memory
        self.log = []
        self.lock = threading.RLock()
        self.closed = True

    def arithmetic(self, a, b, out, bound, kernel, precision):
        return CPU(1).arithmetic(a, b, out, bound, kernel, precision)

    def limits(self, arithmetic, device_memory_limit):
        return Limits(0, device_memory_limit or self.memory, 0, 0, readers=3, writers=2)

    def rates(self, arithmetic):
        return Rates(1e12, 3e9, 3e9, 5e10, 5e10, shared=False)

    def start(self, plan, operation, trace):
        self.op, self.trace, self.overflow = operation, trace, Overflow(operation)
        self.streams = {name: [] for name in (UPLOAD, COMPUTE, DOWNLOAD)}
        self.reached = dict.fromkeys(self.streams, 0)
        self.cancelled = self.closed = False
        panel, block = operation.arithmetic.panel, operation.arithmetic.block
        self.buffers = {}
        for p in range(plan.panel_buffers):
            self.buffers["a", p] = np.empty(plan.bm * plan.bk, panel)
            self.buffers["b", p] = np.empty(plan.bk * plan.bn, panel)
        for c in range(plan.c_buffers):
            self.buffers["c", c] = np.empty(plan.bm * plan.bn, block)
        for buffer in self.buffers.values():
            self.poison(buffer)

    @staticmethod
    def poison(buffer):
        buffer.fill(np.nan if buffer.dtype.kind in "fc" else 113)

    def host_buffers(self, count, nbytes):
        return [np.full(nbytes, 0xFF, np.uint8) for _ in range(count)]

    def submit(self, stream, work):
        with self.lock:
            assert not self.closed
            self.streams[stream].append(work)
            if self.early and stream != COMPUTE:
                self.reach(stream, len(self.streams[stream]))

    def reach(self, stream, position):
        with self.lock:
            while self.reached[stream] < position:
                if self.cancelled:
                    raise Stopped
                work = self.streams[stream][self.reached[stream]]
                if isinstance(work, Point):
                    self.reach(work.stream, work.position)
                else:
                    work()
                self.reached[stream] += 1

    def upload(self, source, piece, buffer):
        self.overflow.upload(piece, buffer, source)
        memory, (row, col), (rows, cols) = self.buffers[piece.operand, buffer], piece.into, source.shape

        def work():
            size = piece.panel[0] * piece.panel[1]
            target = memory[:size].reshape(piece.panel)[row : row + rows, col : col + cols]
            np.copyto(target, source, casting="unsafe")
            source.view(np.uint8)[...] = 0xFF  # the slot is the reader's again
            self.trace.add("upload", 0.0, 0.0, "upload", source.nbytes)

        self.log.append(("upload", piece.operand, buffer))
        self.submit(UPLOAD, work)
        return self.record(UPLOAD)

    def multiply(self, block, panel, p, c, first):
        self.overflow.multiply(p, c, panel[1] - panel[0], first)
        op, k = self.op, panel[1] - panel[0]

        def operand(name, shape, transpose, conjugate):
            flat = self.buffers[name, p][: shape[0] * shape[1]]
            found = flat.reshape(shape[::-1]).T if transpose else flat.reshape(shape)
            kind = {"c": np.complex128, "f": np.float64}.get(self.buffers["c", c].dtype.kind, np.int64)
            return (found.conj() if conjugate else found).astype(kind)

        def work():
            out = self.buffers["c", c][: block.rows * block.cols].reshape(block.rows, block.cols)
            a = operand("a", (block.rows, k), op.transpose_a, op.conjugate_a)
            b = operand("b", (k, block.cols), op.transpose_b, op.conjugate_b)
            kind = a.dtype.kind
            alpha, beta = (
                x if kind == "c" else int(x.real) if kind == "i" else x.real for x in (op.alpha, op.beta)
            )
            with np.errstate(all="ignore"):
                old = 0 if first and beta == 0 else out * (beta if first else 1)
                out[...] = old + alpha * (a @ b)
            self.poison(self.buffers["a", p])
            self.poison(self.buffers["b", p])

        self.log.append(("multiply", block.index, p, c, first))
        self.submit(COMPUTE, work)

    def scale(self, block, c):
        def work():
            out = self.buffers["c", c][: block.rows * block.cols]
            out[...] = out * out.dtype.type(self.op.beta) if self.op.beta != 0 else 0

        self.log.append(("scale", block.index, c))
        self.submit(COMPUTE, work)

    def download(self, block, part, c, target):
        def work():
            whole = self.buffers["c", c][: block.rows * block.cols].reshape(block.rows, block.cols)
            target[...] = whole[part.row : part.row + part.rows, part.col : part.col + part.cols]
            self.trace.add("download", 0.0, 0.0, "download", target.nbytes)

        with self.lock:
            self.log.append(("download", block.index, part.chunk))
            self.submit(DOWNLOAD, work)
            return self.record(DOWNLOAD)

    def record(self, stream):
        with self.lock:
            point = Point(self, stream, len(self.streams[stream]))
            self.log.append(("record", stream, point))
            return point

    def wait(self, stream, event):
        self.log.append(("wait", stream, event))
        self.submit(stream, event)

    def peak_bytes(self):
        return self.memory

    def cancel(self):
        self.cancelled = True

    def close(self):
        self.closed = True
        self.buffers = {}


@pytest.fixture(params=["cpu", "recording", "late", "early", pytest.param("cuda", marks=pytest.mark.gpu)])
def every_device(request):
    """What `device=` takes; `late` and `early` have memory of their own and run in the worst order allowed."""
    if request.param == "cuda" and (why := gpu_missing()):
        pytest.skip(why)
    return {"recording": Recording, "late": lambda: Ordered("late"), "early": lambda: Ordered("early")}.get(
        request.param, lambda: request.param
    )()


# ------------------------------------------------------------------------------------------------------ helpers


@pytest.fixture
def plain_baseline(monkeypatch):
    """Budgets that do not depend on what pytest holds resident at the moment."""
    import ooc_gemm.api

    monkeypatch.setattr(ooc_gemm.api, "baseline_bytes", lambda usual: usual)


@pytest.fixture
def no_threads_left():
    """What the engine starts, it ends."""
    yield
    stop = time.monotonic() + 5
    while (left := [t.name for t in threading.enumerate() if t.name.startswith("ooc-gemm")]) and (
        time.monotonic() < stop
    ):
        time.sleep(0.01)
    assert left == []


class Said(tuple):
    """(exit status, standard output, standard error) of a command."""

    status = property(lambda self: self[0])
    out = property(lambda self: self[1])
    err = property(lambda self: self[2])


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """The command line in this process, in `tmp_path`."""
    from ooc_gemm.cli import main

    def run(*args):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["ooc-gemm", *map(str, args)])
        with pytest.raises(SystemExit) as done:
            main()
        said = capsys.readouterr()
        return Said((done.value.code, said.out, said.err))

    return run


def make(path, values, **options):
    """A Zarr array on disk; its path."""
    array = zarr.create_array(str(path), shape=values.shape, dtype=values.dtype, **options)
    array[...] = values
    return str(path)


def matrix(shape, dtype, seed):
    """Random values that every type can hold."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(
            max(info.min, -200), min(info.max, 200), shape, dtype.newbyteorder("="), endpoint=True
        )
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype.kind == "c" else values).astype(dtype)


def product(a, b):
    """The oracle: in float64, complex128, or exact integers."""
    kind = {"c": "c16", "f": "f8"}.get(np.result_type(a, b).kind, "i8")
    with np.errstate(all="ignore"):
        return a.astype(kind) @ b.astype(kind)


BOUND = {"e": 2e-3, "f": 2e-6, "F": 2e-6, "d": 1e-14, "D": 1e-14}


def assert_same(found, expected, char=None):
    """Exact for integers; otherwise NaN and infinities in the same places, and the rest close in norm."""
    found, char = np.asarray(found), char or np.asarray(found).dtype.char
    assert found.shape == expected.shape
    if np.dtype(char).kind in "iu":
        assert np.array_equal(found, expected)
        return
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    infinite = np.isinf(expected)
    assert np.array_equal(np.isinf(found), infinite)
    assert np.array_equal(found[infinite], expected[infinite].astype(found.dtype))
    finite = np.isfinite(expected)
    error = np.linalg.norm(found[finite].astype(expected.dtype) - expected[finite])
    assert error <= BOUND[char] * np.linalg.norm(expected[finite])
