"""The commands that check a product and make inputs: verify and random."""

import json
from typing import Any

import click

from ..support.redact import url
from . import options
from .group import CONTEXT, cli
from .show import rows_are, size, write
from .types import Number, Pair


@cli.command(context_settings=CONTEXT)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@options.memory
@options.checked_operands
@click.option("--alpha", type=Number(), help="α.  [default: what C's attributes record, else 1]")
@click.option("--beta", type=Number(), help="β; needs --old unless it is 0.  [default: as recorded, else 0]")
@click.option("--old", metavar="PATH", help="C as it was before, where β is not 0.")
@click.option(
    "--rounds", default=2, show_default=True, help="Random vectors; each halves the chance to miss an error."
)
@click.option("--seed", type=int, help="For the same vectors again.")
@options.as_json
@options.verbose
def verify(a: str, b: str, c: str, as_json: bool, verbose: bool, **given: Any) -> None:
    """Is C = α·op(A)·op(B) + β·(old C)?  Freivalds' check; reads each array once. Exit status 3 if not.

    α, β and op() are what C's attributes record of the run that made it, unless given.
    """
    from ..run.verify import verify as check

    found = check(a, b, c, **given)
    product = "the product" if found.formula == "A·B" else found.formula
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    elif found.ok:
        count = found.rows_not_finite
        also = f"; {rows_are(count)} NaN or infinite on both sides" if count else ""
        write(f"{url(c)} is {product}, to rounding (worst row at {found.worst:.2g} of its tolerance){also}")
    if not found.ok:
        click.echo(
            f"Error: {url(c)} is not {product}: {rows_are(found.rows_wrong)} wrong, "
            f"the first is row {found.first_wrong} (error {found.worst:.3g} times its tolerance at worst); "
            "compute it again",
            err=True,
        )
        raise click.exceptions.Exit(3)


@cli.command(context_settings=CONTEXT)
@click.argument("out")
@click.option("--shape", type=Pair(), required=True, help="Rows and columns.")
@click.option("--dtype", default="float32", show_default=True)
@click.option(
    "--distribution",
    type=click.Choice(["normal", "uniform"]),
    default="normal",
    show_default=True,
    help="Of floating point; integers are uniform.",
)
@click.option("--seed", default=0, show_default=True)
@options.storage
@options.memory
@click.option(
    "-f", "--force", is_flag=True, help="Replace OUT if it exists; in an object store it is removed first."
)
@options.as_json
@options.verbose
def random(out: str, as_json: bool, verbose: bool, **given: Any) -> None:
    """Write a random array within a memory limit."""
    from ..run.generate import random as generate

    given["compressor"] = given["compressor"] or "none"
    written = generate(out, **given)
    rows, cols = given["shape"]
    if as_json:
        made = {"shape": [rows, cols], "dtype": given["dtype"], "bytes_written": written}
        click.echo(json.dumps(made))
    else:
        write(f"{url(out)}: {rows}×{cols} {given['dtype']}, wrote {size(written)}")
