"""A C of very many chunks that a cluster makes: what its processes hold for each of them is in the plan."""

import subprocess
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make

pytest.importorskip("distributed")

from worker_clusters import cluster

import ooc_gemm
from ooc_gemm import BudgetError
from ooc_gemm.dask import elsewhere
from ooc_gemm.dask.cluster import _Superblocks
from ooc_gemm.dask.dealing import Dealing
from ooc_gemm.dask.elsewhere import OnWorkers
from ooc_gemm.dask.sums import Sums
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.plan import Plan
from ooc_gemm.planning.problem import Matrix, Problem
from ooc_gemm.planning.search import make_plan
from ooc_gemm.run.elsewhere import computing
from ooc_gemm.storage.write.done import IN_FOLDER, IN_WORKER
from ooc_gemm.support.trace import Trace

RUN = """
import sys
import numpy as np, zarr, ooc_gemm
import ooc_gemm.dask
from ooc_gemm.support.memory import peak_resident_bytes, resident_bytes

def main():
    place, side = sys.argv[1], int(sys.argv[2])
    x = np.random.default_rng(0).integers(0, 9, (side, 8)).astype("f4")
    zarr.create_array(place + "/a", data=x, chunks=(side, 4), compressors=None)
    zarr.create_array(place + "/b", data=x.T.copy(), chunks=(4, side), compressors=None)
    with ooc_gemm.dask.on("local:2", memory_limit="2GiB", device="cpu"):
        before = resident_bytes()
        result = ooc_gemm.multiply(place + "/a", place + "/b", place + "/c", chunks=(4, 4))
    assert (result.array[:8] == x[:8] @ x.T).all()
    print(peak_resident_bytes() - before, result.peak_host_bytes, result.plan.host_bytes)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_processes_stay_within_what_the_plan_says(tmp_path):
    """122,500 chunks, made by two workers on this machine."""
    pytest.importorskip("cryptography")
    memory = Path("/dev/shm")
    (tmp_path / "run.py").write_text(RUN)
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as place:
        run = [sys.executable, tmp_path / "run.py", place, "1400"]
        done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown, peak, planned = map(int, done.stdout.split())
    assert peak <= planned
    assert grown < 350 * 350 * IN_FOLDER


@pytest.fixture(scope="module")
def client():
    with cluster(2) as found:
        yield found


@pytest.fixture
def inputs(tmp_path):
    a = make(tmp_path / "a", np.ones((600, 16), "f4"), chunks=(600, 16), compressors=None)
    return a, a, tmp_path / "c"


OPTIONS = {"transpose_b": True, "chunks": (2, 3), "device": "cpu"}


@pytest.mark.slow
def test_the_ledger_of_workers_counts_chunks(client, inputs):
    def held(shares, **options):
        with computing(OnWorkers(client, "8GiB", "cpu", shares)):
            return ooc_gemm.plan(*inputs[:2], **{**OPTIONS, **options}).ledger["finished chunks"]

    assert held(False) == 300 * 200 * IN_WORKER
    assert held(True) == 300 * 200 * (IN_WORKER + IN_FOLDER // 2), "the client's share the limit"
    assert held(True, chunks=(20, 30)) == 0


@pytest.mark.slow
def test_a_client_that_may_not_hold_what_is_known_of_chunks(client, inputs, monkeypatch):
    monkeypatch.setattr(elsewhere, "baseline_bytes", lambda usual: 4 << 30)
    options = {**OPTIONS, "memory_limit": "4GiB"}
    with computing(OnWorkers(client, None, "cpu")):
        with pytest.raises(BudgetError, match="too small for what comes together in this process") as error:
            ooc_gemm.multiply(*inputs, **options)
        assert error.value.minimum_memory_limit == (4 << 30) + 300 * 200 * IN_FOLDER
        assert not inputs[2].exists()
        ooc_gemm.multiply(*inputs, **{**options, "chunks": (20, 30)})


@pytest.mark.parametrize("kind", [_Superblocks, Sums])
def test_the_tasks_of_a_run_hold_nothing_for_each_chunk(monkeypatch, kind):
    monkeypatch.setattr(Dealing, "__init__", lambda self, *rest: None)
    monkeypatch.setattr(Plan, "without", lambda plan, done: plan)
    m = 2000
    a, b = Matrix(m, 8, 4, m, 4), Matrix(8, m, 4, 4, m)
    problem = Problem(m, m, 8, a, b, Matrix(m, m, 4, 4, 4), 4, 4, free_chunks=False)
    budget = Budget(8 << 20, 0, None, workers=2)
    rates = Rates(1e9, 1e9, 1e9, 1e9, 1e9, shared=False)
    plan = make_plan(problem, budget, rates)
    if kind is Sums:
        plan = replace(plan, problem=replace(plan.problem, parts=2))
    workers, work = SimpleNamespace(known={"x": 1, "y": 1}), SimpleNamespace(topic="")
    list(plan.blocks())
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        held = kind(workers, work, plan, None, Trace())
        now = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held is not None
    assert plan.problem.c.grid == (500, 500)
    assert now < 2 * 250_000
