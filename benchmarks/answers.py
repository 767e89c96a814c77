"""Statistics beside what people compute them with today: each side in fresh processes, in turns, results
compared.

    python benchmarks/answers.py                     # all cases
    python benchmarks/answers.py corrcoef --small    # one case at a small size, as a trial

A case (answers_cases.py) makes its data, names the commands of both sides and compares what they have
written. A bar is the largest ratio of our time to the other's. Seconds are of whole processes, from start to
exit, medians of the rounds; the processor's seconds, which other work on the machine disturbs less, stand
beside them. Exit status 1: a bar, an accuracy or the memory limit was missed.

The case grm needs plink2 (Debian: apt install plink2), the others dask and faiss (`pip install
'ooc-gemm[benchmarks]'`).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from answers_cases import CASES, LIMIT, Case
from engine import TIMEOUT, git

from ooc_gemm.bench.stress import launch
from ooc_gemm.support.memory import parse_size

CORES = 2


def run(command: list[str], folder: Path) -> dict[str, float]:
    """Run a process to its end: its seconds, its processor's seconds, and its peak memory in bytes."""
    ended = launch(command, folder=folder, timeout=TIMEOUT)
    if ended.code:
        raise SystemExit(f"{command[0]} failed:\n{(ended.out + ended.err)[-2000:]}")
    return {"seconds": ended.seconds, "cpu_seconds": ended.cpu_seconds, "peak_bytes": float(ended.peak)}


def measure(case: Case, folder: Path, rounds: int, small: bool) -> dict[str, Any]:
    """Both sides of a case in turns, and whether it keeps its bars."""
    case.make(folder, small)
    sides = {"ours": case.ours} | ({"theirs": case.theirs} if case.theirs else {})
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, command in sides.items():
            runs[side].append(run(command, folder))
    found: dict[str, Any] = {
        side: {key: statistics.median(one[key] for one in some) for key in some[0]}
        for side, some in runs.items()
    }
    found |= {"error": case.error(folder), "accuracy": case.accuracy, "bar": case.bar}
    peak = max(one["peak_bytes"] for one in runs["ours"])
    found["kept"] = found["error"] <= case.accuracy and peak <= parse_size(LIMIT)
    if case.theirs and case.bar:
        for key in ("seconds", "cpu_seconds"):
            found[f"ratio_{key}"] = found["ours"][key] / found["theirs"][key]
        found["kept"] &= small or found["ratio_seconds"] <= case.bar
    return found


def spelled(side: dict[str, float]) -> str:
    """What a side took, as text."""
    cpu, peak = side["cpu_seconds"], side["peak_bytes"] / 2**20
    return f"{side['seconds']:.1f} s ({cpu:.1f} s of processors, {peak:.0f} MiB)"


def main() -> int:
    """Run the cases; 1 if one misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--small", action="store_true", help="small data, which show no speed: no bar counts")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (3)")
    parser.add_argument("--folder", type=Path, help="where data are made (a temporary folder there)")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: no such case; choose from {', '.join(names)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    results: dict[str, Any] = {}
    for case in CASES:
        if given.cases and case.name not in given.cases:
            continue
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            found = results[case.name] = measure(case, Path(folder), given.rounds, given.small)
        beside = ""
        if "theirs" in found:
            beside = f" beside {spelled(found['theirs'])}: {found['ratio_seconds']:.2f}, bar {case.bar}"
        print(
            f"{case.name}: {spelled(found['ours'])}{beside}; error {found['error']:.1e}, at most "
            f"{case.accuracy:.0e}: {'kept' if found['kept'] else 'MISSED'}",
            flush=True,
        )
    if given.json:
        machine = {"cores": CORES, "processor": platform.processor(), "python": platform.python_version()}
        versions = {name: version(name) for name in ("ooc-gemm", "numpy", "zarr", "dask")}
        when = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": git("rev-parse", "HEAD")}
        report = when | {"machine": machine | versions, "cases": results}
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(found["kept"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
