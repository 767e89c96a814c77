"""Does the same work again and again for a while, in several threads, and tells how long it took."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from threading import Lock
from typing import TypeVar

from .buffers import Bytes

T = TypeVar("T")
R = TypeVar("R")


def for_a_while(
    work: Callable[[T, Bytes], R], items: Iterable[T], buffers: list[Bytes], longest: float = math.inf
) -> tuple[float, list[R]]:
    """Call `work` for each item, in one thread for each buffer, until there are none or `longest` seconds are
    over. Returns the seconds and what `work` returned. Raises what `work` raises."""
    todo, done, lock = iter(items), list[R](), Lock()
    start = time.perf_counter()

    def run(buffer: Bytes) -> None:
        while time.perf_counter() < start + longest:
            with lock:
                try:
                    item = next(todo)
                except StopIteration:
                    return
            done.append(work(item, buffer))

    with ThreadPoolExecutor(len(buffers), "ooc-gemm bench") as pool:
        list(pool.map(run, buffers))
    return time.perf_counter() - start, done


def by_one_thread(
    begin: Callable[[T, Bytes], Callable[[], R]], items: Iterable[T], buffers: list[Bytes], longest: float
) -> tuple[float, list[R]]:
    """Do the same in one thread, for work that continues in the background once it is started: `work` starts
    it and returns a function that waits for its end. Nothing is under way when this returns or raises."""
    done, begun, start = list[R](), deque[Callable[[], R]](), time.perf_counter()
    try:
        for item, buffer in zip(items, cycle(buffers), strict=False):
            if time.perf_counter() > start + longest:
                break
            if len(begun) == len(buffers):
                done.append(begun.popleft()())
            begun.append(begin(item, buffer))
        while begun:
            done.append(begun.popleft()())
    finally:
        for end in begun:
            with suppress(BaseException):
                end()
    return time.perf_counter() - start, done
