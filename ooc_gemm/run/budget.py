"""Determines the memory that a plan may use, and the rates that it is made with."""

from dataclasses import replace

from ..engine.ports import Hardware, Limits
from ..planning.machine import Budget, Rates
from ..planning.problem import Problem
from ..storage.io.files import chunks_at_once
from ..storage.io.requests import BANDWIDTH, CONNECTION_BYTES, STREAM, WRITERS, requests
from ..storage.read import addresses
from ..support.memory import baseline_bytes
from . import rates
from .arithmetic import Chosen
from .operands import Inputs
from .settle import Settled


def make_budget(request: Settled, inputs: Inputs, problem: Problem, chosen: Chosen, limits: Limits) -> Budget:
    """Return the limits on memory and on threads for a plan. limits: what the hardware needs and allows."""
    base = limits.host_baseline if limits.workers else baseline_bytes(limits.host_baseline)
    if request.c is None and request.writes:
        base += problem.m * problem.n * problem.c.itemsize
    if request.finish is not None:
        base += request.finish.nbytes
    if request.reduced:
        base += request.reduced.fixed_bytes
    turned = problem.panels_along_k != problem.stored_along_k
    converted = (
        turned or bool(inputs.wanted) or any(x.dtype != chosen.arithmetic.panel for x in (inputs.a, inputs.b))
    )
    sources, puts = inputs.sources.values(), addresses.traits_of(request.c).remote
    asked_of = _asked_of(inputs)
    readers = max([limits.readers, *(requests(*one) for one in asked_of)])
    if all(source.traits.asynchronous for source in sources):
        readers = chunks_at_once(readers)
    return Budget(
        host=request.memory_limit,
        host_baseline=base,
        device=limits.device,
        device_baseline=limits.device_baseline,
        workspace=limits.workspace + (limits.check if request.verify else 0),
        staged=limits.device is not None and (converted or inputs.c is not None),
        readers=readers,
        writers=max(limits.writers, WRITERS if puts else 0),
        connection=CONNECTION_BYTES if asked_of or puts else 0,
        workers=max(1, limits.workers),
        weights=limits.weights,
        linked=limits.linked,
        stacked=all(source.traits.stackable for source in sources),
    )


def known_rates(
    request: Settled, inputs: Inputs, problem: Problem, chosen: Chosen, hardware: Hardware
) -> Rates:
    """Return the rates that a plan is made with: measured ones, and default ones where nothing was
    measured."""
    read = [(source.place, source.matrix.stored_bytes) for source in inputs.sources.values()]
    if request.c is not None:
        place = addresses.local_path(request.c)
    else:
        place = None if request.writes else inputs.a.place
    written = problem.m * problem.n * problem.c.itemsize
    found = rates.known(hardware, chosen.arithmetic, read, (place, written))
    if asked_of := _asked_of(inputs):  # to wait for a network takes nothing from the cores
        latency, bandwidth = max(asked_of)[0], min(found.read, BANDWIDTH)
        found = replace(found, stream=STREAM, latency=latency, read=bandwidth, shared=False)
    return found


def _asked_of(inputs: Inputs) -> list[tuple[float, int]]:
    """Return the latency and the request size in bytes of each source that answers slowly."""
    sources = inputs.sources.values()
    return [(source.traits.latency, source.matrix.chunk_bytes) for source in sources if source.traits.remote]
