"""Decides everything about a product before anything is written."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..devices import open_device
from ..engine.ports import INT64_MAX, Device, Operation
from ..planning import layouts
from ..planning.machine import Budget
from ..planning.plan import Plan
from ..planning.problem import Matrix, Problem
from ..planning.search import make_plan
from ..storage.io.files import chunks_at_once
from ..storage.io.requests import BANDWIDTH, CONNECTION_BYTES, STREAM, WRITERS, requests, side_by_side
from ..storage.read import store
from ..storage.read.local import Source
from ..storage.write import checks, layout, provenance, reopen
from ..storage.write.journal import Journal
from ..storage.write.provenance import Finished
from ..support.errors import InputError
from ..support.memory import baseline_bytes, default_memory_limit, parse_size
from . import rates
from .arithmetic import bound, check_scalars
from .arithmetic import out_dtype as choose_dtype
from .operands import open_operand
from .scalars import scalar

PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class Job:
    """Everything decided before anything is written."""

    sources: dict[str, Source]
    operation: Operation
    output: layout.Output
    copies: tuple[layouts.Copy, ...]
    """Of operands, to be made first."""
    plan: Plan
    """Of what follows."""
    device: Device
    dtype: np.dtype[Any]
    head: dict[str, Any] | None
    """What makes C what it is, for the journal; None where nobody could tell whether the inputs are still the
    same."""
    options: dict[str, Any]
    """What makes C what it is, beside the inputs: for C's attributes."""
    blocks: int
    """Of the whole C; the plan may be of what is left."""
    force: bool
    """What stands in C's place is replaced."""
    fills: bool
    """C is an array that was given open: its values are replaced, and nothing else of it."""


