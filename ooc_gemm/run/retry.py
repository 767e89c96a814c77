"""Runs a request, and runs it again without a device that has failed."""

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
    """Run a request.

    Where another process has taken device memory, it is run once more with less of it; where one of several
    devices has failed, it is run on the others. executor: what carries out the plan; None for the request's
    device in this process. Returns a Recovery where only another process can continue. Raises what `multiply`
    raises.
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
    """Return the recovery, where another process can continue. Raises its error where none can."""
    if not found.devices:
        found.fail()
    return found


def result_of(outcome: Result | Recovery) -> Result:
    """Return the result. Raises the error of a run that only another process could continue."""
    if isinstance(outcome, Recovery):
        outcome.fail()
    return outcome
