"""Advice on chunks, and operands that are copied to better ones first."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make, ooc

import ooc_gemm
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.planning import layouts as layout
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.run import rates, rechunk
from ooc_gemm.run.prepare import prepare
from ooc_gemm.run.request import Operand, Request
from ooc_gemm.storage.read import inputs, raw
from ooc_gemm.storage.write.done import IN_MEMORY

MiB = 1 << 20
SLOW = Rates(1e11, 4e9, 1e9, 4e9, 4e9, shared=True, decode=1e6, piece_seconds=1e-3)
"""So slow at decoding and at small pieces that small arrays are as bad as large ones are."""

ROWS = {"chunks": (1, 600)}
LAYOUTS = {
    "rows": ROWS,
    "raw rows": {"chunks": (1, 600), "compressors": None},
    "strips": {"chunks": (500, 3), "compressors": None},
    "tiny": {"chunks": (8, 8), "compressors": None},
    "tiny zstd": {"chunks": (20, 15)},
    "misaligned": {"chunks": (130, 170)},
    "v2 Fortran": {"chunks": (60, 7), "zarr_format": 2, "order": "F"},
    "Fortran": {"chunks": (4, 600), "compressors": None,
                "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
}  # fmt: skip


class SlowReads(CPU):
    """The CPU, as `SLOW` describes it."""

    model = "of these tests"

    def rates(self, arithmetic):
        return SLOW


def numbers(shape, seed, dtype="f4"):
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(dtype)


def least(*args, **options):
    """The smallest memory limit."""
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.plan(*args, memory_limit=1, **options)
    return small.value.minimum_memory_limit


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a (500×600) in compressed rows, b (600×700) in good chunks; a CPU slow to read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CPU, "rates", SlowReads.rates)
    monkeypatch.setattr(CPU, "model", SlowReads.model, raising=False)
    monkeypatch.setattr(rates, "_known", lambda usual, *others: usual)
    make("a", numbers((500, 600), 1), **ROWS)
    make("b", numbers((600, 700), 2), chunks=(600, 700), compressors=None)
    return tmp_path


def multiply(a, b, limit, *options):
    """`multiply --rechunk` as JSON, on the CPU; c must be right, and nothing else left beside it."""
    before = set(os.listdir("."))
    done = ooc("multiply", a, b, "c", "-d", "cpu", "-f", "-M", limit, "--rechunk", "--json", *options)
    assert done.code == 0, done
    assert set(os.listdir(".")) == before | {"c"}
    left, right = zarr.open_array(a, mode="r")[:], zarr.open_array(b, mode="r")[:]
    left, right = (x.T if f"--transpose-{n}" in options else x for n, x in (("a", left), ("b", right)))
    assert np.array_equal(zarr.open_array("c", mode="r")[:], left.astype("f8") @ right)
    found = json.loads(done.out)
    assert found["bytes_read"] == found["plan"]["bytes_read"]
    assert found["bytes_written"] == found["plan"]["bytes_written"]
    assert f"Note: {found['plan']['advice']}\n" == done.err
    return found


# ------------------------------------------------------------------------------------------------- advice


def test_advice_on_real_stores(here):
    """Stored as advised, the job is predicted to take that much less, and there is nothing more to say."""
    limit = least("a", "b", device="cpu") + MiB
    plan = ooc_gemm.plan("a", "b", memory_limit=limit, device="cpu")
    assert plan.advice.startswith("chunks of 1×600 in A make this ")
    times = float(plan.advice.split("this ")[1].split()[0])
    chunks = tuple(map(int, plan.advice.split("raw ones of ")[1].split()[0].split("×")))
    make("better", zarr.open_array("a")[:], chunks=chunks, compressors=None)
    after = ooc_gemm.plan("better", "b", memory_limit=limit, device="cpu")
    assert plan.predicted_seconds / after.predicted_seconds == pytest.approx(times, rel=0.03)
    assert after.advice is None


def test_arrays_without_chunks_are_not_advised_on(here):
    a, b = numbers((500, 600), 1), numbers((600, 700), 2)
    assert ooc_gemm.plan(a, b, device=SlowReads()).advice is None
    assert "no other chunks are faster" in ooc_gemm.plan(a, b, device=SlowReads(), rechunk=True).advice


# -------------------------------------------------------------------------------------------------- copies


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, MiB // 4, 100 * MiB])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_reads_what_was_predicted(tmp_path, name, spare):
    values = numbers((500, 600), 3)
    source = inputs.open_input(make(tmp_path / "a", values, **LAYOUTS[name]))
    s = source.matrix
    t = replace(s, chunk_rows=64, chunk_cols=48, whole=False, stored=None)
    budgets = (Budget(int(t.chunk_bytes * 1.1**i), 0, None) for i in range(100))
    copy = next(filter(None, (layout.plan_copy("a", s, t, budget, SLOW) for budget in budgets)))
    if spare:
        copy = layout.plan_copy("a", s, t, Budget(sum(copy.ledger.values()) + spare, 0, None), SLOW)
    assert copy.rows % 64 == 0 or copy.rows == s.rows
    assert copy.cols % 48 == 0 or copy.cols == s.cols
    buffers = [copy.rows * copy.cols * 4, copy.readers * copy.slot_bytes, copy.writers * t.chunk_bytes]
    assert sum(buffers) <= sum(
        size for key, size in copy.ledger.items() if key not in ("baseline", "decoding")
    )
    made, read, written = rechunk._copied(copy, source, tmp_path / "copy")
    assert (read, written) == (copy.bytes_read, copy.bytes_written)
    assert isinstance(made.source, raw.RawSource)
    assert replace(made.matrix, fortran=False) == replace(t, fortran=False)
    found = rechunk._copied(replace(copy, source=made.matrix), made, tmp_path / "again")[0]
    assert found.matrix == t
    os.rename(tmp_path / "copy/zarr.json.partial", tmp_path / "copy/zarr.json")
    stored = zarr.open_array(tmp_path / "copy")[:]
    assert np.array_equal(stored.T if s.transposed else stored, values)
    if spare == 100 * MiB:
        assert read == s.stored_bytes  # all chunks once


def test_missing_chunks_become_the_fill_value(tmp_path):
    array = zarr.create_array(
        tmp_path / "a", shape=(50, 60), chunks=(20, 7), dtype="f4", compressors=None, fill_value=2
    )
    array[20:40, 20:40] = 1
    source = inputs.open_input(array)
    t = replace(source.matrix, chunk_rows=32, chunk_cols=32, stored=None)
    copy = layout.plan_copy("a", source.matrix, t, Budget(64 * MiB, 0, None), SLOW)
    _, read, _ = rechunk._copied(copy, source, tmp_path / "copy")
    assert read == copy.bytes_read == source.matrix.stored_bytes
    os.rename(tmp_path / "copy/zarr.json.partial", tmp_path / "copy/zarr.json")
    assert np.array_equal(zarr.open_array(tmp_path / "copy")[:], array[:])


# ---------------------------------------------------------------------------------------------- whole jobs


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if "tiny" in x else x for x in LAYOUTS]
)
def test_rechunk(here, name):
    make("a", numbers((500, 600), 1), overwrite=True, **LAYOUTS[name])
    limit = least("a", "b", device="cpu") + MiB
    options = {"memory_limit": limit, "device": "cpu", "rechunk": True}
    planned = prepare(Request(Operand("a"), Operand("b"), writes=False, **options).check())
    found = multiply("a", "b", limit)
    assert len(found["rechunked"]) == len(planned.copies)
    if not planned.copies:
        assert name in ("strips", "misaligned", "v2 Fortran")
        assert "nothing is rechunked: " in found["plan"]["advice"]
        return
    for made, copy in zip(found["rechunked"], planned.copies, strict=True):
        assert made["operand"] == made["name"] == copy.operand
        assert (made["bytes_read"], made["bytes_written"]) == (copy.bytes_read, copy.bytes_written)
        assert 0 < made["seconds"] < found["seconds"]
        assert sum(copy.ledger.values()) <= limit
    copying = sum(copy.seconds for copy in planned.copies)
    plain = ooc_gemm.plan("a", "b", memory_limit=limit, device="cpu")
    assert found["plan"]["predicted_seconds"] + copying < plain.predicted_seconds


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--transpose-a", "--transpose-b"]])
def test_rechunk_both(here, options):
    a, b = ("--transpose-" + name in options for name in "ab")
    make("x", numbers((600, 500)[:: 1 if a else -1], 1), chunks=(1, 600))
    make("y", numbers((600, 700)[:: -1 if b else 1], 2), chunks=(1, 700))
    flags = {"transpose_a": a, "transpose_b": b}
    found = multiply("x", "y", least("x", "y", device="cpu", **flags) + 3 * MiB, *options)
    assert [copy["operand"] for copy in found["rechunked"]] == ["a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
def test_rechunk_gram(here, transpose):
    values = numbers((600, 700) if transpose else (700, 600), 5)
    make("g", values, chunks=(600, 1) if transpose else (1, 600))
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.gram("g", memory_limit=1, device="cpu", transpose=transpose)
    limits = (small.value.minimum_memory_limit + spare * MiB // 2 for spare in range(8))
    options = {"device": "cpu", "transpose": transpose, "rechunk": True, "force": True}
    results = (ooc_gemm.gram("g", "k", memory_limit=limit, **options) for limit in limits)
    result = next(result for result in results if result.rechunked)
    assert [copy.operand for copy in result.rechunked] == ["a"]
    assert result.plan.problem.symmetric
    expected = values.T @ values if transpose else values @ values.T
    assert np.array_equal(zarr.open_array("k")[:], expected)
    assert result.bytes_read == result.plan.bytes_read
    assert sorted(os.listdir(".")) == ["a", "b", "g", "k"]


def test_rechunk_where_it_does_not_pay(here):
    found = multiply("a", "b", "4GiB")
    assert found["rechunked"] == []
    assert found["plan"]["advice"].startswith("nothing is rechunked: copying A takes ")


@pytest.mark.slow
def test_rechunk_for_other_results(here, monkeypatch):
    """An array in memory, a C in memory, a zarr.Array: the copy goes where there is room for it."""
    (here / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here / "temporary"))
    made, make_folder = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *args: made.append(args[2]) or make_folder(*args))
    limit = least("a", "b", device="cpu") + MiB
    options = {"device": "cpu", "rechunk": True}
    product = zarr.open_array("a")[:] @ zarr.open_array("b")[:]
    result = ooc_gemm.multiply("a", "b", memory_limit=limit + product.nbytes, **options)
    assert np.array_equal(result.array, product)
    assert [copy.operand for copy in result.rechunked] == ["a"]
    tight = least("a", "b", device="cpu", chunks=(50, 70)) + MiB
    held = math.prod(-(-m // n) for m, n in zip(product.shape, (50, 70), strict=True))
    held *= 50 * 70 * product.itemsize + IN_MEMORY  # a C in memory is in the ledger
    for store_, more in ((zarr.storage.MemoryStore(), held), (zarr.storage.LocalStore(here / "c"), 0)):
        c = zarr.create_array(
            store_, shape=product.shape, chunks=(50, 70), dtype=product.dtype, compressors=None
        )
        ooc_gemm.multiply("a", "b", c, memory_limit=tight + more, **options)
        assert np.array_equal(zarr.open_array(store_)[:], product)
    assert made == [here / "temporary", here / "temporary", here]
    assert not list((here / "temporary").iterdir())


def test_what_people_read(here):
    limit = least("a", "b", device="cpu") + MiB
    table = ooc("plan", "a", "b", "-d", "cpu", "-M", limit).out
    assert "\nlayout         chunks of 1×600 in A make this " in table
    assert max(map(len, table.splitlines())) <= 100
    done = ooc("multiply", "a", "b", "c", "-d", "cpu", "-M", limit)
    assert done.err.startswith("Note: chunks of 1×600 in A make this ")
    assert done.err.count("\n") == 1
    table = ooc("plan", "a", "b", "-d", "cpu", "-M", limit, "--rechunk").out
    assert "\nlayout         chunks of 1×600 in A are first copied to raw ones of " in table
    done = ooc("multiply", "a", "b", "c", "-f", "-d", "cpu", "-M", limit, "--rechunk")
    assert "Note: chunks of 1×600 in A are first copied to raw ones of " in done.err
    assert done.out.splitlines()[-1].startswith("rechunked a first: ")
    assert "First copy A or B to better chunks" in " ".join(ooc("multiply", "--help").out.split())


# ------------------------------------------------------------------------------------------------- failures


def test_no_room_for_a_copy(here, monkeypatch):
    limit = least("a", "b", device="cpu") + MiB
    command = "multiply", "a", "b", "c", "-d", "cpu", "-M", limit, "--rechunk"
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
        done = ooc(*command)
    assert done.code == 2
    assert (
        done.err.startswith("Error: rechunking takes 1200000 bytes in ") or "where 1000 are free" in done.err
    )

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", refuse)
        done = ooc(*command)
    assert done.code == 2
    assert "no copy can be made in" in done.err
    assert sorted(os.listdir(".")) == ["a", "b"]
    assert ooc(*command).code == 0


def test_a_copy_that_fails_leaves_nothing(here):
    limit = least("a", "b", device="cpu") + MiB
    held = Path("a/c/250/0").read_bytes()
    Path("a/c/250/0").write_bytes(held[: len(held) // 2])
    done = ooc("multiply", "a", "b", "c", "-d", "cpu", "-M", limit, "--rechunk")
    assert done.code == 1
    assert "a: chunk c/250/0 " in done.err
    assert sorted(os.listdir(".")) == ["a", "b"]


def test_a_multiplication_that_fails_leaves_no_copy(here):
    make("b", numbers((600, 700), 2), chunks=(60, 700), compressors=None, overwrite=True)
    os.truncate("b/c/3/0", 100)
    limit = least("a", "b", device="cpu") + MiB
    done = ooc("multiply", "a", "b", "c", "-d", "cpu", "-M", limit, "--rechunk")
    assert done.code == 1
    assert "b: chunk c/3/0 holds 100 bytes" in done.err
    assert sorted(os.listdir(".")) == ["a", "b", "c"]


# ---------------------------------------------------------------------------------------- as a process

PROCESS = """
import sys, time
from ooc_gemm import cli
from ooc_gemm.storage.write import target
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.planning.machine import Rates
from ooc_gemm.run import rates, rates_first
CPU.rates = lambda self, arithmetic: Rates(
    1e11, 4e9, 1e9, 4e9, 4e9, shared=True, decode=1e6, piece_seconds=1e-3
)
rates._known, rates_first.SHARE = lambda usual, *others: usual, 0.0  # not those of this machine
write = target.Target.write
target.Target.write = lambda *args: time.sleep(float(sys.argv[1])) or write(*args)
cli.main(sys.argv[2:])
"""


def process(folder, delay, *args):
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(delay), *map(str, args)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.slow
def test_the_process_stays_within_the_limit(tmp_path):
    ooc_gemm.random(str(tmp_path / "a"), (2000, 2000), chunks=(1, 2000), compressor="zstd")
    ooc_gemm.random(str(tmp_path / "b"), (2000, 2000), chunks=(500, 500), seed=1)
    out, _ = process(tmp_path, 0, "plan", "a", "b", "-M", 1, "-d", "cpu", "--json").communicate()
    for limit in (json.loads(out)["minimum_memory_limit"] + 2 * MiB, 150 * MiB):
        job = process(
            tmp_path, 0, "multiply", "a", "b", "c", "-f", "-M", limit, "-d", "cpu", "--rechunk", "--json"
        )
        out, said = job.communicate()
        assert job.returncode == 0, said
        found = json.loads(out)
        assert [copy["operand"] for copy in found["rechunked"]] == ["a"]
        assert found["peak_host_bytes"] <= limit
        assert found["bytes_read"] == found["plan"]["bytes_read"]
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


@pytest.mark.slow
def test_ctrl_c_while_copying(tmp_path):
    ooc_gemm.random(str(tmp_path / "a"), (2000, 2000), chunks=(1, 2000), compressor="zstd")
    ooc_gemm.random(str(tmp_path / "b"), (2000, 2000), chunks=(500, 500), seed=1)
    job = process(tmp_path, 0.2, "multiply", "a", "b", "c", "-M", 150 * MiB, "-d", "cpu", "--rechunk")
    while not list(tmp_path.glob(".ooc-gemm-*/a/c/*/*")):
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=200)
    assert job.returncode == 130
    assert "Interrupted" in said
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
