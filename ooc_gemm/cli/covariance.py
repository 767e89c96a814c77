"""The commands for matrices of relations between variables, or samples: cov, corrcoef and grm."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from . import options
from .group import CONTEXT, cli
from .progress import progress_bar
from .show import note, report_result
from .types import Address

if TYPE_CHECKING:
    from ..run.result import Result

rowvar = click.option(
    "--rowvar/--no-rowvar",
    default=True,
    show_default=True,
    help="Take each row of X for a variable, or each column.",
)


@cli.command(context_settings=CONTEXT, short_help="Compute the covariance matrix of the variables in X.")
@click.argument("x", type=Address())
@click.argument("c", type=Address())
@rowvar
@click.option("--bias", is_flag=True, help="Divide by the number of observations N, not by N − 1.")
@click.option("--ddof", type=int, metavar="N", help="Divide by the number of observations less this.")
@options.statistic
def cov(x: str, c: str, **given: Any) -> None:
    """Compute C, the covariance matrix of the variables in X, as numpy.cov defines it.

    X is read twice, and never centred in a copy. Nothing is lost where means are large beside deviations.
    """
    from ..statistics.covariance import cov

    _show(cov, x, c, given)


@cli.command(
    context_settings=CONTEXT, short_help="Compute the correlation coefficients of the variables in X."
)
@click.argument("x", type=Address())
@click.argument("c", type=Address())
@rowvar
@options.statistic
def corrcoef(x: str, c: str, **given: Any) -> None:
    """Compute C, the correlation coefficients of the variables in X, as numpy.corrcoef defines them.

    Rows and columns of variables that are constant are NaN.
    """
    from ..statistics.covariance import corrcoef

    _show(corrcoef, x, c, given)


@cli.command(context_settings=CONTEXT, short_help="Compute the genetic relationship matrix of samples.")
@click.argument("g", type=Address())
@click.argument("c", type=Address())
@click.option(
    "--samples",
    type=click.IntRange(0, 1),
    help="Take this axis of G for the samples: 1 if G is variants × samples, 0 if it is samples × variants.  "
    "[default: what the names of its dimensions say, else 1]",
)
@click.option(
    "--missing",
    type=float,
    default=-1,
    show_default=True,
    metavar="VALUE",
    help="Take genotypes of this value, which may be nan, for missing.",
)
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
@options.shared_by_statistics
def grm(g: str, c: str, **given: Any) -> None:
    """Compute C, the genetic relationship matrix of the samples in G, as plink2 --make-rel does.

    G holds numbers of copies of an allele, 0 to 2. Or it is a group of VCF Zarr (bio2zarr, sgkit): then C is
    a group, too, with the matrix stat_genomic_relationship and the names of samples.
    """
    from ..statistics.relationship import grm

    _show(grm, g, c, given)


def _show(function: "Callable[..., Result]", x: str, c: str, given: dict[str, Any]) -> None:
    """Compute a statistic behind a progress bar, and show its result."""
    shown, as_json, verbose = (given.pop(name) for name in ("progress", "as_json", "verbose"))
    with progress_bar(shown) as report:
        result = function(x, c, progress=report, notice=note, **given)
    report_result(result, c, as_json, verbose)
