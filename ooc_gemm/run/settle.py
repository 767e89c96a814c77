"""Settles what a request leaves open: by the journal of the run that it continues, otherwise by the
defaults."""

from dataclasses import dataclass, fields, replace
from typing import Any

from ..storage.read import addresses
from ..storage.write import provenance, reopen
from ..storage.write.journal import Journal
from ..storage.write.provenance import Finished
from .request import Request

Log = Journal | Finished
"""What is continued: the journal of an interrupted run, or the finished C."""


@dataclass(frozen=True)
class Settled(Request):
    """A request that leaves only the type, chunks and shards of C open."""

    alpha: complex = 1.0
    beta: complex = 0.0
    memory_limit: int = 0
    device_memory_limit: int | None = None
    compressor: str = "none"
    fills: bool = False
    """Whether C is an open array whose values are replaced and nothing else."""


def settle(request: Request, log: Log | None) -> tuple[Settled, Any]:
    """Return the settled request, and the unfinished C of the continued run as an open array; None where no
    run is continued, or nothing of C exists yet. Raises InputError where that C or its journal cannot be
    read."""
    fills = bool(log.head.get("fills")) if log else addresses.is_array(request.c)
    begun, layout = None, dict[str, Any]()
    if log and (log.done or request.beta or fills or provenance.reads_c(log.head)):
        begun = reopen.open_partial(request.c)
        layout = {"chunks": begun.chunks, "shards": begun.shards}
    given = {name: getattr(request, name) for name in provenance.LAYOUT}
    found = provenance.settled(given, log.head if log else None, layout, addresses.describe(request.c))
    values = {field.name: getattr(request, field.name) for field in fields(request)} | found
    settled = Settled(**values, fills=fills)
    if settled.beta != 0:
        settled = replace(settled, fills=False, symmetric=False)
    return settled, begun
