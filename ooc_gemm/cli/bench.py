"""The commands that measure: bench kernels, io, engine and stress."""

import json
from collections.abc import Callable
from typing import Any

import click

from ..support.errors import InputError
from . import options
from .group import CONTEXT, cli
from .show import console, note, status, write
from .types import FOLDER


def _shapes(usual: str) -> Callable[[Any], Any]:
    """Options that say which shapes are measured."""
    return options.together(
        click.option(
            "--size",
            "sizes",
            multiple=True,
            type=click.IntRange(1),
            help=f"m = n = k; repeatable.  [default: {usual}]",
        ),
        click.option(
            "--m", type=click.IntRange(1), help="With --n and --k: one more shape, or the only one."
        ),
        click.option("--n", type=click.IntRange(1)),
        click.option("--k", type=click.IntRange(1)),
    )


def _named(m: int | None, n: int | None, k: int | None) -> list[tuple[int, int, int]]:
    """The shape that --m, --n and --k name, if they do."""
    if m is not None and n is not None and k is not None:
        return [(m, n, k)]
    if (m, n, k) != (None, None, None):
        raise click.UsageError("--m, --n and --k go together.")
    return []


@cli.group(context_settings=CONTEXT)
def bench() -> None:
    """Measure what multiply is made of."""


@bench.command(context_settings=CONTEXT)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="One of --list; repeatable.  [default: all of ours]",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="Type of A and B; repeatable.  [default: float32, else the kernel's first]",
)
@_shapes("907 1024 1025 2048 2049 4096 8192")
@click.option("--transpose-a", "trans_a", is_flag=True, help="A is stored k×m.")
@click.option("--transpose-b", "trans_b", is_flag=True, help="B is stored n×k.")
@click.option(
    "--repeat", type=click.IntRange(1), default=7, show_default=True, help="Rounds; medians are shown."
)
@click.option(
    "--threshold",
    type=click.FloatRange(0),
    help="Error, relative to the RMS of C, past which an element counts as beyond.  [default: rounding]",
)
@click.option("--plot", metavar="FILE.svg|png", help="Draw TFLOP/s over sizes, and the roofline.")
@options.from_report(
    "Show and plot what --json printed earlier, of the kernels and types named; measures nothing."
)
@click.option("--list", "listed", is_flag=True, help="What kernels there are; needs no GPU.")
@click.option(
    "--tune", "tuned", is_flag=True, help="Find and remember the fastest configurations on this GPU."
)
@options.as_json
@options.verbose
def kernels(
    kernels: tuple[str, ...],
    dtypes: tuple[str, ...],
    sizes: tuple[int, ...],
    m: int | None,
    n: int | None,
    k: int | None,
    plot: str | None,
    source: str | None,
    listed: bool,
    tuned: bool,
    as_json: bool,
    verbose: bool,
    repeat: int,
    **given: Any,
) -> None:
    """Speed and error of our CUDA kernels, next to cuBLAS in the same run.

    On the first GPU that is visible, with random data and α = 1, β = 0. Rows of all matrices, cuBLAS's too,
    begin at multiples of 256 bytes, as they do in multiply; 8-bit B is stored n×k. Contestants take turns,
    so that all see the same clocks. Errors are against float64 (64-bit types: against NumPy's longest type),
    of up to 1024 rows.

    Loads and stores are counted by formula: each tile of BM×BN elements of C reads (BM + BN)·k elements.
    The roof is the lower of the peak of the arithmetic used, at the highest clock, and the measured
    bandwidth times flop/byte. A kernel above the latter is fed by caches, and compared with the peak.
    Exit status 3 where a result is wrong.
    """
    from ..bench import figures
    from ..bench import kernels as bench_kernels
    from ..support.remembered import not_written

    if listed:
        if as_json:
            click.echo(json.dumps(figures.listing()))
        else:
            console().print(figures.listing_table())
        return
    if plot:
        figures.check_plot(plot)
    if source:
        _show(bench_kernels.select(_read_report(source), kernels, dtypes), as_json, plot)
        return
    named = _named(m, n, k)
    chosen = bench_kernels.pairs(kernels, dtypes)
    if tuned:
        with status() as progress:
            found = list(bench_kernels.tune(chosen, repeat, progress))
        lines = [figures.choice_line(choice) for choice in found]
        write(json.dumps(found) if as_json else "\n".join(lines) or "Each is shipped in one configuration")
        if why := not_written():
            note(why)
        return
    shapes = [(size, size, size) for size in sizes or (() if named else bench_kernels.SIZES)] + named
    with status() as progress:
        report = bench_kernels.run(chosen, shapes, repeat, progress=progress, **given)
    _show(report, as_json, plot)


@bench.command(context_settings=CONTEXT)
@click.argument("folder", default=".", type=FOLDER)
@click.option(
    "-d", "--device", default="auto", show_default=True, metavar="NAME", help="Whose number of readers."
)
@options.as_json
@options.verbose
def io(folder: str, as_json: bool, verbose: bool, **given: Any) -> None:
    """Speed of reading, writing and decoding in a FOLDER, beside what the engine's threads reach.

    Writes up to 1 GiB into FOLDER (the current one unless given) and removes it. Direct access passes by the
    page cache; the other reads are of files dropped from it, and cached ones of files in it. zstd decodes
    normal float32 numbers, counted as decoded, from memory, and by the engine from cached files.
    """
    from ..bench import figures
    from ..bench import stores as bench_store

    with status() as progress:
        report = bench_store.run(folder, progress=progress, **given)
    if as_json:
        click.echo(json.dumps(report))
        return
    out = console()
    out.print(figures.io_heading(report) + "\n")
    out.print(figures.io_table(report))


