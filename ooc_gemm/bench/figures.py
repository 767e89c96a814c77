"""Shows the reports of benchmarks: rich draws the tables, matplotlib the pictures. Both are imported only
when they are used."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from ..cuda_kernels.catalog import KERNELS
from ..run.rates import FOLDERS, mount_point
from ..support.errors import InputError
from .gpu import CUBLAS, dtypes_of
from .kernels import size_of

SUFFIXES = (".svg", ".png")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart, without yellow. Black stands for
cuBLAS."""
_MARKERS = "osD^vPX<"
Row = dict[str, Any]


# ---- tables ------------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> Iterator[Any]:
    """Yield two tables for each type: speed and error, then work and the roofline."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    speed: list[tuple[str, Callable[[Row], str]]] = [
        ("ms", lambda row: f"{row['seconds'] * 1e3:.4g}"),
        ("TFLOP/s", lambda row: f"{row['tflops']:.4g}"),
        ("× cuBLAS", lambda row: "–" if row["ratio"] is None else f"{row['ratio']:.2f}"),
        ("beyond", lambda row: f"{row['error']['beyond_percent']:.3g} %"),
        ("mean sq.", lambda row: _error(row, "mean_squared")),
        ("largest", lambda row: _error(row, "largest")),
        ("rel. F.", lambda row: _error(row, "relative_frobenius")),
    ]
    asked: list[tuple[str, Callable[[Row], str]]] = [
        ("flop", lambda row: f"{row['operations']:.3g}"),
        ("loads", lambda row: _short(row["loads"])),
        ("stores", lambda row: _short(row["stores"])),
        ("flop/access", lambda row: _short(row["accesses_ratio"])),
        ("flop/byte", lambda row: _short(row["intensity"])),
        ("bound by", lambda row: row["roof"]["bound"] if row["roof"] and row["intensity"] else "–"),
        ("of roof", lambda row: f"{row['roof']['fraction']:.0%}" if row["roof"] else "–"),
    ]
    rows = sorted(report["rows"], key=lambda row: row["dtype"])
    for dtype, same_type in groupby(rows, key=lambda row: row["dtype"]):
        found = list(same_type)
        for title, columns in ((f"{dtype}: speed, and error", speed), (f"{dtype}: work, and roof", asked)):
            table = Table(
                title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
            )
            table.add_column("shape", no_wrap=True)
            table.add_column("kernel", no_wrap=True)
            for name, _ in columns:
                table.add_column(name, justify="right", no_wrap=True)
            for shape, same_shape in groupby(found, key=_size):
                for index, row in enumerate(same_shape):
                    failed = row["failed"] is not None
                    cells = ["failed"] if failed else [show(row) for _, show in columns]
                    table.add_row("" if index else shape, row["kernel"], *cells)
                table.add_section()
            yield table


def listing() -> list[dict[str, Any]]:
    """Return a line for every kernel."""
    lines = {**{name: kernel.explanation for name, kernel in KERNELS.items()}, **CUBLAS}
    return [
        {"kernel": name, "dtypes": dtypes_of(name), "explanation": explanation}
        for name, explanation in lines.items()
    ]


def listing_table() -> Any:
    """Return the listing as a table."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for line in listing():
        table.add_row(line["kernel"], f"{line['explanation']}\n[dim]{', '.join(line['dtypes'])}[/dim]")
    return table


def choice_line(choice: dict[str, Any]) -> str:
    """Say what --tune found for one class of shapes."""
    before = choice["default_seconds"]
    gain = f", {before / choice['seconds']:.2f}× as fast as the default" if before else ""
    macros = " ".join(f"{name}={value}" for name, value in choice["config"].items())
    what = f"{choice['kernel']} {choice['dtype']} {choice['transposed']} {choice['class']}"
    return f"{what}: {choice['seconds'] * 1e3:.3g} ms{gain}: {macros}"


