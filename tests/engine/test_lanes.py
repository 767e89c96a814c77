"""Lanes: threads that multiply what they have read, into sums of their own."""

import itertools
import threading
import time

import numpy as np
import pytest
import zarr
from arrays import assert_close, matrix
from conftest import make

import ooc_gemm
from ooc_gemm import StoreError
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.planning import search
from ooc_gemm.planning.candidates import depths
from ooc_gemm.run import prepare
from ooc_gemm.storage.write.publication import Publication
from ooc_gemm.support.trace import Trace

M, N, K = 24, 17, 60_000
BOUND = {"f2": 2e-3, "f4": 1e-5, "f8": 1e-12, "c8": 1e-5, "c16": 1e-12}
STORED = {
    "rows": {"chunks": (4096, 64), "compressors": None},
    "short": {"chunks": (100, 64), "compressors": None},
    "columns": {"chunks": (5000, 7), "compressors": None},
    "zstd": {"chunks": (3000, 64)},
    "zstd-columns": {"chunks": (3000, 9)},
    "shards": {"chunks": (500, 64), "shards": (5000, 64)},
}
CASES = [(dtype, layout) for dtype in ("f4", "f8", "c8") for layout in STORED] + [
    (dtype, layout) for dtype in ("f2", "c16") for layout in ("rows", "columns")
]
"""Types that are converted, or twice as long, are read from two layouts."""


@pytest.fixture(autouse=True)
def several_panels(monkeypatch):
    """No panel holds all of k, although there would be memory for it."""

    def shallow(*given):
        return [depth for depth in depths(*given) if depth <= 8192]

    monkeypatch.setattr(search, "depths", shallow)
    prepare._remembered.cache_clear()
    yield
    prepare._remembered.cache_clear()


def wide(x):
    return x.astype("c16" if x.dtype.kind == "c" else "f8")


def on(threads=2):
    return {"device": CPU(threads), "memory_limit": "1GiB"}


def tall(folder, dtype, columns=M, seed=1, **layout):
    x = matrix((K, columns), dtype, seed)
    return x, make(folder / f"x{seed}", x, **(layout or STORED["rows"]))


@pytest.mark.parametrize(("dtype", "layout"), CASES)
def test_products_of_every_layout(dtype, layout, tmp_path):
    """AᴴB and AᴴA with a factor, of whole rows and of parts of them."""
    a, x = tall(tmp_path, dtype, **STORED[layout])
    b, y = tall(tmp_path, dtype, N, 2, **STORED[layout])
    options = on() | ({"out_dtype": "f4"} if dtype == "f2" else {})
    found = ooc_gemm.multiply(x, y, tmp_path / "c", adjoint_a=True, alpha=-0.5, **options)
    assert found.plan.k_panels.lanes
    assert found.bytes_read == found.plan.bytes_read
    assert_close(zarr.open_array(tmp_path / "c")[...], -0.5 * (wide(a).conj().T @ wide(b)), BOUND[dtype])
    if dtype[0] != "c":
        found = ooc_gemm.gram(x, tmp_path / "g", transpose=True, **options)
        assert found.plan.k_panels.lanes
        assert found.bytes_read == found.plan.bytes_read
        assert_close(zarr.open_array(tmp_path / "g")[...], wide(a).T @ wide(a), BOUND[dtype])


