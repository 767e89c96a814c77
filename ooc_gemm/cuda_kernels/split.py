"""Splits float32 operands in two float16 planes each, for fp16x3 (kernels/prepare/survey.cu and split.cu).

largest elements of rows and columns ──► powers of two along m, n and k ──► two planes, exponents
                                    └──► judge: raises a flag where three products would be inaccurate

One sweep over each operand finds all that (`survey`). Where that does not do, as with units along k, lines
are counted again; the device decides that. A panel that stays for several products is split once, where it
lies. Where another product would need it as it was, the device says that it is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, reuses, round_up
from . import driver, preparations
from .driver import Kernel
from .launch import load
from .product import Operand, Product, Stay
from .scratch import Scratch

PITCH_BYTES = 256
"""Rows of an operand must start at multiples of this many bytes: a segment of both planes of split.cu. Tensor
maps and ldmatrix need 16."""
LINE_BYTES, DEPTH_BYTES, STATE_BYTES, KEPT_BYTES = 32, 12, 36, 16
"""Bytes of device memory of split.cu: a `Line` for each row and column of C; the largest elements and d of
each k; a `State`; and a `Kept` for each panel that stays."""
EXPONENT_BYTES = 4
"""Bytes of the exponent of a row or column of C."""
BYTES_PER_LINE = LINE_BYTES + EXPONENT_BYTES
"""Bytes of device memory for each row and column of C. For each k they are more than enough."""
LOW_SHARE = 1 / 4
"""fp16x3 takes operands if at most this share of the elements in each line is low. Shares are weighted by the
elements that carry the sums of the other operand (`judge` in split.cu)."""
LEAST_TERMS, LEAST_DENSITY = 32, 1 / 16
"""Least number of terms that a sum must effectively have for three products to be as accurate as float32, and
the least share of k that these must be: the sums of fp16x3 are rounded for terms of zero, too."""
SPLIT_PAYS, SPLIT_PAYS_DEEP = 600, 256
"""Values of m·n/(m + n) and of k from which fp16x3, with its split, is faster than plain float32 on an
H200."""

_SURVEY = "survey", "settle"
_SPLIT = (
    "equilibrate", "judge", "row_lines", "column_largest", "column_exponents", "column_counts", "split",
    "keep",
)  # fmt: skip
_SIGN = {"a": 1, "b": -1}
"""Sign of d: op(A) is multiplied by it, op(B) divided."""
_JUDGES, _SURVEYORS, _ROW_THREADS, _ROWS_AT_ONCE = 512, 512, 512, 4
"""Threads of `equilibrate` and `judge`, and of `survey`; threads of `row_lines`, and how many of its blocks
each multiprocessor gets."""
_THREADS, _STRIP = 256, 128
"""Threads of other kernels, and rows of their blocks that reduce columns."""
_PART, _ROWS_OF_SURVEY = 256, 64
"""Elements along k of a block of `survey`; its rows if they are lines. If columns are lines, it has 256."""
_SEGMENTS = 8 * 4
"""Segments of 64 elements that a block of `split` takes at a time."""
_AT_ONCE = 8
"""Most blocks of `survey` and of `split` for each multiprocessor. A panel that is split already would get
tens of thousands, which need 50 µs to do nothing."""
_DEVICE_TO_HOST = 2
"""cudaMemcpyKind."""


@dataclass(frozen=True, slots=True)
class Split:
    """Addresses that a product of split operands needs. All are 0 if nothing was split."""

    a: int = 0
    """Exponents of the rows of op(A)."""
    b: int = 0
    """Exponents of the columns of op(B)."""
    flag: int = 0
    """A flag of 32 bits: if it is set, the fallback makes the product."""

    def below(self, row: int) -> "Split":
        """Return these addresses for the rows of op(A) from `row` on."""
        return replace(self, a=self.a + EXPONENT_BYTES * row)


@dataclass(frozen=True, slots=True)
class _Side:
    """One operand that is being split."""

    name: str
    """a or b."""
    operand: Operand
    count: int
    """Number of lines: rows of op(A), or columns of op(B)."""
    lines: int
    """Address of a `Line` for each."""
    exponents: int
    """Address of an exponent for each."""
    largest: int
    """Address of the largest element of each k; 0: it is not wanted."""
    kept: int = 0
    """Address of a `Kept` if the operand stays, else 0."""
    known: int = 0
    """Address of the word in which the host learns that a panel that stays holds planes."""
    number: int = 0
    """The panel's number among all that stayed, which the device then writes there."""
    made: bool = False
    """Whether the host has learned that the panel holds planes."""


