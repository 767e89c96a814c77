"""The main job against its peers, Zarr to Zarr, and the bars it has to meet.

    python benchmarks/engine.py [--only NAME ...] [--repeat R] [--dir DIR] [--out FILE] [--quick]
    python benchmarks/engine.py --gpu

Every contestant is a process of its own (`peers.py`), and they take turns, so that a machine that drifts
drifts for all. On the CPU the time is that of the whole process, from its start to its exit; on the GPU
it is from the call to the return, with imports excluded and the CUDA context included. Every result is
checked. Exit status 1: a bar was missed, a limit passed, or a result is wrong or missing.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Nothing larger is imported here: a child's ru_maxrss starts at the resident set of its parent.

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MiB = 1 << 20
GiB = 1 << 30
TIMEOUT = 1800
"""Seconds after which a contestant is killed."""
MAX_IDLE = 0.10
"""Largest idle share of the compute stream between its first and its last kernel."""

Run = dict[str, Any]
console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Folder:
    """The folder of one case's arrays."""

    root: Path

    @property
    def a(self) -> str:
        return str(self.root / "a.zarr")

    @property
    def b(self) -> str:
        return str(self.root / "b.zarr")

    @property
    def c(self) -> str:
        return str(self.root / "c.zarr")

    @property
    def reference(self) -> str:
        return str(self.root / "reference.npy")

    @property
    def work(self) -> str:
        return str(self.root / "work")


@dataclass(frozen=True)
class Contestant:
    name: str
    """The name by which `--only` selects it."""
    title: str
    command: Callable[[Folder], list[str]]
    quoted: str = "wall_seconds"
    """The field whose times are compared."""
    stores: bool = True
    """Whether it stores a C that can be checked."""
    plan: Callable[[Folder], list[str]] | None = None
    limit: int | None = None
    """The most bytes that its process may hold resident."""
    device_limit: int | None = None
    max_ratio: float | None = None
    max_seconds: float | None = None


@dataclass(frozen=True)
class Case:
    """One problem at one place."""

    name: str
    title: str
    shape: tuple[int, int, int]
    """m, n, k."""
    chunks_a: tuple[int, int]
    chunks_b: tuple[int, int]
    contestants: tuple[Contestant, ...]
    baseline: str
    """Name of the contestant that the ratios refer to."""
    place: Path
    cold: bool = False
    """Drop the page cache before every run."""
    asked: bool = False
    """Whether the case runs only if `--only` names it, because it takes long."""
    runs: dict[str, list[Run]] = field(default_factory=dict)
    """The runs of each contestant, by its title."""
    plans: dict[str, Run] = field(default_factory=dict)
    """The output of `ooc-gemm plan` for each contestant, by its title."""

    @property
    def folder(self) -> Folder:
        return Folder(self.place / self.name)


# Processes


def peer(name: str, **arguments: Any) -> list[str]:
    """Return the command line of a function of `peers.py`."""
    return [sys.executable, str(Path(__file__).with_name("peers.py")), name, json.dumps(arguments)]


def cli(*arguments: str) -> list[str]:
    """Return a command line of ooc-gemm from this checkout."""
    return [sys.executable, "-m", "ooc_gemm.cli", *arguments]


def size(nbytes: int) -> str:
    return f"{nbytes // MiB}MiB" if nbytes % MiB == 0 else f"{nbytes}B"


def spawn(command: list[str], timeout: float = TIMEOUT) -> Run:
    """Run a process, and return its wall time, its peak memory, its exit status and the JSON that it
    printed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)
        timer = threading.Timer(timeout, child.kill)
        timer.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            child.wait()
            raise
        finally:
            timer.cancel()
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, err):
            file.seek(0)
        text, errors = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    run: Run = {"exit": child.returncode, "wall_seconds": wall, "max_rss_bytes": usage.ru_maxrss * 1024}
    try:
        # One object a process: the last line of a peer's output, all of ooc-gemm's.
        lines = text.strip().splitlines()
        run["json"] = json.loads(lines[-1] if lines and lines[-1].startswith("{") else text)
    except ValueError:
        run["json"] = None
    if child.returncode or run["json"] is None:
        tail = (errors or text).strip().splitlines()[-1:] or ["no output"]
        run["problem"] = f"exit {child.returncode}: {tail[0]}"
    return run


def must(command: list[str]) -> Run:
    """Run a process that has no reason to fail, and return its JSON. Ends this program if it fails."""
    run = spawn(command)
    if "problem" in run:
        raise SystemExit(f"{' '.join(command[1:3])}: {run['problem']}")
    return dict(run["json"])


def drop_caches() -> None:
    """Drop the page cache, so that the next reads come from the disk."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise SystemExit(f"cannot drop the page cache, which --gpu needs root for: {error}") from None


