"""Functions that workers of a cluster call with parts of the work."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import make

pytest.importorskip("distributed")

from launched import patient
from worker_clusters import cluster

from ooc_gemm import BudgetError, DeviceError, InputError, StoreError
from ooc_gemm.dask.dealing import DEATHS
from ooc_gemm.dask.elsewhere import CLIENT_BYTES, OnWorkers
from ooc_gemm.run.operands import open_operand
from ooc_gemm.run.pool import InOrder, parts_of
from ooc_gemm.storage.write.share import RUN, run_folder_beside
from ooc_gemm.support import errors

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
GiB = 1 << 30


def every_error():
    """All errors that this package raises on purpose."""
    found, left = [], [errors.Error]
    while left:
        found.append(left.pop())
        left += found[-1].__subclasses__()
    return found


@pytest.fixture(scope="module")
def client():
    with cluster(2) as found:
        yield found


def pool_of(client, tmp_path, **inputs):
    return OnWorkers(client, "2GiB", "cpu").pool(inputs, ("out", tmp_path / "out"), "auto", 2 * GiB, False)


def total(here, shared, rows):
    """Of some rows of x. The first of several parts waits until the client has taken another one."""
    opened = here.inputs["x"].window(rows, (0, here.inputs["x"].shape[1]))
    s = opened.matrix
    while rows[0] == 0 and shared["waits"] and not (here.folder / "other").exists():
        time.sleep(0.01)
    here.trace.bytes["read"] += s.rows * s.cols * s.itemsize
    here.tell(0.5)
    return {"rows": rows, "sum": shared["by"] * (rows[1] - rows[0]), "vector": np.arange(rows[0], rows[1])}


def test_each_part_is_taken_once_and_in_order_where_that_is_asked_for(tmp_path, client):
    x = make(tmp_path / "x", np.ones((100, 8), "f4"), chunks=(16, 8))
    parts = parts_of(open_operand(x, "x"), 5)
    assert parts == [(0, 32), (32, 64), (64, 96), (96, 100)]
    order, found, told = [], [], []
    with pool_of(client, tmp_path, x=x) as pool:
        assert (pool.count, pool.hardware.name) == (2, "cpu on 2 workers")
        assert pool.ask(total, {"by": 1, "waits": False}, (0, 16))["sum"] == 16
        assert sorted(path.name for path in tmp_path.iterdir()) == ["x"], "asking makes no folder"
        adding = InOrder(lambda number, one: found.append((number, one)))

        def take(number, read):
            order.append(number)
            adding(number, read)
            (folder,) = set(tmp_path.iterdir()) - {Path(x)}
            (folder / "other").touch()

        pool.each(total, {"by": 2, "waits": True}, parts, take, told.append)
        (folder,) = set(tmp_path.iterdir()) - {Path(x)}
        assert folder.name.startswith(RUN)
        assert [path.name for path in folder.iterdir()] == ["other"], "what was taken is removed"
        pool.each(total, {"by": 0, "waits": False}, parts, lambda number, read: read(), told.append)
        assert pool.trace.bytes["read"] == 2 * 100 * 8 * 4
        assert pool.peak_host_bytes > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]
    assert order[0] != 0, "another one was first"
    assert [number for number, _ in found] == [0, 1, 2, 3]
    assert [one["sum"] for _, one in found] == [64, 64, 64, 8]
    assert np.concatenate([one["vector"] for _, one in found]).tolist() == list(range(100))
    assert told[-1] == 1


def failing(here, shared, part):
    if part == 1:
        raise StoreError("x: chunk 1 cannot be read; put it back")
    return part


def test_what_a_function_raises_ends_the_pass(tmp_path, client):
    with pool_of(client, tmp_path) as pool:
        with pytest.raises(StoreError, match="chunk 1 cannot be read"):
            pool.each(failing, None, [0, 1, 2], lambda number, read: read(), lambda done: None)
        with pytest.raises(StoreError, match="chunk 1 cannot be read"):
            pool.ask(failing, None, 1)
    assert not list(tmp_path.iterdir())


def test_an_answer_that_is_lost_is_said(tmp_path, client):
    def take(number, read):
        for folder in tmp_path.iterdir():
            for file in folder.iterdir():
                file.unlink()
        read()

    said = r"out: what a worker has found cannot be read from .*No such file.*and run again$"
    with pool_of(client, tmp_path) as pool, pytest.raises(StoreError, match=said):
        pool.each(passing, None, [0], take, lambda done: None)


def passing(here, shared, part):
    return part


def raising(here, error, part):
    raise error


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_errors_arrive_as_they_are(tmp_path, client, kind):
    """Also those that are a MemoryError, too."""
    error = kind("x cannot be; do this")
    attributes = {"minimum_memory_limit": 5} if kind is BudgetError else {}
    error.__dict__ |= attributes
    with pool_of(client, tmp_path) as pool, pytest.raises(kind) as found:
        pool.ask(raising, error, None)
    assert type(found.value) is kind
    assert str(found.value) == "x cannot be; do this"
    assert found.value.__dict__ == error.__dict__


def test_what_is_in_no_shared_folder_is_refused(tmp_path, client):
    workers = OnWorkers(client, "2GiB", "cpu")
    for out, said in (
        (None, "scores is not in a folder"),
        ("s3://bucket/a", "s3://bucket/a is not in"),
    ):
        with pytest.raises(InputError, match=said):
            workers.pool({}, ("scores", out), "auto", GiB, True)
    with pytest.raises(InputError, match="store it as a Zarr array"):
        workers.pool({"x": np.ones((3, 3))}, ("out", tmp_path / "out"), "auto", GiB, True)


def test_what_the_client_holds_counts_in_its_limit_or_in_that_of_all(client):
    apart, together = (OnWorkers(client, "1GiB", "cpu", shares) for shares in (False, True))
    assert apart.beside(None, 1000) == 0
    assert together.beside(None, 1001) == 501
    with pytest.raises(BudgetError) as small:
        apart.beside("200MiB", GiB)
    assert small.value.minimum_memory_limit == CLIENT_BYTES + GiB
    assert apart.beside(CLIENT_BYTES + GiB, GiB) == 0


HOLDS = """
import sys
from pathlib import Path
from ooc_gemm.support import errors
from ooc_gemm.storage.write.share import run_folder_beside

