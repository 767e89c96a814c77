"""How fast files are read, written and decoded in a folder by bare system calls, and beside that by the
engine's readers and writers. What is reported is a plain dict, ready for JSON: figures.py shows it.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from . import store
from .devices import open_device
from .info import CHUNK, chunks_that_fit, for_a_while, forget, keep
from .plan import Part, cut
from .rates import file_system, mount_point
from .ring import Bytes

FILE_BYTES = CHUNK * CHUNK * 4
DIRECT = getattr(os, "O_DIRECT", 0)

Say = Callable[[str], None]
Row = dict[str, Any]


def run(folder: str = ".", device: str = "auto", progress: Say = lambda text: None) -> dict[str, Any]:
    """The report: a row for each way, in it bytes a second by each number of threads; None where there is no
    such way. Of 1 GiB, or as much as can be had in two seconds. Raises InputError."""
    place, chosen = Path(folder), open_device(device)
    limits = chosen.limits(
        chosen.arithmetic(*(np.dtype("f4"),) * 3, (CHUNK,) * 3, 0, "auto", "highest"), None
    )
    threads = sorted({1, 4, limits.readers})
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-", dir=place) as scratch:
        rows = list(_rows(Path(scratch), threads, chunks_that_fit(place), progress))
    system = file_system(place)
    return {
        "suite": "io",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": chosen.model,
        "place": {"mounted": mount_point(system), "type": system.split()[0]},
        "threads": threads,
        "rows": rows,
    }


def _rows(scratch: Path, threads: list[int], count: int, say: Say) -> Iterator[Row]:
    buffers = _aligned(max(threads))
    numbers = np.random.default_rng(0).standard_normal(CHUNK * CHUNK, np.float32)
    for index, buffer in enumerate(buffers):
        buffer.view(np.float32)[:] = np.roll(numbers, index)
    files = [scratch / f"file{index}" for index in range(count)]

    def row(group: str, way: str, work: Any, cold: Path | None = None, items: int = count) -> Row:
        rates: list[float | None] = []
        for number in threads:
            say(f"{group}: {way}, {number} threads")
            if cold is not None:
                forget(cold)
            try:
                seconds, moved = for_a_while(work, range(items), buffers[:number])
                rates.append(sum(moved) / seconds)
            except OSError:  # no direct access here
                rates.append(None)
        return {"group": group, "way": way, "bytes_per_second": rates}

    def write(flags: int, index: int, buffer: Bytes) -> int:
        return _write(files[index], buffer, flags)

    def read(flags: int, index: int, buffer: Bytes) -> int:
        return _read(files[index], buffer, flags)

    yield row("write", "direct", partial(write, DIRECT) if DIRECT else _impossible)
    yield row("write", "buffered", partial(write, 0))
    for index, file in enumerate(files):  # what a slow folder left out
        if not file.exists():
            _write(file, buffers[index % len(buffers)], 0)
    target = store.create_target(str(scratch / "raw"), _output(count), np.dtype(np.float32))
    yield row("write", "engine", partial(_engine_write, target))
    target.commit()
    yield row("read", "direct", partial(read, DIRECT) if DIRECT else _impossible, scratch)
    yield row("read", "buffered", partial(read, 0), scratch)
    yield row("read", "engine", _engine_read(scratch / "raw"), scratch / "raw")
    keep(scratch / "raw")
    yield row("read cached", "buffered", partial(read, 0))
    yield row("read cached", "engine", _engine_read(scratch / "raw"))
    yield from _decoding(scratch, row, buffers, min(count, 2 * max(threads)))


def _impossible(index: int, buffer: Bytes) -> int:
    raise OSError


def _aligned(count: int) -> list[Bytes]:
    """Page-aligned buffers of a file each, which direct access needs."""
    return [np.frombuffer(mmap(-1, FILE_BYTES), np.uint8) for _ in range(count)]


def _write(path: Path, buffer: Bytes, flags: int) -> int:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o666)
    try:
        done = 0
        while done < len(buffer):
            done += os.write(file, buffer[done:].data)
        return done
    finally:
        os.close(file)


def _read(path: Path, buffer: Bytes, flags: int) -> int:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        done = 0
        while done < len(buffer) and (got := os.preadv(file, [buffer[done:].data], done)):
            done += got
        return done
    finally:
        os.close(file)


def _output(count: int) -> store.Output:
    return store.Output((count * CHUNK, CHUNK), np.dtype(np.float32), (CHUNK, CHUNK), None, "none")


def _engine_write(target: store.Target, index: int, buffer: Bytes) -> int:
    return target.write(Part((index, 0), 0, 0, CHUNK, CHUNK), buffer)


def _engine_read(array: Path) -> Callable[[int, Bytes], int]:
    source = store.open_source(str(array))

    def read(index: int, buffer: Bytes) -> int:
        rows = (index * CHUNK, (index + 1) * CHUNK)
        pieces = cut("a", source.matrix, rows, (0, CHUNK), FILE_BYTES)
        return sum(source.read(piece, buffer)[0].nbytes for piece in pieces)

    return read


def _decoding(scratch: Path, row: Any, buffers: list[Bytes], count: int) -> Iterator[Row]:
    """Decoded bytes a second, of normal float32 numbers in the page cache."""
    output = replace(_output(count), compressor="zstd")
    target = store.create_target(str(scratch / "zstd"), output, output.dtype)
    for_a_while(partial(_engine_write, target), range(count), buffers, longest=float("inf"))
    target.commit()
    packed = [path.read_bytes() for path in (scratch / "zstd" / "c").rglob("*") if path.is_file()]
    with contextlib.suppress(ImportError):
        from numcodecs.zstd import Zstd

        codec = Zstd()

        def decode(index: int, buffer: Bytes) -> int:
            codec.decode(packed[index % len(packed)], out=buffer)
            return len(buffer)

        yield row("decode zstd", "in memory", decode, items=count)
    yield row("decode zstd", "engine", _engine_read(scratch / "zstd"), items=count)
