"""The command line. Heavy imports wait for the command that needs them."""

import json
import logging
import os
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..support.errors import (
    NO_MEMORY,
    BudgetError,
    DeviceLostError,
    Error,
    InputError,
    VerificationError,
    no_memory,
)
from ..support.redact import redacted, url
from .spelling import for_command_line

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..run.result import Result

    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Pair(_ParamType):
    """Two positive integers, `M,N`."""

    name = "M,N"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            self.fail(f"{value!r} is not two numbers; write for example 2048,2048")
        return int(parts[0]), int(parts[1])


class _Number(_ParamType):
    """A real or complex number."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> complex:
        try:
            number = complex(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a number")
        return number if number.imag else number.real


_FOLDER = click.Path(exists=True, file_okay=False, writable=True)


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_memory = click.option(
    "-M",
    "--memory-limit",
    metavar="SIZE",
    help="Most host memory to hold resident, e.g. 512MiB.  [default: 60 % of what is free]",
)
_operands = _options(
    click.option("--transpose-a", is_flag=True, help="Use Aᵀ."),
    click.option("--transpose-b", is_flag=True, help="Use Bᵀ."),
    click.option("--adjoint-a", is_flag=True, help="Use Aᴴ, the conjugate transpose."),
    click.option("--adjoint-b", is_flag=True, help="Use Bᴴ."),
)
_checked_operands = _options(
    click.option(
        "--transpose-a/--no-transpose-a", default=None, help="Use Aᵀ, or A.  [default: as recorded]"
    ),
    click.option("--transpose-b/--no-transpose-b", default=None, help="Use Bᵀ, or B."),
    click.option("--adjoint-a/--no-adjoint-a", default=None, help="Use Aᴴ, the conjugate transpose, or A."),
    click.option("--adjoint-b/--no-adjoint-b", default=None, help="Use Bᴴ, or B."),
)
_storage = _options(
    click.option(
        "--chunks", type=_Pair(), help="Chunk rows and columns of the array written.  [default: near 16 MiB]"
    ),
    click.option("--shards", type=_Pair(), help="Shard rows and columns; multiples of the chunks."),
    click.option(
        "--compressor",
        metavar="none|zstd[:LEVEL]|blosc",
        help="Codec of the array written.  [default: none]",
    ),
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
_verbose = click.option("-v", "--verbose", is_flag=True, help="More to read; tracebacks.")
_matrices = _options(
    _memory,
    click.option(
        "-d",
        "--device",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="auto, cpu, cuda, cuda:N, cuda:0,1 or cuda:all.",
    ),
    click.option(
        "-D", "--device-memory-limit", metavar="SIZE", help="Most memory of it.  [default: 90 % of free]"
    ),
    click.option("--alpha", type=_Number(), help="α.  [default: 1]"),
    click.option("--beta", type=_Number(), help="β; C must exist unless it is 0.  [default: 0]"),
    click.option(
        "--precision",
        type=click.Choice(["highest", "high", "medium"]),
        default="highest",
        show_default=True,
        help="Least accuracy of float32 products: medium allows TF32, high is computed as highest.",
    ),
    click.option(
        "--kernel",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="auto, blas, cublas, or one of `bench kernels --list`.",
    ),
    click.option(
        "--out-dtype",
        metavar="DTYPE",
        help="Type of C.  [default: NumPy's promotion; int32 for 8-bit integers, int64 for others]",
    ),
    _storage,
    click.option(
        "--rechunk", is_flag=True, help="Copy A or B to better chunks first, beside C, where that pays."
    ),
    click.option("--verify", is_flag=True, help="Check every block of C while it is on the device."),
)
_problem = _options(_operands, _matrices)
_running = _options(
    click.option(
        "-f",
        "--force",
        is_flag=True,
        help="Replace C if it exists; other files in its folder stay. In an object store C is removed first, "
        "elsewhere when the new C is finished.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Continue an interrupted run of the same problem, as it was begun where options of C are not "
        "given again. Done where C is the result already.",
    ),
    click.option(
        "--trace", metavar="FILE", help="Write a timeline of every stage, for Perfetto or chrome://tracing."
    ),
    click.option(
        "-P/-Q",
        "--progress/--no-progress",
        default=None,
        help="Show a bar on standard error.  [default: on a terminal]",
    ),
    _json,
    _verbose,
)


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="ooc-gemm")
def cli() -> None:
    """C ← α·op(A)·op(B) + β·C for chunked Zarr arrays larger than RAM and larger than the GPU.

    A, B and C are paths or URLs of Zarr arrays, also inside a group (data.zarr/x).
    """


@cli.command(context_settings=CONTEXT)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@_problem
@click.option(
    "--scheduler",
    metavar="ADDRESS|local:N",
    help="Spread C's blocks over the workers of a Dask cluster, of which each may hold the memory limit; "
    "or over N processes on this machine, which share it and the cores.",
)
@_running
def multiply(
    a: str,
    b: str,
    c: str,
    scheduler: str | None,
    progress: bool | None,
    as_json: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """C ← α·op(A)·op(B) + β·C."""
    from ..api import multiply as run

    with ExitStack() as stack:
        if scheduler:
            for name in ("rechunk", "trace"):
                if options.pop(name):
                    raise click.UsageError(f"--{name} is for one process; leave out --scheduler.")
            run, cluster = _on_cluster(
                scheduler, **{key: options.pop(key) for key in ("memory_limit", "device")}
            )
            options |= stack.enter_context(cluster)
        report = stack.enter_context(_bar(progress))
        result = run(a, b, c, progress=report, notice=_note, **options)
    _report(result, c, as_json, verbose)


def _on_cluster(scheduler: str, **options: Any) -> tuple[Any, Any]:
    """What multiplies there, and a context with its options more."""
    try:
        from ..dask.arrays import multiply
        from ..dask.cluster import connected
    except ImportError as error:
        raise InputError(
            f"--scheduler needs a package that is not installed ({error.name}); "
            "pip install 'ooc-gemm[distributed]'"
        ) from error
    return multiply, connected(scheduler, **options)


@cli.command(context_settings=CONTEXT)
@click.argument("a")
@click.argument("c")
@click.option("--transpose", is_flag=True, help="Aᵀ·A instead.")
@_matrices
@_running
def gram(a: str, c: str, progress: bool | None, as_json: bool, verbose: bool, **options: Any) -> None:
    """C ← α·A·Aᵀ, half the work of multiply, both halves written.

    With β ≠ 0, C ← α·A·Aᵀ + β·C as multiply does it: the old C need not be symmetric. Complex A is not
    conjugated.
    """
    from ..api import gram as run

    with _bar(progress) as report:
        result = run(a, c, progress=report, notice=_note, **options)
    _report(result, c, as_json, verbose)


@cli.command(context_settings=CONTEXT)
@click.argument("a")
@click.argument("b")
@_problem
@_json
@_verbose
def plan(a: str, b: str, as_json: bool, verbose: bool, **options: Any) -> None:
    """What multiply would do, and why; runs nothing."""
    from ..api import plan as make

    try:
        made = make(a, b, **options)
    except BudgetError as error:
        if as_json:
            least = {"minimum_memory_limit": error.minimum_memory_limit}
            if error.minimum_device_memory_limit:
                least = {"minimum_device_memory_limit": error.minimum_device_memory_limit}
            click.echo(json.dumps({"feasible": False, **least}))
        raise
    if as_json:
        click.echo(json.dumps({"feasible": True, **_plan_dict(made.to_dict())}))
    else:
        click.echo(_spelled(str(made)))


@cli.command(context_settings=CONTEXT)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@_memory
@_checked_operands
@click.option("--alpha", type=_Number(), help="α.  [default: what C's attributes record, else 1]")
@click.option("--beta", type=_Number(), help="β; needs --old unless it is 0.  [default: as recorded, else 0]")
@click.option("--old", metavar="PATH", help="C as it was before, where β is not 0.")
@click.option(
    "--rounds", default=2, show_default=True, help="Random vectors; each halves the chance to miss an error."
)
@click.option("--seed", type=int, help="For the same vectors again.")
@_json
@_verbose
def verify(a: str, b: str, c: str, as_json: bool, verbose: bool, **options: Any) -> None:
    """Is C = α·op(A)·op(B) + β·(old C)?  Freivalds' check; reads each array once. Exit status 3 if not.

    α, β and op() are what C's attributes record of the run that made it, unless given.
    """
    from ..run.verify import verify as check

    found = check(a, b, c, **options)
    product = "the product" if found.formula == "A·B" else found.formula
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    elif found.ok:
        note = (
            f"; {_rows(found.rows_not_finite)} NaN or infinite on both sides" if found.rows_not_finite else ""
        )
        _print(f"{url(c)} is {product}, to rounding (worst row at {found.worst:.2g} of its tolerance){note}")
    if not found.ok:
        click.echo(
            f"Error: {url(c)} is not {product}: {_rows(found.rows_wrong)} wrong, "
            f"the first is row {found.first_wrong} (error {found.worst:.3g} times its tolerance at worst); "
            "compute it again",
            err=True,
        )
        raise click.exceptions.Exit(3)


@cli.command(context_settings=CONTEXT)
@click.argument("out")
@click.option("--shape", type=_Pair(), required=True, help="Rows and columns.")
@click.option("--dtype", default="float32", show_default=True)
@click.option(
    "--distribution",
    type=click.Choice(["normal", "uniform"]),
    default="normal",
    show_default=True,
    help="Of floating point; integers are uniform.",
)
@click.option("--seed", default=0, show_default=True)
@_storage
@_memory
@click.option(
    "-f", "--force", is_flag=True, help="Replace OUT if it exists; in an object store it is removed first."
)
@_json
@_verbose
def random(out: str, as_json: bool, verbose: bool, **options: Any) -> None:
    """Write a random array within a memory limit."""
    from ..run.generate import random as write

    options["compressor"] = options["compressor"] or "none"
    written = write(out, **options)
    rows, cols = options["shape"]
    if as_json:
        made = {"shape": [rows, cols], "dtype": options["dtype"], "bytes_written": written}
        click.echo(json.dumps(made))
    else:
        _print(f"{url(out)}: {rows}×{cols} {options['dtype']}, wrote {_size(written)}")


@cli.command(context_settings=CONTEXT)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=_FOLDER)
@click.option("--measure", is_flag=True, help="Measure rates, and remember them.")
@_json
@_verbose
def info(folders: tuple[str, ...], measure: bool, as_json: bool, verbose: bool) -> None:
    """Devices, memory, and the rates that plans are made with.

    --measure finds them: how fast each device multiplies and copies, and how fast the file systems of the
    FOLDERs (the current one unless given) are read and written by the engine's threads. That takes some ten
    seconds a device, writes up to 1 GiB into each folder and removes it. Rates are remembered for each model
    of device and each file system; without them a plan assumes the usual ones, and says so.
    """
    from ..bench import info as found_here

    if folders and not measure:
        raise click.UsageError("FOLDERs are measured; add --measure.")
    if measure:
        with _status() as progress:
            unused = found_here.measure(folders or (".",), progress)
        for sentence in unused:
            _note(sentence)
    found = found_here.collect()
    if as_json:
        click.echo(json.dumps(found))
        return
    from rich.markup import escape
    from rich.table import Table

    from ..bench.figures import rates_tables

    rates = found.pop("rates")
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in _flat(found):
        table.add_row(key, escape(value))
    console = _console()
    console.print(table)
    console.print()
    for part in rates_tables(rates):
        console.print(part)
    if not rates:
        console.print("rates not measured: ooc-gemm info --measure")


def _shapes(usual: str) -> Callable[[Any], Any]:
    """Options that say which shapes are measured."""
    return _options(
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


def _given(m: int | None, n: int | None, k: int | None) -> list[tuple[int, int, int]]:
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
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False),
    help="Show and plot what --json printed earlier, of the kernels and types named; measures nothing.",
)
@click.option("--list", "listed", is_flag=True, help="What kernels there are; needs no GPU.")
@click.option(
    "--tune", "tuned", is_flag=True, help="Find and remember the fastest configurations on this GPU."
)
@_json
@_verbose
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
    **options: Any,
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
            _console().print(figures.listing_table())
        return
    if plot:
        figures.check_plot(plot)
    if source:
        _show(bench_kernels.select(_read_report(source), kernels, dtypes), as_json, plot)
        return
    given = _given(m, n, k)
    chosen = bench_kernels.pairs(kernels, dtypes)
    if tuned:
        with _status() as progress:
            found = list(bench_kernels.tune(chosen, repeat, progress))
        lines = [figures.choice_line(choice) for choice in found]
        _print(json.dumps(found) if as_json else "\n".join(lines) or "Each is shipped in one configuration")
        if why := not_written():
            _note(why)
        return
    shapes = [(size, size, size) for size in sizes or (() if given else bench_kernels.SIZES)] + given
    with _status() as progress:
        report = bench_kernels.run(chosen, shapes, repeat, progress=progress, **options)
    _show(report, as_json, plot)


@bench.command(context_settings=CONTEXT)
@click.argument("folder", default=".", type=_FOLDER)
@click.option(
    "-d", "--device", default="auto", show_default=True, metavar="NAME", help="Whose number of readers."
)
@_json
@_verbose
def io(folder: str, as_json: bool, verbose: bool, **options: Any) -> None:
    """Speed of reading, writing and decoding in a FOLDER, beside what the engine's threads reach.

    Writes up to 1 GiB into FOLDER (the current one unless given) and removes it. Direct access passes by the
    page cache; the other reads are of files dropped from it, and cached ones of files in it. zstd decodes
    normal float32 numbers, counted as decoded, from memory, and by the engine from cached files.
    """
    from ..bench import figures
    from ..bench import stores as bench_store

    with _status() as progress:
        report = bench_store.run(folder, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(report))
        return
    console = _console()
    console.print(figures.io_heading(report) + "\n")
    console.print(figures.io_table(report))


@bench.command(context_settings=CONTEXT)
@click.argument("folder", default=".", type=_FOLDER)
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
@_memory
@click.option("-d", "--device", default="auto", show_default=True, metavar="NAME")
@click.option("-D", "--device-memory-limit", metavar="SIZE", help="Most memory of it.")
@click.option("--kernel", default="auto", show_default=True, metavar="NAME")
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs; medians are shown."
)
@click.option("--cold", is_flag=True, help="Drop A and B from the page cache before each run.")
@click.option("--peers", is_flag=True, help="NumPy in core and dask.array in the same run.")
@click.option("--plot", metavar="FILE.svg|png", help="Draw the timeline of the first product.")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False),
    help="Show and plot what --json printed earlier; measures nothing.",
)
@_json
@_verbose
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
    **options: Any,
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
    given = _given(m, n, k)
    if source:
        report = _read_report(source)
    else:
        from ..bench import engine as bench_engine
        from ..devices import open_device

        usual = 4096 if open_device(options["device"]).name == "cpu" else 16384
        shapes = [(size, size, size) for size in sizes or (() if given else (usual,))] + given
        chosen = bench_engine.cases(shapes, dtypes or ("float32",), layouts or ("squares",))
        with _status() as progress:
            report = bench_engine.run(chosen, folder, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(report))
    else:
        console = _console()
        console.print(figures.engine_heading(report) + "\n")
        for part in figures.engine_tables(report):
            console.print(part)
    if plot:
        figures.timeline(report, report["rows"][0], plot)


@bench.command(context_settings=CONTEXT)
@click.argument("folder", default=".", type=_FOLDER)
@click.option("--hours", type=click.FloatRange(0), help="Go on for so long.  [default: 0.05]")
@click.option("--cases", type=click.IntRange(1), help="Stop after so many.")
@click.option("--seed", type=click.IntRange(0), help="For the same cases again.  [default: a new one]")
@click.option("--case", "only", type=click.IntRange(0), help="This one alone.")
@click.option("--largest", default="2GiB", show_default=True, metavar="SIZE", help="Most data in a case.")
@click.option("-d", "--device", default="auto", show_default=True, metavar="NAME")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False),
    help="Show what --json printed earlier; runs nothing.",
)
@_json
@_verbose
def stress(folder: str, source: str | None, as_json: bool, verbose: bool, **options: Any) -> None:
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
        with _status() as progress:
            report = bench_stress.run(folder, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(report))
    else:
        console = _console()
        console.print(figures.stress_heading(report))
        console.print(figures.stress_table(report))
        for line in figures.stress_summary(report):
            console.print(line)
    for line in (failed := list(figures.stress_failures(report))):
        click.echo(f"Error: {line}", err=True)
    if failed:
        raise click.exceptions.Exit(3 if any(row.get("wrong") for row in report["rows"]) else 1)
    if report["interrupted"]:
        raise click.exceptions.Exit(130)


def _read_report(source: str) -> dict[str, Any]:
    """What --json printed."""
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
        console = _console()
        console.print(figures.heading(report) + "\n")
        for table in figures.tables(report):
            console.print(table)
    if plot:
        figures.plot(report, plot)
    for line in (wrong := list(figures.failures(report))):
        click.echo(f"Error: {line}", err=True)
    if wrong:
        raise click.exceptions.Exit(3 if any(row.get("correct") is False for row in report["rows"]) else 1)


def _console() -> Any:
    """100 columns where the output is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


