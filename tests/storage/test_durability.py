"""What a run says is finished is on the disk; what is not is unfinished, and can be continued. Power cuts at
many instants are in benchmarks/crashes.py."""

import errno
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
    C,
    is_result,
    lines,
    make_inputs,
    old_c,
    run,
    unfinished,
)

import ooc_gemm
import ooc_gemm.run.executor
from ooc_gemm import InputError, StoreError
from ooc_gemm.storage.format.unfinished import JOURNAL, is_partial
from ooc_gemm.storage.io import files, listing
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import journal, publication, staging_folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a and b."""
    make_inputs(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.slow
def test_the_power_is_cut():
    """At a few of the instants that benchmarks/crashes.py tries."""
    if os.geteuid() or not shutil.which("mkfs.ext4") or not os.path.exists("/dev/fuse"):
        pytest.skip("only root can mount a disk that records what is written")
    program = Path(__file__).resolve().parents[2] / "benchmarks" / "crashes.py"
    done = subprocess.run(
        [sys.executable, program, "--instants", "12", "--failures", "6", "--cases", "3", "--folder", "."],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "PermissionError" in done.stderr or "mount: " in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 lost, 0 wrong") == 3


# ------------------------------------------------------------------------------------- what comes before what


@pytest.fixture
def events(monkeypatch):
    """What is flushed, renamed and removed, in order."""
    found, real_sync, real_replace, real_unlink = [], os.fsync, os.replace, os.unlink

    def name(path):
        return os.path.relpath(path)

    def fsync(file):
        real_sync(file)
        found.append(("flush", name(os.readlink(f"/proc/self/fd/{file}"))))

    def replace(old, new, **options):
        real_replace(old, new, **options)
        found.append(("name", name(new)))

    def unlink(path, **options):
        real_unlink(path, **options)
        found.append(("remove", name(path)))

    monkeypatch.setattr(listing, "_library", None)  # which renames without Python's functions
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(publication, "SAVED_SECONDS", 60.0)
    return found


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_metadata_come_last_and_the_journal_goes_after_them(events, beta):
    if beta:
        old_c(chunks=(300, 260))
    events.clear()
    run(beta, **({} if beta else {"chunks": (300, 260)}))
    assert is_result(beta)
    at = events.index
    data = at(("flush", "c/c/0/0.pending"))
    place = at(("name", "c/c/0/0"))
    there = max(i for i, event in enumerate(events) if event == ("name", "c/zarr.json"))
    whole = at(("flush", "c/zarr.json.new"))
    folders = [max(i for i in range(there) if events[i] == ("flush", f)) for f in ("c/c/0", "c/c", "c")]
    durable_at = min(i for i in range(there, len(events)) if events[i] == ("flush", "c"))
    assert at(("flush", "c/ooc-gemm.journal")) < data < place < min(folders)
    assert max(whole, *folders) < there < durable_at
    gone = max(i for i, event in enumerate(events) if event[1].endswith("ooc-gemm.journal"))
    assert events[gone][0] in ("remove", "flush")
    assert gone < durable_at or not os.path.exists("c/ooc-gemm.journal")
    assert not os.path.exists("c/ooc-gemm.journal")


def test_the_old_metadata_are_moved_when_the_journal_is_on_the_disk(events):
    old_c()
    before = Path("c/zarr.json").read_bytes()
    events.clear()
    seen = []
    real = staging_folder.FolderStaging._check_links

    def look(self):
        seen.append(list(events))
        real(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging_folder.FolderStaging, "_check_links", look)
        run(0.5)
    assert ("flush", "c/ooc-gemm.journal") in seen[0]
    assert ("flush", "c") in seen[0]
    moved = events.index(("name", "c/zarr.json.partial"))
    assert not any(event == ("remove", "c/zarr.json") for event in events)
    assert events.index(("flush", "c"), moved) < events.index(("name", "c/c/0/0"))
    assert json.loads(before)["shape"] == json.loads(Path("c/zarr.json").read_bytes())["shape"]


def test_an_array_written_without_a_journal_is_flushed_too(events):
    ooc_gemm.random("r", (40, 40), chunks=(20, 20))
    there = events.index(("name", "r/zarr.json"))
    assert {("flush", f"r/{name}") for name in ("zarr.json.new", "c/0", "c/1", "c")} <= set(events[:there])
    assert sum(event == ("flush", "r/c/0/0") for event in events[:there]) == 1
    assert ("flush", "r") in events[there:]


def test_many_chunks_are_flushed_together(events, monkeypatch):
    flushed = []
    real = files.flush
    monkeypatch.setattr(files, "flush", lambda folder: (flushed.append(folder), real(folder)))
    run(chunks=(20, 20))
    assert is_result()
    assert len(set(flushed)) == 1  # one descriptor
    assert isinstance(flushed[0], int)


# ------------------------------------------------------------------------------------------ flushes that fail


def pending(folder="c"):
    """The files of chunks that are not in their places."""
    return set(Path(folder).rglob("*" + staging_folder.PENDING))


def lose(safe=frozenset()):
    """What was not flushed is lost, although nothing shows it. safe: files that were flushed."""
    for path in pending() - safe:
        found = path.stat()
        path.write_bytes(bytes(found.st_size))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("which", [1, 2])
def test_a_flush_that_fails_is_not_repeated_and_believed(monkeypatch, beta, number, which):
    if beta:
        old_c()
    calls, real = iter(range(1, 1000)), files.flush

    def flush(folder):
        if next(calls) == which:
            lose()
            raise OSError(number, os.strerror(number))
        real(folder)  # as the system does: it has told it once

    with monkeypatch.context() as patched:
        patched.setattr(files, "flush", flush)
        patched.setattr(publication, "SAVED_SECONDS", 0.0)
        with pytest.raises(StoreError, match=os.strerror(number)):
            run(beta)
    assert is_partial(Folder(Path("c")))
    run(beta, resume=True)
    assert is_result(beta)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_short_run_whose_flush_fails(monkeypatch, beta):
    if beta:
        old_c(chunks=(300, 260))
    real = os.fsync

    def fsync(file):
        if os.readlink(f"/proc/self/fd/{file}").endswith(staging_folder.PENDING):
            lose()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    options = {} if beta else {"chunks": (300, 260)}
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(StoreError, match=r"c cannot be finished: Input/output error; .*resume=True"):
            run(beta, **options)
    run(beta, resume=True, **options)
    assert is_result(beta)


def test_a_journal_that_cannot_be_flushed_marks_nothing(monkeypatch):
    old_c()
    real, marked = os.fsync, []

    def fsync(file):
        if os.readlink(f"/proc/self/fd/{file}").endswith(JOURNAL) and os.fstat(file).st_size > 2000:
            marked.append(durable())
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    def durable():
        return sum(b"durable" in line for line in lines())

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        patched.setattr(publication, "SAVED_SECONDS", 0.0)
        with pytest.raises(StoreError, match="Input/output error"):
            run(0.5)
    assert durable() == marked[0]
    run(0.5, resume=True)
    assert is_result(0.5)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_chunks_that_are_written_while_the_flush_of_the_journal_fails_are_made_again(
    monkeypatch, beta, number
):
    """As another thread that writes does, whose chunk the flush of the disk before does not cover."""
    if beta:
        old_c()
    safe, runs, lost, real_save = set(), [], [], publication.Publication.save
    real_flush, real_fsync = files.flush, os.fsync
    last = (C + beta * OLD)[250:, 208:].astype("f4").tobytes()

    def save(self, everything=True):
        runs.append(self)
        real_save(self, everything)

    def flush(folder):
        before = pending()
        real_flush(folder)
        safe.update(before)

    def fsync(file):
        if safe and not lost and os.readlink(f"/proc/self/fd/{file}").endswith(JOURNAL):
            runs[0].write((5, 4), last)
            path = os.path.relpath(runs[0].staging.path((5, 4)) + staging_folder.PENDING)
            assert os.path.exists(path)
            safe.discard(Path(path))  # if the run had written it too
            lost.extend(path.name for path in pending() - safe)
            lose(safe)
            raise OSError(number, os.strerror(number))
        real_fsync(file)

    with monkeypatch.context() as patched:
        patched.setattr(publication.Publication, "save", save)
        patched.setattr(files, "flush", flush)
        patched.setattr(os, "fsync", fsync)
        patched.setattr(publication, "SAVED_SECONDS", 0.0)
        with pytest.raises(StoreError, match=os.strerror(number)):
            run(beta)
    assert "4.pending" in lost
    run(beta, resume=True)
    assert is_result(beta)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_nothing_is_begun_where_the_head_cannot_be_flushed(monkeypatch, beta):
    if beta:
        old_c()

    def fsync(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(InputError, match=r"cannot be (created|updated): Input/output error"):
            run(beta)
    assert not os.path.exists("c/ooc-gemm.journal")
    if beta:
        assert np.array_equal(zarr.open_array("c", mode="r")[...], OLD)
    run(beta)
    assert is_result(beta)


# ----------------------------------------------------------------------------------------- lines that are cut


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_journal_cut_anywhere(monkeypatch, tmp_path, beta):
    """By a process that was killed: chunks of whole lines are done."""
    if beta:
        old_c()
    monkeypatch.setattr(
        publication.Publication, "pause", lambda self: (self._log.close(), self.staging.close())
    )
    unfinished(monkeypatch, beta=beta, saved=60.0)
    shutil.copytree("c", "kept")
    text = (Path("kept") / JOURNAL).read_bytes()
    starts = [at for at, byte in enumerate(text) if byte == ord("\n")]
    for size in (starts[1] + 1, starts[2] + 1, starts[2] + 5, starts[4], starts[6] - 1, len(text) - 1):
        shutil.rmtree("c")
        shutil.copytree("kept", "c")
        for path in Path("kept").rglob("*"):
            times = path.stat()
            os.utime(Path("c") / path.relative_to("kept"), ns=(times.st_atime_ns, times.st_mtime_ns))
        (Path("c") / JOURNAL).write_bytes(text[:size])
        run(beta, resume=True)
        assert is_result(beta), size


def test_a_tail_of_which_only_the_end_is_on_the_disk(monkeypatch):
    """The system wrote the page with the last line, and not the one before."""
    unfinished(monkeypatch, saved=60.0)
    path, found = Path("c") / JOURNAL, lines()
    assert [b"durable" in line for line in found[-2:]] == [False, True]
    found[-4] = bytes(len(found[-4]))
    path.write_bytes(b"".join(found))
    result = run(resume=True)
    assert result.bytes_written > 21 * 50 * 52 * 4  # of 30 chunks 9 were done
    assert is_result()


def test_the_system_takes_little_at_a_time(monkeypatch):
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: real(file, bytes(data[:1000])))
        unfinished(monkeypatch)
    assert all(json.loads(line) for line in lines())
    run(resume=True)
    assert is_result()


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    log = journal.begin_in_folder(tmp_path / "x", "x", {"inputs": {}, "options": {}})
    log.add((0, 0), (1, 2), (0, 0))
    real, room = os.write, [20]

    def write(file, data):
        size = min(len(data), room[0])
        if size == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= size
        return real(file, bytes(data[:size]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            log.add((0, 1), (1, 2), (0, 0))
    assert (0, 1) not in log.done
    log.add((1, 1), (3, 4), (0, 0))
    log.durable(2)
    log.close()
    found = journal.resume_in_folder(tmp_path / "x", "x")
    assert found.done == {(0, 0): ((1, 2), (0, 0)), (1, 1): ((3, 4), (0, 0))}
    found.close()


def test_a_journal_is_replaced_at_once(tmp_path, monkeypatch):
    """A run with -f over an unfinished C fails as it begins: what was unfinished can still be continued."""
    unfinished(monkeypatch)
    real = os.replace

    def replace(old, new, **options):
        if str(new).endswith(JOURNAL):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(old, new, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        with pytest.raises(InputError, match="cannot be created"):
            run(force=True, alpha=2)
    assert run(resume=True).bytes_written == 21 * 50 * 52 * 4
    assert is_result()
