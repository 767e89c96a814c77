"""A call that fails lets go of its buffers, also while its error is kept, as notebooks do."""

import gc
from pathlib import Path

import cupy_on_cpu
import numpy as np
import pytest
from conftest import make
from garbage import bytes_of_arrays

import ooc_gemm

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
        "small": lambda: ooc_gemm.multiply(a, a, c, **{**options, "memory_limit": 1}),
        "shape": lambda: ooc_gemm.multiply(a, np.ones((2, 2)), c, **options),
    }[how]
    try:  # what pytest.raises returns would be a cycle with this frame
        call()
    except (ooc_gemm.Error, Enough) as error:
        return error
    pytest.fail("it did not fail")


@pytest.mark.parametrize("how", ["read", "stop", "gram", "cov", "topk", "pca", "verify", "small"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_buffers_of_a_failed_call(tmp_path, monkeypatch, how, device):
    """Neither the error nor a cycle holds on to them. The error still says where it was raised."""
    cupy_on_cpu.install(monkeypatch)
    a = make(tmp_path / "a", RNG.random((600, 600), "f4"), chunks=(100, 90))
    options = {} if how == "verify" else {"device": device}
    failing(how, a, str(tmp_path / "c"), **options)
    gc.collect()
    gc.disable()
    try:
        before, kept = bytes_of_arrays(), []
        for time in range(3):
            kept.append(failing(how, a, str(tmp_path / f"c{time}"), **options))
        assert bytes_of_arrays() < before + (512 << 10)
        assert all(error.__traceback__ for error in kept)
    finally:
        gc.enable()
