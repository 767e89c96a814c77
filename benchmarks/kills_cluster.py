"""Kills workers, schedulers and clients of a cluster with SIGKILL at random moments of a product:

    python benchmarks/kills_cluster.py [--tall] [--kills N] [--seed S] [--folder DIR] [--out FILE]

Scheduler and workers are processes of their own, four workers, of which one is killed (and another one
started) at a random moment of each `ooc-gemm multiply --scheduler`: the run must go on and end well.
Every fifth time the scheduler is killed instead, every fifth the client: then `--resume` on a new cluster
must end well. C must be NumPy's in float64, to rounding (plans for fewer workers round differently), and
nothing may be left behind beside it. With `--tall` k is long and C is small, so that workers cut k and add up
partial sums. Exit status 1 where one of this does not hold.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import distributed
import numpy as np
import zarr
from kills import CASES, before, finished

import ooc_gemm
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.write import share

WORKERS = 4
SHAPE, TALL = (1500, 1400, 200), (210, 190, 100_000)
MARGIN = 2 << 20
"""Bytes of a worker's memory above the smallest sufficient limit."""
SLOW = """
import time
from ooc_gemm.storage.io import files

def slowed(write):
    def slowly(path, data, direct=False):
        write(path, data, direct)
        time.sleep({delay})

    return slowly

files.write = slowed(files.write)

from ooc_gemm.dask import partial

def later(work):
    def slowly(*arguments):
        time.sleep({sums})
        return work(*arguments)

    return slowly

partial.carried_out, partial.add = later(partial.carried_out), later(partial.add)
"""
"""A module that workers load first. It slows the disk and sums down, so that a kill finds them at work."""
TIMEOUT = 120


class Cluster:
    """A scheduler and workers, each of which is a process."""

    def __init__(self, folder: Path, delay: float, sums: float):
        self._folder, self._file = folder, folder / f"scheduler-{time.monotonic_ns()}.json"
        (folder / "slow.py").write_text(SLOW.format(delay=delay, sums=sums))
        arguments = [
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            str(self._file),
        ]
        self.scheduler = self._start("scheduler", *arguments)
        while not self._file.exists():
            time.sleep(0.05)
        self.workers = [self.worker() for _ in range(WORKERS)]
        try:
            with distributed.Client(self.address, timeout=TIMEOUT) as client:
                client.wait_for_workers(WORKERS, timeout=TIMEOUT)
        except BaseException:
            self.close()
            raise

    def worker(self) -> "subprocess.Popen[bytes]":
        """Start another worker."""
        more = ["--nthreads", "1", "--memory-limit", "1GiB", "--no-nanny", "--no-dashboard"]
        preload = ["--preload", str(self._folder / "slow.py"), "--local-directory", str(self._folder)]
        return self._start("worker", "--scheduler-file", str(self._file), *more, *preload)

    def _start(self, what: str, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "dask", what, *arguments]
        log = open(self._folder / "log", "ab")  # noqa: SIM115
        return subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def address(self) -> str:
        return str(json.loads(self._file.read_text())["address"])

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


