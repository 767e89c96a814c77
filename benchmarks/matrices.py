"""Matrices of every type, layout and compression on the CPU, Zarr to Zarr, beside NumPy and beside float32.

    python benchmarks/matrices.py [--only NAME ...] [--repeat R] [--scale S] [--dir DIR] [--out FILE]

Both sides of a case are fresh processes that take turns, and their times are those of whole processes, from
start to exit. Floating-point types and wide integers stand beside NumPy in core (load, `@`, store), 8-bit
integers beside the float32 product of the same shape by ooc-gemm. Every result of ooc-gemm is compared with
sampled rows: those of integers are exact, others are made in float64. Exit status 1: a bar was missed, a
limit was passed, other bytes than predicted were read, or a result is wrong.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine import RESULTS, GiB, MiB, Run, cli, console, git, machine, must, scratch, size, spawn
from rich.table import Table

# Nothing larger is imported here: a child's ru_maxrss starts at the resident set of its parent.

LIMIT = 512 * MiB
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
"""Largest relative Frobenius error of the sampled rows."""
LARGEST = {"int32": 2**25, "int64": 2**25}
"""Magnitudes of wide integers: sums of 2048 products fit int64. Others have all values of their type."""
SAMPLED_ROWS = 32
PREDICTED = "predicted_seconds", "bytes_read"
"""What is kept of a plan, to be compared with what was measured."""


@dataclass(frozen=True)
class Case:
    """A product, what it is compared with, and the largest ratio of their times."""

    name: str
    n: int
    types: tuple[str, str]
    chunks_a: tuple[int, int]
    chunks_b: tuple[int, int]
    compressor: str
    beside: str
    """`numpy`, or `float32` for the product of that type by ooc-gemm."""
    bar: float

    @property
    def title(self) -> str:
        """The case in words."""
        types = " · ".join(dict.fromkeys(self.types))
        chunks = " and ".join(f"{r} × {c}" for r, c in dict.fromkeys((self.chunks_a, self.chunks_b)))
        return f"{self.n}³ {types}, chunks {chunks}, {self.compressor}"


def cases(scale: float) -> list[Case]:
    """Return all cases, with sides and chunks multiplied by `scale`."""

    def side(n: int) -> int:
        return max(1, round(n * scale))

    def of(
        name: str, n: int, types: tuple[str, str], bar: float, a: tuple[int, int] = (1024, 1024),
        b: tuple[int, int] | None = None, compressor: str = "none", beside: str = "numpy",
    ) -> Case:  # fmt: skip
        chunks = [(side(rows), side(cols)) for rows, cols in (a, b or a)]
        return Case(name, side(n), types, chunks[0], chunks[1], compressor, beside, bar)

    found = []
    for dtype in ("float32", "float64"):
        for name, a, b, bar in (
            ("1024", (1024, 1024), (1024, 1024), 1.00),
            ("rows", (256, 8192), (256, 8192), 1.05),
            ("512", (512, 512), (512, 512), 1.05),
            ("misaligned", (1000, 700), (900, 1300), 1.05),
        ):
            found.append(of(f"{dtype}-{name}", 8192, (dtype, dtype), bar, a, b))
        found.append(of(f"{dtype}-zstd", 8192, (dtype, dtype), 1.05, compressor="zstd"))
    for dtype, bar in (("int32", 1 / 10), ("int64", 1 / 3)):
        found.append(of(dtype, 2048, (dtype, dtype), bar))
    for n in (2048, 8192):
        for types in (("int8", "int8"), ("uint8", "uint8"), ("int8", "uint8")):
            name = "-".join([*dict.fromkeys(types), str(n)])
            found.append(of(name, n, types, 1.00, beside="float32"))
    return found


# Children: each runs in a process of its own, and prints one JSON object.


def make(path: str, n: int, chunks: list[int], dtype: str, compressor: str, seed: int) -> Run:
    """Write a random matrix by rows of chunks."""
    import numpy as np
    import zarr

    array: Any = zarr.create_array(
        path, shape=(n, n), chunks=tuple(chunks), dtype=dtype, fill_value=0,
        compressors="auto" if compressor == "zstd" else None,
    )  # fmt: skip
    for start in range(0, n, chunks[0]):
        rng, shape = np.random.default_rng([seed, start]), (min(chunks[0], n - start), n)
        if dtype.startswith("float"):
            values = rng.standard_normal(shape).astype(dtype)
        else:
            info = np.iinfo(dtype)
            most = LARGEST.get(dtype, int(info.max))
            values = rng.integers(max(int(info.min), -most - 1), most, shape, dtype, endpoint=True)
        array[start : start + shape[0]] = values
    return {}


def in_core(a: str, b: str, c: str, chunks: list[int]) -> Run:
    """Load both arrays into memory, multiply by @, and store: NumPy's side."""
    import zarr

    x, y = (zarr.open_array(path, mode="r") for path in (a, b))
    product: Any = x[:] @ y[:]  # type: ignore[operator]
    zarr.create_array(
        c, shape=product.shape, chunks=tuple(chunks), dtype=product.dtype, compressors=None, fill_value=0
    )[:] = product
    return {}