def rates_tables(rates: dict[str, Any]) -> Iterator[Any]:
    """Yield a heading and two tables for each device: the rates of its stages, and those of its readers and
    writers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    style: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    for model, found in rates.items():
        yield f"{model}, measured {found['date']}"
        table = Table(**style)
        table.add_column("does")
        table.add_column("at", justify="right", no_wrap=True)
        for kernel, speed in found["flops"].items():
            table.add_row(kernel, f"{_si(speed['flops'])}FLOP/s")
        for name in ("upload", "download", "touch"):
            table.add_row(_WORDS.get(name, name), f"{_si(found[f'{name}_bytes_per_second'])}B/s")
        table.add_row("pieces through the ring", f"{1 / found['piece_seconds']:,.0f}/s")
        yield table
        folders = Table(**style)
        folders.add_column("file system")
        for name in ("read", "cached", "write", "decode"):
            folders.add_column(name, justify="right", no_wrap=True)
        folders.add_column("both", justify="right", no_wrap=True)
        rows = ((several, *row) for several, key in FOLDERS.items() for row in found.get(key, {}).items())
        for several, system, speed in rows:
            cells = [
                f"{_si(speed[f'{name}_bytes_per_second'])}B/s"
                for name in ("read", "cached", "write", "decode")
            ]
            place = mount_point(system)
            name = f"{place} ({system.split()[0]})" if place else system
            name += ", several GPUs" if several else ""
            folders.add_row(name, *cells, f"{speed['turns']:.0%}")
        if folders.rows:
            yield folders
            yield "both: time of reading and writing at once, of the sum of each alone; 100%: they take turns"


def engine_heading(report: dict[str, Any]) -> str:
    """Say on which device and file system the engine was measured."""
    place = f"{report['place']['mounted']} ({report['place']['type']})"
    state = "inputs not in the page cache" if report["cold"] else "page cache as it is"
    return f"{report['device']}; arrays on {place}, {state}; medians of {report['repeat']}"


def engine_tables(report: dict[str, Any]) -> Iterator[Any]:
    """Yield for each product a line, a table of its stages, and a comparison. The table has the number of
    threads, the share of the run in which any of them works, the rate in that time, and the least seconds
    that the hardware needs."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for row in report["rows"]:
        yield (
            f"{_size(row)} {row['dtype']}, {row['layout']}: {row['seconds']:.2f} s, "
            f"{_si(row['tflops'] * 1e12)}FLOP/s ({row['kernel']} on {row['device']})"
        )
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("stage", no_wrap=True)
        for name in ("moves", "by", "busy", "share", "rate", "least"):
            table.add_column(name, justify="right", no_wrap=True)
        for stage, found in row["stages"].items():
            rate = f"{_si(found['bytes_per_second'])}B/s" if found["bytes"] else "–"
            if stage == "compute" and found["busy_seconds"]:
                rate = f"{_si(2.0 * row['m'] * row['n'] * row['k'] / found['busy_seconds'])}FLOP/s"
            table.add_row(
                stage,
                f"{_si(found['bytes'])}B" if found["bytes"] else "–",
                str(found["lanes"]),
                f"{found['busy_seconds']:.2f} s",
                f"{found['busy_share']:.0%}",
                rate,
                f"{row['limits'][stage]:.2f} s",
            )
        yield table
        error = row["predicted_seconds"] / row["seconds"] - 1
        yield (
            f"limit {row['limit_seconds']:.2f} s ({_limit(row)}): "
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


def io_heading(report: dict[str, Any]) -> str:
    """Say on which file system files were read and written."""
    place = f"{report['place']['mounted']} ({report['place']['type']})"
    return f"files of 16 MiB on {place}, GB/s by so many threads at a time"


def io_table(report: dict[str, Any]) -> Any:
    """Return a table with a line for each way. Those of the engine are bold."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    table.add_column("by")
    for number in report["threads"]:
        table.add_column(str(number), justify="right", no_wrap=True)
    for group, rows in groupby(report["rows"], key=lambda row: row["group"]):
        for index, row in enumerate(rows):
            cells = ["–" if rate is None else f"{rate / 1e9:.3g}" for rate in row["bytes_per_second"]]
            style = "bold" if row["way"] == "engine" else ""
            table.add_row("" if index else group, row["way"], *cells, style=style)
        table.add_section()
    return table


def stress_heading(report: dict[str, Any]) -> str:
    """Say which cases were run, and where."""
    place = f"{report['place']['mounted']} ({report['place']['type']})"
    return (
        f"seed {report['seed']}; {report['device']}; arrays on {place}; wall: {report['wall']}\n"
        "data: bytes of A, B and C, over those of the buffers that hold parts of them"
    )


def stress_table(report: dict[str, Any]) -> Any:
    """Return a table with a line for each case: the product, how its arrays are stored, and how near its
    peaks came to their limits."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    rows = report["rows"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("case", "product", "m×n×k", "types", "A", "B", "C"):
        table.add_column(name, overflow="fold")
    device = any("device_limit" in row for row in rows)
    for name in ("limit", "peak", *(("on GPU", "peak") if device else ()), "data", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        arrays = [escape(row[name]) for name in "abc"]
        cells = [str(row["case"]), row["what"], _size(row), row["types"], *arrays]
        cells += _shares(row, "limit", "peak")
        cells += _shares(row, "device_limit", "device_peak") if device else []
        cells.append(f"{row['data_bytes'] / row['buffer_bytes']:.3g}×" if row.get("buffer_bytes") else "–")
        cells.append(f"{row['seconds']:.1f}" if "seconds" in row else "–")
        table.add_row(*cells, style="bold red" if row["failed"] else "")
    return table


def _shares(row: Row, limit: str, peak: str) -> list[str]:
    """Return a limit in MiB, and the peak in percent of it."""
    most, held = row.get(limit), row.get(peak)
    share = f"{100 * held / most:.1f} %" if most and held is not None else "–"
    return [f"{most / 2**20:,.1f} MiB" if most else "–", share]


def stress_summary(report: dict[str, Any]) -> Iterator[str]:
    """Yield sentences that sum up all cases."""
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
        most = f"most data {max(data):,.0f} times the buffers"
        yield f"highest peak {100 * max(shares):.1f} % of its limit; {most}"


def stress_failures(report: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each case that failed, with the command that repeats it."""
    again = f"ooc-gemm bench stress --seed {report['seed']} --largest {report['largest']}"
    for row in report["rows"]:
        if row["failed"]:
            yield f"case {row['case']}: {row['failed']}; repeat it with {again} --case {row['case']}"


_WORDS = {"touch": "fresh host memory"}


def _limit(row: dict[str, Any]) -> str:
    """Name the part of the hardware that takes longest."""
    by = row["limit_by"]
    return "reads and writes" if by == "store" else str(by)


def _si(rate: float) -> str:
    """Format a rate as three digits and the prefix of a unit."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= 0.9995 * scale:
            return f"{rate / scale:.3g} {prefix}"
    return f"{rate:.3g} "


def heading(report: dict[str, Any]) -> str:
    """Say on which GPU kernels were measured."""
    device, rate = report["device"], report["bandwidth_bytes_per_second"] / 1e12
    return (
        f"{device['name']}, {device['multiprocessors']} multiprocessors, {rate:.2f} TB/s by a copy; "
        f"medians of {report['repeat']}"
    )


def failures(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each kernel that failed or has a wrong result."""
    for row in report["rows"]:
        name = f"{row['kernel']} {row['dtype']} {_size(row)}"
        if row["failed"] is not None:
            yield f"{name} failed: {row['failed']}"
        elif not row["correct"]:
            error = row["error"]
            yield (
                f"{name} is wrong: {error['beyond_percent']:.3g} % of the elements are beyond rounding, "
                f"{error['not_finite']} are not numbers or not written"
            )


def _size(row: Row) -> str:
    return size_of(row["m"], row["n"], row["k"])


def _error(row: Row, name: str) -> str:
    value = row["error"][name]
    return "NaN" if value is None else f"{value:.1e}" if value else "0"


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}"


# ---- the picture -------------------------------------------------------------------------------


def check_plot(path: str) -> None:
    """Raise InputError if `plot` could not write to this path. This is called before minutes are spent on
    measuring."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(f"{path!r}: a plot is written as {' or '.join(SUFFIXES)}")
    if not Path(path).resolve().parent.is_dir():
        raise InputError(f"{path!r}: there is no such folder")
    _pyplot()


def plot(report: dict[str, Any], path: str) -> None:
    """Plot TFLOP/s over sizes, with a line for each kernel, and the roofline at each kernel's largest size.
    Only square matrices are shown, if there are any."""
    check_plot(path)
    plt = _pyplot()
    rows = [row for row in report["rows"] if row["failed"] is None]
    if not rows:
        raise InputError("there is nothing to plot: every kernel failed")
    rows = [row for row in rows if row["m"] == row["n"] == row["k"]] or rows
    types = len({row["dtype"] for row in rows})
    series: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_side):
        name = f"{row['kernel']} {row['dtype']}" if types > 1 else row["kernel"]
        series.setdefault(name, []).append(row)
    style = dict(_styles(series.items()))
    settings = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(settings):
        figure, (sweep, roof) = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
        _sweep(sweep, series, style)
        _roofline(roof, report, series, style)
        only = "" if types > 1 else f", {rows[0]['dtype']}"
        figure.suptitle(f"{report['device']['name']}{only}", fontweight="bold")
        figure.savefig(path, dpi=150)
        plt.close(figure)


_STAGES = {
    "read": ("read", "#0072B2"),
    "upload": ("upload", "#E69F00"),
    "compute": ("compute", "#009E73"),
    "download": ("download", "#CC79A7"),
    "write": ("write", "#D55E00"),
}
"""Stage → its title and its colour."""


def timeline(report: dict[str, Any], row: dict[str, Any], path: str) -> None:
    """Plot what every thread and stream did when: a band for each stage, and in it a lane for each thread."""
    check_plot(path)
    plt = _pyplot()
    lanes: dict[str, list[str]] = {stage: [] for stage in _STAGES}
    for span in row["spans"]:
        if span["lane"] not in lanes[span["stage"]]:
            lanes[span["stage"]].append(span["lane"])
    heights = {stage: max(3.0, float(len(found))) for stage, found in lanes.items()}
    settings = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context({**settings, "axes.spines.left": False}):
        figure, axes = plt.subplots(figsize=(12, 1.3 + 0.13 * sum(heights.values())), layout="constrained")
        end = max((span["stop"] for span in row["spans"]), default=1.0)
        top, ticks = 0.0, []
        for stage, (title, colour) in _STAGES.items():
            height, names = heights[stage], sorted(lanes[stage], key=lambda name: int(name.split()[-1]))
            step = height / max(1, len(names))
            axes.axhspan(top, top + height, color=colour, alpha=0.07, linewidth=0)
            for index, name in enumerate(names):
                own = [span for span in row["spans"] if span["lane"] == name]
                for shade in (0, 1):
                    part = [span for span in own if (span["block"] or 0) % 2 == shade]
                    axes.broken_barh(
                        [(span["start"], span["stop"] - span["start"]) for span in part],
                        (top + step * (index + 0.08), 0.84 * step),
                        facecolor=colour,
                        alpha=0.6 if shade else 1.0,
                        edgecolor="white",
                        linewidth=0.5 if stage == "compute" else 0,
                    )
            found = row["stages"][stage]
            moved = f"{_si(found['bytes_per_second'])}B/s" if found["bytes"] else ""
            if stage == "compute" and found["busy_seconds"]:
                moved = f"{_si(2.0 * row['m'] * row['n'] * row['k'] / found['busy_seconds'])}FLOP/s"
            threads = f"{len(names)} threads" if len(names) > 1 else ""
            axes.annotate(
                f"{found['busy_share']:.0%} busy\n{moved}".strip(),
                (1, top + height / 2),
                (8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color="0.25",
            )
            ticks.append((top + height / 2, f"{title}\n{threads}".strip(), colour))
            top += height + 0.8
        if 0 < row["limit_seconds"] < end:
            axes.axvline(row["limit_seconds"], color="0.3", linestyle=(0, (2, 2)), linewidth=1)
            left = row["limit_seconds"] > 0.7 * end
            axes.annotate(
                f"limit: {_limit(row)}, {row['limit_seconds']:.2f} s",
                (row["limit_seconds"], -1.6),
                (-4 if left else 4, -1),
                textcoords="offset points",
                ha="right" if left else "left",
                va="top",
                fontsize=9,
                color="0.25",
            )
        axes.set_ylim(top - 0.6, -1.6)
        axes.set_xlim(0, end)
        axes.set_yticks([y for y, *_ in ticks], [text for _, text, _ in ticks])
        for label, (_, _, colour) in zip(axes.get_yticklabels(), ticks, strict=True):
            label.set(color=colour, fontweight="bold", fontsize=10)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("seconds")
        where = f"Zarr on {report['place']['type']} → {report['device'].split(',')[0]} → Zarr"
        speed = f"{row['seconds']:.2f} s, {_si(row['tflops'] * 1e12)}FLOP/s"
        title = f"{_size(row)} {row['dtype']}, {where}: {speed}"
        axes.set_title(title, loc="left", fontweight="bold")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("there is no matplotlib; install it with pip install 'ooc-gemm[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _side(row: Row) -> float:
    """Return the side of a cube of as many products."""
    return math.cbrt(row["m"] * row["n"] * row["k"])


def _styles(series: Iterable[tuple[str, list[Row]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    ours = theirs = 0
    for name, rows in series:
        if rows[0]["kernel"].startswith("cublas"):
            yield (
                name,
                {"color": "black", "marker": _MARKERS[theirs % 8], "linestyle": "--", "linewidth": 1.5},
            )
            theirs += 1
        else:
            colour, marker = _COLOURS[ours % 6], _MARKERS[(ours + ours // 6) % 8]
            yield name, {"color": colour, "marker": marker, "linestyle": "-", "linewidth": 1.8}
            ours += 1


def _sweep(axes: Any, series: dict[str, list[Row]], style: dict[str, Any]) -> None:
    """Plot a line through the round sizes, and hollow markers for the others."""
    rows = [row for rows in series.values() for row in rows]
    rates, sides = [row["tflops"] for row in rows], sorted({_side(row) for row in rows})
    odd = sorted({_side(row) for row in rows if not _round(row)})
    axes.set_xscale("log", base=2)
    if max(rates) > 20 * min(rates):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(0, 1.08 * max(rates))
    for name, of_kernel in series.items():
        for rounded in (True, False):
            part = [row for row in of_kernel if _round(row) == rounded]
            look = {**style[name], **({} if rounded else {"linestyle": "none", "markerfacecolor": "white"})}
            axes.plot([_side(row) for row in part], [row["tflops"] for row in part], markersize=5, **look)
    ticks = [side for side in sides if side not in odd] or sides
    axes.set_xticks(ticks, [f"{side:.0f}" for side in ticks])
    axes.minorticks_off()
    axes.set_xlim(sides[0] / 1.1, sides[-1] * 1.1)
    axes.set_xlabel("m = n = k" if all(row["m"] == row["n"] == row["k"] for row in rows) else "∛(m·n·k)")
    axes.set_ylabel("TFLOP/s")
    hollow = "; hollow: no multiples of 16" if odd and odd != sides else ""
    axes.set_title(f"Speed over size{hollow}", loc="left")
    axes.grid(axis="y", color="0.9")
    ends = [(rows[-1]["tflops"], _side(rows[-1]), name) for name, rows in series.items()]
    _label_right(axes, ends, style)


def _round(row: Row) -> bool:
    return not (row["m"] % 16 or row["n"] % 16 or row["k"] % 16)


def _label_right(axes: Any, ends: list[tuple[float, float, str]], style: dict[str, Any]) -> None:
    """Write names in a column right of the axes, each as near to the height of its point as fits, and joined
    to it by a thin line."""
    axes.figure.draw_without_rendering()  # settles the layout
    lowest, highest = (axes.transAxes.transform((0, y))[1] for y in (0, 1))
    spacing = 13 * axes.figure.dpi / 72 / (highest - lowest)
    ends = sorted(ends)
    wanted = [
        float(axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1]) for y, x, _ in ends
    ]
    for (y, x, name), height in zip(ends, spread(wanted, spacing), strict=True):
        line = {"arrowstyle": "-", "color": style[name]["color"], "lw": 0.6, "shrinkA": 1, "shrinkB": 4}
        axes.annotate(
            name, (x, y), (1.03, height), textcoords="axes fraction", va="center", annotation_clip=False,
            arrowprops=line,
        )  # fmt: skip


def spread(wanted: list[float], spacing: float) -> list[float]:
    """Return heights that are at least `spacing` apart and near the wanted ones, which ascend. Names that
    would overlap form a group, spaced evenly around its middle."""
    groups: list[list[float]] = []
    for height in wanted:
        groups.append([height])
        while len(groups) > 1 and _span(groups[-2], spacing)[1] + spacing > _span(groups[-1], spacing)[0]:
            last = groups.pop()
            groups[-1] += last
    return [_span(group, spacing)[0] + index * spacing for group in groups for index in range(len(group))]


def _span(group: list[float], spacing: float) -> tuple[float, float]:
    middle, half = sum(group) / len(group), (len(group) - 1) * spacing / 2
    return middle - half, middle + half


def _roofline(axes: Any, report: dict[str, Any], series: dict[str, list[Row]], style: dict[str, Any]) -> None:
    """Plot the roofline, with a point at each kernel's largest size. cuBLAS, whose loads are not known, is a
    line."""
    bandwidth = report["bandwidth_bytes_per_second"] / 1e12
    largest = {name: rows[-1] for name, rows in series.items()}
    points = {name: row for name, row in largest.items() if row["intensity"]}
    peaks = {row["peak"]: row["peak_flops"] / 1e12 for row in largest.values() if row["peak"]}
    rates = [row["tflops"] for row in largest.values()]
    intensities = [row["intensity"] for row in points.values()] or [1.0]
    ridge = max([*peaks.values(), *rates]) / bandwidth
    left, right = min(*intensities, 1.0) / 2, max(*intensities, ridge) * 8
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.set_ylim(min(*rates, bandwidth * left) / 2, max(*rates, *peaks.values(), bandwidth) * 2.5)
    axes.set_xlabel("flop / byte of global loads and stores, by formula")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("Roofline; points beyond the slope are fed by caches", loc="left")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(color="0.93")
    axes.figure.draw_without_rendering()  # settles the layout
    roof = {"color": "0.35", "linewidth": 1.5}
    axes.plot([left, ridge], [left * bandwidth, ridge * bandwidth], **roof)
    small = {"fontsize": 8.5, "color": "0.35", "textcoords": "offset points", "zorder": 4}
    small["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for name, peak in peaks.items():
        axes.plot([peak / bandwidth, right], [peak, peak], **roof)
        text = f"{name.replace('_', ' ')} peak, {peak:.3g}"
        axes.annotate(text, (right, peak), (-2, 3), ha="right", **small)
    (x0, y0), (x1, y1) = axes.transData.transform([(1, bandwidth), (10, 10 * bandwidth)])
    angle = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor"}
    at = left * 1.3
    axes.annotate(f"{bandwidth:.2f} TB/s, measured", (at, at * bandwidth), (-2, 5), **angle, **small)
    for name, row in largest.items():
        if name not in points:
            axes.axhline(row["tflops"], color="black", linestyle="--", linewidth=1)
            axes.annotate(name, (left, row["tflops"]), (4, 3), **small)
    for name, row in points.items():
        look = {**style[name], "linestyle": "none"}
        axes.plot(row["intensity"], row["tflops"], markersize=8, markeredgecolor="white", zorder=3, **look)
    _label_right(axes, [(row["tflops"], row["intensity"], name) for name, row in points.items()], style)
