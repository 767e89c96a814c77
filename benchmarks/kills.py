"""Kills runs with SIGKILL at random moments and continues them, until they are done:

    python benchmarks/kills.py [--kills N] [--device NAME] [--seed S] [--folder DIR] [--out FILE]

Each case is a product with β = 0 or β ≠ 0, of some layout of C. It is made once without interruption; then a
run is killed again and again, each time after a random part of the time that it takes, and continued with
`--resume`. At the end C must be the same to the bit, and every chunk of C must have been written once, but
for those that were being written when a kill came: of these there are no more than writers. Exit status 1
where one of this does not hold.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr

import ooc_gemm
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import staging_folder

SLOW = """
import sys, time
from ooc_gemm.storage.io import files
from ooc_gemm.storage.write import publication
from ooc_gemm.cli import main

write, start_write = files.write, files.start_write
delay, log = float(sys.argv[1]), open(sys.argv[2], "a", buffering=1)

def slowly(path, data, direct=False):
    write(path, data, direct)
    print(path, file=log)
    time.sleep(delay)

def start_slowly(path, data):
    end = start_write(path, data)
    def ended():
        whole = end()
        print(path, file=log)
        time.sleep(delay)
        return whole
    return ended

files.write, files.start_write = slowly, start_slowly
publication.SAVED_SECONDS = float(sys.argv[3])
sys.argv[1:] = sys.argv[4:]
main()
"""
"""The command line with a slower disk and a list of what is written, so that a kill finds the run at work,
whatever else this machine does."""
WRITERS = 8
CASES: tuple[dict[str, Any], ...] = (
    {"beta": 0.0, "gram": False, "chunks": (64, 96), "compressor": "none", "saved": 0.0},
    {"beta": 0.5, "gram": False, "chunks": (96, 64), "compressor": "none", "saved": 0.05},
    {"beta": -1.0, "gram": False, "chunks": (100, 100), "compressor": "zstd", "saved": 0.0},
    {"beta": 0.5, "gram": False, "chunks": (64, 64), "compressor": "none", "saved": 60.0},
    {"beta": 0.0, "gram": True, "chunks": (96, 96), "compressor": "none", "saved": 0.1},
    {"beta": 0.0, "gram": False, "chunks": (128, 64), "compressor": "blosc", "saved": 60.0},
)
SHAPE = 700, 650, 300


def make(folder: Path, case: dict[str, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Write A, B and the old C, and return the values of the old C."""
    m, n, k = SHAPE
    for name, shape in (("a", (m, k)), ("b", (k, n))):
        array = zarr.create_array(folder / name, shape=shape, chunks=(128, 100), dtype="f4", compressors=None)
        array[...] = rng.standard_normal(shape, np.float32)
    return rng.standard_normal((m, n), np.float32)


def before(folder: Path, name: str, case: dict[str, Any], old: np.ndarray[Any, Any]) -> None:
    """Bring C into the state before a run."""
    shutil.rmtree(folder / name, ignore_errors=True)
    if case["beta"]:
        codec: Any = None if case["compressor"] == "none" else "auto"
        array = zarr.create_array(
            folder / name, shape=old.shape, chunks=case["chunks"], dtype="f4", compressors=codec
        )
        array[...] = old


def finished(c: Path) -> bool:
    """Whether C says that it is finished, which it does even if the process was killed just afterwards."""
    key = c / unfinished.METADATA[0]
    return (
        not unfinished.is_partial(Folder(c))
        and key.exists()
        and "ooc-gemm" in json.loads(key.read_text())["attributes"]
    )


def command(folder: Path, c: str, case: dict[str, Any], device: str) -> list[str]:
    """Return the command that a user would type."""
    inputs = [str(folder / "a")] if case["gram"] else [str(folder / "a"), str(folder / "b")]
    options = ["-d", device, "-Q", "--json", "-M", "2GiB" if device != "cpu" else "112MiB"]
    if case["beta"]:
        options += ["--beta", str(case["beta"]), "--alpha", "1.5"]
    else:
        options += ["--chunks", ",".join(map(str, case["chunks"])), "--compressor", case["compressor"]]
    return ["gram" if case["gram"] else "multiply", *inputs, str(folder / c), *options]


