"""The options that several commands have in common."""

from collections.abc import Callable
from typing import Any

import click

from .log import log_file
from .reports import reported
from .stop import Moment, stop_before_option
from .types import Address, Number, Pair


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return one decorator that adds several options."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


memory = click.option(
    "-M",
    "--memory-limit",
    metavar="SIZE",
    help="Hold at most this much host memory, such as 512MiB.  [default: 60 % of what is free]",
)
operands = together(
    click.option("--transpose-a", is_flag=True, help="Multiply with Aᵀ."),
    click.option("--transpose-b", is_flag=True, help="Multiply with Bᵀ."),
    click.option("--adjoint-a", is_flag=True, help="Multiply with Aᴴ, the conjugate transpose."),
    click.option("--adjoint-b", is_flag=True, help="Multiply with Bᴴ."),
)
checked_operands = together(
    click.option(
        "--transpose-a/--no-transpose-a",
        default=None,
        help="Check with Aᵀ, or with A.  [default: as C records]",
    ),
    click.option(
        "--transpose-b/--no-transpose-b",
        default=None,
        help="Check with Bᵀ, or with B.  [default: as C records]",
    ),
    click.option(
        "--adjoint-a/--no-adjoint-a",
        default=None,
        help="Check with Aᴴ, the conjugate transpose, or with A.  [default: as C records]",
    ),
    click.option(
        "--adjoint-b/--no-adjoint-b", default=None, help="Check with Bᴴ, or with B.  [default: as C records]"
    ),
)
storage = together(
    click.option(
        "--chunks",
        type=Pair(),
        help="Give the new array chunks of M rows and N columns.  [default: near 16 MiB]",
    ),
    click.option(
        "--shards",
        type=Pair(),
        help="Give the new array shards of M rows and N columns, which are multiples of the chunks.  "
        "[default: no shards]",
    ),
    click.option(
        "--compressor",
        metavar="none|zstd[:LEVEL]|blosc",
        help="Compress the chunks of the new array.  [default: none]",
    ),
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
verbose = click.option("-v", "--verbose", is_flag=True, help="Print more, and tracebacks of errors.")
device = click.option(
    "-d",
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Compute on auto, cpu, cuda, cuda:N, cuda:0,1 or cuda:all.",
)
device_memory = click.option(
    "-D",
    "--device-memory-limit",
    metavar="SIZE",
    help="Hold at most this much memory of each device.  [default: 90 % of what is free]",
)
precision = click.option(
    "--precision",
    type=click.Choice(["highest", "high", "medium"]),
    default="highest",
    show_default=True,
    help="Compute float32 products at least as accurately: medium allows TF32; high is computed as highest.",
)
verify = click.option("--verify", is_flag=True, help="Check every block of C while it is on the device.")
replacing = together(
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
        help="Continue an interrupted run of the same problem. Options of C that are not given again are "
        "those that it was begun with. A C that is already the result is left as it is.",
    ),
)
progress = together(
    click.option(
        "-P/-Q",
        "--progress/--no-progress",
        default=None,
        help="Show on standard error how far the run is: as a bar on a terminal, elsewhere as a line every "
        "30 s.  [default: show it]",
    ),
    click.option(
        "--log-file",
        type=click.Path(dir_okay=False, writable=True),
        metavar="FILE",
        expose_value=False,
        callback=log_file,
        help="Append what happens to this file, one JSON object a line: the start, the plan, how far the run "
        "is every 30 s, notices, and the end.",
    ),
)
stop_before = click.option(
    "--stop-before",
    type=Moment(),
    metavar="TIME",
    expose_value=False,
    callback=stop_before_option,
    help="Stop in order before this time, with status 143, so that --resume can go on: 2h, 30m, 90s or 1h30m "
    "from now, or 2026-11-24T06:00.",
)
matrices = together(
    memory,
    device,
    device_memory,
    click.option("--alpha", type=Number(), help="Multiply the product by α.  [default: 1]"),
    click.option("--beta", type=Number(), help="Add β times the C that exists.  [default: 0]"),
    precision,
    click.option(
        "--kernel",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="Multiply with this kernel: auto; blas, slices or int8 on the CPU; cublas, or one that "
        "`bench kernels --list` shows, on a GPU.",
    ),
    click.option(
        "--out-dtype",
        metavar="DTYPE",
        help="Store C as this type.  [default: NumPy's promotion; int32 for 8-bit, int64 for other integers]",
    ),
    storage,
    click.option(
        "--rechunk", is_flag=True, help="First copy A or B to better chunks, beside C, where that saves time."
    ),
    verify,
)
problem = together(operands, matrices)
elements = together(
    click.option(
        "--center",
        type=click.Choice(["rows", "columns"]),
        help="Subtract from each element of A the mean of its row, or column, of A as it is stored.",
    ),
    click.option(
        "--scale",
        type=click.Choice(["rows", "columns"]),
        help="Divide each element of A by the standard deviation of its row, or column.",
    ),
    click.option(
        "--missing",
        type=float,
        metavar="VALUE",
        help="Leave elements of A of this value, which may be nan, out of means, and count them as 0 after "
        "that.",
    ),
    click.option(
        "--weights",
        type=Address(),
        metavar="W",
        help="Multiply each place along k, the inner dimension, with a number of the array W.",
    ),
    click.option(
        "--decode-cf",
        is_flag=True,
        help="First decode inputs as their attributes scale_factor, add_offset, _FillValue and missing_value "
        "say.",
    ),
)
scheduler = click.option(
    "--scheduler",
    metavar="ADDRESS|local:N",
    help="Spread the work over the workers of a Dask cluster, each of which may hold the memory limit, or "
    "over N processes on this machine, which share the limit and the cores.",
)
replaces = click.option(
    "-f", "--force", is_flag=True, help="Replace OUT if it exists; in an object store it is removed first."
)
running = together(
    replacing,
    stop_before,
    click.option(
        "--trace",
        type=Address(),
        metavar="FILE",
        help="Write a timeline of all stages, for Perfetto or chrome://tracing.",
    ),
    reported(),
    progress,
    as_json,
    verbose,
)
shared_by_statistics = together(
    memory,
    device,
    click.option(
        "--out-dtype", metavar="DTYPE", help="Store C as this type.  [default: float32 or float64, as of X]"
    ),
    storage,
    verify,
    replacing,
    reported(),
    stop_before,
    progress,
    as_json,
    verbose,
)
triangle = click.option(
    "--triangle",
    type=click.Choice(["lower"]),
    help="Store the lower triangle of C; what is above the diagonal is 0, and chunks there are not written.  "
    "[default: all of C]",
)
plans = click.option(
    "--plan", "plans", is_flag=True, help="Show what would be done, and why; compute and write nothing."
)
statistic = together(precision, shared_by_statistics)
reducing = together(
    plans,
    memory,
    device,
    device_memory,
    click.option(
        "-f", "--force", is_flag=True, help="Replace OUT if it exists, when the new one is finished."
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Continue an interrupted run of the same problem. An OUT that is already the result is left as "
        "it is.",
    ),
    reported(),
    stop_before,
    progress,
    as_json,
    verbose,
)


def from_report(text: str) -> Callable[[Any], Any]:
    """Return the option that shows an earlier report and measures nothing. `text`: its help."""
    return click.option("--from", "source", type=click.Path(exists=True, dir_okay=False), help=text)
