"""Cuts the power at many instants of runs, and looks at what is on the disk:

    python benchmarks/crashes.py [--instants N] [--failures N] [--seed S] [--folder DIR] [--out FILE]

A run writes C to ext4 on a disk that records every write and flush (`recorder.py`). At an instant the disk
holds all that was written before the last flush, and of what came later everything, nothing, or some of it.
Such a disk is mounted, and must hold the old C, an unfinished C that `--resume` completes to the bit, or the
finished C.

Then flushes fail, with EIO or ENOSPC, one in each run, and what was written since the one before is lost.
`--resume` must complete C to the bit all the same. Last, the disk itself refuses a part of a chunk. Exit
status 1 where one of this does not hold. For root, on Linux.
"""

import contextlib
import errno
import functools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import click
import numpy as np
import zarr
from recorder import Entry, Recorder

import ooc_gemm
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.io import durable, files, locks
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import publication, staging_folder

SLOW = """
import sys, threading, time
from ooc_gemm.storage.io import files
from ooc_gemm.storage.write import publication
from ooc_gemm.cli import main

write = files.write

def slowly(path, data, direct=False):
    write(path, data, direct)
    time.sleep(0.03)

files.write = slowly
publication.SAVED_SECONDS = float(sys.argv[1])
sys.argv[1:] = sys.argv[2:]
main()
"""
"""The command line with a delay for each chunk, so that there are instants between chunks."""
IMAGE_BYTES = 32 << 20
SHAPE = 300, 260, 200
CASES: tuple[dict[str, Any], ...] = (
    {"name": "new C", "beta": 0.0, "saved": 0.1},
    {"name": "new C, a short run", "beta": 0.0, "saved": 60.0},
    {"name": "beta", "beta": 0.5, "saved": 0.1},
    {"name": "beta, a short run", "beta": 0.5, "saved": 60.0},
    {"name": "beta, version 2, zstd", "beta": -1.0, "saved": 0.1, "version": 2},
    {"name": "-f", "beta": 0.0, "saved": 0.1, "force": True},
    {"name": "gram, zstd", "beta": 0.0, "saved": 0.1, "gram": True},
)
CHUNKS = 64, 52
LATER = "the next start of this system"


