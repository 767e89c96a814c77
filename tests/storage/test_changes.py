"""Inputs and chunks of C that are changed during a run."""

import functools
import os
import shutil
from pathlib import Path

import pytest
import zarr
from conftest import make
from small_runs import A, is_result, make_inputs, old_c, replace, rewrite, rewrite_and_set_back, run

import ooc_gemm
import ooc_gemm.run.executor
from ooc_gemm import InputError, StoreError
from ooc_gemm.storage.format.unfinished import is_partial
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import publication


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a and b."""
    make_inputs(tmp_path, monkeypatch)
    return tmp_path


def in_the_middle(change):
    """`progress` that does something once, when most is handed over."""
    left = [change]

    def progress(fraction, plan, trace):
        if fraction > 0.5 and left:
            left.pop()()

    return progress


@pytest.mark.parametrize("change", [rewrite, rewrite_and_set_back, replace, os.unlink])
@pytest.mark.parametrize("layout", ["raw", "zstd", "shards", "v2"])
def test_an_input_that_changes_during_the_run(monkeypatch, change, layout):
    stored = {
        "raw": {"compressors": None},
        "zstd": {},
        "shards": {"chunks": (32, 32), "shards": (64, 64)},
        "v2": {"zarr_format": 2, "compressors": None, "order": "F"},
    }[layout]
    make("a", A, overwrite=True, **{"chunks": (64, 64), **stored})
    chunk = "a/0.0" if layout == "v2" else "a/c/0/0"
    shutil.copytree("a", "before")
    with pytest.raises(StoreError, match="a was changed while C was made of it, so C is not finished"):
        run(progress=in_the_middle(functools.partial(change, chunk)))
    assert is_partial(Folder(Path("c")))
    assert not os.path.exists("c/zarr.json")
    if change is rewrite:
        for _ in range(2):
            with pytest.raises(InputError, match="c cannot be continued: a was changed while"):
                run(resume=True)
            shutil.rmtree("a")  # to put it back does not make the chunks right
            shutil.copytree("before", "a")
        run(force=True)
        assert is_result()


def test_a_product_without_a_stored_c_is_checked_too():
    with pytest.raises(StoreError, match="b was changed"):
        ooc_gemm.multiply("a", "b", progress=in_the_middle(lambda: rewrite("b/c/1/1")))


def test_reading_is_no_change():
    run(progress=in_the_middle(lambda: (zarr.open_array("a")[...], os.listdir("a"))))
    assert is_result()


@pytest.mark.parametrize("change", [rewrite, rewrite_and_set_back, replace, os.unlink])
def test_a_chunk_of_c_that_changes_during_the_run(monkeypatch, change):
    left, real = [change], publication.Publication._check

    def settle(self):
        left.pop()("c/c/1/1")
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(publication.Publication, "_check", settle)
        with pytest.raises(StoreError, match="somebody else has changed its chunk c/1/1"):
            run()
    assert not os.path.exists("c/zarr.json")


def test_the_old_c_changes_before_it_is_read(monkeypatch):
    old_c()
    real = ooc_gemm.run.executor.execute

    def late(*args, **options):
        rewrite("c/c/2/2")
        return real(*args, **options)

    monkeypatch.setattr(ooc_gemm.run.executor, "execute", late)
    with pytest.raises(
        StoreError, match="somebody else has changed its chunk c/2/2 while C was being updated"
    ):
        run(0.5)
    assert not os.path.exists("c/zarr.json")
