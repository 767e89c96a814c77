"""Several devices as one: CPUs here, which share nothing but what the protocol gives them; GPUs where
there are two."""

import itertools
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import cupy_on_cpu
import faults
import numpy as np
import pytest
import zarr
from conftest import gpu_missing
from faults import Failing, with_blocks
from sessions import device_with

import ooc_gemm
import ooc_gemm.devices
import ooc_gemm.run.prepare
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.devices.several import Several
from ooc_gemm.engine.ports import COMPUTE, UPLOAD
from ooc_gemm.run.observer import Observer
from ooc_gemm.run.request import Operand, Request
from ooc_gemm.run.retry import carry_out
from ooc_gemm.support.intervals import BAND, band_of, band_rows, bands
from ooc_gemm.support.trace import PASS

RNG = np.random.default_rng(11)


class Apart(CPU):
    """Nobody reaches its memory."""

    def reaches(self, other):
        return False


class Ordered(CPUSession):
    """Checks that what each stream does comes after what it needs, as devices with real streams would: a
    stream knows what it has done itself and what the points it has waited for knew."""

    serial = itertools.count()

    def __init__(self, device, plan, *args):
        super().__init__(device, plan, *args)
        self.plan, self.known = plan, defaultdict(set)  # stream → what is done before it goes on
        self.uploaded, self.taken, self.lent, self.used = (defaultdict(set) for _ in range(4))  # by panel

    def do(self, stream, *panels):
        work = next(self.serial)
        self.known[stream].add(work)
        for panel in panels:
            panel.add(work)

    def upload(self, source, piece, buffer):
        panel = piece.operand, buffer
        needed = self.used[panel] | self.lent[panel]
        assert needed <= self.known[UPLOAD], "a panel is overwritten that is still used"
        self.do(UPLOAD, self.uploaded[panel])
        return super().upload(source, piece, buffer)

    def take(self, other, panel, rows, cols, buffer, uploaded):
        at = "b", buffer
        self.known[PASS] |= uploaded.known
        assert other.uploaded[at] <= self.known[PASS], "taken before it has been uploaded"
        assert self.used[at] <= self.known[PASS], "a panel is overwritten that is still used"
        self.do(PASS, self.taken[at], other.lent[at])
        super().take(other, panel, rows, cols, buffer, uploaded)

    def multiply(self, block, panel, pair, c, first):
        for at in zip("ab", pair, strict=True):
            assert self.uploaded[at] | self.taken[at] <= self.known[COMPUTE], "multiplied before it is there"
            self.do(COMPUTE, self.used[at])
        super().multiply(block, panel, pair, c, first)

    def record(self, stream, pair=None):
        event = super().record(stream, pair)
        event.known = frozenset(self.known[stream])
        return event

    def wait(self, stream, event):
        self.known[stream] |= event.known
        super().wait(stream, event)


def cpus(kind=CPU, weights=(1, 1, 1)):
    return Several([kind(1) for _ in weights], list(weights))


def gpus(count=2):
    if why := gpu_missing(count):
        pytest.skip(why)
    return ooc_gemm.devices.open_device("cuda:" + ",".join(map(str, range(count))))


DEVICES = [
    pytest.param(cpus, id="alike"),
    pytest.param(lambda: cpus(weights=(5, 1, 3)), id="uneven"),
    pytest.param(lambda: cpus(Apart, (2, 1)), id="apart"),
    pytest.param(gpus, id="gpus", marks=pytest.mark.gpu),
]


def stored(path, data, chunks):
    zarr.create_array(str(path), data=data, chunks=chunks, compressors=None)
    return str(path)


