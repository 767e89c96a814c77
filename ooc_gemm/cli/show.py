"""How results, notices and rates are shown."""

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ..support.redact import url
from .group import cli
from .spelling import for_command_line

if TYPE_CHECKING:
    from ..run.result import Result


def console() -> Any:
    """100 columns where the output is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


@contextmanager
def status() -> Any:
    """Says on a terminal what is being measured."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as shown:
        yield shown.update


def flat(found: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in found.items():
        name = f"{prefix}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            rows += flat(value, f"{name} ")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                rows += flat(item, f"{name[:-1]} {index} ")
        elif key.endswith("_bytes_per_second"):
            rows.append((name.replace(" bytes per second", ""), f"{value / 1e9:.2f} GB/s"))
        elif key.endswith("_bytes"):
            rows.append((name.replace(" bytes", ""), size(value)))
        elif key.endswith("_hertz"):
            rows.append((name.replace(" hertz", ""), f"{value / 1e6:.0f} MHz"))
        elif key.endswith("_flops"):
            rows.append((name.replace(" flops", ""), rate(value)))
        else:
            rows.append((name, str(value)))
    return rows


def rows_are(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def size(nbytes: int) -> str:
    from ..support.memory import spelled_size

    return spelled_size(nbytes)


def rate(flops: float) -> str:
    """Floating-point operations a second, in the unit that suits."""
    scale, unit = next((pair for pair in ((1e12, "T"), (1e9, "G")) if flops >= 0.9995 * pair[0]), (1e6, "M"))
    return f"{flops / scale:.3g} {unit}FLOP/s"


def write(*parts: str, sep: str = " ") -> None:
    click.echo(sep.join(parts))


def note(text: str) -> None:
    """Above the bar where there is one: that knows of what is printed, but not of `click.echo`."""
    print(f"Note: {spelled(text)}", file=sys.stderr)


def spelled(text: str) -> str:
    """A message with the options of the command line in the place of Python's arguments."""
    with_arguments = ("multiply", "gram", "verify", "random")
    found = [param for name in with_arguments for param in cli.commands[name].params]
    options = {param.name: max(param.opts, key=len) for param in found if isinstance(param, click.Option)}
    return for_command_line(text, {name: option for name, option in options.items() if name})


def plan_dict(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan as JSON types, whose advice names options."""
    return {**plan, "advice": plan["advice"] and spelled(plan["advice"])}


def report_result(result: "Result", c: str, as_json: bool, verbose: bool) -> None:
    if as_json:
        found = result.to_dict()
        click.echo(json.dumps({**found, "plan": plan_dict(found["plan"])}))
    else:
        write(spelled(result.plan.table()) + "\n\n" if verbose else "", _summary(result, c), sep="")


def _summary(result: "Result", c: str) -> str:
    peak = f"{size(result.peak_host_bytes)} of {size(result.plan.budget.host)} host memory"
    if result.peak_device_bytes and result.plan.budget.device:
        peak += f", {size(result.peak_device_bytes)} of {size(result.plan.budget.device)} device memory"
    operands = f"{result.m}×{result.k} · {result.k}×{result.n} {result.dtype}"
    copies = "".join(
        f"\nrechunked {copy.name} first: {copy.seconds:.2f} s, read {size(copy.bytes_read)}, "
        f"wrote {size(copy.bytes_written)}"
        for copy in result.rechunked
    )
    return (
        f"{url(c)}: {result.m}×{result.n} {result.out_dtype} = {operands}\n"
        f"{result.seconds:.2f} s, {rate(result.tflops * 1e12)} ({result.kernel} on {result.device})\n"
        f"read {size(result.bytes_read)}, wrote {size(result.bytes_written)}, peak {peak}{copies}"
        + ("\nchecked: every block of C is the product, to rounding" if result.verified else "")
    )
