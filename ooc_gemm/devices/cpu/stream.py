"""The stream in which the CPU multiplies: a thread that runs functions in order, and its events."""

import queue
from collections.abc import Callable
from threading import Event as Flag
from threading import Thread

from ...engine.check import Verdict
from ...support.errors import let_go, on_thread


class Done:
    """The event of work that is already done."""

    done = True

    def synchronize(self) -> None:
        return


class Mark:
    """An event in the compute stream."""

    def __init__(self, stream: "Stream") -> None:
        self._stream = stream
        self.reached = Flag()

    @property
    def done(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.reached.wait()
        if self._stream.error is not None:
            raise self._stream.error


class PendingCheck:
    """A check that runs in the compute stream."""

    done: Mark

    def __init__(self) -> None:
        self.found: Verdict | None = None

    def verdict(self) -> Verdict:
        self.done.synchronize()
        assert self.found is not None, "it is done"
        return self.found


class Stream:
    """A thread that runs the functions it is given, in order. After an error it runs nothing more, and every
    event raises that error."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | Mark | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, name="ooc-gemm compute", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def mark(self) -> Mark:
        mark = Mark(self)
        self._queue.put(mark)
        return mark

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        if self.error is not None:
            let_go(self.error)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Mark):
                item.reached.set()
            elif self.error is None:
                try:
                    with on_thread("compute"):
                        item()
                except Exception as error:
                    self.error = error
