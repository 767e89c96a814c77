"""Shows a plan as a table for people."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from ..support.intervals import ceil_div
from .machine import Budget
from .problem import MiB, Problem

Numbers = Mapping[str, Any]
"""A plan as JSON types: what `Plan.to_dict` returns."""
Row = tuple[str, str]
"""A title, and the text that stands beside it."""

WIDTH = 80
"""Columns that the table may take: those of a terminal that nobody has widened."""

HARD_SPACE = "\N{NO-BREAK SPACE}"
"""A space at which no line is broken."""


def rows(found: Numbers, problem: Problem, budget: Budget, grows: bool) -> list[Row]:
    """Return rows that say what a plan computes, what it moves, how long that takes, and who holds the
    memory.

    found: the plan as JSON types. problem, budget: what it was made for. grows: whether its panels grow along
    k.
    """
    return [
        *_work_rows(found, problem, budget, grows),
        *_traffic_rows(found, problem),
        *time_rows(found),
        *memory_rows(found),
    ]


def table(found: Numbers, problem: Problem, budget: Budget, grows: bool) -> str:
    """Return the rows as lines of text. The arguments are those of `rows`."""
    return lines(rows(found, problem, budget, grows))


def lines(every: Iterable[Row]) -> str:
    """Return rows as lines of text, all titles in one column."""
    every = list(every)
    width = max(len(name) for name, _ in every) + 2
    return "\n".join(f"{name:<{width}}{_wrapped(value, width)}" for name, value in every)


def _work_rows(found: Numbers, p: Problem, budget: Budget, grows: bool) -> list[Row]:
    """Return rows that name the product and the blocks in which it is computed."""
    c = p.c
    mirrored = ", symmetric: one half is computed" if p.symmetric else ""
    uniform = ceil_div(p.m, max(1, found["bm"])) * ceil_div(p.n, max(1, found["bn"]))
    narrower = " and narrower" if found["resident"] and found["blocks"] > uniform else ""
    blocks = f"{found['blocks']} of {found['bm']}×{found['bn']}{narrower}, each in {found['panels']} "
    blocks += f"{'panel' if found['panels'] == 1 else 'panels'} of {'up to ' if grows else ''}{found['bk']}"
    if found["resident"]:
        columns = found["columns_resident"]
        of_b = f", those of B while {columns} columns of blocks are made" if columns else ""
        blocks += f"; those of A stay on the device{of_b}"
        if found["interleaved"] > 1:
            blocks += f"; the first {found['interleaved']} blocks are made at the same time"
    if found["lanes"]:
        blocks += f"; each of {found['lanes']} threads multiplies the panels that it reads"
    rows = [("product", f"{p.m}×{p.k} · {p.k}×{p.n}{mirrored}")]
    rows += [("type of C", _type_words(p))] if p.types[2] else []
    rows += [("kernel", p.kernel)] if p.kernel else []
    rows += [("blocks of C", blocks)]
    workers = budget.workers
    rows += [("workers", f"{workers}, each with this much memory")] if workers > 1 else []
    if found["bytes_exchanged"]:
        down, across = found["team"]
        handed = f"hand {mib(found['bytes_exchanged'])} of pieces to each other instead of reading them again"
        rows += [("teams", f"{down}×{across} workers make as many blocks at the same time, and {handed}")]
    if p.parts > 1:
        deep = p.k_ranges[0][1]
        cut = f"cut into {len(p.k_ranges)} ranges of up to {deep}; workers add up their blocks"
        rows += [("k", cut)]
    stored = "reduced as they come; C is not stored"
    if not p.row_bytes:
        stored = f"{c.chunk_rows}×{c.chunk_cols}, {mib(c.chunk_bytes)}"
    rows += [("chunks of C", stored)]
    return rows


def _traffic_rows(found: Numbers, p: Problem) -> list[Row]:
    """Return rows with the bytes read and written, and the lower bound of any plan."""
    bound, cached = found["lower_bound_bytes"], found["cache_slots"]
    hold = "input holds" if p.same or p.symmetric else "inputs hold"
    times = (found["bytes_read"] + found["bytes_written"]) / max(1, bound)
    size, order = mib(cached * found["slot_bytes"]), "columns" if found["by_columns"] else "rows"
    cache = f"{size} of host memory keeps what is used again soonest; blocks go by {order}"
    guessed = ", an estimate: it is not known how much is read of each chunk" if p.estimated else ""
    rows = [("read", f"{mib(found['bytes_read'])} (the {hold} {mib(p.input_bytes)}){guessed}")]
    sent = " and ".join(name for name, s in (("A", p.a), ("B", p.b)) if s.encoded)
    rows += [("decoding", f"chunks of {sent} are decoded on the device")] if sent else []
    rows += [("cache", cache)] if cached else []
    written = mib(found["bytes_written"])
    if p.row_bytes and not found["bytes_written"]:
        written = "the elements that are found; their number is not known yet"
    rows += [("written", written)]
    rows += [("lower bound", f"{mib(bound)}; this plan moves {times:.2f} times that")]
    return rows


def time_rows(found: Numbers) -> list[Row]:
    """Return rows with the predicted time, the rates behind it, and chunks that would save time."""
    seconds: dict[str, float] = found["stage_seconds"]
    slowest = max(seconds, key=lambda stage: seconds[stage], default="")
    most = f"most of it {slowest}"
    if starting := found.get("starting_seconds", 0.0):
        most = f"{starting:.2f} s of it to make the device ready for this process, most of the rest {slowest}"
    rows = [("predicted", f"{found['predicted_seconds']:.2f} s, {most}")]
    rows += [("rates", found["rates"])] if found["rates"] else []
    rows += [("layout", found["advice"])] if found.get("advice") else []
    return rows


def memory_rows(found: Numbers) -> list[Row]:
    """Return rows that name each holder of host and device memory and its share of the limit."""
    rows = []
    for title, ledger, limit in (
        ("host memory", found["ledger"], found["memory_limit"]),
        ("device memory", found["device_ledger"], found["device_memory_limit"]),
    ):
        if limit is not None:
            rows.append((title, f"{mib(sum(ledger.values()))} of {mib(limit)}"))
            rows += [(f"  {name}", mib(size)) for name, size in ledger.items() if size]
    return rows


def _type_words(p: Problem) -> str:
    """Return the types of C and of the inputs, and what happens to a result that C's type cannot hold."""
    a, b, c = p.types
    if "int" in c:
        beyond = "sums are exact, and one that does not fit is an error"
    elif c == "float16":
        beyond = "sums are kept in float32"
        beyond += "" if p.row_bytes else ", and one past 65504 becomes infinite"
    else:
        beyond = ""
    return "; ".join(filter(None, [f"{c}, of {a} · {b}", beyond]))


def mib(nbytes: int) -> str:
    """Return a number of bytes as text, such as `1.5 MiB`."""
    return f"{nbytes / MiB:,.1f} MiB" if nbytes >= MiB or not nbytes else f"{nbytes / 1024:,.1f} KiB"


def _wrapped(text: str, indent: int) -> str:
    """Return a text in lines of at most `WIDTH` columns, all but the first of them indented. A command in
    backticks stays on one line, so that it can be copied."""
    text = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", HARD_SPACE), text)
    lines = textwrap.wrap(text, WIDTH - indent, break_on_hyphens=False)
    return f"\n{'':{indent}}".join(lines).replace(HARD_SPACE, " ")
