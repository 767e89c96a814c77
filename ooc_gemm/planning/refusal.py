"""What is said where no plan fits: which limit is too small, and the smallest that would do."""

from collections.abc import Iterator
from itertools import product

from ..support.errors import BudgetError
from ..support.intervals import ceil_div
from .candidates import Candidate, depths, outputs, rings, sides
from .ledger import MOST_EXTENT, ledgers
from .machine import Budget
from .panels import Panels
from .problem import MiB, Problem

VARIES = 16
"""What pieces of lazy arrays take in a trial is this part of it more at most than in the trial before."""


def refusal(p: Problem, budget: Budget) -> BudgetError:
    """Return the error that says which limit is too small, and names the smallest that would do."""
    rows, cols = min(p.m, p.c.chunk_rows), min(p.n, p.c.chunk_cols)
    if budget.device is not None and not p.free_chunks and max(rows, cols) > MOST_EXTENT:
        return BudgetError(
            f"chunks of C of {rows}×{cols} are longer than the {MOST_EXTENT} rows or columns that a GPU "
            "multiplies at a time; give smaller chunks=(M, N), or use device='cpu'"
        )
    needs = list(_needs(p, budget))
    if budget.device is not None and min(device for _, device in needs) > budget.device:
        least = min(device for _, device in needs)
        return BudgetError(
            f"a device memory limit of {budget.device} bytes is too small for this product; "
            f"the smallest that would do is {least} bytes ({ceil_div(least, MiB)}MiB)",
            minimum_device_memory_limit=least,
        )
    whole = [(s.chunk_bytes, name) for name, s in (("A", p.a), ("B", p.b)) if s.whole]
    size, name = max(whole, default=(0, ""))
    why = (
        f" (a chunk of {name} takes {size} bytes and must be decoded whole)"
        if size > budget.host // 4
        else ""
    )
    down, across = p.c.grid
    if not p.free_chunks and down * across * budget.chunk > budget.host // 4:
        why = (
            f" (C has {down * across} chunks, for each of which a run holds {budget.chunk} bytes; "
            "give larger chunks=(M, N))"
        )
    least = min(host for host, device in needs if budget.device is None or device <= budget.device)
    least = budget.enough(least + max(p.a.apart, p.b.apart) // VARIES)
    return BudgetError(
        f"a memory limit of {budget.host} bytes is too small for this product{why}; "
        f"the smallest that would do is {least} bytes ({ceil_div(least, MiB)}MiB)",
        minimum_memory_limit=least,
    )


def _needs(p: Problem, budget: Budget) -> Iterator[tuple[int, int]]:
    """Return the bytes of the host and of the device that the smallest candidates take. Ledgers grow with
    every size, so the smallest block decides."""
    k_chunk = p.k_chunk
    for c in outputs(p):
        bm, bn = map(min, sides(p, (c.chunk_rows, c.chunk_cols)))
        for bk, ring in product(depths(p, budget), rings(budget)):
            smallest = Candidate(c, bm, bn, Panels(p.k, bk, k_chunk), 1, ring)
            host, device = ledgers(p, budget, smallest)
            yield sum(host.values()), sum(device.values())
