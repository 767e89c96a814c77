"""How panels of op(A) and op(B) lie in the memory of a GPU."""

from typing import Any

from ...engine.ports import Operation
from ...support.intervals import round_up


class Layout:
    """The layout of panels for one operation. Operands are "a" and "b". Blocks, "c", are dense."""

    def __init__(self, operation: Operation):
        self._op, self._pitch = operation, operation.arithmetic.pitch

    def along_k(self, operand: str) -> bool:
        """Return whether panels of the operand lie with k along their rows."""
        wanted = self._op.arithmetic.along_k["ab".index(operand)]
        return self._stored_along_k(operand) if wanted is None else wanted

    def _stored_along_k(self, operand: str) -> bool:
        return not self._op.transpose_a if operand == "a" else self._op.transpose_b

    def turned(self, operand: str) -> bool:
        """Return whether panels of the operand are transposed against what is stored."""
        return operand != "c" and self._stored_along_k(operand) != self.along_k(operand)

    def pitch(self, operand: str, k: int, lines: int) -> int:
        """Return the number of elements from one row of a panel to the next, for `lines` rows of op(A) or
        columns of op(B)."""
        return round_up(k if self.along_k(operand) else lines, self._pitch)

    def row(self, operand: str, cols: int) -> int:
        """Return the number of elements from one row to the next of a panel, or C block, that is stored with
        rows of `cols`."""
        return cols if operand == "c" else round_up(cols, self._pitch)

    def at(self, operand: str, panel: tuple[int, int], into: tuple[int, int]) -> tuple[int, int]:
        """Return how many elements lie before row and column `into` of a panel, or C block, that is stored
        with the shape `panel`, and the number of elements from one of its rows in memory to the next."""
        if self.turned(operand):
            panel, into = panel[::-1], into[::-1]
        pitch = self.row(operand, panel[1])
        return into[0] * pitch + into[1], pitch

    def panel(self, memory: Any, operand: str, shape: tuple[int, int]) -> Any:
        """Return a view of a panel, or C block, that begins a flat array: a matrix of `shape`, oriented as
        the operand is stored."""
        rows, cols = shape
        if self.turned(operand):
            return self.panel(memory, "c", (cols, self.row(operand, rows)))[:, :rows].T
        pitch = self.row(operand, cols)
        return memory[: rows * pitch].reshape(rows, pitch)[:, :cols]
