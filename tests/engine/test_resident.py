"""Panels of op(A) that stay on the device while a row of blocks is made."""

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import gpu_missing, make
from faults import faulty
from plans import staying_plan
from precision import ozaki_always
from sessions import device_with

import ooc_gemm
from ooc_gemm.cuda_kernels import tensor
from ooc_gemm.devices import open_device
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.several import Several
from ooc_gemm.planning import schedule
from ooc_gemm.planning import search as planner
from ooc_gemm.planning.candidates import Candidate, outputs, rings
from ooc_gemm.planning.panels import MORE_BUFFERS, Panels
from ooc_gemm.run import prepare
from ooc_gemm.support.errors import ENOUGH, StoppedError

RNG = np.random.default_rng(0)
GiB = 1 << 30


@pytest.fixture(params=[(128, False), (128, True), (128, True, True)], ids=["rows", "strips", "together"])
def resident(request, monkeypatch):
    """Every plan has panels as deep as the parameter says, of which some stay."""
    monkeypatch.setattr(prepare, "make_plan", staying_plan(*request.param))


def device_of(name):
    if name == "cpu":
        return CPU(2)
    if name == "several":
        return Several([CPU(1) for _ in range(3)], [1, 2, 1])
    if why := gpu_missing():
        pytest.skip(why)
    return open_device(name)


