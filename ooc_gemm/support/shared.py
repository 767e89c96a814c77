"""State of the whole process that several runs may need at the same time, and work on a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ContextDecorator
from threading import Lock
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Start some work on a thread of its own, which is called `name`."""
    pool = ThreadPoolExecutor(1, f"ooc-gemm {name}")
    try:
        return pool.submit(work)
    finally:
        pool.shutdown(wait=False)


class Shared(ContextDecorator):
    """A context that threads share: the first thread to come in enters it, and the last one to go leaves
    it."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]):
        self._context, self._lock, self._inside = context, Lock(), 0
        self.__doc__ = context.__doc__

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._entered = self._context()
                self._entered.__enter__()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._entered.__exit__(None, None, None)
