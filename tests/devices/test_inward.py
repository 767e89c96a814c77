"""Chunks of C that come from a device to files in memory without the interpreter."""

import errno
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import make
from copying_threads import product
from sessions import device_with

import ooc_gemm
from ooc_gemm.cuda_kernels import driver
from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.session import CUDASession
from ooc_gemm.engine.writers import beside
from ooc_gemm.planning import search
from ooc_gemm.planning.candidates import Candidate, outputs, rings
from ooc_gemm.planning.schedule import Part
from ooc_gemm.run import prepare
from ooc_gemm.storage.io import background, files
from ooc_gemm.storage.write import publication
from ooc_gemm.storage.write.staging_folder import FolderStaging

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("m", "n"), [(500, 400), (490, 400), (500, 390), (40, 30)])
def test_c_comes_from_the_device_without_slots(memory, m, n, verify):
    """Those at the edges are filled up with zeros."""
    downloads = []

    class Session(CUDASession):
        def download(self, *args):
            downloads.append(args)
            return super().download(*args)

    options = {"device": device_with(Session, CUDA)(), "chunks": (100, 80)}
    (memory / "before").mkdir()
    product(memory / "before", **options)  # places of threads hold something after that
    downloads.clear()
    found, right = product(memory, (m, 300, n), verify=verify, **options)
    assert right
    assert not downloads
    assert found.bytes_written == found.plan.bytes_written
    assert found.bytes_downloaded == found.plan.bytes_downloaded
    assert cupy_on_cpu.brought
    last = np.fromfile(memory / "c" / "c" / str((m - 1) // 100) / str((n - 1) // 80), "f4").reshape(100, 80)
    rows, cols = (m - 1) % 100 + 1, (n - 1) % 80 + 1
    assert last[:rows, :cols].any()
    assert not last[rows:].any()
    assert not last[:, cols:].any()


def test_a_timeline_changes_nothing_of_the_way_that_pieces_and_parts_take(memory, tmp_path):
    """Through slots, of which there are few where parts need none, a run with a timeline took five times as
    long."""
    ways = []
    for number, options in enumerate(({}, {"trace": tmp_path / "t.json"})):
        cupy_on_cpu.sent.clear()
        cupy_on_cpu.brought.clear()
        (memory / str(number)).mkdir()
        _, right = product(memory / str(number), (900, 600, 900), **options)
        assert right
        ways.append((len(cupy_on_cpu.sent), len(cupy_on_cpu.brought)))
    assert ways[0] == ways[1] > (0, 0)
    events = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    assert {"read", "upload", "compute", "download", "write"} <= {event["name"] for event in events}


def test_up_to_four_parts_beside_each_other_come_together(memory, monkeypatch):
    """The interpreter is needed once for them. Those that cannot be brought come in slots."""
    real, together = background.Transfer.__init__, []

    def counted(self, jobs, flags, buffer, *rest, **named):
        if buffer is None:
            together.append(len(jobs))
        real(self, jobs, flags, buffer, *rest, **named)

    monkeypatch.setattr(background.Transfer, "__init__", counted)
    _, right = product(memory, (500, 300, 480))
    assert right
    assert sorted(together) == 5 * [2] + 5 * [4]


def test_parts_beside_each_other():
    parts = [Part((i, j), i, 10 * j, 1, 10) for i in range(2) for j in range(5)]
    del parts[7]
    edge = Part((1, 5), 1, 50, 1, 3)
    found = [[part.chunk for part in some] for some in beside(iter([*parts, edge]), 3)]
    assert found == [
        [(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4)], [(1, 0), (1, 1)], [(1, 3), (1, 4)], [(1, 5)]
    ]  # fmt: skip
    assert [len(some) for some in beside(iter(parts), 1)] == 9 * [1]


def test_c_comes_from_several_devices(memory, monkeypatch):
    """A chunk that two bands share comes in a slot."""
    cupy_on_cpu.install(monkeypatch, devices=3)
    found, right = product(memory, (600, 300, 400), device="cuda:0,1,2")
    assert right
    assert found.bytes_downloaded == found.plan.bytes_downloaded
    assert cupy_on_cpu.brought


@pytest.mark.parametrize(
    "options",
    [
        {"compressor": "zstd"},
        {"out_dtype": "float16"},
        {"out_dtype": "float64"},
    ],
)
def test_c_that_is_stored_otherwise(memory, options):
    _, right = product(memory, **options)
    assert right
    assert bool(cupy_on_cpu.brought) == ("out_dtype" in options)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("devices", [1, 3])
def test_what_a_narrower_type_does_not_hold_is_counted_once(memory, monkeypatch, fails, devices):
    """Also where parts are first brought in vain."""
    cupy_on_cpu.install(monkeypatch, devices=devices)
    if fails:
        real = files.background.Transfer.end
        monkeypatch.setattr(
            files.background.Transfer, "end", lambda self: real(self) and self._kept[0] is not None
        )
    a = RNG.integers(-9, 9, (500, 300)).astype("f4")
    a[::7] *= 1000
    make(memory / "a", a, compressors=None, chunks=(50, 50))
    found = ooc_gemm.multiply(
        str(memory / "a"), str(memory / "a"), str(memory / "c"), transpose_b=True, kernel="cublas",
        device="cuda:0,1,2" if devices > 1 else "cuda", compressor="none", chunks=(100, 80),
        out_dtype="float16", notice=lambda text: None,
    )  # fmt: skip
    with np.errstate(over="ignore"):
        want = (a @ a.T).astype("f2")
    assert np.array_equal(zarr.open_array(memory / "c")[:], want)
    assert found.overflowed == np.isinf(want).sum() > 0
    assert cupy_on_cpu.brought


@pytest.mark.parametrize("height", [300, 200])
def test_gram_and_what_is_finished_on_the_host(memory, monkeypatch, height):
    """C in one block has nothing that must be transposed."""
    a = RNG.integers(-9, 9, (300, 500)).astype("f4")
    make(memory / "a", a, compressors=None, chunks=(50, 50))
    real = prepare.make_plan

    def make_plan(problem, budget, rates):
        plan = real(problem, budget, rates)
        c, ring = outputs(problem)[0], rings(budget)[0]
        x = Candidate(c, height, height, plan.k_panels, plan.c_buffers, ring)
        return search.finish(problem, budget, rates, x)

    monkeypatch.setattr(prepare, "make_plan", make_plan)
    options = {"device": "cuda", "kernel": "cublas", "compressor": "none", "chunks": (100, 100)}
    for triangle in ("lower", None):
        ooc_gemm.gram(str(memory / "a"), str(memory / "c"), triangle=triangle, force=True, **options)
        want = np.tril(a @ a.T) if triangle else a @ a.T
        assert np.array_equal(zarr.open_array(memory / "c")[:], want)
        assert bool(cupy_on_cpu.brought) == (triangle is None and height == 300)


@pytest.mark.parametrize("what", ["use", "copy", "record", "make", "pin", "write"])
def test_what_cannot_be_brought_is_downloaded(memory, monkeypatch, what):
    if what == "write":
        real = files.background.Transfer.end
        ends = iter([True] * 3 + [False] * 4)
        monkeypatch.setattr(files.background.Transfer, "end", lambda self: real(self) and next(ends, True))
    else:
        sending = list(cupy_on_cpu.SENDING)
        sending[("use", "copy", "record", "make", "query", "pin").index(what)] = cupy_on_cpu.FAILS
        monkeypatch.setattr(driver, "_sending", lambda: tuple(sending))
    found, right = product(memory)
    assert right
    assert found.bytes_written == found.plan.bytes_written


def test_few_chunks_go_to_their_places_at_the_end(memory, monkeypatch):
    """The run waits for those. In memory there is nothing to flush, so others go there before."""
    settle, moved = FolderStaging.settle, []
    clock = itertools.count()

    def settled(self, chunks):
        moved.append(len(chunks))
        settle(self, chunks)

    monkeypatch.setattr(FolderStaging, "settle", settled)
    monkeypatch.setattr(publication, "time", SimpleNamespace(monotonic=lambda: 0.06 * next(clock)))
    _, right = product(memory)
    assert right
    assert sum(moved) == 25
    assert max(moved) < 5


def test_a_full_disk_is_told(memory, monkeypatch):
    """The way through a slot says what the matter is."""
    real = background.Transfer.__init__

    def nowhere(self, jobs, *rest, **named):
        of_c = "c" in Path(jobs[0].path).parts
        missing = [job._replace(path="/proc/version/x") for job in jobs] if of_c else jobs
        real(self, missing, *rest, **named)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(background.Transfer, "__init__", nowhere)
    monkeypatch.setattr(files, "write", full)
    with pytest.raises(ooc_gemm.StoreError, match="No space left"):
        product(memory)
