"""Statistics on a cluster of arrays in an object store: a real S3 server."""

import os

import numpy as np
import pytest
import s3
import zarr
from samples import alleles

pytest.importorskip("distributed")

from worker_clusters import cluster

import ooc_gemm
from ooc_gemm import InputError
from ooc_gemm.storage.read import addresses

pytestmark = [
    pytest.mark.skipif(bool(s3.missing()), reason=s3.missing() or "-"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LIMITS = {"memory_limit": "2GiB", "device": "cpu"}


@pytest.fixture
def shelf(server, monkeypatch):
    """An address where nothing is yet; credentials are in the environment of the workers."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in s3.environment(server).items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.BUCKET}/cluster"


def put(url, values, **layout):
    array = zarr.create_array(
        addresses.remote_place(url), shape=values.shape, dtype=values.dtype, overwrite=True, **layout
    )
    array[...] = values
    return url


@pytest.mark.slow
def test_inputs_in_an_object_store(tmp_path, shelf):
    rng = np.random.default_rng(1)
    values, genotypes = rng.standard_normal((300, 20)).astype("f4") + 3, alleles(200, 30, 2)
    x, y = put(f"{shelf}/x", values, chunks=(50, 20)), put(f"{shelf}/y", values[:, 0] * 2, chunks=(70,))
    g = put(f"{shelf}/g", genotypes, chunks=(50, 30))
    with cluster(2) as client, ooc_gemm.dask.on(client, **LIMITS):
        n = ooc_gemm.topk(x, out=tmp_path / "n", k=3, verify=True)
        t = ooc_gemm.threshold(x, out=tmp_path / "t", least=0.9, verify=True)
        p = ooc_gemm.pca(x, 3, scores=tmp_path / "s")
        w = ooc_gemm.lstsq(x, y, tmp_path / "w")
        k = ooc_gemm.king(g, tmp_path / "k")
        with pytest.raises(InputError, match="credentials"):
            ooc_gemm.topk(f"s3://key:pw-of-cluster@{s3.BUCKET}/x", out=tmp_path / "m", k=3)
    np.testing.assert_array_equal(n.indices[:], ooc_gemm.topk(values, k=3, **LIMITS).indices)
    np.testing.assert_array_equal(t.indices[:], ooc_gemm.threshold(values, least=0.9, **LIMITS).indices)
    here = ooc_gemm.pca(values, 3, **LIMITS)
    np.testing.assert_allclose(p.singular_values, here.singular_values, rtol=1e-6)
    np.testing.assert_allclose(w.array[:, 0], [2, *[0] * 19], atol=1e-6)
    np.testing.assert_array_equal(k.array[:], ooc_gemm.king(genotypes, **LIMITS).array)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k", "n", "s", "t", "w"]
