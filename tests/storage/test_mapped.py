"""NumPy arrays over memory maps: private ones keep what was written to them, and the memory limit holds."""

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from ooc_gemm import corrcoef, gram, grm, multiply
from ooc_gemm.storage.read import mapped
from ooc_gemm.storage.read.inputs import open_input

linux = pytest.mark.skipif(sys.platform != "linux", reason="maps are looked up in /proc")
N = 130
VALUES = np.random.default_rng(0).standard_normal((N, N))
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def mapping(path, access):
    path.write_bytes(bytes(VALUES.nbytes))
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, 0, access=access)
    finally:
        os.close(file)


def memmap(path, mode):
    VALUES.tofile(path)
    return np.memmap(path, "f8", mode, shape=(N, N))


BUFFERS = {
    "anonymous": lambda path: mmap.mmap(-1, VALUES.nbytes, flags=PRIVATE),
    "anonymous, shared": lambda path: mmap.mmap(-1, VALUES.nbytes),
    "file": lambda path: mapping(path, mmap.ACCESS_COPY),
    "file, shared": lambda path: mapping(path, mmap.ACCESS_WRITE),
    "memmap": lambda path: memmap(path, "c"),
    "memmap, shared": lambda path: memmap(path, "r+"),
}
WRAPS = {
    "ndarray": lambda buffer: np.ndarray((N, N), "f8", buffer=buffer),
    "frombuffer": lambda buffer: np.frombuffer(buffer, "f8").reshape(N, N),
    "memoryview": lambda buffer: np.frombuffer(memoryview(buffer).cast("B"), "f8").reshape(N, N),
}


@linux
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("view", ["itself", "read-only", "transposed", "reversed"])
def test_nothing_that_was_written_to_a_map_is_lost(tmp_path, buffer, wrap, view):
    array = WRAPS[wrap](BUFFERS[buffer](tmp_path / "x"))
    array[:] = VALUES
    given = {"transposed": array.T, "reversed": array[::-1, ::2]}.get(view, array[:])
    given.flags.writeable = view != "read-only"
    right = np.array(given)
    assert np.allclose(corrcoef(given, device="cpu").array, np.corrcoef(right), atol=1e-12)
    assert np.allclose(multiply(given, right.T, device="cpu").array, right @ right.T)
    assert np.array_equal(array, VALUES)
    assert (mapped.releasable(given) is not None) == ("shared" in buffer)


@linux
def test_maps_that_cannot_be_looked_up_are_released_by_their_mode_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "MAPS", tmp_path / "nothing")
    released = {
        mode: mapped.releasable(memmap(tmp_path / "x", mode)) is not None for mode in ("r", "r+", "c")
    }
    assert released == {"r": True, "r+": True, "c": False}
    for buffer in ("anonymous", "file", "file, shared"):
        assert mapped.releasable(WRAPS["ndarray"](BUFFERS[buffer](tmp_path / "y"))) is None


@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_labelled_array_in_memory_is_looked_through(tmp_path, mode):
    xarray = pytest.importorskip("xarray")
    held = memmap(tmp_path / "x", mode).T
    array = xarray.DataArray(held, dims=("site", "time"))
    sources = [open_input(one, "A").source for one in (held, array, array.variable)]
    assert len({type(one) for one in sources}) == 1
    assert open_input(array, "A").dims == ("site", "time")
    assert np.allclose(multiply(array, VALUES, device="cpu").array, VALUES.T @ VALUES)


def test_a_transposed_map_is_planned_as_it_lies_in_its_file(tmp_path):
    stored = memmap(tmp_path / "x", "r")[:, :90]
    found = open_input(stored.T, "A")
    assert found.shape == (90, N)
    assert (found.matrix.rows, found.matrix.cols, found.matrix.transposed) == (N, 90, True)
    result = gram(stored.T, device="cpu")
    assert np.allclose(result.array, VALUES[:, :90].T @ VALUES[:, :90])
    assert result.bytes_read == result.plan.bytes_read


