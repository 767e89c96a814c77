"""Waits for the answers of asynchronous stores, with a time limit."""

import asyncio
import atexit
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from functools import cache
from typing import Any, TypeVar

from zarr.storage import LocalStore

from ...support import redact
from .zarr_internals import event_loop

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds that a store on another machine may take to begin to answer."""
SLOWEST = 1 << 20
"""Bytes per second at which an answer must arrive at least; they extend the time limit."""

abandoned = threading.Event()
"""Set when a run has stopped waiting for a store whose thread may never end."""

DELIVERY = 2.0
"""Most seconds that the end of the process waits for threads of clients that run Python."""


@cache
def _deliver_before_exit() -> None:
    """Wait, at the end of this process, for the threads of clients that run Python."""
    atexit.register(_wait_for_deliveries)


def _wait_for_deliveries() -> None:
    """Wait until no thread that Python has not started runs Python.

    A thread of a client hands an answer to the event loop in Python, and whoever waited for it may end the
    process before that thread has returned. Python before 3.14 then ends the thread, below which is code of
    Rust, and the process aborts (https://github.com/PyO3/pyo3-async-runtimes/issues/40).
    """
    end = time.monotonic() + DELIVERY
    while time.monotonic() < end:
        ours = {thread.ident for thread in threading.enumerate()}
        if sys._current_frames().keys() <= ours:
            return
        time.sleep(0.001)


class Answers:
    """Waits for coroutines as zarr's `sync` does, but with a time limit, because a store may never answer."""

    def __init__(self, store: Any, nbytes: int = 0):
        """store: the zarr store that answers; a local one has no time limit. nbytes: the most bytes that one
        request moves, which extend the time limit."""
        self._seconds = None if isinstance(store, LocalStore) else TIMEOUT + nbytes / SLOWEST
        if self._seconds is not None:
            _deliver_before_exit()
        self._waiting: set[Future[Any]] = set()
        self._cancelled = False
        self._lock = threading.Lock()

    def of(self, question: Coroutine[Any, Any, T]) -> T:
        """Wait for the answer to a question. Raises TimeoutError, and what the store raises. A local store
        finishes what it has begun even after Ctrl-C, so that it writes nothing after the files of the run
        were removed."""
        with self._lock:
            future = asyncio.run_coroutine_threadsafe(question, event_loop())
            self._waiting.add(future)
            if self._cancelled:
                future.cancel()
        try:
            return future.result(self._seconds)
        except TimeoutError:
            if future.done():
                raise
            raise TimeoutError(f"no answer within {self._seconds:.3g} s") from None
        except Exception as error:  # which may be shown in a traceback
            error.args = tuple(redact.redacted(arg) if isinstance(arg, str) else arg for arg in error.args)
            raise
        finally:
            if self._seconds is None:
                wait([future])
            elif future.cancel():
                abandoned.set()
            with self._lock:
                self._waiting.discard(future)

    def cancel(self) -> None:
        """Wake all waiting threads with CancelledError, and let no thread wait again, unless the store is
        local."""
        if self._seconds is None:
            return
        with self._lock:
            self._cancelled = True
            for future in self._waiting:
                future.cancel()
