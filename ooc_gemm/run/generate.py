"""Writes random arrays chunk by chunk within a memory limit, as inputs for trials."""

import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..devices.cpu.device import INTERPRETER_BYTES
from ..planning.problem import CHUNK_BYTES, MiB
from ..planning.schedule import Part
from ..storage.format import limits
from ..storage.io.requests import CONNECTION_BYTES, WRITERS
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.read import addresses
from ..storage.write import checks, layout, opening
from ..storage.write.publication import Publication
from ..storage.write.target import Target
from ..support.buffers import Bytes, drop
from ..support.errors import BudgetError, InputError, letting_go, on_thread
from ..support.intervals import ceil_div, ranges
from ..support.memory import baseline_bytes, memory_limit_of
from ..support.meter import Meter
from .scalars import is_one_of

Array = npt.NDArray[Any]
Moved = tuple[int, int]
"""Bytes that were written of a part, and the bytes of its elements."""


def random(
    out: Any,
    shape: tuple[int, int],
    *,
    dtype: Any = "float32",
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str = "none",
    distribution: Literal["normal", "uniform"] = "normal",
    seed: int = 0,
    memory_limit: str | int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a random array, chunk by chunk within a memory limit.

    The same seed, type and chunks always give the same array. If the array cannot be finished, nothing is
    left in a local folder, and an array that it was to replace stays.

    Parameters
    ----------
    out : str or os.PathLike
        Path or URL of the array.
    shape : (int, int)
        Rows and columns.
    dtype : dtype, default "float32"
        Type of the elements.
    chunks, shards : (int, int), optional
        Rows and columns of the chunks and shards. By default chunks near 16 MiB and no shards.
    compressor : str, default "none"
        `"none"`, `"zstd"`, `"zstd:LEVEL"` or `"blosc"`.
    distribution : {"normal", "uniform"}, default "normal"
        Distribution of floating-point and complex elements: normal with mean 0 and variance 1, or uniform in
        [0, 1). Integers are uniform in [−100, 100], unsigned ones in [0, 100].
    seed : int, default 0
        Seed of the random numbers.
    memory_limit : str or int, optional
        Most host memory that the process may hold resident, in bytes or as `"8GiB"`. By default 60 % of what
        the process may use.
    force : bool, default False
        Replace an array that exists. In an object store it is removed first.
    progress : callable, optional
        Called with (bytes done, bytes in all) after each chunk: bytes of elements, before they are encoded.

    Returns
    -------
    int
        The bytes written.

    Raises
    ------
    InputError, BudgetError
        Before anything is written: the array cannot be made, or not within the memory limit.
    StoreError
        A chunk could not be written.
    """
    refuse_event_loop()
    if len(shape) != 2 or min(shape) < 0:
        raise InputError(f"shape {shape} must be two numbers, rows and columns")
    if not is_one_of(distribution, ("normal", "uniform")):
        raise InputError(f"{distribution!r} is not a distribution; choose normal or uniform")
    if seed < 0:
        raise InputError(f"seed {seed} is negative; give 0 or more")
    kind = limits.matrix_dtype(dtype)
    layout.check_layout(chunks, shards, compressor)
    if chunks is None:
        rows = max(1, min(shape[0] or 1, int((CHUNK_BYTES[0] // kind.itemsize) ** 0.5)))
        chunks = (rows, max(1, min(shape[1] or 1, CHUNK_BYTES[0] // kind.itemsize // rows)))
    checks.check_new(out)
    checks.check_output(out, [], force, reads=False)
    unit = shards or chunks
    limit = memory_limit_of(memory_limit)
    base = baseline_bytes(INTERPRETER_BYTES)
    output = layout.Output(shape, kind, chunks, shards, compressor)
    each = unit[0] * unit[1] * (kind.itemsize + 8 + (2 * kind.itemsize if output.encoded else 0))
    each += output.work.bytes_for(unit[0] * unit[1] * kind.itemsize)
    far = addresses.traits_of(out).remote
    each += CONNECTION_BYTES if far else 0
    threads = min(2 * WRITERS if far else 4, (limit - base) // each)
    if threads < 1:
        raise BudgetError(
            f"a memory limit of {limit} bytes is too small for chunks of {unit[0]}×{unit[1]}; "
            f"the smallest that would do is {base + each} bytes ({ceil_div(base + each, MiB)}MiB)",
            minimum_memory_limit=base + each,
        )
    target = opening.create_target(out, output, kind, force=force)
    whole = shape[0] * shape[1] * kind.itemsize
    meter = Meter(f"random {addresses.describe(out)}", nbytes=whole, verb="wrote")

    def report(done: int) -> None:
        meter(done / max(1, whole))
        if progress is not None:
            progress(done, whole)

    def draw(part: Part) -> Array:
        rng = np.random.default_rng([seed, *part.chunk])
        return _draw(rng, (part.rows, part.cols), kind, distribution)

    try:
        with meter:
            written = _filled(target, output, threads, draw, report)
        target.sink.commit()
    except BaseException:
        target.sink.discard()  # nobody could continue it
        raise
    return written


@letting_go()
def _filled(
    target: Target[Publication],
    output: layout.Output,
    threads: int,
    draw: Callable[[Part], Array],
    report: Callable[[int], None],
) -> int:
    """Write what `draw` returns for each chunk, or each shard, with some threads. `report` is called with the
    bytes of elements that are done. Returns the bytes written."""
    shape, kind, unit = output.shape, output.dtype, output.shards or output.chunks
    slots: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    for _ in range(threads):
        slots.put(np.empty(unit[0] * unit[1] * kind.itemsize, np.uint8))

    @on_thread("writer")
    def write(part: Part) -> Moved:
        slot = slots.get()
        try:
            target.view(part, slot)[...] = draw(part)
            return target.write(part, slot), part.rows * part.cols * kind.itemsize
        finally:
            slots.put(slot)

    parts = (
        Part((row // unit[0], col // unit[1]), 0, 0, row_stop - row, col_stop - col)
        for row, row_stop in ranges(shape[0], unit[0])
        for col, col_stop in ranges(shape[1], unit[1])
    )
    try:
        with ThreadPoolExecutor(threads, "ooc-gemm random") as pool:
            written = done = 0
            for moved, nbytes in _few_at_once(pool, write, parts, threads):
                written, done = written + moved, done + nbytes
                report(done)
    finally:
        drop(slots)
    return written


def _few_at_once(
    pool: ThreadPoolExecutor, write: Callable[[Part], Moved], parts: Iterator[Part], threads: int
) -> Iterator[Moved]:
    """Yield what is returned for each part, in order. No more parts are handed to the threads than keep them
    busy: an array may have a billion, and an error ends the others."""
    under_way = deque(pool.submit(write, part) for part in islice(parts, 2 * threads))
    try:
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(pool.submit(write, part) for part in islice(parts, 1))
    finally:
        while under_way:
            under_way.popleft().cancel()


def _draw(rng: np.random.Generator, shape: tuple[int, int], dtype: Any, distribution: str) -> Array:
    if dtype.kind in "iu":
        return rng.integers(0 if dtype.kind == "u" else -100, 100, shape, dtype, endpoint=True)
    exact: Any = np.float64 if dtype in (np.float64, np.complex128) else np.float32
    draw = rng.standard_normal if distribution == "normal" else rng.random
    if dtype.kind == "c":
        return draw(shape, exact) + 1j * draw(shape, exact)
    return draw(shape, exact)
