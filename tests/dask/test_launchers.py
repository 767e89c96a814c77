"""Clusters as dask-jobqueue and dask-kubernetes start them, as far as that needs no batch system."""

import subprocess

import numpy as np
import pytest
from conftest import make

pytest.importorskip("distributed")

from distributed import Client

import ooc_gemm


@pytest.mark.slow
def test_a_job_of_dask_jobqueue(tmp_path):
    """The script that would be submitted runs here, by bash."""
    jobqueue = pytest.importorskip("dask_jobqueue")
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 300, 300)).astype("f4")
    x, y = (make(tmp_path / name, values, chunks=(100, 100)) for name, values in (("a", a), ("b", b)))
    given = {"cores": 1, "processes": 1, "memory": "2GB", "walltime": "00:10:00", "job_cpu": 1}
    given["scheduler_options"] = {"dashboard_address": ":0"}
    with jobqueue.SLURMCluster(**given, interface="lo", log_directory=tmp_path) as cluster:
        script = tmp_path / "job.sh"
        script.write_text(cluster.job_script())
        assert "#SBATCH --mem=2G" in script.read_text()
        job = subprocess.Popen(["bash", str(script)], cwd=tmp_path, start_new_session=True)
        try:
            with Client(cluster) as client:
                client.wait_for_workers(1, timeout=100)
                result = ooc_gemm.dask.multiply(
                    x, y, tmp_path / "c", client=client, memory_limit="512MiB", device="cpu"
                )
                client.retire_workers()
        finally:
            job.terminate()
            job.wait(60)
    np.testing.assert_allclose(result.array[:], a @ b, rtol=1e-4, atol=1e-3)


def test_the_specification_of_dask_kubernetes():
    """docs/guides/kubernetes.md changes parts of it."""
    operator = pytest.importorskip("dask_kubernetes.operator")
    command = ["dask", "worker"]
    spec = operator.make_cluster_spec(name="n", image="i", n_workers=4, worker_command=command, resources={})
    (worker,) = spec["spec"]["worker"]["spec"]["containers"]
    assert worker["args"][:2] == ["dask", "worker"]
    assert spec["spec"]["worker"]["replicas"] == 4
