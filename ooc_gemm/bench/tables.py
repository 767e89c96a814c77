"""Shows the reports of benchmarks as tables that fit 80 columns. rich is imported only when it is used."""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from ..cuda_kernels.catalog import KERNELS
from ..run.rates import DECODE, FOLDERS, mount_point, unpacking
from .gpu import CUBLAS, dtypes_of
from .kernels import size_of

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
"""The title of a column, and what it shows of a row."""


def table(texts: tuple[str, ...], numbers: tuple[str, ...], title: str | None = None) -> Any:
    """Return an empty table: columns of texts, which are folded where there is little room, and columns of
    numbers, which never are."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for name in texts:
        made.add_column(name, overflow="fold")
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def pairs_table(rows: list[tuple[str, Any]]) -> Any:
    """Return a table of names and values, without a header."""
    from rich.table import Table

    made = Table(show_header=False, box=None, pad_edge=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


# ---- bench kernels -----------------------------------------------------------------------------

_SPEED: list[Column] = [
    ("ms", lambda row: f"{row['seconds'] * 1e3:.4g}"),
    ("TFLOP/s", lambda row: f"{row['tflops']:.4g}"),
    ("×\ncuBLAS", lambda row: "–" if row["ratio"] is None else f"{row['ratio']:.2f}"),
    ("beyond", lambda row: f"{row['error']['beyond_percent']:.3g} %"),
    ("mean sq.", lambda row: _error(row, "mean_squared")),
    ("largest", lambda row: _error(row, "largest")),
    ("rel. F.", lambda row: _error(row, "relative_frobenius")),
]
_WORK: list[Column] = [
    ("flop", lambda row: f"{row['operations']:.3g}"),
    ("loads", lambda row: _short(row["loads"])),
    ("stores", lambda row: _short(row["stores"])),
    ("flop/\naccess", lambda row: _short(row["accesses_ratio"])),
    ("flop/\nbyte", lambda row: _short(row["intensity"])),
    ("bound\nby", lambda row: row["roof"]["bound"] if row["roof"] and row["intensity"] else "–"),
    ("of\nroof", lambda row: f"{row['roof']['fraction']:.0%}" if row["roof"] else "–"),
]


def heading(report: dict[str, Any]) -> str:
    """Say on which GPU kernels were measured."""
    device, rate = report["device"], report["bandwidth_bytes_per_second"] / 1e12
    return (
        f"{device['name']}, {device['multiprocessors']} multiprocessors, {rate:.2f} TB/s by a copy; "
        f"medians of {report['repeat']}"
    )


def kernel_tables(report: dict[str, Any]) -> Iterator[Any]:
    """Yield two tables for each type: speed and error, then work and the roofline. In each, the kernels stand
    below the shape that they multiplied. An empty line stands between two tables."""
    rows = sorted(report["rows"], key=lambda row: row["dtype"])
    for dtype, same_type in groupby(rows, key=lambda row: row["dtype"]):
        found = list(same_type)
        for title, columns in ((f"{dtype}: speed, and error", _SPEED), (f"{dtype}: work, and roof", _WORK)):
            made = table(("shape, kernels",), tuple(name for name, _ in columns), title)
            for shape, same_shape in groupby(found, key=shape_of):
                made.add_row(shape, style="bold")
                for row in same_shape:
                    failed = row["failed"] is not None
                    made.add_row(
                        row["kernel"], *(["failed"] if failed else [show(row) for _, show in columns])
                    )
                made.add_section()
            yield made
            yield ""


def failures(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each kernel that failed or has a wrong result."""
    for row in report["rows"]:
        name = f"{row['kernel']} {row['dtype']} {shape_of(row)}"
        if row["failed"] is not None:
            yield f"{name} failed: {row['failed']}"
        elif not row["correct"]:
            error = row["error"]
            yield (
                f"{name} is wrong: {error['beyond_percent']:.3g} % of the elements are beyond rounding, "
                f"{error['not_finite']} are not numbers or not written"
            )


def listing() -> list[dict[str, Any]]:
    """Return the name, the types and the explanation of every kernel."""
    lines = {**{name: kernel.explanation for name, kernel in KERNELS.items()}, **CUBLAS}
    return [
        {"kernel": name, "dtypes": dtypes_of(name), "explanation": explanation}
        for name, explanation in lines.items()
    ]


def listing_table() -> Any:
    """Return the names, explanations and types of all kernels as a table."""
    from rich.text import Text

    rows = []
    for line in listing():
        types = Text(", ".join(line["dtypes"]), style="dim")
        rows.append((line["kernel"], Text(line["explanation"] + "\n").append_text(types)))
    return pairs_table(rows)


