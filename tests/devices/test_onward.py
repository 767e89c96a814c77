"""Pieces that go from files in memory to a device without the interpreter."""

import ctypes
import itertools
import shutil
import threading

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import make
from copying_threads import product
from sessions import device_with

import ooc_gemm
from ooc_gemm.cuda_kernels import driver
from ooc_gemm.cuda_kernels.driver import Event
from ooc_gemm.devices import several
from ooc_gemm.devices.cuda import pinned as pinning
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.session import CUDASession
from ooc_gemm.devices.cuda.timing import Timing
from ooc_gemm.devices.cuda.uploads import Uploads
from ooc_gemm.engine.overflow import INT64_MAX
from ooc_gemm.planning import candidates, ledger, schedule, search
from ooc_gemm.planning.candidates import Candidate, outputs, rings
from ooc_gemm.planning.ledger import staged_area
from ooc_gemm.planning.panels import Panels
from ooc_gemm.run import budget, prepare
from ooc_gemm.run.request import Operand, Request
from ooc_gemm.storage.io import background, files
from ooc_gemm.storage.io.background import Job, Transfer
from ooc_gemm.support.onward import Onward
from ooc_gemm.support.trace import Trace

RNG = np.random.default_rng(5)


LAYOUTS = {
    "chunks": {"chunks": (64, 64)},
    "small chunks": {"chunks": (16, 16)},
    "row strips": {"chunks": (32, 1000)},
    "rows wide apart": {"chunks": (50, 4000)},
    "misaligned": {"chunks": (70, 90)},
    "shards": {"chunks": (32, 32), "shards": (128, 64)},
}