@contextmanager
def _status() -> Any:
    """Says on a terminal what is being measured."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _flat(found: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in found.items():
        name = f"{prefix}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            rows += _flat(value, f"{name} ")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                rows += _flat(item, f"{name[:-1]} {index} ")
        elif key.endswith("_bytes_per_second"):
            rows.append((name.replace(" bytes per second", ""), f"{value / 1e9:.2f} GB/s"))
        elif key.endswith("_bytes"):
            rows.append((name.replace(" bytes", ""), _size(value)))
        elif key.endswith("_hertz"):
            rows.append((name.replace(" hertz", ""), f"{value / 1e6:.0f} MHz"))
        elif key.endswith("_flops"):
            rows.append((name.replace(" flops", ""), _rate(value)))
        else:
            rows.append((name, str(value)))
    return rows


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def _size(nbytes: int) -> str:
    from ..support.memory import spelled_size

    return spelled_size(nbytes)


def _rate(flops: float) -> str:
    """Floating-point operations a second, in the unit that suits."""
    scale, unit = next((pair for pair in ((1e12, "T"), (1e9, "G")) if flops >= 0.9995 * pair[0]), (1e6, "M"))
    return f"{flops / scale:.3g} {unit}FLOP/s"


def _print(*parts: str, sep: str = " ") -> None:
    click.echo(sep.join(parts))


def _note(text: str) -> None:
    """Above the bar where there is one: that knows of what is printed, but not of `click.echo`."""
    print(f"Note: {_spelled(text)}", file=sys.stderr)


def _spelled(text: str) -> str:
    """A message with the options of the command line in the place of Python's arguments."""
    with_arguments = (multiply, gram, verify, random)
    found = [param for command in with_arguments for param in command.params]
    options = {param.name: max(param.opts, key=len) for param in found if isinstance(param, click.Option)}
    return for_command_line(text, {name: option for name, option in options.items() if name})


