"""The engine beside what the hardware allows, on one GPU, Zarr to Zarr, in a warm process:

    python benchmarks/limits.py [--only NAME ...] [--repeat R] [--disk DIR] [--tmpfs DIR] [--out FILE]

Every case prints what it took, what it moved, what the plan had said, the limit and the ratio to it, and the
bar it has to meet. Limits come from rates measured in the same run. Caches are dropped before runs from disk.
Results are verified. Exit status 1: a bar was missed, a limit passed or a result is wrong.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import cupy
import numpy as np
import zarr

import ooc_gemm
from ooc_gemm.storage.write import provenance

RESULTS = Path(__file__).resolve().parent / "results"
CHUNK, GiB = 2048, 1 << 30
READERS, WRITERS = 16, 8
"""The numbers of readers and writers that the engine has with one GPU."""
Run = dict[str, Any]


def make(path: str, rows: int, cols: int, seed: int, zstd: bool = False, dtype: str = "float32") -> str:
    """Write an array of N(0, 1), or of integers of N(0, 16²), in chunks of 2048², by many threads. `zstd`:
    round to sixteenths, so that there is something to compress."""
    from numcodecs import Zstd

    shutil.rmtree(path, ignore_errors=True)
    options: dict[str, Any] = {} if zstd else {"compressors": None}
    array = zarr.create_array(path, shape=(rows, cols), chunks=(CHUNK, CHUNK), dtype=dtype, **options)
    codec = Zstd(level=1)
    cupy.random.seed(seed)

    def write(i: int, j: int, chunk: Any) -> None:
        data = np.ascontiguousarray(chunk)
        file = Path(f"{path}/{array.metadata.encode_chunk_key((i, j))}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(codec.encode(data) if zstd else data.data)

    with ThreadPoolExecutor(16) as pool:
        for i in range(rows // CHUNK):
            line = cupy.random.standard_normal((CHUNK, cols), dtype="f8" if dtype == "float64" else "f4")
            line = cupy.rint(line * 16) / 16 if zstd else line * 16 if dtype == "int8" else line
            strip = line.astype(dtype).get()
            jobs = [
                pool.submit(write, i, j, strip[:, j * CHUNK : (j + 1) * CHUNK]) for j in range(cols // CHUNK)
            ]
            for job in jobs:
                job.result()
    return path


def drop_caches() -> None:
    """Drop the page cache, so that files on disk are only there."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def gemm_seconds(size: int, dtype: str) -> float:
    """Time cuBLAS alone, with all three matrices on the GPU."""
    a, b = (cupy.random.standard_normal((size, size), dtype=dtype) for _ in range(2))
    c = cupy.empty_like(a)
    cupy.matmul(a[:2048, :2048], b[:2048, :2048])
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    cupy.matmul(a, b, out=c)
    stop.record()
    stop.synchronize()
    seconds = float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3
    del a, b, c
    cupy.get_default_memory_pool().free_all_blocks()
    return seconds


@contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    click.echo(f"  ({what}: {time.perf_counter() - start:.1f} s)")