def random(shape, dtype):
    if np.dtype(dtype).kind in "iu":
        return RNG.integers(-9, 9, shape).astype(dtype)
    x = RNG.standard_normal(shape)
    return (x + 1j * RNG.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def close(found, wanted):
    return np.abs(found - wanted).max() <= 1e-4 * (1 + np.abs(wanted).max())


@pytest.mark.parametrize("weights", [(1,), (1, 1), (5, 1, 3), (1, 1, 1, 1)])
def test_bands_cover_every_row_once(weights):
    for rows in (0, 1, BAND, BAND + 1, 1000, 4096, 65536):
        found = list(bands(rows, weights))
        assert [row for start, stop in found for row in range(start, stop)] == list(range(rows))
        for row in range(rows):
            number, at = band_of(row, rows, weights)
            start, stop = found[number]
            assert start <= row == start + at < stop
        for smaller in range(max(0, rows - 300), rows + 1):  # a block at an edge fits where a whole one does
            for index, (start, stop) in enumerate(bands(smaller, weights)):
                assert stop - start <= band_rows(rows, weights, index)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f4", "c8", "i1", "i8"])
@pytest.mark.parametrize(("transpose_a", "transpose_b"), [(False, False), (True, True)])
def test_the_product_is_right(tmp_path, device, dtype, transpose_a, transpose_b):
    a, b = random((700, 420), dtype), random((420, 900), dtype)
    paths = [
        stored(tmp_path / "a", a.T.copy() if transpose_a else a, (130, 256)),
        stored(tmp_path / "b", b.T.copy() if transpose_b else b, (200, 100)),
    ]
    old = random((700, 900), "i4" if dtype == "i1" else dtype)
    c = stored(tmp_path / "c", old, (140, 128))
    result = ooc_gemm.multiply(
        *paths, c, device=device(), alpha=2, beta=-3, verify=True,
        transpose_a=transpose_a, transpose_b=transpose_b,
    )  # fmt: skip
    wide = np.result_type(a, b, np.int64 if a.dtype.kind == "i" else np.float64)
    wanted = 2 * (a.astype(wide) @ b.astype(wide)) - 3 * old.astype(wide)
    found = zarr.open_array(c)[:]
    assert np.array_equal(found, wanted) if a.dtype.kind == "i" else close(found, wanted)
    assert result.bytes_read == result.plan.bytes_read
    assert result.bytes_written == result.plan.bytes_written
    assert result.bytes_uploaded == result.plan.bytes_uploaded
    assert result.verified


@pytest.mark.parametrize("weights", [(1, 1, 1), (3, 1)])
@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_all_streams_wait_for_what_they_need(tmp_path, monkeypatch, weights, beta, buffers):
    make = with_blocks(640, 300, 128)

    def made(*args):
        plan = make(*args)
        return replace(plan, k_panels=replace(plan.k_panels, buffers=buffers))

    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", made)
    a, b, old = random((700, 1000), "f4"), random((1000, 900), "f4"), random((700, 900), "f4")
    c = stored(tmp_path / "c", old, (128, 100)) if beta else str(tmp_path / "c")
    result = ooc_gemm.multiply(
        stored(tmp_path / "a", a, (100, 100)), stored(tmp_path / "b", b, (128, 70)), c,
        device=cpus(device_with(Ordered, CPU), weights), beta=beta, chunks=None if beta else (128, 100),
    )  # fmt: skip
    assert close(zarr.open_array(c)[:], a @ b + beta * old)
    assert result.plan.panel_count > buffers


@pytest.mark.parametrize("buffers", [1, 2])
def test_all_streams_wait_on_the_diagonal_and_off_it(monkeypatch, buffers):
    make = with_blocks(384, 384, 128)

    def made(*args):
        plan = make(*args)
        return replace(plan, k_panels=replace(plan.k_panels, buffers=buffers))

    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", made)
    g = random((900, 500), "f4")
    result = ooc_gemm.gram(g, device=cpus(device_with(Ordered, CPU), (3, 1)), chunks=(128, 128))
    assert close(result.array, g @ g.T)
    assert result.plan.block_count == 6


def test_each_device_knows_which_block_is_the_last(tmp_path, monkeypatch):
    """Its band of that leaves strip by strip. (With a plan of its own blocks it thought of others.)"""
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(640, 300, 500))
    told = []

    class Told(CPUSession):
        def multiply(self, block, panel, *args, **options):
            told.append((block.index, block.last))
            super().multiply(block, panel, *args, **options)

    a, b = random((700, 1000), "f4"), random((1000, 900), "f4")
    plan = ooc_gemm.multiply(a, b, device=cpus(device_with(Told, CPU)), chunks=(128, 100)).plan
    assert {index for index, _ in told} == set(range(plan.block_count))
    assert {index for index, last in told if last} == {plan.block_count - 1}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transpose", [False, True])
def test_gram_is_symmetric_to_the_bit(tmp_path, device, transpose):
    g = random((900, 300), "c8")
    path = stored(tmp_path / "g", g.T.copy() if transpose else g, (128, 128))
    result = ooc_gemm.gram(path, str(tmp_path / "c"), transpose=transpose, device=device(), chunks=(128, 128))
    found = zarr.open_array(str(tmp_path / "c"))[:]
    assert close(found, g.astype("c16") @ g.T.astype("c16"))
    assert np.array_equal(found, found.T)
    assert result.bytes_read == result.plan.bytes_read
    assert result.bytes_uploaded == result.plan.bytes_uploaded


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize(
    ("dtype", "kernel"), [("f4", "auto"), ("i1", "auto"), ("c8", "auto"), ("f8", "ozaki2")]
)
@pytest.mark.parametrize("transpose", [False, True])
def test_a_strip_on_the_diagonal_is_uploaded_once_to_a_device(
    tmp_path, monkeypatch, transpose, dtype, kernel, linked
):
    """Bands of op(A) are copied from the panel of op(B), which lies on every device."""
    cupy_on_cpu.install(monkeypatch, "90", devices=2)
    monkeypatch.setattr("ooc_gemm.devices.cuda.device.CUDA.reaches", lambda *_: linked)
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(320, 320, 128))
    g = random((600, 300), dtype)
    path = stored(tmp_path / "g", g.T.copy() if transpose else g, (64, 64))
    result = ooc_gemm.gram(
        path,
        transpose=transpose,
        device="cuda:0,1",
        chunks=(64, 64),
        verify=True,
        memory_limit="4GiB",
        kernel=kernel,
    )
    wide = g.astype("c16" if dtype == "c8" else "i8" if dtype == "i1" else "f8")
    assert close(result.array, wide @ wide.T)
    assert np.array_equal(result.array, result.array.T)
    assert result.plan.block_count == 3
    assert result.bytes_uploaded == result.plan.bytes_uploaded
    on, rows, cols = 600, 280, 320  # two blocks on the diagonal, and one below it
    lines = on + rows + cols if linked else 2 * on + rows + 2 * cols
    assert result.bytes_uploaded == lines * 300 * g.itemsize