@bench.command(context_settings=CONTEXT)
@click.argument("folder", default=".", type=FOLDER)
@_shapes("4096, on a GPU 16384")
@click.option("--dtype", "dtypes", multiple=True, help="Repeatable.  [default: float32]")
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    type=click.Choice(["squares", "rows", "small", "zstd"]),
    help="Chunks of A and B: 16 MiB squares, bands of 256 rows, 512×512, or compressed squares; repeatable."
    "  [default: squares]",
)
@options.memory
@click.option("-d", "--device", default="auto", show_default=True, metavar="NAME")
@click.option("-D", "--device-memory-limit", metavar="SIZE", help="Most memory of it.")
@click.option("--kernel", default="auto", show_default=True, metavar="NAME")
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs; medians are shown."
)
@click.option("--cold", is_flag=True, help="Drop A and B from the page cache before each run.")
@click.option("--peers", is_flag=True, help="NumPy in core and dask.array in the same run.")
@click.option("--plot", metavar="FILE.svg|png", help="Draw the timeline of the first product.")
@options.from_report("Show and plot what --json printed earlier; measures nothing.")
@options.as_json
@options.verbose
def engine(
    folder: str,
    sizes: tuple[int, ...],
    m: int | None,
    n: int | None,
    k: int | None,
    dtypes: tuple[str, ...],
    layouts: tuple[str, ...],
    plot: str | None,
    source: str | None,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Whole multiplications, Zarr to Zarr, beside what the plan predicted and the limit of the hardware.

    Random arrays are made in a temporary folder in FOLDER (the current one unless given). Rates are measured
    first, as by info --measure. One more run of each product is traced: of each stage it tells by how many
    threads it is done, how long any of them is busy, at what rate then, and the least time that the hardware
    takes. The limit is the longest of those, or reads and writes together where they share the disk.

    Times are from the call to the return in a warm process; peers are processes of their own, timed without
    start and imports.
    """
    from ..bench import figures

    if plot:
        figures.check_plot(plot)
    named = _named(m, n, k)
    if source:
        report = _read_report(source)
    else:
        from ..bench import engine as bench_engine
        from ..devices import open_device

        usual = 4096 if open_device(given["device"]).name == "cpu" else 16384
        shapes = [(size, size, size) for size in sizes or (() if named else (usual,))] + named
        chosen = bench_engine.cases(shapes, dtypes or ("float32",), layouts or ("squares",))
        with status() as progress:
            report = bench_engine.run(chosen, folder, progress=progress, **given)
    if as_json:
        click.echo(json.dumps(report))
    else:
        out = console()
        out.print(figures.engine_heading(report) + "\n")
        for part in figures.engine_tables(report):
            out.print(part)
    if plot:
        figures.timeline(report, report["rows"][0], plot)


@bench.command(context_settings=CONTEXT)
@click.argument("folder", default=".", type=FOLDER)
@click.option("--hours", type=click.FloatRange(0), help="Go on for so long.  [default: 0.05]")
@click.option("--cases", type=click.IntRange(1), help="Stop after so many.")
@click.option("--seed", type=click.IntRange(0), help="For the same cases again.  [default: a new one]")
@click.option("--case", "only", type=click.IntRange(0), help="This one alone.")
@click.option("--largest", default="2GiB", show_default=True, metavar="SIZE", help="Most data in a case.")
@click.option("-d", "--device", default="auto", show_default=True, metavar="NAME")
@options.from_report("Show what --json printed earlier; runs nothing.")
@options.as_json
@options.verbose
def stress(folder: str, source: str | None, as_json: bool, verbose: bool, **given: Any) -> None:
    """Random products within the smallest limits, each checked: is any wrong, or over its limit by a byte?

    Shapes, types, layouts, codecs, operations and limits are drawn; arrays are made in a temporary folder in
    FOLDER (the current one unless given), of which some hold a thousand times what their limit leaves for
    buffers. Each product is a process of its own, whose peak is what the kernel says of it; behind a wall
    where the system has one: a control group, else RLIMIT_DATA. On a GPU, its memory is limited likewise.

    Exit status 3 where a result is wrong, 1 where a limit was passed or a product failed.
    """
    from ..bench import figures
    from ..bench import stress as bench_stress

    if source:
        report = _read_report(source)
    else:
        with status() as progress:
            report = bench_stress.run(folder, progress=progress, **given)
    if as_json:
        click.echo(json.dumps(report))
    else:
        out = console()
        out.print(figures.stress_heading(report))
        out.print(figures.stress_table(report))
        for line in figures.stress_summary(report):
            out.print(line)
    for line in (failed := list(figures.stress_failures(report))):
        click.echo(f"Error: {line}", err=True)
    if failed:
        raise click.exceptions.Exit(3 if any(row.get("wrong") for row in report["rows"]) else 1)
    if report["interrupted"]:
        raise click.exceptions.Exit(130)


def _read_report(source: str) -> dict[str, Any]:
    """The report that an earlier run printed with --json. Raises InputError."""
    try:
        with open(source, encoding="utf-8") as file:
            report: dict[str, Any] = json.load(file)
            return report
    except (OSError, ValueError) as error:
        raise InputError(f"{source} is not what --json printed ({error}); name another file") from error


def _show(report: dict[str, Any], as_json: bool, plot: str | None) -> None:
    """Tables or JSON, the picture, and what was wrong."""
    from ..bench import figures

    if as_json:
        click.echo(json.dumps(report))
    else:
        out = console()
        out.print(figures.heading(report) + "\n")
        for table in figures.tables(report):
            out.print(table)
    if plot:
        figures.plot(report, plot)
    for line in (wrong := list(figures.failures(report))):
        click.echo(f"Error: {line}", err=True)
    if wrong:
        raise click.exceptions.Exit(3 if any(row.get("correct") is False for row in report["rows"]) else 1)
