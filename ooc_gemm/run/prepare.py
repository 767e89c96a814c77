"""Decides everything about a product before anything is written.

open A, B and C → type and layout of C → arithmetic → memory → plan → what C is made of
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from ..engine.ports import Limits, Operation
from ..engine.reduction import record_bytes, score_type
from ..planning import layouts
from ..planning.chunk_set import ChunkSet
from ..planning.ledger import decoders, parts_of
from ..planning.machine import Budget, Rates
from ..planning.plan import Plan
from ..planning.problem import Matrix, Problem
from ..planning.search import make_plan
from ..storage.read import addresses
from ..storage.read.source import Opened, Source
from ..storage.write import checks, marks, provenance
from ..storage.write.journal import Journal
from ..storage.write.layout import Output
from ..support.errors import BudgetError, InputError, Refusals
from . import cold_start
from .arithmetic import Chosen, choose_arithmetic, choose_dtype
from .budget import check_client, known_rates, make_budget, with_measured
from .elsewhere import current
from .executor import Executor, Local, open_local
from .layout import Layout, chosen_layout, lay_out
from .observer import Observer
from .operands import Inputs, open_inputs
from .request import Request
from .settle import Log, Settled, settle
from .transforms import Wanted, ledger_bytes, spelled

T = TypeVar("T")
MOST_REMEMBERED = 1 << 16
"""Most chunks of operands whose plan is remembered."""
MOST_COLUMNS = 2**31 - 1
"""Most columns of C that a device counts in what it has found."""


@dataclass(frozen=True)
class Job:
    """A product about which everything is decided."""

    request: Settled
    log: Log | None
    """The journal of the run that is continued, or the finished C; None for a new run."""
    sources: dict[str, Opened]
    """The operands that are read: `a`, `b` unless it is the same as A, and `c` where β ≠ 0."""
    operation: Operation
    output: Output
    copies: tuple[layouts.Copy, ...]
    """Copies of operands in better chunks, which are made first."""
    plan: Plan
    """The plan of what is left to do, after the copies."""
    executor: Executor
    dtype: np.dtype[Any]
    """The common type of A and B by NumPy's promotion."""
    head: dict[str, Any] | None
    """The first line of the journal, which says what C is made of; None where changes of the inputs could not
    be noticed."""
    options: dict[str, Any]
    """Options that determine C, for its attributes."""
    blocks: int
    """Number of blocks of the whole C; the plan may have fewer."""
    wanted: dict[str, Wanted]
    """What happens to the elements of `a` and `b` before they are multiplied: for `Operation.transforms`,
    once passes over the arrays have found means and deviations."""

    @property
    def works(self) -> bool:
        """Whether anything is left to compute."""
        return bool(self.plan.block_count and self.plan.problem.m and self.plan.problem.n)


def prepare(
    request: Request,
    log: Log | None = None,
    executor: Executor | None = None,
    observer: Observer | None = None,
) -> Job:
    """Decide everything about a product; writes nothing that stays.

    request: what is asked for, checked. log: the run that it continues, or None. executor: what carries out
    the plan; None for what computes elsewhere, or the request's device in this process. observer: what is
    told of rates that had to be measured; without one they are not measured. Raises InputError and
    BudgetError.
    """
    settled, begun = settle(request, log)
    inputs = open_inputs(settled, begun, log is not None)
    dtype = choose_dtype(settled, inputs)
    if settled.fills and log is None:
        given = {name: getattr(request, name) for name in ("chunks", "shards", "compressor")}
        checks.check_filled(settled.c, inputs.shape[:2], dtype, given, settled.force)
    layout = lay_out(settled, inputs, dtype)
    note = observer.note if observer else lambda said: None
    if executor is None:
        elsewhere = current()
        executor = (
            elsewhere.executor(settled)
            if elsewhere
            else open_local(settled.device, settled.memory_limit, note)
        )
    planner = _Planner(settled, inputs, layout, dtype, executor, observer)
    chosen, refusals = choose_arithmetic(settled, inputs, dtype, executor.hardware), Refusals()
    with refusals.noted():
        planned = planner.plan(chosen)
    for one in inputs.wanted.values():
        one.check_memory(settled.memory_limit, refusals)
    refusals.end(inputs.refused)
    plan = planned.plan
    check_client(request, plan)
    plan, copies = layouts.rechunk(plan) if settled.rechunk else (_advised(plan), ())
    if _is_gram(settled, inputs) and plan.predicted_seconds > layouts.ADVISED_SECONDS and not plan.advice:
        plan = replace(plan, advice="A and B are the same array, so C is symmetric: gram computes half of it")
    if observer:
        observer.note_of_unused_limit(settled.device_memory_limit, plan.budget.device)
    if settled.triangle:
        plan = plan.without(_above(plan))
    options = _options(settled, inputs, dtype)
    head, left = _provenance(settled, inputs, plan, log, options)
    if isinstance(executor, Local):
        left = cold_start.counted(left, executor.device)
    return Job(
        request=settled,
        log=log,
        sources=_read(inputs, left),
        operation=_operation(
            settled, inputs, planned.chosen, planned.narrowed if left.problem.narrowed else None
        ),
        output=chosen_layout(layout, settled, inputs, left.problem.c),
        copies=copies,
        plan=left,
        executor=executor,
        dtype=np.result_type(*inputs.types),
        head=head,
        options=options,
        blocks=plan.block_count,
        wanted=inputs.wanted,
    )


