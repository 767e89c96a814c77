"""The folder of compiled kernels and rates: nothing is read from one that others can write to."""

import json
import os
import stat
import subprocess
import sys

import pytest
from conftest import ooc

from ooc_gemm.cuda_kernels import compile as compiler
from ooc_gemm.cuda_kernels import tuning as tune
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.run import rates
from ooc_gemm.support import cache, remembered

CUBIN = b"\x7fELF kernels"
RECORD = {"date": "2026-01-03", "flops": {}}


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def filled(place):
    cache.write("k.cubin", CUBIN)
    remembered.remember(rates.FILE, CPU().model, RECORD)
    remembered.remember(tune.FILE, "GPU", {"x": {"BM": 1}})
    return place


def known():
    """What is read of what `filled` wrote."""
    return cache.read("k.cubin"), remembered.recall(rates.FILE), remembered.recall(tune.FILE)


NOTHING = None, {}, {}


def as_root():
    if os.geteuid() != 0:
        pytest.skip("only root can give files to other users")


def test_the_folder_is_made_for_this_user_alone(filled):
    before = os.umask(0)
    try:
        cache.write("other", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE(filled.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in filled.iterdir()} == {0o600}
    assert sorted(path.name for path in filled.iterdir()) == ["k.cubin", "other", "rates.json", "tuned.json"]
    assert known() == (CUBIN, {CPU().model: RECORD}, {"GPU": {"x": {"BM": 1}}})
    assert cache.distrusted() == ""


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777, 0o2775])
def test_nothing_is_read_from_a_folder_that_others_may_write_to(filled, mode):
    filled.chmod(mode)
    assert known() == NOTHING
    assert "others may write to it; take that right away with chmod go-w" in cache.distrusted()
    with pytest.raises(PermissionError):
        cache.write("new", b"")
    assert not (filled / "new").exists()
    filled.chmod(0o755)
    assert known() != NOTHING


def test_nothing_is_read_from_a_folder_of_another_user(filled):
    as_root()
    os.chown(filled, 12345, -1)
    assert known() == NOTHING
    assert "it belongs to user 12345, and this process to user 0" in cache.distrusted()
    os.chown(filled, 0, -1)
    assert known() != NOTHING


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_files_that_others_may_write_to_are_not_read(filled, mode):
    for path in filled.iterdir():
        path.chmod(mode)
    assert known() == NOTHING


