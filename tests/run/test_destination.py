"""C is begun while the first panels are read; what is done while the last blocks are written."""

import _thread
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.engine import writers
from ooc_gemm.run import destination
from ooc_gemm.storage.io import files
from ooc_gemm.storage.read.raw import RawSource
from ooc_gemm.storage.read.source import Opened
from ooc_gemm.storage.write import opening
from ooc_gemm.storage.write.publication import Publication
from ooc_gemm.support.errors import InputError


@pytest.fixture(params=["on disk", "in memory"])
def folder(request, tmp_path):
    if request.param == "on disk":
        yield tmp_path
        return
    if not files.in_background("/dev/shm"):
        pytest.skip("there are no files in memory here, or there was no C compiler")
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-test-", dir="/dev/shm") as name:
        yield Path(name)


def test_inputs_are_looked_at_and_chunks_put_in_place(folder, monkeypatch):
    """The writes of the last block wait until inputs were looked at, and in memory until the chunks before
    have their names."""
    x = np.random.default_rng(0).integers(-9, 9, (300, 200)).astype("f4")
    make(folder / "x", x, chunks=(50, 50), compressors=None)
    in_memory, waits = files.in_background(folder), threading.Event()
    write, check, save = writers.write, Opened.check_unchanged, Publication.save

    def writing(session, target, block, *args):
        if block.last:
            assert waits.wait(30), "nothing is done before the last block is written"
        write(session, target, block, *args)

    def checked(self):
        check(self)
        if not in_memory:
            waits.set()

    def saved(self, *args, **options):
        save(self, *args, **options)
        waits.set()

    monkeypatch.setattr("ooc_gemm.engine.execute.write", writing)
    monkeypatch.setattr(Opened, "check_unchanged", checked)
    monkeypatch.setattr(Publication, "save", saved)
    ooc_gemm.multiply(folder / "x", folder / "x", folder / "c", transpose_b=True, device="cpu")
    assert np.array_equal(zarr.open_array(folder / "c")[...], x @ x.T)


@pytest.fixture
def started(folder, monkeypatch):
    """Makes `x` in the folder, and returns an event that is set when it is read."""
    read = threading.Event()
    real = RawSource.start

    def reading(*args, **options):
        read.set()
        return real(*args, **options)

    monkeypatch.setattr(RawSource, "start", reading)
    make(folder / "x", np.ones((300, 200), "f4"), chunks=(50, 50), compressors=None)
    return read


def product(folder, **options):
    x = folder / "x"
    return ooc_gemm.multiply(x, x, folder / "c", transpose_b=True, device="cpu", **options)


def test_c_is_begun_while_panels_are_read(folder, started, monkeypatch):
    real = opening.create_target

    def create(*args, **options):
        assert started.wait(30), "nothing is read before C is begun"
        return real(*args, **options)

    monkeypatch.setattr(destination.opening, "create_target", create)
    product(folder)
    assert np.array_equal(zarr.open_array(folder / "c")[...], np.full((300, 300), 200, "f4"))


def test_panels_are_multiplied_while_c_is_begun(folder, started, monkeypatch):
    """All of them, as far as there is memory for sums."""
    real, multiply, last = opening.create_target, CPUSession.multiply, threading.Event()

    def create(*args, **options):
        assert last.wait(30), "multiplying waits for C"
        return real(*args, **options)

    def multiplied(session, block, panel, *args, **options):
        multiply(session, block, panel, *args, **options)
        if panel[1] == 200:
            last.set()

    monkeypatch.setattr(destination.opening, "create_target", create)
    monkeypatch.setattr(CPUSession, "multiply", multiplied)
    product(folder)
    assert np.array_equal(zarr.open_array(folder / "c")[...], np.full((300, 300), 200, "f4"))


def test_a_c_that_cannot_be_begun_ends_the_run(folder, started, monkeypatch):
    def create(*args, **options):
        assert started.wait(30)
        options["notice"]("what stood there is removed")
        raise InputError("C cannot be created; choose another place")

    monkeypatch.setattr(destination.opening, "create_target", create)
    before, said = set(threading.enumerate()), []
    with pytest.raises(InputError, match="cannot be created; choose another place"):
        product(folder, notice=said.append)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    assert said == ["what stood there is removed"]
    assert sorted(path.name for path in folder.iterdir()) == ["x"]


def test_an_input_that_cannot_be_read_while_c_is_begun(folder, started, monkeypatch):
    """What is left of C is what any failed run leaves."""
    real, failed = opening.create_target, threading.Event()

    def create(*args, **options):
        assert failed.wait(30)
        return real(*args, **options)

    def reading(*args, **options):
        failed.set()
        raise OSError(5, "the disk is broken")

    monkeypatch.setattr(destination.opening, "create_target", create)
    monkeypatch.setattr(RawSource, "start", reading)
    with pytest.raises(Exception, match="the disk is broken"):
        product(folder)
    monkeypatch.undo()
    assert ooc_gemm.multiply(
        folder / "x", folder / "x", folder / "c", transpose_b=True, device="cpu", resume=True
    ).blocks
    assert np.array_equal(zarr.open_array(folder / "c")[...], np.full((300, 300), 200, "f4"))


def test_ctrl_c_while_c_is_begun(folder, started, monkeypatch):
    """C is begun all the same, so it can be continued."""
    real = opening.create_target

    def create(*args, **options):
        time.sleep(0.2)  # until the other thread waits
        _thread.interrupt_main()
        time.sleep(0.2)
        return real(*args, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
    try:
        with monkeypatch.context() as patched:
            patched.setattr(destination.opening, "create_target", create)
            with pytest.raises(KeyboardInterrupt):
                product(folder)
    finally:
        signal.signal(signal.SIGINT, before)
    product(folder, resume=True)
    assert np.array_equal(zarr.open_array(folder / "c")[...], np.full((300, 300), 200, "f4"))


@pytest.mark.parametrize("near", [True, False])
def test_who_begins_c(folder, started, monkeypatch, near):
    """The user's function is called on the user's thread. Ctrl-C interrupts that thread, so another one
    begins C in a folder. Nobody could stop a thread that waits for a store which does not answer."""
    real, threads = opening.create_target, []

    def create(*args, **options):
        threads.append(threading.current_thread())
        options["notice"]("something about C")
        return real(*args, **options)

    monkeypatch.setattr(destination.opening, "create_target", create)
    if not near:
        monkeypatch.setattr(destination.addresses, "local_path", lambda spec: None)

    def notice(text):
        threads.append(threading.current_thread())
        assert text == "something about C"

    x = folder / "x"
    ooc_gemm.multiply(x, x, folder / "c", transpose_b=True, device="cpu", notice=notice)
    assert [thread is threading.main_thread() for thread in threads] == [not near, True]
