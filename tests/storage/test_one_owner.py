"""One run at a time has a C: locks, links that lead to other arrays, and what counts of two states."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from small_runs import (
    OLD,
    is_result,
    make_inputs,
    old_c,
    run,
    unfinished,
)

import ooc_gemm
import ooc_gemm.run.executor
from ooc_gemm import InputError, StoreError
from ooc_gemm.storage.format.unfinished import is_partial
from ooc_gemm.storage.io import durable, locks
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import journal, publication


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a and b."""
    make_inputs(tmp_path, monkeypatch)
    return tmp_path


# -------------------------------------------------------------------------------------------------- locks

NO_LOCKS = """
import errno, fcntl, sys, time
import ooc_gemm
def flock(file, how):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
def wait(fraction, plan, trace):
    if fraction < 1:
        print("at work", flush=True)
        time.sleep(float(sys.argv[1]))
try:
    ooc_gemm.multiply("a", "b", "c", progress=wait, device="cpu", chunks=(300, 260), resume=True)
except ooc_gemm.Error as error:
    print(error)
"""


@pytest.mark.slow
def test_a_file_system_without_locks():
    """A file says who is at work; that of a process that is gone counts for nothing."""
    with subprocess.Popen([sys.executable, "-c", NO_LOCKS, "60"], stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"at work\n"
        second = subprocess.run([sys.executable, "-c", NO_LOCKS, "0"], capture_output=True, text=True)
        assert f"c is being written by process {first.pid} on " in second.stdout
        assert "at work" not in second.stdout
        first.kill()
    third = subprocess.run([sys.executable, "-c", NO_LOCKS, "0"], capture_output=True, text=True)
    assert third.stdout == "at work\n", third.stderr
    assert is_result()
    assert not os.path.exists("c/" + locks.OWNER)


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"processes": "pid:[1]"}, None])
def test_an_owner_that_cannot_be_asked(monkeypatch, tmp_path, change):
    def flock(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    os.mkdir("c")
    known = {**locks._me(), "pid": 2**22 + 1, "began": "1", **(change or {})}
    (Path("c") / locks.OWNER).write_text(json.dumps(known) if change else "{")
    with pytest.raises(InputError, match=r"c is being written by .*, remove .*ooc-gemm.owner"):
        journal.begin_in_folder(Path("c"), "c", {})
    (Path("c") / locks.OWNER).write_text(json.dumps({**locks._me(), "boot": "before"}))
    journal.begin_in_folder(tmp_path / "c", "c", {}).remove()
    assert not os.path.exists("c/" + locks.OWNER)


# -------------------------------------------------------------------------------------------------- links

LINKS = ["c", "c/0", "c/3"]


@pytest.mark.parametrize("compressors", [None, "auto"], ids=["raw", "zstd"])
@pytest.mark.parametrize("link", LINKS)
def test_nothing_is_written_through_a_linked_folder(link, compressors):
    old_c("other", compressors=compressors)
    old_c("c", compressors=compressors)
    shutil.rmtree(f"c/{link}")
    os.symlink(Path("other", link).absolute(), f"c/{link}")
    with pytest.raises(InputError, match=f"c cannot be updated: its folder {link} is a link"):
        run(0.5)
    assert np.array_equal(zarr.open_array("other", mode="r")[...], OLD)
    assert os.path.exists("c/zarr.json")
    run(force=True)
    assert np.array_equal(zarr.open_array("other", mode="r")[...], OLD)
    assert is_result()


@pytest.mark.parametrize("link", LINKS)
def test_a_run_is_not_continued_through_a_link(monkeypatch, link):
    old_c("other")
    unfinished(monkeypatch, 1 if link == "c/3" else 3)
    shutil.rmtree(f"c/{link}", ignore_errors=True)
    os.symlink(Path("other", link).absolute(), f"c/{link}")
    with pytest.raises(InputError, match=f"c cannot be continued: its folder {link} is a link"):
        run(resume=True)
    assert np.array_equal(zarr.open_array("other", mode="r")[...], OLD)


def test_a_link_that_comes_during_the_run(monkeypatch):
    old_c("other")
    real = ooc_gemm.run.executor.execute

    def late(plan, session, sources, target, *rest):
        begun = target()
        shutil.rmtree("c/c", ignore_errors=True)
        os.symlink(Path("other/c").absolute(), "c/c")
        return real(plan, session, sources, lambda: begun, *rest)

    monkeypatch.setattr(ooc_gemm.run.executor, "execute", late)
    with pytest.raises(StoreError, match="its folder c is a link"):
        run()
    assert np.array_equal(zarr.open_array("other", mode="r")[...], OLD)


# ---------------------------------------------------------------------------------------- what counts of two


def test_an_array_counts_beside_metadata_that_stand_aside():
    """A run with -f was killed as it began."""
    old_c()
    shutil.copy("c/zarr.json", "c/zarr.json.partial")
    journal.begin_in_folder(Path("c"), "c", {"inputs": {}, "options": {}}).close()
    assert not is_partial(Folder(Path("c")))
    assert ooc_gemm.multiply("b", "c", "d", transpose_b=True).n == 300
    with pytest.raises(InputError, match="c exists; give force=True"):
        run()
    run(0.5)
    assert is_result(0.5)
    assert sorted(os.listdir("c")) == ["c", "zarr.json"]


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_finished_c_with_its_journal(monkeypatch, beta):
    """A run was killed before it had removed the journal: it is the result, and is not made twice."""
    if beta:
        old_c()
    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "remove", lambda self: self.close())
        run(beta)
    assert os.path.exists("c/ooc-gemm.journal")
    assert is_result(beta)
    assert run(beta, resume=True).bytes_written == 0
    assert is_result(beta)
    assert sorted(os.listdir("c")) == ["c", "zarr.json"]


def test_what_is_unfinished_of_another_run_is_not_taken_over(monkeypatch):
    """A run with -f was killed when its journal stood, and the metadata were those of the run before."""
    unfinished(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(publication.Publication, "begin", lambda *args: os._exit(3))
        if (child := os.fork()) == 0:
            run(force=True, chunks=(100, 100), out_dtype="f8")
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    run(resume=True, chunks=(100, 100), out_dtype="f8")
    assert zarr.open_array("c").dtype == "f8"
    assert zarr.open_array("c").chunks == (100, 100)
    assert is_result()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.with_name("x.new").write_bytes(b"left by somebody")
    durable.replace(path, b"new")
    assert path.read_bytes() == b"new"

    def fsync(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        durable.replace(path, b"newer")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"] or set(os.listdir(tmp_path)) <= {"x", "a", "b"}
