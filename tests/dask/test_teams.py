"""Products that workers of a cluster make in teams: each piece is read from the store once, and handed to the
others that need it, whatever becomes of some of them."""

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import zarr
from conftest import make

pytest.importorskip("distributed")

import cupy_on_cpu
from launched import Killer, chunks, launched, more_are_done, patient, process
from slow_disk import SlowReads, StandsStill
from teamed import teamed
from worker_clusters import cluster

import ooc_gemm
import ooc_gemm.dask.team
import ooc_gemm.dask.workers
from ooc_gemm import StoreError
from ooc_gemm.run import prepare

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OPTIONS = {"device": "cpu", "memory_limit": "2GiB"}
RAW = {"chunks": (50, 40), "compressors": None}


@pytest.fixture(autouse=True)
def in_teams(monkeypatch):
    """Reading takes so long, and the network so little time, that plans have teams."""
    known = prepare.known_rates

    def slow_store(*arguments):
        return replace(known(*arguments), read=1e4, network=1e12)

    monkeypatch.setattr(prepare, "known_rates", slow_store)
    monkeypatch.setattr("ooc_gemm.planning.cost.TASK_SECONDS", 0.0)
    monkeypatch.setattr("ooc_gemm.planning.search._cut_along_k", lambda *arguments: [])


@pytest.fixture(scope="module")
def client():
    """Of six workers."""
    with cluster(6) as found:
        yield found


