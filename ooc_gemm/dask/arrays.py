"""Products of dask arrays, as dask arrays: how C is cut into superblocks, and the graph of tasks (`tasks.py`)
that makes them."""

import itertools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from ..run.request import Precision
from ..storage.read import addresses
from ..support.memory import parse_size
from .internals import Blockwise, List, Task, TaskRef, getter
from .tasks import Options, Step, accumulated, nothing, part_of, pieces_of, product_of_stored
from .workers import name_of_device, tasks_at_a_time

FLOPS, BYTES = 60e9, 1e9
"""Operations and bytes per second of a thread, roughly. They only decide the shape of superblocks."""
LEAST_DEPTH, MOST_DEPTH = 256, 2048
"""Smallest and largest extent of a step along k. Each step copies its superblock, which takes a few percent
of the time of the shortest one."""
LAG = 2
"""Number of steps by which a superblock may be ahead of any other."""


def matmul(
    x: Any,
    y: Any,
    *,
    device: str = "auto",
    precision: Precision = "highest",
    kernel: str = "auto",
    memory_limit: str | int | None = None,
) -> Any:
    """Multiply dask arrays: x·y as a lazy dask array with the chunks and meta of `dask.array.matmul`.

    The product is made in superblocks of its chunks, as few as keep all threads of the current client's
    workers (without a client, of this process) busy within their memory. Where x and y are what
    `dask.array.from_zarr` returned, one task makes a superblock and reads the stored chunks itself. Otherwise
    a chain of tasks does, each of which adds the product of some chunks along k, so that the memory held at a
    time does not grow with k (except for what a waiting worker computes ahead of the operands' own tasks). A
    slice of the result computes the superblocks that hold it.

    Parameters
    ----------
    x, y : dask.array.Array
        The operands. What is not two matrices of numbers in NumPy arrays, or has an unknown size, is passed
        on to `dask.array.matmul`.
    device : str, default "auto"
        The device of each task, as of `ooc_gemm.multiply`.
    precision : {"highest", "high", "medium"}, default "highest"
        Least accuracy of float32 products.
    kernel : str, default "auto"
        The kernel: the fastest that keeps the precision, or the one of this name.
    memory_limit : str or int, optional
        Most host memory, in bytes or as `"512MiB"`, that the tasks of this product take together in each
        process that runs them, beyond what the process holds otherwise. By default the value
        `ooc-gemm.memory-limit` of dask's configuration; without one 70 % of a worker's own limit, and
        without a cluster 60 % of what the process may use. On a worker, the smaller one of this and of its
        own limit counts. It is shared by as many tasks at a time as a worker has threads, or as
        `num_workers` of dask's configuration says. A task takes what its smallest plan needs even where its
        share is less: at least four times the memory of a chunk of the result. The limit does not cover what
        other tasks hold: the chunks of computed operands, and the result where it is computed into memory.

    Returns
    -------
    dask.array.Array
        Its dtype is that of `dask.array.matmul` with several chunks along k: integers add up in 64 bits.

    Raises
    ------
    ValueError
        The inner dimensions differ.
    InputError
        `device` is no name, or `memory_limit` is no size.
    RangeError
        While computing: a sum of integers does not fit 64 bits, where NumPy would wrap.
    """
    x, y = da.asanyarray(x), da.asanyarray(y)
    if not all(_ours(array) for array in (x, y)):
        return da.matmul(x, y)
    if x.shape[1] != y.shape[0]:
        da.matmul(x, y)  # raises
        raise ValueError(f"the inner dimensions of {x.shape} and {y.shape} differ")
    dtype = np.zeros(0, np.result_type(x.dtype, y.dtype)).sum().dtype
    if memory_limit is None:
        memory_limit = dask.config.get("ooc-gemm.memory-limit", None)
    most = None if memory_limit is None else parse_size(memory_limit)
    threads, room = tasks_at_a_time(most)
    options = Options(name_of_device(device), precision, kernel, room if most else None)
    chunks, k = (x.chunks[0], y.chunks[1]), x.shape[1]
    down, across = _superblocks(chunks, k, dtype, threads, room)
    name = f"ooc-gemm-matmul-{tokenize(x, y, options, down, across)}"
    stored = [_stored(x, 0, down), _stored(y, 1, across)]
    if None in stored:
        graph, parents = _from_chunks(name, x, y, down, across, dtype, options, room), [x, y]
    else:
        graph = _from_stores(name, stored, k, down, across, dtype, options)
        parents = [array for array, spec in zip((x, y), stored, strict=True) if isinstance(spec, TaskRef)]
    layers = HighLevelGraph.from_collections(name, graph, dependencies=parents)
    return da.Array(layers, name, chunks, dtype=dtype, meta=np.empty((0, 0), dtype))


