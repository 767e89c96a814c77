"""Decides how C is stored: its shape, type, chunks and codecs, and what writing it takes."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..planning.problem import Matrix
from ..planning.traits import LOCAL
from ..storage.format import bounded, limits
from ..storage.read import addresses
from ..storage.read.inputs import open_input
from ..storage.write import layout as stored
from ..support.errors import InputError
from .operands import Inputs
from .request import Reduced
from .settle import Settled

REDUCED_COLUMNS = 2048
"""Columns that are downloaded at a time of a C that is reduced on the host."""


@dataclass(frozen=True)
class Layout:
    """How C will be stored, and how the planner sees it."""

    output: stored.Output
    matrix: Matrix
    """C as the planner sees it."""
    free_chunks: bool
    """Whether the planner chooses the chunks."""


def lay_out(request: Settled, inputs: Inputs, dtype: np.dtype[Any]) -> Layout:
    """Return how a C of this type is stored. Raises InputError where it cannot be stored so."""
    m, n, _ = inputs.shape
    if request.reduced:
        return _reduced(request.reduced, (m, n), dtype)
    if m * n * dtype.itemsize > limits.MAX_ARRAY_BYTES:
        raise InputError(
            f"op({inputs.a.name})·op({inputs.b.name}) is {m}×{n}, more than can be stored; "
            "transpose one or both"
        )
    unit, chunks, there = request.shards or request.chunks, request.chunks, inputs.there
    if there is not None:
        height, width = there.shards or there.chunks
        unit, chunks = (height, width), (there.chunks[0], there.chunks[1])
    stored.check_layout(chunks, request.shards, request.compressor)
    output = stored.Output(
        (m, n),
        dtype,
        chunks or (1, 1),
        request.shards,
        request.compressor,
        request.dimensions or inputs.dimensions,
    )
    height, width = unit or (1, 1)
    chunked = request.c is not None or not request.writes  # a plan is that of a C that is stored
    matrix = Matrix(
        m, n, dtype.itemsize, height, width,
        whole=output.encoded, encodes=output.work, chunked=chunked,
    )  # fmt: skip
    if inputs.c is not None:
        matrix = _updatable(inputs.c.matrix, height, width)
    elif request.fills and there is not None:
        matrix = _filled(there, open_input(there, addresses.describe(request.c)).matrix)
    return Layout(output, matrix, unit is None)


def _reduced(reduced: Reduced, shape: tuple[int, int], dtype: np.dtype[Any]) -> Layout:
    """The layout of a C that is not stored: what is downloaded of it at a time, where a device downloads."""
    rows, cols = max(1, min(reduced.chunk_rows, shape[0])), max(1, min(REDUCED_COLUMNS, shape[1]))
    output = stored.Output(shape, dtype, (rows, cols), None, "none")
    return Layout(output, Matrix(*shape, 0, rows, cols), False)


def chosen_layout(layout: Layout, request: Settled, inputs: Inputs, planned: Matrix) -> stored.Output:
    """Return the layout of C with the chunks that the planner has chosen, where they were left to it."""
    if inputs.c is not None:
        return layout.output
    chunks = (planned.chunk_rows, planned.chunk_cols) if layout.free_chunks else layout.output.chunks
    return replace(layout.output, chunks=chunks, shards=request.shards)


def _updatable(c: Matrix, height: int, width: int) -> Matrix:
    """Return the layout of an existing C. Raises InputError where it cannot be updated in place chunk by
    chunk."""
    if c.transposed or (c.chunk_rows, c.chunk_cols) != (height, width):
        raise InputError(
            "beta is not 0 and C is sharded or in Fortran order, which cannot be updated in place; "
            "copy C to a plain array first"
        )
    return c


def _filled(array: Any, s: Matrix) -> Matrix:
    """Return how an open array is filled, from how it would be read: in whole chunks, or shards."""
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
        held=s.held if plain else bounded.HELD_BY_ZARR,
        stored=None,
        traits=LOCAL,
    )
