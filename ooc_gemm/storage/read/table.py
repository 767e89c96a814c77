"""Elements of 8 bits that a table maps to other elements of 8 bits, where they are read.

Readers look elements up in the slot that they were read into. So each device multiplies them as it multiplies
any integers of 8 bits, exactly, and knows nothing of the table.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ...planning.schedule import Piece
from ...support.buffers import Bytes
from ...support.errors import InputError
from ...support.intervals import ranges
from .source import Array, Opened, Source

STRIP = 1 << 14
"""Elements that are looked up together: NumPy makes 8 bytes of each on the way."""


class TableSource(Source):
    """Reads pieces by another source, and looks their elements up."""

    def __init__(self, source: Source, table: Array):
        """table: what becomes of each of the 256 bytes, int8 or uint8."""
        traits = replace(source.matrix.traits, asynchronous=False)
        super().__init__(source.name, table.dtype, replace(source.matrix, traits=traits))
        self._source, self._table = source, table.view(np.uint8)

    def measure(self, limit: int) -> int:
        """Measures the source."""
        return self._source.measure(limit)

    def cancel(self) -> None:
        """Cancels the source."""
        self._source.cancel()

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Reads into the slot, and changes the piece there."""
        values, moved = self._source.read(piece, slot)
        found, width = values.view(np.uint8), max(1, values.shape[1])
        for start, stop in ranges(len(found), max(1, STRIP // width)):
            for left, right in ranges(width, STRIP):
                some = found[start:stop, left:right]
                np.take(self._table, some, out=some, mode="wrap")  # any byte has an entry
        return found.view(self.dtype), moved


def as_table(given: Any) -> Array:
    """The table that a user gives, as int8, or uint8 where it has entries above 127. Raises InputError."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InputError("table holds no numbers; give 256 integers") from error
    if found.shape != (256,) or found.dtype.kind not in "iu":
        raise InputError(f"table has shape {found.shape} of {found.dtype}; give 256 integers")
    least, most = int(found.min()), int(found.max())
    if least < -128 or most > (127 if least < 0 else 255):
        raise InputError(f"table has entries from {least} to {most}; give such as fit 8 bits")
    return found.astype(np.int8 if most <= 127 else np.uint8)


def tabled(opened: Opened, table: Array) -> Opened:
    """An operand whose elements a table maps (`as_table`). Raises InputError where they are not of 8 bits."""
    if opened.dtype.kind not in "iu" or opened.dtype.itemsize != 1:
        raise InputError(
            f"{opened.name} holds {opened.dtype}, and a table maps integers of 8 bits; convert it"
        )
    found = TableSource(opened.source, table)
    traits = replace(opened.matrix.traits, asynchronous=False)
    return replace(opened, source=found, matrix=replace(opened.matrix, traits=traits))
