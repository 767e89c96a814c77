"""How many requests to an object store are sent at a time, and what memory they take."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

BANDWIDTH = 1 << 30
"""Bytes per second that all requests together should reach: about 10 Gbit/s, which one process can take
in."""
STREAM = 96 << 20
"""Bytes per second of one request once it is answered, as object stores deliver them."""
FEWEST_REQUESTS = 8
"""Fewest requests under way: as many as fill the bandwidth, as a power of two, where the store answers at
once."""
MOST_REQUESTS = 64
"""Most requests under way, each of which takes a thread and memory. They are enough for a latency of 0.3 s
with pieces of 4 MiB."""
PIECE_BYTES = 4 << 20
"""Most bytes of one request, where a chunk can be read in part."""
WRITERS = 8
"""Puts under way. Few are enough, because each sends a whole chunk."""
CONNECTION_BYTES = 1 << 20
"""Memory in bytes that the client takes for each connection."""


def requests(latency: float, piece: int) -> int:
    """Return how many requests of up to `piece` bytes, each answered after `latency` seconds, fill the
    bandwidth (Little's law). The number is a power of two, because measured latencies vary."""
    wanted = BANDWIDTH * (latency / max(1, min(piece, PIECE_BYTES)) + 1 / STREAM)
    count = FEWEST_REQUESTS
    while count * 1.5 < wanted and count < MOST_REQUESTS:
        count *= 2
    return count


OPENER = "ooc-gemm opener"
"""Name of the threads that look at stores and folders."""


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls that wait for a store, or for the system, at the same time, and return what each of them
    returns. Raises the error of the first call that fails."""
    with ThreadPoolExecutor(len(works), OPENER) as pool:
        return [found.result() for found in [pool.submit(work) for work in works]]
