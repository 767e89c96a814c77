"""Slots go round: in order, never more than there are, and nobody waits for ever."""

import threading
import time

import numpy as np
import pytest

from ooc_gemm.ring import Ring, Stopped


class Guard:
    """An event that completes when told to."""

    def __init__(self, done=True):
        self.done = threading.Event()
        if done:
            self.done.set()

    def synchronize(self):
        assert self.done.wait(20)


def ring(slots, tasks):
    return Ring([np.zeros(8, np.uint8) for _ in range(slots)], iter(range(tasks)))


def start(work, count=1):
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "somebody waits for ever"


@pytest.mark.parametrize(("slots", "readers"), [(1, 1), (1, 4), (2, 4), (5, 3), (8, 8)])
def test_slots_are_handed_on_in_order_and_never_more_than_there_are(slots, readers):
    r, lock, out = ring(slots, 200), threading.Lock(), [0, 0]

    def read():
        rng = np.random.default_rng(threading.get_ident())
        try:
            while True:
                slot, task = r.acquire()
                with lock:
                    out[0] += 1
                    out[1] = max(out)
                if rng.random() < 0.2:
                    time.sleep(0.001)
                slot.view = task
                r.fill(slot)
        except Stopped:
            pass

    threads = start(read, readers)
    seen = []
    for _ in range(200):
        slot = r.take()
        seen.append(slot.view)
        with lock:
            out[0] -= 1
        r.release(slot, Guard())
    r.close()
    join(threads)
    assert seen == list(range(200))
    assert out[1] <= slots


def test_readers_stop_when_all_slots_are_full():
    r, read = ring(3, 100), []

    def work():
        try:
            while True:
                slot, task = r.acquire()
                read.append(task)
                r.fill(slot)
        except Stopped:
            pass

    threads = start(work, 2)
    time.sleep(0.1)
    assert sorted(read) == [0, 1, 2]
    r.release(r.take(), Guard())
    time.sleep(0.1)
    assert sorted(read) == [0, 1, 2, 3]
    r.close()
    join(threads)


def test_a_slot_is_not_written_before_its_guard():
    r, guard, got = ring(1, 2), Guard(done=False), threading.Event()
    slot, _ = r.acquire()
    r.fill(slot)
    r.release(r.take(), guard)

    def work():
        r.acquire()
        got.set()

    threads = start(work)
    assert not got.wait(0.1)
    guard.done.set()
    join(threads)
    assert got.is_set()


def test_a_waiting_guard_does_not_hold_up_others():
    """Whoever waits for an event does not hold the lock."""
    r, guard = ring(2, 4), Guard(done=False)
    for _ in range(2):
        slot, _ = r.acquire()
        r.fill(slot)
    r.release(r.take(), guard)
    threads = start(lambda: r.fill(r.acquire()[0]))
    time.sleep(0.05)
    r.release(r.take(), Guard())
    slot, task = r.acquire()
    assert task == 3
    guard.done.set()
    join(threads)
    r.take()


def test_the_end_of_the_tasks_stops_readers():
    r = ring(3, 1)
    r.acquire()
    for _ in range(2):
        with pytest.raises(Stopped):
            r.acquire()


@pytest.mark.parametrize("error", [None, OSError("no disk")])
def test_closing_wakes_everybody(error):
    r, seen = ring(1, 10), []
    r.acquire()

    def acquire():
        try:
            r.acquire()
        except BaseException as found:
            seen.append(type(found))

    def take():
        try:
            r.take()
        except BaseException as found:
            seen.append(type(found))

    threads = start(acquire, 3) + start(take)
    time.sleep(0.05)
    r.close(error)
    join(threads)
    assert sorted(kind.__name__ for kind in seen) == sorted(
        ["Stopped", "Stopped", "Stopped", "OSError" if error else "Stopped"]
    )


def test_the_first_error_is_the_one_told():
    r = ring(1, 1)
    r.close(OSError("first"))
    r.close(OSError("second"))
    r.close()
    with pytest.raises(OSError, match="first"):
        r.take()
