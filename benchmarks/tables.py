"""Writes the benchmark tables of README.md, docs/performance.md and docs/kernels.md from
`benchmarks/results/*.json`, between the markers `<!-- benchmark:NAME -->` and `<!-- /benchmark -->`.
`<!-- benchmark:NAME 8192³ -->` shows one shape of kernels alone, `<!-- benchmark:cpu summary -->` some cases
of several results.

    python benchmarks/tables.py [--check]        --check writes nothing; exit status 1 if a page differs

Results of kernels (`kernels_*.json`, `rungs_*.json`) are what `ooc-gemm bench kernels --json` prints; where
there are none yet, there is nothing between the markers.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "kernels.md")
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- benchmark:(\w+)(?: (\S+))? -->\n).*?(<!-- /benchmark -->)", re.DOTALL)
SUMMARY = ("warptile", "ffma", "fp16x3", "tf32", "fp16", "int8", "dmma", "ozaki2")
"""Kernels that a short table shows."""
LIMITS = {
    "tmpfs": "32768³, tmpfs, `-M 8GiB -D 8GiB`",
    "cublas": "the same with `--kernel cublas`",
    "disk": "32768³, disk, cold, `-M 8GiB -D 8GiB`",
    "large": "65536³, tmpfs, `-M 16GiB -D 24GiB`",
    "traffic": "65536³, disk, cold, `-M 4GiB -D 2GiB`",
    "A·Aᵀ by multiply, cublas": "A·Aᵀ of 32768×65536 by `multiply --kernel cublas`, tmpfs",
    "gram, cublas": "the same by `gram`",
    "gram, auto": "the same by `gram`, `fp16x3`",
}
"""Job of limits.py → its title."""
SEVERAL = {
    "cublas": "65536³ float32, tmpfs, `--kernel cublas`",
    "auto": "the same with `fp16x3`",
    "traffic": "65536³ float32, `-M {memory_limit} -D {device_memory_limit}`",
    "grm": "relationships of {samples:,} samples, {variants:,} variants in int8",
}
"""Job of several.py → its title."""
BESIDE = {"numpy": "NumPy in core", "float32": "float32, by ooc-gemm"}
"""What the cases of matrices.py stand beside."""
CLUSTERS = {
    "multiply": "stored arrays, chunks 1024², and the engine alone with two threads",
    "squares": "dask arrays, chunks 1024²",
    "rows": "chunks of 256 whole rows",
    "small": "chunks 512²",
    "misaligned": "chunks 1000×700 and 900×1300",
    "computed": "computed operands, chunks 512²",
}
"""Case of clusters.py → its title."""
ANSWERS = {
    "corrcoef": ("correlations of 512 columns, 1,000,000 rows", "dask"),
    "pca": ("20 components of 400,000 × 2,000", "dask"),
    "grm": ("relationships of 2,000 samples × 200,000 variants", "plink2 --make-rel"),
    "grm-dask": ("relationships of 2,000 samples × 200,000 variants", "dask"),
    "topk-2000": ("10 nearest of 200,000 × 384 for 2,000 rows", "faiss IndexFlatIP"),
    "topk-20000": ("10 nearest of 200,000 × 384 for 20,000 rows", "faiss IndexFlatIP"),
}
"""Case of answers.py → its title, and its peer."""
TIMED = {
    "cpu": "whole processes, from start to exit",
    "h200": "from the call to the return in a fresh process, CUDA context included",
}


def table(report: dict[str, Any]) -> str:
    """Return a table with a line for each case and a column for each contestant. Cases with other contestants
    get a table of their own."""
    parts = []
    for titles, cases in groupby(report["cases"], key=lambda case: [c["title"] for c in case["contestants"]]):
        lines = [f"| float32 | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
        lines += [f"| {case['title']} | {' | '.join(map(cell, case['contestants']))} |" for case in cases]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "\n".join(notes(report))]) + "\n"


def cell(row: dict[str, Any]) -> str:
    """Return median seconds, ratio to the baseline, and peak memory of the process."""
    if row["median_seconds"] is None or not row["correct"]:
        return "failed"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}×, "
    text = f"{row['median_seconds']:.1f} s, {ratio}{row['peak_host_bytes'] / 2**20:.0f} MiB"
    return f"**{text}**" if row["name"] == "ooc-gemm" else text


def hardware(machine: dict[str, Any]) -> str:
    return f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB"


def counts(runs: Iterable[Any]) -> str:
    """Say how many runs stand behind each of some figures."""
    found = sorted(map(len, runs))
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def notes(report: dict[str, Any]) -> Iterator[str]:
    machine, versions = report["machine"], report["versions"]
    count = counts(row["runs"] for case in report["cases"] for row in case["contestants"])
    with_gpu = f"{versions['gpu']}, " if "gpu" in versions else ""
    names = ("numpy", "zarr", "dask", "cubed", "cupy")
    used = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    timed = TIMED[report["suite"]]
    yield f"Medians of {count} runs in turn, {timed}; ratios to the first column; peak resident memory."
    yield (
        f"{with_gpu}{hardware(machine)}; "
        f"Python {versions['python']}, {used}, {', '.join(versions['blas'])}; {report['date'][:10]}, "
        f"commit {report['commit'][:7]}{' with changes' if report['dirty'] else ''}."
    )
    smallest = report["smallest"]
    if limit := smallest.get("minimum_memory_limit"):
        yield f"The smallest limit for {smallest['title'].split(':')[0]} is {limit / 2**20:.0f} MiB."
    idle = {
        kernel: report.get(key, {}).get("idle")
        for kernel, key in (("cublas", "trace"), ("auto", "trace_auto"))
    }
    if shares := [
        f"{share:.1%} with `--kernel {kernel}`" for kernel, share in idle.items() if share is not None
    ]:
        yield f"On tmpfs the compute stream idles {', '.join(shares)} between its first kernel and its last."


def limits_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each job: seconds, prediction, the hardware's limit, bytes and peaks."""
    lines = ["| float32 | seconds | predicted | limit | read | peak host | peak GPU |", "|---" * 7 + "|"]
    shown = {name: report["rows"][name] for name in LIMITS if name in report["rows"]}
    for name, row in shown.items():
        limit = row.get("in_turn_seconds", row.get("limit_seconds"))
        lines.append(
            f"| {LIMITS[name]} | **{row['seconds']:.2f}** | {row['predicted_seconds']:.2f} | "
            f"{'–' if limit is None else f'{limit:.2f}'} | {row['bytes_read'] / 1e9:.1f} GB | "
            f"{row['peak_host_bytes'] / 2**30:.1f} GiB | {row['peak_device_bytes'] / 2**30:.1f} GiB |"
        )
    zstd, large = report["rows"]["zstd"], shown.get("large")
    commits = sorted({row["commit"][:7] for row in (*shown.values(), zstd)})
    alone = (
        f"cuBLAS SGEMM alone, all of 65536³ already on the GPU, takes {large['sgemm_alone_seconds']:.1f} s. "
        if large
        else ""
    )
    read, decode = zstd["read_bytes_per_second"], zstd["decode_bytes_per_second"]
    notes = (
        f"{report['device']}, medians in a warm process; the limit is the longest of bytes ÷ rate and "
        "operations ÷ rate, measured in the same run, or of reading and writing in turn as fast as threads "
        f"can. {alone}Readers bring zstd chunks at {read / 1e9:.1f} GB/s decoded, where as many "
        f"threads that only decode reach {decode / 1e9:.1f}. {report['date'][:10]}, "
        f"commit {' and '.join(commits)}."
    )
    return "\n".join(lines) + f"\n\n{notes}\n"


