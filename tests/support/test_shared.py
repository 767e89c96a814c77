"""What holds for the whole process while any run needs it."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event

import cupy_on_cpu
import numpy as np
import pytest

import ooc_gemm
from ooc_gemm.engine.execute import SWITCH_SECONDS, quick_turns
from ooc_gemm.support.shared import Shared


def test_the_last_one_leaves():
    """Also where it came second, on another thread."""
    log, entered, leave = [], Event(), Event()

    @Shared
    @contextmanager
    def state():
        log.append("entered")
        try:
            yield
        finally:
            log.append("left")

    @state
    def second():
        entered.set()
        assert leave.wait(10)

    with ThreadPoolExecutor(1) as pool:
        with state:
            job = pool.submit(second)
            assert entered.wait(10)
        assert log == ["entered"]
        leave.set()
        job.result()
    assert log == ["entered", "left"]
    with pytest.raises(ZeroDivisionError), state:
        raise ZeroDivisionError
    assert log == ["entered", "left"] * 2


def test_threads_change_places_as_they_did_when_runs_that_overlap_have_ended():
    patience, meet = sys.getswitchinterval(), Barrier(2)

    @quick_turns
    def run(first):
        meet.wait(10)
        if not first:
            meet.wait(10)  # the first one has left
        return sys.getswitchinterval()

    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(run, False)
        assert run(True) == pytest.approx(SWITCH_SECONDS)
        meet.wait(10)
        assert later.result() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == patience


@pytest.mark.parametrize("call", ["multiply", "pca"])
def test_garbage_is_sought_among_new_objects_during_a_run(monkeypatch, call):
    """What others have frozen stays as it is."""
    cupy_on_cpu.install(monkeypatch)
    x, found = np.eye(60, dtype="f4"), []

    def run():
        found.clear()
        note = {"progress": lambda *_: found.append(gc.get_freeze_count())}
        if call == "multiply":
            ooc_gemm.multiply(x, x, device="cpu", **note)
        else:
            ooc_gemm.pca(x, 3, iterations=1, device="cuda", **note)
        return max(found), gc.get_freeze_count()

    assert gc.get_freeze_count(), "conftest.py has frozen what tests import"
    during, after = run()
    assert during == after > 1000
    gc.unfreeze()
    try:
        during, after = run()
        assert during > 1000
        assert after == 0
    finally:
        gc.freeze()
