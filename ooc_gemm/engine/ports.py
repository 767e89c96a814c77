"""What the engine asks of a device. `execute` knows nothing else of it.

A device has three streams, each doing its work in the order it was given: *upload* (host slot to
panel), *compute*, and *download* (C block to host slot). The engine orders work between streams by
events only: `record` marks a point in one, `wait` makes another wait for it. One of several devices has a
fourth, *pass*: what it takes from others, beside what is uploaded for the next panels.

    panels:  buffer p ∈ {0, …, panel_buffers − 1}, each one panel of op(A) and one of op(B), in C order, as
             stored or with k along their rows, which may be padded (`Arithmetic`)
    blocks:  buffer c ∈ {0, …, c_buffers − 1}, bm×bn of C, C order, dense
"""

from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..planning.plan import Block, Part, Piece, Plan
from ..planning.problem import Rates
from ..support.buffers import Bytes
from ..support.errors import DeviceError, RangeError
from ..support.trace import Trace
from .check import Rounding, Verdict
from .ring import Event

Array = npt.NDArray[Any]
UPLOAD, COMPUTE, DOWNLOAD = "upload", "compute", "download"
INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Arithmetic:
    """How a device multiplies: what it holds, what it adds up in, with which kernel."""

    kernel: str
    panel: np.dtype[Any]
    """Type of panel elements; inputs are converted to it on their way in."""
    block: np.dtype[Any]
    """Type of a C block while it accumulates; converted to C's type on its way out."""
    exact_k: int = 0
    """Integers held in floating point: products summed before they go over to `block`, so that every
    partial sum is exact. 0: no such limit."""
    why: str = ""
    """Why this kernel, for the plan."""
    pitch: int = 1
    """Rows of panels start at multiples of this many elements."""
    along_k: tuple[bool | None, bool | None] = (None, None)
    """Whether panels of op(A), and of op(B), lie with k along their rows; None: as the operand is stored."""
    line_bytes: int = 0
    """Scratch on the device for each row and column of a block, and each k of a panel."""
    scratch: tuple[int, int] = (0, 0)
    """Scratch on the device for each element of a panel of op(A), and of op(B)."""
    product_bytes: int = 0
    """Scratch on the device for each element of a block where α or β is complex: the product before that."""
    exact: bool = False
    """Every sum is an exact integer, of whatever type."""
    operand_error: float = 0.0
    """Largest relative error of an element of a panel as it is multiplied."""

    @property
    def check_type(self) -> np.dtype[Any]:
        """What checks of blocks add up in; integers wrap around."""
        if self.exact:
            return self.block if self.panel.kind in "iu" else np.dtype(np.int64)
        return np.dtype(np.complex128 if self.block.kind == "c" else np.float64)

    def rounding(self, run: int) -> Rounding:
        """Of blocks; `run` terms are added up in one register."""
        if self.exact:
            return Rounding(0.0)
        return Rounding.of(self.block, self.operand_error, run)


@dataclass(frozen=True)
class Operation:
    """C ← α·op(A)·op(B) + β·C, and how."""

    arithmetic: Arithmetic
    transpose_a: bool = False
    conjugate_a: bool = False
    transpose_b: bool = False
    conjugate_b: bool = False
    alpha: complex = 1.0
    beta: complex = 0.0
    verify: bool = False
    """Blocks are checked."""
    may_wrap: bool = False
    """Sums of these integers might pass int64: each panel is looked at."""


class Overflow:
    """Integers too wide, or alpha or beta too large, to be safe by their types: a bound on every partial sum,
    from the largest elements of each panel. Panels are multiplied when all of their pieces have been
    uploaded, by any thread."""

    def __init__(self, operation: Operation):
        self._wanted = operation.may_wrap
        self._alpha = abs(int(operation.alpha.real)) if self._wanted else 0
        self._beta = abs(int(operation.beta.real)) if self._wanted else 0
        self._largest: dict[tuple[str, int], int] = {}
        self._lock = Lock()
        self._bounds: dict[int, int] = {}

    def upload(self, piece: Piece, buffer: int, source: Array) -> None:
        """Note the largest element of a piece. Raises RangeError where int64 cannot hold it."""
        if not self._wanted or source.size == 0:
            return
        key, largest = (piece.operand, buffer), max(abs(int(source.min())), abs(int(source.max())))
        with self._lock:
            self._largest[key] = max(self._largest.get(key, 0), largest)
        if largest > INT64_MAX:
            raise RangeError(f"operand {piece.operand} holds integers past int64; convert it to float64")

    def multiply(self, block: Block, p: int, c: int, k: int, first: bool) -> None:
        """Raises RangeError where a sum in block `c` may pass int64."""
        if not self._wanted:
            return
        if first:
            self._bounds[c] = self._beta * self._largest.pop(("c", c), 0)
        a = self._largest.pop(("a", p), 0)
        b = a if block.diagonal else self._largest.pop(("b", p), 0)
        self._bounds[c] += self._alpha * a * b * k
        if self._bounds[c] > INT64_MAX:
            raise RangeError("a sum of products may exceed int64; convert the inputs to float64")


