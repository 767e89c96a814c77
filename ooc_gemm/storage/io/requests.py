"""How many requests to an object store are under way at a time, and what they take."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

BANDWIDTH = 1 << 30
"""Bytes a second that requests are to fill together: 10 Gbit/s, of what one process takes in."""
STREAM = 96 << 20
"""Bytes a second of one request, once it is answered: what object stores give each."""
AT_ONCE = 8, 64
"""Fewest requests under way, and most."""
PIECE_BYTES = 4 << 20
"""Bytes of one request, at most, where a chunk can be read in part."""
WRITERS = 8
"""Puts under way: of whole chunks, which are larger."""
CONNECTION_BYTES = 1 << 20
"""Memory that the client takes for each."""


def requests(latency: float, piece: int) -> int:
    """How many requests at a time, each of up to `piece` bytes and answered after `latency` seconds, fill the
    bandwidth (Little's law); a power of two, for latencies differ from one measurement to the next."""
    wanted = BANDWIDTH * (latency / max(1, min(piece, PIECE_BYTES)) + 1 / STREAM)
    count = AT_ONCE[0]
    while count * 1.5 < wanted and count < AT_ONCE[1]:
        count *= 2
    return count


OPENER = "ooc-gemm opener"
"""Threads that ask before there is a plan."""


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """What each of some calls returns, that ask for answers which take a while. Raises what the first of them
    raises that fails."""
    with ThreadPoolExecutor(len(works), OPENER) as pool:
        return [found.result() for found in [pool.submit(work) for work in works]]
