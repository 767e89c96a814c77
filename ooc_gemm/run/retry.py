"""Runs a product again where a device has failed and another plan can do without it."""

from collections.abc import Callable
from typing import Any

from ..storage.format import unfinished
from ..storage.read import store
from ..support.errors import BudgetError, DeviceLostError, OutOfMemoryError
from .job import run_once
from .result import Result
from .scalars import scalar


def retried(
    a: Any,
    b: Any,
    c: Any,
    *,
    notice: Callable[[str], None] | None,
    beta: complex | None = None,
    **options: Any,
) -> Result:
    """Runs a product, and once more with less of the device's memory where another process has taken it, or
    on those of several devices that are left. `options` are those of `multiply`, and `engine`: what carries
    out a plan as `execute` does, where it is not that."""
    store.refuse_event_loop()
    beta, options["alpha"] = scalar("beta", beta), scalar("alpha", options.get("alpha"))
    try:
        return run_once(a, b, c, notice=notice, beta=beta, **options)
    except (OutOfMemoryError, DeviceLostError) as error:
        more: dict[str, Any] | None = _to_go_on(error.begun, c, beta)
        if isinstance(error, DeviceLostError):
            error.options, what = more, {"device": error.left} if error.left else None
            how = f"on {error.left.name}" if error.left else ""
        else:
            what = {"device_memory_limit": error.limit} if error.limit else None
            how = f"with a plan for {error.limit} bytes of that memory"
        if more is None or what is None:
            raise
        if notice:
            notice(f"{str(error).partition(';')[0]}; it goes on {how}")
        options, failed = options | more | what, error
    again = run_once if isinstance(failed, OutOfMemoryError) else retried
    try:
        return again(a, b, c, notice=notice, beta=beta, **options)
    except BudgetError as error:
        raise failed from error


def _to_go_on(begun: bool, c: Any, beta: complex | None) -> dict[str, bool] | None:
    """Options of a run that goes on where one has failed; None where none could: some blocks may have had
    their β already."""
    place = store.local_path(c) if begun and c is not None else None
    if place is not None and (place / unfinished.JOURNAL).exists():
        return {"resume": True}
    if begun and not beta:
        return {"force": True}
    return None if begun else {}