def check(a: str, b: str, c: str) -> Run:
    """Compare sampled rows of C with those of the product, of integers exactly."""
    import numpy as np
    import zarr

    x, y, z = (zarr.open_array(path, mode="r") for path in (a, b, c))
    edges = np.linspace(0, z.shape[0], min(SAMPLED_ROWS, z.shape[0]) + 1).astype(int)
    rows = np.random.default_rng(0).integers(edges[:-1], edges[1:])
    exact = np.dtype(z.dtype).kind == "i"
    left = np.stack([np.asarray(x[int(row)]) for row in rows]).astype(np.int64 if exact else np.float64)
    wanted: Any = np.zeros((len(rows), z.shape[1]), left.dtype)
    for start in range(0, z.shape[0], 512):
        wanted += left[:, start : start + 512] @ np.asarray(y[start : start + 512]).astype(left.dtype)
    found = np.stack([np.asarray(z[int(row)]) for row in rows]).astype(left.dtype)
    if exact:
        return {"error": int((found != wanted).sum()), "correct": bool((found == wanted).all())}
    error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    # Written so that a NaN fails.
    return {"error": error, "correct": error < TOLERANCE[str(z.dtype)]}


def versions() -> Run:
    """Return the versions of what is measured, and of BLAS."""
    from importlib.metadata import version

    import numpy as np  # noqa: F401
    from threadpoolctl import threadpool_info

    blas = [f"{x['internal_api']} {x['version']}" for x in threadpool_info() if x["user_api"] == "blas"]
    return {"python": sys.version.split()[0], "blas": blas} | {p: version(p) for p in ("numpy", "zarr")}


CHILDREN = {f.__name__: f for f in (make, in_core, check, versions)}


def child(name: str, **arguments: Any) -> list[str]:
    """Return the command line of a child."""
    return [sys.executable, __file__, "--child", name, json.dumps(arguments)]


# Measuring


def inputs(case: Case, place: Path, types: tuple[str, str]) -> tuple[str, str]:
    """Write A and B of these types, unless they are there."""
    paths = []
    for name, dtype, chunks in (("a", types[0], case.chunks_a), ("b", types[1], case.chunks_b)):
        path = place / f"{name}-{dtype}.zarr"
        if not path.exists():
            must(child("make", path=str(path), n=case.n, chunks=chunks, dtype=dtype,
                       compressor=case.compressor, seed=ord(name)))  # fmt: skip
        paths.append(str(path))
    return paths[0], paths[1]


def ours(a: str, b: str, c: str) -> list[str]:
    """Return the command of ooc-gemm."""
    return cli("multiply", a, b, c, "-M", size(LIMIT), "-d", "cpu", "--json", "-f")