def _ours(x: Any) -> bool:
    return (
        x.ndim == 2
        and type(x._meta) is np.ndarray
        and not any(math.isnan(size) for size in x.shape)
        and x.dtype.isnative
        and x.dtype.kind in "iufc"
        and x.dtype.itemsize <= (16 if x.dtype.kind == "c" else 8)
    )


@dataclass(frozen=True)
class Span:
    """The extent of a superblock down or across C."""

    first: int
    """Number of the first chunk of the superblock."""
    edges: list[int]
    """Where the chunks of the superblock begin and end in C."""

    @property
    def start(self) -> int:
        """First row or column of the superblock in C."""
        return self.edges[0]

    @property
    def stop(self) -> int:
        """End of the superblock's rows or columns in C, exclusive."""
        return self.edges[-1]

    @property
    def chunks(self) -> range:
        """Numbers of the superblock's chunks."""
        return range(self.first, self.first + len(self.edges) - 1)

    def within(self, chunk: int) -> tuple[int, int]:
        """Where a chunk begins and ends in the superblock."""
        low, high = self.edges[chunk - self.first : chunk - self.first + 2]
        return low - self.start, high - self.start


def _superblocks(
    chunks: tuple[tuple[int, ...], ...], k: int, dtype: Any, threads: int, memory: int
) -> tuple[list[Span], list[Span]]:
    """Cut C down and across into superblocks that keep all threads busy. Each fits four times into `memory`,
    the bytes of a task: as it was, as it is made, what is multiplied, and the chunks cut from it."""
    room = memory // (4 * accumulated(dtype).itemsize)

    def seconds(cut: tuple[list[Span], list[Span]]) -> tuple[bool, float, int]:
        rows, cols = (max(span.stop - span.start for span in spans) for spans in cut)
        count = len(cut[0]) * len(cut[1])
        each = 2.0 * rows * cols * k / FLOPS + (rows + cols) * k * dtype.itemsize / BYTES
        return rows * cols > room, math.ceil(count / threads) * each, count

    down, across = ([_cut(sizes, parts) for parts in _parts(len(sizes))] for sizes in chunks)
    return min(itertools.product(down, across), key=seconds)


def _parts(chunks: int) -> list[int]:
    """Return the numbers of parts that are tried."""
    few = {*range(1, 17), *(round(16 * 1.2**i) for i in range(1, 60)), chunks}
    return sorted(parts for parts in few if parts <= chunks)


def _cut(sizes: tuple[int, ...], parts: int) -> list[Span]:
    """Cut chunks into about equal parts of whole chunks."""
    edges = [0, *itertools.accumulate(sizes)]
    at = [bisect_left(edges, edges[-1] * part / parts) for part in range(1, parts)]
    firsts = sorted({0, *at, len(sizes)})
    return [Span(first, edges[first : last + 1]) for first, last in itertools.pairwise(firsts)]


def _stored(x: Any, axis: int, cut: list[Span]) -> Any:
    """Return what a task opens to read x, where x is exactly what `from_zarr` opened and is cut at edges of
    its chunks; otherwise None. It is the path of the array, or a reference into the user's graph: an open
    array is not copied into ours, because it may hold credentials."""
    layer = x.dask.layers.get(x.name)
    if not isinstance(layer, Blockwise) or getattr(layer.task, "func", None) is not getter:
        return None
    found = held = layer.indices[0][0]
    if isinstance(held, TaskRef):
        found = x.dask.layers.get(held.key, {}).get(held.key)
    if not addresses.is_array(found) or (found.shape, found.dtype) != (x.shape, x.dtype):
        return None
    if any(span.start % found.chunks[axis] for span in cut):
        return None
    spec = addresses.portable(found)
    return held if isinstance(held, TaskRef) and not isinstance(spec, str) else spec


