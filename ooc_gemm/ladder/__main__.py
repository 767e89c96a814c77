"""`python -m ooc_gemm.ladder`: runs rungs of the ladder on the CPU."""

import json
from dataclasses import asdict
from typing import Any

import click

from ..cuda_kernels.catalog import KERNELS
from ..support.errors import DeviceError, InputError
from .experiments import COLUMNS, COUNTS, EXPERIMENTS, roof, table
from .rungs import HOPPER_RUNGS, RUNGS, Outcome, Run, climb

_UNITS = "operations, loads, lines, shared and passes: for each of the m·n·k multiply-adds of the product"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("rungs", nargs=-1)
@click.option("--size", type=int, default=128, show_default=True, help="Multiply N×N matrices.", metavar="N")
@click.option("--m", type=int, help="Set the rows of A and C, instead of --size.")
@click.option("--n", type=int, help="Set the columns of B and C, instead of --size.")
@click.option("--k", type=int, help="Set the columns of A and rows of B, instead of --size.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64", "int32"]),
    default="float32",
    show_default=True,
    help="Multiply elements of this type. Without RUNGS, those that do not take it are left out.",
)
@click.option("--experiment", type=click.Choice(list(EXPERIMENTS)), help="Carry out an experiment instead.")
@click.option(
    "--peak",
    type=float,
    default=67,
    show_default=True,
    help="Draw the roofline for a GPU with this peak, in TFLOP/s (default: float32 of an H200's data sheet).",
)
@click.option(
    "--bandwidth",
    type=float,
    default=4800,
    show_default=True,
    help="Draw the roofline for a GPU whose memory has this bandwidth, in GB/s (default: an H200's).",
)
@click.option("--json", "as_json", is_flag=True, help="Print all counts as JSON.")
def main(rungs: tuple[str, ...], experiment: str | None, as_json: bool, **given: Any) -> None:
    """Run RUNGS of the ladder (kernels/ladder) without a GPU, by default all up to warptile.

    The CUDA kernels are compiled with g++, run on the CPU under sanitizers, and compared with NumPy. The
    table shows how many operations they make, and how often they access memory. Counts are those of the
    source: a compiler may keep a number in a register that the source reads twice.

    The last rungs, warpgroup, ring, producer and clusters, need a Hopper GPU and cannot be emulated.
    """
    try:
        outcomes = climb(EXPERIMENTS[experiment].runs() if experiment else _runs(rungs, **given))
    except (InputError, DeviceError) as error:
        raise SystemExit(_failed(error)) from error
    if as_json:
        click.echo(json.dumps([_record(outcome) for outcome in outcomes], indent=1))
    elif experiment:
        chosen = EXPERIMENTS[experiment]
        click.echo(f"{chosen.question}\n")
        more = {}
        if experiment == "roofline":
            peak, bandwidth = given["peak"], given["bandwidth"]
            rates = (roof(it, peak * 1e12, bandwidth * 1e9) / 1e12 for it in outcomes)
            more["TFLOP/s at most"] = [f"{rate:.3g}" for rate in rates]
        _show(outcomes, chosen.columns, more)
        if more:
            click.echo(
                f"at most: min({peak:g} TFLOP/s, flop/byte × {bandwidth:g} GB/s); caches may give more"
            )
        click.echo(f"\nOn a GPU, this command times it:\n  {chosen.on_a_gpu}")
    else:
        run = outcomes[0].run
        click.echo(f"C {run.m}×{run.n}, k = {run.k}, {run.config.dtype}, on the CPU\n")
        _show(outcomes, ("rung", *COUNTS), {})
        if not rungs:
            click.echo(f"\n{', '.join(HOPPER_RUNGS)}: need a Hopper GPU and cannot be emulated.")
    raise SystemExit(0 if all(outcome.correct for outcome in outcomes) else 3)


def _runs(
    rungs: tuple[str, ...], size: int, m: int | None, n: int | None, k: int | None, dtype: str, **_: Any
) -> list[Run]:
    """The runs that are asked for. Raises InputError."""
    chosen = rungs or [name for name in RUNGS if dtype in KERNELS[name].dtypes]
    m, n, k = (size if extent is None else extent for extent in (m, n, k))
    return [Run.of(name, m, n, k, dtype) for name in chosen]


def _failed(error: Exception) -> int:
    """Show an error; return the exit status, as `ooc-gemm` has it."""
    click.echo(f"Error: {error}", err=True)
    return 2 if isinstance(error, InputError) else 1


def _record(outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    return {
        "rung": run.rung, "dtype": run.config.dtype, "m": run.m, "n": run.n, "k": run.k,
        "config": dict(run.config.macros), **asdict(outcome.counts), "intensity": outcome.intensity,
        "error": outcome.error, "correct": outcome.correct,
    }  # fmt: skip


def _show(outcomes: list[Outcome], columns: tuple[str, ...], more: dict[str, list[str]]) -> None:
    """Print a table, and what its columns mean. `more`: further columns."""
    rows = [[*columns, *more], *table(outcomes, columns)]
    for row, extra in zip(
        rows[1:], zip(*more.values(), strict=True) if more else [()] * len(outcomes), strict=True
    ):
        row += extra
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {"rung", "type", "macros", "NumPy"}
    for row in rows:
        cells = (
            text.ljust(width) if name in left else text.rjust(width)
            for name, text, width in zip(rows[0], row, widths, strict=True)
        )
        click.echo("  ".join(cells).rstrip())
    click.echo()
    for name in columns:
        if name not in ("rung", "N", "NumPy", "type"):
            click.echo(f"{name}: {COLUMNS[name][0]}")
    click.echo(f"{_UNITS}.")


if __name__ == "__main__":
    main(prog_name="python -m ooc_gemm.ladder")
