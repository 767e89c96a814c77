"""Paths through symlinks that change while a run goes on."""

import os
import pickle

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.storage.read import addresses

RUNS = {
    "multiply": lambda a, c, told: ooc_gemm.multiply(a, a, c, progress=told).array,
    "gram": lambda a, c, told: ooc_gemm.gram(a, c, progress=told).array,
    "cov": lambda a, c, told: ooc_gemm.cov(a, c, progress=told).array,
    "pca": lambda a, c, told: ooc_gemm.pca(a, 2, scores=c, progress=told).scores,
    "svd": lambda a, c, told: ooc_gemm.svd(a, 2, u=c, progress=told).u,
    "lstsq": lambda a, c, told: ooc_gemm.lstsq(a, a, out=c, ridge=1.0, progress=told).array,
}


@pytest.mark.parametrize("what", RUNS)
def test_a_run_keeps_to_the_folders_that_its_paths_meant_at_first(tmp_path, what):
    """A symlink may be given another target while it goes on, as one to the newest data."""
    for name in ("one", "two"):
        make(tmp_path / name / "a", np.random.default_rng(1).standard_normal((8, 8), "f4"), chunks=(4, 4))
    link = tmp_path / "newest"
    link.symlink_to("one")

    def elsewhere(*told):
        link.unlink()
        link.symlink_to("two")

    found = RUNS[what](str(link / "a"), str(link / "c"), elsewhere)
    assert os.readlink(link) == "two"
    assert os.listdir(tmp_path / "two") == ["a"]
    assert np.array_equal(zarr.open_array(tmp_path / "one" / "c")[:], found[:])
    assert np.any(found[:])


def test_a_located_path_may_go_to_another_process(tmp_path):
    found = pickle.loads(pickle.dumps(addresses.located(str(tmp_path / "a"))))
    assert (found, found.place) == (str(tmp_path / "a"), tmp_path / "a")