@pytest.mark.parametrize(("dtype", "layout"), CASES)
def test_an_array_that_is_both_operands_is_read_once(dtype, layout, tmp_path):
    """AᴴA by `multiply`, whose sums are all made; and A·Aᴴ, of an array with k along its rows."""
    a, x = tall(tmp_path, dtype, **STORED[layout])
    options = on() | ({"out_dtype": "f4"} if dtype == "f2" else {})
    found = ooc_gemm.multiply(x, x, tmp_path / "c", adjoint_a=True, **options)
    assert found.plan.shares_pieces
    assert found.plan.flops == 2 * M * M * K
    assert found.bytes_read == found.plan.bytes_read
    assert found.bytes_read == found.plan.problem.a.read_bytes(found.plan.bk, M), "one pass"
    assert_close(zarr.open_array(tmp_path / "c")[...], wide(a).conj().T @ wide(a), BOUND[dtype])
    chunks = {"chunks": (7, 5000), "compressors": None} if "columns" in layout else {"chunks": (M, 4096)}
    y = make(tmp_path / "y", np.ascontiguousarray(a.T), **chunks)
    found = ooc_gemm.multiply(y, y, tmp_path / "d", adjoint_b=True, **options)
    assert found.plan.shares_pieces
    assert found.bytes_read == found.plan.bytes_read
    assert_close(zarr.open_array(tmp_path / "d")[...], wide(a).T @ wide(a).conj(), BOUND[dtype])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_of_op_b_and_any_number_of_threads(threads, tmp_path):
    """A·Bᵀ, whose panels lie along k."""
    a, b = matrix((M, K), "f4", 1), matrix((N, K), "f4", 2)
    x, y = (make(tmp_path / name, z, chunks=(30, 2048), compressors=None) for name, z in (("x", a), ("y", b)))
    found = ooc_gemm.multiply(x, y, tmp_path / "c", transpose_b=True, **on(threads))
    assert found.plan.k_panels.lanes >= threads
    assert_close(zarr.open_array(tmp_path / "c")[...], wide(a) @ wide(b).T, 1e-5)


def test_centred_elements_are_not_multiplied_where_they_were_read(tmp_path):
    a, x = tall(tmp_path, "f4")
    a += 100
    x = make(tmp_path / "far", a, **STORED["rows"])
    found = ooc_gemm.cov(x, tmp_path / "c", rowvar=False, **on())
    assert found.plan.k_panels.lanes
    assert_close(zarr.open_array(tmp_path / "c")[...], np.cov(wide(a), rowvar=False), 1e-5)
    assert (zarr.open_array(x)[...] == a).all()


def test_an_array_in_memory_stays_as_it_is(tmp_path):
    a = matrix((K, M), "c8", 1)
    before = a.copy()
    found = ooc_gemm.multiply(a, a, tmp_path / "c", adjoint_a=True, **on())
    assert found.plan.k_panels.lanes
    assert_close(zarr.open_array(tmp_path / "c")[...], wide(a).conj().T @ wide(a), 1e-5)
    assert (a == before).all()


def test_a_factor_of_zero_makes_zeros_of_nan(tmp_path):
    a, x = tall(tmp_path, "f4")
    a[5000, 3] = np.nan
    x = make(tmp_path / "nan", a, **STORED["rows"])
    found = ooc_gemm.gram(x, tmp_path / "c", transpose=True, alpha=0, **on())
    assert found.plan.k_panels.lanes
    assert (zarr.open_array(tmp_path / "c")[...] == 0).all()


def test_the_result_does_not_depend_on_which_lane_is_faster(tmp_path, monkeypatch):
    _, x = tall(tmp_path, "f4")
    multiply, random = CPUSession.multiply_alone, np.random.default_rng(0)

    def slow(self, *arguments, **named):
        time.sleep(random.uniform(0, 0.004))
        multiply(self, *arguments, **named)

    monkeypatch.setattr(CPUSession, "multiply_alone", slow)
    found = []
    for number in range(3):
        plan = ooc_gemm.gram(x, tmp_path / f"{number}", transpose=True, **on(3)).plan
        assert plan.k_panels.lanes >= 3
        found.append(zarr.open_array(tmp_path / f"{number}")[...])
    assert all((one == found[0]).all() for one in found)


def test_no_more_threads_multiply_at_a_time_than_there_are_cores(tmp_path, monkeypatch):
    """There are more lanes than that, since a disk needs several reads at a time."""
    _, x = tall(tmp_path, "f4", **STORED["zstd"])
    inside, times, sums, add = set(), [], CPUSession._sum, Trace.add

    def seen(self, block, number):
        inside.add(threading.get_ident())
        return sums(self, block, number)

    def timed(self, stage, start, stop=0.0, *more, **named):
        if stage == "compute":
            times.append((start, time.perf_counter()))
        add(self, stage, start, stop, *more, **named)

    monkeypatch.setattr(CPUSession, "_sum", seen)
    monkeypatch.setattr(Trace, "add", timed)
    plan = ooc_gemm.gram(x, tmp_path / "c", transpose=True, **on(1)).plan
    assert plan.k_panels.lanes > 1
    assert len(inside) > 1
    assert all(one[1] <= following[0] for one, following in itertools.pairwise(sorted(times)))


