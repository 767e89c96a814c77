"""The commands that decompose an array: pca and svd."""

import json
from typing import Any

import click

from ..devices import begin
from ..support.meter import Unfinished
from ..support.redact import url
from . import options
from .cluster import on_cluster, one_process
from .group import CONTEXT, cli
from .progress import share_bar
from .reports import reported
from .show import moved, note, report_plan, write
from .types import Address

decomposed = options.together(
    click.argument("x", type=Address()),
    click.argument("out", type=Address()),
    click.option("-k", "--components", type=int, required=True, metavar="K", help="Find this many of them."),
    click.option(
        "--iterations",
        default=4,
        show_default=True,
        help="Make this many power iterations. Each reads X once, and separates values that are close.",
    ),
    click.option(
        "--seed", default=0, show_default=True, help="Draw the first random vectors from this seed."
    ),
    options.memory,
    click.option(
        "-d",
        "--device",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="Compute on auto, cpu, cuda or cuda:N.",
    ),
    options.device_memory,
    options.plans,
    options.replaces,
    reported(),
    options.progress,
    options.as_json,
    options.verbose,
    options.scheduler,
)


@cli.command(context_settings=CONTEXT, short_help="Find the principal components of X.")
@decomposed
@click.option(
    "--save-components",
    type=Address(),
    metavar="PATH",
    help="Write the components (K × columns of X) to this path.",
)
def pca(
    x: str,
    out: str,
    save_components: str | None,
    scheduler: str | None,
    plans: bool,
    progress: bool | None,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Find the principal components of X, whose rows are observations, and write their scores (rows of X × K)
    to OUT.

    Columns are centred and not scaled. The method is randomized subspace iteration, which reads X once for
    each iteration, and twice more.
    """
    if plans:
        one_process(scheduler, "plan")
        _show_plan(x, out, True, given, as_json)
        return
    if not scheduler:
        begin(given["device"], given["memory_limit"])
    from ..run.rows import check_rows, write_rows
    from ..statistics.components import pca as found_by

    if save_components:
        check_rows(save_components, [x], given["force"], (out,))
    with on_cluster(scheduler, given), share_bar(progress) as report:
        told = Unfinished(report)
        found = found_by(x, scores=out, progress=told, notice=note, **given)
        if save_components:
            write_rows(save_components, found.components, given["force"])
        told.finish()
    ratio = float(found.explained_variance_ratio.sum())
    what = f"scores of {len(found.singular_values)} components, with {ratio:.1%} of the variance"
    _report(found, f"{url(out)}: {what}", as_json)


@cli.command(context_settings=CONTEXT, short_help="Find the largest singular values of X.")
@decomposed
@click.option(
    "--save-vt",
    type=Address(),
    metavar="PATH",
    help="Write the right vectors (K × columns of X) to this path.",
)
def svd(
    x: str,
    out: str,
    save_vt: str | None,
    scheduler: str | None,
    plans: bool,
    progress: bool | None,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Find the K largest singular values of X, and write their left vectors (rows of X × K) to OUT.

    The method is that of pca, without centring.
    """
    if plans:
        one_process(scheduler, "plan")
        _show_plan(x, out, False, given, as_json)
        return
    if not scheduler:
        begin(given["device"], given["memory_limit"])
    from ..run.rows import check_rows, write_rows
    from ..statistics.components import svd as found_by

    if save_vt:
        check_rows(save_vt, [x], given["force"], (out,))
    with on_cluster(scheduler, given), share_bar(progress) as report:
        told = Unfinished(report)
        found = found_by(x, u=out, progress=told, notice=note, **given)
        if save_vt:
            write_rows(save_vt, found.vt, given["force"])
        told.finish()
    values = found.singular_values
    what = f"left vectors of {len(values)} singular values, {values[0]:.6g} to {values[-1]:.6g}"
    _report(found, f"{url(out)}: {what}", as_json)


def _show_plan(x: str, out: str, centred: bool, given: dict[str, Any], as_json: bool) -> None:
    """Show what `pca` (if `centred`), or `svd`, would do."""
    from ..statistics.components import planned

    kept = {name: value for name, value in given.items() if name != "force"}
    report_plan(lambda: planned(x, out, centred=centred, notice=note, **kept), as_json)


def _report(found: Any, said: str, as_json: bool) -> None:
    """Print the result, and the time, bytes and memory that it took."""
    if as_json:
        click.echo(json.dumps(found.to_dict()))
        return
    write(said)
    write(f"{found.seconds:.2f} s, {found.passes} passes: {moved(found)}")
