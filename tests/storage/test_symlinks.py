"""Paths through symlinks that change while a run goes on."""

import os
import pickle

import numpy as np
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.storage.read import addresses


def test_a_run_keeps_to_the_folder_that_its_paths_meant_at_first(tmp_path):
    """A symlink may be given another target while it goes on, as one to the newest data."""
    x = np.arange(64, dtype="f4").reshape(8, 8)
    for name in ("one", "two"):
        make(tmp_path / name / "a", x, chunks=(4, 4))
    link = tmp_path / "newest"
    link.symlink_to("one")

    def elsewhere(*told):
        link.unlink()
        link.symlink_to("two")

    a, c = str(link / "a"), str(link / "c")
    found = ooc_gemm.multiply(a, a, c, progress=elsewhere)
    assert os.readlink(link) == "two"
    assert os.listdir(tmp_path / "two") == ["a"]
    assert np.array_equal(zarr.open_array(tmp_path / "one" / "c")[:], x @ x)
    assert np.array_equal(found.array[:], x @ x)
    again = pickle.loads(pickle.dumps(addresses.located(str(link))))
    assert (again, again.place) == (str(link), tmp_path / "two")