def measure(case: Case, place: Path, repeat: int) -> Run:
    """Run both sides in turns, and check every result of ooc-gemm."""
    console.print(f"[dim]{case.title}[/]")
    place.mkdir()
    a, b = inputs(case, place, case.types)
    c = str(place / "c.zarr")
    if case.beside == "numpy":
        operands = a, b
        other = child("in_core", a=a, b=b, c=c, chunks=[min(case.n, 1024)] * 2)
    else:
        operands = inputs(case, place, (case.beside, case.beside))
        other = ours(*operands, c)
    sides = {case.beside: (other, operands), "ooc-gemm": (ours(a, b, c), (a, b))}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, (command, (left, right)) in sides.items():
            shutil.rmtree(c, ignore_errors=True)
            run = spawn(command)
            said = run.pop("json") or {}
            run |= {key: said[key] for key in ("seconds", "stage_seconds", "bytes_read") if key in said}
            if name != "numpy":
                run["predicted"] = {key: said["plan"][key] for key in PREDICTED} if "plan" in said else {}
                run["within_limit"] = max(run["max_rss_bytes"], said.get("peak_host_bytes", 0)) <= LIMIT
                checked = spawn(child("check", a=left, b=right, c=c))
                run["check"] = checked["json"] or {"correct": False, "problem": checked.get("problem")}
            runs[name].append(run)
    shutil.rmtree(place)
    medians = {name: statistics.median(run["wall_seconds"] for run in each) for name, each in runs.items()}
    every = [run for each in runs.values() for run in each]
    ratio = medians["ooc-gemm"] / medians[case.beside]
    planned = [run for run in runs["ooc-gemm"] if run.get("predicted")]
    return asdict(case) | {
        "title": case.title,
        "median_wall_seconds": medians,
        "ratio": ratio,
        "met": ratio <= case.bar,
        "correct": all("problem" not in x and x.get("check", {"correct": True})["correct"] for x in every),
        "within_limit": all(x.get("within_limit", True) for x in every),
        "predicted_bytes": all(run["predicted"]["bytes_read"] == run["bytes_read"] for run in planned),
        "predicted_to_measured": [run["predicted"]["predicted_seconds"] / run["seconds"] for run in planned],
        "runs": runs,
    }


def show(rows: list[Run], judged: bool) -> None:
    """Print a table of all cases."""
    table = Table("case", "beside", "its s", "ooc-gemm s", "ratio", "bar", "predicted", "")
    for row in rows:
        times = row["median_wall_seconds"]
        state = "wrong result" if not row["correct"] else "limit passed" if not row["within_limit"] else ""
        state = state or ("" if row["predicted_bytes"] else "other bytes than predicted")
        state = state or ("" if not judged else "met" if row["met"] else "missed")
        table.add_row(
            row["title"], row["beside"], f"{times[row['beside']]:.2f}", f"{times['ooc-gemm']:.2f}",
            f"{row['ratio']:.3f}", f"{row['bar']:.3f}",
            " ".join(f"{share:.2f}" for share in row["predicted_to_measured"]), state,
        )  # fmt: skip
    console.print(table)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](**json.loads(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases, such as: int32 float64-zstd")
    parser.add_argument("--repeat", type=int, default=3, metavar="R", help="rounds (default 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all sides; bars count at 1 only")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the arrays go")
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/cpu_matrices.json for a whole run"
    )
    args = parser.parse_args()
    chosen = [case for case in cases(args.scale) if not args.only or case.name in args.only]
    if unknown := sorted(set(args.only or []) - {case.name for case in cases(1)}):
        names = ", ".join(case.name for case in cases(1))
        raise SystemExit(f"--only {' '.join(unknown)}: not among {names}")
    if args.out is None and args.scale == 1 and not args.only:
        args.out = RESULTS / "cpu_matrices.json"
    changes = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    report: Run = {
        "suite": "cpu matrices",
        "command": f"python benchmarks/matrices.py {' '.join(sys.argv[1:])}".strip(),
        "scale": args.scale,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "machine": machine(),
        "versions": must(child("versions")),
        "repeat": args.repeat,
        "memory_limit_bytes": LIMIT,
        "cases": [],
    }
    rows: list[Run] = report["cases"]
    with scratch(args.dir, int(4 * GiB * args.scale**2) + MiB, False) as place:
        for case in chosen:
            rows.append(measure(case, place / case.name, args.repeat))
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    judged = args.scale == 1
    show(rows, judged)
    console.print("predicted: predicted ÷ measured seconds of the call, run by run")
    good = all(
        row["correct"] and row["within_limit"] and row["predicted_bytes"] and (row["met"] or not judged)
        for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
