"""Determines the memory that a plan may use, and the rates that it is made with."""

import math
from collections.abc import Iterable
from dataclasses import replace

from ..engine.ports import Device, Hardware, Limits
from ..planning.ledger import finished_bytes
from ..planning.machine import Budget, Rates
from ..planning.plan import Plan
from ..planning.problem import Problem
from ..planning.search import least_seconds
from ..storage.io.background import STEP_BYTES, places_bytes
from ..storage.io.files import chunks_at_once, in_background, writes_at_once
from ..storage.io.requests import BANDWIDTH, CONNECTION_BYTES, STREAM, WRITERS, requests
from ..storage.read import addresses
from ..storage.read.source import Opened
from ..storage.write.done import IN_WORKER, bytes_per_chunk
from ..support.intervals import ceil_div
from ..support.memory import baseline_bytes
from . import rates, rates_first
from .arithmetic import Chosen
from .elsewhere import current
from .operands import Inputs
from .request import Request
from .settle import Settled

SMALL = 16
"""Threads without the interpreter have places of their own where these take one in so many bytes of what
there is."""


def make_budget(request: Settled, inputs: Inputs, problem: Problem, chosen: Chosen, limits: Limits) -> Budget:
    """Return the limits on memory and on threads for a plan. limits: what the hardware needs and allows."""
    eighths = 0
    base = limits.host_baseline if limits.workers else baseline_bytes(limits.host_baseline)
    base += _c_held(request, problem)
    if request.finish is not None:
        base += request.finish.nbytes
    if request.reduced:
        eighths = request.reduced.eighths
        base += request.reduced.fixed_bytes + eighths * (request.memory_limit // 8)
    turned = problem.panels_along_k != problem.stored_along_k
    types = inputs.a.dtype, inputs.b.dtype
    converted = turned or bool(inputs.wanted) or types != chosen.arithmetic.panels
    sources, puts = inputs.sources.values(), addresses.traits_of(request.c).remote
    asked_of = _asked_of(sources)
    readers = max([limits.readers, *(requests(*one) for one in asked_of)])
    apart = limits.device is not None
    read_in_background = all(source.traits.asynchronous for source in sources)
    if read_in_background:
        readers = chunks_at_once(readers, apart)
    writers = max(limits.writers, WRITERS if puts else 0)
    folder = None if request.c is None or limits.workers else addresses.local_path(request.c)
    written_in_background = folder is not None and in_background(rates.nearest_folder(folder))
    if written_in_background:
        writers = writes_at_once(writers)
    in_places = apart and (read_in_background or written_in_background)
    there = request.memory_limit - base if in_places else 0
    steps = (step for step in (STEP_BYTES, STEP_BYTES // 2) if there >= SMALL * places_bytes(step))
    if step := next(steps, 0):
        base += places_bytes(step)
    in_memory = request.c is None and request.writes
    notes = not (in_memory or request.reduced)
    return Budget(
        host=request.memory_limit,
        host_baseline=base,
        device=limits.device,
        device_baseline=limits.device_baseline,
        workspace=limits.workspace + (limits.check if request.verify else 0),
        staged=limits.device is not None and (converted or inputs.c is not None),
        readers=readers,
        writers=writers,
        connection=CONNECTION_BYTES if asked_of or puts else 0,
        workers=max(1, limits.workers),
        weights=limits.weights,
        linked=limits.linked,
        lanes=limits.lanes if _may_have_lanes(request, inputs, problem, limits) else 0,
        cores=0 if limits.workers else rates.cores(),  # others may be workers, too
        decodes=limits.decodes,
        eighths=eighths,
        chunk=_chunk_bytes(request, limits.workers) if notes else 0,
        in_memory=read_in_background,
        step=step,
    )


def _may_have_lanes(request: Settled, inputs: Inputs, problem: Problem, limits: Limits) -> bool:
    """Whether threads may multiply pairs of panels alone: where a block is made of panels and nothing else,
    and nobody waits for a store that is far away."""
    more = request.verify or request.reduced or request.standardizer or problem.reads_c
    far = any(source.traits.remote for source in inputs.sources.values())
    return not (more or far or len(limits.weights) > 1)


def _c_held(request: Settled, problem: Problem) -> int:
    """Return the bytes of a C that stays in the memory of this process. Stored chunks are counted as they are
    before they are encoded, and beside those that they replace: the allocator keeps what these give back."""
    if request.c is None:
        return _c_bytes(problem) if request.writes else 0
    if request.reduced or not addresses.in_memory(request.c):
        return 0
    return math.prod(problem.c.grid) * problem.c.chunk_bytes


def _chunk_bytes(request: Settled, workers: int) -> int:
    """Return the bytes that a process holds for each chunk of C. workers: how many a cluster has; 0 where
    this process computes. What the client of a cluster holds counts where all processes share a limit."""
    each, elsewhere = bytes_per_chunk(request.c), current()
    if not workers:
        return each
    return IN_WORKER + (ceil_div(each, workers) if elsewhere and elsewhere.shares else 0)


def check_client(request: Request, plan: Plan) -> None:
    """Raise BudgetError where the client of a cluster, which has a memory limit of its own, may not hold what
    is known of C's chunks."""
    elsewhere = current()
    if elsewhere is None or elsewhere.shares or request.reduced or request.c is None:
        return
    nbytes = finished_bytes(plan.problem.c, bytes_per_chunk(request.c))
    if nbytes:
        elsewhere.beside(request.memory_limit, nbytes)


def known_rates(
    request: Settled, inputs: Inputs, problem: Problem, chosen: Chosen, hardware: Hardware
) -> Rates:
    """Return the rates that a plan is made with: measured ones, and default ones where nothing was
    measured."""
    read = [(source.place, source.matrix.stored_bytes) for source in inputs.sources.values()]
    place = None if request.c is not None or request.writes else inputs.a.place
    c = (place, _c_bytes(problem)) if place else _c_place(request, problem)
    codecs = [source.source.codec for source in inputs.sources.values()]
    return of_stores(rates.known(hardware, chosen.arithmetic, read, c, codecs), inputs.sources.values())


def of_stores(found: Rates, sources: Iterable[Opened]) -> Rates:
    """Return rates with those of the network, where a source answers slowly. Files lie on one file system for
    all workers of a cluster, whose rate counts where the cores do not limit it."""
    if asked_of := _asked_of(sources):  # to wait for a network takes nothing from the cores
        latency, bandwidth = max(asked_of)[0], min(found.read, BANDWIDTH)
        return replace(found, stream=STREAM, latency=latency, read=bandwidth, shared=False)
    return replace(found, one_store=not found.shared)


def with_measured(
    request: Settled, inputs: Inputs, problem: Problem, chosen: Chosen, device: Device, budget: Budget
) -> tuple[Rates, str]:
    """Return the rates that a plan of a run on a device is made with, after those that are missing were
    measured, and a sentence about that; "" where nothing was measured."""
    found = known_rates(request, inputs, problem, chosen, device)
    wanted = rates_first.Wanted(
        device=device,
        arithmetic=chosen.arithmetic,
        inputs=tuple(inputs.sources.values()),
        c=_c_place(request, problem),
        budget=budget,
        read=found.read,
        seconds=least_seconds(problem, budget, found),
    )
    said = rates_first.measure(wanted)
    return (known_rates(request, inputs, problem, chosen, device) if said else found), said


def _c_place(request: Settled, problem: Problem) -> rates.Place:
    """Return the local folder to which C is written, and its size in bytes."""
    place = None if request.c is None else addresses.local_path(request.c)
    return place, _c_bytes(problem)


def _c_bytes(problem: Problem) -> int:
    return problem.m * problem.n * problem.c.itemsize


def _asked_of(sources: Iterable[Opened]) -> list[tuple[float, int]]:
    """Return the latency and the request size in bytes of each source that answers slowly."""
    return [(source.traits.latency, source.matrix.chunk_bytes) for source in sources if source.traits.remote]
