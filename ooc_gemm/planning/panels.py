"""Panels: how k is cut, and which buffers of the device hold the panels."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..support.intervals import ceil_div, growing_panels, ranges

BUFFERS = 2
"""Pairs of panels on the device: one is filled while the other is multiplied."""

MORE_BUFFERS = 4
"""Pairs of small panels on the device, and panels of op(B) where those of op(A) stay there: with only two,
readers would stop at each."""

MOST_BUFFERS = 16
"""Most pairs of small panels on the device: readers then go on while C is begun, which takes some
milliseconds."""


SUMS_OF_LANE = 2
"""Sums for each thread that multiplies alone."""


@dataclass(frozen=True)
class Panels:
    """How k is cut into pairs of panels, and for how many of them the device has room."""

    k: int
    deepest: int
    """Depth of a panel; of the deepest where panels grow."""
    k_chunk: int
    """Panels that grow are cut at multiples of this, where chunks of A and of B end (`Problem.k_chunk`)."""
    growth: float = 1.0
    """How many times as deep as the one before a panel is, up to `deepest` (`growing_panels`). 1: all but the
    last are equally deep."""
    resident: bool = False
    """Whether all panels of op(A) stay on the device, each in a buffer of its own, while a row of blocks is
    made. Only the first of these blocks uploads them."""
    rows: int = 1
    """Rows of blocks whose panels of op(A) stay on the device at the same time, if they are `resident`."""
    columns: int = 0
    """Columns of blocks whose panels of op(B) stay on the device at the same time; 0: none."""
    interleaved: int = 1
    """Number of first blocks that are made at the same time: the first panels along k of all of them are
    multiplied, then their second ones, and so on."""
    lanes: int = 0
    """Threads each of which reads a pair of panels, and multiplies it alone, into sums of its own; 0: all
    threads work on the same pair. Each of them has a pair of buffers."""
    buffers: int = BUFFERS
    """Buffers for panels of op(B) unless they stay, and for those of op(A) unless they are `resident`."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield [start, stop) along k of each panel, in order: every k exactly once."""
        return iter(self.ranges)

    def __len__(self) -> int:
        return len(self.ranges) if self.growth > 1 else ceil_div(self.k, self.deepest)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) along k of each panel, in order."""
        if self.growth > 1:
            return growing_panels(self.k, self.deepest, self.k_chunk, self.growth)
        return tuple(ranges(self.k, self.deepest))

    def depths(self) -> dict[int, int]:
        """Return how many panels have each depth."""
        if self.growth > 1:
            return Counter(stop - start for start, stop in self.ranges)
        count = len(self)
        return Counter({self.deepest: count - 1}) + Counter([self.k - (count - 1) * self.deepest])

    @property
    def sums(self) -> int:
        """Number of sums, one of which is the block itself, into which panels are multiplied in turns. There
        are more of them than threads, so that one which is late does not stop the others at once."""
        return SUMS_OF_LANE * self.lanes if self.lanes else 1

    @property
    def stay(self) -> tuple[bool, bool]:
        """Whether panels of op(A), and of op(B), stay on the device for several blocks."""
        return self.resident, self.columns > 0

    @property
    def narrowing(self) -> bool:
        """Whether blocks beside each other become narrower."""
        return self.stay == (True, False)

    @property
    def a_buffers(self) -> int:
        """Number of buffers for panels of op(A)."""
        return self.rows * len(self) if self.resident else self.buffers

    @property
    def b_buffers(self) -> int:
        """Number of buffers for panels of op(B)."""
        return self.columns * len(self) if self.columns else self.buffers

    @property
    def staying(self) -> tuple[int, int]:
        """Numbers of buffers for panels of op(A), and of op(B), that stay on the device."""
        return self.a_buffers * self.stay[0], self.b_buffers * self.stay[1]

    def strips(self, operand: str, each: int, extent: int) -> list[int]:
        """Return the lines (rows of op(A), columns of op(B)) of each strip whose panels stay on the device;
        none where they do not stay. The last strip of C may have fewer than others, and those past it none.

        each: lines of a block. extent: lines of C.
        """
        count = {"a": self.rows * self.resident, "b": self.columns}[operand]
        all_of_them = count * each >= extent
        return [min(each, max(0, extent - i * each)) if all_of_them else each for i in range(count)]

    def rooms(self, operand: str, each: int, extent: int) -> list[tuple[int, int]]:
        """Return the lines and the depth for which each buffer of an operand has room. each, extent: as of
        `strips`."""
        if not (strips := self.strips(operand, each, extent)):
            return [(each, self.deepest)] * self.buffers
        return [(lines, stop - start) for lines in strips for start, stop in self.ranges]

    def pair(self, place: tuple[int, int], number: int, step: int) -> tuple[int, int]:
        """Return the numbers of the buffers that hold a panel of op(A) and one of op(B).

        place: the row and the column of their block among all blocks. number: of the panels along k. step: of
        the pair among those of all blocks.
        """
        (i, j), count, turn = place, len(self), step % self.buffers
        a = i % self.rows * count + number if self.resident else turn
        return a, j % self.columns * count + number if self.columns else turn