@contextlib.contextmanager
def mounted(device: Path, place: Path, *options: str) -> Iterator[Path]:
    """Mount an image as a file system."""
    subprocess.run(["mount", "-o", ",".join(("loop", *options)), device, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def make(folder: Path, case: dict[str, Any], rng: np.random.Generator) -> None:
    """Write A, B and the old C."""
    m, n, k = SHAPE
    for name, shape in (("a", (m, k)), ("b", (k, n))):
        array = zarr.create_array(folder / name, shape=shape, chunks=(100, 100), dtype="f4", compressors=None)
        array[...] = rng.standard_normal(shape, np.float32)
    if case["beta"] or case.get("force"):
        version: Any = case.get("version", 3)
        array = zarr.create_array(
            folder / "c", shape=(m, n), chunks=CHUNKS, dtype="f4", zarr_format=version,
            compressors="auto" if version == 2 else None,
        )  # fmt: skip
        array[...] = rng.standard_normal((m, n), np.float32)


def options(case: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `multiply` that `command` gives on the command line."""
    if case["beta"]:
        return {"beta": case["beta"], "alpha": 1.5}
    return {"chunks": CHUNKS if not case.get("gram") else (60, 60)} | (
        {"compressor": "zstd"} if case.get("gram") else {}
    )


def product(folder: Path, case: dict[str, Any], **more: Any) -> Any:
    """Run the product in this process."""
    c = str(folder / "c")
    if case.get("gram"):
        return ooc_gemm.gram(str(folder / "a"), c, device="cpu", **options(case), **more)
    return ooc_gemm.multiply(str(folder / "a"), str(folder / "b"), c, device="cpu", **options(case), **more)


def command(folder: Path, case: dict[str, Any]) -> list[str]:
    """Return the command that a user would type."""
    found = [str(folder / "a"), *([] if case.get("gram") else [str(folder / "b")]), str(folder / "c")]
    for name, value in options(case).items():
        found += [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return ["gram" if case.get("gram") else "multiply", *found, "-d", "cpu", "-Q"] + (
        ["-f"] if case.get("force") else []
    )


def values(c: Path) -> Any:
    """Return the values of the stored C; None if there is no array."""
    if not any((c / key).exists() for key in unfinished.METADATA):
        return None
    return zarr.open_array(c, mode="r")[...]


def same(one: Any, other: Any) -> bool:
    """Whether both are None, or equal to the bit."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def unsettle(place: Path, log: list[Entry], began: list[int], ended: list[bool]) -> None:
    """Flush another file all the time. Each flush also writes the file system's journal, so names reach the
    disk before the contents of files. `began` gets the length of the log at which the run had begun."""
    with open(place / "other", "wb", buffering=0) as file:
        while not ended:
            if not began and (place / "c" / unfinished.JOURNAL).exists():
                began.append(max(0, len(log) - 30))
            file.write(b"x" * 100)
            os.fsync(file.fileno())
            time.sleep(0.005)


def record(scratch: Path, case: dict[str, Any], seed: int) -> tuple[bytes, list[Entry], int, Any, Any]:
    """Record one run. Returns the disk before it, what was written, the first entry that the run wrote, and
    the values of C before and after."""
    image, place, behind = scratch / "image", scratch / "mounted", scratch / "recorder"
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", "-m", "0", image], check=True)
    with mounted(image, place):
        make(place, case, np.random.default_rng(seed))
        old = values(place / "c")
    script = scratch / "slow.py"
    script.write_text(SLOW)
    with Recorder(behind, image.read_bytes()) as recorder:
        with mounted(recorder.path, place, "noauto_da_alloc", "commit=1"):
            before, start = bytes(recorder.data), len(recorder.log)
            began, ended = list[int](), list[bool]()
            other = Thread(target=unsettle, args=(place, recorder.log, began, ended))
            other.start()
            try:
                subprocess.run(
                    [sys.executable, str(script), str(case["saved"]), *command(place, case)],
                    check=True,
                    capture_output=True,
                )
                want = values(place / "c")
                stop = len(recorder.log)
            finally:
                ended.append(True)
                other.join()
        assert want is not None
        return before, recorder.log[start:stop], (began or [start])[0] - start, old, want


def on_the_disk(before: bytes, log: list[Entry], instants: list[int], draw: random.Random) -> Iterator[bytes]:
    """Yield the disk at instants, in rising order. It holds what was flushed, and some of the rest."""
    data, flushed = bytearray(before), 0
    for instant in instants:
        last = max((at for at in range(flushed, instant) if log[at] is None), default=flushed)
        for entry in log[flushed:last]:
            if entry:
                data[entry[0] : entry[0] + len(entry[1])] = entry[1]
        flushed = last
        found, share = bytearray(data), draw.choice((0.0, 0.5, 0.9, 1.0, 1.0))
        for entry in log[last:instant]:
            if entry and draw.random() < share:
                found[entry[0] : entry[0] + len(entry[1])] = entry[1]
        yield bytes(found)


def judged(place: Path, case: dict[str, Any], old: Any, want: Any) -> tuple[str, str]:
    """Return what C is (old, unfinished, finished), and what is wrong with it, if anything."""
    c = place / "c"
    try:
        found = values(c)
    except Exception as error:
        return "lost", f"it cannot be opened: {error}"
    if unfinished.is_partial(Folder(c)):
        state = "unfinished"
    elif found is None:
        state = "old" if old is None else "lost"
    elif same(found, want):
        state = "finished"
    else:
        state = "old" if same(found, old) else "wrong"
    if state in ("lost", "wrong"):
        return state, f"{sorted(path.name for path in c.iterdir()) if c.exists() else 'nothing'}"
    again: dict[str, Any] = {"resume": True}
    if state == "finished" or (state == "old" and not (c / unfinished.JOURNAL).exists()):
        again = {"force": True} if not case["beta"] else {} if state == "old" else {"resume": True}
    if state == "old" and case.get("force"):
        again = {"force": True}
    if state == "finished" and not (c / unfinished.JOURNAL).exists():
        return state, ""
    try:
        product(place, case, **again)
        made = values(c)
    except Exception as error:
        return state, f"{type(error).__name__}: {error}"
    ours = (unfinished.JOURNAL, unfinished.JOURNAL + durable.NEW, locks.OWNER)
    left = [path.name for path in c.rglob("*") if path.name in ours or ".partial" in path.name]
    left += [path.name for path in c.rglob("*" + staging_folder.PENDING)]
    return state, "" if same(made, want) and not left else f"it differs, or there is left: {left}"


def cut(case: dict[str, Any], instants: int, seed: int, scratch: Path) -> dict[str, Any]:
    """Let the power fail at so many instants of a run."""
    draw, states, bad = random.Random(seed), Counter[str](), list[str]()
    before, log, began, old, want = record(scratch, case, seed)
    chosen = sorted(draw.sample(range(began + 1, len(log) + 1), min(instants, len(log) - began)))
    image, place = scratch / "image", scratch / "mounted"
    for instant, data in zip(chosen, on_the_disk(before, log, chosen, draw), strict=True):
        image.write_bytes(data)
        with mounted(image, place):
            state, wrong = judged(place, case, old, want)
        states[state] += 1
        if wrong or state in ("lost", "wrong"):
            bad.append(f"after {instant} of {len(log)} writes, {state}: {wrong}")
    flushes = sum(entry is None for entry in log)
    return {
        "case": case["name"], "writes": len(log) - flushes, "flushes": flushes, "began": began,
        "instants": len(chosen),
        **{name: states[name] for name in ("old", "unfinished", "finished", "lost", "wrong")}, "bad": bad,
    }  # fmt: skip


# ------------------------------------------------------------------------------------- flushes that fail


class Failing:
    """Lets one flush of this process fail."""

    def __init__(self, c: Path, which: int, number: int):
        """`which`: the number of the flush that fails. `number`: its errno."""
        self._c, self._which, self._number, self.count = c, which, number, 0
        self._safe: set[tuple[str, int]] = set()

    def flush(self, real: Any, what: Any) -> None:
        """Flush, or fail instead."""
        self.count += 1
        if self.count != self._which:
            real(what)
            if real is SYNCFS:
                self._safe = set(self._pending())
            return
        for path, number in self._pending():  # the system has given up what it held of them
            if (path, number) in self._safe:
                continue
            found = os.stat(path)
            with open(path, "r+b") as file:
                file.write(bytes(found.st_size))
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        raise OSError(self._number, os.strerror(self._number))

    def _pending(self) -> list[tuple[str, int]]:
        found = list[tuple[str, int]]()
        for path in self._c.rglob("*" + staging_folder.PENDING):
            with contextlib.suppress(FileNotFoundError):
                found.append((str(path), path.stat().st_ino))
        return found


FSYNC, SYNCFS = os.fsync, files.flush


def run_with(failing: Failing, folder: Path, case: dict[str, Any], **more: Any) -> bool:
    """Run the product in this process, and return whether it finished."""
    os.fsync, files.flush = functools.partial(failing.flush, FSYNC), functools.partial(failing.flush, SYNCFS)
    before, publication.SAVED_SECONDS = publication.SAVED_SECONDS, case["saved"] / 10
    try:
        product(folder, case, **more)
    except ooc_gemm.Error:
        return False
    finally:
        os.fsync, files.flush, publication.SAVED_SECONDS = FSYNC, SYNCFS, before
    return True


def fail(failures: int, seed: int, scratch: Path) -> dict[str, Any]:
    """Let one flush fail in each of so many runs."""
    draw, bad, done = random.Random(seed), list[str](), Counter[str]()
    cases = [case for case in CASES if case["name"] != "-f"]
    for index in range(failures):
        case, number = cases[index % len(cases)], (errno.EIO, errno.ENOSPC)[index // len(cases) % 2]
        folder = scratch / "disk"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make(folder, case, np.random.default_rng(seed))
        old = values(folder / "c")
        if old is not None:
            shutil.copytree(folder / "c", scratch / "kept", dirs_exist_ok=True)
        whole = Failing(folder / "c", 0, 0)
        run_with(whole, folder, case)
        want = values(folder / "c")
        shutil.rmtree(folder / "c")
        if old is not None:
            shutil.move(scratch / "kept", folder / "c")
        which = draw.randrange(1, whole.count + 1)
        ended = run_with(Failing(folder / "c", which, number), folder, case)
        state = "finished" if ended else "failed"
        try:
            begun = unfinished.is_partial(Folder(folder / "c"))
            if not ended and not begun and same(values(folder / "c"), old):
                state = "not begun"
                product(folder, case)
            elif not ended:
                product(folder, case, resume=True)
            if not same(values(folder / "c"), want):
                bad.append(f"{case['name']}, flush {which} of {whole.count}: it differs")
        except Exception as error:
            bad.append(f"{case['name']}, flush {which} of {whole.count}: {type(error).__name__}: {error}")
        done[state] += 1
    return {"runs": failures, **done, "bad": bad}


def rot(runs: int, seed: int, scratch: Path) -> dict[str, Any]:
    """Let the disk refuse a part of a chunk in each of so many runs. The system reports that once."""
    draw, bad, refused = random.Random(seed), list[str](), 0
    case: dict[str, Any] = {"name": "beta", "beta": 0.5, "saved": 0.1}
    *_, want = record(scratch, case, seed)
    padded = np.zeros((-(-SHAPE[0] // CHUNKS[0]) * CHUNKS[0], -(-SHAPE[1] // CHUNKS[1]) * CHUNKS[1]), "f4")
    padded[: SHAPE[0], : SHAPE[1]] = want
    starts = list[bytes]()
    for row in range(0, padded.shape[0], CHUNKS[0]):
        for col in range(0, padded.shape[1], CHUNKS[1]):
            starts.append(padded[row : row + CHUNKS[0], col : col + CHUNKS[1]].tobytes()[:4096])
    image, place, behind = scratch / "image", scratch / "mounted", scratch / "recorder"
    for _ in range(runs):
        with mounted(image, place):
            shutil.rmtree(place / "c")
            make_again(place, case, seed)
        victim, struck = draw.choice(starts), list[int]()

        def refuse(offset: int, data: bytes, victim: bytes = victim, struck: list[int] = struck) -> int:
            if struck or victim not in data:
                return 0
            struck.append(offset)
            return errno.EIO

        with Recorder(behind, image.read_bytes()) as recorder:
            with mounted(recorder.path, place):
                recorder.fail = refuse
                with contextlib.suppress(ooc_gemm.Error):
                    run_with(Failing(place / "c", 0, 0), place, case)
                refused += len(struck)
                try:
                    if unfinished.is_partial(Folder(place / "c")):
                        product(place, case, resume=True)
                except Exception as error:
                    bad.append(f"{type(error).__name__}: {error}")
            data = bytes(recorder.data)
        image.write_bytes(data)
        with mounted(image, place):  # what the disk has, not what the system remembers
            if not same(values(place / "c"), want):
                bad.append("what is on the disk differs")
    return {"runs": runs, "refused": refused, "bad": bad}


def make_again(place: Path, case: dict[str, Any], seed: int) -> None:
    """Write A, B and the old C again, in place of those that are there."""
    for name in "ab":
        shutil.rmtree(place / name)
    make(place, case, np.random.default_rng(seed))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--instants", default=280, show_default=True, help="All cases together.")
@click.option("--failures", default=50, show_default=True, help="Runs in which a flush fails.")
@click.option("--cases", default=len(CASES), help="Only so many.  [default: all]")
@click.option("--seed", default=1, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="For images.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A log, as JSON.")
def main(instants: int, failures: int, cases: int, seed: int, folder: Path | None, out: Path | None) -> None:
    """Cut the power at many instants of runs, mount what is on the disk, resume, and compare."""
    started, rows = time.perf_counter(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        for made in ("mounted", "recorder"):
            (scratch / made).mkdir()
        real, locks.boot_id = locks.boot_id, lambda: LATER
        for index, case in enumerate(CASES[:cases]):
            share = (instants - sum(row["instants"] for row in rows)) // (cases - index)
            rows.append(cut(case, share, seed + index, scratch))
            row = rows[-1]
            states = ", ".join(
                f"{row[name]} {name}" for name in ("old", "unfinished", "finished", "lost", "wrong")
            )
            click.echo(f"{case['name']:22} {row['instants']:3} of {row['writes']:5} writes: {states}")
            for said in row["bad"]:
                click.echo(f"    {said}")
        locks.boot_id = real
        failed = fail(failures, seed, scratch)
        click.echo(f"{failures} runs with a flush that fails: {failed}")
        rotten: dict[str, Any] = {"runs": 0, "bad": []}
        if failures:
            rotten = rot(max(1, failures // 10), seed, scratch)
        click.echo(f"{rotten['runs']} runs on a disk that fails: {rotten}")
    bad = sum(len(row["bad"]) for row in (*rows, failed, rotten))
    if out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit, "seed": seed,
            "version": ooc_gemm.__version__, "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
            "system": f"{platform.system()} {platform.release()}", "python": platform.python_version(),
            "zarr": zarr.__version__, "numpy": np.__version__,
            "file system": "ext4, noauto_da_alloc, commit=1",
            "instants": sum(row["instants"] for row in rows),
            "lost": sum(row["lost"] for row in rows), "wrong": sum(row["wrong"] for row in rows),
            "bad": bad, "rows": rows, "flushes that fail": failed, "disks that fail": rotten,
        }  # fmt: skip
        out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    click.echo(f"{bad} of all not right, {time.perf_counter() - started:.0f} s, seed {seed}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