def choice_line(choice: dict[str, Any]) -> str:
    """Say what --tune found for one class of shapes."""
    before = choice["default_seconds"]
    gain = f", {before / choice['seconds']:.2f}× as fast as the default" if before else ""
    macros = " ".join(f"{name}={value}" for name, value in choice["config"].items())
    what = f"{choice['kernel']} {choice['dtype']} {choice['transposed']} {choice['class']}"
    return f"{what}: {choice['seconds'] * 1e3:.3g} ms{gain}: {macros}"


# ---- info --------------------------------------------------------------------------------------

_TITLES = {"upload": "upload", "download": "download", "touch": "fresh host memory"}


def rates_tables(rates: dict[str, Any]) -> Iterator[Any]:
    """Yield a heading and two tables for each device: the rates of its stages, and those of its readers and
    writers."""
    for model, found in rates.items():
        brief = " briefly" if found.get("brief") else ""
        yield f"{model}, measured{brief} {found['date']}" if "date" in found else model
        made = table(("does",), ("at",))
        for kernel, speed in found.get("flops", {}).items():
            made.add_row(kernel, f"{si(speed['flops'])}FLOP/s")
        for name, title in _TITLES.items():
            made.add_row(title, _bytes_rate(found, name))
        if "piece_seconds" in found:
            made.add_row("pieces through the ring", f"{1 / found['piece_seconds']:,.0f}/s")
        yield made
        ways = ("read", "cached", "write", "decode")
        folders = table(("file system",), (*ways, "both"))
        compressors = table(("chunks of", "in"), ("are decoded at",))
        rows = ((several, *row) for several, key in FOLDERS.items() for row in found.get(key, {}).items())
        for several, system, speed in rows:
            cells = [_bytes_rate(speed, way) for way in ways]
            place = mount_point(system)
            name = f"{place} ({system.split()[0]})" if place else system
            name += ", several GPUs" if several else ""
            folders.add_row(name, *cells, f"{speed['turns']:.0%}" if "turns" in speed else "–")
            for key in speed:
                if key.startswith(DECODE):
                    rate = key.removesuffix("_bytes_per_second")
                    compressors.add_row(rate.removeprefix(DECODE), name, _bytes_rate(speed, rate))
        for codec, rate in unpacking(found).items():
            compressors.add_row(codec, "this device, each part of a chunk", f"{si(rate)}B/s")
        if folders.rows:
            yield folders
            yield (
                "both: time of reading and writing at once, divided by the sum of the times of each alone; "
                "100% means that they take turns"
            )
        if compressors.rows:
            yield compressors


def _bytes_rate(found: dict[str, Any], name: str) -> str:
    """Return a measured rate in bytes per second; a dash where it was not measured."""
    rate = found.get(f"{name}_bytes_per_second")
    return f"{si(rate)}B/s" if rate else "–"


# ---- bench engine ------------------------------------------------------------------------------


def engine_heading(report: dict[str, Any]) -> str:
    """Say on which device and file system the engine was measured."""
    place = f"{report['place']['mounted']} ({report['place']['type']})"
    state = "inputs not in the page cache" if report["cold"] else "page cache as it is"
    return f"{report['device']}; arrays on {place}, {state}; medians of {report['repeat']}"


def engine_tables(report: dict[str, Any]) -> Iterator[Any]:
    """Yield for each product a line, a table of its stages, and a comparison. The table has the number of
    threads, the share of the run in which any of them works, the rate in that time, and the least seconds
    that the hardware needs."""
    for row in report["rows"]:
        yield (
            f"{shape_of(row)} {row['dtype']}, {row['layout']}: {row['seconds']:.2f} s, "
            f"{si(row['tflops'] * 1e12)}FLOP/s ({row['kernel']} on {row['device']})"
        )
        made = table(("stage",), ("moves", "by", "busy", "share", "rate", "least"))
        for stage, found in row["stages"].items():
            rate = f"{si(found['bytes_per_second'])}B/s" if found["bytes"] else "–"
            if stage == "compute" and found["busy_seconds"]:
                rate = f"{si(2.0 * row['m'] * row['n'] * row['k'] / found['busy_seconds'])}FLOP/s"
            made.add_row(
                stage,
                f"{si(found['bytes'])}B" if found["bytes"] else "–",
                str(found["lanes"]),
                f"{found['busy_seconds']:.2f} s",
                f"{found['busy_share']:.0%}",
                rate,
                f"{row['limits'][stage]:.2f} s",
            )
        yield made
        error = row["predicted_seconds"] / row["seconds"] - 1
        yield (
            f"limit {row['limit_seconds']:.2f} s ({limit_of(row)}): "
            f"{row['ratio']:.2f} times that\n"
            f"predicted {row['predicted_seconds']:.2f} s ({error:+.0%}); rates {row['rates']}"
        )
        for name, peer in row["peers"].items():
            took = peer["seconds"]
            yield f"{name}: " + (
                f"{took:.2f} s, {took / row['seconds']:.2f} times ours"
                if took
                else f"failed, {peer['failed']}"
            )
        yield ""


