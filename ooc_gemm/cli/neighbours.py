"""The commands that compare rows: topk and threshold."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..support.redact import url
from . import options
from .cluster import on_cluster, one_process
from .group import CONTEXT, cli
from .progress import progress_bar
from .show import note, report_plan, report_planned, size
from .types import Address

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..statistics.neighbours import Neighbours
    from ..statistics.threshold import Threshold

checked = click.option(
    "--verify",
    is_flag=True,
    help="Check some rows of the result with all their scores, in one more pass over B.",
)


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
@checked
@options.reducing
@options.scheduler
def topk(arrays: tuple[str, ...], **given: Any) -> None:
    """Find the k nearest rows of B for each row of A; without B, among the other rows of A.

    OUT is a Zarr group with the arrays `indices` and `values`, best first. The matrix of all scores is never
    stored.
    """
    from ..statistics import neighbours

    def what(found: "Neighbours") -> str:
        m, n = found.shape
        return f"{found.k} nearest of {n} rows by {found.metric} for each of {m}"

    _compare(arrays, neighbours.topk, neighbours.planned, what, **given)


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
@checked
@options.reducing
@options.scheduler
def threshold(arrays: tuple[str, ...], **given: Any) -> None:
    """Find the pairs of rows of A and B whose scores reach a value; without B, pairs of rows of A.

    OUT is a sparse matrix in a Zarr group, in compressed rows as anndata stores it. The matrix of all scores
    is never stored.
    """
    from ..statistics import threshold as pairs

    def what(found: "Threshold") -> str:
        (m, n), sign = found.shape, "±" if given["absolute"] else ""
        return f"{found.count} of {m}×{n} pairs of rows reach {sign}{found.least:g} by {found.metric}"

    _compare(arrays, pairs.threshold, pairs.planned, what, **given)


def _compare(
    arrays: tuple[str, ...],
    find: Callable[..., Any],
    planned: Callable[..., "Plan"],
    what: Callable[[Any], str],
    plans: bool,
    progress: bool | None,
    as_json: bool,
    verbose: bool,
    scheduler: str | None = None,
    **given: Any,
) -> None:
    """Carry out a command, or show its plan. `find`, `planned`: functions of Python. `what`: says what was
    found. `given`: options that the functions take, too."""
    a, b, out = _named(arrays)
    if plans:
        one_process(scheduler, "plan")
        asked = {name: value for name, value in given.items() if name not in ("force", "resume")}
        report_plan(lambda: planned(a, b, notice=note, **asked), as_json)
        return
    with on_cluster(scheduler, given), progress_bar(progress) as report:
        found = find(a, b, out, progress=report, notice=note, **given)
    report_planned(found, _summary(found, out, what(found)), as_json, verbose)


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
