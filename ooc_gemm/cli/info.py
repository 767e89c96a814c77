"""The command that shows devices, memory and rates: info."""

import json

import click

from . import options
from .group import CONTEXT, cli
from .show import console, flat, note, status
from .types import FOLDER


@cli.command(context_settings=CONTEXT)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=FOLDER)
@click.option("--measure", is_flag=True, help="Measure rates, and remember them.")
@options.as_json
@options.verbose
def info(folders: tuple[str, ...], measure: bool, as_json: bool, verbose: bool) -> None:
    """Devices, memory, and the rates that plans are made with.

    --measure finds them: how fast each device multiplies and copies, and how fast the file systems of the
    FOLDERs (the current one unless given) are read and written by the engine's threads. That takes some ten
    seconds a device, writes up to 1 GiB into each folder and removes it. Rates are remembered for each model
    of device and each file system; without them a plan assumes the usual ones, and says so.
    """
    from ..bench import info as found_here

    if folders and not measure:
        raise click.UsageError("FOLDERs are measured; add --measure.")
    if measure:
        with status() as progress:
            unused = found_here.measure(folders or (".",), progress)
        for sentence in unused:
            note(sentence)
    found = found_here.collect()
    if as_json:
        click.echo(json.dumps(found))
        return
    from rich.markup import escape
    from rich.table import Table

    from ..bench.figures import rates_tables

    rates = found.pop("rates")
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in flat(found):
        table.add_row(key, escape(value))
    out = console()
    out.print(table)
    out.print()
    for part in rates_tables(rates):
        out.print(part)
    if not rates:
        out.print("rates not measured: ooc-gemm info --measure")
