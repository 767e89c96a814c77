"""Interrupted runs, and how they are continued. The oracle is NumPy, and for bits an uninterrupted run."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import make
from interruption import interrupted, old_c
from outcome import snapshot

import ooc_gemm
from ooc_gemm import InputError
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.io import files, listing, locks
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import journal, publication, staging_folder

M, N, K = 300, 260, 200
LIMIT = "300MiB"


@pytest.fixture
def arrays(tmp_path):
    """Paths of A, B and C; values of A, B and the C that was."""
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(shape, np.float32) for shape in ((M, K), (K, N), (M, N))]
    for name, value in zip("ab", values, strict=False):
        made = zarr.create_array(
            tmp_path / name, shape=value.shape, chunks=(64, 64), dtype="f4", compressors=None
        )
        made[...] = value
    return *(str(tmp_path / name) for name in "abc"), *values


def no_trace(c):
    """C is a result, and nothing but that."""
    left = {path.name for path in Path(c).iterdir()} - {"zarr.json", "c"}
    return not left and not list(Path(c).rglob("*" + staging_folder.PENDING))


@pytest.mark.parametrize("saved", [0.0, 60.0])
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("count", [0, 7, 29])
def test_a_run_is_continued(arrays, monkeypatch, beta, count, saved):
    a, b, c, *_, old = arrays
    options = {"beta": beta, "memory_limit": LIMIT} | ({} if beta else {"chunks": (50, 52)})
    if beta:
        old_c(c + "1", old)
        old_c(c, old)
    ooc_gemm.multiply(a, b, c + "1", **options)
    interrupted(monkeypatch, count, a, b, c, saved=saved, **options)
    assert unfinished.is_partial(Folder(Path(c)))
    result = ooc_gemm.multiply(a, b, c, resume=True, **options)
    assert np.array_equal(zarr.open_array(c)[...], zarr.open_array(c + "1")[...])
    assert result.bytes_read == result.plan.bytes_read
    assert result.bytes_written == result.plan.bytes_written == (30 - count) * 50 * 52 * 4
    assert no_trace(c)


@pytest.mark.parametrize("layout", ["v2", "checksum", "zstd"])
def test_beta_comes_in_once_whatever_the_layout(arrays, monkeypatch, layout):
    a, b, c, x, y, old = arrays
    options = {
        "v2": {"zarr_format": 2},
        "checksum": {"compressors": [zarr.codecs.Crc32cCodec()]},
        "zstd": {"compressors": "auto"},
    }[layout]
    old_c(c, old, **{"compressors": None, **options})
    for count in (5, 1, 11):
        resume = {"resume": True} if unfinished.is_partial(Folder(Path(c))) else {}
        interrupted(monkeypatch, count, a, b, c, beta=-2, memory_limit=LIMIT, **resume)
    result = ooc_gemm.multiply(a, b, c, beta=-2 + 0j, memory_limit="400MiB", resume=True)
    want = x.astype("f8") @ y - 2.0 * old
    made = zarr.open_array(c)
    np.testing.assert_allclose(made[...], want, atol=1e-3)
    assert made.attrs["mine"] == 1
    assert made.attrs["ooc-gemm"]["options"]["beta"] == "-2.0"
    assert result.bytes_written == (30 - 17) * 50 * 52 * 4
    assert not list(Path(c).rglob("*" + staging_folder.PENDING))
    assert not (Path(c) / unfinished.JOURNAL).exists()


def test_another_memory_limit_and_thread_count(arrays, monkeypatch):
    a, b, c, x, y, _ = arrays
    interrupted(monkeypatch, 60, a, b, c, chunks=(16, 16), memory_limit=LIMIT)
    device = CPU(threads=3)
    result = ooc_gemm.multiply(a, b, c, chunks=(16, 16), memory_limit="500MiB", device=device, resume=True)
    np.testing.assert_allclose(zarr.open_array(c)[...], x.astype("f8") @ y, atol=1e-3)
    assert result.bytes_written == (19 * 17 - 60) * 16 * 16 * 4


@pytest.mark.slow
def test_blocks_that_are_done_are_not_read_for(tmp_path, monkeypatch):
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((2, 1500, 1500))
    a, b = (make(tmp_path / name, value, chunks=(250, 250)) for name, value in (("a", x), ("b", y)))
    c, options = str(tmp_path / "c"), {"chunks": (100, 100)}
    with pytest.raises(ooc_gemm.BudgetError) as refused:
        ooc_gemm.plan(a, b, memory_limit="1MiB", **options)
    options["memory_limit"] = refused.value.minimum_memory_limit + (12 << 20)
    whole = ooc_gemm.plan(a, b, **options)
    assert whole.block_count > 2
    interrupted(monkeypatch, 150, a, b, c, **options)
    result = ooc_gemm.multiply(a, b, c, resume=True, **options)
    assert result.blocks > result.blocks_resumed > 0
    assert result.bytes_read == result.plan.bytes_read < whole.bytes_read
    assert result.bytes_written == result.plan.bytes_written == 75 * 80000
    np.testing.assert_allclose(zarr.open_array(c)[...], x @ y, atol=1e-9)


@pytest.mark.parametrize("shards", [None, (100, 100)])
def test_gram_is_continued(arrays, monkeypatch, shards):
    a, _, c, x, *_ = arrays
    options = {"chunks": (50, 50), "shards": shards, "memory_limit": LIMIT, "compressor": "zstd"}
    interrupted(monkeypatch, 4, a, c, run=ooc_gemm.gram, **options)
    ooc_gemm.gram(a, c, resume=True, **options)
    got = zarr.open_array(c)[...]
    np.testing.assert_allclose(got, x.astype("f8") @ x.T, atol=1e-3)
    assert np.array_equal(got, got.T)


def test_chunks_of_nothing_but_zeros_count(arrays, monkeypatch):
    a, b, c, *_ = arrays
    interrupted(monkeypatch, 4, a, b, c, alpha=0, chunks=(50, 52), shards=(100, 104))
    result = ooc_gemm.multiply(a, b, c, alpha=0, chunks=(50, 52), shards=(100, 104), resume=True)
    assert result.bytes_written == 5 * 100 * 104 * 4
    assert not zarr.open_array(c)[...].any()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def partial(arrays, monkeypatch):
    """A and B, and a C that is not finished."""
    a, b, c, *_ = arrays
    interrupted(monkeypatch, 7, a, b, c, chunks=(50, 52))
    return a, b, c


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 2}, "alpha was 1.0 and is 2.0"),
        ({"transpose_a": True, "transpose_b": True}, r"shape was \[300, 260, 200\]"),
        ({"out_dtype": "f8"}, "out_dtype was float32 and is float64"),
        ({"chunks": (25, 26)}, r"chunks was \[50, 52\] and is \[25, 26\]"),
        ({"compressor": "zstd"}, "compressor was none and is zstd"),
        ({"precision": "medium"}, "precision was highest and is medium"),
    ],
)
def test_other_options_are_refused(partial, options, said):
    a, b, c = partial
    operands = (b, a) if "transpose_a" in options else (a, b)
    before = snapshot(c)
    with pytest.raises(InputError, match=said):
        ooc_gemm.multiply(*operands, c, resume=True, **{"chunks": (50, 52), **options})
    after = snapshot(c)
    for found in (before, after):
        del found[str(Path(c) / unfinished.JOURNAL)]
    assert after == before
    ooc_gemm.multiply(a, b, c, resume=True, chunks=(50, 52))


@pytest.mark.parametrize("change", ["value", "missing", "metadata", "another"])
def test_changed_inputs_are_refused(partial, change):
    a, b, c = partial
    if change == "value":
        zarr.open_array(a)[0, 0] += 1
    elif change == "missing":
        (Path(a) / "c" / "1" / "1").unlink()
    elif change == "metadata":
        path = Path(a) / "zarr.json"
        path.write_text(path.read_text().replace('"fill_value": 0.0', '"fill_value": 1.0'))
    else:
        shutil.copytree(a, a + "2")
        a += "2"
    with pytest.raises(InputError, match=r"cannot be continued: .*a was changed since, or is another array"):
        ooc_gemm.multiply(a, b, c, resume=True, chunks=(50, 52))


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("change", ["done", "gone", "not yet"])
def test_a_changed_c_is_refused(arrays, monkeypatch, beta, change):
    a, b, c, *_, old = arrays
    if beta:
        old_c(c, old)
    options = {"beta": beta} | ({} if beta else {"chunks": (50, 52)})
    interrupted(monkeypatch, 7, a, b, c, **options)
    done = [path for path in Path(c).rglob("c/*/*") if path.stat().st_mtime_ns > Path(b).stat().st_mtime_ns]
    log = [json.loads(line) for line in (Path(c) / unfinished.JOURNAL).read_text().splitlines()]
    chunks = {tuple(entry["chunk"]) for entry in log if "chunk" in entry}
    assert done
    assert len(chunks) == 7
    (i, j), path = min(chunks), Path(c) / "c"
    if change == "gone":
        (path / str(i) / str(j)).unlink()
    elif change == "done":
        (path / str(i) / str(j)).write_bytes(bytes(50 * 52 * 4))
    elif beta:
        i, j = next((i, j) for i in range(6) for j in range(5) if (i, j) not in chunks)
        (path / str(i) / str(j)).write_bytes(bytes(50 * 52 * 4))
    else:
        pytest.skip("what is not done yet is of no account")
    with pytest.raises(InputError, match="cannot be continued: "):
        ooc_gemm.multiply(a, b, c, resume=True, **options)


def test_without_resume_a_partial_c_is_left_alone(partial):
    a, b, c = partial
    before = snapshot(c)
    for run in (
        lambda: ooc_gemm.multiply(a, b, c),
        lambda: ooc_gemm.multiply(a, b, c, beta=1),
        lambda: ooc_gemm.multiply(c, b, a + "3"),
    ):
        with pytest.raises(
            InputError, match=r"unfinished result of an interrupted run; continue .*resume=True"
        ):
            run()
    assert snapshot(c) == before
    ooc_gemm.multiply(a, b, c, force=True)
    assert no_trace(c)


def test_resume_without_anything_begins(arrays):
    a, b, c, x, y, _ = arrays
    result = ooc_gemm.multiply(a, b, c, resume=True)
    assert result.blocks_resumed == 0
    np.testing.assert_allclose(zarr.open_array(c)[...], x.astype("f8") @ y, atol=1e-3)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_was_killed_as_it_began(arrays, resume):
    a, b, c, x, y, _ = arrays
    journal.begin_in_folder(Path(c), "c", {"inputs": {}, "options": {}}).close()
    (Path(c) / "zarr.json.00ff.partial").write_text("{")
    ooc_gemm.multiply(a, b, c, resume=resume)
    np.testing.assert_allclose(zarr.open_array(c)[...], x.astype("f8") @ y, atol=1e-3)
    assert no_trace(c)


def test_resume_of_what_is_finished(arrays):
    """It is done already, or refused where C is the result of something else."""
    a, b, c, *_ = arrays
    ooc_gemm.multiply(a, b, c)
    before = snapshot(c)
    with pytest.raises(InputError, match="is not the unfinished result of an interrupted run"):
        ooc_gemm.multiply(a, b, c, beta=1, resume=True)
    ooc_gemm.multiply(a, b, c, beta=0, resume=True)
    assert snapshot(c) == before


@pytest.mark.parametrize("kind", [str, Path])
def test_resume_of_what_does_not_say_what_it_was_made_of(arrays, kind):
    *_, c, x, y, _ = arrays
    ooc_gemm.multiply(x, y, kind(c))
    with pytest.raises(InputError, match="is not the unfinished result of an interrupted run"):
        ooc_gemm.multiply(x, y, kind(c), resume=True)


@pytest.mark.parametrize("damage", ["gone", "head", "middle", "version"])
def test_a_damaged_journal_is_refused(partial, damage):
    a, b, c = partial
    path = Path(c) / unfinished.JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "gone":
        path.unlink()
    elif damage == "head":
        path.write_bytes(b"{" + b"".join(lines))
    elif damage == "middle":
        assert any(b"durable" in line for line in lines[4:])
        path.write_bytes(b"".join([*lines[:3], b"\0\0\0\n", *lines[4:]]))
    else:
        path.write_bytes(b"".join([lines[0].replace(b'"version": 1', b'"version": 99'), *lines[1:]]))
    with pytest.raises(InputError, match=r"no journal|is damaged|another version"):
        ooc_gemm.multiply(a, b, c, resume=True, chunks=(50, 52))


@pytest.mark.parametrize("beta", [0, 0.5])
@pytest.mark.parametrize("tail", [b'{"chunk": [0, 0], "now": [1, 2], "w', b"\0\0\0\0\n\0\0", b""])
def test_when_the_system_went_down(arrays, monkeypatch, beta, tail):
    """Of another start of the system only what was made durable counts."""
    a, b, c, *_, old = arrays
    options = {"beta": beta} if beta else {"chunks": (50, 52)}
    if beta:
        old_c(c + "1", old)
        old_c(c, old)
    ooc_gemm.multiply(a, b, c + "1", **options)
    monkeypatch.setattr(
        publication.Publication, "pause", lambda self: self._log.close()
    )  # nobody had time for that
    interrupted(monkeypatch, 20, a, b, c, saved=60.0, **options)
    path = Path(c) / unfinished.JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 22
    lines.insert(10, b'{"durable": 8}\n')
    path.write_bytes(b"".join(lines).replace(locks.boot_id().encode(), b"some-other-start") + tail)
    for line in lines[11:]:  # they were not on the disk
        i, j = json.loads(line)["chunk"]
        (Path(c) / "c" / str(i) / (str(j) + staging_folder.PENDING)).write_bytes(b"")
    result = ooc_gemm.multiply(a, b, c, resume=True, **options)
    assert result.bytes_written == (30 - 8) * 50 * 52 * 4
    assert np.array_equal(zarr.open_array(c)[...], zarr.open_array(c + "1")[...])


HOLD = """
import sys, time
import ooc_gemm
def wait(fraction, plan, trace):
    print("at work", flush=True)
    time.sleep(60)
