"""The commands that compute or plan a product: multiply, gram and plan."""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..devices import begin
from ..support.redact import redacted
from . import options
from .cluster import on_cluster, one_process
from .group import CONTEXT, cli
from .progress import progress_bar
from .show import note, report_plan, report_result
from .stop import limit
from .types import Address

if TYPE_CHECKING:
    from ..run.observer import Observer
    from ..run.recovery import Recovery
    from ..run.request import Request
    from ..run.result import Result

ELEMENTS = "center", "scale", "missing", "weights", "decode_cf"
"""Options that say what happens to elements of operands: to those of A and, with `decode_cf`, of B."""
AGAIN = "OOC_GEMM_AGAIN"
"""Environment variable that is set in a process which continues for one whose GPU has failed."""


@cli.command(context_settings=CONTEXT, short_help="Compute C ← α·op(A)·op(B) + β·C.")
@click.argument("a", type=Address())
@click.argument("b", type=Address())
@click.argument("c", type=Address())
@options.elements
@options.problem
@options.scheduler
@options.running
def multiply(a: str, b: str, c: str, scheduler: str | None, **given: Any) -> None:
    """Compute C ← α·op(A)·op(B) + β·C.

    --center, --scale and --missing concern elements of A; --decode-cf decodes both A and B.
    """
    where = _where(scheduler, given)
    show = _taken(given, "progress", "trace", "as_json", "verbose")
    _run(_request(a, b, c, given), show, where)


@cli.command(context_settings=CONTEXT, short_help="Compute C ← α·A·Aᵀ with half the work of multiply.")
@click.argument("a", type=Address())
@click.argument("c", type=Address())
@click.option("--transpose", is_flag=True, help="Compute Aᵀ·A instead.")
@options.triangle
@options.plans
@options.elements
@options.matrices
@options.scheduler
@options.running
def gram(a: str, c: str, transpose: bool, scheduler: str | None, plans: bool, **given: Any) -> None:
    """Compute C ← α·A·Aᵀ with half the work of multiply. Both halves of C are written.

    With β ≠ 0, C ← α·A·Aᵀ + β·C as multiply does it: the old C need not be symmetric. Complex A is not
    conjugated.
    """
    if plans:
        one_process(scheduler, "plan")
        _show_plan(_gram_request(a, None, transpose, _planned(given)), given["as_json"])
        return
    where = _where(scheduler, given)
    show = _taken(given, "progress", "trace", "as_json", "verbose")
    _run(_gram_request(a, c, transpose, given), show, where)


@cli.command(context_settings=CONTEXT)
@click.argument("a", type=Address())
@click.argument("b", type=Address(), required=False)
@click.option("--gram", is_flag=True, help="Plan `gram A`: the product A·Aᵀ, or Aᵀ·A with --transpose-a.")
@options.triangle
@options.elements
@options.problem
@options.as_json
@options.verbose
def plan(a: str, b: str | None, gram: bool, as_json: bool, verbose: bool, **given: Any) -> None:
    """Show what multiply would do, and why; compute nothing.

    With --gram, show what gram would do.
    """
    given["writes"] = False
    if gram:
        request = _gram_request(a, None, _alone(b, given), given)
    elif given.pop("triangle"):
        raise click.UsageError("--triangle is for --gram; leave it out.")
    elif b is None:
        raise click.UsageError("Missing argument 'B'; give it, or --gram to plan A·Aᵀ.")
    else:
        request = _request(a, b, None, given)
    _show_plan(request, as_json)


def _planned(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a product that concern its plan."""
    others = ("force", "resume", "progress", "trace", "as_json", "verbose")
    return {**{name: value for name, value in given.items() if name not in others}, "writes": False}


def _show_plan(request: "Request", as_json: bool) -> None:
    """Show what a request would do."""
    from ..run.observer import Observer
    from ..run.prepare import prepare

    report_plan(lambda: prepare(request.check(), observer=Observer(notice=note)).plan, as_json)


def _taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove the options of these names from `given`, and return them."""
    return {name: given.pop(name) for name in names}


def _request(a: str, b: str, c: str | None, given: dict[str, Any]) -> "Request":
    """Return the request that the options of a product make."""
    from ..run.request import Operand, Request

    op = _taken(given, "transpose_a", "adjoint_a", "transpose_b", "adjoint_b")
    elements = _taken(given, *ELEMENTS)
    left = Operand(a, op["transpose_a"], op["adjoint_a"], **elements)
    right = Operand(b, op["transpose_b"], op["adjoint_b"], decode_cf=elements["decode_cf"])
    return Request(left, right, c, **given)


def _alone(b: str | None, given: dict[str, Any]) -> bool:
    """Whether `plan --gram` transposes A. Takes the operands' options out; those of B are refused."""
    op = _taken(given, "transpose_a", "adjoint_a", "transpose_b", "adjoint_b")
    if b is not None:
        raise click.UsageError("--gram plans a product of A alone; leave out B or --gram.")
    for name in ("adjoint_a", "transpose_b", "adjoint_b"):
        if op[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with --gram; leave out one.")
    return bool(op["transpose_a"])


def _gram_request(a: str, c: str | None, transpose: bool, given: dict[str, Any]) -> "Request":
    """Return the request that the options of gram make."""
    from ..run.request import Operand, Request, gram_operands

    left, right = gram_operands(Operand(a, **_taken(given, *ELEMENTS)), transpose)
    return Request(left, right, c, symmetric=True, **given)


def _where(
    scheduler: str | None, given: dict[str, Any]
) -> "Callable[[Request, Observer], Result | Recovery]":
    """Return what carries out a request: this process, or the cluster of a scheduler. Raises UsageError for
    options that a cluster does not have."""
    if not scheduler:
        begin(given["device"], given["memory_limit"])
        return _here
    for name in ("rechunk", "trace"):
        if given.get(name):
            one_process(scheduler, name)
    return partial(_on_cluster, scheduler)


def _here(request: "Request", observer: "Observer") -> "Result | Recovery":
    """Carry out a request in this process."""
    from ..run.retry import carry_out

    return carry_out(request, observer)


def _on_cluster(scheduler: str, request: "Request", observer: "Observer") -> "Result | Recovery":
    """Carry out a request on the cluster of a scheduler."""
    with on_cluster(scheduler, {"memory_limit": request.memory_limit, "device": request.device}):
        return _here(replace(request, memory_limit=None), observer)


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
    """Continue in another process on the GPUs that still answer, once, because a kernel that fails makes CUDA
    unusable in its process. Returns where no GPU answers, and in such a process."""
    from ..devices.cuda.gpus import answering

    if AGAIN in os.environ:
        return
    if left := ",".join(map(str, answering(list(recovery.devices)))):
        if verbose:
            click.echo(redacted("".join(traceback.format_exception(recovery.cause))), err=True)
        note(f"{recovery.reason}; the run continues on cuda:{left} in another process")
        sys.stdout.flush()
        sys.stderr.flush()
        args = click.get_current_context().obj
        more = ["--device", f"cuda:{left}", *(f"--{name}" for name in recovery.flags)]
        more += ["--stop-before", str(until)] if (until := limit()) else []
        command = [sys.executable, "-m", "ooc_gemm.cli", *args, *more]
        os.execve(sys.executable, command, os.environ | {AGAIN: "1"})
