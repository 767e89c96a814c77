"""What happens to elements of operands on their way into a GPU's panels: kernels/prepare/place.cu, on the
upload stream.

    slot ──copy──► staging buffer ──place: convert, subtract, scale, fill──► panel
"""

import math
from typing import Any

import numpy as np

from ...cuda_kernels import preparations
from ...cuda_kernels.config import Config
from ...cuda_kernels.launch import load
from ...cuda_kernels.product import Operand
from ...engine.ports import Array, Operation
from ...engine.transform import Lines, as_element
from ...planning.schedule import Piece
from .panels import Layout

_HOST_TO_DEVICE = 1
"""cudaMemcpyKind."""
_NONE, _EQUAL, _NAN = 0, 1, 2
"""What is missing, as place.cu numbers it."""


class Transforms:
    """The transforms of one operation, with their vectors on the device."""

    def __init__(
        self, operation: Operation, layout: Layout, allocate: Any, runtime: Any, stream: Any
    ) -> None:
        """`allocate`: (elements, dtype) → a device array. `runtime`: CUDA's, as CuPy has it. `stream`: in
        which all work is done."""
        self._op, self._layout, self._stream = operation, layout, stream
        self._panel = operation.arithmetic.panel
        self._real = np.dtype(self._panel.char.lower())
        vectors: dict[int, Array] = {}
        for transform in operation.transforms.values():
            vectors |= {
                id(vector): vector for lines in (transform.rows, transform.cols) for vector in _of(lines)
            }
        self._kernels: dict[tuple[np.dtype[Any], bool], tuple[Config, Any]] = {}
        self._at: dict[int, int] = {}
        self._memory = allocate(sum(map(len, vectors.values())), self._real) if vectors else None
        at = self._memory.data.ptr if self._memory is not None else 0
        for key, vector in vectors.items():
            numbers = np.ascontiguousarray(vector.real, self._real)
            runtime.memcpyAsync(at, numbers.ctypes.data, numbers.nbytes, _HOST_TO_DEVICE, stream.ptr)
            self._at[key] = at
            at += numbers.nbytes
        stream.synchronize()

    def place(
        self, piece: Piece, dtype: np.dtype[Any], shape: tuple[int, int], staged: Operand, panel: int
    ) -> None:
        """Start to transform a piece of this type and shape, which `staged` holds as it is stored.
        `panel`: the address of its panel. One thread at a time may call this."""
        rows, cols = shape
        if not rows * cols:
            return
        transform, turned = self._op.transforms[piece.operand], self._layout.turned(piece.operand)
        config, kernel = self._kernel(dtype, turned)
        start, pitch = self._layout.at(piece.operand, piece.panel, piece.into)
        i64, u = np.int64, np.uintp
        vectors = (
            *self._pointers(transform.rows, piece.rows[0]),
            *self._pointers(transform.cols, piece.cols[0]),
        )
        gone, missing = as_compared(transform.missing, dtype)
        to = u(panel + start * self._panel.itemsize)
        args = (
            i64(rows), i64(cols), u(staged.ptr), i64(staged.ld), to, i64(pitch), *vectors,
            np.int32(gone), missing, self._real.type(transform.fill),
        )  # fmt: skip
        kernel(config.grid(rows, cols), config.block, args, self._stream)

    def _kernel(self, stored: np.dtype[Any], turned: bool) -> tuple[Config, Any]:
        """Return the kernel for a stored type, and its configuration. One thread at a time may call this."""
        if (stored, turned) not in self._kernels:
            config = preparations.place(stored.name, self._panel.name, turned)
            self._kernels[stored, turned] = config, load(config)[config.kernel]
        return self._kernels[stored, turned]

    def _pointers(self, lines: Lines, first: int) -> tuple[np.uintp, ...]:
        """Return the addresses of both parts of the shift and of the scale of line `first`; 0 where there
        are none."""
        high, low = lines.shift or (None, None)
        skipped = first * self._real.itemsize
        return tuple(
            np.uintp(0 if vector is None else self._at[id(vector)] + skipped)
            for vector in (high, low, lines.scale)
        )


def _of(lines: Lines) -> list[Array]:
    """Return the vectors that there are."""
    return [*(lines.shift or ()), *(() if lines.scale is None else (lines.scale,))]


def as_compared(missing: float | None, dtype: np.dtype[Any]) -> tuple[int, Any]:
    """Return which elements of a stored type are missing, as place.cu numbers it, and the number that they
    are equal to, in the type in which the kernel compares. On the host that is `missing_of`."""
    compared = np.dtype(np.float32) if dtype == np.float16 else dtype
    nothing = compared.type(0)
    if missing is None:
        return _NONE, nothing
    if math.isnan(missing):
        return (_NAN if dtype.kind == "f" else _NONE), nothing
    number = as_element(missing, dtype)
    return (_NONE, nothing) if number is None else (_EQUAL, compared.type(number))
