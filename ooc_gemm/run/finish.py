"""What is done to the elements of a finished C before they are stored.

A part of C passes through here in the slot that the device has copied it to, in the writer's thread, before
it is converted to C's type. The check of a block (`verify=True`) looks at it before that.
"""

from collections.abc import Callable
from typing import Protocol

from ..engine.ports import Array, Target
from ..planning.schedule import Part
from ..support.buffers import Bytes


class Finish(Protocol):
    """A change to the elements of a finished C before they are stored."""

    @property
    def name(self) -> str:
        """A text that identifies the change, for the journal: two runs with the same text do the same."""

    @property
    def nbytes(self) -> int:
        """Host memory in bytes that it holds."""

    def apply(self, values: Array, row: int, col: int) -> None:
        """Change elements of C in place. values: a part of C, whose first element is that of `row` and
        `col`. Any thread may call this."""


class Lower:
    """Keeps the lower triangle of C, with its diagonal, and makes what is above it 0."""

    name, nbytes = "lower triangle of gram", 0

    def apply(self, values: Array, row: int, col: int) -> None:
        """Changes what is above the diagonal."""
        for number, line in enumerate(values):
            line[max(0, row + number + 1 - col) :] = 0


class Finished:
    """A target whose parts are changed by a `Finish` before they are stored."""

    bring = None

    def __init__(self, target: Target, finish: Finish, chunk: tuple[int, int]):
        """target: the stored C. finish: the change. chunk: rows and columns of what one write makes."""
        self.target, self.finish, self._chunk = target, finish, chunk
        self.background = target.background

    def note_lost(self, elements: int, least: int, greatest: int) -> None:
        """Does nothing: elements are converted after they are finished, by the target."""

    def view(self, part: Part, slot: Bytes) -> Array:
        """Returns the view of the target."""
        return self.target.view(part, slot)

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Finishes the part, and starts to store it."""
        row, col = (index * extent for index, extent in zip(part.chunk, self._chunk, strict=True))
        self.finish.apply(self.target.view(part, slot), row, col)
        return self.target.start(part, slot)

    def cancel(self) -> None:
        """Cancels the target."""
        self.target.cancel()