def check(folder, device, dtype, transpose, beta, **options):
    a, b, c = (RNG.integers(-4, 5, shape).astype(dtype) for shape in ((700, 500), (500, 900), (700, 900)))
    if dtype in ("c8", "c16"):
        a, b = ((x + 1j * RNG.integers(-4, 5, x.shape)).astype(dtype) for x in (a, b))
    out, wide = {"i1": "i4", "f2": "f4"}.get(dtype, dtype), "c16" if dtype.startswith("c") else "i8"
    want = 2 * (a.astype(wide) @ b.astype(wide)) + beta * c.astype(wide)
    make(folder / "a", a.T if "a" in transpose else a, chunks=(90, 70))
    make(folder / "b", b.T if "b" in transpose else b, chunks=(64, 128))
    make(folder / "c", c.astype(out), chunks=(100, 100))
    options |= {"beta": beta} if beta else {"force": True, "chunks": (100, 100)}
    result = ooc_gemm.multiply(
        *(str(folder / name) for name in "abc"), alpha=2, device=device, out_dtype=out,
        transpose_a="a" in transpose, transpose_b="b" in transpose, **options,
    )  # fmt: skip
    plan = result.plan
    assert plan.k_panels.resident
    assert plan.to_dict()["resident"]
    said = " ".join(str(plan).split())
    assert "those of A stay on the device" in said
    assert ("those of B while 2 columns of blocks are made" in said) == (plan.k_panels.columns > 0)
    assert (plan.block_count, plan.panel_count) == (15, -(-500 // plan.bk))
    assert np.array_equal(zarr.open_array(folder / "c")[...], want)
    for what in ("bytes_read", "bytes_written", "bytes_uploaded", "bytes_downloaded"):
        assert getattr(result, what) == getattr(plan, what), what


CASES = [("f4", "", 0), ("f4", "a", 3), ("f4", "b", 0), ("f2", "ab", 3), ("i1", "ab", 0), ("f8", "", 3)]


@pytest.mark.parametrize("name", ["cpu", "several", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "transpose", "beta"), CASES)
@pytest.mark.parametrize("verify", [False, True])
def test_products(tmp_path, resident, name, dtype, transpose, beta, verify):
    check(tmp_path, device_of(name), dtype, transpose, beta, verify=verify)


@pytest.mark.parametrize("resident", [(512, False), (512, True)], indirect=True)
@pytest.mark.parametrize("name", ["cpu", "several"])
@pytest.mark.parametrize("beta", [0, 3])
def test_one_panel_for_all_of_k(tmp_path, resident, name, beta):
    """The next row of blocks brings op(A) to where it is still needed."""
    check(tmp_path, device_of(name), "f4", "", beta)


@pytest.mark.parametrize("name", ["cpu", "several", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("transpose", ["", "b"])
def test_panels_that_grow_and_blocks_that_become_narrower(tmp_path, monkeypatch, name, transpose):
    """The last block takes the buffer of the first one."""
    if name == "emulated":
        cupy_on_cpu.install(monkeypatch, "90")
    device = CUDA() if name == "emulated" else device_of(name)
    monkeypatch.setattr(schedule, "NARROWEST", 200)
    monkeypatch.setattr(schedule, "_edges", schedule._edges.__wrapped__)  # which remembers others

    def make_plan(problem, budget, rates):
        panels = Panels(problem.k, 1024, problem.k_chunk, 2.0, resident=True, buffers=MORE_BUFFERS - 1)
        x = Candidate(outputs(problem)[0], problem.m, 800, panels, 3, rings(budget)[0])
        return planner.finish(problem, budget, rates, x)

    monkeypatch.setattr(prepare, "make_plan", make_plan)
    a, b = (RNG.integers(-4, 5, shape).astype("f4") for shape in ((300, 3900), (3900, 1900)))
    make(tmp_path / "a", a, chunks=(90, 128))
    make(tmp_path / "b", b.T if transpose else b, chunks=(200, 128) if transpose else (128, 200))
    result = ooc_gemm.multiply(
        *(str(tmp_path / name) for name in "abc"), device=device, chunks=(100, 100),
        transpose_b=bool(transpose),
    )  # fmt: skip
    plan, depths = result.plan, [stop - start for start, stop in result.plan.panels()]
    assert depths[0] < depths[-2] == 1024
    assert [block.cols for block in plan.blocks()] == [800, 600, 400, 100]
    assert [plan.c_buffer(block) for block in plan.blocks()] == [0, 1, 2, 0]
    assert plan.block_rooms() == (800, 600, 400)
    assert np.array_equal(zarr.open_array(tmp_path / "c")[...], a @ b)
    for what in ("bytes_read", "bytes_written", "bytes_uploaded", "bytes_downloaded"):
        assert getattr(result, what) == getattr(plan, what), what


KERNELS = (
    ("fp16x3", "f4"), ("mma-fp16x3", "f4"), ("tf32", "f4"), ("ffma", "f4"), ("fp16", "f2"), ("int8", "i1"),
    ("dmma", "f8"), ("ozaki2", "f8"), ("ozaki2", "c16"), ("fp16x3", "c8"),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:all"])
@pytest.mark.parametrize("transpose", ["", "a", "b", "ab"])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_kernels_leave_panels_as_they_are(tmp_path, resident, monkeypatch, name, transpose, kernel, dtype):
    """fp16x3 and ozaki2 split them elsewhere; they would not split blocks as small as these."""
    monkeypatch.setattr(tensor, "split_pays", lambda m, n, k: True)
    ozaki_always(monkeypatch, "residues")
    device, precision = device_of(name), "medium" if kernel == "tf32" else "highest"
    check(tmp_path, device, dtype, transpose, 0, kernel=kernel, precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose", ["", "a", "b"])
@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_what_is_remembered_of_a_panel_is_forgotten_with_it(
    tmp_path, resident, monkeypatch, transpose, dtype
):
    """Each strip of A, and each of B, has units of its own, so exponents of one are wrong for another."""
    monkeypatch.setattr(tensor, "split_pays", lambda m, n, k: True)
    a, b = RNG.standard_normal((700, 500)), RNG.standard_normal((500, 900))
    a *= 2.0 ** (20 * (np.arange(700) // 300))[:, None]
    b *= 2.0 ** (-15 * (np.arange(900) // 200))[None]
    a, b = ((x + 1j * x[::-1] if dtype == "c8" else x).astype(dtype) for x in (a, b))
    make(tmp_path / "a", a.T if "a" in transpose else a, chunks=(90, 70))
    make(tmp_path / "b", b.T if "b" in transpose else b, chunks=(64, 128))
    result = ooc_gemm.multiply(
        *(str(tmp_path / name) for name in "abc"), device=device_of("cuda"), kernel="fp16x3",
        transpose_a="a" in transpose, transpose_b="b" in transpose, chunks=(100, 100),
    )  # fmt: skip
    assert result.plan.k_panels.resident
    wide = "c16" if dtype == "c8" else "f8"
    want, size = a.astype(wide) @ b.astype(wide), np.abs(a).astype("f8") @ np.abs(b).astype("f8")
    assert (np.abs(zarr.open_array(tmp_path / "c")[...] - want) <= 1e-6 * size).all()


def test_a_run_that_goes_on(tmp_path, resident):
    """A block may be the first of its row that is left."""
    x = RNG.integers(-4, 5, (600, 600)).astype("f4")
    make(tmp_path / "x", x, chunks=(90, 70))
    paths, made = [str(tmp_path / name) for name in "xxc"], []

    class Failing(CPUSession):
        def finish(self, block, c):
            made.append(block)
            if len(made) == 5:
                raise MemoryError
            super().finish(block, c)

    with pytest.raises(ooc_gemm.Error):
        ooc_gemm.multiply(*paths, device=device_with(Failing, CPU)(), chunks=(100, 100))
    result = ooc_gemm.multiply(*paths, device="cpu", chunks=(100, 100), resume=True)
    assert 0 < result.blocks_resumed < 6
    assert np.array_equal(zarr.open_array(tmp_path / "c")[...], x @ x)
    for what in ("bytes_read", "bytes_written"):
        assert getattr(result, what) == getattr(result.plan, what), what


def test_a_run_that_is_stopped_ends_with_the_blocks_that_are_made_at_the_same_time(tmp_path, resident):
    x = RNG.integers(-4, 5, (600, 600)).astype("f4")
    make(tmp_path / "x", x, chunks=(90, 70))
    paths, plans = [str(tmp_path / name) for name in "xxc"], []

    def progress(fraction, plan, trace):
        plans.append(plan)
        return ENOUGH

    with pytest.raises(StoppedError) as stopped:
        ooc_gemm.multiply(*paths, device="cpu", chunks=(100, 100), progress=progress)
    first = next(plans[0].together())
    assert f"after {len(first)} of 6 blocks" in str(stopped.value)
    result = ooc_gemm.multiply(*paths, device="cpu", chunks=(100, 100), resume=True)
    assert result.blocks_resumed == len(first)
    assert np.array_equal(zarr.open_array(tmp_path / "c")[...], x @ x)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_that_fail_their_check(resident, kind):
    """They are made again, now the first ones of their rows."""
    if kind == "cuda" and (why := gpu_missing()):
        pytest.skip(why)
    a, b, left = np.ones((700, 500), "f4"), np.ones((500, 900), "f4"), {(0, 200), (300, 400), (300, 600)}

    def fault(block):
        if (block.row, block.col) in left:
            left.remove((block.row, block.col))
            return 5, 7, 30
        return None

    said = []
    result = ooc_gemm.multiply(
        a, b, device=faulty(kind, fault), verify=True, notice=said.append, chunks=(100, 100)
    )
    assert result.plan.k_panels.resident
    assert not left
    assert any("computed once more" in each for each in said)
    assert (result.array == 500).all()


@pytest.mark.parametrize("k", [0, 400])
def test_panels_go_when_nothing_more_is_multiplied(tmp_path, k):
    log = []

    class Watching(CPUSession):
        def multiply(self, *args, **options):
            log.append("multiply")
            super().multiply(*args, **options)

        def free_panels(self):
            log.append("free")
            super().free_panels()

        def download(self, *args):
            log.append("download")
            return super().download(*args)

    ooc_gemm.multiply(
        np.ones((300, k)), np.ones((k, 300)), device=device_with(Watching, CPU)(1), memory_limit="100MiB"
    )
    assert log.count("free") == 1
    assert "multiply" not in log[log.index("free") :]
    assert ("multiply" in log) == bool(k)
