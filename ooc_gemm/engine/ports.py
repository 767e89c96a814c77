"""What the engine asks of a source, a target and a session of a device. `execute` knows nothing else of them.

A session has three streams, each of which does its work in the order in which it was given: *upload* (host
slot to panel), *compute*, and *download* (C block to host slot). The engine orders work between streams by
events only: `record` marks a point in one stream, `wait` makes another stream wait for it. A session that is
one of several has a fourth stream, *pass*, in which it copies from the others while the next panels are
uploaded.

    panels:  buffer p ∈ {0, …, panel_buffers − 1}, each one panel of op(A) and one of op(B), in C order, as
             stored or with k along their rows, which may be padded (`Arithmetic`)
    blocks:  buffer c ∈ {0, …, c_buffers − 1}, up to bm×bn of C, C order, dense
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..planning.machine import Rates
from ..planning.plan import Plan
from ..planning.schedule import Block, Part, Piece
from ..support.buffers import Bytes
from ..support.errors import DeviceError
from ..support.intervals import reuses
from ..support.onward import Inward, Onward
from ..support.trace import Trace
from .check import Rounding, Verdict
from .reduction import Pairs, Ranked, Reduction, Scorer
from .ring import Event
from .standardize import Standardizer
from .transform import Transform

Array = npt.NDArray[Any]
UPLOAD, COMPUTE, DOWNLOAD = "upload", "compute", "download"


@dataclass(frozen=True)
class Arithmetic:
    """How a device multiplies: the types of panels and blocks, the kernel, and what the kernel needs."""

    kernel: str
    panel: np.dtype[Any]
    """Type of panel elements, to which inputs are converted on upload."""
    block: np.dtype[Any]
    """Type of a C block while it accumulates."""
    largest: tuple[int, int] = (0, 0)
    """For integers: the largest magnitude that an element of op(A), and of op(B), may have by its type."""
    why: str = ""
    """Why this kernel was chosen, as the plan shows it."""
    pitch: int = 1
    """Each row of a panel starts at a multiple of this many elements."""
    along_k: tuple[bool | None, bool | None] = (None, None)
    """Whether panels of op(A), and of op(B), lie with k along their rows; None: as the operand is stored."""
    turns: bool = False
    """Whether the kernel transposes panels that do not lie along k, in scratch memory of their size."""
    line_bytes: int = 0
    """Bytes of scratch on the device for each row and column of a block, and for each k of a panel."""
    scratch: tuple[int, int] = (0, 0)
    """Bytes of scratch on the device for each element of a panel of op(A), and of op(B)."""
    product_bytes: int = 0
    """Bytes of scratch on the device for each element of a block if α or β is complex: it holds the product
    before these are applied."""
    exact: bool = False
    """Whether every sum is an exact integer, in whatever type."""
    operand_error: float = 0.0
    """Largest relative error of an element of a panel at the time it is multiplied."""
    panel_b: np.dtype[Any] | None = None
    """Type of the elements of op(B)'s panels where it is another one than `panel`, of the same size."""
    least: tuple[int, int] = (0, 0)
    """Values of m·n/(m + n) and of k of a product of panels from which this kernel is faster than `other`."""
    other: "Arithmetic | None" = None
    """What is chosen where the memory holds no such panels."""
    checked_in: np.dtype[Any] | None = None
    """Type in which checks of blocks of integers add up, where it is another one than the block's."""
    once: bool = False
    """Whether panels that stay are prepared once, where they lie, and are then no longer as they were
    uploaded. Where another product needs them so, the run fails, and goes on without this."""
    in_place: bool = True
    """Whether complex panels are embedded or conjugated where they lie, also those that are to stay."""

    @property
    def keeps_a(self) -> bool:
        """Whether a panel of op(A) can be multiplied again."""
        return not (self.panel.kind == "c" and self.in_place)

    @property
    def panels(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Types of the elements of panels of op(A) and of op(B)."""
        return self.panel, self.panel if self.panel_b is None else self.panel_b

    def pays(self, m: int, n: int, k: int) -> bool:
        """Return whether this kernel is the fastest known for panels of this size."""
        return reuses(m, n, k, self.least)

    @property
    def check_type(self) -> np.dtype[Any]:
        """The type in which checks of blocks add up. Integers wrap around."""
        if self.exact:
            return self.checked_in or (self.block if self.panel.kind in "iu" else np.dtype(np.int64))
        return np.dtype(np.complex128 if self.block.kind == "c" else np.float64)

    def rounding(self, run: int) -> Rounding:
        """How blocks are rounded if one register adds up `run` terms."""
        if self.exact:
            return Rounding(0.0)
        return Rounding.of(self.block, self.operand_error, run)


@dataclass(frozen=True)
class Operation:
    """The operation C ← α·op(A)·op(B) + β·C, and how it is carried out."""

    arithmetic: Arithmetic
    transpose_a: bool = False
    conjugate_a: bool = False
    transpose_b: bool = False
    conjugate_b: bool = False
    alpha: complex = 1.0
    beta: complex = 0.0
    verify: bool = False
    """Whether each block is checked."""
    may_wrap: bool = False
    """Whether sums of these integers might exceed int64, so that the elements of each panel must be looked
    at."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    """What happens to the elements of an operand, `a` or `b`, when they are uploaded. A device whose `Limits`
    do not say that it applies transforms is given none."""
    standardizer: Standardizer | None = None
    """What standardizes each panel of op(A) before it is multiplied, in a product of one symmetric block
    (`Problem.whole`). Of a band, it is the panel of op(B) that holds all elements."""
    reduction: Reduction | None = None
    """What the device does with finished blocks instead of having them downloaded (`Device.reduces`)."""
    ranked: Ranked | None = None
    """The reduction for which the device finds the best of each row, which are downloaded instead of finished
    blocks (`Problem.found_bytes`)."""
    narrowed: np.dtype[Any] | None = None
    """The type of C where the device converts finished blocks to it (`Limits.narrows`). None: blocks are
    downloaded as they are, and the target converts them."""

    @property
    def leaves(self) -> np.dtype[Any]:
        """The type in which parts of C are downloaded."""
        return self.narrowed or self.arithmetic.block


class Lost(NamedTuple):
    """What the type of C does not hold of a part of it: integers past its limits, or finite numbers that
    became infinite."""

    elements: int = 0
    """How many there are."""
    least: int = 0
    """The least of these integers; 0 where none is below the limits."""
    greatest: int = 0
    """The greatest of these integers; 0 where none is above the limits."""


@dataclass(frozen=True)
class Limits:
    """What a device needs besides the plan's buffers (in bytes), and how many threads serve it."""

    host_baseline: int
    device: int | None
    """Memory of the device that may be used; None if it computes in host memory."""
    device_baseline: int
    workspace: int
    readers: int
    writers: int
    check: int = 0
    """Additional workspace for checks of blocks."""
    workers: int = 0
    """Number of other processes that do the work, each with these limits; 0: this process does it."""
    weights: tuple[int, ...] = (1,)
    """Relative speed of each of several devices. All other numbers hold for one device."""
    linked: bool = True
    """Whether several devices can read each other's memory."""
    transforms: bool = False
    """Whether `upload` applies `Operation.transforms`."""
    narrows: bool = False
    """Whether finished blocks are converted to `Operation.narrowed`."""
    lanes: int = 0
    """How many threads may multiply pairs of panels alone at a time (`LaneSession`)."""
    decodes: int = 0
    """How many parts of chunks the device decodes at a time, where `upload` takes chunks as they are stored
    (`Matrix.encoded`)."""
    most_kept: int = 0
    """Up to how many of the best elements of each row the device finds in its blocks (`Reduction.wanted`)."""


class Source(Protocol):
    """A stored matrix from which pieces are read."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements, in native byte order."""

    @property
    def asynchronous(self) -> bool:
        """Whether a read that has been started continues without a thread of Python's."""

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        """Read `piece` on the calling thread. Returns what the function does that `start` returns."""

    def start(
        self, piece: Piece, slot: Bytes, onward: Onward | None = None
    ) -> Callable[[], tuple[Array, int]]:
        """Start to read `piece` into `slot`. The function that is returned must be called, whatever happens.
        It waits for the read and returns a view of the piece's rows × cols, in the slot or where the data
        already is, and the number of bytes read.

        `onward`: where the source may send the piece on to. Then `taken` is set, and not unset before that
        function returns."""

    def cancel(self) -> None:
        """Let no reader wait any longer for a store that may never answer."""


Bring = Callable[[Sequence[Part], Inward], Callable[[], int]]
"""What a target does with parts of C, and the place where a device has them (`Target.bring`)."""


class Target(Protocol):
    """The stored C, to which chunks are written."""

    def view(self, part: Part, slot: Bytes) -> Array:
        """Return the view of `slot` in which the part's rows × cols belong."""

    background: bool
    """Whether a write that has been started continues without a thread of Python's."""

    def note_lost(self, elements: int, least: int, greatest: int) -> None:
        """Take note of what C's type does not hold of a part (`Lost`), before that part is stored. Raises
        RangeError for integers."""

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        """Start to store the chunk in a slot, whole and atomically. The function that is returned must be
        called, whatever happens. It waits for the write and returns the number of bytes written."""

    @property
    def bring(self) -> Bring | None:
        """Starts to store the chunks of parts, as `start` does, for which `Session.inward` has returned
        something, and which are finished. 0 bytes written mean that the chunks must come in slots. None where
        all chunks must."""

    def cancel(self) -> None:
        """Let no writer wait any longer for a store that may never answer."""


class Check(Protocol):
    """The check of a block, which may still be under way."""

    def verdict(self) -> Verdict:
        """Wait for the check and return its verdict. The first call must come before the block's buffer is
        used again."""


@dataclass(frozen=True)
class Failure:
    """What an error of a device's libraries means, and what a run can still count on."""

    error: DeviceError
    limit: int | None = None
    """If the device's memory ran out: the bytes that another plan may count on."""
    left: "Device | None" = None
    """If one of several devices has failed: the others, as a device. None if this process can use none of
    them any more, as after an error of a CUDA kernel."""
    devices: tuple[int, ...] = ()
    """If one of several devices has failed: the numbers of all of them."""
    undecoded: bool = False
    """Whether the device could not decode a chunk, which the host may be able to, or explain."""
    prepared: bool = False
    """Whether a panel was needed as it was before it was prepared (`Arithmetic.once`)."""


class Hardware(Protocol):
    """What the planner asks about what multiplies: a device, or the devices of a cluster."""

    @property
    def name(self) -> str:
        """The device's name, such as `cuda`. That of a cluster also says how many workers there are."""

    @property
    def model(self) -> str:
        """Name of the model, under which rates are remembered."""

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
        """Choose how α·op(A)·op(B) + β·C of these types and this shape (m, n, k) is computed. `bound`, for
        integers: no sum exceeds it. Raises InputError if the device or the kernel cannot do it."""

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """Return what the device needs, and how much of its memory may be used."""

    def rates(self, arithmetic: Arithmetic) -> Rates:
        """Return the default rates of each stage, for predictions where nothing was measured."""

    def most_flops(self, kernel: str, panel: str) -> float:
        """Return the operations per second that a kernel cannot exceed on this device for panels of the type
        of that name; infinity if nothing is known. A measured rate above it is wrong."""


class Device(Hardware, Protocol):
    """One device. It answers questions, and opens a session for each plan that it runs. Several sessions may
    be opened one after the other, but not at the same time."""

    reduces: bool
    """Whether it hands blocks to `Operation.reduction` where it computes them. A target can reduce what other
    devices download."""

    @property
    def standardizes(self) -> bool:
        """Whether it applies `Operation.standardizer`."""

    def open(self, plan: Plan, operation: Operation, trace: Trace) -> "Session":
        """Allocate every buffer of the plan. If that fails, what has been allocated is freed."""

    @property
    def scorer(self) -> Callable[[Pairs], Scorer] | None:
        """What keeps rows in the memory of the device, and scores pairs of them there; None if the host has
        to."""

    def host_memory(self) -> "HostMemory":
        """Return a source of host memory outside of any session."""

    def explain(self, error: Exception) -> Failure | None:
        """Translate an error of the device's libraries; return None for any other error. This is called when
        no session is open."""


class HostMemory(Protocol):
    """Host memory from which a device copies at full speed. Any thread may call these methods."""

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Return host memory for slots, which has not been touched yet."""

    def prepare(self, buffer: Bytes, used: int | None = None) -> None:
        """Make a host buffer ready to be copied at full speed. This is called before each copy from or to it,
        when no other one is under way. `used`: bytes at its beginning that are copied; None: all."""

    def prepared(self, buffer: Bytes) -> bool:
        """Whether `prepare` has made all of the buffer ready."""

    def release(self, buffers: list[Bytes]) -> None:
        """Undo what `prepare` has done for some buffers, from and to which nothing is copied any more."""

    def close(self) -> None:
        """Undo what `prepare` has done."""


class Uploads(HostMemory, Protocol):
    """What readers bring pieces to. Any thread may call these methods."""

    def upload(self, source: Array, piece: Piece, buffer: int) -> Event:
        """Copy a piece (rows × cols, on the host) to its place in a panel or C block. `source` may change
        once the event has completed. Of an operand whose chunks are decoded on the device
        (`Matrix.encoded`), `source` may be its chunks as they are stored, in one dimension and without
        gaps."""

    def onward(self, piece: Piece, dtype: np.dtype[Any], buffer: int) -> Onward | None:
        """Return the place on the device of a piece, if others than `upload` can copy it there. Its `ended`
        must be called when the piece has been read.
        `dtype`: the type of its elements as they are stored."""


class Session(Uploads, Protocol):
    """The run of one plan on a device, with all of its buffers. Any thread may call methods other than
    `close`."""

    def multiply(
        self, block: Block, panel: tuple[int, int], pair: tuple[int, int], c: int, first: bool
    ) -> None:
        """Compute block c ← α·(panels) + (β if first else 1)·block c. `pair`: the buffers of the panels of
        op(A) and op(B).

        For a block on the diagonal, the panel of op(A) is also that of op(B), and only what lies on and below
        the diagonal counts. For a band of such a block, the panel of op(A) is first copied from that of
        op(B). The kernel must not change panels that stay on the device (`Panels.resident`, `columns`).
        """

    def mirror(self, block: Block, c: int, col: int = 0) -> None:
        """Copy what lies below the diagonal that begins in column `col` to above it, transposed. This
        concerns as many columns as the block has rows."""

    def scale(self, block: Block, c: int) -> None:
        """Compute block c ← β·block c, for products with k = 0."""

    def check(self, block: Block, c: int) -> Check:
        """Start to check the finished block c against its panels (`Operation.verify`)."""

    def finish(self, block: Block, c: int) -> None:
        """Note that all work on block c has been handed over, so that it may be downloaded. Where the type of
        C is `Operation.narrowed`, the block is converted to it first."""

    def download(self, block: Block, part: Part, c: int, target: Array) -> Event:
        """Copy the part of block c, or of its transpose, that belongs to one chunk to the host as soon as
        that part is finished, which may be before the rest of the block is. Of a block that was reduced it
        uses `target`, the bytes of a slot, as it needs them; what it has found is with the reduction once the
        event was waited for."""

    @property
    def brings(self) -> bool:
        """Whether `inward` answers for the parts of C."""

    def inward(self, block: Block, parts: Sequence[Part], c: int) -> Inward | None:
        """Return the place of parts of block c, if others than `download` can copy them from there as they
        are stored. The parts are equally large, and one is to the right of the other."""

    def lost(self, block: Block, part: Part, c: int) -> Lost:
        """Return what C's type does not hold of a part. This is called when its download has completed.
        Raises what `Device.explain` explains where a chunk of which the part was made was not decoded."""

    def gathers(self, pair: tuple[int, int]) -> bool:
        """Whether `record` had better wait, because what was uploaded to the panels in these buffers can be
        decoded together with what comes soon. It becomes false also if nothing comes."""

    def record(self, stream: str, pair: tuple[int, int] | None = None) -> Event:
        """Return an event that completes when `stream` has done all work that it has been given so far.
        `pair`: in the upload stream, the buffers of the panels of op(A) and of op(B) that are complete; all
        are where it is None."""

    def wait(self, stream: str, event: Event) -> None:
        """Make `stream` wait for `event` before it does anything that it is given later."""

    def free_panels(self) -> None:
        """Free what only multiplications need. This is called after the last one, while blocks are
        downloaded."""

    def peak_bytes(self) -> int:
        """Return the most device memory that was held, in bytes; 0 if the device computes in host memory.
        This may be called after `close`."""

    def cancel(self) -> None:
        """Drop the work under way as soon as possible, and wake threads that wait for an event."""

    def close(self) -> None:
        """Finish or drop the work under way, and free every buffer."""


@runtime_checkable
class LaneSession(Session, Protocol):
    """A session in which threads may multiply pairs of panels alone (`Limits.lanes`)."""

    def multiply_alone(
        self, block: Block, panel: tuple[int, int], lane: int, number: int, first: bool
    ) -> None:
        """Add the product of the pair of panels in the buffers `lane` to a sum, on the calling thread. What
        was uploaded may lie in its slot until then. number: of the sum; 0 is the block. first: nothing was
        added to this sum before."""

    def add_up(self, block: Block, count: int) -> None:
        """Add the first `count` sums, one of which is the block. This is called when all is multiplied."""


class Member(Device, Protocol):
    """A device that can be one of several."""

    def open(self, plan: Plan, operation: Operation, trace: Trace) -> "MemberSession":
        """Allocate every buffer of the plan. If that fails, what has been allocated is freed."""

    def reaches(self, other: Device) -> bool:
        """Whether sessions of this device can take panels from those of the other."""

    def alive(self) -> bool:
        """Whether the device still answers. This is called after an error."""


class MemberSession(Session, Protocol):
    """The share of one of several devices in a run."""

    def share(self) -> None:
        """Begin to let other devices reach the panels of op(B). This is called when all have allocated
        theirs."""

    def take(
        self,
        other: Session,
        panel: tuple[int, int],
        rows: tuple[int, int],
        cols: tuple[int, int],
        buffer: int,
        uploaded: Event,
    ) -> None:
        """Copy rows × cols of a panel of op(B), which is as stored and of size `panel`, from the session of a
        device that this one reaches. The copy waits for `uploaded`, an event in that session's upload stream.
        The other panel may be overwritten only after an event in this session's stream *pass*."""