def several_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each contestant and number of GPUs."""
    lines = ["| case | GPUs | seconds | times one | predicted | read |", "|---" * 6 + "|"]
    alone: dict[str, float] = {}
    for name, row in report["rows"].items():
        what, _, count = name.partition(", ")
        plan = row.get("plan", {})  # the relationship matrix has none
        limits = {
            f"{of}memory_limit": f"{plan.get(f'{of}memory_limit', 0) >> 20}MiB" for of in ("", "device_")
        }
        seconds = median(row.get("all_seconds", [row["seconds"]]))
        one = alone.setdefault(what, seconds)
        predicted = f"{plan['predicted_seconds']:.2f}" if plan else "–"
        times = f"**{seconds:.2f}** | {one / seconds:.2f} | {predicted}"
        job = SEVERAL[what].format(**row | limits)
        if "planned_for" in row:
            job, times = f"{job}, planned as for a disk", "– | – | –"
        lines.append(f"| {job} | {count.split()[0]} | {times} | {row['bytes_read'] / 1e9:.1f} GB |")
    commits = " and ".join(dict.fromkeys(row["commit"][:7] for row in report["rows"].values()))
    store = ", tmpfs with large pages" if "huge=always" in report.get("store", "") else ""
    note = f"{report['device']}, {report['cores']} cores, medians in a warm process{store}"
    return "\n".join(lines) + f"\n\n{note}; {report['date'][:10]}, commit {commits}.\n"


def answers_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each case of answers.py that has a peer."""
    lines = ["| case | ooc-gemm | peer | times | bar |", "|---" * 5 + "|"]
    for name, case in report["cases"].items():
        if "theirs" in case:
            title, peer = ANSWERS[name]
            own, other = case["ours"]["seconds"], case["theirs"]["seconds"]
            times = f"{other / own:.2f} | {1 / case['bar']:.2f}"
            lines.append(f"| {title} | **{own:.1f} s** | {peer}: {other:.1f} s | {times} |")
    note = f"{report['machine']['cores']} cores, whole processes, at most 512 MiB for ooc-gemm"
    return "\n".join(lines) + f"\n\n{note}; {report['date'][:10]}, commit {report['commit'][:7]}.\n"


