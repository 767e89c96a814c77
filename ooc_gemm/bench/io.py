"""How fast this machine reads, writes and decodes: bytes a second, of the functions that the engine uses.

    direct       disk ──► memory, past the page cache
    buffered     disk ──► page cache ──► memory
    cached       page cache ──► memory; a file system in memory is the same
    decode       memory ──► memory, what a compressed chunk costs where the disk costs nothing
    source       what the engine's readers get of a stored array

Every function runs `threads` threads that take the next chunk when they are done with one.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from ..planning.plan import cut
from ..planning.problem import MiB
from ..storage.io import files
from ..storage.read import store
from ..storage.read.local import CompressedSource
from ..support.buffers import PAGE, Bytes, page_aligned
from ..support.errors import InputError
from ..support.intervals import round_up

T = TypeVar("T")
R = TypeVar("R")
CHUNK = 16 * MiB


def write_rate(
    folder: str | os.PathLike[str],
    nbytes: int = 2048 * MiB,
    threads: int = 8,
    direct: bool = True,
    chunk: int = CHUNK,
) -> float:
    """Bytes a second at which new files of `chunk` bytes are written into `folder`, made where it is missing,
    until they are all on the disk. They stay there, for `read_rate`."""
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
    """Bytes a second at which the files in `folder` are read into memory: `buffers` where given, one a thread
    and as large as the largest file. They are taken out of the page cache first, or brought into it."""
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
    """Every file below a folder."""
    return (str(path) for path in folder.rglob("*") if path.is_file())


def flush(paths: Iterable[str], forget: bool = False) -> None:
    """Wait until files are on the disk; `forget`: and take them out of the page cache, where the system lets
    us."""
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
    """Decoded bytes a second that `threads` threads make of the encoded chunks of a stored array, from memory
    to memory: as many different chunks as threads, again and again. Raises InputError where chunks are not
    compressed files that the engine decodes itself."""
    source = store.open_source(spec)
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
    """Decoded bytes a second that `threads` threads get of a stored array by the engine's own `read`, chunk
    after chunk, all of them `rounds` times, into `buffers` where given: one a thread, of a decoded chunk.
    `cold`: a local array's files are taken out of the page cache first."""
    source = store.open_source(spec)
    s = source.matrix
    buffers = buffers or page_aligned(threads, s.chunk_bytes)
    for buffer in buffers:
        buffer[:] = 0
    pieces = list(cut("a", s, (0, s.rows), (0, s.cols), s.chunk_bytes)) * rounds
    if cold and (place := store.local_path(spec)):
        drop(files_in(place))
    start = time.perf_counter()
    for_a_while(source.read, pieces, buffers)
    return rounds * s.rows * s.cols * s.itemsize / (time.perf_counter() - start)


def for_a_while(
    work: Callable[[T, Bytes], R], items: Iterable[T], buffers: list[Bytes], longest: float = math.inf
) -> tuple[float, list[R]]:
    """`work` on the items by a thread a buffer, as long as there are any, and `longest` seconds at most: the
    seconds, and what it returned. Raises what it raised."""
    todo, done, lock = iter(items), list[R](), Lock()
    start = time.perf_counter()

    def run(buffer: Bytes) -> None:
        while time.perf_counter() < start + longest:
            with lock:
                try:
                    item = next(todo)
                except StopIteration:
                    return
            done.append(work(item, buffer))

    with ThreadPoolExecutor(len(buffers), "ooc-gemm bench") as pool:
        list(pool.map(run, buffers))
    return time.perf_counter() - start, done


def by_one_thread(
    begin: Callable[[T, Bytes], Callable[[], R]], items: Iterable[T], buffers: list[Bytes], longest: float
) -> tuple[float, list[R]]:
    """The same by one thread, for work that goes on by itself when it is begun, and ends where what that
    returned is called. Nothing is under way any more when it returns or raises."""
    done, begun, start = list[R](), deque[Callable[[], R]](), time.perf_counter()
    try:
        for item, buffer in zip(items, cycle(buffers), strict=False):
            if time.perf_counter() > start + longest:
                break
            if len(begun) == len(buffers):
                done.append(begun.popleft()())
            begun.append(begin(item, buffer))
        while begun:
            done.append(begun.popleft()())
    finally:
        for end in begun:
            with suppress(BaseException):
                end()
    return time.perf_counter() - start, done
