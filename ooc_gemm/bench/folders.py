"""Measures how fast the engine's readers and writers are on a file system."""

import math
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..engine.ports import Device
from ..run.observer import Observer
from ..run.rates import today
from ..run.request import Operand, Request
from ..run.retry import carry_out, result_of
from ..storage.io.files import in_background, in_memory, writes_at_once
from ..storage.read.source import Source
from ..storage.write import opening, staging_folder
from ..support.buffers import Bytes
from ..support.errors import Error
from . import beside_copies, chunks

Record = dict[str, Any]

STEPS = 14
"""Number of measurements in a folder, each of which gets an equal time, and of waits for the disk."""
LONGEST = 2.0
"""The most seconds that one measurement of a folder takes."""
PIECE_BYTES = 64 << 10
"""Size of the pieces that show what a read costs besides its bytes."""
TINY, TINY_TIMES = 64, 8
"""Extents of a product that takes no longer than it takes to begin and to end, and how often it is made. The
first may compile a kernel."""


def measure_folder(place: Path, device: Device, longest: float = LONGEST) -> Record:
    """Measure the rates that the engine's readers and writers reach on a file system, with the device's
    buffers and as many threads as it takes, and each for at most `longest` seconds. The files are removed
    afterwards. Raises InputError if there is too little space."""
    limits, memory = chunks.limits_of(device), device.host_memory()
    count = chunks.chunks_that_fit(place)
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-", dir=place) as scratch:
        writers = writes_at_once(limits.writers) if in_background(place) else limits.writers
        buffers = memory.host_buffers(limits.readers + writers, chunks.chunk_bytes())
        chunks.fill_with_noise(buffers)
        folder = _Folder(Path(scratch), buffers[: limits.readers], buffers[limits.readers :], longest)
        found = folder.rates(count)
        del folder, buffers
        with suppress(Error, OSError):  # of the device, which all but this can do without
            found["begin_seconds"] = _begin_seconds(Path(scratch), device)
            found["create_seconds"] = _create_seconds(Path(scratch))
        if limits.device is not None and in_background(place):
            found |= beside_copies.shares(Path(scratch), device, found)
        return found


def _begin_seconds(scratch: Path, device: Device) -> float:
    """Return the seconds of a product of a few elements, whose files are there: of all that is done before
    the first read and after the last write."""
    a, b, *outputs = (scratch / f"tiny {number}" for number in range(2 + TINY_TIMES))
    for place in (a, b):
        chunks.tiny_array(place, TINY)
    requests = [Request(Operand(str(a)), Operand(str(b)), str(c), device=device) for c in outputs]
    return min(result_of(carry_out(request, Observer())).seconds for request in requests)


def _create_seconds(scratch: Path) -> float:
    """Return the part of that in which a C is begun, which goes on while panels are read."""
    output, found = chunks.tiny_output(TINY), []
    for number in range(TINY_TIMES):
        start = time.perf_counter()
        place = str(scratch / f"begun {number}")
        sink = opening.create_target(place, output, output.dtype, {"options": {}}).sink
        found.append(time.perf_counter() - start)
        sink.discard()
    return min(found)


