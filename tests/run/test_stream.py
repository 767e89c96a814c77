"""Passes over operands: everything is read once, added in order, within the limit that was given."""

import math
import subprocess
import sys
import threading

import numpy as np
import pytest
from arrays import LAYOUTS, matrix
from conftest import make

import ooc_gemm
from ooc_gemm import BudgetError, StoreError
from ooc_gemm.run.operands import open_operand
from ooc_gemm.run.stream import Needs, Panels, Pieces

LIMIT = 2 << 30
SHAPE = (133, 71)


def operand(kind, values, folder):
    """The values behind an input of some kind."""
    if kind == "numpy":
        return values
    if kind == "dask":
        return pytest.importorskip("dask.array").from_array(values, chunks=(100, 50))
    if kind == "xarray":
        return pytest.importorskip("xarray").DataArray(values, dims=("row", "column"))
    if kind == "h5py":
        file = pytest.importorskip("h5py").File(folder / "a.h5", "w")
        return file.create_dataset("a", data=values, chunks=(64, 50), compression="gzip")
    return make(folder / "a", values, **LAYOUTS[kind])


KINDS = ["numpy", "dask", "xarray", "h5py", *LAYOUTS]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_element_comes_once(tmp_path, kind, transpose):
    values = matrix(SHAPE, "f4", 1)
    opened = open_operand(operand(kind, values, tmp_path), "A")
    opened = opened.transpose() if transpose else opened
    expected, seen, fractions = values.T if transpose else values, [], []
    found, times = np.zeros(expected.shape, "f4"), np.zeros(expected.shape, int)

    def add(part):
        piece, rows, cols = part
        found[slice(*rows), slice(*cols)] = piece
        times[slice(*rows), slice(*cols)] += 1

    pieces = Pieces(opened, LIMIT, "test", Needs())
    pieces.each(lambda piece, rows, cols: (piece.copy(), rows, cols), add, fractions.append)
    np.testing.assert_array_equal(found, expected)
    assert (times == 1).all()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1

    panels = Panels(opened, "f8", LIMIT, "test", Needs())
    panels.each(lambda panel, rows: (panel.copy(), rows), seen.append)
    assert [rows[0] for _, rows in seen] == list(range(0, len(expected), panels.height))
    np.testing.assert_array_equal(np.vstack([panel for panel, _ in seen]), expected.astype("f8"))
    if opened.matrix.whole and kind not in ("dask", "h5py", "xarray"):
        assert pieces.bytes_read == panels.bytes_read == opened.matrix.stored_bytes


@pytest.mark.parametrize("kind", ["rows", "zstd", "shards", "v2-fortran-encoded", "numpy"])
@pytest.mark.parametrize("transpose", [False, True])
def test_no_chunk_is_read_twice_however_small_the_panels(tmp_path, kind, transpose, monkeypatch):
    monkeypatch.setattr("ooc_gemm.run.stream.PANEL_BYTES", 2000)
    values = matrix(SHAPE, "f4", 2)
    opened = open_operand(operand(kind, values, tmp_path), "A")
    opened = opened.transpose() if transpose else opened
    panels, seen = Panels(opened, "f4", LIMIT, "test", Needs()), []
    panels.each(lambda panel, rows: panel.copy(), seen.append)
    np.testing.assert_array_equal(np.vstack(seen), values.T if transpose else values)
    assert panels.height < len(seen[0]) * 2
    pieces = Pieces(opened, LIMIT, "test", Needs())
    pieces.each(lambda *args: None, lambda found: None)
    assert panels.bytes_read == pieces.bytes_read


@pytest.mark.parametrize("dtype", ["i1", "i8", "f2", "f4", "f8"])
def test_panels_are_shifted_in_their_type(dtype):
    values = matrix((50, 9), dtype, 3)
    shift = np.linspace(-3, 3, 9)
    panels, seen = Panels(open_operand(values, "A"), "f8", LIMIT, "test", Needs()), []
    panels.each(lambda panel, rows: panel.copy(), seen.append, shift=shift)
    np.testing.assert_allclose(np.vstack(seen), values.astype("f8") - shift, rtol=1e-15)


def test_results_are_added_in_order_by_several_threads(tmp_path):
    opened = open_operand(make(tmp_path / "a", matrix((200, 20), "f4", 4), **LAYOUTS["tiny"]), "A")
    pieces, order, names = Pieces(opened, LIMIT, "test", Needs()), [], set()
    together = threading.Barrier(pieces.threads)

    def work(piece, rows, cols):
        if rows[0] == 0 and cols[0] < 5 * 4:
            together.wait(30)  # nobody begins a second piece before all have begun one
        names.add(threading.current_thread().name)
        return rows, cols

    pieces.each(work, order.append)
    assert order == sorted(order)
    assert len(order) == math.ceil(200 / 7) * 4
    assert len(names) == pieces.threads > 1


