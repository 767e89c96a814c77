"""The commands that compute or plan a product: multiply, gram and plan."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..support.errors import BudgetError, InputError
from ..support.redact import redacted
from . import options
from .group import CONTEXT, cli
from .progress import progress_bar
from .show import note, plan_dict, report_result, spelled

if TYPE_CHECKING:
    from ..run.observer import Observer
    from ..run.recovery import Recovery
    from ..run.request import Request
    from ..run.result import Result

AGAIN = "OOC_GEMM_AGAIN"
"""In the environment of a process that goes on for one whose GPU has failed."""


@cli.command(context_settings=CONTEXT)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@options.problem
@click.option(
    "--scheduler",
    metavar="ADDRESS|local:N",
    help="Spread C's blocks over the workers of a Dask cluster, each of which may hold the memory limit, or "
    "over N processes on this machine, which share the limit and the cores.",
)
@options.running
def multiply(a: str, b: str, c: str, scheduler: str | None, **given: Any) -> None:
    """C ← α·op(A)·op(B) + β·C."""
    if scheduler:
        for name in ("rechunk", "trace"):
            if given[name]:
                raise click.UsageError(f"--{name} is for one process; leave out --scheduler.")
    show = _taken(given, "progress", "trace", "as_json", "verbose")
    where = partial(_on_cluster, scheduler) if scheduler else _here
    _run(_request(a, b, c, given), show, where)


@cli.command(context_settings=CONTEXT, short_help="C ← α·A·Aᵀ, with half the work of multiply.")
@click.argument("a")
@click.argument("c")
@click.option("--transpose", is_flag=True, help="Compute Aᵀ·A instead.")
@options.matrices
@options.running
def gram(a: str, c: str, transpose: bool, **given: Any) -> None:
    """C ← α·A·Aᵀ, with half the work of multiply; both halves of C are written.

    With β ≠ 0, C ← α·A·Aᵀ + β·C as multiply does it: the old C need not be symmetric. Complex A is not
    conjugated.
    """
    from ..run.request import Operand, Request

    show = _taken(given, "progress", "trace", "as_json", "verbose")
    left, right = Operand(a, transpose=transpose), Operand(a, transpose=not transpose)
    _run(Request(left, right, c, symmetric=True, **given), show)


@cli.command(context_settings=CONTEXT)
@click.argument("a")
@click.argument("b")
@options.problem
@options.as_json
@options.verbose
def plan(a: str, b: str, as_json: bool, verbose: bool, **given: Any) -> None:
    """Show what multiply would do, and why; compute nothing."""
    from ..run.prepare import prepare

    try:
        made = prepare(_request(a, b, None, {**given, "writes": False}).check()).plan
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


def _taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options of these names, which are removed from the others."""
    return {name: given.pop(name) for name in names}


def _request(a: str, b: str, c: str | None, given: dict[str, Any]) -> "Request":
    """The request that the options of a product make."""
    from ..run.request import Operand, Request

    op = _taken(given, "transpose_a", "adjoint_a", "transpose_b", "adjoint_b")
    left = Operand(a, op["transpose_a"], op["adjoint_a"])
    return Request(left, Operand(b, op["transpose_b"], op["adjoint_b"]), c, **given)


def _here(request: "Request", observer: "Observer") -> "Result | Recovery":
    """Carry out a request in this process."""
    from ..run.retry import carry_out

    return carry_out(request, observer)


def _on_cluster(scheduler: str, request: "Request", observer: "Observer") -> "Result | Recovery":
    """Carry out a request on the cluster of a scheduler."""
    try:
        from ..dask.local_cluster import carry_out_at
    except ImportError as error:
        raise InputError(
            f"--scheduler needs a package that is not installed ({error.name}); "
            "pip install 'ooc-gemm[distributed]'"
        ) from error
    return carry_out_at(scheduler, request, observer)


def _run(
    request: "Request",
    show: dict[str, Any],
    carry_out: "Callable[[Request, Observer], Result | Recovery]" = _here,
) -> None:
    """Carry out a request behind a progress bar, and show its result."""
    from ..run.observer import Observer
    from ..run.recovery import Recovery

    with progress_bar(show["progress"]) as report:
        outcome = carry_out(request, Observer(report, note, show["trace"]))
    if isinstance(outcome, Recovery):
        _go_on_elsewhere(outcome, show["verbose"])
        outcome.fail()
    report_result(outcome, request.c, show["as_json"], show["verbose"])


def _go_on_elsewhere(recovery: "Recovery", verbose: bool) -> None:
    """Go on, once, in another process on the GPUs that answer there: a kernel that fails takes CUDA from its
    whole process. Returns where that cannot be."""
    from ..devices.cuda.gpus import answering

    if AGAIN in os.environ:
        return
    if left := ",".join(map(str, answering(list(recovery.devices)))):
        if verbose:
            click.echo(redacted("".join(traceback.format_exception(recovery.cause))), err=True)
        note(f"{recovery.reason}; it goes on on cuda:{left} in another process")
        sys.stdout.flush()
        sys.stderr.flush()
        args = click.get_current_context().obj
        more = ["--device", f"cuda:{left}", *(f"--{name}" for name in recovery.flags)]
        command = [sys.executable, "-m", "ooc_gemm.cli", *args, *more]
        os.execve(sys.executable, command, os.environ | {AGAIN: "1"})
