"""Measures how reads and writes of files in memory share the host's memory with copies to and from a device,
and with each other: the time of both at once over the sum of their times alone (`Rates.entering`, `leaving`
and `turns`).

    array ──read──► places ──upload──► panel      entering ┐
    block ──download──► places ──write──► array   leaving  ┘ turns
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.ports import COMPUTE, UPLOAD, Array, Device
from ..engine.ring import Event
from ..planning.problem import Matrix
from ..run.prepare import Job, prepare
from ..run.rates import FILE
from ..run.request import Operand, Request
from ..storage.io.background import STEP_BYTES
from ..storage.io.files import chunks_at_once, writes_at_once
from ..support.buffers import Bytes
from ..support.remembered import recall
from ..support.timed import by_one_thread
from ..support.trace import Trace
from . import chunks, kernel_rate
from .io import files_in

Begin = Callable[[int, Bytes], Callable[[], int]]
"""Begins to move a chunk through a buffer. Returns what waits for its end and returns its bytes."""
Work = Callable[[], tuple[Begin, int]]
"""Makes ready what begins to move chunks. Returns it, and for how many at a time."""
TRIES = 3
"""How often something is measured."""


def shares(scratch: Path, device: Device, rates: dict[str, Any]) -> dict[str, float]:
    """Return `entering` and `leaving`, or nothing where the rates of copies are not known. scratch: a folder
    with the array `a` of chunks. rates: of its file system."""
    alone_at = recall(FILE).get(device.model, {}) | rates
    if not {"upload_bytes_per_second", "download_bytes_per_second"} <= alone_at.keys():
        return {}
    copies = _Copies(scratch, device)
    try:
        copies.make_ready()
        came, went = copies.seconds(copies.bringing), copies.seconds(copies.storing)
        alone = {"entering": ("read", "upload"), "leaving": ("write", "download")}
        found = {
            name: seconds / sum(copies.nbytes / alone_at[f"{way}_bytes_per_second"] for way in alone[name])
            for name, seconds in (("entering", came), ("leaving", went))
        }
        found["turns"] = copies.together((copies.bringing, came), (copies.storing, went))
        return {name: float(min(1.0, max(0.5, share))) for name, share in found.items()}
    finally:
        copies.close()


class _Copies:
    """A session of a device, with a block of one chunk for each of several devices, and an array whose chunks
    are moved."""

    def __init__(self, scratch: Path, device: Device):
        self._scratch, limits = scratch, chunks.limits_of(device)
        self._source = chunks.source_in(scratch / "a")
        self._count = sum(not path.endswith("zarr.json") for path in files_in(scratch / "a"))
        self.nbytes = self._count * chunks.chunk_bytes()
        job, panel = _a_chunk_each(device, len(limits.weights)), (0, chunks.SIDE)
        self._block = next(job.plan.blocks())
        self._parts = list(job.plan.parts(self._block))
        self._pieces = list(job.plan.pieces(self._block, panel))
        self._session = device.open(job.plan, job.operation, Trace())
        self._writers = writes_at_once(limits.writers)
        self._readers = chunks_at_once(limits.readers, device=True) + 2  # and two that are copied meanwhile
        self._buffers: list[Bytes] = []

    def make_ready(self) -> None:
        """Prepare the buffers, and compute the block."""
        session = self._session
        self._buffers = session.host_buffers(max(self._writers, self._readers), chunks.chunk_bytes())
        for buffer in self._buffers:
            buffer[:] = 0
            session.prepare(buffer)
        for piece in self._pieces:
            session.upload(_view(self._buffers[0]), piece, 0)
        session.wait(COMPUTE, session.record(UPLOAD))
        session.multiply(self._block, (0, chunks.SIDE), (0, 0), 0, True)
        session.record(COMPUTE).synchronize()
        session.finish(self._block, 0)
        self._pieces = [piece for piece in self._pieces if piece.operand == "a"]

    def close(self) -> None:
        """Free the session's memory."""
        self._session.close()

    def bringing(self) -> tuple[Begin, int]:
        """Return what brings a chunk to a device, and for how many at a time."""
        session, copied = self._session, dict[int, Event]()  # address of a buffer → the end of its last copy

        def bring(index: int, buffer: Bytes) -> Callable[[], int]:
            if before := copied.get(buffer.ctypes.data):
                before.synchronize()
            piece = self._pieces[index % len(self._pieces)]
            onward = session.onward(piece, self._source.dtype, 0)
            end = self._source.start(next(chunks.pieces_of(self._source, index)), buffer, onward)

            def done() -> int:
                view, nbytes = end()
                sent = onward.ended() if onward else None
                copied[buffer.ctypes.data] = sent or session.upload(view, piece, 0)
                return nbytes

            return done

        return bring, self._readers

    def storing(self) -> tuple[Begin, int]:
        """Return what stores a part of the block as a chunk of a new array, and for how many at a time."""
        target = chunks.empty_target(self._scratch / "beside", chunks.column(self._count))
        session = self._session

        def store(index: int, buffer: Bytes) -> Callable[[], int]:
            part = self._parts[index % len(self._parts)]
            inward = session.inward(self._block, [part], 0)
            if inward and target.bring:
                return target.bring([chunks.part(index)], inward)
            session.download(self._block, part, 0, _view(buffer)).synchronize()
            return target.start(chunks.part(index), buffer)

        return store, self._writers

    def seconds(self, work: Work) -> float:
        """Return the least seconds in which all chunks are moved."""

        def moving() -> float:
            begin, at_once = work()
            start = time.perf_counter()
            self._move(begin, at_once, 1.0)
            return time.perf_counter() - start

        return min(moving() for _ in range(TRIES))

    def _move(self, begin: Begin, at_once: int, share: float) -> None:
        count = max(1, round(share * self._count))
        by_one_thread(begin, range(count), self._buffers[:at_once], math.inf)
        self._session.record(UPLOAD).synchronize()

    def together(self, *works: tuple[Work, float]) -> float:
        """Return the seconds of two kinds of work at once, over the sum of what they take alone, with so much
        of each that both alone take equally long. The buffers are those of both: what is in them does not
        matter here."""
        least = min(alone for _, alone in works)

        def both() -> float:
            begun = [(*work(), least / alone) for work, alone in works]
            start = time.perf_counter()
            with ThreadPoolExecutor(len(works)) as pool:
                jobs = [pool.submit(self._move, *each) for each in begun]
            for job in jobs:
                job.result()
            return time.perf_counter() - start

        return min(both() for _ in range(TRIES)) / (2 * least)


def _a_chunk_each(device: Device, count: int) -> Job:
    """Return a product whose block has a chunk for each of so many devices."""
    side = chunks.SIDE
    high, square = (Operand(kernel_rate.Random((rows, side), "float32")) for rows in (count * side, side))
    job = prepare(Request(high, square, writes=False, device=device, memory_limit="1TiB").check())
    a, b = Matrix(count * side, side, 4, side, side), Matrix(side, side, 4, side, side)
    plan = replace(
        job.plan, problem=replace(job.plan.problem, a=a, b=b, c=a), bm=count * side, bn=side,
        k_panels=replace(job.plan.k_panels, deepest=side), c_buffers=1, slot_bytes=chunks.chunk_bytes(),
        budget=replace(job.plan.budget, step=STEP_BYTES),
    )  # fmt: skip
    return replace(job, plan=plan)


def _view(buffer: Bytes) -> Array:
    return buffer.view(np.float32).reshape(chunks.SIDE, chunks.SIDE)
