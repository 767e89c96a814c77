"""What a run says is finished is on the disk; what is not is unfinished, and can be continued. Power cuts at
many instants are in benchmarks/crashes.py."""

import errno
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
import ooc_gemm.run.executor
from ooc_gemm import InputError, StoreError
from ooc_gemm.storage.format.unfinished import JOURNAL, is_partial
from ooc_gemm.storage.io import durable, files, locks
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import journal, publication, staging_folder

RNG = np.random.default_rng(19)
A, B = RNG.integers(-9, 9, (300, 200)).astype("f4"), RNG.integers(-9, 9, (200, 260)).astype("f4")
OLD = RNG.integers(-9, 9, (300, 260)).astype("f4")
C = A.astype("f8") @ B  # every sum is exact
OPTIONS = {"chunks": (50, 52), "device": "cpu", "memory_limit": "300MiB"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a and b."""
    monkeypatch.chdir(tmp_path)
    make("a", A, chunks=(64, 64), compressors=None)
    make("b", B, chunks=(64, 64), compressors=None)
    return tmp_path


def old_c(path="c", **options):
    make(path, OLD, **{"chunks": (50, 52), "compressors": None, **options})


def run(beta=0.0, **options):
    """C ← A·B + β·C."""
    some = {key: value for key, value in OPTIONS.items() if key != "chunks" or not beta}
    return ooc_gemm.multiply("a", "b", "c", beta=beta, **{**some, **options})


def is_result(beta=0.0):
    return np.array_equal(zarr.open_array("c", mode="r")[...], C + beta * OLD)


def unfinished(monkeypatch, count=9, beta=0.0, saved=0.0):
    """A run that fails when so many chunks are written."""
    left = iter(range(count))

    def write(path, data, direct=False, real=files.write):
        if next(left, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, data, direct)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", write)
        patched.setattr(publication, "SAVED_SECONDS", saved)
        with pytest.raises(StoreError):
            run(beta)
    assert is_partial(Folder(Path("c")))


def lines():
    return (Path("c") / JOURNAL).read_bytes().splitlines(keepends=True)


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


def lose(folder="c"):
    """What was not flushed is lost, although nothing shows it."""
    for path in Path(folder).rglob("*" + staging_folder.PENDING):
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


# ------------------------------------------------------------------------------------- changes during a run


def in_the_middle(change):
    """`progress` that does something once, when most is handed over."""
    left = [change]

    def progress(fraction, plan, trace):
        if fraction > 0.5 and left:
            left.pop()()

    return progress


def rewrite(path):
    Path(path).write_bytes(Path(path).read_bytes()[::-1])


def rewrite_and_set_back(path):
    before = os.stat(path)
    rewrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path):
    before = os.stat(path)
    shutil.copy(path, path + ".other")
    rewrite(path + ".other")
    os.utime(path + ".other", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(path + ".other", path)


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

    def late(*args, **options):
        shutil.rmtree("c/c", ignore_errors=True)
        os.symlink(Path("other/c").absolute(), "c/c")
        return real(*args, **options)

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
