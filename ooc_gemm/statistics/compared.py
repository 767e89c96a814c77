"""What `topk` and `threshold` share: the two arrays whose rows are compared, the request of their product,
and whether an output is finished already."""

import os
from dataclasses import replace
from typing import Any

import numpy as np

from ..engine.ports import Device, Hardware
from ..run.elsewhere import limit_of
from ..run.operands import open_operand
from ..run.prepare import Job
from ..run.request import Operand, Reduced, Request
from ..storage.write import rows as stored
from ..support.errors import InputError
from ..support.intervals import ceil_div

CHUNK_ROWS = 1024
"""Rows of the result that are written at a time, where there are as many."""
TILE_BYTES = 8 << 20
"""Memory in which a thread compares the elements of a tile."""


class Compared:
    """Two arrays whose rows are compared."""

    def __init__(self, what: str, left: Any, right: Any, include_self: bool):
        """what: the name of the statistic. left: A. right: B; None where it is A. include_self: then a row is
        compared with itself, too. Raises InputError."""
        if isinstance(left, Operand) or isinstance(right, Operand):
            raise InputError(f"{what} transforms no inputs; give arrays instead of an Operand")
        self.same = right is None or right is left
        self.left, self.right = left, left if self.same else right
        self.others = right is None and not include_self
        self.a = open_operand(left, "A")
        self.b = self.a if self.same else open_operand(right, "B")
        (self.m, self.depth), (self.n, depth) = self.a.shape, self.b.shape
        if depth != self.depth:
            raise InputError(
                f"rows of {self.a.name} have {self.depth} elements and rows of {self.b.name} {depth}; "
                "give arrays whose rows are as long"
            )
        for opened in (self.a, self.b):
            if opened.dtype.kind == "c":
                raise InputError(f"{opened.name} holds complex numbers, which have no order; give real ones")
        self.chunk_rows = max(1, min(CHUNK_ROWS, self.m))
        self.cores: int | None = None
        """Cores of each process that reads rows of candidates; None: those of this process."""

    @property
    def lines(self) -> int:
        """How many rows hold float64: these are multiplied by powers of two where that is needed."""
        return sum(one.shape[0] for one in (self.a, self.b) if one.dtype == np.float64)

    @property
    def options(self) -> dict[str, Any]:
        """What makes the result what it is, beside the inputs and options of the product."""
        return {"neighbours": "others" if self.others else "all"}

    def reduced(self, in_memory: bool) -> Reduced:
        """What the plan has to count beside the product and the tiles that threads compare. in_memory: the
        result stays in memory."""
        raise NotImplementedError

    def request(
        self,
        hardware: Hardware,
        device: str | Device,
        memory_limit: str | int | None,
        device_memory_limit: str | int | None,
        place: stored.GroupPlace | None,
        writes: bool = True,
    ) -> Request:
        """The product of the rows. hardware: what computes it. place: where the result goes; None for NumPy
        arrays. writes: it is computed, and not only planned."""
        reduced = self.reduced(place is None and writes)
        threads = max(getattr(hardware, "threads", 1), len(os.sched_getaffinity(0)))
        each = TILE_BYTES + (place.connection if place else 0)
        return Request(
            Operand(self.left),
            Operand(self.right, transpose=True),
            memory_limit=limit_of(memory_limit),
            device=device,
            device_memory_limit=device_memory_limit,
            reduced=replace(reduced, fixed_bytes=reduced.fixed_bytes + threads * each),
            writes=writes,
        )

    def head(self, job: Job) -> dict[str, Any] | None:
        """What identifies the run; None where nobody could tell whether its inputs are the same again."""
        return job.head and {**job.head, "options": {**job.head["options"], **self.options}}

    def finished(self, place: stored.GroupPlace, head: dict[str, Any] | None, resume: bool) -> bool:
        """Whether a run that continues finds its result at a place already. Raises InputError where it cannot
        continue."""
        if resume and head is None:
            raise InputError("the inputs cannot be known again by a later run; leave out resume=True")
        return resume and not place.is_begun() and stored.is_result(place, head or {})

    @property
    def all_chunks(self) -> set[int]:
        """The numbers of all chunks of rows."""
        return set(range(ceil_div(self.m, self.chunk_rows)))

    def rows_of(self, chunks: set[int]) -> int:
        """How many rows some chunks of rows have."""
        return sum(min(self.chunk_rows, self.m - i * self.chunk_rows) for i in chunks)


def try_output(place: stored.GroupPlace | None, resume: bool) -> None:
    """Refuse a place where nothing can be written, before the work, unless a result is finished there. place:
    None for a result in memory. Raises InputError."""
    if place and not (resume and place.record() is not None):
        place.try_out()