def _plan_dict(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan as JSON types, whose advice names options."""
    return {**plan, "advice": plan["advice"] and _spelled(plan["advice"])}


def _report(result: "Result", c: str, as_json: bool, verbose: bool) -> None:
    if as_json:
        found = result.to_dict()
        click.echo(json.dumps({**found, "plan": _plan_dict(found["plan"])}))
    else:
        _print(_spelled(result.plan.table()) + "\n\n" if verbose else "", _summary(result, c), sep="")


def _summary(result: "Result", c: str) -> str:
    peak = f"{_size(result.peak_host_bytes)} of {_size(result.plan.budget.host)} host memory"
    if result.peak_device_bytes and result.plan.budget.device:
        peak += f", {_size(result.peak_device_bytes)} of {_size(result.plan.budget.device)} device memory"
    operands = f"{result.m}×{result.k} · {result.k}×{result.n} {result.dtype}"
    copies = "".join(
        f"\nrechunked {copy.name} first: {copy.seconds:.2f} s, read {_size(copy.bytes_read)}, "
        f"wrote {_size(copy.bytes_written)}"
        for copy in result.rechunked
    )
    return (
        f"{url(c)}: {result.m}×{result.n} {result.out_dtype} = {operands}\n"
        f"{result.seconds:.2f} s, {_rate(result.tflops * 1e12)} ({result.kernel} on {result.device})\n"
        f"read {_size(result.bytes_read)}, wrote {_size(result.bytes_written)}, peak {peak}{copies}"
        + ("\nchecked: every block of C is the product, to rounding" if result.verified else "")
    )


@contextmanager
def _bar(wanted: bool | None) -> Any:
    """A progress callback, and the bar it moves: percent, rate, bytes, time left."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[moved]}"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),  # the bar alone gives way
        TextColumn("left"),
    )
    console = Console(stderr=True, force_terminal=wanted)
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=1.0, rate="", moved="")

        def report(fraction: float, plan: "Plan", trace: Any) -> None:
            seconds = shown.tasks[task].elapsed or 0
            flops = plan.flops * fraction / seconds if seconds else 0.0
            (done, unit), (whole, last) = (
                _size(nbytes).split() for nbytes in (trace.bytes["read"], plan.bytes_read)
            )
            of = f"of {float(whole):.3g} {last}"
            moved = f"read {float(done):.3g} {of if unit == last else f'{unit} {of}'}"
            shown.update(task, completed=fraction, rate=_rate(flops), moved=moved)

        yield report


