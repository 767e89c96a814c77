"""Refuses sums of integers that int64 might not hold."""

from threading import Lock
from typing import Any

import numpy as np

from ..planning.schedule import Block, Piece
from ..support.errors import PAST_INT64, RangeError
from .ports import Array, Operation

INT64_MAX = 2**63 - 1


class Overflow:
    """Guards integer sums that might exceed int64: it bounds every partial sum by the largest elements of
    each panel.

    It is needed where the types of the operands, α or β do not rule an overflow out. Any thread may upload; a
    panel is multiplied when all of its pieces have been uploaded.
    """

    def __init__(self, operation: Operation, noted: bool = False):
        """`noted`: note the largest elements of all panels, even if no sum can exceed int64."""
        self._guards = operation.may_wrap
        self._wanted = self._guards or noted
        self._alpha = abs(int(operation.alpha.real)) if self._guards else 0
        self._beta = abs(int(operation.beta.real)) if self._guards else 0
        self._largest: dict[tuple[str, int], int] = {}
        self._lock = Lock()
        self._bounds: dict[int, int] = {}

    @property
    def looks(self) -> bool:
        """Whether it must know the largest element of each piece."""
        return self._wanted

    def upload(self, piece: Piece, buffer: int, source: Array) -> None:
        """Note the largest element of a piece. Raises RangeError if int64 cannot hold it."""
        if not self._wanted or source.size == 0:
            return
        least, most = int(source.min()), int(source.max())
        self.found(piece, buffer, max(-least, most), source.dtype)

    def found(self, piece: Piece, buffer: int, largest: int, dtype: np.dtype[Any]) -> None:
        """Note the largest magnitude of a piece of this type. Raises RangeError if int64 cannot hold it."""
        self.note(piece.operand, buffer, largest)
        if dtype.kind == "u" and largest > INT64_MAX:
            raise RangeError(
                f"operand {piece.operand} holds integers past int64; give out_dtype='float64', which rounds "
                "them"
            )

    def note(self, operand: str, buffer: int, largest: int) -> None:
        """Note that a panel or block holds elements of up to this magnitude."""
        with self._lock:
            key = operand, buffer
            self._largest[key] = max(self._largest.get(key, 0), largest)

    def multiply(
        self,
        block: Block,
        pair: tuple[int, int],
        c: int,
        k: int,
        first: bool,
        stay: tuple[bool, bool] = (False, False),
    ) -> tuple[int, int]:
        """Update the bound of block `c`, and return the largest magnitudes in the panels of op(A) and op(B).
        `pair`: their buffers. `stay`: whether they stay on the device; then the largest magnitude is that of
        all panels that were in the buffer. Raises RangeError if a sum in the block may exceed int64."""
        if not self._wanted:
            return 0, 0
        if first:
            self.scale(c)
        a = self._take(("a", pair[0]), stay[0])
        b = a if block.diagonal else self._take(("b", pair[1]), stay[1])
        a = b if block.band else a
        self._add(c, self._alpha * a * b * k)
        return a, b

    def _take(self, panel: tuple[str, int], stays: bool) -> int:
        return self._largest.get(panel, 0) if stays else self._largest.pop(panel, 0)

    def scale(self, c: int) -> None:
        """Begin with the bound of β·(old C) in block `c`. Raises RangeError if that may exceed int64."""
        self._bounds[c] = 0
        self._add(c, self._beta * self._largest.pop(("c", c), 0))

    def _add(self, c: int, bound: int) -> None:
        self._bounds[c] += bound
        if self._bounds[c] > INT64_MAX:
            raise RangeError(PAST_INT64)