def components_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each device memory limit of answers_gpu.py."""
    lines = ["| pca | passes | GB read | seconds | in a fresh process | passes ÷ rate of reading |"]
    lines.append("|---" * 6 + "|")
    for row in report["cases"]:
        cold = median(one["seconds"] for one in row["fresh"])
        shape, limit = f"{row['rows']:,} × {row['cols']:,}", row["limits"]["device_memory_limit"]
        lines.append(
            f"| {row['components']} components of {shape} float32, `-D {limit}` | {row['passes']} | "
            f"{row['bytes_read'] / 1e9:.0f} | **{row['seconds']:.1f}** | {cold:.1f} | "
            f"{row['limit_seconds']:.1f} s |"
        )
    (first, *_), limit = report["cases"], report["cases"][0]["limits"]["memory_limit"]
    note = (
        f"{report['device']}, {report['machine']['cores']} cores, tmpfs, `-M {limit}`; "
        f"{first['read_bytes_per_second'] / 1e9:.1f} GB/s are read and "
        f"{first['upload_bytes_per_second'] / 1e9:.1f} uploaded where only one of these is done"
    )
    return "\n".join(lines) + f"\n\n{note}; {report['date'][:10]}, commit {report['commit'][:7]}.\n"


def summary_table(report: dict[str, Any]) -> str:
    """Return the short table of README, of some cases of several results. `report`: cpu.json."""
    lines = ["| on two cores, within 512 MiB | ooc-gemm | peer |", "|---|---|---|"]
    (case,) = (case for case in report["cases"] if case["name"] == "rows")
    by_name = {row["title"]: row for row in case["contestants"]}
    own = by_name["ooc-gemm -M 512MiB"]["median_seconds"]
    for title, row in by_name.items():
        if not title.startswith("ooc-gemm"):
            name = title.split(",")[0]
            times = f"{row['median_seconds']:.1f} s ({row['median_seconds'] / own:.1f}×), {name}"
            lines.append(f"| 8192³ float32, chunks of 256 rows | **{own:.1f} s** | {times} |")
    found = json.loads((RESULTS / "answers_cpu.json").read_text(encoding="utf-8"))
    for name, one in found["cases"].items():
        if name in ("corrcoef", "pca", "grm", "topk-20000"):
            title, peer = ANSWERS[name]
            ours, theirs = one["ours"]["seconds"], one["theirs"]["seconds"]
            lines.append(f"| {title} | **{ours:.1f} s** | {theirs:.1f} s ({theirs / ours:.1f}×), {peer} |")
    dates = " and ".join(dict.fromkeys(one["date"][:10] for one in (report, found)))
    commits = " and ".join(dict.fromkeys(one["commit"][:7] for one in (report, found)))
    return "\n".join(lines) + f"\n\nWhole processes, {dates}, commit {commits}.\n"


def clusters_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each case: the peer and ooc-gemm."""
    size = report["rows"][0]["size"]
    lines = [f"| {size}³ float32 | memory of a worker | peer | ooc-gemm | times | peak of a worker |"]
    lines.append("|---" * 6 + "|")
    for row in report["rows"]:
        (_, peer), (_, own) = row["seconds"].items()
        runs = list(row["runs"].values())
        spilled = max(run.get("spilled", 0) for run in runs[0])
        peaks = [f"{max(run['peak'] for run in some) >> 20} MiB" for some in runs]
        beside = f", the peer’s {peaks[0]}" if row["case"] != "multiply" else ""
        beside += f" and {spilled >> 20} MiB spilled" if spilled else ""
        lines.append(
            f"| {CLUSTERS[row['case']]} | {row['memory'] >> 20} MiB | {peer:.1f} s | **{own:.1f} s** | "
            f"{peer / own:.2f} | {peaks[1]}{beside} |"
        )
    count = counts(runs for row in report["rows"] for runs in row["runs"].values())
    note = f"{hardware(report['machine'])}; dask {report['dask']}, medians of {count} runs"
    return "\n".join(lines) + f"\n\n{note}; {report['date'][:10]}, commit {report['commit'][:7]}.\n"


