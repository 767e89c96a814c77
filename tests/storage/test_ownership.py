"""What belongs to an array in C's folder: nothing else is removed, and that only for a C that is finished."""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import s3
import zarr
from conftest import make, ooc
from interruption import interrupted
from outcome import snapshot

import ooc_gemm
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.io import answers
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.read import addresses
from ooc_gemm.storage.write import journal, ownership
from ooc_gemm.storage.write.ownership import ASIDE

A, B = (np.random.default_rng(7).integers(-9, 9, shape).astype("f4") for shape in ((60, 50), (50, 40)))
C = A @ B
CPU = ("-d", "cpu")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in with a, b and `old`, which is something else than their product."""
    monkeypatch.chdir(tmp_path)
    make("a", A, chunks=(20, 20), compressors=None)
    make("b", B, chunks=(20, 20), compressors=None)
    make("old", np.full((60, 40), 7.0), chunks=(9, 9))
    return tmp_path


def product(path):
    return np.array_equal(zarr.open_array(path, mode="r")[...], C)


# --------------------------------------------------------------------------------- what is somebody else's


@pytest.mark.parametrize(
    "name",
    ["thesis.pdf.partial", "zarr.json.partial", ".zarray.partial", "zarr.json.bak", "c.partial", "x.pending"],
)
@pytest.mark.parametrize("force", [[], ["-f"]])
def test_a_folder_with_a_partial_file_is_left_alone(here, name, force):
    Path("folder").mkdir()
    Path("folder", name).write_text("mine")
    Path("folder/c").mkdir()
    Path("folder/c/0").write_text("mine")
    before = snapshot("folder")
    for command in (["multiply", "a", "b", "folder"], ["gram", "a", "folder"]):
        done = ooc(*command, *CPU, *force)
        assert (done.code, "left alone" in done.err) == (2, True), done
    done = ooc("random", "folder", "--shape", "5,5", *force)
    assert (done.code, "left alone" in done.err) == (2, True), done
    assert snapshot("folder") == before


@pytest.mark.parametrize("beside", ["report.txt", "thesis.pdf.partial", "c/notes.txt", "sub/zarr.json", "1"])
def test_a_killed_run_s_journal_does_not_make_other_files_ours(here, beside):
    journal.begin_in_folder(here / "folder", "folder", {"inputs": {}, "options": {}}).close()
    path = Path("folder", beside)
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = snapshot("folder")
    for force in ([], ["-f"]):
        done = ooc("multiply", "a", "b", "folder", *CPU, *force)
        assert (done.code, "left alone" in done.err) == (2, True), done
    assert snapshot("folder") == before


@pytest.mark.parametrize("text", ["", '{"vers', "mine", '{"mine": 1}\n'])
def test_a_file_called_as_our_journal(here, text):
    Path("folder").mkdir()
    Path("folder", unfinished.JOURNAL).write_text(text)
    done = ooc("multiply", "a", "b", "folder", *CPU)
    if "mine" in text:
        assert (done.code, "left alone" in done.err) == (2, True), done
        assert Path("folder", unfinished.JOURNAL).read_text() == text
    else:
        assert done.code == 0, done


# ------------------------------------------------------------------------- what -f removes, and what stays

LAYOUTS = {
    "default": {},
    "dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v2 keys": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "v2 keys in folders": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "version 2": {"zarr_format": 2},
    "version 2 in folders": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "shards": {"shards": (18, 18)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("command", ["multiply", "random"])
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_other_files_and_arrays_below_stay(here, layout, command, state):
    shutil.rmtree("old")
    options = LAYOUTS[layout]
    make("old", np.ones((60, 40)), chunks=(9, 9), attributes={"x": 1}, overwrite=True, **options)
    if state == "unfinished":
        for key in unfinished.METADATA:
            if Path("old", key).exists():
                Path("old", key).rename(f"old/{key}.partial")
                Path("old/ooc-gemm.journal").write_text('{"version": 1, "options": {}, "inputs": {}}\n')
    make("old/below", B, chunks=(20, 20))
    make("old/2024", A, chunks=(20, 20), zarr_format=2)
    mine = [
        "notes.txt",
        "thesis.pdf.partial",
        "2023/1.csv",
        "c.txt",
        "7.5.txt",
        "0.0.bak",
        "99.99",
        ".hidden/x",
    ]
    mine += ["c/readme", "c/0/readme"] if layout in ("default", "shards") else []
    for name in mine:
        Path("old", name).parent.mkdir(exist_ok=True)
        Path("old", name).write_text(f"mine: {name}")
    Path("old/link").symlink_to("../a")
    args = (
        ["multiply", "a", "b", "old", *CPU]
        if command == "multiply"
        else ["random", "old", "--shape", "60,40"]
    )
    assert ooc(*args).code == 2
    done = ooc(*args, "-f")
    assert done.code == 0, done
    if command == "multiply":
        assert product("old")
    assert [Path("old", name).read_text() for name in mine] == [f"mine: {name}" for name in mine]
    assert np.array_equal(zarr.open_array("old/below", mode="r")[...], B)
    assert np.array_equal(zarr.open_array("old/2024", mode="r")[...], A)
    assert np.array_equal(zarr.open_array("old/link", mode="r")[...], A)
    # Of the old array nothing is left.
    left = {str(path.relative_to("old")) for path in Path("old").rglob("*") if path.is_file()}
    left -= {*mine} | {name for name in left if name.startswith(("below/", "2024/", "link/"))}
    new = zarr.open_array("old", mode="r")
    chunks = {new.metadata.encode_chunk_key((i, j)) for i in range(new.nchunks) for j in range(new.nchunks)}
    assert left - chunks == {"zarr.json"}


@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5)])
@pytest.mark.parametrize("version", [2, 3])
def test_an_array_of_other_dimensions_is_replaced(here, shape, version):
    shutil.rmtree("old")
    make("old", np.ones(shape), chunks=(2,) * len(shape), zarr_format=version)
    Path("old/mine").write_text("mine")
    assert ooc("multiply", "a", "b", "old", *CPU, "-f").code == 0
    left = sorted(str(path.relative_to("old")) for path in Path("old").rglob("*") if path.is_file())
    assert left == ["c/0/0", "mine", "zarr.json"]
    assert product("old")


@pytest.mark.parametrize("node", ["c", "c/0", "c/0/0"])
@pytest.mark.parametrize("version", [2, 3])
def test_an_array_among_the_chunks_is_not_touched(here, node, version):
    path = Path("old", node)
    if path.is_file():
        path.unlink()
    make(f"old/{node}", B, chunks=(20, 20), zarr_format=version)
    before = snapshot("old")
    done = ooc("multiply", "a", "b", "old", *CPU, "-f")
    if done.code == 0:  # it stands where no chunk of the new array does
        assert np.array_equal(zarr.open_array(f"old/{node}", mode="r")[...], B)
        assert product("old")
    else:
        assert (done.code, "old cannot be replaced" in done.err) == (2, True), done
        assert snapshot("old") == before


@pytest.mark.parametrize("what", ["file", "folder", "array"])
def test_what_stands_where_the_new_chunks_go(here, what):
    shutil.rmtree("old")
    make("old", np.ones((60, 40)), chunks=(9, 9), zarr_format=2)
    if what == "file":
        Path("old/c").write_text("mine")
    elif what == "folder":
        Path("old/c/0").mkdir(parents=True)
        Path("old/c/0/0").write_text("mine")
    else:
        make("old/c", B, chunks=(20, 20))
    before = snapshot("old")
    done = ooc("multiply", "a", "b", "old", *CPU, "-f")
    assert (done.code, "old cannot be replaced: " in done.err) == (2, True), done
    assert snapshot("old") == before


def test_chunks_named_in_a_way_that_is_not_known(here):
    path = Path("old/zarr.json")
    found = json.loads(path.read_text())
    found["chunk_key_encoding"] = {"name": "suffix", "configuration": {"suffix": ".tif"}}
    path.write_text(json.dumps(found))
    before = snapshot("old")
    done = ooc("multiply", "a", "b", "old", *CPU, "-f")
    assert (done.code, "old names its chunks in a way that is not known" in done.err) == (2, True), done
    assert snapshot("old") == before


def test_linked_chunks_are_not_followed(here):
    Path("real").mkdir()
    Path("old/c").rename("real/c")
    Path("old/c").symlink_to("../real/c")
    before = snapshot("real")
    assert ooc("multiply", "a", "b", "old", *CPU, "-f").code == 0
    assert snapshot("real") == before
    assert not Path("old/c").is_symlink()
    assert product("old")


# ------------------------------------------------------------------- what cannot be removed, or begun


@pytest.fixture
def immutable(here):
    """Makes files and folders that not even root can change."""
    made = []

    def fix(path):
        if subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
            pytest.skip("files cannot be made immutable here")
        made.append(path)

    yield fix
    for path in made:
        subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.parametrize("path", ["old/c/0", "old/c/3/2", "old/c", "old/zarr.json", "old"])
def test_what_nobody_may_remove(here, immutable, path):
    before = snapshot("old")
    immutable(path)
    for command in (["multiply", "a", "b", "old", *CPU], ["random", "old", "--shape", "3,3"]):
        done = ooc(*command, "-f")
        assert done.code == 2, done
        assert done.err.startswith("Error: old cannot be ")
        assert done.err.count("\n") == 1
    assert snapshot("old") == before


@pytest.mark.parametrize("path", ["old/c/0", "old/c"])
def test_chunks_on_a_disk_that_is_read_only(here, path):
    if subprocess.run(["mount", "--bind", path, path], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        before = snapshot("old")
        done = ooc("multiply", "a", "b", "old", *CPU, "-f")
        assert (done.code, "old cannot be replaced: " in done.err) == (2, True), done
        assert snapshot("old") == before
    finally:
        subprocess.run(["umount", path], check=True)


RUN = """
import contextlib, io, os, sys
from ooc_gemm.cli import main
for c in ("warm", "warm"):  # everything is imported while it may be
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        main(["multiply", "a", "b", c, "-d", "cpu"])
os.umask(int(sys.argv[1], 8))
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
main(sys.argv[2:])
"""


@pytest.fixture
def nobody(here):
    """Runs the command line as a user who is not root, in a folder of his, with a umask."""
    folder = Path(tempfile.mkdtemp())
    for name in ("a", "b", "old"):
        shutil.copytree(name, folder / name)
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534)

    def run(*args, umask="022"):
        command = [sys.executable, "-c", RUN, umask, *args]
        environment = os.environ | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
        shutil.rmtree(folder / "warm")
        return done.returncode, done.stderr

    yield folder, run
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("shut", ["old/c/0", "old/c", "old"])
def test_chunk_folders_that_may_not_be_written(nobody, shut):
    folder, run = nobody
    (folder / shut).chmod(0o555)
    before = snapshot(folder / "old")
    code, said = run("multiply", "a", "b", "old", *CPU, "-f")
    assert (code, "Error: old " in said) == (2, True), said
    assert snapshot(folder / "old") == before


@pytest.mark.slow
@pytest.mark.parametrize("c", ["new", "deep/new"])
def test_a_umask_that_forbids_everything_leaves_nothing(nobody, c):
    folder, run = nobody
    before = snapshot(folder)
    code, said = run("multiply", "a", "b", c, *CPU, umask="777")
    assert (code, f"{c} cannot be created" in said) == (2, True), said
    assert snapshot(folder) == before


@pytest.mark.parametrize("step", ["begin", "rename", "mkdir"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_begin_that_fails_changes_nothing(here, monkeypatch, step, error):
    from ooc_gemm.storage.write import publication

    def fail(*args, **options):
        raise error

    before = snapshot("old")
    with monkeypatch.context() as patch:
        if step == "begin":
            patch.setattr(publication.Publication, "begin", fail)
        elif step == "mkdir":
            patch.setattr(Path, "mkdir", fail)
        else:
            Path("old/c/mine").write_text("mine")  # so that chunks are moved one by one
            before, calls, rename = snapshot("old"), [], os.rename

            def second(*args, **options):
                calls.append(args)
                return fail() if len(calls) == 2 else rename(*args, **options)

            patch.setattr(os, "rename", second)
        done = ooc("multiply", "a", "b", "old", *CPU, "-f")
    assert done.code == (130 if isinstance(error, KeyboardInterrupt) else 2), done
    assert snapshot("old") == before
    assert not (zarr.open_array("old", mode="r")[...] != 7).any()


# ------------------------------------------------------------------------ until the new array is finished


def kept(c="old"):
    """The array that C replaces, while it does."""
    return zarr.open_array(f"{c}/{ASIDE}", mode="r")[...]


def test_the_old_array_is_kept_until_the_new_one_is_finished(here, monkeypatch):
    interrupted(monkeypatch, 3, "a", "b", "old", force=True, chunks=(20, 20))
    assert unfinished.is_partial(Folder(here / "old"))
    assert (kept() == 7).all()
    interrupted(monkeypatch, 2, "a", "b", "old", resume=True)
    assert (kept() == 7).all()
    assert ooc("multiply", "a", "b", "old", *CPU).code == 2
    ooc_gemm.multiply("a", "b", "old", resume=True)
    assert product("old")
    assert sorted(os.listdir("old")) == ["c", "zarr.json"]


def test_force_again_keeps_the_first_array(here, monkeypatch):
    Path("old/mine").write_text("mine")
    for _ in range(3):
        interrupted(monkeypatch, 3, "a", "b", "old", force=True, chunks=(20, 20))
        assert (kept() == 7).all()
    ooc_gemm.multiply("a", "b", "old", force=True)
    assert product("old")
    assert sorted(os.listdir("old")) == ["c", "mine", "zarr.json"]


def test_messages_say_what_is_there(here):
    os.truncate("a/c/1/1", 100)
    done = ooc("multiply", "a", "b", "old", *CPU, "-f")
    note, error = done.err.splitlines()
    assert done.code == 1
    assert (
        note == f"Note: the array that old is to replace is kept as {here}/old/{ASIDE} until old is finished"
    )
    assert error.startswith("Error: a: chunk c/1/1")
    assert (kept() == 7).all()
    done = ooc("multiply", "a", "b", "new", *CPU)
    assert done.err.count("\n") == 1


SLOW = """
import signal, sys, time
from ooc_gemm.storage.write import publication
from ooc_gemm.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
written = publication.Publication._written
def slowly(*args):
    written(*args)
    time.sleep(0.2)
