"""pca and svd on one GPU, and on the stand-in for CuPy, agree with NumPy's in float64."""

import subprocess
import sys
import tempfile
from pathlib import Path

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from arrays import LAYOUTS
from conftest import gpu_missing, make, ooc
from decompositions import check_pca, check_scores, check_svd, close, exact, graded

from ooc_gemm import BudgetError, DeviceError, InputError, StoreError, pca, svd
from ooc_gemm.cuda_kernels.driver import DriverError
from ooc_gemm.devices.cuda import passes as on_cuda
from ooc_gemm.planning import passes as planning
from ooc_gemm.statistics.components import planned
from ooc_gemm.storage.io import files

KEEPING = planning._keeping
GPU = {"memory_limit": "4GiB", "device": "cuda"}


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    """The GPU; without one, the stand-in for CuPy. Its name."""
    if request.param == "stand-in":
        cupy_on_cpu.install(monkeypatch)
    elif why := gpu_missing():
        pytest.skip(why)
    return request.param


def plan_of(x, iterations):
    """The plan of `pca` with 4 components."""
    return planned(x, None, 4, True, iterations, **GPU, device_memory_limit=None, notice=print)


@pytest.fixture
def small(monkeypatch):
    """Panels of a few KiB and short runs, so that each matrix has many of both."""
    monkeypatch.setattr(planning, "PANEL_BYTES", 48 << 10)
    monkeypatch.setattr(planning, "PIECE_BYTES", 8 << 10)
    monkeypatch.setattr(planning, "PIECES", 6)
    for module in (planning, on_cuda):
        monkeypatch.setattr(module, "RUN", 24)
    keep(monkeypatch, 2)


def keep(monkeypatch, panels):
    """Plans keep so many panels on the device at most."""
    monkeypatch.setattr(
        planning, "_keeping", lambda plan, spare: KEEPING(plan, min(spare, panels * plan.panel_bytes))
    )


@pytest.mark.parametrize("shape", [(133, 71), (71, 133)])
@pytest.mark.parametrize("kind", ["numpy", "fortran", "dask", *LAYOUTS])
def test_every_input(gpu, small, tmp_path, kind, shape):
    values = graded(shape, 1, mean=3, dtype="f4")
    if kind == "dask":
        x = pytest.importorskip("dask.array").from_array(values, chunks=(50, 40))
    elif kind == "fortran":
        x = np.asfortranarray(values)
    else:
        x = values if kind == "numpy" else make(tmp_path / "a", values, **LAYOUTS[kind])
    p = pca(x, 5, **GPU)
    check_pca(p, values, 5, 1e-4)
    assert (p.passes, p.device) == (6, "cuda")
    assert p.components.dtype == p.scores.dtype == np.float32
    if gpu == "stand-in":
        assert {"gemmEx", "centre", "columns", "sum"} <= set(cupy_on_cpu.Kernel.launched)