ooc_gemm.multiply(*sys.argv[1:4], progress=wait)
"""


def test_a_second_process_is_refused(arrays):
    a, b, c, *_ = arrays
    with subprocess.Popen([sys.executable, "-c", HOLD, a, b, c], stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"at work\n"
        for options in ({}, {"force": True}, {"resume": True}):
            with pytest.raises(InputError, match="is being written by another process"):
                ooc_gemm.multiply(a, b, c, **options)
        first.kill()
    ooc_gemm.multiply(a, b, c, resume=True)


def test_short_runs_do_not_wait_for_the_disk(arrays, monkeypatch):
    a, b, c, *_ = arrays
    monkeypatch.setattr(files, "flush", lambda folder: pytest.fail("it waits"))
    ooc_gemm.multiply(a, b, c)
    assert no_trace(c)


def test_longer_runs_flush_before_they_put_chunks_in_place(arrays, monkeypatch):
    a, b, c, *_ = arrays
    events, flush, move = [], files.flush, listing.rename
    monkeypatch.setattr(publication, "SAVED_SECONDS", 0.0)
    monkeypatch.setattr(files, "flush", lambda folder: (flush(folder), events.append("flush")))

    def watched(pairs):
        events.extend("place" for old, _ in pairs if old.endswith(staging_folder.PENDING))
        return move(pairs)

    monkeypatch.setattr(listing, "rename", watched)
    ooc_gemm.multiply(a, b, c, chunks=(50, 52))
    assert events[0] == "flush"
    assert events.count("place") == 30


def test_arrays_in_memory_have_no_journal(arrays):
    _, b, c, x, y, _ = arrays
    ooc_gemm.multiply(x, b, c)
    assert no_trace(c)
    assert "inputs" not in zarr.open_array(c).attrs["ooc-gemm"], "nobody could know them again"
    np.testing.assert_allclose(zarr.open_array(c)[...], x.astype("f8") @ y, atol=1e-3)


@pytest.mark.slow
def test_the_command_line(arrays, tmp_path):
    a, b, c, x, y, _ = arrays
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\nfrom ooc_gemm.storage.write import publication\nfrom ooc_gemm.cli import main\n"
        "write = publication.Publication._written\n"
        "def slowly(*args):\n    write(*args)\n    time.sleep(0.1)\n"
        "publication.Publication._written = slowly\nmain()\n"
    )
    command = ["multiply", a, b, c, "--chunks", "50,52", "-Q"]
    with subprocess.Popen([sys.executable, str(script), *command]) as run:
        while len(list(Path(c).rglob("*" + staging_folder.PENDING))) < 5:
            assert run.poll() is None
            time.sleep(0.02)
        run.kill()

    def again(*more):
        done = subprocess.run(
            [sys.executable, "-m", "ooc_gemm.cli", *command, *more], capture_output=True, text=True
        )
        return done.returncode, done.stderr

    status, said = again()
    assert status == 2
    assert "continue it with --resume" in said
    status, said = again("--resume", "--alpha", "3")
    assert status == 2
    assert "alpha was 1.0 and is 3" in said
    status, said = again("--resume")
    assert status == 0
    assert "blocks are done already" in said
    np.testing.assert_allclose(zarr.open_array(c)[...], x.astype("f8") @ y, atol=1e-3)


@pytest.mark.slow
def test_kills(tmp_path):
    """A few of the kills that benchmarks/kills.py makes."""
    program = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, str(program), "--kills", "6", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all right") == 6
