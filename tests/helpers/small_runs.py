"""Small runs of C ← A·B + β·C in a folder, and runs that are interrupted there."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
import ooc_gemm.run.executor
from ooc_gemm import StoreError
from ooc_gemm.storage.format.unfinished import JOURNAL, is_partial
from ooc_gemm.storage.io import files
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import publication

RNG = np.random.default_rng(19)
A, B = RNG.integers(-9, 9, (300, 200)).astype("f4"), RNG.integers(-9, 9, (200, 260)).astype("f4")
OLD = RNG.integers(-9, 9, (300, 260)).astype("f4")
C = A.astype("f8") @ B  # every sum is exact
OPTIONS = {"chunks": (50, 52), "device": "cpu", "memory_limit": "300MiB"}


def make_inputs(folder, monkeypatch):
    """Work in a folder with a and b."""
    monkeypatch.chdir(folder)
    make("a", A, chunks=(64, 64), compressors=None)
    make("b", B, chunks=(64, 64), compressors=None)


def old_c(path="c", **options):
    make(path, OLD, **{"chunks": (50, 52), "compressors": None, **options})


def run(beta=0.0, **options):
    """C ← A·B + β·C."""
    some = {key: value for key, value in OPTIONS.items() if key != "chunks" or not beta}
    return ooc_gemm.multiply("a", "b", "c", beta=beta, **{**some, **options})


def is_result(beta=0.0):
    return np.array_equal(zarr.open_array("c", mode="r")[...], C + beta * OLD)


def unfinished(monkeypatch, count=9, beta=0.0, saved=0.0):
    """A run that fails when so many chunks are written."""
    left = iter(range(count))

    def write(path, data, direct=False, real=files.write):
        if next(left, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, data, direct)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", write)
        patched.setattr(publication, "SAVED_SECONDS", saved)
        with pytest.raises(StoreError):
            run(beta)
    assert is_partial(Folder(Path("c")))


def lines():
    return (Path("c") / JOURNAL).read_bytes().splitlines(keepends=True)


def rewrite(path):
    Path(path).write_bytes(Path(path).read_bytes()[::-1])


def rewrite_and_set_back(path):
    before = os.stat(path)
    rewrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path):
    before = os.stat(path)
    shutil.copy(path, path + ".other")
    rewrite(path + ".other")
    os.utime(path + ".other", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(path + ".other", path)
