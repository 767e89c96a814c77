"""Report: a plan as a table for its reader, and as JSON types."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from .problem import MiB, Problem

if TYPE_CHECKING:
    from .plan import Plan

Row = tuple[str, str]
"""A title and what stands beside it."""

WIDTH = 100
"""Columns of the table."""


def table(plan: Plan) -> str:
    """What is done, what it moves and who holds the memory."""
    rows = [*_work_rows(plan), *_traffic_rows(plan), *_time_rows(plan), *_memory_rows(plan)]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{_wrapped(value, width)}" for name, value in rows)


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON types."""
    keys = [
        *("bm", "bn", "bk", "panel_buffers", "c_buffers", "readers", "writers", "slots", "slot_bytes"),
        *("cache_slots", "by_columns"),
        *("bytes_read", "bytes_written", "bytes_uploaded", "bytes_downloaded", "lower_bound_bytes"),
        *("ledger", "device_ledger", "stage_seconds", "predicted_seconds", "advice"),
    ]
    p, budget = plan.problem, plan.budget
    return {key: getattr(plan, key) for key in keys} | {
        "kernel": p.kernel,
        "symmetric": p.symmetric,
        "out_dtype": p.types[2],
        "rates": plan.used_rates.note,
        "resident": plan.k_panels.resident,
        "blocks": plan.block_count,
        "panels": plan.panel_count,
        "chunks": [p.c.chunk_rows, p.c.chunk_cols],
        "host_bytes": plan.host_bytes,
        "device_bytes": plan.device_bytes,
        "memory_limit": budget.host,
        "device_memory_limit": budget.device,
    }


def _work_rows(plan: Plan) -> list[Row]:
    """The product and how it is cut."""
    p, c, panels = plan.problem, plan.problem.c, plan.k_panels
    mirrored = ", symmetric: one half is computed" if p.symmetric else ""
    blocks = f"{plan.block_count} of {plan.bm}×{plan.bn}, each in {plan.panel_count} "
    blocks += f"{'panel' if plan.panel_count == 1 else 'panels'} of "
    blocks += f"{'up to ' if panels.growth > 1 else ''}{plan.bk}"
    blocks += "; those of A stay on the device" if panels.resident else ""
    rows = [("product", f"{p.m}×{p.k} · {p.k}×{p.n}{mirrored}")]
    rows += [("type of C", _type_words(p))] if p.types[2] else []
    rows += [("kernel", p.kernel)] if p.kernel else []
    rows += [("blocks of C", blocks)]
    workers = plan.budget.workers
    rows += [("workers", f"{workers}, each with this much memory")] if workers > 1 else []
    rows += [("chunks of C", f"{c.chunk_rows}×{c.chunk_cols}, {_mib(c.chunk_bytes)}")]
    return rows


def _traffic_rows(plan: Plan) -> list[Row]:
    """What is read and written, beside the least that must be."""
    p, bound = plan.problem, plan.lower_bound_bytes
    inputs = p.a.stored_bytes + (0 if p.symmetric else p.b.stored_bytes)
    hold = "input holds" if p.symmetric else "inputs hold"
    times = (plan.bytes_read + plan.bytes_written) / max(1, bound)
    size, order = _mib(plan.cache_slots * plan.slot_bytes), "columns" if plan.by_columns else "rows"
    cache = f"{size} of host memory keeps what is used again soonest; blocks go by {order}"
    rows = [("read", f"{_mib(plan.bytes_read)} (the {hold} {_mib(inputs)})")]
    rows += [("cache", cache)] if plan.cache_slots else []
    rows += [("written", _mib(plan.bytes_written))]
    rows += [("lower bound", f"{_mib(bound)}; this plan moves {times:.2f} times that")]
    return rows


def _time_rows(plan: Plan) -> list[Row]:
    """How long it takes, by which rates, and what would take less."""
    slowest = max(plan.stage_seconds, key=lambda stage: plan.stage_seconds[stage], default="")
    rows = [("predicted", f"{plan.predicted_seconds:.2f} s, most of it {slowest}")]
    rows += [("rates", plan.used_rates.note)] if plan.used_rates.note else []
    rows += [("layout", plan.advice)] if plan.advice else []
    return rows


def _memory_rows(plan: Plan) -> list[Row]:
    """Who holds how much of each limit."""
    rows = []
    for title, ledger, limit in (
        ("host memory", plan.ledger, plan.budget.host),
        ("device memory", plan.device_ledger, plan.budget.device),
    ):
        if limit is not None:
            rows.append((title, f"{_mib(sum(ledger.values()))} of {_mib(limit)}"))
            rows += [(f"  {name}", _mib(size)) for name, size in ledger.items() if size]
    return rows


def _type_words(p: Problem) -> str:
    """C's type, where it comes from, and what becomes of a result that it cannot hold."""
    a, b, c = p.types
    if "int" in c:
        beyond = "sums are exact, and one that does not fit is an error"
    elif c == "float16":
        beyond = "sums are kept in float32, and one past 65504 becomes infinite"
    else:
        beyond = ""
    return "; ".join(filter(None, [f"{c}, of {a} · {b}", beyond]))


def _mib(nbytes: int) -> str:
    return f"{nbytes / MiB:,.1f} MiB" if nbytes >= MiB or not nbytes else f"{nbytes / 1024:,.1f} KiB"


def _wrapped(text: str, indent: int) -> str:
    return f"\n{'':{indent}}".join(textwrap.wrap(text, WIDTH - indent))
