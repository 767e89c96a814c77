"""Readers: the threads that read pieces into slots and upload them in turn."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping

from ..support.errors import on_thread
from ..support.onward import Onward
from ..support.trace import Trace
from .ports import Array, Source, Uploads
from .ring import Ring, Slot, Stopped, Task


def dealt(count: int, background: bool) -> tuple[int, int]:
    """Return the number of threads for `count` reads or writes at once, and how many of them each thread has
    under way. One thread handles all background operations, because two would wait for each other for longer
    than they work."""
    return (1, count) if background else (count, 1)


def read(
    ring: Ring,
    session: Uploads,
    sources: Mapping[str, Source],
    trace: Trace,
    ahead: int,
    aside: bool,
    in_turn: bool = False,
) -> None:
    """Read pieces and upload them until there are none left.

    `ahead`: the number of reads under way at once. `aside`: leave pieces whose turn has not come to the
    conductor. Over a network the time of a read varies much, and readers would wait for the slowest one at
    every turn. `in_turn`: read no piece before its turn has come, because those whose turn has come go on to
    the device by themselves.
    """
    begun: deque[tuple[Slot, Task, Callable[[], tuple[Array, int]] | None, Onward | None]] = deque()
    try:
        with on_thread("reader"):
            while True:
                while len(begun) < ahead and (found := ring.acquire(not begun, not in_turn)):
                    begun.append((*found, *_start(ring, session, sources, *found)))
                slot, task, end, onward = begun.popleft()
                piece = task.piece
                if end:
                    start = time.perf_counter()
                    view, nbytes = end()
                    trace.add("read", start, nbytes=nbytes, operand=piece.operand, chunk=piece.chunk)
                    slot.view = view
                if onward and (arrived := onward.ended()):
                    ring.release(slot, task, arrived)
                else:
                    session.prepare(slot.data, _used(slot))
                    _upload(ring, session, slot, task, aside)
    except Stopped:
        pass
    except Exception as error:
        ring.close(error)
    finally:
        for *_, end, _ in begun:
            if end:
                with contextlib.suppress(BaseException):
                    end()


def _start(
    ring: Ring, session: Uploads, sources: Mapping[str, Source], slot: Slot, task: Task
) -> tuple[Callable[[], tuple[Array, int]] | None, Onward | None]:
    """Start to read a piece, unless it is in its slot. If its turn has come already, its source may send it
    on."""
    piece = task.piece
    if piece.found:
        return None, None
    source, onward = sources[piece.source], None
    if source.asynchronous and (panels := ring.admitted(task)):
        onward = session.onward(piece, source.dtype, panels[piece.operand != "a"])
        if onward:
            onward.pinned = session.prepared(slot.data)
    return source.start(piece, slot.data, onward), onward


def _used(slot: Slot) -> int | None:
    """Return the bytes at the beginning of a slot that are used, where it holds chunks as they are stored;
    None for all. None are where another reader is filling it, which will pin them before this one's turn
    comes."""
    view = slot.view
    if view is None:
        return 0
    if view.ndim > 1:
        return None
    return int(view.ctypes.data) + view.nbytes - int(slot.data.ctypes.data)


def _upload(ring: Ring, session: Uploads, slot: Slot, task: Task, aside: bool = False) -> None:
    if panels := ring.admit(slot, task, aside):
        assert slot.view is not None, "it is filled"
        buffer = panels[task.piece.operand != "a"]
        ring.release(slot, task, session.upload(slot.view, task.piece, buffer))


def wait_for_all(ring: Ring, session: Uploads) -> None:
    """Upload the pieces of the open turn that were put aside, and wait until all of its pieces are being
    uploaded."""
    with contextlib.suppress(Stopped):  # where a reader has failed: `wait` says with what
        for slot, task in ring.aside():
            _upload(ring, session, slot, task)
    ring.wait()