class Suite:
    """Runs cases, prints them, and keeps their results."""

    def __init__(self, repeat: int):
        self.repeat, self.rows, self.missed = repeat, dict[str, Run](), list[str]()

    def run(
        self,
        name: str,
        job: Callable[[], Any],
        *,
        prepare: Callable[[], None] = lambda: None,
        repeat: int | None = None,
    ) -> Run:
        """Run a multiplication several times, and return the run whose ratio to its limit is the median, with
        its plan."""
        from ooc_gemm.bench.engine import limit_seconds

        found = []
        for _ in range(repeat or self.repeat):
            prepare()
            result = job()
            limits = limit_seconds(result, result.plan.used_rates)
            by = max(limits, key=lambda stage: limits[stage])
            found.append((result.seconds / limits[by], by, limits, result))
        ratios = [entry[0] for entry in found]
        ratio, by, limits, result = sorted(found, key=lambda entry: entry[0])[len(found) // 2]
        plan, seconds = result.plan, result.seconds
        row = {
            "kernel": result.kernel,
            "seconds": seconds,
            "all_seconds": [entry[-1].seconds for entry in found],
            "all_ratios": ratios,
            "predicted_seconds": plan.predicted_seconds,
            "limit_seconds": limits[by],
            "limit_by": by,
            "limits": limits,
            "turns": result.plan.used_rates.turns,
            "ratio": ratio,
            "bytes_read": result.bytes_read,
            "bytes_written": result.bytes_written,
            "lower_bound_bytes": result.lower_bound_bytes,
            "peak_host_bytes": result.peak_host_bytes,
            "peak_device_bytes": result.peak_device_bytes,
            "stage_seconds": result.stage_seconds,
            "plan": plan.to_dict(),
        }
        self.rows[name] = row
        click.echo(
            f"{name}: {seconds:.2f} s, {ratio:.2f} of the limit {limits[by]:.2f} s ({by}); "
            f"predicted {plan.predicted_seconds:.2f} s; read {result.bytes_read / 1e9:.1f} GB, "
            f"{result.bytes_read / result.lower_bound_bytes:.3f} of the bound; "
            f"{plan.block_count} blocks of {plan.bm}×{plan.bn}, cache {plan.cache_slots}"
        )
        self.bar(f"{name}: bytes read as predicted", float(result.bytes_read != plan.bytes_read), 0)
        return row

    def bar(self, what: str, found: float, most: float) -> None:
        """Print whether a bar holds, and note if it does not."""
        held = found <= most
        name = what.partition(":")[0]
        if name in self.rows:
            self.rows[name].setdefault("bars", {})[what] = [found, most]
        click.echo(f"    {'held  ' if held else 'MISSED'} {what}: {found:.3f} (at most {most})")
        if not held:
            self.missed.append(f"{what}: {found:.3f} > {most}")

    def close_to(self, name: str, share: float) -> None:
        """Set the bar that predicted seconds lie within a share of the measured ones."""
        row = self.rows[name]
        self.bar(f"{name}: prediction off by", abs(row["predicted_seconds"] / row["seconds"] - 1), share)


def cases(suite: Suite, device: Any, only: tuple[str, ...], tmpfs: Path, disk: Path) -> None:
    """Run every case, in an order that writes each pair of operands once."""
    from ooc_gemm.bench import info

    def wanted(name: str) -> bool:
        return not only or name in only

    def multiply(folder: Path, c: str = "c", **options: Any) -> Callable[[], Any]:
        return lambda: ooc_gemm.multiply(str(folder / "a"), str(folder / "b"), str(folder / c), **options)

    def fresh(folder: Path, cold: bool = False, c: str = "c") -> Callable[[], None]:
        def prepare() -> None:
            shutil.rmtree(folder / c, ignore_errors=True)
            if cold:
                drop_caches()

        return prepare

    def verified(folder: Path, name: str) -> None:
        check = ooc_gemm.verify(str(folder / "a"), str(folder / "b"), str(folder / "c"))
        suite.bar(f"{name}: rows that Freivalds' check finds wrong", check.rows_wrong, 0)

    def pair(folder: Path, size: int, dtype: str = "float32") -> None:
        with timed(f"made A and B, {size}² {dtype}"):
            for seed, name in enumerate("ab"):
                make(str(folder / name), size, size, seed, dtype=dtype)

    def to_disk() -> None:
        with timed("copied to disk"):
            subprocess.run(["cp", "-r", str(tmpfs / "a"), str(tmpfs / "b"), str(disk)], check=True)
            os.sync()

    small = {"memory_limit": "8GiB", "device_memory_limit": "8GiB"}
    pair(tmpfs, 2048)
    for kernel in ("auto", "cublas"):  # contexts, libraries, kernels
        fresh(tmpfs)()
        multiply(tmpfs, kernel=kernel)()
    if any(map(wanted, ("tmpfs", "cublas", "transform", "disk", "journal"))):
        pair(tmpfs, 32768)
    if wanted("tmpfs"):
        row = suite.run("tmpfs", multiply(tmpfs, **small), prepare=fresh(tmpfs))
        suite.bar("tmpfs: seconds", row["seconds"], 1.2)
        suite.close_to("tmpfs", 0.15)
        verified(tmpfs, "tmpfs")
    if wanted("cublas"):
        row = suite.run("cublas", multiply(tmpfs, kernel="cublas", **small), prepare=fresh(tmpfs))
        suite.bar("cublas: ratio to the limit", row["ratio"], 1.25)
        suite.close_to("cublas", 0.15)
    if wanted("transform"):
        transform(suite, tmpfs, small)
    if wanted("disk"):
        to_disk()
        info.measure_places(device, [disk])
        alone: list[float] = []

        def drifting() -> None:
            """Time reading and writing alone, in turns with the runs, because the speed of disks drifts."""
            fresh(disk, cold=True)()
            alone.append(in_turn_seconds(disk))
            drop_caches()

        row = suite.run("disk", multiply(disk, **small), prepare=drifting)
        # A C in one block is written when all is read, and on this disk writing beside reading gains little.
        row["all_in_turn_seconds"] = alone
        row["in_turn_seconds"] = statistics.median(alone)
        row["in_turn_ratio"] = statistics.median(row["all_seconds"]) / row["in_turn_seconds"]
        click.echo(
            f"    reads, then writes: {row['in_turn_seconds']:.2f} s, by as many threads in turns with those"
        )
        suite.bar("disk: ratio to that", row["in_turn_ratio"], 1.10)
        suite.close_to("disk", 0.15)
        verified(disk, "disk")
    if wanted("journal"):
        if not wanted("disk"):
            to_disk()
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for index in range(2 * suite.repeat):
            fresh(disk, cold=True)()
            with nullcontext() if index % 2 else without_journal():
                seconds[bool(index % 2)].append(multiply(disk, **small)().seconds)
        kept, none = (statistics.median(seconds[journal]) for journal in (True, False))
        suite.rows["journal"] = {"with": seconds[True], "without": seconds[False]}
        click.echo(f"journal: {kept:.2f} s with one, {none:.2f} s without, from disk to disk, in turns")
        suite.bar("journal: with ÷ without", kept / none, 1.02)
    shutil.rmtree(disk)
    disk.mkdir()
    if wanted("verify"):
        verify(suite, tmpfs)
    if wanted("zstd"):
        zstd(suite, tmpfs)
    if wanted("gram"):
        gram(suite, tmpfs)
    if wanted("float64"):
        fresh(tmpfs)()
        pair(tmpfs, 32768, "float64")
        alone = gemm_seconds(32768, "float64")
        roomy = {"memory_limit": "16GiB", "device_memory_limit": "40GiB"}
        row = suite.run("float64", multiply(tmpfs, **roomy), prepare=fresh(tmpfs))
        row["dgemm_alone_seconds"] = alone
        suite.bar(f"float64: share of DGEMM alone, {alone:.2f} s", row["seconds"] / alone, 1 / 1.2)
        suite.close_to("float64", 0.15)
        verified(tmpfs, "float64")
    if any(map(wanted, ("large", "traffic"))):
        fresh(tmpfs)()
        pair(tmpfs, 65536)
    if wanted("large"):
        alone = gemm_seconds(65536, "float32")
        large = {"memory_limit": "16GiB", "device_memory_limit": "24GiB"}
        row = suite.run("large", multiply(tmpfs, **large), prepare=fresh(tmpfs))
        row["sgemm_alone_seconds"] = alone
        suite.bar(f"large: share of SGEMM alone, {alone:.2f} s", row["seconds"] / alone, 0.55)
        suite.close_to("large", 0.15)
        verified(tmpfs, "large")
    if wanted("traffic"):
        fresh(tmpfs)()
        to_disk()
        for name in "ab":
            shutil.rmtree(tmpfs / name)
        fresh(disk, cold=True)()
        info.measure_places(device, [disk])
        traffic(suite, disk)


@contextmanager
def without_journal() -> Iterator[None]:
    """Keep no journal and flush nothing."""
    kept = provenance.head
    provenance.head = lambda *args: None
    try:
        yield
    finally:
        provenance.head = kept


def in_turn_seconds(disk: Path) -> float:
    """Return the seconds of reading A and B with the engine's readers and then writing as many bytes as C
    holds."""
    from ooc_gemm.bench.io import source_rate, write_rate

    arrays = [zarr.open_array(disk / name, mode="r") for name in "ab"]
    seconds = sum(x.nbytes / source_rate(x, READERS) for x in arrays)
    size = arrays[0].shape[0] * arrays[1].shape[1] * 4
    seconds += size / write_rate(disk / "w", size, WRITERS)
    shutil.rmtree(disk / "w")
    return seconds


def traffic(suite: Suite, disk: Path) -> None:
    """Multiply from disk with little memory of host and device. This runs in a process of its own, because
    the limit is one on the process, and a process that has worked before holds more from the start."""
    command = [sys.executable, "-m", "ooc_gemm.cli", "multiply", *(str(disk / name) for name in "abc")]
    found = subprocess.run(
        [*command, "-M", "4GiB", "-D", "2GiB", "--json", "-Q"], check=True, capture_output=True, text=True
    )
    row = suite.rows["traffic"] = json.loads(found.stdout)
    plan = row["plan"]
    row["predicted_seconds"] = plan["predicted_seconds"]
    click.echo(
        f"traffic: {row['seconds']:.2f} s; predicted {row['predicted_seconds']:.2f} s; "
        f"read {row['bytes_read'] / 1e9:.1f} GB; {plan['blocks']} blocks of {plan['bm']}×{plan['bn']}, "
        f"cache {plan['cache_slots']} of {plan['slot_bytes'] >> 20} MiB"
    )
    suite.bar("traffic: bytes read as predicted", float(row["bytes_read"] != plan["bytes_read"]), 0)
    suite.bar("traffic: bytes read ÷ lower bound", row["bytes_read"] / row["lower_bound_bytes"], 1.06)
    suite.bar("traffic: resident above the limit", max(0, row["peak_host_bytes"] - (4 << 30)), 0)
    suite.bar("traffic: device above the limit", max(0, row["peak_device_bytes"] - (2 << 30)), 0)
    suite.close_to("traffic", 0.15)


def gram(suite: Suite, tmpfs: Path) -> None:
    """Compare A·Aᵀ by `gram` with `multiply` of the same, bound by compute."""
    a = make(str(tmpfs / "g"), 32768, 65536, 7)
    c = str(tmpfs / "c")
    options: dict[str, Any] = {"memory_limit": "16GiB", "device_memory_limit": "24GiB"}

    def prepare() -> None:
        shutil.rmtree(c, ignore_errors=True)

    for kernel in ("cublas", "auto"):
        whole = suite.run(
            f"A·Aᵀ by multiply, {kernel}",
            lambda kernel=kernel: ooc_gemm.multiply(a, a, c, transpose_b=True, kernel=kernel, **options),
            prepare=prepare,
        )
        half = suite.run(
            f"gram, {kernel}",
            lambda kernel=kernel: ooc_gemm.gram(a, c, kernel=kernel, **options),
            prepare=prepare,
        )
        share = half["seconds"] / whole["seconds"]
        suite.bar(f"gram, {kernel}: share of multiply's time", share, 0.60 if kernel == "cublas" else 1)
        suite.bar(f"gram, {kernel}: share of its bytes", half["bytes_read"] / whole["bytes_read"], 0.60)
    shutil.rmtree(a)
    prepare()


def transform(suite: Suite, tmpfs: Path, limits: Run) -> None:
    """Multiply with A as it is, and centred and scaled by given numbers, in turns."""
    rng, (rows, cols) = np.random.default_rng(3), zarr.open_array(tmpfs / "a", mode="r").shape
    path, center, scale = str(tmpfs / "a"), rng.random(cols), 1 + rng.random(rows)
    transformed = ooc_gemm.Operand(path, center=("columns", center), scale=("rows", scale))
    operands: dict[str, Any] = {"plain": path, "transformed": transformed}
    stages: dict[str, list[dict[str, float]]] = {name: [] for name in operands}
    for _ in range(2 * suite.repeat):
        for name, a in operands.items():
            shutil.rmtree(tmpfs / "c", ignore_errors=True)
            result = ooc_gemm.multiply(a, str(tmpfs / "b"), str(tmpfs / "c"), **limits)
            stages[name].append(result.stage_seconds | {"seconds": result.seconds})
    suite.rows["transform"] = {**stages}
    ratio = {}
    for what in ("compute", "seconds"):
        plain, other = (statistics.median(run[what] for run in runs) for runs in stages.values())
        click.echo(f"transform: {what} {other:.3f} s beside {plain:.3f} s")
        ratio[what] = other / plain
    suite.bar("transform: compute stage ÷ that without", ratio["compute"], 1.03)


def verify(suite: Suite, tmpfs: Path) -> None:
    """Compare runs with and without --verify, in turns."""
    for dtype, kernel in (("float32", "auto"), ("float32", "cublas"), ("float16", "auto"), ("int8", "auto")):
        a, b = (make(str(tmpfs / name), 32768, 32768, seed, dtype=dtype) for seed, name in enumerate("vw"))
        c, name = tmpfs / "c", f"verify {dtype}, {kernel}"
        found: dict[bool, list[Any]] = {False: [], True: []}
        for index in range(2 * suite.repeat + 2):
            shutil.rmtree(c, ignore_errors=True)
            options: dict[str, Any] = {"memory_limit": "16GiB", "device_memory_limit": "24GiB"}
            result = ooc_gemm.multiply(a, b, str(c), kernel=kernel, verify=bool(index % 2), **options)
            found[bool(index % 2)].append((result.seconds, result.stage_seconds["compute"]))
        plain, checked = (np.median(found[which][1:], axis=0) for which in (False, True))
        suite.rows[name] = {"plain": found[False], "verify": found[True]}
        click.echo(f"{name} ({result.kernel}): {checked[0]:.3f} s beside {plain[0]:.3f} s")
        suite.bar(f"{name}: seconds, with ÷ without", checked[0] / plain[0], 1.03)
        suite.bar(f"{name}: seconds of the compute stage, with ÷ without", checked[1] / plain[1], 1.03)
    for name in "vwc":
        shutil.rmtree(tmpfs / name)


def zstd(suite: Suite, tmpfs: Path) -> None:
    """Compare the engine's readers on zstd chunks with as many threads that only decode them, from memory."""
    from ooc_gemm.bench.io import decode_rate, source_rate

    path, threads = make(str(tmpfs / "z"), 16384, 32768, 9, zstd=True), 16
    pairs = [(decode_rate(path, threads), source_rate(path, threads, rounds=8)) for _ in range(suite.repeat)]
    decode, read = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    suite.rows["zstd"] = {
        "threads": threads,
        "decode_bytes_per_second": decode,
        "read_bytes_per_second": read,
        "pairs": pairs,
    }
    click.echo(f"zstd: {threads} threads decode {decode / 1e9:.2f} GB/s, readers bring {read / 1e9:.2f} GB/s")
    suite.bar("zstd: decoding alone ÷ reading", decode / read, 1 / 0.9)
    shutil.rmtree(path)


def described(model: str) -> Run:
    """Return the date, the device and the versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": model,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "zarr": zarr.__version__,
            "cupy": cupy.__version__,
        },
    }


def rows_before(out: Path) -> Run:
    """Return the rows that the file holds already."""
    return dict(json.loads(out.read_text("utf-8"))["rows"]) if out.exists() else {}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only",
    multiple=True,
    help="A case: tmpfs, cublas, transform, disk, journal, verify, zstd, gram, float64, large, traffic.",
)
@click.option("--repeat", default=3, show_default=True)
@click.option("--tmpfs", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--disk", type=click.Path(path_type=Path), default=Path("/tmp"), show_default=True)
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False), default=RESULTS / "limits_h200.json")
def main(only: tuple[str, ...], repeat: int, tmpfs: Path, disk: Path, commit: str | None, out: str) -> None:
    """Measure rates, run the cases, and write the results. With --only, results of other cases are kept."""
    from ooc_gemm.bench import info
    from ooc_gemm.devices import open_device

    if commit is None:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    tmpfs, disk = tmpfs / "ooc-gemm-limits", disk / "ooc-gemm-limits"
    device, suite = open_device("cuda"), Suite(repeat)
    try:
        for folder in (tmpfs, disk):
            folder.mkdir(exist_ok=True)
        with timed("measured rates"):
            info.measure_with(device, [tmpfs, disk])
        cases(suite, device, only, tmpfs, disk)
    finally:
        for folder in (tmpfs, disk):
            shutil.rmtree(folder, ignore_errors=True)
        report = described(device.model)
        report["rows"] = rows_before(Path(out)) | suite.rows if only else suite.rows
        for row in suite.rows.values():
            row["commit"] = commit
        Path(out).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    raise SystemExit(bool(suite.missed))


if __name__ == "__main__":
    main()
