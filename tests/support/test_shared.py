"""What holds for the whole process while any run needs it."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event

import pytest

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
