"""The command that fits a linear model: lstsq."""

import json
from typing import Any

import click

from ..support.redact import url
from . import options
from .cluster import on_cluster, one_process
from .group import CONTEXT, cli
from .progress import share_bar
from .reports import reported
from .show import moved, note, report_plan, write
from .types import Address


@cli.command(context_settings=CONTEXT, short_help="Fit a linear model of Y in X by least squares.")
@click.argument("x", type=Address())
@click.argument("y", type=Address())
@click.argument("out", type=Address())
@click.option("--ridge", default=0.0, show_default=True, help="Add this to the diagonal of Xᵀ·X.")
@click.option("--intercept", is_flag=True, help="Fit a constant beside the columns of X.")
@options.plans
@options.memory
@options.replaces
@reported()
@options.progress
@options.as_json
@options.verbose
@options.scheduler
def lstsq(
    x: str,
    y: str,
    out: str,
    plans: bool,
    scheduler: str | None,
    progress: bool | None,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Fit Y by X·W: write to OUT the coefficients W (columns of X × columns of Y) that minimise ‖X·W − Y‖².

    The normal equations are made in one pass over X, in float64. Y may have one dimension.
    """
    from ..statistics.regression import lstsq as fitted
    from ..statistics.regression import planned

    if plans:
        one_process(scheduler, "plan")
        kept = {name: value for name, value in given.items() if name != "force"}
        report_plan(lambda: planned(x, y, out, notice=note, **kept), as_json)
        return
    with on_cluster(scheduler, given), share_bar(progress) as report:
        found = fitted(x, y, out, progress=report, notice=note, **given)
    if as_json:
        click.echo(json.dumps(found.to_dict()))
        return
    values = found.to_dict()["intercept"]
    constants = ", ".join(f"{value:.6g}" for value in values[:8])
    more = ", …" if len(values) > 8 else ""
    said = f"; intercept {constants}{more}" if given["intercept"] else ""
    write(f"{url(out)}: coefficients, condition number {found.condition:.3g}{said}")
    write(f"{found.seconds:.2f} s: {moved(found)}")