def run(
    folder: Path, c: str, case: dict[str, Any], device: str, delay: float, limit: float | None, *more: str
) -> tuple[int, str, float]:
    """Run a process and kill it after `limit` seconds. Returns its exit status, its output, and its
    seconds."""
    script = folder / "slow.py"
    script.write_text(SLOW)
    args = [str(delay), str(folder / "written"), str(case["saved"]), *command(folder, c, case, device), *more]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(script), *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
    return process.returncode, said, time.perf_counter() - started


def one(case: dict[str, Any], device: str, kills: int, draw: random.Random, folder: Path) -> dict[str, Any]:
    """Kill a product `kills` times in all, starting it again as often as that takes."""
    rng = np.random.default_rng(draw.randrange(2**32))
    old, delay = make(folder, case, rng), 0.04
    before(folder, "whole", case, old)
    status, said, seconds = run(folder, "whole", case, device, delay, None)
    assert status == 0, said
    want = zarr.open_array(folder / "whole", mode="r")[...]
    chunks = len((folder / "written").read_text().splitlines())
    found: dict[str, Any] = {"case": case, "chunks": chunks, "killed": 0, "again": 0, "done": 0, "wrong": []}
    while found["killed"] < kills:
        before(folder, "c", case, old)
        (folder / "written").unlink()
        (folder / "written").touch()
        killed = 0
        while not finished(folder / "c"):
            resume = ["--resume"] if unfinished.is_partial(Folder(folder / "c")) else []
            limit = draw.uniform(0.3, 1.1) * seconds
            status, said, took = run(folder, "c", case, device, delay, limit, *resume)
            if status == -signal.SIGKILL:
                killed += 1
                if killed > 200:
                    found["wrong"].append("it does not end")
                    break
            elif status != 0:
                found["wrong"].append(f"status {status}: {said.strip()[-300:]}")
                break
            elif not resume:  # this machine has become faster
                seconds = took
        written = len((folder / "written").read_text().splitlines())
        got = zarr.open_array(folder / "c", mode="r")[...] if not found["wrong"] else want
        if not np.array_equal(got, want):
            found["wrong"].append(f"{int((got != want).sum())} elements differ after {killed} kills")
        if written > chunks + killed * WRITERS:
            found["wrong"].append(f"{written} chunks written of {chunks}, with {killed} kills")
        left = [path.name for path in (folder / "c").rglob("*" + staging_folder.PENDING)]
        if left:
            found["wrong"].append(f"left behind: {left}")
        found["killed"] += killed
        found["again"] += max(0, written - chunks)
        found["done"] += 1
        if found["wrong"]:
            break
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--kills", default=300, show_default=True, help="All cases together.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="For arrays.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A log, as JSON.")
def main(kills: int, device: str, seed: int, folder: Path | None, out: Path | None) -> None:
    """Kill runs at random moments, continue them, and compare the results."""
    draw, rows, started = random.Random(seed), [], time.perf_counter()
    for index, case in enumerate(CASES):
        share = (kills - sum(row["killed"] for row in rows)) // (len(CASES) - index)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            row = one(case, device, share, draw, Path(scratch))
        rows.append(row)
        click.echo(
            f"β = {case['beta']:4} {'gram' if case['gram'] else 'multiply':8} {case['compressor']:5} "
            f"saved every {case['saved']:4} s: {row['killed']:3} kills of {row['done']:2} runs, each of "
            f"{row['chunks']} chunks; {row['again']} chunks written again; {row['wrong'] or 'all right'}"
        )
    if out:
        report = {
            "seed": seed,
            "device": device,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": ooc_gemm.__version__,
            "rows": rows,
        }
        out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    killed = sum(row["killed"] for row in rows)
    click.echo(f"{killed} kills in {time.perf_counter() - started:.0f} s, seed {seed}")
    raise SystemExit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
