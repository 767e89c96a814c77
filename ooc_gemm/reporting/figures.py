"""The figures of a report, with Bokeh. They hold numbers and our own words only: nothing that users name.

Backgrounds are transparent and lines grey, so that figures suit light and dark pages.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d, Span
from bokeh.plotting import figure

COLOURS = {
    "read": "#0072B2",
    "upload": "#E69F00",
    "decode": "#F0E442",
    "compute": "#009E73",
    "download": "#CC79A7",
    "write": "#D55E00",
    "pass": "#56B4E9",
}
"""Stage → its colour: those of Okabe and Ito, which colour-blind readers can tell apart."""
GREY = "#868e96"
"""The colour of texts and lines, which can be read on white and on black."""
LANE, GAP = 16, 8
"""Height in pixels of a lane of the timeline, and of the space between stages."""
MOST_HEIGHT = 900
"""Most pixels that the lanes of the timeline take."""
MiB = 1 << 20

Data = Mapping[str, Any]


def figures(found: Data) -> dict[str, Any]:
    """Return the figures of a report by name, without those for which there is nothing to show."""
    time = Range1d(0, max(found["seconds"], 1e-3), bounds=(0, max(found["seconds"], 1e-3)), min_interval=1e-4)
    made: dict[str, Any] = {}
    if found["lanes"]:
        made["timeline"] = _timeline(found["lanes"], time)
        made["stages"] = _stages(found["stages"])
    if len(found["memory"]["seconds"]) > 1:
        made["memory"] = _memory(found["memory"], time)
    if found["benchmark"]:
        made |= {f"benchmark{index}": one for index, one in enumerate(_benchmark(found["benchmark"]))}
    return made


def _plot(height: int, **options: Any) -> Any:
    """Return an empty figure as wide as the page, in the look that all have."""
    tools = options.pop("tools", "xpan,xbox_zoom,xzoom_in,xzoom_out,reset")
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        min_width=240,
        min_border_left=72,
        tools=tools,
        active_drag="xbox_zoom" if "xbox_zoom" in tools else None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        toolbar_location="above",
        **options,
    )
    made.toolbar.logo = None
    made.grid.grid_line_color, made.grid.grid_line_alpha = GREY, 0.25
    for axis in made.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.major_label_text_color = GREY
        axis.axis_label_text_color, axis.minor_tick_line_color = GREY, None
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
    return made


def _timeline(lanes: Sequence[Data], time: Any) -> Any:
    """Return what every thread and stream did when: a lane for each, in the order of the stages."""
    places, at, last = [], 0.0, ""
    labels: dict[str, list[float]] = {}
    for lane in lanes:
        at += GAP / LANE if last and lane["stage"] != last else 0.0
        places.append(at + 0.5)
        labels.setdefault(lane["stage"], []).append(at + 0.5)
        at, last = at + 1, lane["stage"]
    height = min(MOST_HEIGHT, int(at * LANE)) + 110
    made = _plot(height, x_range=time, y_range=Range1d(at, 0), x_axis_label="seconds")
    columns: dict[str, list[Any]] = {name: [] for name in ("start", "stop", "bytes", "count", "busy")}
    for lane in lanes:
        for name, values in columns.items():
            values += lane[name]
    sizes = [len(lane["start"]) for lane in lanes]
    columns["lane"] = [place for place, size in zip(places, sizes, strict=True) for _ in range(size)]
    columns["stage"] = [lane["stage"] for lane, size in zip(lanes, sizes, strict=True) for _ in range(size)]
    columns["colour"] = [COLOURS[stage] for stage in columns["stage"]]
    columns["alpha"] = [
        min(1.0, 0.35 + 0.65 * busy / max(stop - start, 1e-9))
        for start, stop, busy in zip(columns["start"], columns["stop"], columns["busy"], strict=True)
    ]
    columns["moved"] = [_size(nbytes) if nbytes else "–" for nbytes in columns.pop("bytes")]
    bars = made.hbar(
        y="lane",
        left="start",
        right="stop",
        height=0.84,
        fill_color="colour",
        fill_alpha="alpha",
        line_color=None,
        hover_line_color=GREY,
        source=ColumnDataSource(columns),
    )
    tips = [
        ("stage", "@stage"),
        ("from", "@start{0.0000} s"),
        ("to", "@stop{0.0000} s"),
        ("busy", "@busy{0.0000} s"),
        ("moved", "@moved"),
        ("pieces", "@count"),
    ]
    made.add_tools(HoverTool(renderers=[bars], tooltips=tips, point_policy="follow_mouse"))
    middles = {stage: sum(own) / len(own) for stage, own in labels.items()}
    made.yaxis.ticker = list(middles.values())
    made.yaxis.major_label_overrides = {middle: stage for stage, middle in middles.items()}
    made.ygrid.visible = False
    made.yaxis.axis_line_color = made.yaxis.major_tick_line_color = None
    return made


def _memory(found: Data, time: Any) -> Any:
    """Return resident memory over time, below the limit."""
    most = max([*found["bytes"], found["limit"] or 0]) / MiB
    made = _plot(260, x_range=time, y_range=Range1d(0, 1.08 * most), x_axis_label="seconds")
    made.yaxis.axis_label = "MiB resident"
    made.yaxis.formatter = NumeralTickFormatter(format="0,0")
    columns = {"at": found["seconds"], "held": [nbytes / MiB for nbytes in found["bytes"]]}
    columns["bottom"] = [0.0] * len(found["seconds"])
    source = ColumnDataSource(columns)
    made.varea(x="at", y1="bottom", y2="held", fill_color=COLOURS["read"], fill_alpha=0.2, source=source)
    line = made.line(x="at", y="held", line_color=COLOURS["read"], line_width=2, source=source)
    if found["limit"]:
        limit = found["limit"] / MiB
        made.add_layout(
            Span(location=limit, dimension="width", line_color=COLOURS["write"], line_dash="dashed")
        )
    tips = [("at", "@at{0.00} s"), ("resident", "@held{0,0.0} MiB")]
    made.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline", line_policy="nearest"))
    return made


KINDS = (("least", "least, by the rates", 0.3), ("predicted", "predicted", 0.6), ("busy", "measured", 1.0))
"""What is drawn of a stage: its key, its title, and how strong its colour is."""


def _stages(stages: list[Data]) -> Any:
    """Return the seconds of each stage: the least that the hardware needs, predicted, and measured."""
    names = [found["stage"] for found in stages]
    made = _plot(
        60 * len(names) + 80, y_range=names[::-1], x_axis_label="seconds in which it is busy", tools="reset"
    )
    columns: dict[str, list[Any]] = {name: [] for name in ("at", "seconds", "colour", "alpha", "what")}
    for found in stages:
        for offset, (key, title, alpha) in zip((0.25, 0.0, -0.25), KINDS, strict=True):
            if found[key] is not None:
                columns["at"].append((found["stage"], offset))
                columns["seconds"].append(found[key])
                columns["colour"].append(COLOURS[found["stage"]])
                columns["alpha"].append(alpha)
                columns["what"].append(f"{found['stage']}, {title}")
    bars = made.hbar(
        y="at",
        right="seconds",
        height=0.22,
        fill_color="colour",
        fill_alpha="alpha",
        line_color=None,
        source=ColumnDataSource(columns),
    )
    made.add_tools(HoverTool(renderers=[bars], tooltips=[("", "@what"), ("seconds", "@seconds{0.000}")]))
    made.x_range.start = 0
    made.ygrid.visible = False
    return made


def _benchmark(report: Data) -> Iterator[Any]:
    """Yield the figures of a benchmark."""
    draw = {"kernels": _kernels, "engine": _engine, "io": _io, "stress": _stress}
    yield from draw[report["suite"]](report)


SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#A5AA99")
"""Colours of series of a benchmark."""


def _kernels(report: Data) -> Iterator[Any]:
    """Yield the speed of each kernel over the size of the product, with a line through the sizes that are
    multiples of 16."""
    rows = [row for row in report["rows"] if row["failed"] is None]
    if not rows:
        return
    cubes = [row for row in rows if row["m"] == row["n"] == row["k"]]
    rows, size = cubes or rows, "m = n = k" if cubes else "∛(m·n·k)"
    rates = [row["tflops"] for row in rows]
    scale = "log" if max(rates) > 20 * min(rates) else "linear"
    made = _plot(
        420, x_axis_type="log", y_axis_type=scale, x_axis_label=size, y_axis_label="TFLOP/s", tools="reset"
    )
    if scale == "linear":
        made.y_range.start = 0
    made.xaxis.ticker = sorted({_side(row) for row in rows if not row["m"] % 16})
    made.xaxis.formatter = NumeralTickFormatter(format="0")
    alone = len({row["dtype"] for row in rows}) == 1
    series: dict[str, list[Any]] = {}
    for row in sorted(rows, key=_side):
        name = row["kernel"] if alone else f"{row['kernel']} {row['dtype']}"
        series.setdefault(name, []).append(row)
    for index, (name, own) in enumerate(series.items()):
        columns = {"side": [_side(row) for row in own], "tflops": [row["tflops"] for row in own]}
        columns["name"] = [name] * len(own)
        source, colour = ColumnDataSource(columns), SERIES[index % len(SERIES)]
        dash = ("solid", "dashed", "dotted")[index // len(SERIES) % 3]
        some = [row for row in own if not (row["m"] % 16 or row["n"] % 16 or row["k"] % 16)]
        line = [_side(row) for row in some], [row["tflops"] for row in some]
        made.line(*line, line_color=colour, line_dash=dash, line_width=2)
        dots = made.scatter("side", "tflops", color=colour, size=8, legend_label=name, source=source)
        tips = [("", "@name"), ("size", "@side{0}"), ("TFLOP/s", "@tflops{0.00}")]
        made.add_tools(HoverTool(renderers=[dots], tooltips=tips))
    _legend(made)
    yield made


def _side(row: Data) -> float:
    """Return the side of a cube of as many products."""
    return float((row["m"] * row["n"] * row["k"]) ** (1 / 3))


def _engine(report: Data) -> Iterator[Any]:
    """Yield for each product its timeline and its stages beside the limits."""
    for row in report["rows"]:
        lanes: dict[tuple[str, str], list[Data]] = {}
        for span in row["spans"]:
            lanes.setdefault((span["stage"], span["lane"]), []).append(span)
        order = list(COLOURS)
        found = [
            {
                "stage": stage,
                "start": [span["start"] for span in spans],
                "stop": [span["stop"] for span in spans],
                "bytes": [span["bytes"] for span in spans],
                "count": [1] * len(spans),
                "busy": [span["stop"] - span["start"] for span in spans],
            }
            for (stage, _), spans in sorted(lanes.items(), key=lambda item: order.index(item[0][0]))
        ]
        if not found:
            continue
        end = max(span["stop"] for span in row["spans"])
        yield _timeline(found, Range1d(0, end, bounds=(0, end)))
        predicted = row["plan"]["stage_seconds"]
        yield _stages(
            [
                {
                    "stage": stage,
                    "busy": one["busy_seconds"],
                    "least": row["limits"][stage],
                    "predicted": predicted.get(stage),
                }
                for stage, one in row["stages"].items()
                if one["lanes"]
            ]
        )


def _io(report: Data) -> Iterator[Any]:
    """Yield the rate of each way to read or write over the number of threads."""
    made = _plot(420, x_axis_label="threads", y_axis_label="GB/s", tools="reset")
    made.y_range.start = 0
    for index, row in enumerate(report["rows"]):
        rates = [None if rate is None else rate / 1e9 for rate in row["bytes_per_second"]]
        known = [(threads, rate) for threads, rate in zip(report["threads"], rates, strict=True) if rate]
        if not known:
            continue
        name = f"{row['group']}, {row['way']}"
        columns: dict[str, list[Any]] = {
            "threads": [threads for threads, _ in known],
            "rate": [rate for _, rate in known],
            "name": [name] * len(known),
        }
        source, colour = ColumnDataSource(columns), SERIES[index % len(SERIES)]
        dash = ("solid", "dashed", "dotted")[index // len(SERIES) % 3]
        made.line("threads", "rate", line_color=colour, line_dash=dash, line_width=2, source=source)
        dots = made.scatter("threads", "rate", color=colour, size=8, legend_label=name, source=source)
        tips = [("", "@name"), ("threads", "@threads"), ("GB/s", "@rate{0.00}")]
        made.add_tools(HoverTool(renderers=[dots], tooltips=tips))
    made.xaxis.ticker = report["threads"]
    _legend(made)
    yield made


def _stress(report: Data) -> Iterator[Any]:
    """Yield the peak memory of each case as a share of its limit."""
    rows = [row for row in report["rows"] if row.get("limit") and row.get("peak") is not None]
    if not rows:
        return
    made = _plot(300, x_axis_label="case", y_axis_label="peak, % of the limit", tools="reset")
    shares = [100 * row["peak"] / row["limit"] for row in rows]
    columns: dict[str, list[Any]] = {"case": [row["case"] for row in rows], "share": shares}
    columns["colour"] = [COLOURS["write"] if row["failed"] else COLOURS["compute"] for row in rows]
    source = ColumnDataSource(columns)
    bars = made.vbar(x="case", top="share", width=0.8, color="colour", source=source)
    made.xaxis.ticker.min_interval = 1
    made.y_range.start = 0
    made.y_range.end = max(105.0, *shares)
    made.add_layout(Span(location=100, dimension="width", line_color=COLOURS["write"], line_dash="dashed"))
    made.add_tools(
        HoverTool(renderers=[bars], tooltips=[("case", "@case"), ("of its limit", "@share{0.0} %")])
    )
    yield made


def _legend(made: Any) -> None:
    """Put the legend below a figure, where a click hides a series."""
    if not made.legend:
        return
    legend = made.legend[0]
    made.add_layout(legend, "below")
    legend.ncols, legend.click_policy, legend.location = 2, "hide", "left"
    legend.label_text_color, legend.label_text_font_size = GREY, "12px"
    legend.background_fill_color = legend.border_line_color = None
    legend.spacing, legend.label_height, legend.glyph_height = 2, 16, 16
    made.height += 18 * (len(legend.items) // 2 + 1)


def _size(nbytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{nbytes / MiB:,.2f} MiB" if nbytes >= MiB else f"{nbytes / 1024:,.1f} KiB"