def _may_begin_again(request: Settled) -> bool:
    """Whether a run can go on in another way if a panel is needed as it was before it was prepared: not where
    β or a reduction has had some blocks. Checks need all panels so."""
    again = request.prepares_again or request.verify
    return not (again or request.beta or request.reduced)


def _is_gram(request: Settled, inputs: Inputs) -> bool:
    """Whether `gram` would compute the same with half of the products."""
    a, b = request.a, request.b
    if request.symmetric or request.reduced or request.finish or inputs.wanted or request.beta != 0:
        return False
    if a.adjoint or b.adjoint or a.transpose == b.transpose:
        return False
    return _is_one_array(request)


def _is_one_array(request: Settled) -> bool:
    """Whether A and B are the same array."""
    a, b = request.a.array, request.b.array
    return a is b or addresses.same_place(a, b)


@dataclass(frozen=True)
class _Planned:
    """A plan, and what it was made for."""

    chosen: Chosen
    narrowed: np.dtype[Any] | None
    plan: Plan


@dataclass(frozen=True)
class _Planner:
    """Makes plans of a product, for one arithmetic or another."""

    request: Settled
    inputs: Inputs
    layout: Layout
    dtype: np.dtype[Any]
    executor: Executor
    observer: Observer | None

    def plan(self, chosen: Chosen) -> _Planned:
        """Plan with the arithmetic that was chosen, or with the other one where memory is too small for the
        panels that it needs. Raises BudgetError."""
        other = chosen.arithmetic.other
        if other is None:
            return self._plan(chosen)
        try:
            found = self._plan(chosen)
        except BudgetError:
            found = None
        if found and chosen.arithmetic.pays(found.plan.bm, found.plan.bn, found.plan.bk):
            return found
        return self._plan(replace(chosen, arithmetic=other))

    def _plan(self, chosen: Chosen) -> _Planned:
        settled, inputs, hardware = self.request, self.inputs, self.executor.hardware
        local = isinstance(self.executor, Local)
        if not (local and _may_begin_again(settled)):
            chosen = replace(chosen, arithmetic=replace(chosen.arithmetic, once=False))
        limits = hardware.limits(chosen.arithmetic, settled.device_memory_limit)
        narrowed = _narrowed(settled, chosen, self.dtype, limits)
        problem = _problem(settled, inputs, self.layout, chosen, narrowed)
        problem = _standardized(_reduced(problem, settled, chosen, limits), settled, limits)
        tables = settled.a.table is not None or settled.b.table is not None
        if (inputs.wanted or tables) and not limits.transforms:
            raise InputError(
                f"{hardware.name} does not centre, scale, weight or look up what it multiplies; "
                "give the name of another device"
            )
        budget = make_budget(settled, inputs, problem, chosen, limits)
        # The host decodes what other processes read, and what it looks at.
        here = local and not (settled.host_decodes or chosen.may_wrap)
        if self.observer and isinstance(self.executor, Local):
            rates, said = with_measured(settled, inputs, problem, chosen, self.executor.device, budget)
            if said:
                self.observer.note(said)
        else:
            rates = known_rates(settled, inputs, problem, chosen, hardware)
        sent = _sent(problem, inputs, budget, rates) if here and limits.decodes else None
        return _Planned(chosen, narrowed, _fastest(problem, sent, budget, rates))


def _fastest(problem: Problem, sent: Problem | None, budget: Budget, rates: Rates) -> Plan:
    """Return the plan for a problem, or for the one of which the device decodes chunks (`_sent`). Memory for
    that may be what it lacks to read everything once, so that plan is then compared with the other one."""
    found = None
    if sent:
        with suppress(BudgetError):
            found = _once(make_plan, sent, budget, rates)
    read = [problem.a] + [problem.b] * (not problem.symmetric) + [problem.c] * problem.reads_c
    if found and found.bytes_read <= sum(s.read_bytes(s.rows, s.cols) for s in read):
        return found
    other: Plan = _once(make_plan, problem, budget, rates)
    return found if found and found.predicted_seconds <= other.predicted_seconds else other


