"""Host time that the engine's readers take for each chunk, of this code beside that of another commit.

    python benchmarks/readers.py --before COMMIT [--only NAME ...] [--repeat R] [--chunks N]
                                 [--product DEVICE] [--commit COMMIT] [--out FILE]

Pieces of whole arrays go through the engine's ring into panels that nobody multiplies, so nothing but reading
is measured: the CPU time (user and system) that the process takes for each chunk, and the seconds that pass,
with one reader thread or as many as `--readers` says. Files in tmpfs have one thread, with as many reads
under way. All others are in the page cache already. With `--product`, each chunk is also copied to a device,
or decoded there: what is measured is a product of the array with a narrow matrix in memory. Each measurement
is a fresh process, and both sides take turns on the same files. The figure of a side is the least of its
runs, because other work on the machine only adds to it. Exit status 1: elements are wrong, or a ratio misses
its bar.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.4
PASSES = 3
"""Times that a process reads the whole array; the quickest one counts."""
SLOTS = 8
"""Slots of the ring for each reader, up to four of them."""
NARROW = 8
"""Columns of the matrix by which an array is multiplied."""
PIECE_BYTES = 4 << 20
"""Most bytes of a piece, as the planner has it for most plans."""


@dataclass(frozen=True)
class Case:
    """How chunks lie in their files, and how large they are."""

    name: str
    side: int
    """Rows and columns of a chunk of float32."""
    compressor: str = ""
    sharded: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a decoded chunk."""
        return self.side * self.side * 4


CASES = (
    Case("raw-16", 64),
    Case("raw-64", 128),
    Case("raw-64-shards", 128, sharded=True),
    Case("zstd-16", 64, "zstd"),
    Case("zstd-256", 256, "zstd"),
    Case("zstd-256-shards", 256, "zstd", sharded=True),
    Case("zstd-1024", 512, "zstd"),
)
"""Each on a disk and in tmpfs."""