def test_files_of_other_users_links_and_pipes_are_not_read(filled, tmp_path):
    (tmp_path / "elsewhere").write_bytes(CUBIN)
    (filled / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(filled / "pipe", 0o600)
    assert cache.read("link") is cache.read("pipe") is cache.read("missing") is None
    as_root()
    for path in filled.iterdir():
        os.chown(path, 12345, -1, follow_symlinks=False)
    assert known() == NOTHING


def test_another_user_does_not_run_what_lies_in_a_folder_that_anybody_can_make(tmp_path, monkeypatch):
    """A process of another user plants a cubin in a shared folder, before and after we look at it."""
    as_root()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for folder in (shared, *shared.parents):
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(folder.stat().st_mode | 0o011)
    plant = """
import os, sys
os.makedirs(sys.argv[1], 0o755)
open(sys.argv[1] + "/k.cubin", "wb").write(b"\\x7fELF evil")
"""
    done = subprocess.run(
        ["/usr/bin/python3", "-c", plant, str(shared / "cache")], user=65534, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("OOC_GEMM_CACHE", str(shared / "cache"))
    assert cache.read("k.cubin") is None
    with pytest.raises(PermissionError):
        cache.write("k.cubin", CUBIN)


def test_kernels_are_compiled_anew_where_the_folder_is_not_trusted(filled, monkeypatch):
    config = Config("naive", "float32", 32, 32, (32, 32), (("BM", 32),))
    compiled = []
    monkeypatch.setattr(compiler, "_version", lambda: (13, 0))
    monkeypatch.setattr(compiler, "_compile", lambda *what: compiled.append(what) or CUBIN)
    for mode, times in ((0o700, 1), (0o700, 1), (0o777, 2), (0o777, 3), (0o700, 3)):
        filled.chmod(mode)
        assert compiler.compile_kernel(config, "sm_90a") == CUBIN
        assert len(compiled) == times


@pytest.mark.parametrize(("mode", "in_memory"), [(0o755, None), (0o775, "1"), (0o777, "1"), (None, None)])
def test_cupy_keeps_kernels_in_memory_where_its_folder_is_not_trusted(tmp_path, monkeypatch, mode, in_memory):
    folder = tmp_path / "cupy"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    cache.guard_cupy()
    assert os.environ.get("CUPY_CACHE_IN_MEMORY") == in_memory


# ---- folders that cannot be written to ------------------------------------------------------------


@pytest.fixture(params=["a file", "below a file", "in /proc", "read-only", "others may write"])
def unwritable(request, monkeypatch, tmp_path):
    place = tmp_path / "cache"
    if request.param.endswith("a file"):
        place.write_text("")
        place = place / "below" if request.param.startswith("below") else place
    elif request.param == "in /proc":
        place = "/proc/ooc-gemm"
    else:
        place.mkdir()
        place.chmod(0o500 if request.param == "read-only" else 0o777)
        if request.param == "read-only" and os.access(place, os.W_OK):
            pytest.skip("nothing is read-only for root")
    monkeypatch.setenv("OOC_GEMM_CACHE", str(place))
    for module, name, value in (
        ("chunks", "SIDE", 64), ("chunks", "FOLDER_BYTES", 1 << 20), ("info", "TOUCHED_BYTES", 1 << 20),
        ("kernel_rate", "STEADY", 0.0), ("kernel_rate", "SIDES", (64,)), ("kernel_rate", "DEPTHS", (32, 64)),
        ("info", "TYPES", (("float32", "highest"),)),
    ):  # fmt: skip
        monkeypatch.setattr(f"ooc_gemm.bench.{module}.{name}", value)
    return place


def test_info_shows_what_it_measured_and_says_that_it_cannot_remember_it(unwritable, tmp_path):
    done = ooc("info", "--measure", "--json", tmp_path)
    assert done.code == 0, done
    assert "blas float32" in json.loads(done.out)["rates"][CPU().model]["flops"]
    (line,) = done.err.strip().splitlines()
    assert line.startswith(f"Note: what was measured cannot be remembered in {unwritable}: ")
    assert line.endswith("; set OOC_GEMM_CACHE to a folder that is yours")
    assert remembered.recall(rates.FILE), "this process knows"
    shown = ooc("info")
    assert shown.code == 0
    if os.path.isdir(unwritable):
        assert "is not used: others may write to it" in " ".join(shown.out.split())


def test_tuning_is_shown_where_it_cannot_be_remembered(unwritable):
    remembered.remember(tune.FILE, "GPU", {"x": {"BM": 1}})
    assert "cannot be remembered" in remembered.not_written()
    assert remembered.recall(tune.FILE) == {"GPU": {"x": {"BM": 1}}}


def test_what_could_not_be_written_is_written_when_it_can_be(place):
    place.write_text("a file where the folder should be")
    remembered.remember(rates.FILE, "GPU", {"date": "2026-01-01"})
    assert remembered.not_written()
    place.unlink()
    remembered.remember(rates.FILE, "GPU", {"flops": {}})
    assert not remembered.not_written()
    assert json.loads((place / rates.FILE).read_bytes()) == {"GPU": {"date": "2026-01-01", "flops": {}}}


def test_info_in_a_process_of_its_own_with_a_folder_that_cannot_be_made(tmp_path):
    environment = {**os.environ, "OOC_GEMM_CACHE": "/proc/none", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", "from ooc_gemm.cli import main; main(['info'])"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "cores" in done.stdout
