"""Options that several commands have."""

from collections.abc import Callable
from typing import Any

import click

from .types import Number, Pair


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator that adds several options."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


memory = click.option(
    "-M",
    "--memory-limit",
    metavar="SIZE",
    help="Most host memory that the process may hold, such as 512MiB.  [default: 60 % of what is free]",
)
operands = together(
    click.option("--transpose-a", is_flag=True, help="Use Aᵀ."),
    click.option("--transpose-b", is_flag=True, help="Use Bᵀ."),
    click.option("--adjoint-a", is_flag=True, help="Use Aᴴ, the conjugate transpose."),
    click.option("--adjoint-b", is_flag=True, help="Use Bᴴ."),
)
checked_operands = together(
    click.option(
        "--transpose-a/--no-transpose-a",
        default=None,
        help="Use Aᵀ, or A.  [default: as C records]",
    ),
    click.option("--transpose-b/--no-transpose-b", default=None, help="Use Bᵀ, or B."),
    click.option("--adjoint-a/--no-adjoint-a", default=None, help="Use Aᴴ, the conjugate transpose, or A."),
    click.option("--adjoint-b/--no-adjoint-b", default=None, help="Use Bᴴ, or B."),
)
storage = together(
    click.option(
        "--chunks",
        type=Pair(),
        help="Chunk rows and columns of the new array.  [default: near 16 MiB]",
    ),
    click.option(
        "--shards",
        type=Pair(),
        help="Shard rows and columns of the new array: multiples of the chunks.",
    ),
    click.option(
        "--compressor",
        metavar="none|zstd[:LEVEL]|blosc",
        help="Codec of the new array.  [default: none]",
    ),
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
verbose = click.option("-v", "--verbose", is_flag=True, help="Print more, and tracebacks of errors.")
matrices = together(
    memory,
    click.option(
        "-d",
        "--device",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="Device to compute on: auto, cpu, cuda, cuda:N, cuda:0,1 or cuda:all.",
    ),
    click.option(
        "-D",
        "--device-memory-limit",
        metavar="SIZE",
        help="Most memory of each device.  [default: 90 % of free]",
    ),
    click.option("--alpha", type=Number(), help="α.  [default: 1]"),
    click.option("--beta", type=Number(), help="β. C must exist unless β is 0.  [default: 0]"),
    click.option(
        "--precision",
        type=click.Choice(["highest", "high", "medium"]),
        default="highest",
        show_default=True,
        help="Least accuracy of float32 products: medium allows TF32; high is computed as highest.",
    ),
    click.option(
        "--kernel",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="Kernel to use: auto, blas, cublas, or one that `bench kernels --list` shows.",
    ),
    click.option(
        "--out-dtype",
        metavar="DTYPE",
        help="Type of C.  [default: NumPy's promotion; int32 for 8-bit integers, int64 for others]",
    ),
    storage,
    click.option(
        "--rechunk", is_flag=True, help="First copy A or B to better chunks, beside C, where that saves time."
    ),
    click.option("--verify", is_flag=True, help="Check every block of C while it is on the device."),
)
problem = together(operands, matrices)
running = together(
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
        "those it was begun with. A C that is already the result is left as it is.",
    ),
    click.option(
        "--trace", metavar="FILE", help="Write a timeline of all stages, for Perfetto or chrome://tracing."
    ),
    click.option(
        "-P/-Q",
        "--progress/--no-progress",
        default=None,
        help="Show a progress bar on standard error.  [default: on a terminal]",
    ),
    as_json,
    verbose,
)


def from_report(text: str) -> Callable[[Any], Any]:
    """The option that shows an earlier report and measures nothing. `text`: its help."""
    return click.option("--from", "source", type=click.Path(exists=True, dir_okay=False), help=text)
