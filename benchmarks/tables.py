"""Writes the README's benchmark tables from `benchmarks/results/*.json`, between the markers
`<!-- benchmark:NAME -->` and `<!-- /benchmark -->`.

    python benchmarks/tables.py [--check]        --check writes nothing; exit status 1 if README differs
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- benchmark:(\w+) -->\n).*?(<!-- /benchmark -->)", re.DOTALL)
TIMED = {
    "cpu": "whole processes, from start to exit",
    "h200": "from the call to the return in a fresh process, CUDA context included",
}


def table(report: dict[str, Any]) -> str:
    """A line a case and a column a contestant; cases with other contestants get a table of their own."""
    parts = []
    for titles, cases in groupby(report["cases"], key=lambda case: [c["title"] for c in case["contestants"]]):
        lines = [f"| float32 | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
        lines += [f"| {case['title']} | {' | '.join(map(cell, case['contestants']))} |" for case in cases]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "\n".join(notes(report))]) + "\n"


def cell(row: dict[str, Any]) -> str:
    """Median seconds, ratio to the baseline, peak memory of the process."""
    if row["median_seconds"] is None or not row["correct"]:
        return "failed"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}×, "
    text = f"{row['median_seconds']:.1f} s, {ratio}{row['peak_host_bytes'] / 2**20:.0f} MiB"
    return f"**{text}**" if row["name"] == "ooc-gemm" else text


def notes(report: dict[str, Any]) -> Iterator[str]:
    machine, versions = report["machine"], report["versions"]
    runs = sorted({len(row["runs"]) for case in report["cases"] for row in case["contestants"]})
    count = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    with_gpu = f"{versions['gpu']}, " if "gpu" in versions else ""
    names = ("numpy", "zarr", "dask", "cubed", "cupy")
    used = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    timed = TIMED[report["suite"]]
    yield f"Medians of {count} runs in turn, {timed}; ratios to the first column; peak resident memory."
    yield (
        f"{with_gpu}{machine['cores']} cores of {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB; "
        f"Python {versions['python']}, {used}, {', '.join(versions['blas'])}; {report['date'][:10]}."
    )
    smallest, idle = report["smallest"], report["trace"].get("idle")
    if limit := smallest.get("minimum_memory_limit"):
        yield f"The smallest limit for {smallest['title'].split(':')[0]} is {limit / 2**20:.0f} MiB."
    if idle is not None:
        yield f"On tmpfs the compute stream idles {idle:.1%} of the time between its first and last kernel."


def render(text: str) -> str:
    """The README with its tables."""

    def block(match: re.Match[str]) -> str:
        path = RESULTS / f"{match[2]}.json"
        if not path.is_file():
            raise SystemExit(f"README.md has a table {match[2]} but {path.relative_to(ROOT)} is missing")
        return f"{match[1]}\n{table(json.loads(path.read_text(encoding='utf-8')))}\n{match[3]}"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if README differs")
    check = parser.parse_args().check
    old = README.read_text(encoding="utf-8")
    new = render(old)
    if check and new != old:
        print("README.md differs from benchmarks/results; run python benchmarks/tables.py", file=sys.stderr)
        return 1
    if new != old:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
