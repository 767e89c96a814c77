"""The commands for matrices of relations between variables: cov and corrcoef."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..support.redact import url
from . import options
from .cluster import on_cluster, one_process
from .group import CONTEXT, cli
from .progress import progress_bar
from .show import note, report_plan, report_result
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
@options.plans
@options.statistic
@options.scheduler
def cov(x: str, c: str, plans: bool, **given: Any) -> None:
    """Compute C, the covariance matrix of the variables in X, as numpy.cov defines it.

    X is read twice, and never centred in a copy. Nothing is lost where means are large beside deviations.
    """
    from ..statistics.covariance import cov, lost_degrees

    if plans:
        _show_plan(x, lost_degrees(given["bias"], given["ddof"]), given)
    else:
        computed(cov, x, c, given)


@cli.command(
    context_settings=CONTEXT, short_help="Compute the correlation coefficients of the variables in X."
)
@click.argument("x", type=Address())
@click.argument("c", type=Address())
@rowvar
@options.plans
@options.statistic
@options.scheduler
def corrcoef(x: str, c: str, plans: bool, **given: Any) -> None:
    """Compute C, the correlation coefficients of the variables in X, as numpy.corrcoef defines them.

    Rows and columns of variables that are constant are NaN.
    """
    from ..statistics.covariance import corrcoef

    if plans:
        _show_plan(x, None, given)
    else:
        computed(corrcoef, x, c, given)


def _show_plan(x: str, ddof: int | None, given: dict[str, Any]) -> None:
    """Show what `cov`, or `corrcoef` where `ddof` is None, would do after the pass that finds the means."""
    from ..run.observer import Observer
    from ..run.request import Operand, Request
    from ..statistics.covariance import planned

    one_process(given.pop("scheduler"), "plan")
    rowvar, as_json = given["rowvar"], given["as_json"]
    others = ("rowvar", "bias", "ddof", "force", "resume", "progress", "as_json", "verbose")
    kept = {name: value for name, value in given.items() if name not in others}
    request = Request(Operand(x), Operand(x), **kept)
    report_plan(lambda: planned(request, rowvar, ddof, Observer(notice=note)), as_json)
    note(f"{url(x)} is read once before that, to find the means")


def computed(function: "Callable[..., Result]", x: str, c: str, given: dict[str, Any]) -> None:
    """Compute a statistic behind a progress bar, and show its result."""
    shown, as_json, verbose = (given.pop(name) for name in ("progress", "as_json", "verbose"))
    with on_cluster(given.pop("scheduler", None), given), progress_bar(shown) as report:
        result = function(x, c, progress=report, notice=note, **given)
    report_result(result, c, as_json, verbose)
