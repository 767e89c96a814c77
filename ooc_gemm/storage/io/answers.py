"""Waiting for the answers of asynchronous stores, with a time limit."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from zarr.storage import LocalStore

from ...support import redact
from .zarr_internals import event_loop

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds that a store which is not this machine's may take to answer …"""
SLOWEST = 1 << 20
"""… and the bytes that come each second beyond."""

abandoned = threading.Event()
"""Set when nobody waits any longer for what may still keep a thread of a store's."""


class Answers:
    """zarr's `sync` with a time limit, for stores that may never answer."""

    def __init__(self, store: Any, nbytes: int = 0):
        """`nbytes` come or go at a time."""
        self._seconds = None if isinstance(store, LocalStore) else TIMEOUT + nbytes / SLOWEST
        self._waiting: set[Future[Any]] = set()
        self._cancelled = False
        self._lock = threading.Lock()

    def of(self, question: Coroutine[Any, Any, T]) -> T:
        """Its answer. Raises TimeoutError, and what the store raises. A local store ends what it has begun
        even after Ctrl-C: nothing is written after what cleans up."""
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
        """Wake all who wait, with CancelledError, and let nobody wait again, unless the store is local."""
        if self._seconds is None:
            return
        with self._lock:
            self._cancelled = True
            for future in self._waiting:
                future.cancel()
