"""Measures how fast files in a folder are read, written and decoded, by plain functions and by the engine's
readers and writers. The report is a plain dict, ready for JSON; tables.py shows it.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..devices import open_device
from ..run.rates import described
from ..support.buffers import Bytes, page_aligned
from . import chunks
from .io import decode_rate, files_in, flush, read_rate, source_rate, write_rate

Say = Callable[[str], None]
Row = dict[str, Any]


def run(folder: str = ".", device: str = "auto", progress: Say = lambda text: None) -> dict[str, Any]:
    """Measure and return the report: for each way a row with the bytes per second for each number of threads.
    Raises InputError."""
    place, chosen = Path(folder), open_device(device)
    threads = sorted({1, 4, chunks.limits_of(chosen).readers})
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-", dir=place) as scratch:
        rows = list(_rows(Path(scratch), threads, chunks.chunks_that_fit(place), progress))
    return {
        "suite": "io",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": chosen.model,
        "place": described(place),
        "threads": threads,
        "rows": rows,
    }


def _rows(scratch: Path, threads: list[int], count: int, say: Say) -> Iterator[Row]:
    chunk = chunks.chunk_bytes()
    buffers = page_aligned(max(threads), chunk)
    chunks.fill_with_noise(buffers)

    def row(group: str, way: str, rate: Callable[[int], float]) -> Row:
        found = []
        for number in threads:
            say(f"{group}: {way}, {number} at a time")
            found.append(rate(number))
        return {"group": group, "way": way, "bytes_per_second": found}

    files, raw, packed = (str(scratch / name) for name in ("files", "raw", "zstd"))
    yield row("write", "direct", lambda n: write_rate(files, count * chunk, n, True, chunk))
    yield row("write", "buffered", lambda n: write_rate(files, count * chunk, n, False, chunk))
    yield row("write", "engine", lambda n: _store_rate(raw, "none", count, buffers[:n]))
    yield row("read", "direct", lambda n: read_rate(files, n, direct=True))
    yield row("read", "buffered", lambda n: read_rate(files, n, direct=False))
    yield row("read", "engine", lambda n: source_rate(raw, n, cold=True))
    yield row("read cached", "buffered", lambda n: read_rate(files, n, cached=True))
    chunks.keep(Path(raw))
    yield row("read cached", "engine", lambda n: source_rate(raw, n))
    say("decode zstd: encoding")
    _store_rate(packed, "zstd", min(count, 2 * max(threads)), buffers)
    yield row("decode zstd", "in memory", lambda n: decode_rate(packed, n, seconds=0.5))
    chunks.keep(Path(packed))
    yield row("decode zstd", "engine", lambda n: source_rate(packed, n))


def _store_rate(path: str, compressor: str, count: int, buffers: list[Bytes]) -> float:
    """Store chunks with the engine's writers, and return the bytes per second until all are on the disk."""
    target = chunks.empty_target(Path(path), chunks.column(count, compressor))
    seconds, moved = chunks.write_in_threads(target, range(count), buffers)
    target.sink.commit()
    start = time.perf_counter()
    flush(files_in(Path(path)))
    return sum(moved) / (seconds + time.perf_counter() - start)