def tall_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each command of tall.py."""
    names = "NumPy", "one core", "one thread", "two threads", "cluster"
    lines = [
        "| | NumPy in core | ooc-gemm, one thread on one core | one thread on two cores | "
        "two threads | cluster of 2 × 1 thread |",
        "|---" * 6 + "|",
    ]
    for row in report["results"]:
        seconds = row["seconds"]
        cells = [f"{seconds[name]:.2f} s, {seconds['NumPy'] / seconds[name]:.1f}×" for name in names]
        lines.append(
            f"| `{row['command']}` | {' | '.join([cells[0], *(f'**{cell}**' for cell in cells[1:])])} |"
        )
    count = counts(runs for row in report["results"] for runs in row["runs"].values())
    size = (
        f"X of {report['rows']:,} × {report['columns']} float32, tmpfs, {report['memory'] >> 20} MiB a thread"
    )
    note = f"XᵀX, {size}; medians of {count} runs; {hardware(report['machine'])}"
    return "\n".join(lines) + f"\n\n{note}; {report['date'][:10]}, commit {report['commit'][:7]}.\n"


def lanes_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each case of lanes.py."""
    lines = ["| product and chunks of A | without lanes | with lanes | ratio |", "|---" * 4 + "|"]
    for row in report["results"]:
        without, having = (row["seconds"][name] for name in ("without", "with"))
        lines.append(f"| {row['case']} | {without:.2f} s | **{having:.2f} s** | {row['ratio']:.2f} |")
    count = counts(runs for row in report["results"] for runs in row["runs"].values())
    size = f"A of {report['rows']:,} × 256, float32 unless a line says more, tmpfs"
    note = f"{size}; calls in warm processes, medians of {count}; {hardware(report['machine'])}"
    return "\n".join(lines) + f"\n\n{note}; {report['date'][:10]}, commit {report['commit'][:7]}.\n"


def matrices_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each case of matrices.py."""
    lines = ["| case | beside | its seconds | ooc-gemm | ratio | predicted ÷ measured |", "|---" * 6 + "|"]
    for row in report["cases"]:
        peer, own = (row["median_wall_seconds"][name] for name in (row["beside"], "ooc-gemm"))
        predicted = statistics.median(row["predicted_to_measured"])
        case, beside = row["title"].removesuffix(", none"), BESIDE[row["beside"]]
        lines.append(
            f"| {case} | {beside} | {peer:.2f} | **{own:.2f}** | {row['ratio']:.2f} | {predicted:.2f} |"
        )
    limit = report["memory_limit_bytes"] >> 20
    note = (
        f"Whole processes, Zarr to Zarr, at most {limit} MiB for ooc-gemm; predictions are of the call; "
        f"medians of {report['repeat']} runs; {hardware(report['machine'])}"
    )
    return "\n".join(lines) + f"\n\n{note}; {report['date'][:10]}, commit {report['commit'][:7]}.\n"


def kernels_table(report: dict[str, Any]) -> str:
    """Return a table for each type of A and B, with a line for each kernel and a column for each shape."""
    parts = []
    by_type = sorted(report["rows"], key=lambda row: row["dtype"])
    for dtype, group in groupby(by_type, key=lambda row: row["dtype"]):
        rows = list(group)
        shapes = list(dict.fromkeys(map(shape, rows)))
        cells = {(row["kernel"], shape(row)): kernel_cell(row) for row in rows}
        names = dict.fromkeys(row["kernel"] for row in rows)
        lines = [f"| {dtype}, TFLOP/s | {' | '.join(shapes)} |", "|---" * (len(shapes) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(cells.get((name, x), '') for x in shapes)} |" for name in names]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, kernels_note(report)]) + "\n"


def kernels_note(report: dict[str, Any]) -> str:
    device, versions = report["device"], report["versions"]
    commit = f", commit {report['commit'][:7]}" if "commit" in report else ""
    return (
        f"{device['name']}, medians of {report['repeat']} in turns on random data; in brackets the ratio to "
        f"cuBLAS of the same type and precision. cuBLAS {versions['cublas']}, CuPy {versions['cupy']}; "
        f"{report['date'][:10]}{commit}."
    )


def kernels_summary(report: dict[str, Any], wanted: str) -> str:
    """Return a table of one shape, with a line for each kernel of SUMMARY and cuBLAS beside it."""
    rows = [row for row in report["rows"] if shape(row) == wanted]
    rivals = {(row["kernel"], row["dtype"]): row["tflops"] for row in rows if row["kernel"] == row["rival"]}
    lines = [f"| {wanted} | type | TFLOP/s | cuBLAS | ratio |", "|---" * 5 + "|"]
    for row in rows:
        if row["kernel"] in SUMMARY:
            base = rivals.get((row["rival"], row["dtype"]))  # none multiplies wide integers
            beside = "– | –" if base is None else f"{rate(base)} | {row['ratio']:.2f}"
            cells = f"{row['dtype']} | {rate(row['tflops'])} | {beside}"
            lines.append(f"| {row['kernel']} | {cells} |")
    return "\n".join(lines) + f"\n\n{kernels_note(report)}\n"


def accuracy_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each kernel and path: how many inputs took it, and the largest ratios to
    the errors of cuBLAS."""
    lines = [
        "| kernel | type | path | inputs | error in the Frobenius norm | largest error |",
        "|---" * 6 + "|",
    ]
    by_path: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        by_path.setdefault((row["kernel"], row["dtype"], row["path"]), []).append(row)
    for names, rows in sorted(by_path.items()):
        worst = (max(row[ratio] for row in rows) for ratio in ("ratio", "ratio_largest"))
        lines.append(f"| {' | '.join((*names, str(len(rows)), *(f'{x:.2f}' for x in worst)))} |")
    families = len({row["family"] for row in report["rows"]})
    speed = ", ".join(
        f"{row['tflops']:.0f} TFLOP/s, {row['ratio']:.2f} times SGEMM, at {row['m']}³"
        for row in report["speed"]
        if (row["kernel"], row["dtype"]) == ("fp16x3", "float32")
    )
    note = (
        f"{report['device']}, C of {report['m']}×{report['n']}, {families} families of inputs; errors "
        "against a product in float64, as multiples of those of cuBLAS' SGEMM or CGEMM on the same inputs; "
        f"the largest error is relative to |A|·|B|. With N(0, 1), `fp16x3` reaches {speed}. "
        f"{report['date'][:10]}, "
        f"commit {report['commit'][:7]}."
    )
    return "\n".join(lines) + f"\n\n{note}\n"


