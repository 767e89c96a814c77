"""Opens the operands of a product: A, B, and the old C where β ≠ 0."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..storage.io.requests import side_by_side
from ..storage.read import addresses
from ..storage.read.arrays import tried
from ..storage.read.inputs import open_input
from ..storage.read.source import Opened
from ..storage.read.table import as_table, tabled
from ..storage.write import checks, reopen
from ..support.errors import BudgetError, InputError
from .labels import product_names
from .settle import Settled
from .transforms import Wanted, element_types, real_type, wanted_of


def open_operand(spec: Any, name: str, table: Any = None) -> Opened:
    """Open an input. `name`: how messages call an input that is not stored under a name. table: what becomes
    of its elements (`Operand`)."""
    found = open_input(spec, addresses.role(spec, name))
    return found if table is None else tabled(found, as_table(table))


@dataclass(frozen=True)
class Inputs:
    """The opened A and B with their op(), and C."""

    a: Opened
    b: Opened
    c: Opened | None
    """The old C, which is read where β ≠ 0; otherwise None."""
    there: Any
    """C as an open array, where it exists and keeps its chunks: the unfinished C of an interrupted run, one
    that β·C is read from, or one that was given open."""
    wanted: dict[str, Wanted] = field(default_factory=dict)
    """What happens to the elements of `a` and `b` before they are multiplied."""
    standardized: bool = False
    """Whether elements are standardized in their panels."""
    refused: BudgetError | None = None
    """Why no piece of a lazy array was made to see what that takes; None where there was no such reason. Then
    more memory is counted than it may take."""

    @property
    def types(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Types of the elements of A and of B as they are multiplied."""
        a, b = element_types(self.wanted, (self.a, self.b))
        return (real_type(a), real_type(b)) if self.standardized else (a, b)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The extents (m, n, k) of the product."""
        (m, k), (_, n) = self.a.shape, self.b.shape
        return m, n, k

    @property
    def dimensions(self) -> tuple[str, str] | None:
        """Names of the dimensions of the product: of the rows of op(A) and of the columns of op(B)."""
        return product_names((self.a.dims or (None,))[0], (self.b.dims or (None,))[-1])

    @property
    def sources(self) -> dict[str, Opened]:
        """The opened operands by name: `a`, `b`, and `c` where it is read."""
        found = {"a": self.a, "b": self.b}
        return found if self.c is None else found | {"c": self.c}


def open_inputs(request: Settled, begun: Any, continues: bool) -> Inputs:
    """Open A, B and a C that is read, and check that they fit together and that C may be written.

    request: what is asked for. begun: the unfinished C of the run that is continued, or None. continues:
    whether a run is continued, whose C was checked when it began.

    Raises InputError.
    """
    _check_there(request)
    a, b = _open_both(request, continues)
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise InputError(
            f"the inner dimensions of A and B differ: op({a.name}) is {m}×{k} and "
            f"op({b.name}) is {k_b}×{n}; transpose one of them or choose other arrays"
        )
    a, refused = tried(a, request.memory_limit)
    if request.a.array is request.b.array:
        b = replace(b, matrix=replace(b.matrix, apart=a.matrix.apart))
    else:
        b, also = tried(b, request.memory_limit)
        refused = refused or also
    wanted = wanted_of((request.a, request.b), (a, b))
    a, b = (
        replace(one, undecoded="") if operand.decode_cf else one
        for operand, one in ((request.a, a), (request.b, b))
    )
    if request.beta == 0:
        there = request.c if request.fills and not continues else begun
        return Inputs(a, b, None, there, wanted, request.standardizer is not None, refused)
    if not continues and request.c is not None:
        begun = reopen.open_existing(request.c)
        checks.check_output(request.c, _arrays(request), request.force, reads=True)
    old = None if begun is None else _open_old(request, begun, (m, n))
    return Inputs(a, b, old, begun, wanted, refused=refused)


def _check_there(request: Settled) -> None:
    """Raise InputError where β·C needs a C that does not exist."""
    if request.beta == 0 or not isinstance(request.c, str | os.PathLike):
        return
    place = addresses.local_path(request.c)
    if place is not None and not place.exists():
        name = addresses.describe(request.c)
        raise InputError(f"{name} does not exist, and beta is not 0; make C first or leave beta out")


def _open_both(request: Settled, continues: bool) -> tuple[Opened, Opened]:
    """Open A and B, once where both are the same, and apply op(). An array in Fortran order is its stored
    matrix transposed, so transposing it undoes that. A new C is checked at the same time, because stores that
    are far away answer slowly."""
    first, second = request.a, request.b
    once = first.array is second.array and first.table is second.table
    works: list[Callable[[], Any]] = [partial(open_operand, first.array, "A", table=first.table)]
    if not once:
        works.append(partial(open_operand, second.array, "B", table=second.table))
    if request.c is not None and not continues and request.beta == 0:
        check = partial(checks.check_output, request.c, _arrays(request), request.force, request.fills)
        works.append(check)
    far = any(addresses.traits_of(spec).remote for spec in (*_arrays(request), request.c))
    found = side_by_side(works) if far else [work() for work in works]
    a, b = found[0], found[0 if once else 1]
    return a.transpose() if first.op != "none" else a, b.transpose() if second.op != "none" else b


def _open_old(request: Settled, array: Any, shape: tuple[int, int]) -> Opened:
    """Open the old C, from which β·C is read."""
    old = open_input(array, addresses.describe(request.c))
    if old.shape != shape:
        raise InputError(
            f"{old.name} has shape {old.shape} but the product is {shape[0]}×{shape[1]}; choose another C"
        )
    if request.out_dtype is not None and np.dtype(request.out_dtype) != old.dtype:
        raise InputError(f"{old.name} holds {old.dtype}, not {request.out_dtype}; leave out out_dtype")
    return old


def _arrays(request: Settled) -> list[Any]:
    return [request.a.array, request.b.array]
