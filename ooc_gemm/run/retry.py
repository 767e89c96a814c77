"""Runs a request, and again where a device has failed and the run can do without it."""

from dataclasses import replace

from ..storage.io.zarr_internals import refuse_event_loop
from ..support.errors import BudgetError
from .executor import Executor
from .job import attempt
from .observer import Observer
from .recovery import Recovery
from .request import Request
from .result import Result


def carry_out(request: Request, observer: Observer, executor: Executor | None = None) -> Result | Recovery:
    """Run a request: once more with less of the device's memory where another process has taken it, and on
    those of several devices that are left where one has failed.

    executor: what carries the plan out; None for the request's device in this process.

    Returns a Recovery where only another process can go on. Raises what `multiply` raises.
    """
    refuse_event_loop()
    request = request.check()
    found = attempt(request, observer, executor)
    if isinstance(found, Result) or found.request is None:
        return found
    observer.note(found.said)
    again = attempt if found.smaller else carry_out
    try:
        second = again(found.request, observer, executor)
    except BudgetError as error:
        return _unless_elsewhere(replace(found, request=None, cause=error))
    if found.smaller and isinstance(second, Recovery):
        second.fail()
    return second


def _unless_elsewhere(found: Recovery) -> Recovery:
    """The recovery, where another process can go on. Raises its error where none can."""
    if not found.devices:
        found.fail()
    return found


def result_of(outcome: Result | Recovery) -> Result:
    """The result. Raises the error of a run that only another process could go on with."""
    if isinstance(outcome, Recovery):
        outcome.fail()
    return outcome