with run_folder_beside(Path(sys.argv[1]), "out"):
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_folders_that_killed_runs_have_left_are_removed(tmp_path):
    """And no others: not those of runs that go on, nor of other results."""
    places = [tmp_path / name for name in ("out", "out", "other")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for place in places
    ]
    for one in processes:
        assert one.stdout.readline() == b"there\n"
    before = set(tmp_path.iterdir())
    assert len(before) == 3
    for one in (processes[0], processes[2]):
        one.send_signal(signal.SIGKILL)
        one.wait()
    with run_folder_beside(tmp_path / "out", "out") as folder:
        assert len(set(tmp_path.iterdir()) & before) == 2, "of the run that goes on, and of the other result"
        assert folder.is_dir()
    assert not folder.exists()
    processes[1].communicate(b"")
    assert len(set(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"out cannot be made: workers need a folder in .* choose another"),
        run_folder_beside(tmp_path / "file" / "out", "out"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def fatal(here, deaths, part):
    """Kills its worker as often as there are files."""
    time.sleep(0.05)
    for file in sorted(Path(deaths).glob(f"{part}-*")):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return part


@pytest.mark.slow
def test_parts_of_workers_that_have_died_are_made_again(tmp_path):
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (deaths / "1-0").touch()
    (deaths / "4-0").touch()
    taken = []
    with patient(), cluster(2, processes=True) as client, pool_of(client, tmp_path) as pool:
        pool.each(
            fatal,
            str(deaths),
            list(range(8)),
            lambda number, read: taken.append((number, read())),
            taken.count,
        )
        assert sorted(taken) == [(number, number) for number in range(8)]
        for number in range(5):
            (deaths / f"0-{number}").touch()
        with pytest.raises(DeviceError, match=r"5 workers have died of the same part.*, and run again$"):
            pool.each(fatal, str(deaths), [0], lambda number, read: read(), taken.count)


@pytest.mark.slow
def test_workers_that_die_when_they_are_asked(tmp_path, monkeypatch):
    """Another one is asked, also where the cluster has none until that starts; but not for ever."""
    monkeypatch.setattr("ooc_gemm.dask.pool.ASKED", 1.0)
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (deaths / "0-0").touch()
    with patient(), cluster(1, processes=True) as client, pool_of(client, tmp_path) as pool:
        assert pool.ask(fatal, str(deaths), 0) == 0
        for number in range(DEATHS):
            (deaths / f"1-{number}").touch()
        with pytest.raises(DeviceError, match=r"5 workers have died while they opened the inputs; give them"):
            pool.ask(fatal, str(deaths), 1)
        assert not list(deaths.iterdir())
