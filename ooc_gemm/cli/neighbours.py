"""The command that finds nearest neighbours: topk."""

from typing import TYPE_CHECKING, Any

import click

from ..support.redact import url
from . import options
from .group import CONTEXT, cli
from .progress import progress_bar
from .show import note, report_planned, size
from .types import Address

if TYPE_CHECKING:
    from ..statistics.neighbours import Neighbours


@cli.command(context_settings=CONTEXT, short_help="Find the k nearest rows of B for each row of A.")
@click.argument("arrays", type=Address(), nargs=-1, required=True, metavar="A [B] OUT")
@click.option("-k", default=10, show_default=True, help="Find this many neighbours of each row.")
@click.option(
    "--metric",
    type=click.Choice(["cosine", "dot", "sqeuclidean"]),
    default="cosine",
    show_default=True,
    help="Rank by the largest cosine or dot product, or by the smallest squared Euclidean distance.",
)
@click.option("--include-self", is_flag=True, help="Without B: count a row among its own neighbours.")
@click.option("--graph", is_flag=True, help="Also write the graph of neighbours, as anndata stores it.")
@options.memory
@options.device
@options.device_memory
@click.option("-f", "--force", is_flag=True, help="Replace OUT if it exists, when the new one is finished.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue an interrupted run of the same problem. An OUT that is already the result is left as it "
    "is.",
)
@options.progress
@options.as_json
@options.verbose
def topk(arrays: tuple[str, ...], progress: bool | None, as_json: bool, verbose: bool, **given: Any) -> None:
    """Find the k nearest rows of B for each row of A; without B, among the other rows of A.

    OUT is a Zarr group with the arrays `indices` and `values`, best first. The matrix of all scores is never
    stored.
    """
    from ..statistics.neighbours import topk as find

    if len(arrays) not in (2, 3):
        raise click.UsageError("Give A and OUT, or A, B and OUT.")
    a, b, out = arrays[0], arrays[1] if len(arrays) == 3 else None, arrays[-1]
    with progress_bar(progress) as report:
        found = find(a, b, out, progress=report, notice=note, **given)
    report_planned(found, _summary(found, out), as_json, verbose)


def _summary(found: "Neighbours", out: str) -> str:
    """Return what was done, in a few lines."""
    peak = f"{size(found.peak_host_bytes)} of {size(found.plan.budget.host)} host memory"
    return (
        f"{url(out)}: {found.k} nearest of {found.shape[1]} rows by {found.metric} for each of "
        f"{found.shape[0]}\n"
        f"{found.seconds:.2f} s ({found.kernel} on {found.device})\n"
        f"read {size(found.bytes_read)}, wrote {size(found.bytes_written)}, peak {peak}"
    )