class _Folder:
    """Files in a folder that are written from some buffers and read into others."""

    def __init__(self, scratch: Path, for_reading: list[Bytes], for_writing: list[Bytes], longest: float):
        self._scratch, self._for_reading, self._for_writing = scratch, for_reading, for_writing
        self._longest = min(LONGEST, longest)
        self._in_memory = in_memory(os.stat(scratch).st_dev)
        self._tries = 3 if self._in_memory else 1
        """How often something is measured. A virtual machine may have been given its memory only now."""

    def rates(self, count: int) -> Record:
        """Measure everything, with at most `count` chunks."""
        there, written = self._written(count)
        source = chunks.source_in(self._scratch / "a")
        cold, cached = self._came(source, there)
        piece_seconds = self._piece_seconds(source, there[:4], cached)
        chunks.forget(self._scratch / "a")
        together = self._together(source, there, cold, written)
        return {
            "date": today(),
            "read_bytes_per_second": cold,
            "cached_bytes_per_second": cached,
            "write_bytes_per_second": written,
            "write_cached_bytes_per_second": written if self._in_memory else self._written_cached(there),
            "turns": min(1.0, max(0.5, together)),
            "decode_bytes_per_second": self._decoded(there),
            "piece_seconds": piece_seconds,
        }

    def _written(self, count: int) -> tuple[range, float]:
        """Write an array so large that the page cache is passed by, of which only the first chunks are
        stored. Returns these chunks, and the bytes per second."""
        output = chunks.column(max(count, staging_folder.DIRECT_BYTES // chunks.chunk_bytes()))
        target = chunks.empty_target(self._scratch / "a", output)
        moved = chunks.write(target, range(count), self._for_writing, self._longest)
        rate, there = chunks.per_second(moved), range(len(moved[1]))
        for _ in range(self._tries if self._in_memory else 0):
            target = chunks.empty_target(self._scratch / "a", output)
            moved = chunks.write(target, there, self._for_writing, self._longest)
            rate = max(rate, chunks.per_second(moved))
        target.sink.commit()
        return there, rate

    def _came(self, source: Source, there: range) -> tuple[float, float]:
        """Read all chunks. Returns the bytes per second from the disk, and from the page cache. In memory
        there is but one way."""

        def came() -> float:
            return chunks.per_second(chunks.read(source, there, self._for_reading, self._longest))

        chunks.forget(self._scratch / "a")
        cold = came()
        chunks.keep(self._scratch / "a")
        cached = max(cold, *(came() for _ in range(3)))
        return cached if self._in_memory else cold, cached

    def _piece_seconds(self, source: Source, some: range, cached: float) -> float:
        """Return the seconds that a small piece takes besides its bytes."""
        seconds, moved = chunks.read_in_threads(source, some, self._for_reading, self._longest, PIECE_BYTES)
        return max(0.0, seconds - sum(moved) / cached) / (sum(moved) / PIECE_BYTES)

    def _together(self, source: Source, there: range, cold: float, written: float) -> float:
        """Return the time of reading and writing at once over the sum of their times alone, with so much of
        each that both alone take equally long."""
        reads = max(1, min(len(there), round(len(there) * cold / max(cold, written))))
        writes = max(1, min(len(there), round(reads * written / cold)))
        output = chunks.column(max(len(there), staging_folder.DIRECT_BYTES // chunks.chunk_bytes()))

        def both() -> float:
            target = chunks.empty_target(self._scratch / "b", output)
            with ThreadPoolExecutor(1) as other:
                start = time.perf_counter()
                writing = other.submit(chunks.write, target, range(writes), self._for_writing)
                chunks.read(source, range(reads), self._for_reading)
                writing.result()
                return time.perf_counter() - start

        alone = chunks.chunk_bytes() * (reads / cold + writes / written)
        return min(both() for _ in range(self._tries)) / alone

    def _written_cached(self, there: range) -> float:
        """Return the bytes per second of a small array, which is written into the page cache."""
        few = min(len(there), max(1, staging_folder.DIRECT_BYTES // chunks.chunk_bytes() - 1))
        target = chunks.empty_target(self._scratch / "small", chunks.column(few))
        return chunks.per_second(chunks.write(target, range(few), self._for_writing, self._longest))

    def _decoded(self, there: range) -> float:
        """Return the decoded bytes per second of chunks that zstd has compressed."""
        some = range(min(len(there), 2 * len(self._for_reading)))
        output = chunks.column(max(len(there), staging_folder.DIRECT_BYTES // chunks.chunk_bytes()), "zstd")
        target = chunks.empty_target(self._scratch / "z", output)
        chunks.write(target, some, self._for_writing, math.inf)
        target.sink.commit()
        source = chunks.source_in(self._scratch / "z")
        seconds, moved = chunks.read_in_threads(source, some, self._for_reading, self._longest)
        return len(moved) * chunks.chunk_bytes() / seconds
