"""How workers of a team hand pieces to each other: on real workers, in memory and over TCP."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

distributed = pytest.importorskip("distributed")

from ooc_gemm.dask.desk import desk_of  # noqa: E402
from ooc_gemm.dask.team import Team, seated  # noqa: E402
from ooc_gemm.planning.schedule import Block  # noqa: E402
from ooc_gemm.support.errors import StoreError  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PLACE = ("a", 0, 10, 0, 100)
numbers = iter(range(1000))


@pytest.fixture(scope="module", params=["inproc://", "tcp://"])
def workers(request):
    """Three workers, which are threads of this process."""
    with distributed.LocalCluster(
        n_workers=3, threads_per_worker=1, processes=False, protocol=request.param, memory_limit="16GiB",
        dashboard_address=":0",
    ) as found:  # fmt: skip
        assert found.workers[0].address.startswith(request.param)
        for worker in found.workers.values():
            found.sync(answering, worker)
        yield list(found.workers.values())


async def answering(worker):
    """Have a worker answer, which happens in its event loop."""
    desk_of(worker)


@contextlib.contextmanager
def seats(workers, seconds=60.0, number=None):
    """The seats of a team of these workers."""
    blocks = tuple((worker.address, Block(i, 0, 1, i, 1)) for i, worker in enumerate(workers))
    team = Team(next(numbers) if number is None else number, blocks, seconds)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(seated(worker, "run", team, worker.address)) for worker in workers]


def values(seed=0):
    return np.random.default_rng(seed).integers(0, 255, (10, 100), np.uint8)


def test_every_worker_that_needs_a_piece_gets_it(workers):
    """Also of values that do not lie close together. Whoever has it waits until it has been copied."""
    with seats(workers) as (first, *others), ThreadPoolExecutor(3) as pool:
        slots = [np.zeros(1000, np.uint8) for _ in others]
        wide = np.repeat(values(), 2, axis=1)[:, ::2]
        handed = pool.submit(first.hand_over, PLACE, wide, {seat.me for seat in others})
        assert others[0].take(PLACE, first.me, slots[0]) == 1000
        assert not handed.done()
        assert pool.submit(others[1].take, PLACE, first.me, slots[1]).result(20) == 1000
        handed.result(20)
        for seat, slot in zip(others, slots, strict=True):
            assert (slot.reshape(10, 100) == values()).all()
            assert seat.bytes == 1000


def test_whoever_asks_first_waits(workers):
    with seats(workers[:2]) as (first, other), ThreadPoolExecutor(3) as pool:
        slots = [np.zeros(1000, np.uint8) for _ in range(2)]
        places = [(*PLACE, number) for number in range(2)]
        taken = [
            pool.submit(other.take, place, first.me, slot) for place, slot in zip(places, slots, strict=True)
        ]
        for number in (1, 0):
            first.hand_over(places[number], values(number), {other.me})
            assert taken[number].result(20) == 1000
            assert (slots[number].reshape(10, 100) == values(number)).all()


def test_a_worker_that_takes_nothing_is_left_out(workers):
    """Then neither waits for the other any more."""
    with seats(workers[:2], 0.3) as (first, other):
        first.hand_over(PLACE, values(), {other.me})
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(other.take, PLACE, first.me, np.zeros(1000, np.uint8)).result(20) == 0
            pool.submit(first.hand_over, (*PLACE, 1), values(), {other.me}).result(20)
            pool.submit(other.hand_over, (*PLACE, 2), values(), {first.me}).result(20)
        assert (first.bytes, other.bytes) == (0, 0)


def test_bytes_of_an_offer_that_has_ended_are_not_used(workers):
    """The slot holds another piece when a worker that was slow has copied it."""
    with seats(workers[:2], 0.5) as (first, other), ThreadPoolExecutor(1) as pool:
        slot = values().reshape(-1)
        handed = pool.submit(first.hand_over, PLACE, slot, {other.me})
        found, comm = other._wait(other._asked(PLACE, first.me))
        handed.result(20)
        slot[:] = 7
        try:
            other._wait(other._desk.thank(first.me, comm))
        except OSError:
            return
        assert (found.reshape(10, 100) == values()).all()


def test_a_team_that_is_over_gives_nothing(workers):
    """A worker that comes late finds that out at once."""
    number = next(numbers)
    with seats(workers[:2], number=number) as (first, _):
        pass
    team = Team(number, tuple((w.address, Block(i, 0, 1, i, 1)) for i, w in enumerate(workers)), 600.0)
    with seated(workers[2], "run", team, workers[2].address) as late, ThreadPoolExecutor(1) as pool:
        assert pool.submit(late.take, PLACE, first.me, np.zeros(1000, np.uint8)).result(20) == 0


def test_workers_that_leave_are_waited_for_no_longer(workers):
    """However long one would be patient."""
    blocks = tuple((worker.address, Block(i, 0, 1, i, 1)) for i, worker in enumerate(workers[:2]))
    team = Team(next(numbers), blocks, 600.0)
    with seated(workers[0], "run", team, workers[0].address) as first, ThreadPoolExecutor(1) as pool:
        with seated(workers[1], "run", team, workers[1].address):
            handed = pool.submit(first.hand_over, PLACE, values(), {workers[1].address})
        handed.result(20)


def test_a_worker_that_never_comes_is_left_out(workers):
    blocks = tuple((worker.address, Block(i, 0, 1, i, 1)) for i, worker in enumerate(workers[:2]))
    team = Team(next(numbers), blocks, 0.3)
    with seated(workers[0], "run", team, workers[0].address) as first, ThreadPoolExecutor(1) as pool:
        assert pool.submit(first.take, PLACE, workers[1].address, np.zeros(1000, np.uint8)).result(20) == 0


def test_partners_are_those_of_the_same_row_or_column():
    """Of a symmetric product, also those for which one's rows are columns."""
    blocks = [(i, j) for i in range(3) for j in range(4)]
    team = Team(0, tuple((f"{i}{j}", Block(0, i, 1, j, 1)) for i, j in blocks), 1.0)
    assert team.partners("12") == {"10", "11", "13", "02", "22"}
    lower = tuple((f"{i}{j}", Block(0, i, 1, j, 1)) for i, j in blocks if j <= i)
    assert Team(0, lower, 1.0, symmetric=True).partners("10") == {"00", "11", "20", "21"}


def test_who_waits_when_the_run_stops_is_woken(workers):
    with seats(workers[:2]) as (first, other), ThreadPoolExecutor(2) as pool:
        begun = threading.Barrier(3)

        def waits(function, *arguments):
            begun.wait(20)
            with pytest.raises(StoreError, match="has stopped"):
                function(*arguments)

        waiting = [
            pool.submit(waits, first.hand_over, PLACE, values(), {other.me}),
            pool.submit(waits, first.take, (*PLACE, 1), other.me, np.zeros(1000, np.uint8)),
        ]
        begun.wait(20)
        first.stop()
        for one in waiting:
            one.result(20)
