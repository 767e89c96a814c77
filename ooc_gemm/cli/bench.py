"""The commands that measure: bench kernels, io, engine and stress."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ..support.errors import InputError
from . import options
from .group import CONTEXT, cli
from .reports import benchmark, reported
from .show import complain, console, note, status, write
from .types import FOLDER


def _shapes(usual: str) -> Callable[[Any], Any]:
    """Return the options that say which shapes are measured."""
    return options.together(
        click.option(
            "--size",
            "sizes",
            multiple=True,
            type=click.IntRange(1),
            help=f"Measure m = n = k of this size; repeatable.  [default: {usual}]",
        ),
        click.option("--m", type=click.IntRange(1), help="Measure m×n×k, with --n and --k."),
        click.option("--n", type=click.IntRange(1), help="Give the columns of B and C of --m."),
        click.option("--k", type=click.IntRange(1), help="Give the columns of A of --m."),
    )


def _named(m: int | None, n: int | None, k: int | None) -> list[tuple[int, int, int]]:
    """Return the shape that --m, --n and --k name; none where they are not given."""
    if m is not None and n is not None and k is not None:
        return [(m, n, k)]
    if (m, n, k) != (None, None, None):
        raise click.UsageError("--m, --n and --k go together.")
    return []


@cli.group(context_settings=CONTEXT)
def bench() -> None:
    """Measure kernels, files and whole products."""


@bench.command(context_settings=CONTEXT, short_help="Measure our CUDA kernels next to cuBLAS.")
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="Measure this kernel of --list; repeatable.  [default: all of ours]",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="Measure A and B of this type; repeatable.  [default: float32, or the kernel's first]",
)
@_shapes("907 1024 1025 2048 2049 4096 8192")
@click.option("--transpose-a", "trans_a", is_flag=True, help="Store A as k×m.")
@click.option("--transpose-b", "trans_b", is_flag=True, help="Store B as n×k.")
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=7,
    show_default=True,
    help="Measure this many rounds; medians are shown.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0),
    help="Count elements as beyond whose error, relative to the RMS of C, is larger.  [default: rounding]",
)
@click.option("--plot", metavar="FILE.svg|png", help="Draw TFLOP/s over sizes, and the roofline.")
@options.from_report(
    "Show and plot a report that --json printed, of the kernels and types named; measure nothing."
)
@click.option("--list", "listed", is_flag=True, help="List all kernels; needs no GPU.")
@click.option(
    "--tune", "tuned", is_flag=True, help="Find and remember the fastest configurations on this GPU."
)
@reported(spans=False)
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
    """Measure speed and error of our CUDA kernels, next to cuBLAS in the same run.

    Kernels run on the first visible GPU, with random data, α = 1 and β = 0. The rows of all matrices begin at
    multiples of 256 bytes, as in multiply, also those of cuBLAS; 8-bit B is stored n×k. Kernels take turns,
    so that all run at the same clocks. Errors are differences from float64 (64-bit types: from NumPy's
    longest type), of up to 1024 rows.

    Loads and stores are counted by formula: each tile of BM×BN elements of C reads (BM + BN)·k elements.
    The roof is the lower of two: the peak of the arithmetic used, at the highest clock, and the measured
    bandwidth times flop/byte. A kernel above the latter is fed by caches, and is compared with the peak.
    Exit status 3 where a result is wrong.
    """
    from ..bench import figures, tables
    from ..bench import kernels as bench_kernels
    from ..support.remembered import not_written

    if listed:
        if as_json:
            click.echo(json.dumps(tables.listing()))
        else:
            console().print(tables.listing_table())
        return
    if plot:
        figures.check_plot(plot)
    if source:
        with _fits(source):
            _show(bench_kernels.select(_read_report(source), kernels, dtypes), as_json, plot)
        return
    named = _named(m, n, k)
    chosen = bench_kernels.pairs(kernels, dtypes)
    if tuned:
        with status() as progress:
            found = list(bench_kernels.tune(chosen, repeat, progress))
        lines = [tables.choice_line(choice) for choice in found]
        write(json.dumps(found) if as_json else "\n".join(lines) or "Each is shipped in one configuration")
        if why := not_written():
            note(why)
        return
    shapes = [(size, size, size) for size in sizes or (() if named else bench_kernels.SIZES)] + named
    with status() as progress:
        report = bench_kernels.run(chosen, shapes, repeat, progress=progress, **given)
    _show(report, as_json, plot)


@bench.command(context_settings=CONTEXT, short_help="Measure how fast files are read and written.")
@click.argument("folder", default=".", type=FOLDER)
@click.option(
    "-d",
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Use as many readers as this device takes.",
)
@reported(spans=False)
@options.as_json
@options.verbose
def io(folder: str, as_json: bool, verbose: bool, **given: Any) -> None:
    """Measure how fast files in FOLDER are read, written and decoded, also by the engine's threads.

    The command writes up to 1 GiB into FOLDER (by default the current folder) and removes it. Direct access
    goes past the page cache. Files are dropped from the page cache before they are read, except for cached
    reads. zstd decodes normal float32 numbers, from memory and by the engine from cached files; their decoded
    bytes are counted.
    """
    from ..bench import stores as bench_store
    from ..bench import tables

    with status() as progress:
        report = bench_store.run(folder, progress=progress, **given)
    _print(report, [tables.io_heading(report) + "\n", tables.io_table(report)], as_json)


@bench.command(context_settings=CONTEXT, short_help="Measure whole products and their stages.")
@click.argument("folder", default=".", type=FOLDER)
@_shapes("4096, on a GPU 16384")
@click.option(
    "--dtype", "dtypes", multiple=True, help="Measure A and B of this type; repeatable.  [default: float32]"
)
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    type=click.Choice(["squares", "rows", "small", "zstd"]),
    help="Store A and B in 16 MiB squares, bands of 256 rows, 512×512, or compressed squares; repeatable."
    "  [default: squares]",
)
@options.memory
@click.option(
    "-d", "--device", default="auto", show_default=True, metavar="NAME", help="Compute on this device."
)
@click.option(
    "-D", "--device-memory-limit", metavar="SIZE", help="Hold at most this much memory of each device."
)
@click.option(
    "--kernel", default="auto", show_default=True, metavar="NAME", help="Multiply with this kernel."
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Measure this many runs; medians are shown.",
)
@click.option("--cold", is_flag=True, help="Drop A and B from the page cache before each run.")
@click.option("--peers", is_flag=True, help="Measure NumPy in core and dask.array in the same run.")
@click.option("--plot", metavar="FILE.svg|png", help="Draw the timeline of the first product.")
@options.from_report("Show and plot a report that --json printed; measure nothing.")
@reported(spans=False)
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
    """Measure whole products, Zarr to Zarr, next to the plan's prediction and the limit of the hardware.

    Random arrays are made in a temporary folder in FOLDER (by default the current folder). Rates are measured
    first, as by info --measure. One more run of each product is traced. It shows for each stage the number of
    threads, how long any of them is busy, the rate in that time, and the least time that the hardware needs.
    The limit is the longest of these times, or the sum of reads and writes where they share the disk.

    Times are from the call to the return in a warm process. Peers are processes of their own, timed without
    start and imports.
    """
    from ..bench import figures, tables

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
    with _fits(source):
        _print(report, [tables.engine_heading(report) + "\n", *tables.engine_tables(report)], as_json)
        if plot:
            figures.timeline(report, report["rows"][0], plot)


@bench.command(context_settings=CONTEXT, short_help="Check random products within hard limits.")
@click.argument("folder", default=".", type=FOLDER)
@click.option("--hours", type=click.FloatRange(0), help="Start no new case after this time.  [default: 0.05]")
@click.option("--cases", type=click.IntRange(1), help="Stop after this many cases.")
@click.option("--seed", type=click.IntRange(0), help="Draw the cases from this seed.  [default: a new one]")
@click.option("--case", "only", type=click.IntRange(0), help="Run only the case of this number.")
@click.option(
    "--largest", default="2GiB", show_default=True, metavar="SIZE", help="Give no case more data than this."
)
@click.option(
    "-d", "--device", default="auto", show_default=True, metavar="NAME", help="Compute on this device."
)
@options.from_report("Show a report that --json printed; run nothing.")
@reported(spans=False)
@options.as_json
@options.verbose
def stress(folder: str, source: str | None, as_json: bool, verbose: bool, **given: Any) -> None:
    """Compute random products within the smallest limits, and check each result and each limit.

    Shapes, types, layouts, codecs, operations and limits are drawn at random. Arrays are made in a temporary
    folder in FOLDER (by default the current folder); some hold a thousand times as much as their limit leaves
    for buffers. Each product is a process of its own, whose peak memory the operating system reports, and
    which cannot pass its limit by much: a control group ends it, or RLIMIT_DATA where there is none. The
    memory of a GPU is limited likewise.

    Exit status 3 where a result is wrong, 1 where a limit was passed or a product failed.
    """
    from ..bench import stress as bench_stress
    from ..bench import tables

    if source:
        report = _read_report(source)
    else:
        with status() as progress:
            report = bench_stress.run(folder, progress=progress, **given)
    with _fits(source):
        heading, table = tables.stress_heading(report), tables.stress_table(report)
        _print(report, [heading, table, *tables.stress_summary(report)], as_json)
    for line in (failed := list(tables.stress_failures(report))):
        complain(f"Error: {line}")
    if failed:
        raise click.exceptions.Exit(3 if any(row.get("wrong") for row in report["rows"]) else 1)
    if report["interrupted"]:
        raise click.exceptions.Exit(130)


def _read_report(source: str) -> dict[str, Any]:
    """Return the report that an earlier run printed with --json. Raises InputError."""
    try:
        with open(source, encoding="utf-8") as file:
            report: dict[str, Any] = json.load(file)
            return report
    except (OSError, ValueError) as error:
        raise InputError(
            f"{source} is not a report that --json printed ({error}); name another file"
        ) from error


@contextmanager
def _fits(source: str | None) -> Iterator[None]:
    """Say that the file that --from names is no report of this command where it cannot be shown. Raises
    InputError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        if source is None:
            raise
        raise InputError(
            f"{source} is not a report that this command and version printed with --json; name another file"
        ) from error


def _print(report: dict[str, Any], parts: list[Any], as_json: bool) -> None:
    """Print a report as lines and tables, or as JSON, and keep it for --report."""
    benchmark(report, parts)
    if as_json:
        click.echo(json.dumps(report))
        return
    out = console()
    for part in parts:
        out.print(part)


def _show(report: dict[str, Any], as_json: bool, plot: str | None) -> None:
    """Show a report of kernels as tables or JSON, draw its picture, and exit with the status of failures."""
    from ..bench import figures, tables

    _print(report, [tables.heading(report) + "\n", *tables.kernel_tables(report)], as_json)
    if plot:
        figures.plot(report, plot)
    for line in (wrong := list(tables.failures(report))):
        complain(f"Error: {line}")
    if wrong:
        raise click.exceptions.Exit(3 if any(row.get("correct") is False for row in report["rows"]) else 1)
