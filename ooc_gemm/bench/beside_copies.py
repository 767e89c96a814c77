"""Measures how reads and writes of files in memory share the host's memory with copies to and from a device:
the time of both at once over the sum of their times alone (`Rates.entering` and `leaving`).

    array ──read──► buffers ──upload──► panel      entering
    block ──download──► buffers ──write──► array   leaving
"""

import math
import time
from collections.abc import Callable
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
from ..storage.io.files import chunks_at_once, writes_at_once
from ..support.buffers import Bytes
from ..support.remembered import recall
from ..support.timed import by_one_thread
from ..support.trace import Trace
from . import chunks, kernel_rate
from .io import files_in

Begin = Callable[[int, Bytes], Callable[[], int]]
"""Begins to move a chunk through a buffer. Returns what waits for its end and returns its bytes."""


def shares(scratch: Path, device: Device, rates: dict[str, Any]) -> dict[str, float]:
    """Return `entering` and `leaving`, or nothing where the rates of copies are not known. scratch: a folder
    with the array `a` of chunks. rates: of its file system."""
    alone_at = recall(FILE).get(device.model, {}) | rates
    if not {"upload_bytes_per_second", "download_bytes_per_second"} <= alone_at.keys():
        return {}
    copies = _Copies(scratch, device)
    try:
        copies.make_ready()
        return {
            "entering": copies.share(copies.bringing, alone_at, "read", "upload"),
            "leaving": copies.share(copies.storing, alone_at, "write", "download"),
        }
    finally:
        copies.close()


class _Copies:
    """A session of a device, with a block of one chunk, and an array whose chunks are moved."""

    def __init__(self, scratch: Path, device: Device):
        self._scratch, limits = scratch, chunks.limits_of(device)
        self._source = chunks.source_in(scratch / "a")
        self._count = sum(not path.endswith("zarr.json") for path in files_in(scratch / "a"))
        job, side = _one_chunk(device), chunks.SIDE
        self._block = next(job.plan.blocks())
        self._part = next(job.plan.parts(self._block))
        self._pieces = list(job.plan.pieces(self._block, (0, side)))
        self._session = device.open(job.plan, job.operation, Trace())
        self._writers = writes_at_once(limits.writers)
        self._readers = chunks_at_once(limits.readers) + 2  # and two that are copied meanwhile
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
        session.multiply(self._block, (0, chunks.SIDE), 0, 0, True)
        session.record(COMPUTE).synchronize()
        session.finish(self._block, 0)

    def close(self) -> None:
        """Free the session's memory."""
        self._session.close()

    def bringing(self) -> tuple[Begin, int]:
        """Return what brings a chunk to the device, and for how many at a time."""
        copied: dict[int, Event] = {}  # address of a buffer → the end of the last copy from it

        def bring(index: int, buffer: Bytes) -> Callable[[], int]:
            if before := copied.get(buffer.ctypes.data):
                before.synchronize()
            end = self._source.start(next(chunks.pieces_of(self._source, index)), buffer)

            def done() -> int:
                came, nbytes = end()
                copied[buffer.ctypes.data] = self._session.upload(came, self._pieces[0], 0)
                return nbytes

            return done

        return bring, self._readers

    def storing(self) -> tuple[Begin, int]:
        """Return what stores the block as a chunk of a new array, and for how many at a time."""
        target = chunks.empty_target(self._scratch / "beside", chunks.column(self._count))

        def store(index: int, buffer: Bytes) -> Callable[[], int]:
            self._session.download(self._block, self._part, 0, _view(buffer)).synchronize()
            return target.start(chunks.part(index), buffer)

        return store, self._writers

    def share(self, begin: Callable[[], tuple[Begin, int]], alone_at: dict[str, Any], *ways: str) -> float:
        """Return the seconds of moving all chunks in two ways at once, over their sum if each is alone."""

        def moving() -> float:
            work, at_once = begin()
            start = time.perf_counter()
            by_one_thread(work, range(self._count), self._buffers[:at_once], math.inf)
            self._session.record(UPLOAD).synchronize()
            return time.perf_counter() - start

        seconds = min(moving() for _ in range(3))
        nbytes = self._count * chunks.chunk_bytes()
        alone = sum(nbytes / alone_at[f"{way}_bytes_per_second"] for way in ways)
        return float(min(1.0, max(0.5, seconds / alone)))


def _one_chunk(device: Device) -> Job:
    """Return a product whose panels and block are one chunk each."""
    side = chunks.SIDE
    random = Operand(kernel_rate.Random((side, side), "float32"))
    job = prepare(Request(random, random, writes=False, device=device, memory_limit="1TiB").check())
    whole = Matrix(side, side, 4, side, side)
    plan = replace(
        job.plan, problem=replace(job.plan.problem, a=whole, b=whole, c=whole), bm=side, bn=side,
        k_panels=replace(job.plan.k_panels, deepest=side), c_buffers=1, slot_bytes=chunks.chunk_bytes(),
    )  # fmt: skip
    return replace(job, plan=plan)


def _view(buffer: Bytes) -> Array:
    return buffer.view(np.float32).reshape(chunks.SIDE, chunks.SIDE)
