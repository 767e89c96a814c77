"""The commands that check a product and make inputs: verify and random."""

import json
from typing import Any

import click

from ..support.redact import url
from . import options
from .group import CONTEXT, cli
from .progress import bytes_bar
from .show import complain, note, rows_are, size, write
from .types import Address, Number, Pair


@cli.command(context_settings=CONTEXT, short_help="Check that C = α·op(A)·op(B) + β·(old C).")
@click.argument("a", type=Address())
@click.argument("b", type=Address())
@click.argument("c", type=Address())
@options.memory
@options.checked_operands
@click.option("--alpha", type=Number(), help="Multiply the product by α.  [default: as C records, else 1]")
@click.option(
    "--beta", type=Number(), help="Add β times the old C, which --old names.  [default: as C records, else 0]"
)
@click.option(
    "--old",
    type=Address(),
    metavar="PATH",
    help="Read C as it was before from this path; needed where β is not 0.",
)
@click.option(
    "--rounds",
    default=2,
    show_default=True,
    help="Use this many random vectors; each halves the chance that an error is missed.",
)
@click.option("--seed", type=int, help="Draw the random vectors from this seed.  [default: a new one]")
@options.progress
@options.as_json
@options.verbose
def verify(a: str, b: str, c: str, progress: bool | None, as_json: bool, verbose: bool, **given: Any) -> None:
    """Check that C = α·op(A)·op(B) + β·(old C), by Freivalds' method.

    Each array is read once, and B once more where its columns have very different norms and β is 0. Where α,
    β and op() are not given, those count that C's attributes record of the run that made it. Exit status 3 if
    C is wrong.
    """
    from ..run.verify import verify as check

    with bytes_bar(progress, "read") as report:
        found = check(a, b, c, progress=report, notice=note, **given)
    product = "the product" if found.formula == "A·B" else found.formula
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    elif found.ok:
        count = found.rows_not_finite
        also = f"; {rows_are(count)} NaN or infinite on both sides" if count else ""
        write(f"{url(c)} is {product}, to rounding (worst row at {found.worst:.2g} of its tolerance){also}")
    if not found.ok:
        complain(
            f"Error: {url(c)} is not {product}: {rows_are(found.rows_wrong)} wrong, "
            f"the first is row {found.first_wrong} (error {found.worst:.3g} times its tolerance at worst); "
            "compute it again"
        )
        raise click.exceptions.Exit(3)


@cli.command(context_settings=CONTEXT)
@click.argument("out", type=Address())
@click.option("--shape", type=Pair(), required=True, help="Make an array of M rows and N columns.")
@click.option("--dtype", default="float32", show_default=True, help="Store elements of this type.")
@click.option(
    "--distribution",
    type=click.Choice(["normal", "uniform"]),
    default="normal",
    show_default=True,
    help="Draw floating-point elements from this distribution; integers are uniform.",
)
@click.option("--seed", default=0, show_default=True, help="Draw the random numbers from this seed.")
@options.storage
@options.memory
@options.replaces
@options.progress
@options.as_json
@options.verbose
def random(out: str, progress: bool | None, as_json: bool, verbose: bool, **given: Any) -> None:
    """Write a random array within a memory limit."""
    from ..run.generate import random as generate

    given["compressor"] = given["compressor"] or "none"
    with bytes_bar(progress, "wrote") as report:
        written = generate(out, progress=report, **given)
    rows, cols = given["shape"]
    if as_json:
        made = {"shape": [rows, cols], "dtype": given["dtype"], "bytes_written": written}
        click.echo(json.dumps(made))
    else:
        write(f"{url(out)}: {rows}×{cols} {given['dtype']}, wrote {size(written)}")