def prepare(
    a: Any,
    b: Any,
    c: Any,
    *,
    writes: bool,
    alpha: complex | None = None,
    beta: complex | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    memory_limit: str | int | None = None,
    device: str | Device = "auto",
    device_memory_limit: str | int | None = None,
    precision: str = "highest",
    kernel: str = "auto",
    out_dtype: Any = None,
    chunks: tuple[int, int] | None = None,
    shards: tuple[int, int] | None = None,
    compressor: str | None = None,
    rechunk: bool = False,
    verify: bool = False,
    force: bool = False,
    symmetric: bool = False,
    log: Journal | Finished | None = None,
) -> Job:
    """Everything decided. `symmetric`: op(B) is op(A)ᵀ. `log`: of the run that is continued."""
    begun, layout_there = None, dict[str, Any]()
    fills = bool(log.head.get("fills")) if log else store.is_array(c)
    if log and (log.done or beta or fills or provenance.reads_c(log.head)):
        begun = reopen.open_partial(c)
    if begun is not None:
        layout_there = {"chunks": begun.chunks, "shards": begun.shards}
    alpha, beta = scalar("alpha", alpha), scalar("beta", beta)
    given = {"alpha": alpha, "beta": beta, "out_dtype": out_dtype}
    given |= {"chunks": chunks, "shards": shards, "compressor": compressor}
    settled = provenance.settled(given, log.head if log else None, layout_there, store.describe(c))
    alpha, beta = settled["alpha"], settled["beta"]
    out_dtype, chunks, shards, compressor = (settled[key] for key in provenance.LAYOUT[2:])
    symmetric, fills = symmetric and beta == 0, fills and beta == 0
    if precision not in PRECISIONS:
        raise InputError(f"{precision!r} is not a precision; choose one of {', '.join(PRECISIONS)}")
    if (transpose_a and adjoint_a) or (transpose_b and adjoint_b):
        raise InputError("an operand is either transposed or its adjoint taken; give one of the two")
    if beta != 0 and c is None and writes:
        raise InputError("beta is not 0, so there must be a C to read; give its path")
    limit = default_memory_limit() if memory_limit is None else parse_size(memory_limit)
    device_limit = None if device_memory_limit is None else parse_size(device_memory_limit)
    if beta != 0 and c is not None and isinstance(c, str | os.PathLike):
        here = store.local_path(c)
        if here is not None and not here.exists():
            raise InputError(
                f"{store.describe(c)} does not exist, and beta is not 0; make C first or leave beta out"
            )
    works: list[Callable[[], Any]] = [
        partial(open_operand, a, "A", transpose_a or adjoint_a),
        partial(open_operand, b, "B", transpose_b or adjoint_b),
    ]
    if c is not None and log is None and beta == 0:
        works.append(partial(checks.check_output, c, [a, b], force, reads=fills))
    far = any(map(store.is_remote, (a, b, c)))
    left, right, *_ = side_by_side(works) if far else [work() for work in works]
    shape_a, shape_b = left.shape, right.shape
    if shape_a[1] != shape_b[0]:
        raise InputError(
            f"the inner dimensions of A and B differ: op({left.name}) is {shape_a[0]}×{shape_a[1]} and "
            f"op({right.name}) is {shape_b[0]}×{shape_b[1]}; transpose one of them or choose other arrays"
        )
    left.measure(limit)
    if a is b:
        right.matrix = replace(right.matrix, apart=left.matrix.apart)
    else:
        right.measure(limit)
    (m, k), n = shape_a, shape_b[1]
    sources, existing = {"a": left, "b": right}, None
    if log:
        existing = begun if beta != 0 else None
    elif c is not None and beta != 0:
        existing = reopen.open_existing(c)
        checks.check_output(c, [a, b], force, reads=True)
    if existing is not None:
        old = store.open_source(existing, store.describe(c))
        if old.shape != (m, n):
            raise InputError(
                f"{store.describe(c)} has shape {old.shape} but the product is {m}×{n}; choose another C"
            )
        if out_dtype is not None and np.dtype(out_dtype) != old.dtype:
            raise InputError(f"{old.name} holds {old.dtype}, not {out_dtype}; leave out out_dtype")
        sources["c"], out_dtype = old, old.dtype
    out = choose_dtype(left.dtype, right.dtype, out_dtype, alpha, beta)
    if fills and log is None:
        checks.check_filled(c, (m, n), out, given, force)
        begun = c
    if m * n * out.itemsize > store.MAX_ARRAY_BYTES:
        raise InputError(
            f"op({left.name})·op({right.name}) is {m}×{n}, more than can be stored; transpose one or both"
        )
    chosen = open_device(device) if isinstance(device, str) else device
    largest = bound(left.dtype, right.dtype, out, k, alpha, beta)
    arithmetic = chosen.arithmetic(left.dtype, right.dtype, out, (m, n, k), largest, kernel, precision)
    check_scalars(alpha, beta, arithmetic.block)
    may_wrap = largest > INT64_MAX
    unit, asked = shards or chunks, chunks
    if (there := begun or existing) is not None:
        unit = (there.shards or there.chunks)[0], (there.shards or there.chunks)[1]
        chunks = there.chunks[0], there.chunks[1]
    output = _output((m, n), out, chunks, shards, compressor)
    height, width = unit or (1, 1)
    stored = Matrix(m, n, out.itemsize, height, width, whole=output.encoded, encodes=output.work)
    if existing is not None:
        stored = _updatable(sources["c"].matrix, height, width)
    elif fills and begun is not None:
        stored = _filled(begun, store.open_source(begun, store.describe(c)).matrix)
    problem = Problem(
        m,
        n,
        k,
        left.matrix,
        right.matrix,
        stored,
        panel_itemsize=arithmetic.panel.itemsize,
        block_itemsize=arithmetic.block.itemsize,
        reads_c=existing is not None,
        free_chunks=unit is None,
        pitch=arithmetic.pitch,
        along_k=arithmetic.along_k,
        line_bytes=arithmetic.line_bytes,
        scratch=arithmetic.scratch,
        block_scratch=arithmetic.product_bytes if alpha.imag or beta.imag else 0,
        check_itemsize=arithmetic.check_type.itemsize if verify else 0,
        kernel=f"{arithmetic.kernel}: {arithmetic.why}",
        symmetric=symmetric,
        types=(left.dtype.name, right.dtype.name, out.name),
        keeps_a=arithmetic.panel.kind != "c" and arithmetic.panel != np.int64 and not may_wrap,
    )
    costs = chosen.limits(arithmetic, device_limit)
    turned = problem.panels_along_k != problem.stored_along_k
    converted = turned or any(x.dtype != arithmetic.panel for x in (left, right))
    extra = m * n * out.itemsize if c is None and writes else 0
    asked_of = [(source.latency, source.matrix.chunk_bytes) for source in sources.values() if source.latency]
    readers = max([costs.readers, *(requests(*one) for one in asked_of)])
    if all(source.background for source in sources.values()):
        readers = chunks_at_once(readers)
    puts = store.is_remote(c)
    writers = max(costs.writers, WRITERS if puts else 0)
    budget = Budget(
        host=limit,
        host_baseline=extra + (costs.host_baseline if costs.workers else baseline_bytes(costs.host_baseline)),
        device=costs.device,
        device_baseline=costs.device_baseline,
        workspace=costs.workspace + (costs.check if verify else 0),
        staged=costs.device is not None and (converted or "c" in sources),
        readers=readers,
        writers=writers,
        connection=CONNECTION_BYTES if asked_of or puts else 0,
        workers=max(1, costs.workers),
        weights=costs.weights,
        linked=costs.linked,
        stacked=all(source.matrix.stacked for source in sources.values()),
    )
    inputs = [(source.place, source.matrix.stored_bytes) for source in sources.values()]
    place = store.local_path(c) if c is not None else None if writes else left.place
    usual = rates.known(chosen, arithmetic, inputs, (place, m * n * out.itemsize))
    if asked_of:  # to wait for a network takes nothing from the cores
        latency, read = max(asked_of)[0], min(usual.read, BANDWIDTH)
        usual = replace(usual, stream=STREAM, latency=latency, read=read, shared=False)
    made = make_plan(problem, budget, usual)
    made, copies = layouts.rechunk(made) if rechunk else (layouts.advise(made), ())
    options = {
        "shape": [m, n, k],
        "product": "gram" if symmetric else "multiply",
        "op(A)": "adjoint" if adjoint_a else "transpose" if transpose_a else "none",
        "op(B)": "adjoint" if adjoint_b else "transpose" if transpose_b else "none",
        "alpha": provenance.number(alpha),
        "beta": provenance.number(beta),
        "precision": precision,
        "kernel": kernel,
        "out_dtype": out.name,
        "chunks": asked,
        "shards": shards,
        "compressor": compressor,
    }
    before = {} if log is None else {chunk: was for chunk, (_, was) in log.done.items()}
    head = provenance.head(sources, before, options)
    if head and fills:
        head["fills"] = True
    blocks = made.block_count
    if log:
        provenance.refuse_changes(log, head, store.describe(c))
        made = made.without(frozenset(log.done))
    if made.problem.symmetric:
        del sources["b"]
    for source in sources.values():
        source.borrows = source.latency > 0 and made.budget.device is None
    if existing is None:
        made_c = made.problem.c
        size = (made_c.chunk_rows, made_c.chunk_cols)
        output = replace(output, chunks=chunks or size, shards=shards)
    operation = Operation(
        arithmetic,
        transpose_a=left.matrix.transposed,
        conjugate_a=adjoint_a and left.dtype.kind == "c",
        transpose_b=right.matrix.transposed,
        conjugate_b=adjoint_b and right.dtype.kind == "c",
        alpha=alpha,
        beta=beta,
        verify=verify,
        may_wrap=may_wrap,
    )
    dtype = np.result_type(left.dtype, right.dtype)
    return Job(sources, operation, output, copies, made, chosen, dtype, head, options, blocks, force, fills)


def _updatable(c: Matrix, height: int, width: int) -> Matrix:
    """An existing C, refusing what cannot be updated in place chunk by chunk."""
    if c.transposed or (c.chunk_rows, c.chunk_cols) != (height, width):
        raise InputError(
            "beta is not 0 and C is sharded or in Fortran order, which cannot be updated in place; "
            "copy C to a plain array first"
        )
    return c


def _filled(array: Any, s: Matrix) -> Matrix:
    """How an array that is filled is written, given how it would be read: in whole chunks, or shards."""
    rows, cols = array.shape
    height, width = array.shards or array.chunks
    plain = not (array.shards or s.transposed)
    return replace(
        s,
        rows=rows,
        cols=cols,
        chunk_rows=max(1, height),
        chunk_cols=max(1, width),
        transposed=False,
        fortran=False,
        whole=s.whole or not plain,
        held=s.held if plain else store.HELD_BY_ZARR,
        stored=None,
        stacked=False,
        remote=False,
    )


def _output(
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    chunks: tuple[int, int] | None,
    shards: tuple[int, int] | None,
    compressor: str,
) -> layout.Output:
    layout.check_layout(chunks, shards, compressor)
    return layout.Output(shape, dtype, chunks or (1, 1), shards, compressor)
