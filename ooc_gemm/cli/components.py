"""The commands that decompose an array: pca and svd."""

import json
from typing import Any

import click

from ..support.redact import url
from . import options
from .group import CONTEXT, cli
from .progress import share_bar
from .show import note, size, write
from .types import Address

decomposed = options.together(
    click.argument("x", type=Address()),
    click.argument("out", type=Address()),
    click.option("-k", "--components", type=int, required=True, metavar="K", help="Find so many."),
    click.option(
        "--iterations",
        default=4,
        show_default=True,
        help="Make so many power iterations. Each reads X once, and separates values that are close.",
    ),
    click.option("--seed", default=0, show_default=True, help="Seed the random vectors to begin with."),
    options.memory,
    click.option(
        "-d",
        "--device",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="Compute on auto or cpu.",
    ),
    options.replaces,
    options.progress,
    options.as_json,
    options.verbose,
)


@cli.command(context_settings=CONTEXT, short_help="Principal components of X; their scores to OUT.")
@decomposed
@click.option(
    "--save-components", type=Address(), metavar="PATH", help="Write the components (K × columns of X) there."
)
def pca(
    x: str,
    out: str,
    save_components: str | None,
    progress: bool | None,
    as_json: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Principal components of X, whose rows are observations; OUT takes their scores (rows of X × K).

    Columns are centred and not scaled. Randomized subspace iteration, which reads X as often as there are
    iterations, and twice more.
    """
    from ..run.rows import check_rows, write_rows
    from ..statistics.components import pca as found_by

    if save_components:
        check_rows(save_components, [x, out], given["force"])
    with share_bar(progress) as report:
        found = found_by(x, scores=out, progress=report, notice=note, **given)
    if save_components:
        write_rows(save_components, found.components, given["force"])
    ratio = float(found.explained_variance_ratio.sum())
    what = f"scores of {len(found.singular_values)} components, with {ratio:.1%} of the variance"
    _report(found, f"{url(out)}: {what}", as_json)


@cli.command(context_settings=CONTEXT, short_help="Largest singular values of X; left vectors to OUT.")
@decomposed
@click.option(
    "--save-vt", type=Address(), metavar="PATH", help="Write the right vectors (K × columns of X) there."
)
def svd(
    x: str, out: str, save_vt: str | None, progress: bool | None, as_json: bool, verbose: bool, **given: Any
) -> None:
    """The K largest singular values of X; their left vectors (rows of X × K) are written to OUT.

    As pca, without centring.
    """
    from ..run.rows import check_rows, write_rows
    from ..statistics.components import svd as found_by

    if save_vt:
        check_rows(save_vt, [x, out], given["force"])
    with share_bar(progress) as report:
        found = found_by(x, u=out, progress=report, notice=note, **given)
    if save_vt:
        write_rows(save_vt, found.vt, given["force"])
    values = found.singular_values
    what = f"left vectors of {len(values)} singular values, {values[0]:.6g} to {values[-1]:.6g}"
    _report(found, f"{url(out)}: {what}", as_json)


def _report(found: Any, said: str, as_json: bool) -> None:
    """Show what was found, and what that took."""
    if as_json:
        click.echo(json.dumps(found.to_dict()))
        return
    write(said)
    write(
        f"{found.seconds:.2f} s, {found.passes} passes: read {size(found.bytes_read)}, "
        f"wrote {size(found.bytes_written)}, peak {size(found.peak_host_bytes)} host memory"
    )