@pytest.mark.parametrize("dtype", ["i1", "u1", "u2", "i4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("order", "CF")
def test_every_type(gpu, small, dtype, order):
    rng = np.random.default_rng(5)
    values = np.round(rng.standard_normal((300, 6)) @ rng.standard_normal((6, 40)) * 8).clip(0, 100)
    values = np.asarray(values.astype(dtype), order=order)
    check_pca(pca(values, 4, **GPU), values, 4, 1e-4)


@pytest.mark.parametrize("shape", [(300, 64), (64, 300)])
@pytest.mark.parametrize("dtype", ["i1", "f4", "f8"])
@pytest.mark.parametrize("iterations", [0, 1])
def test_values_and_vectors_belong_together(gpu, small, shape, dtype, iterations):
    x = (20 * np.random.default_rng(3).standard_normal(shape) + 3).astype(dtype)
    bound = 3e-6 if dtype != "f8" else 1e-12
    check_svd(svd(x, 9, iterations=iterations, **GPU), x, bound)
    check_scores(pca(x, 9, iterations=iterations, **GPU), x, bound)


@pytest.mark.parametrize("shape", [(400, 50), (50, 400), (1100, 530), (40, 40), (500, 1), (3, 2)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_svd(gpu, shape, dtype):
    values = graded(shape, 6, mean=0.5, dtype=dtype)
    k = min(6, *shape)
    q = svd(values, k, **GPU)
    u, s, vt, _ = exact(values, k, centred=False)
    bound = 1e-4 if dtype == "f4" else 1e-7
    close(q.singular_values, s, bound / 10)
    close(q.u, u, bound)
    close(q.vt, vt, bound)


@pytest.mark.parametrize("shape", [(1400, 60), (60, 1400)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("drift", [False, True])
def test_means_of_ten_thousand_deviations(gpu, small, tmp_path, shape, dtype, drift):
    values = graded(shape, 3, ratio=0.8)
    values /= values.std()
    values += 1e4 * (1 + np.random.default_rng(4).random(shape[1]))
    if drift:  # the first panel tells little of the others
        values[: shape[0] // 2] += 100
    values = values.astype(dtype)
    x = make(tmp_path / "a", values, chunks=(100, 60))
    for iterations in (0, 4):
        p = pca(x, 4, iterations=iterations, **GPU)
        total = p.explained_variance.sum() / p.explained_variance_ratio.sum()
        assert total == pytest.approx(values.astype("f8").var(axis=0, ddof=1).sum(), rel=1e-5)
    check_pca(p, values, 4, 3e-4 if dtype == "f4" else 1e-6)


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
@pytest.mark.parametrize("power", [1e-30, 1e-24, 1e35])
def test_numbers_whose_squares_are_too_large_or_too_small(gpu, small, shape, power, order):
    values = np.asarray((graded(shape, 18, mean=3) * power).astype("f4"), order=order)
    wide = values / np.float64(power)
    for call, centred in ((pca, True), (svd, False)):
        with np.errstate(all="ignore"):  # the stand-in computes with NumPy
            found = call(values, 3, **GPU)
        u, s, vt, _ = exact(wide, 3, centred)
        close(found.singular_values / power, s, 1e-5)
        if centred:
            close(found.scores / np.float64(power), u * s, 1e-4)
            close(found.mean / power, wide.mean(axis=0), 1e-5)
        close(found.components if centred else found.vt, vt, 1e-4)


def test_a_gpu_finds_what_the_cpu_finds_in_one_pass(gpu, small):
    """No iteration makes up for means that are combined wrongly."""
    values = graded((700, 90), 7) + np.linspace(0, 50, 700)[:, None]
    found, wanted = (
        pca(values, 4, iterations=0, memory_limit="4GiB", device=name) for name in ("cuda", "cpu")
    )
    close(found.singular_values, wanted.singular_values, 1e-10)
    close(found.components, wanted.components, 1e-8)
    close(found.mean, wanted.mean, 1e-12)


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(gpu, small, tmp_path, monkeypatch, shape, bad):
    monkeypatch.chdir(tmp_path)
    values = graded(shape, 9)
    values[7, 3] = bad
    with pytest.raises(InputError, match="column 3 holds NaN or infinite numbers"):
        pca(make("a", values, chunks=(50, 40)), 2, scores="s", **GPU)
    with pytest.raises(InputError, match="a: column 3 holds NaN or infinite numbers"):
        svd("a", 2, u="s", **GPU)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("shape", [(900, 50), (50, 900)])
def test_written_results_are_the_returned_ones(gpu, small, tmp_path, monkeypatch, shape):
    monkeypatch.chdir(tmp_path)
    x = make("a", graded(shape, 10, dtype="f4"), chunks=(100, 50))
    kept, done = svd(x, 4, **GPU), svd(x, 4, u="u", **GPU)
    assert isinstance(done.u, zarr.Array)
    close(zarr.open_array("u", mode="r")[...], kept.u, 1e-4)
    done = ooc("pca", "a", "s", "-k", 4, "-M", "4GiB", "-d", "cuda", "-D", "2GiB", "--save-components", "c")
    assert done.code == 0, done.err
    u, s, vt, _ = exact(zarr.open_array("a", mode="r")[...], 4)
    close(zarr.open_array("s", mode="r")[...], u * s, 1e-4)
    close(zarr.open_array("c", mode="r")[...], vt, 1e-4)


def test_files_in_memory(gpu, small, monkeypatch):
    """They are read in the background, into few slots."""
    if not files.in_background("/dev/shm"):
        pytest.skip("there is no /dev/shm in memory, or no glibc")
    plans, usual = [], planning.make_pass_plan
    monkeypatch.setattr(
        "ooc_gemm.run.passes.make_pass_plan", lambda *args: plans.append(usual(*args)) or plans[-1]
    )
    values = graded((900, 70), 12, dtype="f4")
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-test-", dir="/dev/shm") as folder:
        x = make(Path(folder) / "a", values, chunks=(200, 30), compressors=None)
        check_pca(pca(x, 4, **GPU), values, 4, 1e-4)
    assert plans[0].problem.matrix.traits.asynchronous
    assert plans[0].slots < planning.SLOTS_PER_READER * plans[0].readers


def test_it_reads_as_often_as_it_says(gpu, small, tmp_path, monkeypatch):
    keep(monkeypatch, 0)
    values, fractions = graded((3000, 50), 12, dtype="f4"), []
    x = make(tmp_path / "a", values, chunks=(700, 50), compressors=None)
    for iterations in (0, 1, 3):
        p = pca(x, 4, iterations=iterations, progress=fractions.append, **GPU)
        assert p.passes == iterations + 2
        assert values.nbytes * p.passes <= p.bytes_read <= 5 * 700 * 50 * 4 * p.passes
        assert fractions[-1] == 1
        assert fractions == sorted(fractions)
        fractions.clear()


@pytest.mark.parametrize(
    ("shape", "chunks", "others"),
    [
        ((3000, 50), (700, 11), {}),
        ((50, 3000), (11, 700), {}),
        ((3000, 50), (700, 50), {"compressors": None}),
        ((50, 3000), (50, 100), {"compressors": None}),
    ],
)
@pytest.mark.parametrize("kept", [0, 5, 1000])
def test_panels_on_the_device_are_read_once(gpu, small, tmp_path, monkeypatch, shape, chunks, others, kept):
    """The result does not depend on how many are kept, and the plan knows the bytes that are read."""
    values = graded(shape, 13, mean=2, dtype="f4")
    x = make(tmp_path / "a", values, chunks=chunks, **others)
    keep(monkeypatch, 0)
    wanted = pca(x, 4, iterations=2, **GPU)
    keep(monkeypatch, kept)
    plan, found = plan_of(x, 2), pca(x, 4, iterations=2, **GPU)
    assert (plan.bytes_read, plan.passes) == (found.bytes_read, found.passes)
    assert found.passes == 4
    assert plan.device_ledger["kept panels"] <= kept * plan.device_ledger["panels"]
    assert (found.bytes_read < wanted.bytes_read) == (kept > 0)
    if kept == 1000:
        assert found.bytes_read * 4 == wanted.bytes_read
    close(found.singular_values, wanted.singular_values, 1e-6)
    close(found.scores, wanted.scores, 1e-5)
    check_pca(found, values, 4, 1e-4)


@pytest.mark.parametrize("step", ["upload", "apply"])
def test_a_failed_run_leaves_nothing(gpu, small, tmp_path, monkeypatch, step):
    """Neither threads nor memory of the device, nor half of an output."""
    keep(monkeypatch, 0)
    monkeypatch.chdir(tmp_path)
    make("a", graded((300, 40), 11, dtype="f4"), chunks=(50, 40))
    freed, usual = [], on_cuda.CUDAPasses.close
    monkeypatch.setattr(on_cuda.CUDAPasses, "close", lambda self: (usual(self), freed.append(self._arrays)))

    def fail(self, *args):
        raise DriverError("cuMemcpy2DAsync_v2", 700)

    def close(self):
        freeing(self)
        raise RuntimeError("the device does not answer")

    freeing = on_cuda.CUDAPasses.close
    with monkeypatch.context() as patch:
        patch.setattr(on_cuda.CUDAPasses, step, fail)
        patch.setattr(on_cuda.CUDAPasses, "close", close)
        with pytest.raises(DeviceError, match="cuda failed"):
            pca("a", 3, scores="s", **GPU)

    def last(fraction):
        if fraction == 5 / 6:
            (tmp_path / "a" / "c" / "5" / "0").write_bytes(b"no frame")

    with pytest.raises(StoreError, match="chunk c/5/0"):
        pca("a", 3, scores="s", progress=last, **GPU)
    assert freed == [{}, {}]
    assert not (tmp_path / "s").exists()


def test_an_output_that_fails_ends_the_run(gpu, small, tmp_path, monkeypatch):
    def full(self, values):
        raise StoreError("the disk is full")

    monkeypatch.setattr("ooc_gemm.run.rows.RowWriter.add", full)
    with pytest.raises(StoreError, match="the disk is full"):
        pca(graded((3000, 40), 11), 3, scores=str(tmp_path / "s"), **GPU)
    assert not (tmp_path / "s").exists()


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("shape", [(3000, 50), (50, 3000)])
@pytest.mark.parametrize("dtype", ["f4", "i2"])
def test_arrays_on_the_device_are_those_of_the_ledger(monkeypatch, shape, dtype):
    cupy_on_cpu.install(monkeypatch)
    allocated, plans, usual = [], [], planning.make_pass_plan

    class Counting(cupy_on_cpu.Memory):
        def __init__(self, nbytes):
            allocated.append(nbytes)
            super().__init__(nbytes)

    def planned(*args):
        plans.append(usual(*args))
        return plans[-1]

    monkeypatch.setattr(sys.modules["cupy"].cuda, "Memory", Counting)
    monkeypatch.setattr("ooc_gemm.run.passes.make_pass_plan", planned)
    for limit in ("2GiB", "728MiB"):
        allocated.clear()
        pca((graded(shape, 15) * 100).astype(dtype), 4, device_memory_limit=limit, **GPU)
        wanted = sum(plans[-1].device.values()) - plans[-1].device["baseline"]
        assert wanted <= sum(allocated) <= wanted + 16 * 512  # each array begins at a multiple of 512 bytes


@pytest.mark.parametrize("chunks", [(100, 50), (1000, 5)])
def test_limits_that_are_too_small(gpu, tmp_path, chunks):
    x = make(tmp_path / "a", graded((3000, 50), 15), chunks=chunks)
    wanted = pca(x, 4, **GPU).singular_values
    with pytest.raises(
        BudgetError, match=r"a memory limit .* too small to decompose .*a; the smallest"
    ) as error:
        pca(x, 4, memory_limit="80MiB", device="cuda")
    least = error.value.minimum_memory_limit
    with pytest.raises(BudgetError, match=r"a device memory limit of .* too small to decompose") as error:
        pca(x, 4, device_memory_limit="80MiB", **GPU)
    on_device = error.value.minimum_device_memory_limit
    with pytest.raises(BudgetError):
        pca(x, 4, device_memory_limit=on_device - 1, **GPU)
    if gpu == "cuda":  # where tests before have left more than a fresh process holds
        least += 1 << 30
    found = pca(x, 4, device="cuda", memory_limit=least, device_memory_limit=on_device)
    close(found.singular_values, wanted, 1e-9)


PROGRAM = """
import sys, ooc_gemm
p = ooc_gemm.pca(
    sys.argv[1], 20, iterations=1, scores=sys.argv[2], memory_limit=int(sys.argv[3]), device="cuda",
    device_memory_limit=int(sys.argv[4]),
)
print(p.peak_host_bytes, p.peak_device_bytes)
"""


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("shape", [(200_000, 1000), (1000, 200_000)])
@pytest.mark.parametrize("limits", [(1 << 30, 1 << 30), (2 << 30, 900 << 20)])
def test_the_process_keeps_within_its_limits(tmp_path, shape, limits):
    if why := gpu_missing():
        pytest.skip(why)
    import ooc_gemm

    a, s = str(tmp_path / "a"), str(tmp_path / "s")
    ooc_gemm.random(a, shape, distribution="uniform", chunks=(1000, 1000))
    command = [sys.executable, "-c", PROGRAM, a, s, *map(str, limits)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) <= limits[0]
    assert int(said[1]) <= limits[1]


# ------------------------------------------------------------------------------------------ devices


def test_auto_takes_the_gpu(gpu):
    found = pca(graded((30, 20), 1), 2, memory_limit="4GiB")
    assert found.device == "cuda"
    assert found.peak_device_bytes > 0


def test_several_gpus_are_refused(monkeypatch):
    cupy_on_cpu.install(monkeypatch)
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", lambda: 2)
    assert pca(graded((30, 20), 1), 2, memory_limit="4GiB", device="cuda:1").device == "cuda:1"
    with pytest.raises(InputError, match=r"'cuda:0,1' cannot be used here; .* one GPU: cpu, cuda or cuda:N"):
        pca(graded((30, 20), 1), 2, device="cuda:0,1")