def test_a_chunk_that_cannot_be_read_ends_all_lanes(tmp_path):
    _, x = tall(tmp_path, "f4")
    path = next(p for p in sorted((tmp_path / "x1").rglob("*")) if p.name == "0" and p.parent.name == "7")
    path.write_bytes(path.read_bytes()[:-1])
    before = threading.active_count()
    with pytest.raises(StoreError, match=r"c/7/0"):
        ooc_gemm.gram(x, tmp_path / "c", transpose=True, **on())
    assert threading.active_count() <= before
    with pytest.raises(FileNotFoundError):
        zarr.open_array(tmp_path / "c", mode="r")


def test_progress_counts_what_is_multiplied_and_may_end_the_call(tmp_path, monkeypatch):
    _, x = tall(tmp_path, "f4")
    multiply, told = CPUSession.multiply_alone, []

    def slow(self, *arguments, **named):
        time.sleep(0.1)
        multiply(self, *arguments, **named)

    monkeypatch.setattr(CPUSession, "multiply_alone", slow)
    plan = ooc_gemm.gram(
        x, tmp_path / "c", transpose=True, progress=lambda share, *_: told.append(share), **on()
    ).plan
    assert plan.k_panels.lanes
    assert told == sorted(told)
    assert told[-1] == 1
    assert len(told) > 2

    def enough(share, *_):
        raise KeyError("that is enough")

    with pytest.raises(KeyError):
        ooc_gemm.gram(x, tmp_path / "d", transpose=True, progress=enough, **on())
    with pytest.raises(FileNotFoundError):
        zarr.open_array(tmp_path / "d", mode="r")


@pytest.mark.parametrize("options", [{"verify": True}, {"beta": 2.0}])
def test_other_blocks_have_no_lanes(options, tmp_path):
    """Blocks that are checked, or begin with the old C."""
    a, x = tall(tmp_path, "f4")
    c = make(tmp_path / "c", np.ones((M, M), "f4"), chunks=(M, M), compressors=None)
    old = 2.0 if "beta" in options else 0.0
    force = {} if "beta" in options else {"force": True}
    found = ooc_gemm.multiply(x, x, c, transpose_a=True, **options, **force, **on())
    assert not found.plan.k_panels.lanes
    assert_close(zarr.open_array(c)[...], wide(a).T @ wide(a) + old, 1e-5)


@pytest.mark.parametrize("dtype", ["i1", "i4"])
def test_integers_have_no_lanes(dtype, tmp_path):
    a, x = tall(tmp_path, dtype)
    found = ooc_gemm.gram(x, tmp_path / "c", transpose=True, **on())
    assert not found.plan.k_panels.lanes
    assert (zarr.open_array(tmp_path / "c")[...] == a.astype("i8").T @ a.astype("i8")).all()


def test_a_run_that_ended_before_c_was_finished_is_continued(tmp_path, monkeypatch):
    """All chunks are there, so there is no block to make."""
    a, x = tall(tmp_path, "f4")

    def fail(self, made=None):
        raise KeyError("the power is off")

    with monkeypatch.context() as patch:
        patch.setattr(Publication, "commit", fail)
        with pytest.raises(KeyError):
            ooc_gemm.gram(x, tmp_path / "c", transpose=True, **on())
    found = ooc_gemm.gram(x, tmp_path / "c", transpose=True, resume=True, **on())
    assert found.plan.k_panels.lanes
    assert found.bytes_read == 0
    assert_close(zarr.open_array(tmp_path / "c")[...], wide(a).T @ wide(a), 1e-5)
