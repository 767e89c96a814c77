"""The commands that compare rows: topk and threshold."""

from typing import TYPE_CHECKING, Any

import click

from ..support.redact import url
from . import options
from .group import CONTEXT, cli
from .progress import progress_bar
from .show import note, report_plan, report_planned, size
from .types import Address

if TYPE_CHECKING:
    from ..statistics.neighbours import Neighbours
    from ..statistics.threshold import Threshold


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
@click.option(
    "--verify",
    is_flag=True,
    help="Check some rows of the result with all their scores, in one more pass over B.",
)
@options.reducing
def topk(
    arrays: tuple[str, ...],
    plans: bool,
    progress: bool | None,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Find the k nearest rows of B for each row of A; without B, among the other rows of A.

    OUT is a Zarr group with the arrays `indices` and `values`, best first. The matrix of all scores is never
    stored.
    """
    from ..statistics.neighbours import planned
    from ..statistics.neighbours import topk as find

    a, b, out = _named(arrays)
    if plans:
        report_plan(lambda: planned(a, b, **_without(given, "force", "resume")), as_json)
        return
    with progress_bar(progress) as report:
        found = find(a, b, out, progress=report, notice=note, **given)
    what = f"{found.k} nearest of {found.shape[1]} rows by {found.metric} for each of {found.shape[0]}"
    report_planned(found, _summary(found, out, what), as_json, verbose)


@cli.command(
    context_settings=CONTEXT, short_help="Find the pairs of rows of A and B whose scores reach a value."
)
@click.argument("arrays", type=Address(), nargs=-1, required=True, metavar="A [B] OUT")
@click.option("--least", type=float, required=True, metavar="X", help="Keep scores of at least this.")
@click.option(
    "--metric",
    type=click.Choice(["cosine", "correlation", "dot"]),
    default="cosine",
    show_default=True,
    help="Score two rows by their cosine, correlation coefficient or dot product.",
)
@click.option("--absolute", is_flag=True, help="Compare the scores without their signs.")
@click.option("--include-self", is_flag=True, help="Without B: keep the score of a row with itself, too.")
@options.reducing
def threshold(
    arrays: tuple[str, ...],
    plans: bool,
    progress: bool | None,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Find the pairs of rows of A and B whose scores reach a value; without B, pairs of rows of A.

    OUT is a sparse matrix in a Zarr group, in compressed rows as anndata stores it. The matrix of all scores
    is never stored.
    """
    from ..statistics.threshold import planned
    from ..statistics.threshold import threshold as find

    a, b, out = _named(arrays)
    if plans:
        report_plan(lambda: planned(a, b, **_without(given, "force", "resume")), as_json)
        return
    with progress_bar(progress) as report:
        found = find(a, b, out, progress=report, notice=note, **given)
    (m, n), sign = found.shape, "±" if given["absolute"] else ""
    what = f"{found.count} of {m}×{n} pairs of rows reach {sign}{found.least:g} by {found.metric}"
    report_planned(found, _summary(found, out, what), as_json, verbose)


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the options but those of these names."""
    return {name: value for name, value in given.items() if name not in names}


def _named(arrays: tuple[str, ...]) -> tuple[str, str | None, str]:
    """Return A, B if there is one, and OUT."""
    if len(arrays) not in (2, 3):
        raise click.UsageError("Give A and OUT, or A, B and OUT.")
    return arrays[0], arrays[1] if len(arrays) == 3 else None, arrays[-1]


def _summary(found: "Neighbours | Threshold", out: str, what: str) -> str:
    """Return what was found, and what that took, in a few lines."""
    peak = f"{size(found.peak_host_bytes)} of {size(found.plan.budget.host)} host memory"
    return (
        f"{url(out)}: {what}\n"
        f"{found.seconds:.2f} s ({found.kernel} on {found.device})\n"
        f"read {size(found.bytes_read)}, wrote {size(found.bytes_written)}, peak {peak}"
    )