class Oops(Exception):
    pass


@pytest.mark.parametrize("where", ["work", "add", "progress"])
def test_an_error_ends_the_pass(tmp_path, where):
    """Also threads that wait for their turn behind the one that failed."""
    opened = open_operand(make(tmp_path / "a", matrix((200, 20), "f4", 5), **LAYOUTS["tiny"]), "A")
    calls = []

    def at(name):
        def called(*args):
            calls.append(name)
            if name == where and calls.count(name) == 3:
                raise Oops

        return called

    with pytest.raises(Oops):
        Pieces(opened, LIMIT, "test", Needs()).each(at("work"), at("add"), at("progress"))
    assert calls.count("add") <= calls.count("work") < 100


def test_a_chunk_that_cannot_be_read(tmp_path):
    path = make(tmp_path / "a", matrix(SHAPE, "f4", 6), **LAYOUTS["zstd"])
    opened = open_operand(path, "A")
    (tmp_path / "a" / "c" / "2" / "1").write_bytes(b"no frame")
    for passes in (Pieces(opened, LIMIT, "test", Needs()), Panels(opened, "f4", LIMIT, "test", Needs())):
        with pytest.raises(StoreError, match="chunk c/2/1"):
            passes.each(lambda *args: None, lambda found: None)


@pytest.mark.parametrize("kind", ["rows", "zstd", "numpy"])
@pytest.mark.parametrize("make_pass", [Pieces, lambda opened, *rest: Panels(opened, "f8", *rest)])
def test_a_limit_that_is_too_small(tmp_path, kind, make_pass):
    opened = open_operand(operand(kind, matrix(SHAPE, "f4", 7), tmp_path), "A")
    needs = Needs(fixed=10**6, thread=10**5, element=8)
    with pytest.raises(BudgetError, match=r"too small to test .*the smallest that would do is") as found:
        make_pass(opened, 1000, "test", needs)
    least = found.value.minimum_memory_limit
    with pytest.raises(BudgetError):
        make_pass(opened, least - 1, "test", needs)
    fits, seen = make_pass(opened, least, "test", needs), []
    assert fits.threads == 1
    fits.each(lambda values, *place: values.astype("f8").sum(), seen.append)
    assert sum(seen) == pytest.approx(matrix(SHAPE, "f4", 7).sum(dtype="f8"), abs=1e-3)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_panels_near_the_smallest_limit_have_many_rows(monkeypatch, dtype):
    """A second thread, whose fixed bytes do not fit, is no reason for panels of one row."""
    monkeypatch.setattr("ooc_gemm.run.stream.baseline_bytes", lambda least: 50 << 20)
    opened, needs = open_operand(np.zeros((300_000, 3), dtype), "A"), Needs(thread=4 << 20)
    with pytest.raises(BudgetError) as error:
        Panels(opened, "f8", 1000, "test", needs)
    least, heights = error.value.minimum_memory_limit, []
    for more in range(0, 32 << 20, 100_000):
        panels = Panels(opened, "f8", least + more, "test", needs)
        heights.append(panels.height)
        assert sum(panels.cut.ledger.values()) <= least + more
    assert min(heights) >= 9000
    assert heights[-1] == 300_000 == max(heights)
    assert panels.threads >= 2


def test_empty_matrices():
    for shape in ((0, 5), (5, 0), (0, 0)):
        opened, seen = open_operand(np.zeros(shape), "A"), []
        Pieces(opened, LIMIT, "test", Needs()).each(lambda *args: args, seen.append)
        Panels(opened, "f4", LIMIT, "test", Needs()).each(lambda *args: 1, seen.append, None, seen.append)
        assert len(seen) == (2 if shape == (5, 0) else 0)


PROGRAM = """
import sys, numpy as np
from ooc_gemm.run.operands import open_operand
from ooc_gemm.run.stream import Needs, Panels, Pieces
from ooc_gemm.support.memory import peak_resident_bytes
opened, limit = open_operand(sys.argv[1], "A"), int(sys.argv[2])
panels = Panels(opened, "f8", limit, "test", Needs(element=8))
pieces = Pieces(opened, limit, "test", Needs(element=16))
for one in (panels, pieces):
    one.each(lambda values, *place: values.astype("f8").sum(), lambda found: None)
print(peak_resident_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"chunks": (2048, 1000)}, {"chunks": (1024, 700), "compressor": "zstd"}])
@pytest.mark.parametrize("limit", [130 << 20, 180 << 20])
def test_the_process_keeps_within_its_limit(tmp_path, layout, limit):
    path = str(tmp_path / "a")
    ooc_gemm.random(path, (50_000, 1000), distribution="uniform", **layout)
    command = [sys.executable, "-c", PROGRAM, path, str(limit)]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peak <= limit < 50_000 * 1000 * 4