def limit_of(row: Row) -> str:
    """Name the part of the hardware that takes longest."""
    by = row["limit_by"]
    return "reads and writes" if by == "store" else str(by)


# ---- bench io ----------------------------------------------------------------------------------


def io_heading(report: dict[str, Any]) -> str:
    """Say on which file system files were read and written."""
    place = f"{report['place']['mounted']} ({report['place']['type']})"
    return f"files of 16 MiB on {place}; GB/s by the number of threads at a time"


def io_table(report: dict[str, Any]) -> Any:
    """Return a table with a line for each way. Those of the engine are bold."""
    made = table(("", "by"), tuple(map(str, report["threads"])))
    for group, rows in groupby(report["rows"], key=lambda row: row["group"]):
        for index, row in enumerate(rows):
            cells = ["–" if rate is None else f"{rate / 1e9:.3g}" for rate in row["bytes_per_second"]]
            style = "bold" if row["way"] == "engine" else ""
            made.add_row("" if index else group, row["way"], *cells, style=style)
        made.add_section()
    return made


# ---- bench stress ------------------------------------------------------------------------------


def stress_heading(report: dict[str, Any]) -> str:
    """Say which cases were run, and where."""
    place = f"{report['place']['mounted']} ({report['place']['type']})"
    return (
        f"seed {report['seed']}; {report['device']}; arrays on {place}; wall: {report['wall']}\n"
        "data: bytes of A, B and C, divided by the bytes of the buffers that hold parts of them"
    )


def stress_table(report: dict[str, Any]) -> Any:
    """Return a table with three lines for each case: the product with its shape and types, how its arrays are
    stored, and how near its peaks came to their limits."""
    rows = report["rows"]
    device = any("device_limit" in row for row in rows)
    limits = ("limit,\npeak", *(("on GPU,\npeak",) if device else ()))
    made = table(("case", "product, m×n×k, types", "how A, B and C are stored"), (*limits, "data", "s"))
    for column in made.columns[:2]:
        column.no_wrap = True
    for row in rows:
        arrays = "\n".join(f"{name.upper()} {row[name] or '–'}" for name in "abc")
        cells = [str(row["case"]), f"{row['what']}\n{shape_of(row)}\n{row['types']}", arrays]
        cells.append(_share(row, "limit", "peak"))
        cells += [_share(row, "device_limit", "device_peak")] if device else []
        cells.append(f"{row['data_bytes'] / row['buffer_bytes']:.3g}×" if row.get("buffer_bytes") else "–")
        cells.append(f"{row['seconds']:.1f}" if "seconds" in row else "–")
        made.add_row(*cells, style="bold red" if row["failed"] else "")
    return made


def _share(row: Row, limit: str, peak: str) -> str:
    """Return a limit in MiB, and below it the peak in percent of it."""
    most, held = row.get(limit), row.get(peak)
    share = f"{100 * held / most:.1f} %" if most and held is not None else "–"
    return f"{most / 2**20:,.1f} MiB\n{share}" if most else f"–\n{share}"


def stress_summary(report: dict[str, Any]) -> Iterator[str]:
    """Yield sentences that count the cases by their outcome, and name the highest peak."""
    rows = report["rows"]
    shares = [row["peak"] / row["limit"] for row in rows if row.get("limit") and "peak" in row]
    data = [row["data_bytes"] / row["buffer_bytes"] for row in rows if row.get("buffer_bytes")]
    least = sum("limit" in row and row["limit"] == row["minimum"] for row in rows)
    yield (
        f"{len(rows)} cases in {report['seconds']:,.0f} s, {least} of them within the smallest limit: "
        f"{sum(bool(row.get('over')) for row in rows)} over their limit, "
        f"{sum(bool(row.get('wrong')) for row in rows)} wrong, "
        f"{sum(bool(row['failed']) for row in rows)} failed in any way"
    )
    if shares and data:
        most = f"most data {max(data):,.3g} times the buffers"
        yield f"highest peak {100 * max(shares):.1f} % of its limit; {most}"


def stress_failures(report: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each case that failed, with the command that repeats it."""
    again = f"ooc-gemm bench stress --seed {report['seed']} --largest {report['largest']}"
    for row in report["rows"]:
        if row["failed"]:
            yield f"case {row['case']}: {row['failed']}; repeat it with {again} --case {row['case']}"


# ---- numbers -----------------------------------------------------------------------------------


def si(rate: float) -> str:
    """Format a rate as three digits and the prefix of a unit."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= 0.9995 * scale:
            return f"{rate / scale:.3g} {prefix}"
    return f"{rate:.3g} "


def shape_of(row: Row) -> str:
    """Return the shape of a row's product: `8192³`, or `m×n×k`."""
    return size_of(row["m"], row["n"], row["k"])


def _error(row: Row, name: str) -> str:
    value = row["error"][name]
    return "NaN" if value is None else f"{value:.1e}" if value else "0"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
