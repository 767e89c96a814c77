"""Measures how fast the functions that the engine uses read, write and decode, in bytes per second.

    direct       disk ──► memory, past the page cache
    buffered     disk ──► page cache ──► memory
    cached       page cache ──► memory; a file system in memory is the same
    decode       memory ──► memory: what a compressed chunk costs if the disk costs nothing
    source       a stored array, read by the engine's readers

Every function runs `threads` threads that take the next chunk when they are done with one.
"""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..planning.problem import MiB
from ..planning.schedule import cut
from ..storage.io import files
from ..storage.read import addresses, inputs
from ..storage.read.compressed import CompressedSource
from ..support.buffers import PAGE, Bytes, page_aligned
from ..support.errors import InputError
from ..support.intervals import round_up
from ..support.timed import for_a_while

CHUNK = 16 * MiB


def write_rate(
    folder: str | os.PathLike[str],
    nbytes: int = 2048 * MiB,
    threads: int = 8,
    direct: bool = True,
    chunk: int = CHUNK,
) -> float:
    """Write new files of `chunk` bytes into `folder`, which is created if it is missing, and return the bytes
    per second until all are on the disk. The files stay there for `read_rate`."""
    os.makedirs(folder, exist_ok=True)
    paths = [f"{folder}/{index}" for index in range(max(1, nbytes // chunk))]
    for path in paths:  # replacing a file costs more than making one
        Path(path).unlink(missing_ok=True)
    buffers = page_aligned(threads, chunk)
    for buffer in buffers:
        buffer[:] = np.random.default_rng(1).integers(0, 256, chunk, np.uint8)

    def write(path: str, buffer: Bytes) -> None:
        files.write(path, buffer, direct)

    start = time.perf_counter()
    for_a_while(write, paths, buffers)
    if not direct:
        flush(paths)
    return len(paths) * chunk / (time.perf_counter() - start)


def read_rate(
    folder: str | os.PathLike[str],
    threads: int = 8,
    direct: bool = True,
    cached: bool = False,
    buffers: list[Bytes] | None = None,
) -> float:
    """Read the files in `folder` into memory and return the bytes per second. `buffers`, if given: one for
    each thread, as large as the largest file. The files are first taken out of the page cache or, if
    `cached`, brought into it."""
    paths = [entry.path for entry in os.scandir(folder) if entry.is_file()]
    if not paths:
        raise InputError(f"{folder} holds no files; write some first")
    largest = max(os.path.getsize(path) for path in paths)
    buffers = buffers or page_aligned(threads, round_up(largest, PAGE))
    for buffer in buffers:
        buffer[:] = 0

    def read(path: str, buffer: Bytes) -> None:
        with files.ChunkFile(path, direct) as file:
            file.read(buffer[: file.size], 0)

    if cached:
        for_a_while(read, paths, buffers)
        direct = False
        for_a_while(read, paths, buffers)
    else:
        drop(paths)
    start = time.perf_counter()
    for_a_while(read, paths, buffers)
    return sum(map(os.path.getsize, paths)) / (time.perf_counter() - start)


def files_in(folder: Path) -> Iterator[str]:
    """Yield the path of every file below a folder."""
    return (str(path) for path in folder.rglob("*") if path.is_file())


def flush(paths: Iterable[str], forget: bool = False) -> None:
    """Wait until files are on the disk. `forget`: also take them out of the page cache, if the system allows
    it."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            if forget and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def drop(paths: Iterable[str]) -> None:
    """Take files out of the page cache."""
    flush(paths, forget=True)


def decode_rate(spec: Any, threads: int = 16, seconds: float = 2.0) -> float:
    """Decode chunks of a stored array from memory to memory, and return the decoded bytes per second. Each of
    `threads` threads decodes a chunk of its own, again and again. Raises InputError unless the chunks are
    compressed files that the engine decodes itself."""
    source = inputs.open_input(spec).source
    if not isinstance(source, CompressedSource):
        raise InputError(f"{source.name} has no compressed chunks in local files")
    s = source.matrix
    found: list[Bytes] = []
    for i in range(s.grid[0]):
        for j in range(s.grid[1]):
            if len(found) < threads and (data := source.encoded(i, j)) is not None:
                found.append(data.copy())
    if not found:
        raise InputError(f"{source.name} has no chunks")
    outs = page_aligned(threads, s.chunk_bytes)
    for out in outs:
        out[:] = 0
    done, end = [0] * threads, time.perf_counter() + seconds

    def decode(index: int, out: Bytes) -> None:
        while done[index] == 0 or time.perf_counter() < end:
            source.compressor.decode(found[index % len(found)], out)
            done[index] += 1

    start = time.perf_counter()
    for_a_while(decode, range(threads), outs)
    return sum(done) * s.chunk_bytes / (time.perf_counter() - start)


def source_rate(
    spec: Any, threads: int = 16, buffers: list[Bytes] | None = None, cold: bool = False, rounds: int = 1
) -> float:
    """Read a stored array with the engine's own `read` in `threads` threads, and return the decoded bytes per
    second. Every chunk is read `rounds` times, into `buffers`, if given: one for each thread, as large as a
    decoded chunk. `cold`: take the files of a local array out of the page cache first."""
    source = inputs.open_input(spec).source
    s = source.matrix
    buffers = buffers or page_aligned(threads, s.chunk_bytes)
    for buffer in buffers:
        buffer[:] = 0
    pieces = list(cut("a", s, (0, s.rows), (0, s.cols), s.chunk_bytes)) * rounds
    if cold and (place := addresses.local_path(spec)):
        drop(files_in(place))
    start = time.perf_counter()
    for_a_while(source.read, pieces, buffers)
    return rounds * s.rows * s.cols * s.itemsize / (time.perf_counter() - start)
