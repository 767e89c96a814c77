"""Decides how a run continues after its device has failed."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..engine.ports import Failure
from ..storage.format import unfinished
from ..storage.read import addresses
from ..support.errors import DeviceError
from .request import Request


@dataclass(frozen=True)
class Recovery:
    """A run that has failed, and the request that can be run in its place."""

    error: DeviceError
    cause: BaseException
    request: Request | None
    """The request to run in this process; None where this process can do nothing more."""
    means: str
    """What is different in the new run: `on cpu`."""
    smaller: bool
    """Whether the request differs only in a smaller limit on device memory, which is tried once."""
    devices: tuple[int, ...]
    """Numbers of the GPUs among which another process may find some that answer; empty where another process
    would not help."""
    flags: tuple[str, ...]
    """Options that another process needs in addition: `resume` or `force`."""

    @property
    def said(self) -> str:
        """The notice that says how the run continues."""
        return f"{self.reason}; the run continues {self.means}"

    @property
    def reason(self) -> str:
        """What has failed, without advice."""
        return str(self.error).partition(";")[0]

    def fail(self) -> NoReturn:
        """Raise the error, because the run does not continue."""
        raise self.error from self.cause


def recovery(
    request: Request, failure: Failure, begun: bool, most: int | None, cause: Exception
) -> Recovery | None:
    """Return how a request continues after a failure; None where it cannot.

    begun: whether C had been begun. most: the device memory in bytes that the plan had. cause: the error that
    the failure explains.
    """
    flags = _flags(request, begun)
    anew = failure.undecoded or failure.prepared
    known = anew or failure.limit is not None or failure.left is not None or failure.devices
    if flags is None or not known:
        return None
    found = Recovery(failure.error, cause, None, "", False, failure.devices, flags)
    again = replace(
        request, resume=request.resume or "resume" in flags, force=request.force or "force" in flags
    )
    if failure.undecoded:
        again = replace(again, host_decodes=True)
        return replace(found, request=again, means="with chunks that the host decodes")
    if failure.prepared:
        again = replace(again, prepares_again=True)
        return replace(found, request=again, means="with panels that are prepared for each block")
    if failure.left is not None:
        again = replace(again, device=failure.left)
        return replace(found, request=again, means=f"on {failure.left.name}")
    if failure.limit is not None and most is not None:
        limit = min(failure.limit, most)
        again = replace(again, device_memory_limit=limit)
        means = f"with a plan for {limit} bytes of that memory"
        return replace(found, request=again, means=means, smaller=True)
    return found if failure.devices else None


def _flags(request: Request, begun: bool) -> tuple[str, ...] | None:
    """Return the options that a request needs to continue; None where it cannot, because some blocks may have
    had their β already."""
    if begun and _has_journal(request.c):
        return ("resume",)
    if begun and not request.beta:
        return ("force",)
    return None if begun else ()


def _has_journal(c: Any) -> bool:
    """Whether C, which was begun, has a journal. A store that does not say so has none."""
    with suppress(Exception):
        there = addresses.place_of(c) if c is not None else None
        return there is not None and there.stamp(unfinished.JOURNAL) != (0, 0)
    return False