def _sent(problem: Problem, inputs: Inputs, budget: Budget, rates: Rates) -> Problem | None:
    """Return the problem with operands whose chunks the device decodes, because that takes less time,
    although multiplications take as much longer; None where there are none."""
    a, b = _as_sent(problem.a, inputs.a.source), _as_sent(problem.b, inputs.b.source)
    found = replace(problem, a=a, b=b)
    sent = found.encoded
    parts = max((math.prod(s.grid) * parts_of(s) for s in sent), default=0)
    unpack = min(parts, decoders(found, budget).parts) * rates.unpack
    if not unpack:
        return None
    nbytes = sum(math.prod(s.grid) * s.chunk_bytes for s in sent)
    multiplying = problem.flops / rates.flops
    faster = multiplying + nbytes / unpack < max(multiplying, nbytes / rates.decode)
    return found if faster else None


def _as_sent(s: Matrix, source: Source) -> Matrix:
    """Return an operand as it is if a device decodes its chunks, where it can."""
    if not source.sends:
        return s
    sent = source.sending().matrix
    return replace(s, encoded=sent.encoded, traits=replace(s.traits, stackable=sent.traits.stackable))


def _advised(plan: Plan) -> Plan:
    """Return the plan, with advice where other chunks would make it several times as fast."""
    found = _once(layouts.advice, *layouts.Planned.by(plan))
    return replace(plan, advice=found) if found else plan


def _once(make: Callable[..., T], problem: Problem, *given: Any) -> T:
    """Return what `make` makes of a problem, budgets, rates and so on, from memory if it was made before: who
    makes one product after another waits for one search."""
    chunks = sum(len(one.stored or ()) for one in (problem.a, problem.b, problem.c))
    if chunks > MOST_REMEMBERED:
        return make(problem, *given)
    found: T = _remembered(make, problem, *given)
    return found


@lru_cache(maxsize=32)
def _remembered(make: Callable[..., Any], *given: Any) -> Any:
    return make(*given)


def _read(inputs: Inputs, plan: Plan) -> dict[str, Opened]:
    """Return the operands that are read: B only where it is not A. Where no device copies pieces out of the
    slots, pieces may stay in memory of a store's client."""
    sources = inputs.sources
    if plan.budget.device is None:
        sources = {name: source.lending() for name, source in sources.items()}
    encoded = {"a": plan.problem.a.encoded, "b": plan.problem.b.encoded}
    sources = {name: one.sending() if encoded.get(name) else one for name, one in sources.items()}
    return {name: sources[name] for name in sources if name != "b" or not plan.problem.symmetric}


def _narrowed(request: Settled, chosen: Chosen, out: np.dtype[Any], limits: Limits) -> np.dtype[Any] | None:
    """Return the type of C where the device converts blocks to it before they are downloaded. A type wider
    than that of the sums would take longer to download; what is finished or reduced on the host is made of
    sums; and where several devices mirror blocks, they count some elements of chunks that they share
    twice."""
    sums = chosen.arithmetic.block
    shared = request.symmetric and len(limits.weights) > 1
    if not limits.narrows or request.finish or request.reduced or shared or out == sums:
        return None
    return out if out.itemsize <= sums.itemsize else None


def _problem(
    request: Settled, inputs: Inputs, layout: Layout, chosen: Chosen, narrowed: np.dtype[Any] | None
) -> Problem:
    """Describe the product by numbers, for the planner."""
    arithmetic, (m, n, k) = chosen.arithmetic, inputs.shape
    return Problem(
        m,
        n,
        k,
        inputs.a.matrix,
        inputs.b.matrix,
        layout.matrix,
        panel_itemsize=arithmetic.panel.itemsize,
        block_itemsize=arithmetic.block.itemsize,
        narrowed=narrowed.itemsize if narrowed else 0,
        reads_c=inputs.c is not None,
        free_chunks=layout.free_chunks,
        pitch=arithmetic.pitch,
        along_k=arithmetic.along_k,
        turns=arithmetic.turns,
        line_bytes=arithmetic.line_bytes,
        scratch=arithmetic.scratch,
        once=arithmetic.once,
        block_scratch=arithmetic.product_bytes if request.alpha.imag or request.beta.imag else 0,
        check_itemsize=arithmetic.check_type.itemsize if request.verify else 0,
        kernel=f"{arithmetic.kernel}: {arithmetic.why}",
        same=_is_one_array(request),
        read_alike=_is_one_array(request) and request.a.table is request.b.table,
        symmetric=request.symmetric,
        types=(inputs.a.dtype.name, inputs.b.dtype.name, layout.output.dtype.name),
        transforms=ledger_bytes(
            inputs.wanted, arithmetic.panel, request.reduced.lines if request.reduced else 0
        ),
        row_bytes=request.reduced.row_bytes if request.reduced else 0,
        whole=request.standardizer is not None,
        keeps_a=arithmetic.keeps_a,
        least=arithmetic.least,
    )