def main(args: Sequence[str] | None = None) -> None:
    """The entry point; `args` are those of the process unless given. Exit status: 0 done, 1 failed while
    running, 2 bad input, 3 verification failed, 130 interrupted, 143 terminated."""
    args = sys.argv[1:] if args is None else args
    verbose = "-v" in args or "--verbose" in args
    if not (verbose or sys.warnoptions):
        warnings.simplefilter("ignore")  # what libraries warn of is no matter of the user's
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # nor what became of zarr's tasks
    try:
        with _signals():
            _main(args, verbose)
    except SystemExit as end:
        _leave(end.code)
        raise


AGAIN = "OOC_GEMM_AGAIN"
"""In the environment of a process that goes on for one whose GPU failed."""


class _Terminated(BaseException):
    """SIGTERM has come."""


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does. While it stops, which is a matter of seconds, further signals
    change nothing: threads are waited for, and files removed. What the process was started to ignore it
    ignores."""
    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True
        error = sys.exc_info()[1]
        while error and not isinstance(error, KeyboardInterrupt | _Terminated):
            error = error.__context__
        if error is None:
            raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    before = {}
    if threading.current_thread() is threading.main_thread():
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        before = {one: handler for one, handler in usual.items() if signal.getsignal(one) == handler}
    for one in before:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_IGN if stopped else handler)


def _leave(code: Any) -> None:
    """End the process here and now where a thread hangs in a store that never answers: it would be waited
    for. All threads of ours have ended before, and their files are gone."""
    answers = sys.modules.get("ooc_gemm.storage.io.answers")
    if answers is not None and answers.abandoned.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


ADDRESS_SPACE, FOR_EACH_CORE = 1 << 30, 64 << 20
"""Bytes of address space that libraries, and their threads, need to start (with 2 cores, 0.8 GiB is too
little, 1.2 GiB is enough)."""


def _check_address_space() -> None:
    """Refuse where a limit on address space (`ulimit -v`) would make NumPy's BLAS end the process while it is
    imported. Raises InputError."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    least = ADDRESS_SPACE + FOR_EACH_CORE * len(os.sched_getaffinity(0))
    if "numpy" not in sys.modules and limit != resource.RLIM_INFINITY and limit < least:
        raise InputError(
            f"the address space of this process is limited to {limit >> 20} MiB, and its libraries need "
            f"{least >> 20}; raise that limit (ulimit -v), and limit memory with memory_limit instead"
        )


