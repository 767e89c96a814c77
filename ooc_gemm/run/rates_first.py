"""Measures what a plan needs to know of a machine and of the folders of a run, where nobody has measured that
yet: fresh memory, reads of the inputs, writes beside C, and BLAS. It takes half a second at most, and no more
than a small share of the run. What is found is remembered as `ooc-gemm info --measure` remembers it, which
measures all of it for longer. What a GPU does is learned from its first run (`rates_learned`).
"""

import fcntl
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..engine.ports import COMPUTE, UPLOAD, Arithmetic, Device, Operation
from ..planning.machine import Budget
from ..planning.problem import Matrix, MiB, Problem
from ..planning.schedule import Piece, cut
from ..planning.search import make_plan
from ..storage.io.files import chunks_at_once
from ..storage.read.source import Opened, Source
from ..storage.write.staging_folder import DIRECT_BYTES
from ..support.buffers import Bytes
from ..support.errors import Error
from ..support.intervals import ceil_div, round_up
from ..support.remembered import recall, remember
from ..support.timed import by_one_thread, for_a_while
from ..support.trace import Trace
from .rates import (
    DECODE,
    FILE,
    FOLDERS,
    Place,
    cached_share,
    file_system,
    fresh_rate,
    kernel_key,
    nearest_folder,
    possible,
    sound,
    today,
)

LONGEST = 0.5
"""The most seconds that measuring before a run takes."""
SHARE = 0.1
"""The largest share of the time that a run is expected to take."""
LEAST = 0.05
"""Least seconds in which something can be measured. A run that is so short that fewer are its share is
planned with default rates."""
HELD = 0.25
"""Share of the memory that a plan may use which buffers for measuring hold before it is made."""
PIECE_BYTES = 4 * MiB
"""Size of a read, and of a write."""
WRITTEN_BYTES = 256 * MiB
"""The most bytes that are written."""
LEAST_CHUNK = MiB // 2
"""Least bytes of a chunk that shows how fast a file system is. Reading smaller ones takes other time."""
MULTIPLYING, READING = 0.4, 0.6
"""Shares of the time that is left which one measurement takes."""
SIDES, DEPTH = (2048, 1024, 512), 512
"""Sides of the square block of C, and depth of the panels, by which BLAS is timed."""
ROUNDS = 2, 3
"""Least and greatest number of multiplications of which the fastest counts."""
ELEMENT = 1 << 25
"""What is multiplied where the time depends on the values: `slices` multiplies such integers twice, as it
does most that 16 bits do not hold."""


@dataclass(frozen=True)
class Wanted:
    """A run that is going to be planned."""

    device: Device
    arithmetic: Arithmetic
    inputs: tuple[Opened, ...]
    c: Place
    """The folder of C, None where C is not written to a local file system, and its size in bytes."""
    budget: Budget
    read: float
    """Bytes per second at which the inputs are expected to be read."""
    seconds: float
    """Seconds that the run is expected to take."""


def measure(wanted: Wanted) -> str:
    """Measure what is not remembered and a plan would use, within a tenth of the time that the run is
    expected to take and LONGEST, and remember it. Returns a sentence about it; "" where nothing was
    measured."""
    start, allowed = time.perf_counter(), min(LONGEST, SHARE * wanted.seconds)
    if allowed < LEAST:
        return ""
    found = _First(wanted, start + allowed)
    with suppress(OSError, MemoryError, Error):  # which the run meets, too, and then says
        found.all()
    if not found.names:
        return ""
    found.remember()
    return (
        f"rates were measured in {time.perf_counter() - start:.2f} s and are remembered: "
        f"{', '.join(found.names)}; `ooc-gemm info --measure FOLDER` measures them for longer"
    )