def make(folder: Path, sizes: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Write A, B and the old C, and return the values of the old C."""
    m, n, k = sizes
    for name, shape in (("a", (m, k)), ("b", (k, n))):
        array = zarr.create_array(folder / name, shape=shape, chunks=(256, 100), dtype="f4", compressors=None)
        array[...] = rng.standard_normal(shape, np.float32)
    return rng.standard_normal((m, n), np.float32)


def command(folder: Path, case: dict[str, Any], address: str, *more: str) -> list[str]:
    """Return the command that a user would type, with so little memory that there are many superblocks."""
    options = ["--scheduler", address, "-d", "cpu", "-Q", "--json", "-M", "1MiB", *more]
    if case["beta"]:
        options += ["--beta", str(case["beta"]), "--alpha", "1.5"]
    else:
        options += ["--chunks", ",".join(map(str, case["chunks"])), "--compressor", case["compressor"]]
    arrays = [str(folder / name) for name in "abc"]
    return [sys.executable, "-m", "ooc_gemm.cli", "multiply", *arrays, *options]


def product(
    folder: Path, case: dict[str, Any], tall: bool, kill: str, after: float, pick: int, *more: str
) -> tuple[int, str, float, bool]:
    """Run a product and kill a part of it. Returns its exit status, its output, its seconds, and whether the
    kill came before its end."""
    cluster = Cluster(folder, 0.05, 0.5 if tall else 0.0)
    try:
        line = command(folder, case, cluster.address, *more)
        said = subprocess.run(line, capture_output=True, text=True).stderr
        if not (least := re.search(r"would do is (\d+) bytes", said)):
            return 1, said, 0.0, False
        line[line.index("1MiB")] = str(int(least[1]) + MARGIN)
        started = time.perf_counter()
        run = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        hit = False
        if kill:
            try:
                run.wait(after)
            except subprocess.TimeoutExpired:
                hit = True
                found: dict[str, Any] = {"scheduler": cluster.scheduler, "client": run}
                os.kill(found.get(kill, cluster.workers[pick]).pid, signal.SIGKILL)
                if kill == "worker":
                    cluster.workers.append(cluster.worker())
        said, _ = run.communicate(timeout=TIMEOUT)
        return run.returncode, said, time.perf_counter() - started, hit
    finally:
        cluster.close()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--kills", default=20, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--tall", is_flag=True, help="Cut k among the workers.")
@click.option("--only", type=click.Choice(["worker", "scheduler", "client"]), help="Kill nothing else.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="For arrays.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A log, as JSON.")
def main(kills: int, seed: int, tall: bool, only: str | None, folder: Path | None, out: Path | None) -> None:
    """Kill workers, schedulers and clients at random moments, and compare the results."""
    draw, rows, began = random.Random(seed), [], time.perf_counter()
    cases = [case for case in CASES if not case["gram"]]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = Path(scratch)
        old = make(place, TALL if tall else SHAPE, np.random.default_rng(seed))
        a, b = (zarr.open_array(place / name, mode="r")[...].astype(np.float64) for name in "ab")
        seconds: dict[int, float] = {}
        while len(rows) < kills:
            index = draw.randrange(len(cases))
            case = cases[index]
            right = 1.5 * a @ b + case["beta"] * old if case["beta"] else a @ b
            if index not in seconds:
                before(place, "c", case, old)
                status, said, seconds[index], _ = product(place, case, tall, "", 0, 0)
                assert status == 0, said
                ranges = json.loads(said.splitlines()[-1])["plan"]["k_ranges"]
                assert (ranges > 1) == tall, f"k is cut into {ranges} ranges"
            before(place, "c", case, old)
            kill = only or {3: "scheduler", 4: "client"}.get(len(rows) % 5, "worker")
            after, pick = draw.uniform(0.3, 1.0) * seconds[index], draw.randrange(WORKERS)
            status, said, took, hit = product(place, case, tall, kill, after, pick)
            if not hit:
                continue
            wrong, done = [], ""
            if kill == "worker" and status:
                wrong.append(f"status {status}: {said.strip()[-300:]}")
            if kill == "scheduler" and status not in (0, 1, 2):
                wrong.append(f"status {status}: {said.strip()[-300:]}")
            if not wrong and not finished(place / "c"):
                more = ("--resume",) if unfinished.is_partial(Folder(place / "c")) else ()
                status, said, *_ = product(place, case, tall, "", 0, 0, *more)
                if not status:
                    result = json.loads(said.splitlines()[-1])
                    done = f", continued with {result['blocks_resumed']} of {result['blocks']} blocks done"
                if status:
                    wrong.append(f"{kill} killed, continued, status {status}: {said.strip()[-300:]}")
            if not wrong:
                got = zarr.open_array(place / "c", mode="r")[...]
                if not (error := np.abs(got - right).max()) < 1e-3:
                    wrong.append(f"an error of {error}")
                left = [
                    path.name for path in (place / "c").rglob("*") if path.suffix in (".pending", ".gone")
                ]
                left += [path.name for path in (place / "c").glob(share.RUN + "*")]
                if left:
                    wrong.append(f"left behind: {left}")
            rows.append(
                {"case": case, "kill": kill, "after": after, "took": took, "done": done, "wrong": wrong}
            )
            click.echo(
                f"{len(rows):3} β = {case['beta']:4} {case['compressor']:5} {kill:9} killed at {after:.2f} s,"
                f" ended at {took:.2f} s{done}; {wrong or 'right'}"
            )
    if out:
        report = {
            "seed": seed,
            "tall": tall,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": ooc_gemm.__version__,
            "rows": rows,
        }
        out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    click.echo(f"{len(rows)} kills in {time.perf_counter() - began:.0f} s, seed {seed}")
    raise SystemExit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