def make(case: Case, folder: Path, chunks: int) -> None:
    """Store an array of about so many chunks, whose values zstd makes half as large."""
    import numpy as np
    import zarr

    across = max(1, int(chunks**0.5) // 4 * 4)
    shape = (across * case.side,) * 2
    values = np.random.default_rng(1).integers(0, 1 << 14, shape).astype("f4")
    array = zarr.create_array(
        folder,
        shape=shape,
        dtype="f4",
        chunks=(case.side, case.side),
        shards=(case.side * 4, case.side * 4) if case.sharded else None,
        compressors=zarr.codecs.ZstdCodec(level=1) if case.compressor else None,
    )
    array[...] = values


class _Done:
    done = True

    def synchronize(self) -> None:
        pass


class _Nowhere:
    """A session whose uploads take no time. `total` adds up what they bring."""

    def __init__(self) -> None:
        self.total, self.adds, self._lock = 0.0, True, Lock()

    def host_buffers(self, count: int, nbytes: int) -> list[Any]:
        return []

    def prepare(self, buffer: Any, used: int | None = None) -> None:
        pass

    def prepared(self, buffer: Any) -> bool:
        return False

    def onward(self, piece: Any, dtype: Any, buffer: int) -> None:
        """Nothing goes past the slots."""

    def close(self) -> None:
        pass

    def upload(self, source: Any, piece: Any, buffer: int) -> _Done:
        if self.adds:
            some = float(source.sum(dtype="f8"))
            with self._lock:
                self.total += some
        return _Done()


def parts() -> SimpleNamespace:
    """Return what is measured, of this code or of commits in which all modules lie in one folder."""
    try:
        from ooc_gemm.engine.readers import read, wait_for_all
    except ImportError:
        from ooc_gemm.execute import _read, _wait_for_all
        from ooc_gemm.pages import page_aligned
        from ooc_gemm.plan import cut
        from ooc_gemm.planner import piece_bytes
        from ooc_gemm.ring import Ring, Stopped
        from ooc_gemm.store import open_source
        from ooc_gemm.tiles import ranges, round_up
        from ooc_gemm.trace import Trace

        found = {"read": _read, "wait_for_all": _wait_for_all, "piece_bytes": piece_bytes}
        found |= {"in_background": lambda source: source.background}
    else:
        from ooc_gemm.engine.ring import Ring, Stopped
        from ooc_gemm.planning.ledger import piece_bytes
        from ooc_gemm.planning.schedule import cut
        from ooc_gemm.storage.read import inputs
        from ooc_gemm.support.buffers import page_aligned
        from ooc_gemm.support.intervals import ranges, round_up
        from ooc_gemm.support.trace import Trace

        def open_source(folder: str) -> Any:
            return inputs.open_input(folder).source

        found = {"read": read, "wait_for_all": wait_for_all, "piece_bytes": piece_bytes}
        found |= {"in_background": lambda source: source.asynchronous}
    both = {"Ring": Ring, "Stopped": Stopped, "Trace": Trace, "cut": cut, "page_aligned": page_aligned}
    return SimpleNamespace(**found, **both, open_source=open_source, ranges=ranges, round_up=round_up)


def quickest(work: Callable[[], Any], count: int) -> dict[str, float]:
    """Return the least times that something takes for each of so many chunks in µs."""
    best = dict[str, float]()
    for _ in range(PASSES):
        start, cpu = time.perf_counter(), time.process_time()
        work()
        found = {
            "cpu_us": (time.process_time() - cpu) / count * 1e6,
            "wall_us": (time.perf_counter() - start) / count * 1e6,
        }
        best = {key: min(value, best.get(key, value)) for key, value in found.items()}
    return best


def measure(folder: str, readers: int) -> dict[str, float]:
    """Read the array in this process, and return its times for each chunk in µs."""
    import numpy as np
    import zarr

    code = parts()
    Ring, Stopped, Trace, cut, ranges = code.Ring, code.Stopped, code.Trace, code.cut, code.ranges
    source = code.open_source(folder)
    s = source.matrix
    height = code.round_up(-(-s.rows // 4), s.chunk_rows)
    slot = code.piece_bytes(s, height, s.cols, PIECE_BYTES)
    session, buffers = _Nowhere(), code.page_aligned(SLOTS * min(readers, 4), slot)
    for buffer in buffers:
        buffer[:] = 0

    def turns() -> Iterator[Any]:
        for rows in ranges(s.rows, height):
            yield cut("a", s, rows, (0, s.cols), slot)

    def all_of_it() -> None:
        ring, trace = Ring(buffers, turns()), Trace()
        threads, ahead = (1, max(4, readers)) if code.in_background(source) else (readers, 1)
        with ThreadPoolExecutor(threads) as pool:
            work = partial(code.read, ring, session, {"a": source}, trace, ahead, False)
            jobs = [pool.submit(work) for _ in range(threads)]
            try:
                for _ in ranges(s.rows, height):
                    ring.open((0, 0))
                    code.wait_for_all(ring, session)
            except Stopped:
                pass
            ring.close()
            for job in jobs:
                job.result()

    all_of_it()
    session.adds = False
    best = quickest(all_of_it, s.grid[0] * s.grid[1])
    expected = float(np.asarray(zarr.open_array(folder)[...]).sum(dtype="f8"))
    return {**best, "right": float(session.total == expected)}


def measure_product(folder: str, device: str) -> dict[str, float]:
    """Multiply the array by a narrow matrix, after the same product in this process, and return the times of
    the call for each chunk in µs."""
    import numpy as np
    import zarr

    import ooc_gemm

    a = zarr.open_array(folder)
    b = np.random.default_rng(2).integers(0, 2, (a.shape[1], NARROW)).astype("f4")
    count = (a.shape[0] // a.chunks[0]) * (a.shape[1] // a.chunks[1])

    def product() -> Any:
        return np.asarray(ooc_gemm.multiply(folder, b, device=device).array)

    right = np.allclose(product(), a[...].astype("f8") @ b, rtol=1e-5)
    return {**quickest(product, count), "right": float(right)}


def compare(
    cases: list[tuple[str, Case]], sides: dict[str, Path], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure all cases with both sides in turns, and yield a record of each."""
    for place, case in cases:
        with tempfile.TemporaryDirectory(dir=getattr(args, place)) as folder:
            make(case, Path(folder) / "a", args.chunks if case.nbytes < 1 << 18 else args.chunks // 4)
            runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for _ in range(args.repeat):
                for side, root in sides.items():
                    command = [sys.executable, str(Path(__file__)), "--measure", f"{folder}/a"]
                    command += ["--readers", str(args.readers)]
                    command += ["--product", args.product] if args.product else []
                    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
                    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
                    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, check=True)
                    runs[side].append(json.loads(done.stdout))
        record: dict[str, Any] = {"case": case.name, "place": place, "chunk_bytes": case.nbytes}
        record["right"] = all(run["right"] for found in runs.values() for run in found)
        for side, found in runs.items():
            for key in ("cpu_us", "wall_us"):
                record[f"{side}_{key}"] = round(min(run[key] for run in found), 2)
        record["ratio"] = round(record["after_cpu_us"] / record["before_cpu_us"], 3)
        record["wall_ratio"] = round(record["after_wall_us"] / record["before_wall_us"], 3)
        wrong = "" if record["right"] else "  wrong elements"
        print(
            f"{case.name:16} {place:6} {record['before_cpu_us']:8.1f} {record['after_cpu_us']:8.1f} "
            f"{record['ratio']:6.2f} {record['wall_ratio']:6.2f}{wrong}",
            flush=True,
        )
        yield record


def git(*words: str) -> str:
    """Return what git says in this repository."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def machine() -> dict[str, Any]:
    """Return what the times depend on besides the code."""
    import numcodecs
    import numpy as np
    import zarr

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "zarr": zarr.__version__,
        "numcodecs": numcodecs.__version__,
    }


def write(args: argparse.Namespace, before: Path, records: list[dict[str, Any]]) -> None:
    """Write the results that there are. `before`: the folder of the other side, if one was given."""
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "before": args.before if before.is_dir() else git("rev-parse", "--short", args.before),
        "after": args.commit,
        "machine": machine(),
        "readers": args.readers,
        "product": args.product,
        "load": os.getloadavg(),
        "bar": BAR,
        "cases": records,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Measure what is asked for, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", help="commit to compare with, or a folder that holds its ooc_gemm")
    parser.add_argument("--only", nargs="+", default=[], help="names of cases, or of places")
    parser.add_argument("--repeat", type=int, default=5, help="processes of each side")
    parser.add_argument("--readers", type=int, default=1, help="reader threads, or reads under way")
    parser.add_argument(
        "--chunks", type=int, default=4096, help="chunks of an array, a quarter of large ones"
    )
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on a disk")
    parser.add_argument("--memory", default="/dev/shm", help="a folder in tmpfs")
    parser.add_argument("--out", type=Path, help="file for the results, in JSON")
    parser.add_argument("--product", metavar="DEVICE", help="measure a product on this device: cpu or cuda")
    parser.add_argument("--commit", help="what is measured, where there is no git repository")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        product, readers = args.product, args.readers
        found = measure_product(args.measure, product) if product else measure(args.measure, readers)
        print(json.dumps(found))
        return 0
    if not args.before:
        parser.error("--before is needed")
    cases = [(place, case) for case in CASES for place in ("disk", "memory")]
    cases = [x for x in cases if not args.only or {x[0], x[1].name} & set(args.only)]
    args.commit = args.commit or git("describe", "--always", "--dirty")
    given, worktree = Path(args.before).resolve(), Path(tempfile.mkdtemp())
    records = list[dict[str, Any]]()
    try:
        if not given.is_dir():
            git("worktree", "add", "--detach", str(worktree / "before"), args.before)
        print(f"{'CPU time of a chunk, µs':23} {'before':>8} {'after':>8} {'ratio':>6} {'wall':>6}")
        before = given if given.is_dir() else worktree / "before"
        for record in compare(cases, {"before": before, "after": ROOT}, args):
            records.append(record)
            if args.out:  # whatever ends the next case
                write(args, given, records)
    finally:
        if not given.is_dir():
            git("worktree", "remove", "--force", str(worktree / "before"))
        shutil.rmtree(worktree, ignore_errors=True)
    return int(not all(record["right"] and record["ratio"] <= BAR for record in records))


if __name__ == "__main__":
    sys.exit(main())