publication.Publication._written = slowly
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals(here, sent):
    line = ["multiply", "a", "b", "old", *CPU, "--chunks", "9,9"]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *line, "-f"], stderr=subprocess.PIPE, text=True
    ) as run:
        while len(glob.glob("old/**/*.pending", recursive=True)) < 3:  # folders may go while it looks
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        run.send_signal(sent)
        said = run.communicate()[1]
    if sent != signal.SIGKILL:
        assert f"kept as {here}/old/{ASIDE}" in said
    assert (kept() == 7).all()
    assert ooc(*line, "--resume").code == 0
    assert product("old")
    assert sorted(os.listdir("old")) == ["c", "zarr.json"]


KILLED = """
import os, signal, sys
from ooc_gemm.cli import main
left = int(sys.argv[1])
def counted(name):
    call = getattr(os, name)
    def counting(*args, **options):
        global left
        if any("old" in str(arg) for arg in args[:2]):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return call(*args, **options)
    setattr(os, name, counting)
for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
    counted(name)
main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "first"), [("default", 0), ("version 2", 1)])
def test_a_run_that_is_killed_at_any_step(here, layout, first):
    """There is the old array, or an unfinished one with the old one beside it, or the new one. The run is
    killed before every third change of a name."""
    shutil.rmtree("old")
    make("first", np.full((60, 40), 7.0), chunks=(40, 30), attributes={"x": 1}, **LAYOUTS[layout])
    Path("first/c").mkdir(exist_ok=True) if layout == "default" else None
    Path("first/mine").write_text("mine")
    line, seen = ["multiply", "a", "b", "old", *CPU, "--chunks", "40,30"], set()
    for step in range(first, 60, 3):
        shutil.rmtree("old", ignore_errors=True)
        shutil.copytree("first", "old")
        command = [sys.executable, "-c", KILLED, str(step), *line, "-f"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done
        finished = any(Path("old", key).exists() for key in unfinished.METADATA)
        if finished and (zarr.open_array("old", mode="r")[...] == 7).all():
            seen.add("old")
            assert zarr.open_array("old", mode="r").attrs["x"] == 1
        elif finished:
            seen.add("new")
            assert product("old")
        else:
            seen.add("unfinished")
            assert unfinished.is_partial(Folder(here / "old"))
            assert ooc(*line).code == 2
            if any(Path("old", ASIDE, key).exists() for key in unfinished.METADATA):
                assert (kept() == 7).all()
        again = ["--resume"] if step % 2 and not finished else ["-f"]
        assert ooc(*line, *again).code == 0
        assert product("old")
        assert sorted(os.listdir("old")) == ["c", "mine", "zarr.json"]
    assert done.returncode == 0
    assert seen == {"old", "unfinished", "new"}


def test_a_disk_without_room_for_both(here):
    Path("disk").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", "disk"], capture_output=True
    ).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        make("disk/c", np.full((160, 160), 7.0), chunks=(40, 40), compressors=None)
        make("x", np.eye(160), chunks=(40, 40))
        done = ooc("multiply", "x", "x", "disk/c", *CPU, "-f")
        assert (done.code, "no room for another array beside disk/c" in done.err) == (0, True), done
        assert np.array_equal(zarr.open_array("disk/c", mode="r")[...], np.eye(160))
        assert sorted(os.listdir("disk/c")) == ["c", "zarr.json"]
    finally:
        subprocess.run(["umount", "disk"], check=True)


def test_force_over_the_leftovers_of_a_finished_run(here):
    """The run that has made `old` was killed before it had removed what it has replaced."""
    shutil.copytree("a", f"old/{ASIDE}")
    assert ooc("multiply", "a", "b", "old", *CPU, "-f").code == 0
    assert product("old")
    assert sorted(os.listdir("old")) == ["c", "zarr.json"]


@pytest.mark.parametrize(
    ("keys", "mine", "other"),
    [
        (ownership.Keys(True, "/", (3, 3)), ["c/0/1", "c/9/9", "c/0/1.pending"], ["0/1", "c", "c/0/1/2"]),
        (ownership.Keys(True, ".", (3, 3)), ["c.0.1", "c.0.1.pending"], ["c", "c.0", "c/0/1", "c.x.1"]),
        (ownership.Keys(False, ".", (3, 3)), ["0.1", "2.2"], ["3.0", "0", "0.1.2", "00.1", "0.1.bak"]),
        (ownership.Keys(False, "/", (3, 3)), ["0/1"], ["0.1", "0/3", "3/0", "0/01", "c/0/1", "zarr.json"]),
        (ownership.Keys(True, "/", ()), ["c"], ["0", "c/0"]),
        (ownership.Keys(False, ".", ()), ["0"], ["1", "c"]),
    ],
)  # fmt: skip
def test_keys(keys, mine, other):
    assert [keys.takes(tuple(key.split("/"))) for key in mine] == [True] * len(mine)
    assert [keys.takes(tuple(key.split("/"))) for key in other if keys.takes(tuple(key.split("/")))] == []


# ------------------------------------------------------------------------------------------ object stores


@pytest.fixture
def shelf(server, here, monkeypatch, request):
    """Where nothing is yet, in an object store."""
    monkeypatch.setattr(answers, "abandoned", threading.Event())
    for name, value in s3.environment(server).items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.BUCKET}/{''.join(c if c.isalnum() else '-' for c in request.node.name)}"


def put_array(url):
    """B, object by object: zarr makes no array below another one."""
    for path in Path("b").rglob("*"):
        if path.is_file():
            addresses.objects_at(url).put(str(path.relative_to("b")), path.read_bytes())


def keys(url):
    return sorted(addresses.objects_at(url).all_keys())


@pytest.mark.parametrize("name", ["thesis.pdf.partial", "zarr.json.partial", "ooc-gemm.journal", "c/0/0"])
def test_somebody_else_s_objects_are_left_alone(shelf, name):
    addresses.objects_at(shelf).put(f"c/{name}", b"mine")
    for more in ([], ["-f"]):
        for command in (["multiply", "a", "b"], ["gram", "a"]):
            done = ooc(*command, f"{shelf}/c", *CPU, *more)
            assert (done.code, "left alone" in done.err) == (2, True), done
    assert keys(f"{shelf}/c") == [name]
    assert addresses.objects_at(shelf).read(f"c/{name}", 100) == b"mine"


@pytest.mark.parametrize("layout", ["default", "v2 keys in folders", "version 2"])
def test_other_objects_and_arrays_below_stay(shelf, layout):
    c, options = f"{shelf}/c", LAYOUTS[layout]
    place = addresses.remote_place(c)
    zarr.create_array(place, shape=(60, 40), dtype="f8", chunks=(9, 9), fill_value=0, **options)[...] = 1
    put_array(f"{c}/below")
    mine = ["notes.txt", "thesis.pdf.partial", "2023/1", "99.99", "c/readme"]
    for name in mine:
        addresses.objects_at(c).put(name, b"mine")
    there = {key for key in keys(c) if key.startswith("below/")}
    assert ooc("multiply", "a", "b", c, *CPU).code == 2
    done = ooc("multiply", "a", "b", c, *CPU, "-f", "--chunks", "60,40")
    assert done.code == 0, done
    assert np.array_equal(zarr.open_array(place, mode="r")[...], C)
    assert {*keys(c)} == {*mine, *there, "zarr.json", "c/0/0"}
    assert np.array_equal(zarr.open_array(addresses.remote_place(f"{c}/below"), mode="r")[...], B)


def test_an_array_among_the_chunks_of_another_in_an_object_store(shelf):
    c = f"{shelf}/c"
    zarr.create_array(addresses.remote_place(c), shape=(60, 40), dtype="f8", chunks=(9, 9))[...] = 1
    put_array(f"{c}/c")
    before = keys(c)
    done = ooc("multiply", "a", "b", c, *CPU, "-f")
    assert (done.code, "stands among its chunks" in done.err) == (2, True), done
    assert keys(c) == before
