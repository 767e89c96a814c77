"""Chunks that measurements write and read with the engine's writers and readers."""

import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil

from ..engine.ports import Device, Limits
from ..planning.problem import MiB
from ..planning.schedule import Part, Piece, cut
from ..storage.io.files import chunks_at_once
from ..storage.read import inputs
from ..storage.read.source import Source
from ..storage.write import layout, opening
from ..storage.write.publication import Publication
from ..storage.write.target import Target
from ..support.buffers import Bytes
from ..support.errors import InputError
from ..support.timed import by_one_thread, for_a_while
from .io import drop, files_in

SIDE = 2048
"""Rows and columns of the float32 chunks that are written and read, of 16 MiB each."""
FOLDER_BYTES = 1 << 30
"""Bytes that are written and read in a folder, unless that takes longer."""

Moved = tuple[float, list[int]]
"""Seconds, and the bytes of each chunk that was moved."""


def chunk_bytes() -> int:
    """Return the size of a chunk."""
    return SIDE * SIDE * 4


def limits_of(device: Device) -> Limits:
    """Return the limits of a device for float32. Readers and writers are the same for all types."""
    one = np.dtype(np.float32)
    return device.limits(device.arithmetic(one, one, one, (SIDE,) * 3, 0, "auto", "highest"), None)


def chunks_that_fit(place: Path) -> int:
    """Return how many chunks are written to measure a folder. Raises InputError if there is no space for
    them."""
    count = min(FOLDER_BYTES, psutil.disk_usage(str(place)).free // 4) // chunk_bytes()
    if count < 2:
        raise InputError(f"{place} has too little space left to measure it; name another folder")
    return count


def fill_with_noise(buffers: list[Bytes]) -> None:
    """Fill each buffer, of the size of a chunk, with noise; no two are alike."""
    numbers = np.random.default_rng(0).standard_normal(SIDE * SIDE, np.float32)
    for index, buffer in enumerate(buffers):
        buffer.view(np.float32)[:] = np.roll(numbers, index)


def column(count: int, compressor: str = "none") -> layout.Output:
    """Return the layout of an array of so many chunks, one below the other."""
    return layout.Output((count * SIDE, SIDE), np.dtype(np.float32), (SIDE, SIDE), None, compressor)


def empty_target(place: Path, output: layout.Output) -> Target[Publication]:
    """Return a new array. What is there is removed before, because whoever replaces files waits until the
    system has freed their memory."""
    shutil.rmtree(place, ignore_errors=True)
    return opening.create_target(str(place), output, output.dtype)


def tiny_output(side: int) -> layout.Output:
    """Return an array of one small chunk."""
    return layout.Output((side, side), np.dtype(np.float32), (side, side))


def tiny_array(place: Path, side: int) -> None:
    """Make an array of one small chunk, full of ones."""
    target = empty_target(place, tiny_output(side))
    target.write(Part((0, 0), 0, 0, side, side), np.ones((side, side), np.float32).reshape(-1).view(np.uint8))
    target.sink.commit()


def part(index: int) -> Part:
    """Return a chunk of a column."""
    return Part((index, 0), 0, 0, SIDE, SIDE)


def write_in_threads(
    target: Target[Publication], indices: Iterable[int], buffers: list[Bytes], longest: float = math.inf
) -> Moved:
    """Write chunks with the engine's writers, in a thread for each buffer, for at most `longest` seconds."""
    return for_a_while(lambda index, buffer: target.write(part(index), buffer), indices, buffers, longest)


def write(
    target: Target[Publication], indices: Iterable[int], buffers: list[Bytes], longest: float = math.inf
) -> Moved:
    """Write chunks as the engine does: in the background where the file system allows it."""
    if not target.background:
        return write_in_threads(target, indices, buffers, longest)
    return by_one_thread(lambda index, buffer: target.start(part(index), buffer), indices, buffers, longest)


def source_in(place: Path) -> Source:
    """Open an array that was written."""
    return inputs.open_input(str(place)).source


def pieces_of(source: Source, index: int, slot_bytes: int | None = None) -> Iterator[Piece]:
    """Cut a chunk into pieces of at most `slot_bytes`, by default of a whole chunk."""
    rows = index * SIDE, (index + 1) * SIDE
    return cut("a", source.matrix, rows, (0, SIDE), slot_bytes or chunk_bytes())


def read_in_threads(
    source: Source,
    indices: Iterable[int],
    buffers: list[Bytes],
    longest: float = math.inf,
    slot_bytes: int | None = None,
) -> Moved:
    """Read chunks with the engine's readers, in a thread for each buffer, for at most `longest` seconds."""

    def read(index: int, buffer: Bytes) -> int:
        return sum(source.read(piece, buffer)[1] for piece in pieces_of(source, index, slot_bytes))

    return for_a_while(read, indices, buffers, longest)


def read(source: Source, indices: Iterable[int], buffers: list[Bytes], longest: float = math.inf) -> Moved:
    """Read chunks as the engine does: in the background where the file system allows it."""
    if not source.asynchronous:
        return read_in_threads(source, indices, buffers, longest)
    seconds, found = by_one_thread(
        lambda index, buffer: source.start(next(pieces_of(source, index)), buffer),
        indices, buffers[: chunks_at_once(len(buffers))], longest,
    )  # fmt: skip
    return seconds, [nbytes for _, nbytes in found]


def per_second(moved: Moved) -> float:
    """Return the rate in bytes per second."""
    seconds, sizes = moved
    return sum(sizes) / seconds


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache, if the system allows it."""
    drop(files_in(folder))


def keep(folder: Path) -> None:
    """Read the files of a folder into the page cache."""
    buffer = bytearray(4 * MiB)
    for path in files_in(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