@pytest.mark.parametrize("transpose", ["", "a", "b"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(memory, layout, transpose):
    k = 4000 if layout == "rows wide apart" else 1000
    a, b = (RNG.integers(-9, 9, shape).astype("f4") for shape in ((500, k), (k, 400)))
    want, options = a @ b, {"kernel": "cublas", "memory_limit": "1GiB"}
    a, b = (a.T if transpose == "a" else a), (b.T if transpose == "b" else b)
    for name, x in (("a", a), ("b", b)):
        make(memory / name, x, compressors=None, **LAYOUTS[layout])
    options |= {"transpose_a": transpose == "a", "transpose_b": transpose == "b"}
    found = ooc_gemm.multiply(str(memory / "a"), str(memory / "b"), device="cuda", **options)
    assert np.array_equal(found.array, want)
    assert found.bytes_read == found.plan.bytes_read
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    assert cupy_on_cpu.sent


def test_no_event_is_created_while_threads_copy(memory, monkeypatch):
    """They would make it wait, and the interpreter with it. The next run uses the events of the one
    before."""
    created, make_event, reserve, reserved = [], driver.Events._created, driver.Events.reserve, []

    def creates(self):
        created.append(self)
        return make_event(self)

    def reserves(self, count):
        reserve(self, count)
        reserved.append(count)

    monkeypatch.setattr(driver.Events, "_created", creates)
    monkeypatch.setattr(driver.Events, "reserve", reserves)
    x = RNG.integers(-9, 9, (500, 500)).astype("f4")
    make(memory / "a", x, compressors=None, chunks=(64, 64))
    for _ in range(2):
        found = ooc_gemm.multiply(*[str(memory / "a")] * 2, device="cuda", kernel="cublas")
        assert np.array_equal(found.array, x @ x)
        assert cupy_on_cpu.sent
        assert len(created) == sum(reserved[:2])


@pytest.mark.parametrize("what", ["read", "copy", "record"])
def test_what_fails_is_read_and_uploaded_again(memory, monkeypatch, what):
    """The plain ways say what the matter is, or there is nothing the matter any more."""
    a = RNG.integers(-9, 9, (300, 300)).astype("f4")
    make(memory / "a", a, compressors=None, chunks=(50, 50))
    if what == "read":
        real = files.background.Transfer.end
        monkeypatch.setattr(files.background.Transfer, "end", lambda self: real(self) and False)
    else:
        sending = list(cupy_on_cpu.SENDING)
        sending[("use", "copy", "record").index(what)] = cupy_on_cpu.SENDING[0]  # it fails for other numbers
        monkeypatch.setattr(driver, "_sending", lambda: tuple(sending))
    found = ooc_gemm.multiply(str(memory / "a"), str(memory / "a"), device="cuda", kernel="cublas")
    assert np.array_equal(found.array, a @ a)
    assert found.bytes_uploaded == found.plan.bytes_uploaded


K = 64
TARGET = 50
"""About the largest magnitude in B where A has one of the largest of its type."""


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_integers_whose_sums_may_exceed_int64(memory, layout, dtype, sign):
    """Threads look for the largest magnitudes of what they send. A product is refused where those of its
    panels allow a sum that int64 does not hold, and by one less it is made."""
    info = np.iinfo(dtype)
    if sign < 0 and info.min == 0:
        pytest.skip("the type has no sign")
    most = min(-int(info.min) if sign < 0 else int(info.max), 1 << 40)
    alpha = max(1, INT64_MAX // (most * K * TARGET))
    fits = INT64_MAX // (alpha * most * K)
    a, b = (RNG.integers(0 if sign > 0 else -2, 3, shape).astype(dtype) for shape in ((500, K), (K, 400)))
    a[RNG.integers(500), RNG.integers(K)] = sign * most
    there = RNG.integers(K), RNG.integers(400)

    def product(largest):
        b[there] = sign * largest
        for name, x in (("a", a), ("b", b)):
            shutil.rmtree(memory / name, ignore_errors=True)
            make(memory / name, x, compressors=None, **LAYOUTS[layout])
        del cupy_on_cpu.sent[:]
        names = (str(memory / name) for name in "ab")
        return ooc_gemm.multiply(*names, device="cuda", alpha=alpha, out_dtype="int64")

    with pytest.raises(ooc_gemm.RangeError, match="may exceed int64"):
        product(fits + 1)
    assert cupy_on_cpu.sent
    found = product(fits)
    assert cupy_on_cpu.sent
    assert found.plan.panel_count == 1
    assert np.array_equal(found.array, alpha * (a.astype("i8") @ b.astype("i8")))


@pytest.mark.parametrize("operand", "ab")
def test_integers_past_int64(memory, operand):
    x = RNG.integers(0, 9, (300, 300)).astype("u8")
    make(memory / "small", x, compressors=None, chunks=(50, 50))
    x[123, 234] = 1 << 63
    make(memory / "large", x, compressors=None, chunks=(50, 50))
    names = [str(memory / name) for name in (("large", "small") if operand == "a" else ("small", "large"))]
    with pytest.raises(ooc_gemm.RangeError, match=f"operand {operand} holds integers past int64"):
        ooc_gemm.multiply(*names, device="cuda")
    assert cupy_on_cpu.sent


@pytest.mark.parametrize("step", [0, 1100])
@pytest.mark.parametrize("columns", [(0, 90), (0, 30), (17, 40), (60, 30)])
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_threads_look_at_nothing_but_what_goes_on(memory, dtype, columns, step):
    """Larger elements beside a part of each row are those of other panels."""
    (first, count), info = columns, np.iinfo(dtype)
    x = np.full((70, 90), info.min or info.max, dtype)
    part = x[:, first : first + count]
    part[...] = RNG.integers(0, 99, part.shape)
    part[RNG.integers(70), RNG.integers(count)] = wanted = -120 if info.min else 120
    x.tofile(memory / "x")
    size, there, found = x.itemsize, np.zeros_like(part), ctypes.c_uint64(5)
    packed = driver.place(
        0, 0, Event(1000, []), there.ctypes.data, count * size, -size if info.min else size,
        ctypes.addressof(found),
    )  # fmt: skip
    onward = Onward(packed, lambda: True, step=step)
    job, into = Job(str(memory / "x"), 0, x.nbytes), np.empty(x.nbytes, "u1")
    assert files.start_read([job], into, onward, (90 * size, first * size, count * size))()
    assert onward.taken
    assert found.value == abs(wanted)
    cupy_on_cpu.arrive(0)
    assert np.array_equal(there, part)


@pytest.mark.parametrize(("dtype", "kernel"), [("i8", "ffma"), ("i4", "ozaki2"), ("u4", "ozaki2")])
@pytest.mark.parametrize("strips", [False, True])
def test_panels_that_stay_are_looked_at_once(memory, monkeypatch, strips, dtype, kernel):
    """Each block is bounded by what was found when they came."""
    panels = {"rows": 2, "columns": 2} if strips else {}

    def make_plan(problem, budget, rates):
        made = Panels(problem.k, 100, problem.k_chunk, resident=True, buffers=4, **panels)
        x = Candidate(outputs(problem)[0], 150 if strips else 300, 100, made, 2, rings(budget)[0])
        return search.finish(problem, budget, rates, x)

    monkeypatch.setattr(prepare, "make_plan", make_plan)
    least = 0 if dtype[0] == "u" else -9
    a, b = (RNG.integers(least, 9, shape).astype(dtype) for shape in ((300, 400), (400, 300)))
    a[0, 399] = a[299, 399] = 1 << 30
    for largest in (8, 1 << 30):
        b[399, 299] = largest  # what comes last, but for some of op(A) if there are strips
        for name, x in (("a", a), ("b", b)):
            make(memory / name, x, compressors=None, chunks=(50, 50))
        names, options = [str(memory / name) for name in "abc"], {"chunks": (50, 50), "force": True}
        options |= {"out_dtype": "int64", "kernel": kernel}
        if largest == 8:
            found = ooc_gemm.multiply(*names, device="cuda", **options)
            assert np.array_equal(found.array[:], a.astype("i8") @ b.astype("i8"))
            assert found.plan.block_count > 2
            assert found.plan.k_panels.stay == (True, strips)
        else:
            with pytest.raises(ooc_gemm.RangeError, match="may exceed int64"):
                ooc_gemm.multiply(*names, device="cuda", **options)
        for name in "ab":
            shutil.rmtree(memory / name)


@pytest.mark.parametrize("areas", ["as many as pieces", "one", "none"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("what", ["converted", "transformed", "transposed"])
def test_pieces_that_the_device_converts(memory, monkeypatch, what, devices, fails, areas):
    """They go to areas on the device by themselves, as far as there are some. Each begins where any type
    may."""
    dtype, kernel, options, operand = {
        "converted": ("f4", "cublas", {"out_dtype": "float64"}, {}),
        "transformed": ("f4", "cublas", {}, {"scale": "rows", "missing": -9}),
        "transposed": ("i1", "int8", {"out_dtype": "int32"}, {}),
    }[what]
    cupy_on_cpu.install(monkeypatch, devices=devices)
    monkeypatch.setattr(CUDA, "reaches", lambda *_: True)
    if areas != "as many as pieces":
        staged, count = ledger.staged_bytes, 2 if areas == "one" else 1

        def limited(budget, readers, slot):
            return min(staged(budget, readers, slot), count * staged_area(slot))

        monkeypatch.setattr(ledger, "staged_bytes", limited)
        monkeypatch.setattr("ooc_gemm.devices.cuda.session.staged_bytes", limited)
    if fails:
        real, ends = files.background.Transfer.end, itertools.cycle([True, True, False])
        monkeypatch.setattr(files.background.Transfer, "end", lambda self: real(self) and next(ends))
    a = RNG.integers(-9, 9, (301, 301)).astype(dtype)
    make(memory / "a", a, compressors=None, chunks=(301, 101))
    left = ooc_gemm.Operand(str(memory / "a"), **operand)
    placed, free = [], set()
    real_place, real_session = Uploads._place_piece, CUDASession.free_panels

    def place(self, piece, kind, shape, at, *more):
        assert at % 512 == 0
        if at != self._staging.first:
            placed.append(piece.operand)
        real_place(self, piece, kind, shape, at, *more)

    def free_panels(self):
        if staging := self._uploads._staging:
            free.add((len(staging.free), staging.memory.size))
        real_session(self)

    monkeypatch.setattr(Uploads, "_place_piece", place)
    monkeypatch.setattr(CUDASession, "free_panels", free_panels)
    options |= {"device": "cuda:0,1,2" if devices > 1 else "cuda", "notice": lambda text: None}
    found = ooc_gemm.multiply(left, str(memory / "a"), kernel=kernel, memory_limit="3GiB", **options)
    on_cpu = ooc_gemm.multiply(left, str(memory / "a"), **(options | {"device": "cpu"}))
    assert np.abs(found.array - on_cpu.array).max() < 1e-6 * np.abs(on_cpu.array).max()
    assert found.plan.budget.staged
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    area = staged_area(found.plan.slot_bytes)
    assert free == {(size // area - 1, size) for _, size in free}, "areas were not given back"
    assert free
    kinds = {"converted": {"a", "b"}, "transformed": {"a"}, "transposed": {"b"}}
    if areas == "one":
        assert set() < set(placed) <= kinds[what]
    else:
        assert set(placed) == (set() if areas == "none" else kinds[what])


def noting(begun):
    """A session that notes each piece and where it goes on to."""

    class Session(CUDASession):
        def onward(self, piece, dtype, buffer):
            begun.append((piece, super().onward(piece, dtype, buffer)))
            return begun[-1][1]

        def release(self, buffers):
            super().release(buffers)
            assert not any(map(self.prepared, buffers))

    return Session


@pytest.mark.parametrize("step", [0, 10_000, 50_000])
def test_short_chunks_go_on_from_places_several_at_a_time(memory, monkeypatch, step):
    """A thread reads four chunks of 10 KB after each other. Where these fit its places, no slot needs to be
    pinned for them, also not for the last chunks of a piece."""
    monkeypatch.setattr(background, "TASK_BYTES", 40_000)
    monkeypatch.setattr(files, "LEAST_PART", 1 << 20)
    a = RNG.integers(-9, 9, (1310, 500)).astype("f4")
    make(memory / "a", a, compressors=None, chunks=(50, 50))
    monkeypatch.setattr(budget, "STEP_BYTES", step)
    begun = []
    device = device_with(noting(begun), CUDA)()
    found = ooc_gemm.gram(str(memory / "a"), transpose=True, device=device, kernel="cublas")
    assert np.array_equal(found.array, a.T @ a)
    loose = [
        onward.taken
        for piece, onward in begun
        if onward and not onward.pinned and piece.rows[1] - piece.rows[0] > 2 * 50
    ]
    assert loose, "no piece of several chunks met a slot that is not pinned"
    assert set(loose) == {step == 50_000}


def test_places_are_half_as_large_or_left_out_where_there_is_less_memory(memory, monkeypatch):
    """They take no more than a sixteenth of what there is."""
    make(memory / "a", np.zeros((64, 64), "f4"), compressors=None, chunks=(64, 64))
    monkeypatch.setattr(budget, "STEP_BYTES", step := 4 << 20)

    def found(there):
        """The bytes of a step with so many bytes beside what the process has, and what it has."""
        limits = {"memory_limit": base + there, "device": "cuda"}
        operands = (Operand(str(memory / "a")) for _ in "ab")
        made = prepare.prepare(Request(*operands, str(memory / "c"), **limits).check()).plan.budget
        return made.step, made.host_baseline - background.places_bytes(made.step)

    base, whole = 0, budget.SMALL * background.places_bytes(step)
    _, base = found(2 * whole)
    assert found(5 * whole // 4)[0] == step
    assert found(3 * whole // 4)[0] == step // 2
    assert found(whole // 4)[0] == 0


@pytest.mark.parametrize("step", [0, 1100, 50_000, 100_000])
@pytest.mark.parametrize("part", [20_000, 1 << 20])
def test_a_slot_that_is_not_pinned_is_uploaded_unless_there_are_places(memory, monkeypatch, step, part):
    """Threads have parts of chunks of 40 KB, or whole ones. What takes less than half a step is uploaded."""
    monkeypatch.setattr(files, "LEAST_PART", part)
    monkeypatch.setattr(background, "TASK_BYTES", 1)
    a = RNG.integers(-9, 9, (900, 900)).astype("f4")
    make(memory / "a", a, compressors=None, chunks=(100, 100))
    monkeypatch.setattr(budget, "STEP_BYTES", step)
    begun = []
    device = device_with(noting(begun), CUDA)()
    found = ooc_gemm.multiply(str(memory / "a"), str(memory / "a"), device=device, kernel="cublas")
    assert np.array_equal(found.array, a @ a)
    loose = [onward.taken for _, onward in begun if onward and not onward.pinned]
    assert any(loose) == all(loose) == (0 < step <= 2 * min(part, 40_000))
    assert any(onward.taken for _, onward in begun if onward)


@pytest.mark.parametrize("what", ["multiply", "gram", "beta"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("linked", [False, True])
def test_several_devices(memory, monkeypatch, what, transpose, linked):
    """A piece goes to the device whose band it is in, or to the one that passes it on to the others. Pieces
    that two bands share are uploaded to both."""
    cupy_on_cpu.install(monkeypatch, devices=3)
    monkeypatch.setattr(several, "MOST_READERS", 8)
    monkeypatch.setattr(candidates, "AMPLE_DEVICE_SLOTS", (12_000, 12_000))
    monkeypatch.setattr(candidates, "STEPPED_SLOT", 24_000)
    monkeypatch.setattr(CUDA, "reaches", lambda *_: linked)
    a, b = (RNG.integers(-9, 9, (900, 900)).astype("f4") for _ in range(2))
    for name, x in (("a", a), ("b", b), ("c", b)):
        make(memory / name, x, compressors=None, chunks=(60, 50))
    options = {"device": "cuda:0,1,2", "kernel": "cublas"}
    left = a.T if transpose else a
    if what == "gram":
        found = ooc_gemm.gram(str(memory / "a"), transpose=transpose, **options)
        want = left @ left.T
    else:
        found = ooc_gemm.multiply(
            str(memory / "a"), str(memory / "b"), str(memory / "c"), transpose_a=transpose,
            **({"beta": -1} if what == "beta" else {"force": True}), **options,
        )  # fmt: skip
        want = left @ b - (b if what == "beta" else 0)
    assert np.array_equal(np.asarray(found.array), want)
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    assert bool(cupy_on_cpu.sent) == (linked or what != "gram")  # all devices need the strip otherwise


@pytest.mark.parametrize("b", ["a part of rows", "all", "transposed"])
def test_an_array_of_the_process_beside_files_in_memory(memory, monkeypatch, b):
    """It leaves the files their places and their one reader thread, and no more of it is read than is
    needed."""
    monkeypatch.setattr(files, "LEAST_PART", 10_000)
    a, held = RNG.integers(-9, 9, (900, 700)).astype("f4"), RNG.integers(-9, 9, (700, 900)).astype("f8")
    held = {"a part of rows": held[:, 100:220], "all": held, "transposed": np.asfortranarray(held)}[b]
    make(memory / "a", a, compressors=None, chunks=(60, 50))
    readers = set()
    begin = Transfer.__init__

    def begins(self, *given):
        readers.add(threading.get_ident())
        begin(self, *given)

    monkeypatch.setattr(Transfer, "__init__", begins)
    found = ooc_gemm.multiply(str(memory / "a"), held, device="cuda", kernel="cublas")
    assert np.array_equal(found.array, a @ held)
    assert found.plan.budget.step
    assert cupy_on_cpu.sent
    assert len(readers) == 1
    assert found.bytes_read == found.plan.bytes_read == a.nbytes + held.nbytes


def test_the_driver_has_what_threads_call():
    assert set(driver.COPYING) <= set(driver._ARGUMENTS)
    assert len(driver.COPYING) == len(cupy_on_cpu.SENDING)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("buffers", [2, 4])
def test_copies_that_take_long_block_nothing(memory, monkeypatch, devices, buffers):
    """Two threads, whose places are all taken for some milliseconds after each copy, read for blocks that
    become narrower, while they write those before."""
    cupy_on_cpu.install(monkeypatch, devices=devices)
    monkeypatch.setattr(cupy_on_cpu, "late", {})
    monkeypatch.setattr(schedule, "NARROWEST", 50)
    monkeypatch.setattr(CUDA, "reaches", lambda *_: True)
    quick = background._found.quick
    quick.transfers_limit(2)

    def make_plan(problem, budget, rates):
        panels = Panels(problem.k, 100, problem.k_chunk, resident=buffers == 4, buffers=buffers)
        x = Candidate(outputs(problem)[0], problem.m, 400, panels, 2, rings(budget)[0])
        return search.finish(problem, budget, rates, x)

    monkeypatch.setattr(prepare, "make_plan", make_plan)
    names = ",".join(map(str, range(devices)))
    try:
        found, right = product(memory, (300, 400, 1000), device=f"cuda:{names}", chunks=(100, 50))
    finally:
        quick.transfers_limit(background.THREADS)
    assert right
    widths = [400, 300, 150, 150] if buffers == 4 else [400, 400, 200]
    assert [block.cols for block in found.plan.blocks()] == widths
    assert cupy_on_cpu.sent
    assert cupy_on_cpu.brought


@pytest.mark.parametrize("devices", [1, 3])
def test_no_slot_is_pinned_where_there_are_places(memory, monkeypatch, devices):
    """On four H200 the driver takes 10 ms to pin one, in which the thread that begins all reads waits for it,
    and longer while it shares memory."""
    cupy_on_cpu.install(monkeypatch, devices=devices)
    pinned = []

    class Session(CUDASession):
        def prepare(self, buffer, used=None):
            pinned.append(len(buffer))
            super().prepare(buffer)

    monkeypatch.setattr("ooc_gemm.devices.cuda.device.CUDASession", Session)
    monkeypatch.setattr(CUDA, "reaches", lambda *_: True)
    a = RNG.integers(-9, 9, (768, 768)).astype("f4")  # each device has four rows of chunks
    make(memory / "a", a, compressors=None, chunks=(64, 64))
    options = {"kernel": "cublas", "compressor": "none", "chunks": (64, 64)}
    places = {"device": "cuda:" + ",".join(map(str, range(devices))), **options}
    traces = []
    told = {"progress": lambda *told: traces.append(told[2])}
    found = ooc_gemm.multiply(*(str(memory / name) for name in "aac"), **places, **told)
    assert np.array_equal(zarr.open_array(memory / "c")[:], a @ a)
    assert pinned == []
    assert list(pinning._kept) == [1100]  # from which copies are timed, on all devices and in all runs
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    assert found.bytes_downloaded == found.plan.bytes_downloaded
    assert min(traces[-1].spans[stage] for stage in ("upload", "download")) > 0


def test_copies_that_were_not_timed_take_no_longer_than_the_run(monkeypatch):
    """Their seconds are those at the rate of what was timed, which may have waited for others."""
    cupy_on_cpu.install(monkeypatch)
    device, trace = CUDA(), Trace()
    timing = Timing("cuda", device.times, device.points)
    timing.open(trace, device.cupy.cuda.Stream())
    trace.add("upload", 0.0, 10.0, nbytes=1)
    timing.count("upload", 100)
    timing.tell_all()
    assert trace.bytes["upload"] == 101
    assert 10 < trace.seconds["upload"] < 11


@pytest.mark.parametrize("beta", [0, 1])
def test_pieces_end_where_bands_of_devices_do(memory, monkeypatch, beta):
    """A band ends within a chunk here. A piece that two devices need would go through a slot."""
    cupy_on_cpu.install(monkeypatch, devices=3)
    monkeypatch.setattr(CUDA, "reaches", lambda *_: True)
    uploaded = []

    class Session(CUDASession):
        def upload(self, source, piece, buffer):
            uploaded.append(piece)
            return super().upload(source, piece, buffer)

    monkeypatch.setattr("ooc_gemm.devices.cuda.device.CUDASession", Session)
    a, b, c = (RNG.integers(-9, 9, (size, 600)).astype("f4") for size in (700, 600, 700))
    for name, x in (("a", a), ("b", b), ("c", c)):
        make(memory / name, x, compressors=None, chunks=(50, 50))
    options = {"kernel": "cublas", "device": "cuda:0,1,2"} | ({"beta": 1} if beta else {"force": True})
    found = ooc_gemm.multiply(*(str(memory / name) for name in "abc"), **options)
    assert np.array_equal(zarr.open_array(memory / "c")[:], a @ b + beta * c)
    assert [piece for piece in uploaded if piece.operand == "a"] == []
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    assert found.bytes_read == found.plan.bytes_read