class _First:
    """One measurement before a run."""

    def __init__(self, wanted: Wanted, end: float):
        """end: when it ends, on the clock `time.perf_counter`."""
        self._wanted, self._end, self.names = wanted, end, list[str]()
        known = recall(FILE).get(wanted.device.model, {})
        self._known: dict[str, Any] = known
        self._table = FOLDERS[len(wanted.budget.weights) > 1]
        self._folders: dict[str, dict[str, Any]] = dict(known.get(self._table, {}))
        self._found: dict[str, Any] = {}
        self._flops: dict[str, Any] = {}

    def all(self) -> None:
        """Measure what is missing, each with a share of the time that is left."""
        wanted, budget = self._wanted, self._wanted.budget
        if budget.device is None:
            self._blas()
        reads = [x for x in wanted.inputs if x.place and not x.traits.remote and self._read_name(x)]
        target = wanted.c[0] and self._write_name()
        touch = "touch_bytes_per_second" not in self._known
        if not (reads or target or touch):
            return
        largest = max([PIECE_BYTES, *(x.source.matrix.chunk_bytes for x in reads if x.source.matrix.whole)])
        size = round_up(largest, PIECE_BYTES)
        count = min(budget.readers, int(HELD * (budget.host - budget.host_baseline)) // size)
        if count < 1 or (largest > PIECE_BYTES and largest / 1e9 > self._left() / 2):
            return
        memory = wanted.device.host_memory()
        try:
            buffers = memory.host_buffers(count, size)
            self._touched(buffers, memory.prepare)
            for opened in reads:
                self._reading(opened, buffers)
            if target:
                self._writing(buffers[: budget.writers], target)
        finally:
            memory.close()

    def remember(self) -> None:
        """Remember what was found, beside what was known."""
        date, known = {"date": today(), "brief": True}, self._known
        if self._found or not known.get("date"):
            self._found = date | self._found
        if self._flops:
            self._found["flops"] = known.get("flops", {}) | self._flops
        remember(FILE, self._wanted.device.model, self._found | {self._table: self._folders})

    def _left(self) -> float:
        return self._end - time.perf_counter()

    def _add(self, system: str, name: str, rate: float, said: str) -> None:
        """Keep the rate of a file system, if it is sound."""
        if not sound(rate):
            return
        before = self._folders.get(system, {"date": today(), "brief": True})
        self._folders[system] = before | {f"{name}_bytes_per_second": rate}
        self.names.append(f"{said} {system.split()[0]}")

    # ---- memory and folders ------------------------------------------------------------------------

    def _touched(self, buffers: list[Bytes], prepare: Callable[[Bytes], None]) -> None:
        """Touch fresh memory, and once more: the difference is what it costs to be fresh."""

        def touch(buffer: Bytes, _: Bytes) -> None:
            buffer[:] = 0
            prepare(buffer)

        first, _ = for_a_while(touch, buffers, buffers)
        again, _ = for_a_while(touch, buffers, buffers)
        rate = fresh_rate(len(buffers) * buffers[0].nbytes, first, again)
        if "touch_bytes_per_second" not in self._known and sound(rate):
            self._found["touch_bytes_per_second"] = rate
            self.names.append("fresh memory")

    def _read_name(self, opened: Opened) -> str:
        """Return the name of the rate that is missing to read an operand; "" where none is, or its chunks are
        too small to show it."""
        assert opened.place
        if opened.source.matrix.chunk_bytes < LEAST_CHUNK:
            return ""
        name = "cached" if cached_share(opened.place) >= 0.5 else "read"
        if opened.source.matrix.whole:
            name = (DECODE + opened.source.codec).strip()
        known = self._folders.get(file_system(opened.place), {})
        return "" if f"{name}_bytes_per_second" in known else name

    def _reading(self, opened: Opened, buffers: list[Bytes]) -> None:
        """Read pieces of an operand that lie far apart, with the engine's readers."""
        name, place = self._read_name(opened), opened.place
        if not (name and place):  # another operand has shown it
            return
        seconds, found = _read(opened.source, buffers, READING * self._left())
        moved, decoded = (sum(each) for each in zip(*found, strict=True)) if found else (0, 0)
        if not moved or seconds <= 0:
            return
        if name.startswith(DECODE.strip()):
            seconds = max(seconds / 2, seconds - moved / self._wanted.read)
            self._add(
                file_system(place), name, decoded / seconds, f"decoding{name.removeprefix('decode')} in"
            )
        else:
            said = "reading cached files of" if name == "cached" else "reading"
            self._add(file_system(place), name, moved / seconds, said)

    def _write_name(self) -> str:
        """Return the name of the rate at which C is written, if it is missing."""
        place, nbytes = self._wanted.c
        assert place
        name = "write" if nbytes >= DIRECT_BYTES else "write_cached"
        known = self._folders.get(file_system(place), {})
        return "" if f"{name}_bytes_per_second" in known else name

    def _writing(self, buffers: list[Bytes], name: str) -> None:
        """Write files that have no names, so that nothing is left of them whatever happens."""
        assert self._wanted.c[0]
        place = nearest_folder(self._wanted.c[0])
        least = min(WRITTEN_BYTES, os.statvfs(place).f_bavail * os.statvfs(place).f_frsize // 4)
        jobs = range(least // PIECE_BYTES)
        if len(jobs) < len(buffers) or self._left() < LEAST:
            return

        def write(_: int, buffer: Bytes) -> int:
            with tempfile.TemporaryFile(dir=place, buffering=0) as file:
                if name == "write":
                    _past_the_cache(file.fileno())
                return sum(file.write(buffer[:PIECE_BYTES].data) or 0 for _ in range(2))

        seconds, sizes = for_a_while(write, jobs, buffers, self._left() / 2)
        if sizes and seconds > 0:
            self._add(file_system(place), name, sum(sizes) / seconds, "writing to")

    # ---- BLAS --------------------------------------------------------------------------------------

    def _blas(self) -> None:
        """Time multiplications of small panels, with the workers of a session."""
        device, arithmetic = self._wanted.device, self._wanted.arithmetic
        key = kernel_key(arithmetic)
        if possible(self._known.get("flops"), device.most_flops, key):
            return
        usual, longest = device.rates(arithmetic), MULTIPLYING * self._left()
        room = HELD * (self._wanted.budget.host - self._wanted.budget.host_baseline)
        for side in SIDES:
            takes = ROUNDS[0] * 2 * side * side * DEPTH / usual.flops
            holds = side * side * arithmetic.block.itemsize + 4 * side * DEPTH * arithmetic.panel.itemsize
            if takes <= longest and holds <= room:
                break
        else:
            return
        least = _multiplied(device, arithmetic, side, longest)
        flops = 2.0 * side * side * (DEPTH + usual.thin) / least if least > 0 else math.inf
        kernel, panel = key.split()[:2]
        if 0 < flops <= device.most_flops(kernel, panel):
            self._flops[key] = {"flops": flops, "thin": usual.thin}
            self.names.append(key)


def _read(source: Source, buffers: list[Bytes], longest: float) -> tuple[float, list[tuple[int, int]]]:
    """Read pieces for a while; the seconds, and for each piece the bytes moved and those it has decoded."""
    pieces, size = _spread(source.matrix, buffers[0].nbytes), source.dtype.itemsize

    def elements(piece: Piece) -> int:
        return math.prod(piece.shape) * size

    if not source.asynchronous:
        return for_a_while(lambda p, b: (source.read(p, b)[1], elements(p)), pieces, buffers, longest)

    def begin(piece: Piece, buffer: Bytes) -> Callable[[], tuple[int, int]]:
        end = source.start(piece, buffer)
        return lambda: (end()[1], elements(piece))

    return by_one_thread(begin, pieces, buffers[: chunks_at_once(len(buffers))], longest)


def _spread(s: Matrix, slot_bytes: int) -> Iterator[Piece]:
    """Yield pieces of a stored matrix, far apart from each other: of one chunk, or of several as in a run."""
    slot = slot_bytes if s.whole else min(slot_bytes, PIECE_BYTES)
    height = s.chunks_of_piece(slot, s.chunk_cols) * s.chunk_rows
    count = ceil_div(s.rows, height) * s.grid[1]
    step = max(1, count // 61) | 1
    while math.gcd(step, count) != 1:
        step += 1
    for number in range(count):
        i, j = divmod(number * step % count, s.grid[1])
        rows = i * height, min(s.rows, (i + 1) * height)
        cols = j * s.chunk_cols, min(s.cols, (j + 1) * s.chunk_cols)
        yield next(cut("a", s, rows, cols, slot))


def _past_the_cache(file: int) -> None:
    """Let an open file be written past the page cache, where the file system can."""
    with suppress(OSError, AttributeError):
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)


def _multiplied(device: Device, arithmetic: Arithmetic, side: int, longest: float) -> float:
    """Return the seconds of the fastest of some multiplications of side×DEPTH by DEPTH×side. Each has panels
    of its own, because a session forgets how large the elements are of those that it has multiplied."""
    size, trace = arithmetic.panel.itemsize, Trace(recorded=False)
    a, b = Matrix(side, DEPTH, size, side, DEPTH), Matrix(DEPTH, side, size, DEPTH, side)
    c = Matrix(side, side, arithmetic.block.itemsize, side, side)
    problem = Problem(side, side, DEPTH, a, b, c, size, arithmetic.block.itemsize)
    plan = make_plan(problem, Budget(1 << 50, 0, None), device.rates(arithmetic))
    plan = replace(plan, bm=side, bn=side, k_panels=replace(plan.k_panels, deepest=DEPTH), c_buffers=1)
    block, element = next(plan.blocks()), ELEMENT if arithmetic.kernel == "slices" else 1.0
    values = [(np.full(piece.shape, element), piece) for piece in plan.pieces(block, (0, DEPTH))]
    session = device.open(plan, Operation(arithmetic), trace)
    try:
        start, rounds, (least, most) = time.perf_counter(), 0, ROUNDS
        while rounds < most and (rounds < least or time.perf_counter() < start + longest):
            for array, piece in values:
                session.upload(array, piece, 0)
            session.wait(COMPUTE, session.record(UPLOAD))
            session.multiply(block, (0, DEPTH), (0, 0), 0, True)
            session.record(COMPUTE).synchronize()
            rounds += 1
    finally:
        session.close()
    return trace.least["compute"]
