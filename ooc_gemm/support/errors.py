"""The errors that this package raises on purpose. Each is an `Error` and the built-in exception that fits."""

import errno
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from .intervals import ceil_div
from .redact import redacted


class Error(Exception):
    """Base class. The message is one sentence that names the array, says what is wrong and what to do. It
    never contains credentials."""

    def __init__(self, *args: Any):
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))

    def __reduce__(self) -> tuple[Any, ...]:
        """An error that is a MemoryError, too, would not arrive from a worker of a cluster otherwise: there
        tblib pickles errors, and makes them without their constructor."""
        return type(self), self.args, self.__dict__


class InputError(Error, ValueError):
    """The request cannot be carried out as it stands; nothing was written."""


class BudgetError(Error, MemoryError):
    """The problem does not fit a memory limit; nothing was written.

    `minimum_memory_limit` and `minimum_device_memory_limit` are the smallest sufficient limits in bytes; None
    where they are not known.
    """

    def __init__(
        self,
        message: str,
        minimum_memory_limit: int | None = None,
        minimum_device_memory_limit: int | None = None,
        reason: str = "",
    ):
        super().__init__(message)
        self.minimum_memory_limit = minimum_memory_limit
        self.minimum_device_memory_limit = minimum_device_memory_limit
        self.reason = reason
        """The message without the limit that would do, where that one is not all that must fit."""


class Refusals:
    """Refusals of several steps of a run. The limit that is named has to do for all of them."""

    def __init__(self) -> None:
        self._found: list[BudgetError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note that the body is refused, and go on."""
        try:
            yield
        except BudgetError as error:
            self._found.append(error)

    def end(self, before: BudgetError | None = None) -> None:
        """Raise the BudgetError with the largest limit, where there is any. `before`: one because of which
        more was counted for the others than may be needed."""
        every = [*self._found, *([before] if before else ())]
        found = max(every, key=lambda error: error.minimum_memory_limit or 0, default=None)
        if before and found and found is not before and (least := found.minimum_memory_limit):
            said = f"{before.reason}; {least} bytes ({ceil_div(least, 1 << 20)}MiB) will do, and less may"
            raise BudgetError(said, least)
        if found:
            raise found


class StoreError(Error, OSError):
    """A chunk could not be read or written during the run."""


class InputChangedError(StoreError):
    """An input was written to while C was made of it, so that C cannot be continued."""


class RangeError(Error, OverflowError):
    """An exact integer result does not fit the type it is to be stored in."""


PAST_INT64 = "a sum of products may exceed int64; give out_dtype='float64', whose sums are rounded"


class DeviceError(Error, RuntimeError):
    """A device is missing, or has failed during the run."""


class OutOfMemoryError(DeviceError, MemoryError):
    """Memory that a plan counts on is not there, of a device or of the host, although its limit allows it."""


class StoppedError(Error, RuntimeError):
    """The run was ended in order before all blocks were done. What is done is kept, as after an
    interruption."""


ENOUGH = object()
"""What a progress callback returns so that no further block is begun."""


Place = tuple[tuple[int, int], tuple[int, int]]
"""Rows [start, stop) × columns [start, stop) of C."""


class VerificationError(Error, ArithmeticError):
    """Blocks of C failed their check twice, the second time after they were computed again; they were not
    written.

    `blocks`: the rows and columns of each such block.
    """

    def __init__(self, message: str, blocks: tuple[Place, ...] = ()):
        super().__init__(message)
        self.blocks = blocks


NO_MEMORY = (
    "the system gives this process no more memory; give a smaller memory_limit, or raise the limit on its "
    "address space"
)


def no_memory(error: BaseException) -> bool:
    """Whether an error means that the system gives no more memory. A new thread needs memory for its stack,
    so failing to start one counts."""
    return (
        isinstance(error, MemoryError)
        or getattr(error, "errno", 0) == errno.ENOMEM
        or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))
    )


def bad_certificate(error: BaseException) -> str:
    """Return why a client does not trust the TLS certificate of a store, in a word of the client's, such as
    `UnknownIssuer`; empty for other errors."""
    found = re.search(r"InvalidCertificate\(\s*(\w+)", str(error))
    return found[1] if found else ""


def remedy(error: BaseException, usual: str) -> str:
    """Say what the user can do about an error of a file or a store: `usual`, unless too many files are open
    in this process or system, or a store's certificate is not trusted. Clients of object stores report these
    only in the text of their errors."""
    found: BaseException | None = error
    while found is not None:
        many = getattr(found, "errno", 0) in (errno.EMFILE, errno.ENFILE)
        if many or os.strerror(errno.EMFILE).lower() in str(found).lower():
            return "raise the limit on open files (ulimit -n)"
        if fault := bad_certificate(found):
            if fault == "UnknownIssuer":
                return "set SSL_CERT_FILE to the file of the certificate that has signed it"
            return "renew it, or give the address that it is for"
        found = found.__cause__
    return usual


_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of functions that may be suspended: to clear their variables would end them."""


def let_go(error: BaseException, earlier: BaseException | None = None) -> None:
    """Clear the variables of all functions that an error has left, those that its causes have left, and their
    callers in threads that have ended. Otherwise they would keep their buffers as long as the error is kept,
    by a notebook for example, or until Python looks for cycles. Where the error was raised is still known.

    earlier: an error that was being handled before, which is left as it is."""
    left, known = [error], {id(earlier)}
    while left:
        one = left.pop()
        known.add(id(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            caller: FrameType | None = frame
            while caller is not None:
                if not caller.f_code.co_flags & _SUSPENDED:
                    with suppress(RuntimeError):  # it is still running
                        caller.clear()
                caller = caller.f_back
        left += [x for x in (one.__cause__, one.__context__) if x is not None and id(x) not in known]


@contextmanager
def letting_go() -> Iterator[None]:
    """Let go of what errors hold (`let_go`) that leave this context."""
    _, earlier, _ = sys.exc_info()
    try:
        yield
    except BaseException as error:
        let_go(error, earlier)
        raise


@contextmanager
def on_thread(name: str) -> Iterator[None]:
    """Wrap the work of a thread whose errors are raised again in another thread, or are not where another one
    came first, and let go of what they hold. SystemExit and the like become an Error, because they would
    otherwise end the process as if somebody had asked for that."""
    try:
        yield
    except Exception as error:
        let_go(error)
        raise
    except BaseException as error:
        raise Error(f"a {name} thread died of {error!r}; run again") from error