def remove(*paths: str) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


# Contestants


def plan_command(folder: Folder, limit: int) -> list[str]:
    return cli("plan", folder.a, folder.b, "-M", size(limit), "-d", "cpu", "--json")


def ooc_gemm(limit: int, max_ratio: float | None = None) -> Contestant:
    """Return ooc-gemm at a memory limit as a contestant."""
    return Contestant(
        "ooc-gemm",
        f"ooc-gemm -M {size(limit)}",
        lambda f: cli("multiply", f.a, f.b, f.c, "-M", size(limit), "-d", "cpu", "--json", "-f"),
        plan=lambda f: plan_command(f, limit),
        limit=limit,
        max_ratio=max_ratio,
    )


def cpu_cases(place: Path, quick: bool) -> list[Case]:
    cut, thin = (8, 2) if quick else (1, 1)

    def peers(chunks: tuple[int, int], max_ratio: float) -> tuple[Contestant, ...]:
        numpy_chunks = chunks if all(n % 16 == 0 for n in chunks) else (1024 // thin, 1024 // thin)
        return (
            Contestant(
                "numpy",
                "NumPy in core",
                lambda f: peer("numpy", a=f.a, b=f.b, c=f.c, chunks=numpy_chunks),
            ),
            Contestant("dask", "dask.array", lambda f: peer("dask", a=f.a, b=f.b, c=f.c)),
            Contestant(
                "cubed",
                "cubed, 512 MiB",
                lambda f: peer("cubed", a=f.a, b=f.b, c=f.c, work_dir=f.work, allowed_mem=512 * MiB),
            ),
            ooc_gemm(512 * MiB, max_ratio),
            ooc_gemm(256 * MiB),
        )

    n = 8192 // cut
    cases = []
    for name, chunks_a, chunks_b, bar in (
        ("1024", (1024, 1024), (1024, 1024), 1.00),
        ("rows", (256, 8192), (256, 8192), 1.10),
        ("512", (512, 512), (512, 512), 1.10),
        ("misaligned", (1000, 700), (900, 1300), 1.10),
    ):
        a, b = ((min(r // thin, n), min(c // thin, n)) for r, c in (chunks_a, chunks_b))
        title = f"{n}³, {name if name.isalpha() else 'chunks'} {f'{a} × {b}' if a != b else a}"
        cases.append(Case(name, title, (n, n, n), a, b, peers(a, bar), "numpy", place))
    n, chunk = 16384 // cut, (2048 // thin, 2048 // thin)
    alone = Contestant(
        "numpy",
        "NumPy's @ alone",
        lambda f: peer("numpy_matmul", shape=(n, n, n)),
        quoted="seconds",
        stores=False,
    )
    contestants = (alone, ooc_gemm(512 * MiB, 1.08))
    cases.append(Case("16384", f"{n}³, chunks {chunk}", (n, n, n), chunk, chunk, contestants, "numpy", place))
    large, contestants = 2 * n, (alone, ooc_gemm(1024 * MiB, 8 * 1.05))
    title = f"{large}³, chunks {chunk}, beside @ of {n}³"
    shape = (large, large, large)
    cases.append(Case("32768", title, shape, chunk, chunk, contestants, "numpy", place, asked=True))
    return cases


def gpu_ooc_gemm(max_seconds: float | None, trace: str | None = None, kernel: str = "auto") -> Contestant:
    host, device = 8 * GiB, 4 * GiB
    return Contestant(
        "ooc-gemm",
        "ooc-gemm -M 8GiB -D 4GiB",
        lambda f: peer(
            "gpu_ooc_gemm",
            a=f.a,
            b=f.b,
            c=f.c,
            host=size(host),
            device=size(device),
            trace=trace,
            kernel=kernel,
        ),
        quoted="seconds",
        limit=host,
        device_limit=device,
        max_seconds=max_seconds,
    )


def gpu_cases(disk: Path, tmpfs: Path, quick: bool) -> list[Case]:
    cut = 8 if quick else 1
    n, block, chunk = 32768 // cut, 8192 // cut, (2048 // cut, 2048 // cut)

    def contestants(max_seconds: float) -> tuple[Contestant, ...]:
        return (
            Contestant(
                "cupy",
                "CuPy in core",
                lambda f: peer("gpu_cupy", a=f.a, b=f.b, c=f.c, chunks=chunk),
                quoted="seconds",
            ),
            gpu_ooc_gemm(max_seconds),
            Contestant(
                "dask",
                "dask.array with CuPy blocks",
                lambda f: peer("gpu_dask", a=f.a, b=f.b, c=f.c),
                quoted="seconds",
            ),
            Contestant(
                "loop",
                f"loop by hand, {block}² blocks",
                lambda f: peer("gpu_loop", a=f.a, b=f.b, c=f.c, chunks=chunk, block=block),
                quoted="seconds",
            ),
        )

    return [
        Case("tmpfs", f"{n}³, tmpfs", (n, n, n), chunk, chunk, contestants(4.0), "cupy", tmpfs),
        Case("disk", f"{n}³, disk", (n, n, n), chunk, chunk, contestants(6.5), "cupy", disk, not quick),
    ]


# Measuring


def make_inputs(case: Case, gpu: bool = False) -> None:
    """Write A, B and the sampled rows of their product."""
    (m, n, k), folder = case.shape, case.folder
    console.print(f"[dim]{case.title}: making A and B in {folder.root}[/]")
    folder.root.mkdir(parents=True)
    must(peer("make", path=folder.a, shape=(m, k), chunks=case.chunks_a, seed=1))
    must(peer("make", path=folder.b, shape=(k, n), chunks=case.chunks_b, seed=2))
    must(peer("reference", a=folder.a, b=folder.b, out=folder.reference, gpu=gpu))


def one_run(case: Case, contestant: Contestant) -> Run:
    """Run a contestant once from a clean state, check the result, and remove it."""
    folder = case.folder
    remove(folder.c, folder.work)
    os.sync()
    if case.cold:
        drop_caches()
    run = spawn(contestant.command(folder))
    said = run.pop("json") or {}
    run |= {key: value for key, value in said.items() if key not in ("plan", "wall_seconds")}
    run["peak_host_bytes"] = max(run["max_rss_bytes"], said.get("peak_host_bytes", 0))
    if contestant.limit is not None:
        run["within_limit"] = run["peak_host_bytes"] <= contestant.limit
    if contestant.device_limit is not None and said:
        run["within_device_limit"] = said["peak_device_bytes"] <= contestant.device_limit
    plans = [plan for plan in (case.plans.get(contestant.title), said.get("plan")) if plan is not None]
    if plans:
        moved = ("bytes_read", "bytes_written")
        run["plan_agrees"] = all(plan.get(key, -1) == said.get(key) for plan in plans for key in moved)
    if "problem" not in run and contestant.stores:
        checked = spawn(peer("check", c=folder.c, reference=folder.reference))
        run["check"] = checked["json"] or {"correct": False, "problem": checked["problem"]}
    remove(folder.c, folder.work)
    state = "ok" if is_correct(run) else run.get("problem", "WRONG RESULT")
    console.print(
        f"[dim]{case.title}: {contestant.title}: {run['wall_seconds']:.2f} s, "
        f"{run['peak_host_bytes'] / MiB:.0f} MiB,[/] {escape(state)}"
    )
    return run


def measure(cases: list[Case], repeat: int, deadline: float = float("inf")) -> None:
    """Run all contestants in turn, `repeat` times. After the deadline only the first run of each contestant
    is still made."""
    for case in cases:
        for contestant in case.contestants:
            case.runs[contestant.title] = []
            if contestant.plan is not None:
                planned = spawn(contestant.plan(case.folder))
                case.plans[contestant.title] = planned["json"] or {"problem": planned["problem"]}
    took: dict[tuple[str, str], float] = {}
    for _ in range(repeat):
        for case in cases:
            for contestant in case.contestants:
                key = case.name, contestant.title
                start = time.monotonic()
                if start + took.get(key, 0) < deadline or key not in took:
                    case.runs[contestant.title].append(one_run(case, contestant))
                    took[key] = time.monotonic() - start


def median(runs: list[Run], key: str) -> float | None:
    times = [run[key] for run in runs if "problem" not in run and key in run]
    return statistics.median(times) if times else None


def divide(value: float | None, by: float | None) -> float | None:
    return value / by if value and by else None


def is_correct(run: Run) -> bool:
    return "problem" not in run and bool(run.get("check", {"correct": True})["correct"])


def all_of(runs: list[Run], key: str) -> bool | None:
    """Whether a field is true in all runs that have it; None if no run has it."""
    known = [run[key] for run in runs if key in run]
    return all(known) if known else None


def summary(case: Case) -> dict[str, Any]:
    """Return a case as it is saved: the measurements, and whether they meet the bars."""
    base = next((c for c in case.contestants if c.name == case.baseline), None)
    base_runs = case.runs[base.title] if base else []
    rows: list[dict[str, Any]] = []
    for contestant in case.contestants:
        runs = case.runs[contestant.title]
        quoted = median(runs, contestant.quoted)
        row: dict[str, Any] = {
            "name": contestant.name,
            "title": contestant.title,
            "limit_bytes": contestant.limit,
            "device_limit_bytes": contestant.device_limit,
            "quoted": contestant.quoted,
            "median_seconds": quoted,
            "median_wall_seconds": median(runs, "wall_seconds"),
            "median_in_process_seconds": median(runs, "seconds"),
            "ratio": divide(quoted, median(base_runs, base.quoted) if base else None),
            "in_process_ratio": divide(median(runs, "seconds"), median(base_runs, "seconds")),
            "max_ratio": contestant.max_ratio,
            "max_seconds": contestant.max_seconds,
            "met": None,
            "behind": None,
            "peak_host_bytes": max((run["peak_host_bytes"] for run in runs), default=None),
            "within_limit": all_of(runs, "within_limit"),
            "within_device_limit": all_of(runs, "within_device_limit"),
            "plan": case.plans.get(contestant.title),
            "plan_agrees": all_of(runs, "plan_agrees"),
            "correct": bool(runs) and all(map(is_correct, runs)),
            "runs": runs,
        }
        if contestant.max_ratio is not None and base:
            row["met"] = row["ratio"] is not None and row["ratio"] <= contestant.max_ratio
        if contestant.max_seconds is not None:
            row["met"] = quoted is not None and quoted <= contestant.max_seconds
        rows.append(row)
    ours = [row["median_seconds"] for row in rows if row["met"] is not None and row["median_seconds"]]
    for row in rows:
        if row["name"] in ("dask", "cubed") and ours and row["median_seconds"]:
            row["behind"] = max(ours) < row["median_seconds"]
    return {
        "name": case.name,
        "title": case.title,
        "shape": case.shape,
        "dtype": "float32",
        "chunks_a": case.chunks_a,
        "chunks_b": case.chunks_b,
        "baseline": base.title if base else case.baseline,
        "contestants": rows,
    }


def smallest(case: Case) -> dict[str, Any]:
    """Show that a limit that is too small is refused with the smallest sufficient one, and that this one
    works."""
    folder, asked = case.folder, MiB
    console.print(f"[dim]{case.title}: the smallest limit[/]")
    refusal = spawn(plan_command(folder, asked))
    limit = (refusal["json"] or {}).get("minimum_memory_limit")
    refused = spawn(ooc_gemm(asked).command(folder))["exit"] == 2 and not Path(folder.c).exists()
    found: dict[str, Any] = {
        "title": f"{case.title}: smallest limit",
        "asked_bytes": asked,
        "refused": refused and refusal["exit"] == 2 and (refusal["json"] or {}).get("feasible") is False,
        "minimum_memory_limit": limit,
        "ok": False,
    }
    if isinstance(limit, int) and limit > 0:
        contestant = ooc_gemm(limit)
        found["less_is_refused"] = spawn(plan_command(folder, limit - 1))["exit"] == 2
        planned = spawn(plan_command(folder, limit))
        case.plans[contestant.title] = planned["json"] or {"problem": planned["problem"]}
        run = found["run"] = one_run(case, contestant)
        found["ok"] = found["refused"] and run["within_limit"] and run["plan_agrees"] and is_correct(run)
    return found


def idle_share(events: list[dict[str, Any]]) -> float:
    """Return the share of the time between the start of the first kernel and the end of the last in which
    none ran."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
    first = reached = spans[0][0]
    busy = 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return float(1 - busy / (reached - first))


def traced(case: Case, kernel: str, max_idle: float | None) -> dict[str, Any]:
    """Make one run with a timeline, and find how long the compute stream idles."""
    path = case.folder.root / "trace.json"
    run = one_run(case, gpu_ooc_gemm(None, str(path), kernel))
    title = f"{case.title}, kernel {kernel}: compute stream idle"
    found: dict[str, Any] = {"title": title, "max_idle": max_idle, "run": run}
    try:
        events = json.loads(path.read_text())["traceEvents"]
        kernels = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
        found |= {"kernels": len(kernels), "idle": idle_share(kernels)}
    except (OSError, ValueError, LookupError, ZeroDivisionError) as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    found["ok"] = is_correct(run) and (max_idle is None or found.get("idle", 1.0) <= max_idle)
    return found


# Reporting


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def word(value: bool | None, good: str, bad: str) -> str:
    return "" if value is None else f"[green]{good}[/]" if value else f"[bold red]{bad}[/]"


def show(case: dict[str, Any]) -> None:
    """Print a table for a case. The first ratio is the one to quote."""
    table = Table(title=f"{case['title']} (ratios to {case['baseline']})", title_justify="left")
    for name in ("", "seconds", "ratio", "bar", "in process", "ratio", "peak MiB", "limit", "bytes", "error"):
        table.add_column(name, justify="left" if name in ("", "bar", "limit", "bytes") else "right")
    for row in case["contestants"]:
        limits = [row[key] for key in ("within_limit", "within_device_limit") if row[key] is not None]
        bar = f"≤ {row['max_ratio']:.2f} " if row["max_ratio"] else ""
        bar += f"≤ {row['max_seconds']:.1f} s " if row["max_seconds"] else ""
        errors = [run["check"].get("error") for run in row["runs"] if "check" in run]
        worst = max((e for e in errors if isinstance(e, float)), default=None)
        table.add_row(
            row["title"],
            number(row["median_seconds"]),
            number(row["ratio"]),
            bar + word(row["met"], "ok", "missed") + word(row["behind"], "behind", "ahead"),
            number(row["median_in_process_seconds"]),
            number(row["in_process_ratio"]),
            number(row["peak_host_bytes"] and row["peak_host_bytes"] / MiB, 0),
            word(all(limits) if limits else None, "OK", "over"),
            word(row["plan_agrees"], "OK", "differs"),
            ("" if worst is None else f"{worst:.1e}") if row["correct"] else "[bold red]wrong[/]",
        )
    Console(width=130 if not sys.stdout.isatty() else None).print(table)


def failures(report: dict[str, Any]) -> list[str]:
    """Return a sentence for each bar that was missed and each wrong result."""
    found = []
    for case in report["cases"]:
        for row in case["contestants"]:
            name = f"{case['title']}: {row['title']}"
            problems = {run["problem"] for run in row["runs"] if "problem" in run}
            found += [f"{name}: {problem}" for problem in sorted(problems)]
            for key, text in (
                ("correct", "not every result is right"),
                ("met", "misses its bar"),
                ("behind", "is not behind ooc-gemm"),
                ("within_limit", "passed its memory limit"),
                ("within_device_limit", "passed its device memory limit"),
                ("plan_agrees", "moved other bytes than planned"),
            ):
                if row[key] is False and not (key in ("met", "behind") and report["quick"]):
                    found.append(f"{name}: {text}")
    extras = [report[key] for key in ("smallest", "trace", "trace_auto") if report.get(key)]
    return found + [f"{extra['title']}: failed" for extra in extras if not extra["ok"]]


def machine() -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].split(":", 1)[1].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def scratch(parent: Path, need: int, keep: bool) -> Iterator[Path]:
    """Make a directory with room for `need` bytes, which is removed at the end unless `keep`."""
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < need:
        raise SystemExit(f"{parent} has {free / GiB:.1f} GiB free and {need / GiB:.1f} are needed; use --dir")
    place = Path(tempfile.mkdtemp(prefix="ooc-gemm-benchmark-", dir=parent))
    try:
        yield place
    finally:
        if keep:
            console.print(f"kept {place}")
        else:
            remove(str(place))


def filesystem(place: Path) -> str:
    return subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, text=True).stdout.strip()


def select(cases: list[Case], only: list[str] | None) -> list[Case]:
    """Return the cases and contestants that are named, or all if none is."""
    if not only:
        return [case for case in cases if not case.asked]
    known = {case.name for case in cases} | {c.name for case in cases for c in case.contestants}
    if unknown := sorted(set(only) - known - {"smallest", "trace"}):
        raise SystemExit(f"--only {' '.join(unknown)}: not among {', '.join(sorted(known))}, smallest, trace")
    names = {case.name for case in cases} & set(only)
    who = set(only) - names - {"smallest", "trace"}
    chosen = [case for case in cases if case.name in names or (who and not names and not case.asked)]
    chosen = [
        replace(c, contestants=tuple(x for x in c.contestants if not who or x.name in who)) for c in chosen
    ]
    return [case for case in chosen if case.contestants]


def run_cpu(args: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> None:
    with scratch(args.dir, 4 * GiB, args.keep) as place:
        cases = cpu_cases(place, args.quick)
        for case in select(cases, args.only):
            make_inputs(case)
            measure([case], args.repeat)
            report["cases"].append(summary(case))
            show(report["cases"][-1])
            save()
            if not args.keep:
                remove(str(case.folder.root))
        if not args.only or "smallest" in args.only:
            case = replace(cases[0], name="smallest")
            make_inputs(case)
            report["smallest"] = found = smallest(case)
            limit = found["minimum_memory_limit"]
            console.print(
                f"{found['title']}: {limit and round(limit / MiB, 1)} MiB, "
                f"peak {number(divide(found.get('run', {}).get('peak_host_bytes'), MiB), 1)} MiB, "
                + word(found["ok"], "ok", "failed")
            )
            save()


def run_gpu(args: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> None:
    need = 13 * GiB if not args.quick else GiB
    with scratch(args.tmpfs, need, args.keep) as fast, scratch(args.dir, need, args.keep) as disk:
        report["places"] = {"tmpfs": filesystem(fast), "disk": filesystem(disk)}
        if (report["places"]["tmpfs"] == "tmpfs") == (report["places"]["disk"] == "tmpfs"):
            raise SystemExit(f"{args.tmpfs} must be a tmpfs and {args.dir} a disk; use --tmpfs and --dir")
        tmpfs_case, disk_case = gpu_cases(disk, fast, args.quick)
        chosen = select([tmpfs_case, disk_case], args.only)
        make_inputs(tmpfs_case, gpu=True)
        if any(case.name == "disk" for case in chosen):
            must(peer("copy", source=str(tmpfs_case.folder.root), target=str(disk_case.folder.root)))
        measure(chosen, args.repeat, args.started + args.deadline)
        report["cases"] = [summary(case) for case in chosen]
        for case in report["cases"]:
            show(case)
        save()
        if not args.only or "trace" in args.only:
            # fp16x3, which auto takes, multiplies faster than the bus brings operands; SGEMM can hide it.
            report["trace"] = traced(tmpfs_case, "cublas", MAX_IDLE)
            report["trace_auto"] = traced(tmpfs_case, "auto", None)
            for found in (report["trace"], report["trace_auto"]):
                share, kernels = found.get("idle", 1), found.get("kernels", 0)
                console.print(
                    f"{found['title']}: {share:.1%} of {kernels} kernels' time "
                    f"(≤ {MAX_IDLE:.0%} for cublas) " + word(found["ok"], "ok", "missed")
                )
            save()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="the part that needs an H200")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases or contestants, such as: 1024 numpy")
    parser.add_argument("--repeat", type=int, metavar="R", help="rounds (default 3, with --quick 1)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the arrays go")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="the same in memory, for --gpu")
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/{cpu,h200}.json for a whole run"
    )
    parser.add_argument("--quick", action="store_true", help="an eighth of the size, to try the program")
    parser.add_argument(
        "--deadline", type=float, default=480, metavar="S", help="--gpu: no run that ends later (default 480)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the arrays")
    parser.add_argument("--commit", help="what was measured, where there is no git repository")
    args = parser.parse_args()
    args.started = time.monotonic()
    args.repeat = args.repeat or (1 if args.quick else 3)
    suite = "h200" if args.gpu else "cpu"
    if args.out is None and not args.quick and not args.only:
        args.out = RESULTS / f"{suite}.json"
    packages = ["numpy", "zarr", "dask", *(["cupy"] if args.gpu else ["cubed"]), "ooc_gemm"]
    report: dict[str, Any] = {
        "suite": suite,
        "quick": args.quick,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit or git("rev-parse", "HEAD"),
        "dirty": bool(changes)
        if (changes := git("status", "--porcelain", "--", ".", ":!benchmarks/results")) is not None
        else None,
        "machine": machine(),
        "versions": must(peer("info", packages=packages, gpu=args.gpu)),
        "repeat": args.repeat,
        "smallest": {},
        "trace": {},
        "cases": [],
    }

    def save() -> None:
        report["elapsed_seconds"] = time.monotonic() - args.started
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")

    (run_gpu if args.gpu else run_cpu)(args, report, save)
    for failure in (found := failures(report)):
        console.print(failure, style="red", markup=False)
    if args.out is not None:
        console.print(f"saved {args.out}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