def test_devices_must_have_a_kernel_in_common():
    class Other(CPU):
        def arithmetic(self, *args):
            found = super().arithmetic(*args)
            raise ooc_gemm.InputError(f"no {found.kernel}")

    with pytest.raises(ooc_gemm.InputError, match="no "):
        ooc_gemm.multiply(np.ones((4, 4)), np.ones((4, 4)), device=Several([CPU(1), Other(1)]))


@pytest.mark.parametrize("beta", [0, 2])
def test_a_device_that_fails_leaves_its_work_to_the_others(tmp_path, monkeypatch, beta):
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(512, 256, 256))
    a, b, old = random((1024, 512), "f4"), random((512, 1024), "f4"), random((1024, 1024), "f4")
    paths = stored(tmp_path / "a", a, (256, 256)), stored(tmp_path / "b", b, (256, 256))
    c = stored(tmp_path / "c", old, (256, 256))
    notes = []
    result = ooc_gemm.multiply(
        *paths,
        c,
        device=Several([CPU(1), Failing(1, 5)]),
        beta=beta,
        notice=notes.append,
        **({} if beta else {"force": True, "chunks": (256, 256)}),
    )
    assert [note for note in notes if "fallen off the bus" in note and "the run continues on cpu" in note]
    assert result.device == "cpu"
    assert close(zarr.open_array(c)[:], a.astype("f8") @ b.astype("f8") + beta * old)
    assert not [path for path in Path(c).rglob("*") if "ooc-gemm" in path.name]


def test_where_all_fail_the_run_fails(tmp_path):
    a = stored(tmp_path / "a", random((256, 256), "f4"), (128, 128))
    with pytest.raises(OSError, match="fallen off the bus"):
        ooc_gemm.multiply(a, a, device=Several([Failing(1, 0), Failing(1, 0)]))


def test_where_the_process_is_of_no_use_any_more_the_recovery_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(CPU, "alive", lambda self: False)
    a = stored(tmp_path / "a", random((256, 256), "f4"), (128, 128))
    request = Request(Operand(a), Operand(a), str(tmp_path / "c"), device=Several([CPU(1), Failing(1, 0)]))
    recovery = carry_out(request, Observer())
    assert (recovery.request, recovery.devices, recovery.flags) == (None, (0, 0), ("resume",))
    with pytest.raises(ooc_gemm.DeviceError, match=r"one of cpu:0,0 failed .*resume=True"):
        ooc_gemm.multiply(a, a, str(tmp_path / "c"), device=Several([CPU(1), Failing(1, 0)]), force=True)


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [0, 2])
def test_a_gpu_that_fails_leaves_its_work_to_another_process(tmp_path, monkeypatch, beta):
    """A kernel that fails takes CUDA from its process: the command goes on in another one."""
    gpus(2)
    monkeypatch.chdir(tmp_path)
    a, b, old = random((2048, 2048), "f4"), random((2048, 2048), "f4"), random((2048, 2048), "f4")
    for name, data in zip("abc", (a, b, old), strict=True):
        stored(tmp_path / name, data, (256, 256))
    text = """
import sys, time, cupy, numpy as np
from ooc_gemm.run import prepare
from ooc_gemm.storage.write import publication
from ooc_gemm.cli import main
from ooc_gemm.devices.cuda.session import CUDASession
sys.path.insert(0, sys.argv.pop(1))
from faults import with_blocks
prepare.make_plan = with_blocks(512, 512, 1024)
publication.SAVED_SECONDS = 0
bad = 'extern "C" __global__ void bad(int* p) { p[1ll << 40] = 1; }'
real, calls = CUDASession.multiply, []
def multiply(self, *args, **options):
    time.sleep(0.02)
    calls.append(self._device.index)
    if calls.count(1) == 12:
        self._device.use()
        with self._streams["compute"]:
            cupy.RawKernel(bad, "bad")((1,), (1,), (np.uintp(0),))
    return real(self, *args, **options)
CUDASession.multiply = multiply
main()
"""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        text,
        str(Path(faults.__file__).parent),
        "multiply",
        *"abc",
    ]
    options = ["--beta", "2"] if beta else ["--force", "--chunks", "256,256"]
    done = subprocess.run(
        [*command, "--device", "cuda:0,1", *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done
    assert "in another process" in done.stderr, done
    assert close(zarr.open_array("c")[:], a.astype("f8") @ b.astype("f8") + beta * old)
