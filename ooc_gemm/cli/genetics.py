"""The commands for matrices of relations between samples, from their genotypes: grm and king."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..support.redact import url
from . import options
from .cluster import one_process
from .covariance import computed
from .group import CONTEXT, cli
from .show import note, report_plan
from .types import Address

if TYPE_CHECKING:
    from ..planning.plan import Plan

genotypes = options.together(
    click.argument("g", type=Address()),
    click.argument("c", type=Address()),
    click.option(
        "--samples",
        type=click.IntRange(0, 1),
        help="Take this axis of G for the samples: 1 if G is variants × samples, 0 if it is samples × "
        "variants.  [default: what the names of its dimensions say, else 1]",
    ),
    click.option(
        "--missing",
        type=float,
        default=-1,
        show_default=True,
        metavar="VALUE",
        help="Take genotypes of this value, which may be nan, for missing.",
    ),
)


@cli.command(context_settings=CONTEXT, short_help="Compute the genetic relationship matrix of samples.")
@genotypes
@click.option(
    "--method",
    type=click.Choice(["gcta", "cov", "vanraden"]),
    default="gcta",
    show_default=True,
    help="Divide variants by their standard deviation (gcta), or not (cov), or sums by the sum of 2p(1 − p).",
)
@click.option(
    "--meanimpute/--no-meanimpute",
    default=None,
    help="Take the mean of its variant for a missing genotype, or count variants that two samples share.  "
    "[default: count; for vanraden: take the mean]",
)
@click.option(
    "--maf",
    type=float,
    default=0.0,
    metavar="P",
    help="Leave out variants whose minor allele is less frequent.  [default: 0]",
)
@options.device_memory
@options.plans
@options.shared_by_statistics
@options.scheduler
def grm(g: str, c: str, plans: bool, **given: Any) -> None:
    """Compute C, the genetic relationship matrix of the samples in G, as plink2 --make-rel does.

    G holds numbers of copies of an allele, 0 to 2. Or it is a group of VCF Zarr (bio2zarr, sgkit): then C is
    a group, too, with the matrix stat_genomic_relationship and the names of samples.
    """
    from ..statistics.relationship import grm, planned

    if plans:
        _show_plan(planned, g, given)
    else:
        computed(grm, g, c, given)


@cli.command(context_settings=CONTEXT, short_help="Compute the KING-robust kinship coefficients of samples.")
@genotypes
@options.plans
@options.shared_by_statistics
def king(g: str, c: str, plans: bool, **given: Any) -> None:
    """Compute C, the KING-robust kinship coefficients of the samples in G, as plink2 --make-king does.

    G holds 0, 1 or 2 copies of an allele, as integers of 8 bits. Or it is a group of VCF Zarr (bio2zarr,
    sgkit): then C is a group, too, with the matrix stat_king_kinship and the names of samples.
    """
    from ..statistics.kinship import king, planned

    if plans:
        _show_plan(planned, g, given)
        note(f"{url(g)} is read once before that, and another product is made if a genotype is missing")
    else:
        computed(king, g, c, given)


def _show_plan(planned: Callable[..., "Plan"], g: str, given: dict[str, Any]) -> None:
    """Show what a command would do."""
    one_process(given.pop("scheduler", None), "plan")
    others = ("force", "resume", "progress", "as_json", "verbose")
    kept = {name: value for name, value in given.items() if name not in others}
    report_plan(lambda: planned(g, notice=note, **kept), given["as_json"])