def rate(tflops: float) -> str:
    return f"{tflops:.3g}" if tflops < 1000 else f"{tflops:.0f}"


def shape(row: dict[str, Any]) -> str:
    m, n, k = row["m"], row["n"], row["k"]
    return f"{m}³" if m == n == k else f"{m}×{n}×{k}"


def kernel_cell(row: dict[str, Any]) -> str:
    """Return TFLOP/s, and the ratio to cuBLAS."""
    if row["failed"] is not None or not row["correct"]:
        return "failed"
    same = row["ratio"] is None or row["kernel"] == row["rival"]
    return rate(row["tflops"]) + ("" if same else f" ({row['ratio']:.2f})")


def render(text: str) -> str:
    """Return a page with its tables filled in."""

    def block(match: re.Match[str]) -> str:
        path, kernels = RESULTS / f"{match[2]}.json", match[2].startswith(("kernels_", "rungs_"))
        if not path.is_file():
            if kernels:
                return f"{match[1]}{match[4]}"
            raise SystemExit(f"there is a table {match[2]} but {path.relative_to(ROOT)} is missing")
        report = json.loads(path.read_text(encoding="utf-8"))
        if match[2].startswith("limits_"):
            shown = limits_table(report)
        elif match[2].startswith("several_"):
            shown = several_table(report)
        elif match[2].startswith("accuracy_"):
            shown = accuracy_table(report)
        elif match[2].startswith("answers_"):
            shown = (
                components_table(report) if report.get("suite") == "gpu answers" else answers_table(report)
            )
        elif match[3] == "summary":
            shown = summary_table(report)
        elif match[2] == "clusters":
            shown = clusters_table(report)
        elif match[2].startswith("tall_cpu"):
            shown = tall_table(report)
        elif match[2].startswith("lanes_cpu"):
            shown = lanes_table(report)
        elif match[2].startswith("matrices_cpu"):
            shown = matrices_table(report)
        elif not kernels:
            shown = table(report)
        elif match[3]:
            shown = kernels_summary(report, match[3])
        else:
            shown = kernels_table(report)
        return f"{match[1]}\n{shown}\n{match[4]}"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page differs")
    check = parser.parse_args().check
    differs = False
    for page in filter(Path.is_file, PAGES):
        old = page.read_text(encoding="utf-8")
        new = render(old)
        if new != old and check:
            differs = True
            name = page.relative_to(ROOT)
            print(f"{name} differs from the results; run python benchmarks/tables.py", file=sys.stderr)
        elif new != old:
            page.write_text(new, encoding="utf-8")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