@dataclass(frozen=True)
class Limits:
    """What a device costs beside the plan's buffers, in bytes."""

    host_baseline: int
    device: int | None
    """Memory of its own that may be used; None where it computes in host memory."""
    device_baseline: int
    workspace: int
    readers: int
    writers: int
    check: int = 0
    """More of the workspace, for checks of blocks."""
    workers: int = 0
    """Other processes that do the work, each with these limits; 0: this one does."""
    weights: tuple[int, ...] = (1,)
    """How fast each of several devices is; all other numbers are of each."""
    linked: bool = True
    """Several devices can read each other's memory."""


class Check(Protocol):
    """The check of a block, under way."""

    def verdict(self) -> Verdict:
        """What it found; waits for it. Only until the block's buffer is used again, unless asked before."""


class Device(Protocol):
    """One device. Methods other than `start` and `close` may be called from any thread."""

    name: str
    model: str
    """What rates are remembered by."""

    def arithmetic(
        self,
        a: np.dtype[Any],
        b: np.dtype[Any],
        out: np.dtype[Any],
        shape: tuple[int, int, int],
        bound: int,
        kernel: str,
        precision: str,
    ) -> Arithmetic:
        """How α·op(A)·op(B) + β·C of these types and this shape (m, n, k) is computed. `bound`, for integers:
        no sum exceeds it. Raises InputError where the device or the kernel cannot."""

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """What the device costs, and how much of its memory may be used."""

    def rates(self, arithmetic: Arithmetic) -> Rates:
        """How fast each stage usually is, for predictions."""

    def most_flops(self, kernel: str, panel: str) -> float:
        """Operations a second that a kernel cannot exceed on this device, for panels of a type of that name;
        infinite where nothing is known. A measured rate above it is wrong."""

    def start(self, plan: Plan, operation: Operation, trace: Trace) -> None:
        """Allocate every buffer of the plan."""

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Host memory for slots, not touched yet."""

    def prepare(self, buffer: Bytes) -> None:
        """Called before copies from or to one of them: make it ready for the device to copy at full speed."""

    def upload(self, source: Array, piece: Piece, buffer: int) -> Event:
        """Place a piece (rows × cols, on the host) in its panel, or C block; the event guards `source`."""

    def multiply(self, block: Block, panel: tuple[int, int], p: int, c: int, first: bool) -> None:
        """Block c ← α·(panels p) + (β if first else 1)·block c. On the diagonal the panel of op(A) is that of
        op(B), too, and only what lies on and below the diagonal counts. Where panels of op(A) stay
        (`Plan.resident`), each has its own number, and is not to be changed."""

    def mirror(self, block: Block, c: int, col: int = 0) -> None:
        """Above the diagonal that begins in column `col`, as many columns as there are rows become what they
        are below."""

    def scale(self, block: Block, c: int) -> None:
        """Block c ← β·block c, for products with k = 0."""

    def check(self, block: Block, c: int) -> Check:
        """Compare block c, which is finished, with what its panels say (`Operation.verify`)."""

    def finish(self, block: Block, c: int) -> None:
        """Block c has been given all its work: it may be downloaded."""

    def download(self, block: Block, part: Part, c: int, target: Array) -> Event:
        """Copy one chunk's part of block c, or of its transpose, to the host, when it is finished: perhaps
        before the rest is."""

    def record(self, stream: str) -> Event:
        """The point that `stream` has been given work up to."""

    def wait(self, stream: str, event: Event) -> None:
        """Let `stream` do nothing more until `event`."""

    def free_panels(self) -> None:
        """Nothing more is multiplied: give back what only that needs, while blocks are downloaded."""

    def peak_bytes(self) -> int:
        """Most device memory held, in bytes; 0 where it computes in host memory."""

    def cancel(self) -> None:
        """Drop what is under way as soon as may be; whoever waits for an event is woken."""

    def close(self) -> None:
        """Finish or drop what is under way; free every buffer."""

    def explain(self, error: Exception) -> DeviceError | None:
        """What an error of the device's libraries means, asked after `close`; None for any other error.
        OutOfMemoryError, with a limit that another plan may keep to, where its memory was the matter."""


class Member(Device, Protocol):
    """A device that can be one of several."""

    def reaches(self, other: Device) -> bool:
        """Whether `take` works between the two."""

    def take(
        self,
        other: Device,
        panel: tuple[int, int],
        rows: tuple[int, int],
        cols: tuple[int, int],
        buffer: int,
        uploaded: Event,
    ) -> None:
        """Copy rows × cols of a panel of op(B) as stored, of this size, from another device, which this one
        reaches, after a point in that one's upload stream. The other's panel may only be written again after
        a point in this one's stream of what it takes."""

    def alive(self) -> bool:
        """Whether it still answers, asked after an error."""