def _from_stores(
    name: str, stored: list[Any], k: int, down: list[Span], across: list[Span], dtype: Any, options: Options
) -> dict[Any, Any]:
    """Return a graph in which one task makes each superblock from stored arrays."""
    graph: dict[Any, Any] = {}
    for (i, rows), (j, cols) in itertools.product(enumerate(down), enumerate(across)):
        key = _key(name, rows, cols, ("block-" + name, i, j))
        ranges = [((rows.start, rows.stop), (0, k)), ((0, k), (cols.start, cols.stop))]
        graph[key] = Task(key, product_of_stored, *stored, ranges, dtype, options)
        graph |= _chunks(name, key, rows, cols)
    return graph


def _from_chunks(
    name: str, x: Any, y: Any, down: list[Span], across: list[Span], dtype: Any, options: Options, memory: int
) -> dict[Any, Any]:
    """Return a graph in which a chain of tasks makes each superblock. Task `gate` p waits for step p of all
    superblocks. memory: the bytes of each task."""
    graph: dict[Any, Any] = {}
    largest = max(1, sum(max(span.stop - span.start for span in spans) for spans in (down, across)))
    depth = memory // (4 * (LAG + 2) * largest * accumulated(dtype).itemsize)
    depth = max(LEAST_DEPTH, min(depth, MOST_DEPTH))
    edges_x, edges_y = ([0, *itertools.accumulate(sizes)] for sizes in (x.chunks[1], y.chunks[0]))
    steps = list(itertools.pairwise(_k_edges(edges_x, edges_y, depth)))
    blocks = list(itertools.product(enumerate(down), enumerate(across)))
    for p, (start, stop) in enumerate(steps):
        in_x, in_y = (_overlapping(edges, start, stop) for edges in (edges_x, edges_y))
        pieces = pieces_of(in_x, in_y, start, stop)
        last = p == len(steps) - 1
        for (i, rows), (j, cols) in blocks:
            key = ("step-" + name, i, j, p)
            before = TaskRef(("step-" + name, i, j, p - 1)) if p else None
            wait = TaskRef(("gate-" + name, p - LAG)) if p >= LAG and len(blocks) > 1 else None
            left = [List(*(TaskRef((x.name, r, q)) for q, *_ in in_x)) for r in rows.chunks]
            right = [List(*(TaskRef((y.name, q, s)) for s in cols.chunks)) for q, *_ in in_y]
            if last:
                key = _key(name, rows, cols, key)
                graph |= _chunks(name, key, rows, cols)
            step = Step(rows.edges, cols.edges, pieces, last, dtype, options)
            graph[key] = Task(key, step, before, wait, List(*left), List(*right))
            if p < len(steps) - LAG and len(blocks) > 1:
                token = ("token-" + name, i, j, p)
                graph[token] = Task(token, nothing, TaskRef(key))
        if p < len(steps) - LAG and len(blocks) > 1:
            gate = ("gate-" + name, p)
            tokens = (TaskRef(("token-" + name, i, j, p)) for (i, _), (j, _) in blocks)
            graph[gate] = Task(gate, nothing, List(*tokens))
    return graph


def _key(name: str, rows: Span, cols: Span, key: Any) -> Any:
    """Return the key of the task that makes a superblock: that of the chunk, if the superblock is just
    one."""
    return (name, rows.first, cols.first) if len(rows.chunks) == len(cols.chunks) == 1 else key


def _chunks(name: str, block: Any, rows: Span, cols: Span) -> dict[Any, Any]:
    """Add the tasks that cut chunks from a superblock."""
    if block[0] == name:
        return {}
    return {
        (key := (name, i, j)): Task(key, part_of, TaskRef(block), *rows.within(i), *cols.within(j))
        for i, j in itertools.product(rows.chunks, cols.chunks)
    }


def _k_edges(x: list[int], y: list[int], depth: int) -> list[int]:
    """Return where steps begin and end along k: at edges of the larger chunks and at most `depth` apart,
    where both are possible."""
    coarse, fine = sorted((x, y), key=len)
    every, found = sorted({*fine, *coarse}), [0]
    while (start := found[-1]) < every[-1]:
        last = (edges[bisect_right(edges, start + depth) - 1] for edges in (coarse, fine))
        found.append(next((edge for edge in last if edge > start), every[bisect_right(every, start)]))
    return found if every[-1] else [0, 0]


def _overlapping(edges: list[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return number, start and stop of the chunks that meet [start, stop)."""
    first = max(0, bisect_right(edges, start) - 1)
    some = itertools.takewhile(lambda q: edges[q] < stop, range(first, len(edges) - 1))
    return [(q, edges[q], edges[q + 1]) for q in some if edges[q] < edges[q + 1]]