def _reduced(problem: Problem, request: Settled, chosen: Chosen, limits: Limits) -> Problem:
    """Return the problem with what a device with memory of its own keeps of C, if it finds what a reduction
    keeps. That of some rows must fit where a part of these rows would."""
    if request.reduced:
        problem = replace(problem, kept_bytes=request.reduced.device_bytes)
    keep = request.reduced.keep if request.reduced else None
    if keep is None or keep > limits.most_kept or problem.n > MOST_COLUMNS:
        return problem
    dtype = score_type(chosen.arithmetic.block)
    found = record_bytes(keep, dtype)
    if found > problem.c.chunk_cols * problem.part_itemsize:
        return problem
    return replace(problem, found_bytes=found, score_bytes=dtype.itemsize)


def _standardized(problem: Problem, request: Settled, limits: Limits) -> Problem:
    """Return the problem with what a device with memory of its own keeps to standardize panels: those of
    op(A), or of op(B) on several devices."""
    if request.standardizer is None or limits.device is None:
        return problem
    rule, (a, b) = request.standardizer.rule, problem.scratch
    several = len(limits.weights) > 1
    return replace(
        problem,
        kept_bytes=rule.device_bytes(problem.m, problem.k),
        scratch=(a, b + rule.panel_bytes) if several else (a + rule.panel_bytes, b),
        line_bytes=problem.line_bytes + rule.line_bytes,
    )


def _operation(request: Settled, inputs: Inputs, chosen: Chosen, narrowed: np.dtype[Any] | None) -> Operation:
    """Describe what the device computes."""
    return Operation(
        chosen.arithmetic,
        transpose_a=inputs.a.matrix.transposed,
        conjugate_a=request.a.adjoint and inputs.a.dtype.kind == "c",
        transpose_b=inputs.b.matrix.transposed,
        conjugate_b=request.b.adjoint and inputs.b.dtype.kind == "c",
        alpha=request.alpha,
        beta=request.beta,
        verify=request.verify,
        may_wrap=chosen.may_wrap,
        narrowed=narrowed,
        standardizer=request.standardizer,
    )


def _options(request: Settled, inputs: Inputs, dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return the options that determine C, as JSON types."""
    return {
        "shape": list(inputs.shape),
        "product": request.finish.name if request.finish else "gram" if request.symmetric else "multiply",
        "op(A)": request.a.op,
        "op(B)": request.b.op,
        **spelled(request, inputs.wanted),
        "alpha": provenance.number(request.alpha),
        "beta": provenance.number(request.beta),
        "precision": request.precision,
        "kernel": request.kernel,
        "out_dtype": dtype.name,
        "chunks": request.chunks,
        "shards": request.shards,
        "compressor": request.compressor,
    }


def _above(plan: Plan) -> ChunkSet:
    """The chunks of C that lie above its diagonal."""
    c = plan.problem.c
    down, across = c.grid
    above = ((i, j) for i in range(down) for j in range(across) if (i + 1) * c.chunk_rows <= j * c.chunk_cols)
    return ChunkSet(c.grid, above)


def _provenance(
    request: Settled, inputs: Inputs, plan: Plan, log: Log | None, options: dict[str, Any]
) -> tuple[dict[str, Any] | None, Plan]:
    """Return the head of the journal, and the plan of what is left to do. Raises InputError where the run
    that is continued was another one."""
    if isinstance(log, Journal) and inputs.c is not None:
        marks.find_done(inputs.c.name, inputs.there, log, inputs.c.matrix.grid)
    before = ((chunk, was) for chunk, (_, was) in (log.done if log else {}).items())
    head = provenance.head(inputs.sources, before, options)
    if head and request.fills:
        head["fills"] = True
    if log:
        provenance.refuse_changes(log, head, addresses.describe(request.c))
        if isinstance(log, Journal):
            log.arrange(plan.problem.c.grid)
        plan = plan.without(ChunkSet(plan.problem.c.grid, chain(plan.done, log.done)))
    return head, plan