@pytest.mark.parametrize("mode", ["r", "c"])
def test_calls_in_a_map_are_counted_and_kept(tmp_path, mode):
    values = np.random.default_rng(1).integers(0, 2, (60, 20, 2), "i1")
    values.tofile(tmp_path / "x")
    calls = np.memmap(tmp_path / "x", "i1", mode, shape=values.shape)
    if mode == "c":
        calls[:30] = values[:30] = 1 - values[:30]
    assert np.array_equal(grm(calls, device="cpu").array, grm(values, device="cpu").array)
    assert np.array_equal(calls, values)


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("step", [1, -1, 3, 700])
def test_pages_are_released_before_too_many_are_resident(tmp_path, monkeypatch, turn, step):
    monkeypatch.setattr(mapped, "MOST_RESIDENT", 3 * mapped.AROUND)
    values = np.arange(1 << 20, dtype="f4").reshape(1024, 1024)
    values.tofile(tmp_path / "x")
    file = np.memmap(tmp_path / "x", "f4", "r", shape=values.shape)
    part, right = file[::step, ::step], values[::step, ::step]
    part, right = (part.T, right.T) if turn else (part, right)
    place = np.zeros(part.shape, "f4")
    mapped.copy(place, part, mapped.releasable(file))
    assert np.array_equal(place, right)


ALONE = """
import ctypes, mmap, os, sys
import numpy as np
import ooc_gemm

path, kind, limit = sys.argv[1:]
tall, wide = (16000, 4000), (4000, 16000)
def memmap(shape, mode):
    return np.memmap(path, "f4", mode, shape=shape)
def buffer(access):
    return mmap.mmap(os.open(path, os.O_RDWR), 0, access=access)
def labelled(array):
    import xarray
    return xarray.DataArray(array, dims=("t", "s"))
def calls(mode):
    return np.memmap(path, "i1", mode, shape=(160000, 800, 2))
class Own:
    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
    def __getitem__(self, at):
        return self.array[at]
x = dict(
    tall=lambda: memmap(tall, "r"),
    turned=lambda: memmap(wide, "r").T,
    steps=lambda: memmap((16000, 2, 2000), "r")[:, 1],
    labelled=lambda: labelled(memmap(tall, "r")),
    buffer=lambda: np.frombuffer(buffer(mmap.ACCESS_READ), "f4").reshape(tall),
    own=lambda: Own(memmap(tall, "r")),
    calls=lambda: calls("r"),
    private_calls=lambda: calls("c"),
    private=lambda: memmap(tall, "c"),
    copied=lambda: np.frombuffer(buffer(mmap.ACCESS_COPY), "f4").reshape(tall),
    ctypes=lambda: np.ctypeslib.as_array((ctypes.c_float * 64000000).from_buffer(buffer(mmap.ACCESS_WRITE))
        ).reshape(tall),
)[kind]()
def run():
    if kind.endswith("calls"):
        return ooc_gemm.grm(x, memory_limit=limit, device="cpu")
    if kind == "private":
        return ooc_gemm.corrcoef(x, rowvar=False, memory_limit=limit, device="cpu")
    return ooc_gemm.gram(x, transpose=True, memory_limit=limit, device="cpu")
try:
    print(run().peak_host_bytes)
except ooc_gemm.BudgetError as error:
    print(-error.minimum_memory_limit)
"""

RELEASED = "tall", "turned", "steps", "labelled", "buffer", "own", "calls"
STAY = "private", "copied", "ctypes", "private_calls"


@pytest.mark.slow
@linux
@pytest.mark.parametrize("kind", [*RELEASED, *STAY])
def test_the_limit_holds_for_maps(tmp_path, kind):
    path, limit = tmp_path / "x", (250 if kind in STAY else 300) << 20
    path.touch()
    os.truncate(path, 4 * 64_000_000)

    def peak(limit):
        command = [sys.executable, "-W", "ignore", "-c", ALONE, path, kind, str(limit)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    found = peak(limit)
    if kind in STAY:
        assert found < -4 * 64_000_000
        limit = -found
        found = peak(limit)
    assert 0 < found <= limit