class Splitter:
    """Splits the operands of products on the current device."""

    def __init__(self, mn: dict[str, bool], multiprocessors: int, scratch: Scratch):
        """`mn`: whether operand a, or b, is contiguous along m or n, and not along k."""
        self._mn, self._multiprocessors, self._scratch = mn, multiprocessors, scratch
        self._remembered = {"a": 0, "b": 0}
        """Bytes for what is known of each panel that stays: `Kept`, largest elements and exponents."""
        self._first: dict[tuple[str, int], tuple[int, int]] = {}
        """For each buffer of such panels, the first row or column of the panel that is there, and its number
        among all panels that stayed."""
        self._words = np.zeros(1, np.uint32)
        """What the device tells the host, in memory that it can write if panels stay: `lost`, and for each
        buffer the number of the last panel that was split there."""
        self._word_of = {"a": 1, "b": 1}
        """Where the words for buffers of each operand begin."""
        self._panels = 0
        """Number of panels that stayed, so far. What the device says late of a panel is not taken for what it
        says of the next one in that buffer."""
        self._kernels: dict[str, dict[str, Kernel]] = {
            name: load(preparations.survey(not mn), *_SURVEY) | load(preparations.split(not mn), *_SPLIT)
            for name, mn in mn.items()
        }

    def split(self, product: Product, symmetric: bool, in_place: str, stream: Any) -> tuple[Product, Split]:
        """Split the operands, unless that would cost accuracy: then they are left as they are, and the flag
        is raised.

        `symmetric`: op(B) is the transpose of op(A), which is then the only operand that is read. `in_place`:
        names of operands that may be overwritten; others are split into scratch memory. Operands that stay
        must be among them. Returns the product of the planes.
        """
        m, n, k = product.m, product.n, product.k
        self._scratch.at("exponents", EXPONENT_BYTES * (m + n))
        state = self.state(0, stream)
        count = m if symmetric else m + n
        lines = self._scratch.at("lines", LINE_BYTES * count)
        exponents = self._scratch.at("exponents", EXPONENT_BYTES * count)
        depth = self._scratch.at("depth", DEPTH_BYTES * k)
        # Both operands of a symmetric product have the same elements at every k.
        sides = [_Side("a", product.a, m, lines, exponents, 0 if symmetric else depth + 4 * k)]
        if not symmetric:
            at = lines + LINE_BYTES * m, exponents + EXPONENT_BYTES * m, depth + 8 * k
            sides.append(_Side("b", product.b, n, *at))
        sides = [
            self._staying(k, side, stay, stream) if stay else side
            for side, stay in zip(sides, product.stay, strict=False)
        ]
        a, b = sides[0], sides[-1]
        u, i32, u32 = np.uintp, np.int32, np.uint32
        fresh = [side for side in sides if not side.made]
        if not symmetric and not (a.kept and b.kept):
            driver.fill(depth + 4 * k, 0, 8 * k, stream)
        if fresh:
            driver.fill(lines, 0, LINE_BYTES * count, stream)  # the sweeps add to what is there
        for side in fresh:
            self._survey(k, side, stream)
        kernels, n = self._kernels["a"], count - m
        grid = (ceil_div(m, _THREADS) + ceil_div(n, _THREADS),)
        found = u(lines), u(a.exponents), u(b.exponents), u(state), u(a.kept), u(b.kept)
        kernels["settle"](grid, (_THREADS,), (i32(m), i32(n), *found), stream)
        if not symmetric:
            args = i32(k), u(a.largest), u(b.largest), u(depth), u(state)
            kernels["equilibrate"]((1,), (_JUDGES,), args, stream)
        self._judge(product, sides, True, state, stream)
        for side in fresh:
            self._recount(k, side, depth, state, stream)
        self._judge(product, sides, False, state, stream)
        planes = [self._write_planes(k, side, depth, in_place, state, stream) for side in sides]
        if any(side.kept for side in fresh):
            words = u(a.known), u32(a.number), u(b.known), u32(b.number)
            kernels["keep"]((1,), (1,), (u(state), u(a.kept), u(b.kept), *words), stream)
        made = replace(product, a=planes[0], b=planes[-1])
        return made, Split(a.exponents, b.exponents, state)

    def state(self, fallback: int, stream: Any) -> int:
        """Set every byte of the `State` of split.cu, whose first word is the flag. Returns its address."""
        state = self._scratch.at("state", STATE_BYTES)
        driver.fill(state, fallback, STATE_BYTES, stream)
        return state

    def fell_back(self) -> bool:
        """Wait for the device, and return whether the flag was set after the last product."""
        from cupy.cuda import runtime

        runtime.deviceSynchronize()
        state = np.zeros(STATE_BYTES // 4, np.uint32)
        at = self._scratch.at("state", STATE_BYTES)
        runtime.memcpy(state.ctypes.data, at, state.nbytes, _DEVICE_TO_HOST)
        return bool(state[0])

    def reserve(self, m: int, n: int, k: int, in_place: str, stay: tuple[int, int] = (0, 0)) -> None:
        """Allocate the memory for products up to m×n×k now. `stay`: numbers of panels of op(A) and op(B) that
        stay on the device and are split where they lie."""
        self._scratch.at("state", STATE_BYTES)
        self._scratch.at("exponents", EXPONENT_BYTES * (m + n))
        self._scratch.at("lines", LINE_BYTES * (m + n))
        self._scratch.at("depth", DEPTH_BYTES * k)
        for name, lines, count in ("a", m, stay[0]), ("b", n, stay[1]):
            self._remembered[name] = KEPT_BYTES + 4 * k + EXPONENT_BYTES * lines
            if count:
                self._scratch.at(f"kept {name}", count * self._remembered[name])
            if name in in_place:
                continue
            pitch = PITCH_BYTES // 4
            padded = k * round_up(lines, pitch) if self._mn[name] else lines * round_up(k, pitch)
            self._scratch.at(f"planes {name}", 4 * padded)
        if any(stay):
            self._word_of["b"] = 1 + stay[0]
            self._words = _written_by_the_device(1 + sum(stay))

    @property
    def lost(self) -> Any:
        """An array of one element, which is not 0 if a panel that stays would have been needed as it was
        before it was split."""
        return self._words[:1]

    def _shape(self, k: int, side: _Side) -> tuple[int, int]:
        """Rows and columns of an operand as it is stored."""
        return (k, side.count) if self._mn[side.name] else (side.count, k)

    def _staying(self, k: int, side: _Side, stay: Stay, stream: Any) -> _Side:
        """Return the operand with the places where what is known of it is remembered."""
        each, key = self._remembered[side.name], (side.name, stay.buffer)
        kept = self._scratch.at(f"kept {side.name}", (stay.buffer + 1) * each) + stay.buffer * each
        first, number = self._first.get(key, (None, 0))
        if first != stay.first:
            self._panels += 1
            self._first[key] = stay.first, (number := self._panels)
            driver.fill(kept, 0, KEPT_BYTES + 4 * k, stream)
        largest, word = kept + KEPT_BYTES, self._word_of[side.name] + stay.buffer
        return replace(
            side, kept=kept, largest=largest, exponents=largest + 4 * k,
            known=self._words.ctypes.data + 4 * word, number=number, made=int(self._words[word]) == number,
        )  # fmt: skip

    def _survey(self, k: int, side: _Side, stream: Any) -> None:
        """Start to find what is known about the lines of an operand. Lines and largest elements begin with
        zeros."""
        rows, cols = self._shape(k, side)
        high = _PART if self._mn[side.name] else _ROWS_OF_SURVEY
        grid = (min(ceil_div(rows, high) * ceil_div(cols, _PART), self._multiprocessors * _AT_ONCE),)
        args = (
            np.int32(rows), np.int32(cols), np.uintp(side.operand.ptr), np.int64(side.operand.ld),
            np.uintp(side.lines), np.uintp(side.largest), np.uintp(side.kept),
        )  # fmt: skip
        self._kernels[side.name]["survey"](grid, (_SURVEYORS,), args, stream)

    def _recount(self, k: int, side: _Side, depth: int, state: int, stream: Any) -> None:
        """Start to count the lines of an operand again, if the device has decided so. `depth`: address of
        d."""
        u, i32 = np.uintp, np.int32
        kernels, (rows, cols) = self._kernels[side.name], self._shape(k, side)
        found = u(side.lines), u(side.exponents), u(state), u(side.kept)
        args = (
            i32(rows), i32(cols), u(side.operand.ptr), np.int64(side.operand.ld), u(depth),
            i32(_SIGN[side.name]), *found,
        )  # fmt: skip
        if not self._mn[side.name]:
            blocks = min(rows, self._multiprocessors * _ROWS_AT_ONCE)
            kernels["row_lines"]((blocks,), (_ROW_THREADS,), args, stream)
            return
        # Blocks lie along x, the only axis of a grid that is long enough.
        grid = (ceil_div(rows, _STRIP) * ceil_div(cols, _THREADS),)
        kernels["column_largest"](grid, (_THREADS,), args, stream)
        kernels["column_exponents"]((ceil_div(cols, _THREADS),), (_THREADS,), (i32(cols), *found), stream)
        kernels["column_counts"](grid, (_THREADS,), args, stream)

    def _judge(
        self, product: Product, sides: Sequence[_Side], surveyed: bool, state: int, stream: Any
    ) -> None:
        """Start to raise the flag where three products would be less accurate than float32. `surveyed`: lines
        have been but surveyed, and are counted again before that."""
        i32, f32, u, k = np.int32, np.float32, np.uintp, product.k
        a, b = sides[0], sides[-1]
        terms = max(LEAST_TERMS, LEAST_DENSITY * k)
        args = (
            i32(a.count), i32(b.count), i32(k), u(a.lines), u(b.lines), f32(LOW_SHARE), f32(terms),
            i32(surveyed), u(state), u(a.kept), u(b.kept),
        )  # fmt: skip
        self._kernels["a"]["judge"]((1,), (_JUDGES,), args, stream)

    def _write_planes(
        self, k: int, side: _Side, depth: int, in_place: str, state: int, stream: Any
    ) -> Operand:
        """Write the planes of an operand, unless the flag is raised. Returns where they are."""
        u, i32, given = np.uintp, np.int32, side.operand
        rows, cols = self._shape(k, side)
        planes = given.ptr
        if side.name not in in_place:
            planes = self._scratch.at(f"planes {side.name}", rows * given.ld * 4)
        args = (
            i32(rows), i32(cols), u(given.ptr), np.int64(given.ld), u(depth), i32(_SIGN[side.name]),
            u(side.exponents), u(planes), u(state), u(side.kept), u(self.lost.ctypes.data),
        )  # fmt: skip
        blocks = min(ceil_div(rows * ceil_div(cols, 64), _SEGMENTS), self._multiprocessors * _AT_ONCE)
        grid = (1 if side.made else blocks,)  # one says whether the panel would be needed as it was
        self._kernels[side.name]["split"](grid, (_THREADS,), args, stream)
        return Operand(planes, given.ld)


def _written_by_the_device(count: int) -> Any:
    """Return so many zeros in host memory that the current device can write."""
    from cupy.cuda import PinnedMemoryPointer
    from cupy.cuda.pinned_memory import PinnedMemory

    found = np.frombuffer(PinnedMemoryPointer(PinnedMemory(4 * count), 0), np.uint32, count)
    found[:] = 0
    return found


def split_pays(m: int, n: int, k: int) -> bool:
    """Return whether each element of A and B is multiplied often enough for fp16x3 to be faster than plain
    float32, although it must split them."""
    return reuses(m, n, k, (SPLIT_PAYS, SPLIT_PAYS_DEEP))