def _main(args: Sequence[str], verbose: bool) -> None:
    """Run a command; say how it ended."""
    try:
        _check_address_space()
        sys.exit(cli.main(args, prog_name="ooc-gemm", standalone_mode=False) or 0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        said = StringIO()
        error.show(said)
        click.echo(redacted(said.getvalue()), nl=False, err=True)  # it quotes arguments
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort, _Terminated) as error:
        logging.disable()  # of asyncio, which tells of every task that is dropped
        what, code = ("Terminated", 143) if isinstance(error, _Terminated) else ("Interrupted", 130)
        _notes(error)
        click.echo(f"{what}: a C that was begun stays unfinished; run again with --resume to go on", err=True)
        sys.exit(code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if verbose:
            click.echo(redacted(traceback.format_exc()), err=True)
        if isinstance(error, DeviceLostError):
            _in_another_process(args, error)
        _notes(error)
        text = f"{type(error).__name__}: {error} (-v shows where)"
        if isinstance(error, Error):
            text = _spelled(str(error))
        elif no_memory(error):
            text = _spelled(NO_MEMORY)
        click.echo(f"Error: {redacted(text)}", err=True)
        codes = (InputError, 2), (BudgetError, 2), (VerificationError, 3), (Exception, 1)
        sys.exit(next(code for kind, code in codes if isinstance(error, kind)))


def _notes(error: BaseException) -> None:
    """What was noted of an error, or of its cause, on its way: what lies where now."""
    found: BaseException | None = error
    while found is not None:
        for text in getattr(found, "__notes__", ()):
            _note(redacted(text))
        found = found.__cause__


def _in_another_process(args: Sequence[str], error: DeviceLostError) -> None:
    """Go on, once, on the GPUs that answer there: a kernel that fails takes CUDA from its whole process.
    Returns where that cannot be."""
    from ..devices.cuda.device import answering

    if error.options is None or AGAIN in os.environ:
        return
    if left := ",".join(map(str, answering(error.indices))):
        _note(f"{str(error).partition(';')[0]}; it goes on on cuda:{left} in another process")
        sys.stdout.flush()
        sys.stderr.flush()
        more = ["--device", f"cuda:{left}", *(f"--{name}" for name in error.options or ())]
        command = [sys.executable, "-m", "ooc_gemm.cli", *args, *more]
        os.execve(sys.executable, command, os.environ | {AGAIN: "1"})
