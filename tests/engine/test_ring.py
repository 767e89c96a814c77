"""The ring: what readers and the conductor wait for, and what they hand to each other."""

import contextlib
import threading
import time

import numpy as np
import pytest

import ooc_gemm
from ooc_gemm.engine import readers
from ooc_gemm.engine.readers import read, wait_for_all
from ooc_gemm.engine.ring import Ring, Slot, Stopped
from ooc_gemm.planning.schedule import Piece
from ooc_gemm.support.trace import Trace


def piece_number(row):
    return Piece("a", (0, 0), (row, row + 1), (0, 1), (0, 1), (0, 0), (1, 1))


class Guard:
    def synchronize(self):
        pass


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_readers_read_ahead_and_upload_in_turn(slots):
    turns = [range(1, 3), range(3, 3), range(3, 4), range(4, 101)]  # numbers of pieces
    ring = Ring([np.empty(1, np.uint8) for _ in range(slots)], (map(piece_number, turn) for turn in turns))
    held, most, opened, uploaded, lock = 0, 0, -1, [], threading.Lock()

    def read():
        nonlocal held, most
        with contextlib.suppress(Stopped):
            while True:
                slot, task = ring.acquire()
                number = task.piece.rows[0]
                with lock:
                    held += 1
                    most = max(most, held)
                time.sleep(0.001 * (number % 3))
                slot.view = slot.data
                buffer = ring.admit(slot, task)
                with lock:
                    uploaded.append((number, buffer, opened))
                    held -= 1
                ring.release(slot, task, Guard())

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    while held < min(slots, 4):  # pieces of three turns, before one is opened
        time.sleep(0.001)
    assert not uploaded
    for opened, turn in enumerate(turns):
        ring.open(opened + 10)
        ring.wait()
        assert sorted(number for number, *_ in uploaded if number in turn) == list(turn)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert sorted(number for number, *_ in uploaded) == list(range(1, 101))
    assert all(number in turns[turn] and buffer == turn + 10 for number, buffer, turn in uploaded)
    assert most == min(slots, 4)


def test_readers_do_not_wait_for_an_answer_that_takes_long():
    """They fill all slots meanwhile, and the conductor uploads what they have put aside."""
    numbers = range(8)
    ring = Ring([np.empty(1, np.uint8) for _ in range(6)], ([piece_number(n)] for n in numbers))
    others, full, met, uploaded = set(), threading.Event(), [], []

    class Store:
        asynchronous = False

        def start(self, piece, slot, onward):
            return lambda: self.read(piece.rows[0], slot)

        def read(self, number, slot):
            if number == 0:
                met.append(full.wait(20))
            else:
                others.add(number)
                if len(others) == 5:
                    full.set()
            return slot.reshape(1, 1), 1

    class Memory:
        def prepare(self, buffer, used=None):
            pass

        def upload(self, view, piece, buffer):
            uploaded.append((piece.rows[0], buffer))
            return Guard()

    args = ring, Memory(), {"a": Store()}, Trace(), 1, True
    threads = [threading.Thread(target=read, args=args) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in numbers:
        ring.open((number, -1))
        wait_for_all(ring, Memory())
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert met == [True]
    assert uploaded == [(number, number) for number in numbers]


def test_what_a_reader_failed_with_is_said_although_others_have_put_pieces_aside():
    ring = Ring([np.empty(1, np.uint8)], iter([[piece_number(0)]]))
    slot, task = ring.acquire()
    slot.view = slot.data
    assert ring.admit(slot, task, aside=True) is None
    ring.open((0, 0))
    ring.close(ooc_gemm.StoreError("chunk c/0/0 is gone"))
    with pytest.raises(ooc_gemm.StoreError, match="c/0/0 is gone"):
        wait_for_all(ring, None)


def test_what_is_kept_is_found_once_it_has_been_read():
    piece = piece_number(1)
    turns = [[piece._replace(kept=True)], [piece._replace(found=True)]]
    ring = Ring([np.empty(1, np.uint8)], iter(turns))
    slot, first = ring.acquire()
    assert ring.acquire(wait=False) is None  # there is no free slot
    again, second = ring.acquire()  # but it needs none
    assert again is slot
    admitted = []

    def use():
        admitted.append(ring.admit(slot, second))
        ring.release(slot, second, Guard())

    def conduct():
        ring.open(10)
        ring.wait()
        ring.open(11)
        ring.wait()

    threads = [threading.Thread(target=use), threading.Thread(target=conduct)]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    assert threads[0].is_alive()  # the first reader is at it
    slot.view = slot.data
    assert ring.admit(slot, first) == 10
    ring.release(slot, first, Guard())
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert admitted == [11]
    with pytest.raises(Stopped):
        ring.acquire()


def test_a_reader_that_fails_wakes_the_conductor():
    ring = Ring([np.empty(1, np.uint8)], iter([[piece_number(1)]]))
    ring.acquire()
    ring.close(OSError("no disk"))
    ring.open(0)
    with pytest.raises(OSError, match="no disk"):
        ring.wait()


def test_two_turns_are_open_at_a_time():
    ring = Ring([np.empty(1, np.uint8) for _ in range(3)], ([piece_number(n)] for n in range(2)))
    ring.open("first")
    ring.open("second")
    for number, buffers in enumerate(("first", "second")):
        slot, task = ring.acquire()
        slot.view = slot.data
        assert ring.admitted(task) == ring.admit(slot, task) == buffers
        ring.release(slot, task, Guard())
        assert task.turn == number
    ring.wait()
    ring.wait()


def test_readers_that_read_in_turn_wait_for_it():
    ring = Ring([np.empty(1, np.uint8) for _ in range(3)], ([piece_number(n)] for n in range(2)))
    assert ring.acquire(wait=False, early=False) is None
    came = []
    reader = threading.Thread(target=lambda: came.append(ring.acquire(early=False)))
    reader.start()
    reader.join(0.05)
    assert not came
    ring.open("first")
    reader.join(10)
    (_, task), *_ = came
    assert task.turn == 0
    assert ring.acquire(wait=False, early=False) is None
    assert ring.acquire(wait=False) is not None


@pytest.mark.parametrize("how", ["open", "close"])
def test_readers_that_wait_for_their_turn_are_woken(how):
    ring = Ring([np.empty(1, np.uint8)], ([piece_number(n)] for n in range(2)))
    ended = []

    def work():
        try:
            ended.append(ring.acquire(early=False))
        except Stopped:
            ended.append(None)

    reader = threading.Thread(target=work)
    reader.start()
    getattr(ring, how)(*["first"] * (how == "open"))
    reader.join(10)
    assert [found is not None for found in ended] == [how == "open"]


def test_what_is_made_ready_of_a_slot():
    """Nothing while another reader fills it: that one does it, and may have begun to copy."""
    slot = Slot(np.zeros(4096, "u1"))
    assert readers._used(slot) == 0
    slot.view = slot.data[16:100]
    assert readers._used(slot) == 100
    slot.view = slot.data[:64].reshape(8, 8)
    assert readers._used(slot) is None
