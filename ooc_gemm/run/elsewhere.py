"""What carries out requests in the place of this process, while a context says so: a cluster."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from ..support.errors import InputError
from ..support.memory import memory_limit_of
from .executor import Executor
from .pool import Pool


class Elsewhere(Protocol):
    """Carries out requests."""

    @property
    def shares(self) -> bool:
        """Whether the processes there and this one share one memory limit."""

    def check(self, request: Any) -> None:
        """Raise InputError where a `Request` cannot be carried out there, whatever the arrays hold."""

    def executor(self, request: Any) -> Executor:
        """Return what carries out the plan of a `Request`."""

    def memory_limit(self, given: str | int | None) -> int:
        """The memory limit of each process there, in bytes. given: the limit that is asked for; None for the
        default."""

    def beside(self, given: str | int | None, nbytes: int) -> int:
        """Count bytes that this process holds of what comes together in it. Returns how many of them count
        in the memory limit of each process there, which may share one with this process. given: as of
        `memory_limit`. Raises BudgetError where this process may not hold so many."""

    def pool(
        self, inputs: Mapping[str, Any], out: tuple[str, Any], device: object, limit: int, resumes: bool
    ) -> Pool:
        """Return the processes as a pool.

        inputs: what they open, as the user gave it, by name. out: how messages call what is made, and its
        place as the user gave it. device: as of `multiply`. limit: the memory limit of each process, in
        bytes. resumes: a run that fails can be continued. Raises InputError where the processes cannot open
        an input, or do not share a folder with `out`, and DeviceError.
        """


class _Current(threading.local):
    """What this thread computes with. Threads that it starts do not inherit it: some are workers."""

    elsewhere: Elsewhere | None = None


_current = _Current()


def current() -> Elsewhere | None:
    """Return what carries out requests of this thread; None for this process."""
    return _current.elsewhere


@contextmanager
def computing(elsewhere: Elsewhere) -> Iterator[None]:
    """Have requests of this thread carried out elsewhere while this context lasts."""
    before, _current.elsewhere = _current.elsewhere, elsewhere
    try:
        yield
    finally:
        _current.elsewhere = before


def limit_of(given: str | int | None) -> int:
    """The memory limit that is asked for, in bytes: of this process, or of each one that computes elsewhere.
    Raises InputError."""
    found = current()
    return found.memory_limit(given) if found else memory_limit_of(given)


def only_here(what: str) -> None:
    """Raise InputError where something is asked for elsewhere that only this process does. what: names it in
    the message."""
    if current() is not None:
        raise InputError(f"{what} is for one machine, and not for a cluster; leave out the one or the other")
