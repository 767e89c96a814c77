"""Draws the reports of benchmarks as pictures. matplotlib is imported only when it is used."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..support.errors import InputError
from .tables import Row, limit_of, shape_of, si

SUFFIXES = (".svg", ".png")
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#117733", "#332288", "#999933", "#AA4499", "#A0522D"),
    *("#6699CC", "#661100", "#44AA99", "#7F7F7F", "#8C6BB1", "#B8860B"),
)
"""A colour for each kernel: those of Okabe and Ito, without yellow, and then of Tol, which colour-blind
readers can tell apart. Black stands for cuBLAS."""
_MARKERS = "osD^vPX<"


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
            moved = f"{si(found['bytes_per_second'])}B/s" if found["bytes"] else ""
            if stage == "compute" and found["busy_seconds"]:
                moved = f"{si(2.0 * row['m'] * row['n'] * row['k'] / found['busy_seconds'])}FLOP/s"
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
                f"limit: {limit_of(row)}, {row['limit_seconds']:.2f} s",
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
        speed = f"{row['seconds']:.2f} s, {si(row['tflops'] * 1e12)}FLOP/s"
        title = f"{shape_of(row)} {row['dtype']}, {where}: {speed}"
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
            colour, marker = _COLOURS[ours % len(_COLOURS)], _MARKERS[ours % 8]
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
    """Write names in a column right of the axes, each as near to the height of its point as fits, behind the
    marker of its line."""
    axes.figure.draw_without_rendering()  # settles the layout
    lowest, highest = (axes.transAxes.transform((0, y))[1] for y in (0, 1))
    spacing = 13 * axes.figure.dpi / 72 / (highest - lowest)
    ends = sorted(ends)
    wanted = [
        float(axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1]) for y, x, _ in ends
    ]
    for (_, _, name), height in zip(ends, spread(wanted, spacing), strict=True):
        look = {**style[name], "markersize": 5, "clip_on": False}
        axes.plot([1.02, 1.04, 1.06], [height] * 3, transform=axes.transAxes, markevery=[1], **look)
        axes.text(1.075, height, name, transform=axes.transAxes, va="center")


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
