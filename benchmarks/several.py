"""One GPU beside several of one host, Zarr to Zarr, in a warm process:

    python benchmarks/several.py [--size 65536] [--repeat R] [--tmpfs DIR] [--out FILE]

DIR is best a tmpfs with large pages (`mount -t tmpfs -o huge=always tmpfs DIR`): it takes twice as much a
second.
Compute-bound, with cuBLAS and with the fastest kernel as accurate as float32; with little memory, planned
as for a disk, of which as little is read as can be; and the relationship matrix of compressed genotypes. The
contestants take turns. Results are verified. Exit status 1: a bar was missed, bytes are not those predicted,
or a result is wrong.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

import ooc_gemm
from ooc_gemm.devices import open_device
from ooc_gemm.run import rates
from ooc_gemm.storage.io.files import mounted
from ooc_gemm.support.remembered import recall, remember

sys.path.insert(0, str(Path(__file__).parent))
from answers_grm_gpu import CLOSE, largest_error
from answers_grm_gpu import make as make_genotypes
from limits import RESULTS, Suite, described, make, timed

BARS = {("cublas", 2): 1.9, ("auto", 2): 1.9, ("cublas", 4): 3.6, ("auto", 4): 3.0}
"""Least speed-up over one GPU, by kernel and number of GPUs."""
ROOT = 1.25
"""The most that several GPUs may read, as a multiple of one GPU's bytes over the square root of their number.
Blocks end at chunks, and A and B are read at least once."""
DISK = {
    **dict.fromkeys(("read_bytes_per_second", "cached_bytes_per_second"), 3.4e9),
    **dict.fromkeys(("write_bytes_per_second", "write_cached_bytes_per_second"), 2.9e9),
    "turns": 1.0,
}
"""Rates of the disk of a machine with one H200, as `ooc-gemm info --measure` finds them."""
FOLDERS = rates.FOLDERS.values()
CASES = ("cublas", "auto", "traffic", "grm")
SAMPLES = 10_000


def contest(suite: Suite, folder: Path, kernel: str, counts: list[int], repeat: int) -> None:
    """Compare numbers of GPUs on a product that reads A and B once and keeps C on the GPUs until it is
    written."""
    found: dict[int, list[Any]] = {count: [] for count in counts}
    for _ in range(repeat):
        for count in counts:
            found[count].append(run(folder, count, kernel=kernel, memory_limit="24GiB"))
    check = ooc_gemm.verify(*(str(folder / name) for name in "abc"))
    suite.bar(f"{kernel}: rows that Freivalds' check finds wrong", check.rows_wrong, 0)
    best = {count: statistics.median(r.seconds for r in results) for count, results in found.items()}
    for count, results in found.items():
        name, result = label(kernel, count), results[-1]
        suite.rows[name] = report(result) | {"all_seconds": [r.seconds for r in results]}
        plan = result.plan
        click.echo(
            f"{name} ({result.kernel}): {best[count]:.2f} s, {best[1] / best[count]:.2f} times one; "
            f"predicted {plan.predicted_seconds:.2f} s; "
            f"{plan.block_count} blocks of {plan.bm}×{plan.bn}×{plan.bk}"
        )
        as_predicted(suite, name, result)
        if bar := BARS.get((kernel, count)):
            suite.bar(f"{name}: {bar} × one GPU's time ÷ its own, inverted", bar * best[count] / best[1], 1)


def traffic(suite: Suite, folder: Path, counts: list[int]) -> None:
    """Compare the bytes read with little memory, planned as for a disk. They fall with the square root of the
    number of GPUs."""
    read, model, system = {}, open_device("cuda").model, rates.file_system(folder)
    known = recall(rates.FILE)[model]
    remember(rates.FILE, model, {key: {system: known[key][system] | DISK} for key in FOLDERS if key in known})
    for count in counts:
        name = label("traffic", count)
        result = run(folder, count, memory_limit="2304MiB", device_memory_limit="2GiB")
        suite.rows[name] = report(result) | {"planned_for": "disk"}
        read[count] = result.bytes_read
        click.echo(
            f"{name}: read {result.bytes_read / 1e9:.1f} GB, {read[1] / result.bytes_read:.2f} times less "
            f"than one; {result.seconds:.1f} s; blocks of {result.plan.bm}×{result.plan.bn}"
        )
        as_predicted(suite, name, result)
        root = read[count] / read[1] * math.sqrt(count)
        suite.bar(f"{name}: read beside one GPU's ÷ √{count}", root, ROOT)


def genotypes(suite: Suite, folder: Path, variants: int, counts: list[int], repeat: int) -> None:
    """Compare numbers of GPUs on the relationship matrix of int8 genotypes, compressed with blosc, 1 % of
    which are missing and replaced by means. The time is that of the whole call, passes included."""
    with timed(f"made {variants} variants of {SAMPLES} samples"):
        known = make_genotypes(folder / "g", variants, SAMPLES)
    found: dict[int, list[Any]] = {count: [] for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(repeat + 1):
        for count in counts:
            start = time.perf_counter()
            result = ooc_gemm.grm(
                str(folder / "g"), meanimpute=True, device=devices(count), memory_limit="24GiB"
            )
            if turn:  # the first loads kernels
                seconds[count].append(time.perf_counter() - start)
                found[count].append(result)
    best = {count: statistics.median(each) for count, each in seconds.items()}
    for count, results in found.items():
        name, result = label("grm", count), results[-1]
        error = largest_error(result.array, *known, pairwise=False)
        suite.bar(f"{name}: largest error, as a share of the largest element", error, CLOSE)
        suite.rows[name] = {
            "samples": SAMPLES,
            "variants": variants,
            "kernel": result.kernel,
            "seconds": best[count],
            "all_seconds": seconds[count],
            "product_seconds": result.seconds,
            "bytes_read": result.bytes_read,
            "bytes_passed": result.bytes_passed,
            "error": error,
        }
        click.echo(
            f"{name} ({result.kernel}): {best[count]:.2f} s, {best[1] / best[count]:.2f} times one; the "
            f"product alone {result.seconds:.2f} s"
        )


def mount(folder: Path) -> str:
    """Return the type and the options of the file system on which a folder lies."""
    kind, _, options = mounted()[rates.file_system(folder).split()[1]]
    return f"{kind} {options}"


def label(what: str, count: int) -> str:
    return f"{what}, {count} GPU{'s' * (count > 1)}"


def devices(count: int) -> str:
    return "cuda:" + ",".join(map(str, range(count)))


def run(folder: Path, count: int, **options: Any) -> Any:
    shutil.rmtree(folder / "c", ignore_errors=True)
    return ooc_gemm.multiply(*(str(folder / name) for name in "abc"), device=devices(count), **options)


def report(result: Any) -> dict[str, Any]:
    return {key: value for key, value in result.to_dict().items() if key not in ("rechunked", "verified")}


def as_predicted(suite: Suite, name: str, result: Any) -> None:
    for what in ("bytes_read", "bytes_written", "bytes_uploaded", "bytes_downloaded"):
        found, said = getattr(result, what), getattr(result.plan, what)
        suite.bar(f"{name}: {what} beside those predicted", abs(found - said), 0)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", default=65536, show_default=True)
@click.option("--variants", default=1_000_000, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@click.option("--tmpfs", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--cases", multiple=True, type=click.Choice(CASES), default=CASES, help="[default: all]")
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False), default=RESULTS / "several_h200.json")
def main(
    size: int, variants: int, repeat: int, tmpfs: Path, cases: tuple[str, ...], commit: str | None, out: str
) -> None:
    """Measure rates, run the cases, and write the results."""
    from ooc_gemm.bench import info
    from ooc_gemm.devices.cuda.gpus import count as there

    if commit is None:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    counts = [count for count in (1, 2, 4, 8) if count <= there()]
    folder, suite = tmpfs / "ooc-gemm-several", Suite(repeat)
    folder.mkdir(exist_ok=True)
    try:
        device = open_device("cuda")
        with timed("measured rates"):
            info.measure_with(device, [folder])
            if len(counts) > 1:
                info.measure_places(open_device("cuda:all"), [folder])
        if set(cases) - {"grm"}:
            with timed(f"made A and B, {size}²"):
                for seed, name in enumerate("ab"):
                    make(str(folder / name), size, size, seed)
        kernels = [case for case in ("cublas", "auto") if case in cases]
        for count in counts:  # contexts, libraries, kernels
            for kernel in kernels or ["auto"] * ("traffic" in cases):
                run(folder, count, kernel=kernel, memory_limit="24GiB", alpha=0)
        for kernel in kernels:
            contest(suite, folder, kernel, counts, repeat)
        if "traffic" in cases:
            traffic(suite, folder, counts)
        if "grm" in cases:
            genotypes(suite, folder, variants, counts, repeat)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        found = described(device.model) | {"cores": os.cpu_count(), "store": mount(tmpfs), "rows": suite.rows}
        for row in suite.rows.values():
            row["commit"] = commit
        Path(out).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    raise SystemExit(bool(suite.missed))


if __name__ == "__main__":
    main()