def integers(*shape, seed=0):
    """Whose products are exact in float32."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype("f4")


def stored(tmp_path, a, b, **layout):
    return [make(tmp_path / name, x, **(layout or RAW)) for name, x in (("a", a), ("b", b))]


def same(c, want):
    found = zarr.open_array(c, mode="r")[...]
    assert found.shape == want.shape
    assert (found == want).all()


def as_predicted(result, team):
    """Bytes are counted where they move."""
    assert result.plan.team == team
    assert result.bytes_read == result.plan.bytes_read
    assert result.bytes_exchanged == result.plan.bytes_exchanged > 0
    assert result.bytes_written == result.plan.bytes_written


def test_each_input_is_read_once(tmp_path, client):
    a, b = integers(230, 600), integers(600, 330, seed=1)
    paths = stored(tmp_path, a, b, chunks=(20, 30), compressors=None)
    result = ooc_gemm.dask.multiply(*paths, tmp_path / "c", client=client, chunks=(40, 40), **OPTIONS)
    same(tmp_path / "c", a @ b)
    as_predicted(result, (2, 3))
    assert (result.blocks, len(result.plan.groups())) == (6, 1)
    assert result.bytes_read == a.nbytes + b.nbytes
    assert result.bytes_exchanged == 2 * a.nbytes + b.nbytes
    assert result.to_dict()["bytes_exchanged"] == result.bytes_exchanged


def test_gram_in_teams(tmp_path, client):
    """Six workers make the lower half of C, three blocks down and three across; each strip of A is op(A) for
    some of them and op(B) for others."""
    a = integers(290, 600)
    path = make(tmp_path / "a", a, chunks=(20, 30), compressors=None)
    result = ooc_gemm.dask.gram(path, tmp_path / "c", client=client, chunks=(20, 20), **OPTIONS)
    same(tmp_path / "c", a @ a.T)
    as_predicted(result, (3, 3))
    assert result.plan.problem.symmetric
    assert result.bytes_read == a.nbytes


def test_elements_are_transformed_where_they_are_multiplied(tmp_path, client):
    """What workers hand to each other are elements as they are stored."""
    x = integers(300, 200)
    path = make(tmp_path / "x", x, chunks=(20, 30), compressors=None)
    with ooc_gemm.dask.on(client, memory_limit="2GiB", device="cpu"):
        found = ooc_gemm.cov(path, str(tmp_path / "c"), rowvar=False, chunks=(20, 20))
    as_predicted(found, (3, 3))
    want = np.cov(x.astype("f8"), rowvar=False)
    assert (np.abs(zarr.open_array(tmp_path / "c")[...] - want) <= 1e-4 * want.max()).all()  # NaN fails


@pytest.mark.parametrize("turned", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("layout", [RAW, {"chunks": (33, 57)}, {"chunks": (20, 15), "shards": (40, 60)}])
def test_layouts_and_operations(tmp_path, client, turned, layout):
    """A part of a chunk is a piece of its own. β·C is read by each worker for itself."""
    a, b, old = integers(130, 300), integers(300, 170, seed=1), integers(130, 170, seed=2)
    paths = stored(tmp_path, a.T if turned[0] else a, b.T if turned[1] else b, **layout)
    make(tmp_path / "c", old, chunks=(16, 23), compressors=None)
    result = ooc_gemm.dask.multiply(
        *paths, tmp_path / "c", client=client, transpose_a=turned[0], transpose_b=turned[1], beta=2,
        verify=True, **OPTIONS,
    )  # fmt: skip
    same(tmp_path / "c", a @ b + 2 * old)
    as_predicted(result, (2, 3))
    assert result.verified is True


@pytest.mark.slow
def test_small_rings_and_many_panels(tmp_path, client, monkeypatch):
    """Workers hold three pieces at a time, and wait for each other at most of them."""
    rings = ooc_gemm.planning.search.rings
    monkeypatch.setattr("ooc_gemm.planning.search.rings", lambda budget: rings(budget)[-1:])
    monkeypatch.setattr("ooc_gemm.planning.search.depths", lambda problem, budget: [64])
    a, b = integers(60, 400), integers(400, 70, seed=1)
    paths = stored(tmp_path, a, b, chunks=(17, 19), compressors=None)
    result = ooc_gemm.dask.multiply(*paths, tmp_path / "c", client=client, chunks=(20, 20), **OPTIONS)
    assert (result.plan.slots, result.plan.panel_count) == (3, 7)
    same(tmp_path / "c", a @ b)
    as_predicted(result, (2, 3))
    result = ooc_gemm.dask.gram(paths[0], tmp_path / "g", client=client, chunks=(20, 20), **OPTIONS)
    same(tmp_path / "g", a @ a.T)
    as_predicted(result, (3, 3))


@pytest.mark.slow
def test_several_groups(tmp_path, client, monkeypatch):
    """As where C is larger than the memory of all workers: groups are made one after the other."""
    monkeypatch.setattr("ooc_gemm.planning.search._best", teamed((2, 3), (32, 48)))
    a, b = integers(130, 90), integers(90, 210, seed=1)
    paths = stored(tmp_path, a, b)
    result = ooc_gemm.dask.multiply(*paths, tmp_path / "c", client=client, chunks=(16, 16), **OPTIONS)
    assert [len(group) for group in result.plan.groups()] == [6, 4, 6, 4, 3, 2]
    same(tmp_path / "c", a @ b)
    as_predicted(result, (2, 3))


def test_readers_have_as_much_to_read(tmp_path, client, monkeypatch):
    """Whatever the number of pieces of a panel."""
    monkeypatch.setattr("ooc_gemm.planning.search.depths", lambda problem, budget: [50])
    read = {}
    hand_over = ooc_gemm.dask.team.Seat.hand_over

    def counted(seat, place, values, takers):
        read.setdefault(place[0], {}).setdefault(seat.me, []).append(values.nbytes)
        hand_over(seat, place, values, takers)

    monkeypatch.setattr(ooc_gemm.dask.team.Seat, "hand_over", counted)
    a, b = integers(120, 600), integers(600, 120, seed=1)
    paths = [
        make(tmp_path / "a", a, chunks=(60, 50), compressors=None),
        make(tmp_path / "b", b, chunks=(50, 40), compressors=None),
    ]
    result = ooc_gemm.dask.multiply(*paths, tmp_path / "c", client=client, chunks=(60, 40), **OPTIONS)
    as_predicted(result, (2, 3))
    for each in read.values():
        totals = [sum(sizes) for sizes in each.values()]
        assert (len(totals), max(totals)) == (6, min(totals))


# ------------------------------------------------------------------------------------- those that are missing


def test_fewer_workers_than_a_team_has(tmp_path, client, monkeypatch):
    """The plan counts on more workers than there are."""
    limits = ooc_gemm.dask.workers.Workers.limits
    monkeypatch.setattr(
        ooc_gemm.dask.workers.Workers, "limits", lambda *given: replace(limits(*given), workers=8)
    )
    a, b = integers(230, 90), integers(90, 330, seed=1)
    result = ooc_gemm.dask.multiply(
        *stored(tmp_path, a, b), tmp_path / "c", client=client, chunks=(20, 20), **OPTIONS
    )
    assert np.prod(result.plan.team) == 8
    same(tmp_path / "c", a @ b)
    assert result.bytes_exchanged < result.plan.bytes_exchanged


@pytest.mark.slow
def test_a_worker_that_gives_nothing_is_left_out(tmp_path, client, monkeypatch):
    """It takes no part, and the others read the store themselves."""
    monkeypatch.setattr(ooc_gemm.dask.team, "PATIENCE", 0.5)
    monkeypatch.setattr(ooc_gemm.dask.team, "SLOWER", 0.0)
    first, waited = [], threading.Event()
    hand_over = ooc_gemm.dask.team.Seat.hand_over

    def stuck(seat, place, values, takers):
        first.append(seat.me)
        if seat.me == first[0] and not waited.is_set():
            waited.set()
            time.sleep(1.5)
        hand_over(seat, place, values, takers)

    monkeypatch.setattr(ooc_gemm.dask.team.Seat, "hand_over", stuck)
    a, b = integers(230, 600), integers(600, 330, seed=1)
    result = ooc_gemm.dask.multiply(
        *stored(tmp_path, a, b), tmp_path / "c", client=client, chunks=(40, 40), **OPTIONS
    )
    same(tmp_path / "c", a @ b)
    assert result.bytes_read > result.plan.bytes_read
    assert result.bytes_exchanged < result.plan.bytes_exchanged


@pytest.mark.slow
def test_workers_that_cannot_reach_each_other_read_the_store(tmp_path, client, monkeypatch):
    """None tries to reach another one again in a later group of blocks."""
    monkeypatch.setattr("ooc_gemm.planning.search._best", teamed((2, 3), (32, 48)))
    workers, tried = list(client.cluster.workers.values()), []
    addresses = {worker.address for worker in workers}

    def refusing(me, connect):
        async def connected(address, *arguments):
            if address not in addresses:
                return await connect(address, *arguments)
            tried.append((me, address))
            raise OSError("no route to host")

        return connected

    for worker in workers:
        monkeypatch.setattr(worker.rpc, "connect", refusing(worker.address, worker.rpc.connect))
    a, b = integers(130, 90), integers(90, 210, seed=1)
    options = {"client": client, "chunks": (16, 16), **OPTIONS}
    result = ooc_gemm.dask.multiply(*stored(tmp_path, a, b), tmp_path / "c", **options)
    same(tmp_path / "c", a @ b)
    assert (result.plan.team, len(result.plan.groups())) == ((2, 3), 6)
    assert result.bytes_exchanged == 0
    assert result.bytes_read > result.plan.bytes_read
    assert len(tried) == len(set(tried)) > 0


def test_a_fault_on_one_worker_ends_the_run_of_all(tmp_path, client):
    a, b = integers(230, 600), integers(600, 330, seed=1)
    paths = stored(tmp_path, a, b)
    broken = tmp_path / "b" / "c" / "3" / "5"
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"b: chunk c/3/5"):
        ooc_gemm.dask.multiply(*paths, tmp_path / "c", client=client, chunks=(40, 40), **OPTIONS)


def test_a_run_goes_on_in_teams(tmp_path, client, monkeypatch):
    """What is left of a group is made by as many workers as it has blocks."""
    monkeypatch.setattr("ooc_gemm.planning.search._best", teamed((2, 3), (48, 48)))
    a, b = integers(130, 90), integers(90, 290, seed=1)
    options = {"client": client, "chunks": (16, 16), **OPTIONS}
    paths = stored(tmp_path, a, b)

    def stop(fraction, plan, trace):
        if fraction > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ooc_gemm.dask.multiply(*paths, tmp_path / "c", progress=stop, **options)
    result = ooc_gemm.dask.multiply(*paths, tmp_path / "c", resume=True, **options)
    assert 0 < result.blocks_resumed < result.blocks
    same(tmp_path / "c", a @ b)
    as_predicted(result, (2, 3))


# ------------------------------------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def processes():
    """The client of four processes."""
    with cluster(4, processes=True, memory_limit="1GiB") as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("layout", [RAW, {"chunks": (100, 80), "compressors": "auto"}])
def test_four_processes_read_as_predicted(tmp_path, processes, layout):
    """And each input once: no chunk lies across the edge of a block."""
    a, b = integers(400, 600), integers(600, 480, seed=1)
    paths = stored(tmp_path, a, b, **layout)
    options = {"client": processes, "chunks": (50, 60), "device": "cpu", "memory_limit": "512MiB"}
    result = ooc_gemm.dask.multiply(*paths, tmp_path / "c", **options)
    same(tmp_path / "c", a @ b)
    as_predicted(result, (2, 2))
    assert result.bytes_exchanged == a.nbytes + b.nbytes
    files = [path for name in "ab" for path in (tmp_path / name / "c").rglob("*") if path.is_file()]
    assert result.bytes_read == sum(path.stat().st_size for path in files)


@pytest.mark.slow
def test_workers_of_this_machine_hand_over_encrypted(tmp_path):
    pytest.importorskip("cryptography")
    from ooc_gemm.dask.local_cluster import connected

    a, b = integers(430, 700), integers(700, 510, seed=1)
    paths = stored(tmp_path, a, b)
    with connected("local:4", "2GiB", "cpu") as (client, limit):
        assert client.scheduler.address.startswith("tls://")
        result = ooc_gemm.dask.multiply(
            *paths, tmp_path / "c", client=client, device="cpu", chunks=(50, 60), memory_limit=limit
        )
    same(tmp_path / "c", a @ b)
    as_predicted(result, (2, 2))


@pytest.mark.slow
def test_memory_stays_within_the_limit(tmp_path):
    """Pieces that are handed over are counted: the plan takes nearly all that it may."""
    a, b = integers(3000, 4000), integers(4000, 3000, seed=1)
    paths = stored(tmp_path, a, b, chunks=(1000, 1000), compressors=None)
    with cluster(4, processes=True, memory_limit="1GiB") as client:
        options = {"client": client, "device": "cpu", "chunks": (500, 500)}
        limit = "224MiB"
        result = ooc_gemm.dask.multiply(*paths, tmp_path / "c", memory_limit=limit, **options)
    same(tmp_path / "c", a @ b)
    assert np.prod(result.plan.team) > 1
    assert (result.bytes_read, result.bytes_exchanged) == (
        result.plan.bytes_read, result.plan.bytes_exchanged,
    )  # fmt: skip
    assert result.peak_host_bytes <= 224 << 20


@pytest.fixture
def many_steps(monkeypatch):
    """Workers make many blocks, each in many panels."""
    monkeypatch.setattr("ooc_gemm.planning.search._best", teamed((2, 2), (100, 120)))
    monkeypatch.setattr("ooc_gemm.planning.search.depths", lambda problem, budget: [64])


@pytest.mark.slow
def test_workers_are_killed(tmp_path, many_steps):
    """The others go on without them, and what they were making is made again. β·C is added once."""
    a, b, old = integers(230, 400), integers(400, 270, seed=1), integers(230, 270, seed=2)
    paths = stored(tmp_path, a, b)
    draw = np.random.default_rng()
    with patient(), cluster(4, processes=True, memory_limit="1GiB") as client:
        client.register_plugin(SlowReads())
        for run in range(2):
            c = tmp_path / f"c{run}"
            make(c, old, chunks=(50, 60), compressors=None)
            client.wait_for_workers(4, timeout=200)
            kill = Killer(list(client.run(os.getpid).values())[:2], draw.uniform(0.02, 0.6, 2))
            result = ooc_gemm.dask.multiply(
                *paths, c, client=client, beta=2, progress=kill, device="cpu", memory_limit="512MiB"
            )
            assert (result.plan.team, kill.left) == ((2, 2), [])
            same(c, a @ b + 2 * old)


@pytest.mark.slow
def test_the_client_is_killed_and_the_run_goes_on(tmp_path, monkeypatch):
    """Also in teams: β·C is added once."""
    a, b, old = integers(130, 90), integers(90, 170, seed=1), integers(130, 170, seed=2)
    paths, c = stored(tmp_path, a, b), tmp_path / "c"
    make(c, old, chunks=(16, 16), compressors=None)
    command = ["multiply", *paths, str(c), "--beta", "2", "-d", "cpu", "-Q", "--json", "-M", "600MiB"]
    with launched(tmp_path, monkeypatch, "SlowReads()") as (address, _):
        first = process("teamed", *command, "--scheduler", address, log=subprocess.PIPE)
        while chunks(c) < 20:  # of 99: the two blocks of a group have a few each
            more_are_done(c, first)
        first.kill()
        first.communicate()
        second = process("teamed", *command, "--scheduler", address, "--resume", log=subprocess.PIPE)
        said = second.communicate()[0].decode()
        assert second.returncode == 0, said
    done = json.loads(said[said.index("{") :])
    assert done["plan"]["team"] == [1, 2]
    assert 0 < done["blocks_resumed"] < done["blocks"]
    assert (done["bytes_read"], done["bytes_exchanged"]) == (
        done["plan"]["bytes_read"], done["plan"]["bytes_exchanged"],
    )  # fmt: skip
    same(c, a @ b + 2 * old)


@pytest.mark.slow
def test_a_worker_that_stands_still_holds_up_nobody(tmp_path, monkeypatch, many_steps):
    """It is stopped while it owes pieces to others, and goes on when they have made all other blocks."""
    monkeypatch.setattr(ooc_gemm.dask.team, "PATIENCE", 2.0)
    monkeypatch.setattr(ooc_gemm.dask.team, "SLOWER", 0.0)
    a, b = integers(300, 400), integers(400, 360, seed=1)
    paths = stored(tmp_path, a, b)
    with cluster(4, processes=True, memory_limit="1GiB") as client:
        client.register_plugin(StandsStill())
        first = min(client.run(lambda dask_worker: (dask_worker.name, os.getpid())).values())[1]
        seen, woken_at = [], []

        def wake(fraction, plan, trace):
            seen.append(fraction)
            if not woken_at and (fraction > 0.88 or len(seen) > 100):  # the others have made eight of nine
                os.kill(first, signal.SIGCONT)
                woken_at.append(fraction)

        result = ooc_gemm.dask.multiply(
            *paths, tmp_path / "c", client=client, progress=wake, chunks=(50, 60), device="cpu",
            memory_limit="512MiB",
        )  # fmt: skip
    same(tmp_path / "c", a @ b)
    assert result.bytes_read > result.plan.bytes_read
    assert woken_at[0] > 0.88


def test_devices_with_memory_of_their_own(tmp_path, monkeypatch):
    """What comes from others lies in slots, from which the device copies it."""
    cupy_on_cpu.install(monkeypatch)
    monkeypatch.setattr("ooc_gemm.planning.search._best", teamed((1, 2), (48, 32)))
    a, b = integers(90, 70), integers(70, 60, seed=1)
    paths = stored(tmp_path, a, b)
    with cluster(2) as client:
        result = ooc_gemm.dask.multiply(
            *paths, tmp_path / "c", client=client, chunks=(16, 16), device="cuda", memory_limit="2GiB"
        )
    same(tmp_path / "c", a @ b)
    as_predicted(result, (1, 2))
    assert result.peak_device_bytes > 0
    assert result.bytes_uploaded == result.plan.bytes_uploaded
