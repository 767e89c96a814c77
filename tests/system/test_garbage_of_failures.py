"""A call that fails lets go of its buffers, also while its error is kept, as notebooks do."""

import contextlib
import errno
import os
import traceback
from pathlib import Path

import cupy_on_cpu
import numpy as np
import pytest
from conftest import make
from garbage import arrays_are_freed
from worker_clusters import cluster

import ooc_gemm.dask
from ooc_gemm.storage.io import files

RNG = np.random.default_rng(3)


class Enough(Exception):
    pass


def stop(fraction, *_):
    if fraction > 0.4:
        raise Enough


def spoil(array):
    """Cut the last chunk of an array off after two bytes; the path of the array."""
    last = max(path for path in (Path(array) / "c").rglob("*") if path.is_file())
    last.write_bytes(last.read_bytes()[:2])
    return array


def failing(how, a, c, **options):
    """Make a call that fails; the error."""
    call = {
        "read": lambda: ooc_gemm.multiply(a, spoil(a), c, **options),
        "stop": lambda: ooc_gemm.multiply(a, a, c, progress=stop, **options),
        "gram": lambda: ooc_gemm.gram(a, c, progress=stop, **options),
        "cov": lambda: ooc_gemm.cov(a, c, progress=stop, **options),
        "topk": lambda: ooc_gemm.topk(a, out=c, k=3, progress=stop, **options),
        "pca": lambda: ooc_gemm.pca(spoil(a), 3, **options),
        "verify": lambda: ooc_gemm.verify(a, a, spoil(a), **options),
        "random": lambda: ooc_gemm.random(c, (600, 600), chunks=(300, 300), progress=lambda *_: stop(1)),
        "small": lambda: ooc_gemm.multiply(a, a, c, **{**options, "memory_limit": 1}),
        "shape": lambda: ooc_gemm.multiply(a, np.ones((2, 2)), c, **options),
    }[how]
    try:  # what pytest.raises returns would be a cycle with this frame
        call()
    except (ooc_gemm.Error, Enough) as error:
        return error
    pytest.fail("it did not fail")


@pytest.mark.parametrize(
    "how", ["read", "stop", "gram", "cov", "topk", "pca", "verify", "random", "small", "shape"]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_buffers_of_a_failed_call(tmp_path, monkeypatch, how, device):
    """Neither the error nor a cycle holds on to them. The error still says where it was raised."""
    cupy_on_cpu.install(monkeypatch)
    a = make(tmp_path / "a", RNG.random((600, 600), "f4"), chunks=(100, 90))
    options = {} if how in ("verify", "random") else {"device": device}
    failing(how, a, str(tmp_path / "c"), **options)
    kept = []
    with arrays_are_freed(512 << 10):
        for time in range(3):
            kept.append(failing(how, a, str(tmp_path / f"c{time}"), **options))
    assert all(error.__traceback__ for error in kept)


@pytest.mark.parametrize("compressor", ["none", "zstd"])
@pytest.mark.parametrize("how", ["multiply", "gram", "random"])
def test_buffers_of_a_write_that_fails(tmp_path, monkeypatch, how, compressor):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", full)
    a = make(tmp_path / "a", RNG.random((600, 600), "f4"), chunks=(100, 90))
    options = {"chunks": (150, 150), "compressor": compressor}

    def fail(time):
        c = str(tmp_path / f"c{time}")
        try:
            {
                "multiply": lambda: ooc_gemm.multiply(a, a, c, device="cpu", **options),
                "gram": lambda: ooc_gemm.gram(a, c, device="cpu", **options),
                "random": lambda: ooc_gemm.random(c, (600, 600), **options),
            }[how]()
        except ooc_gemm.StoreError as error:
            return error
        pytest.fail("it did not fail")

    fail(0)
    kept = []
    with arrays_are_freed(64 << 10):
        for time in range(1, 4):
            kept.append(fail(time))


@pytest.mark.parametrize("how", ["lstsq", "svd", "verify"])
def test_buffers_when_the_error_is_gone(tmp_path, how):
    """These functions keep what they have held as long as their error is kept, but no longer."""
    a = make(tmp_path / "a", RNG.random((600, 500), "f4"), chunks=(100, 90))

    def fail(time):
        call = {
            "lstsq": lambda: ooc_gemm.lstsq(a, a, ridge=1.0, progress=stop),
            "svd": lambda: ooc_gemm.svd(a, 3, progress=stop),
            "verify": lambda: ooc_gemm.verify(
                a, a, np.zeros((600, 600)), transpose_b=True, progress=lambda *_: stop(1)
            ),
        }[how]
        with pytest.raises(Enough):
            call()

    fail(0)
    with arrays_are_freed(64 << 10):
        fail(1)


def test_an_earlier_error_is_left_as_it_is(tmp_path):
    """That is, one that the caller is handling."""
    a = make(tmp_path / "a", RNG.random((60, 60), "f4"), chunks=(30, 30))

    def earlier():
        known = "of the caller"
        raise ValueError(known)

    def frames(error):
        return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]

    try:
        earlier()
    except ValueError:
        found = failing("read", a, str(tmp_path / "c"))
    before = found
    while before.__context__ is not None:
        before = before.__context__
    assert frames(before)[-1].f_locals == {"known": "of the caller"}
    assert found is not before
    assert not frames(found)[-1].f_locals


@pytest.mark.parametrize("how", ["read", "stop"])
def test_a_worker_of_a_cluster_lets_go(tmp_path, how):
    a = make(tmp_path / "a", RNG.random((600, 600), "f4"), chunks=(100, 90))
    stopping = {"progress": stop} if how == "stop" else {}
    with cluster(2) as client:

        def fail(time):
            array = spoil(a) if how == "read" else a
            with contextlib.suppress(ooc_gemm.Error, Enough):
                ooc_gemm.dask.multiply(
                    a, array, str(tmp_path / f"c{time}"), client=client, device="cpu", **stopping
                )
                pytest.fail("it did not fail")

        fail(0)
        with arrays_are_freed(512 << 10, seconds=20):  # tasks of other workers end later
            for time in range(3):
                fail(time)
