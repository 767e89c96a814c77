"""A folder with small A and B, and a look at what a run that fails leaves there: no thread, open file or
temporary file, and BLAS has its threads back."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import make, ooc
from outcome import assert_one_sentence
from threadpoolctl import threadpool_info

import ooc_gemm
from ooc_gemm.storage.write import staging_folder

MiB = 1 << 20
RNG = np.random.default_rng(5)
A, B = RNG.integers(-9, 9, (300, 400)).astype("f4"), RNG.integers(-9, 9, (400, 260)).astype("f4")
C = A.astype("f8") @ B  # every sum is exact
OLD = RNG.integers(-9, 9, C.shape).astype("f4")


@pytest.fixture
def here(request, tmp_path, monkeypatch, no_thread_left):
    """A folder with a, b; and a look at what is left in the end."""
    monkeypatch.chdir(tmp_path)
    make("a", A, chunks=(50, 50), compressors=None)
    make("b", B, chunks=(50, 50), compressors=None)
    # A driver opens what it wants, when it wants.
    folder = str(tmp_path) if request.node.get_closest_marker("gpu") else ""
    before, blas = open_files(folder), threadpool_info()
    yield tmp_path
    assert set(open_files(folder)) <= set(before)  # what earlier tests have left may be closed meanwhile
    assert threadpool_info() == blas
    assert left(tmp_path) == []


def open_files(folder):
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append((number, os.readlink(f"/proc/self/fd/{number}")))
    return sorted(entry for entry in found if entry[1].startswith(folder) and not entry[1].endswith("/fd"))


def left(folder):
    """Temporary files and folders, and chunks that wait for a run that will never continue."""
    names = [path for path in Path(folder).rglob("*") if ".tmp" in path.name or ".ooc-gemm-" in path.name]
    pending = Path(folder).rglob("*" + staging_folder.PENDING)
    return names + [path for path in pending if not (path.parents[2] / "ooc-gemm.journal").exists()]


def failed(*args, words, code=1):
    """`multiply a b c ARGS` fails, and leaves no result."""
    done = ooc("multiply", "a", "b", *(args if args and not args[0].startswith("-") else ("c", *args)))
    assert (done.code, done.out) == (code, "")
    assert_one_sentence(done.err, *words)
    assert not Path("c/zarr.json").exists()


def many_blocks(a="a", b="b", **options):
    """A limit that makes several blocks and a short ring."""
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.plan(a, b, memory_limit=1, device="cpu", **options)
    limit = small.value.minimum_memory_limit + 100_000
    plan = ooc_gemm.plan(a, b, memory_limit=limit, device="cpu", **options)
    assert plan.block_count > 4
    return limit


def script(text, **options):
    """A Python process of its own."""
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=200, **options
    )
