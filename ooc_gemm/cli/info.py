"""The command that shows devices, memory and rates: info."""

import json

import click

from . import options
from .group import CONTEXT, cli
from .show import console, flat, note, spelled, status
from .types import FOLDER


@cli.command(context_settings=CONTEXT)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=FOLDER)
@click.option("--measure", is_flag=True, help="Measure the rates of devices and FOLDERs, and remember them.")
@options.as_json
@options.verbose
def info(folders: tuple[str, ...], measure: bool, as_json: bool, verbose: bool) -> None:
    """Show devices, memory, and the rates that plans are made with.

    --measure finds the rates: how fast each device multiplies and copies, and how fast the engine's threads
    read and write the file systems of the FOLDERs (by default the current folder). It takes about ten seconds
    in all, and writes up to 1 GiB into each folder, which it removes. Rates are remembered for each
    model of device and each file system. A plan without them uses default rates, and says so.
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
    from ..bench.tables import pairs_table, rates_tables

    rates = found.pop("rates")
    out = console()
    out.print(pairs_table([(name, spelled(value)) for name, value in flat(found)]))
    out.print()
    for part in rates_tables(rates):
        out.print(part)
    if not rates:
        out.print("plans use default rates (not measured); measure with `ooc-gemm info --measure`")
