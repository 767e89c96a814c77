"""How results, notices and rates are shown."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..support.errors import BudgetError
from ..support.meter import rate as rate
from ..support.redact import url
from .group import cli
from .spelling import for_command_line

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..planning.stream_plan import StreamPlan
    from ..run.result import Result
    from ..statistics.neighbours import Neighbours
    from ..statistics.threshold import Threshold


def console() -> Any:
    """Return a console as wide as the terminal, and 80 columns where the output is no terminal or a narrower
    one: tables need as many. Brackets and colons in paths are shown as they are."""
    from rich.console import Console

    made = Console(highlight=False, markup=False, emoji=False)
    made.width = max(80, made.width)
    return made


@contextmanager
def status() -> Any:
    """A function that shows on a terminal what is being measured; elsewhere it shows nothing."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as shown:
        yield shown.update


def flat(found: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested values as rows of a name and a text. The ends of keys say what unit is shown."""
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
    """Return `1 row is` or `5 rows are`."""
    return "1 row is" if count == 1 else f"{count} rows are"


def size(nbytes: int) -> str:
    """Return a number of bytes as text, such as `1.50 GiB`."""
    from ..support.memory import spelled_size

    return spelled_size(nbytes)


def write(*parts: str, sep: str = " ") -> None:
    """Print a result on standard output."""
    click.echo(sep.join(parts))


def complain(text: str) -> None:
    """Print an error on standard error, if that can be written."""
    with suppress(OSError):
        click.echo(wrapped(text), err=True)


def wrapped(text: str) -> str:
    """Return a message as it is shown on standard error: a terminal, which would break it within words, gets
    it in lines that fit."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    fit = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(fit, text.splitlines()))


def note(text: str) -> None:
    """Print a notice on standard error, above the progress bar if there is one. (The bar moves for `print`,
    not for `click.echo`.) A full disk behind standard error does not end a run."""
    with suppress(OSError):
        print(wrapped(f"Note: {spelled(text)}"), file=sys.stderr)


def spelled(text: str) -> str:
    """Return a message in which options of the command line replace Python's arguments."""
    statistics = ("cov", "grm", "king", "pca", "svd", "lstsq", "topk", "threshold")
    with_arguments = ("multiply", "gram", "verify", "random", *statistics)
    found = [param for name in with_arguments for param in cli.commands[name].params]
    options = {param.name: max(param.opts, key=len) for param in found if isinstance(param, click.Option)}
    return for_command_line(text, {name: option for name, option in options.items() if name})


def plan_dict(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan as JSON types, with options of the command line in its advice."""
    return {**plan, "advice": spelled(plan["advice"])} if plan.get("advice") else plan


def report_plan(make: "Callable[[], Plan | StreamPlan]", as_json: bool) -> None:
    """Make a plan and print it, as a table or as JSON, which also says if there is none within the limit."""
    try:
        made = make()
    except BudgetError as error:
        if as_json:
            least = {"minimum_memory_limit": error.minimum_memory_limit}
            if error.minimum_device_memory_limit:
                least = {"minimum_device_memory_limit": error.minimum_device_memory_limit}
            click.echo(json.dumps({"feasible": False, **least}))
        raise
    if as_json:
        click.echo(json.dumps({"feasible": True, **plan_dict(made.to_dict())}))
    else:
        click.echo(spelled(str(made)))


def report_planned(
    result: "Result | Neighbours | Threshold", summary: str, as_json: bool, verbose: bool
) -> None:
    """Print a result that has a plan: as JSON, or as its summary, with `verbose` below the plan."""
    if as_json:
        found = result.to_dict()
        click.echo(json.dumps({**found, "plan": plan_dict(found["plan"])}))
    else:
        write(spelled(result.plan.table()) + "\n\n" if verbose else "", summary, sep="")


def report_result(result: "Result", c: str, as_json: bool, verbose: bool) -> None:
    """Print the result of a product, as `report_planned` does."""
    report_planned(result, _summary(result, c), as_json, verbose)


def moved(found: Any) -> str:
    """Return the bytes that a run without a plan has read and written, and its peak, as text."""
    return (
        f"read {size(found.bytes_read)}, wrote {size(found.bytes_written)}, "
        f"peak {size(found.peak_host_bytes)} host memory"
    )


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
