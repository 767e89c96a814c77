"""Where the process may open no more files the message says so; many runs leave no more open than one."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import make

from ooc_gemm.support.errors import StoreError, remedy

FEW = """
import os, resource, sys
import ooc_gemm, numpy as np
from ooc_gemm import api
from ooc_gemm.engine import execute
a, c, when, compressor = sys.argv[1:5]
held = []

def take(fraction, plan, trace):
    while not held or len(held) < 5000:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return

api.multiply(a, a, device="cpu")  # libraries open what they need
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40,) * 2)
if when == "before":
    take(0, None, None)
try:
    options = dict(memory_limit="200MiB", chunks=(64, 64), compressor=compressor)
    ooc_gemm.multiply(a, a, c, device="cpu", progress=take if when == "while" else None, **options)
except ooc_gemm.Error as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("compressor", ["none", "zstd"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_too_many_open_files_are_said_with_what_helps(tmp_path, when, compressor):
    values = np.ones((512, 512), "f4")
    a = make(tmp_path / "a", values, chunks=(64, 64), compressors=None if compressor == "none" else "auto")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FEW, a, str(tmp_path / "c"), when, compressor],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Too many open files" in done.stdout
    assert "raise the limit on open files (ulimit -n)" in done.stdout
    assert "check its disk" not in done.stdout
    assert "write it again" not in done.stdout


def test_the_remedy_is_found_behind_other_errors():
    system = OSError(errno.ENFILE, os.strerror(errno.ENFILE))
    behind = StoreError("a chunk cannot be fetched")
    behind.__cause__ = system
    client = RuntimeError("error sending request: Too many open files (os error 24)")
    for error in (system, behind, client):
        assert remedy(error, "check its disk") == "raise the limit on open files (ulimit -n)"
    assert remedy(OSError(errno.EIO, "I/O error"), "check its disk") == "check its disk"


MANY = """
import os, sys, threading
import numpy as np
from ooc_gemm import multiply
a, c = sys.argv[1:3]
class lazy:
    shape, dtype = (64, 64), np.dtype("f4")
    def __getitem__(self, at):
        return ONES[at]
ONES = np.ones((64, 64), "f4")
found = []
for number in range(25):
    multiply(a, lazy(), c, device="cpu", force=True, compressor="zstd", memory_limit="300MiB")
    multiply(a, a, device="cpu", memory_limit="300MiB")
    found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
files, threads = zip(*found)
assert max(files[-3:]) <= max(files[:3]), found
assert threads[-1] < 6 + min(32, os.cpu_count() + 4), found  # zarr's pool grows up to so many
"""


@pytest.mark.slow
def test_files_and_threads_do_not_grow_with_the_number_of_runs(tmp_path):
    a = make(tmp_path / "a", np.ones((64, 64), "f4"), chunks=(16, 16))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MANY, a, str(tmp_path / "c")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
