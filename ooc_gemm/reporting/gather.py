"""Makes plain data of a recording: JSON types, from which the page is made in another process.

Credentials are hidden here, in the process that knows them.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ..planning.cost import least_seconds
from ..planning.plan import Plan
from ..support.errors import Error
from ..support.recording import Recording, Span
from ..support.redact import redacted
from ..support.trace import LINES, STAGES
from .environment import environment

MOST_ITEMS = 12
"""Items of a list in a result that are shown."""


def gather(recording: Recording, title: str, spelled: Callable[[str], str]) -> dict[str, Any]:
    """Return what the page of a recording shows. `title`: what was run. `spelled`: returns a message as users
    read it, such as with options in the place of arguments."""
    alone = recording.benchmark is None  # a benchmark makes many products, and its tables show them
    plans = [_plan(plan, spelled) for plan in recording.plans if alone]
    result = recording.result.to_dict() if alone and recording.result is not None else {}
    found = {
        "title": title,
        "status": _status(recording.error),
        "error": None if recording.error is None else spelled(_said(recording.error)),
        "started": recording.started.isoformat(sep=" ", timespec="seconds"),
        "seconds": recording.seconds,
        "devices": list(dict.fromkeys(recording.devices)) if alone else [],
        "plans": plans,
        "result": _shown(result),
        "lanes": _lanes(recording),
        "stages": _stages(recording),
        "memory": {
            "seconds": [round(at, 3) for at, _ in recording.memory],
            "bytes": [nbytes for _, nbytes in recording.memory],
            "limit": max((plan["memory_limit"] or 0 for plan in plans), default=0) or None,
        },
        "checks": _checks(result, recording),
        "notices": [spelled(text) for text in recording.notices],
        "environment": environment(),
        "benchmark": recording.benchmark,
        "parts": [_part(part) for part in recording.parts],
    }
    return dict(_hidden(found))


def _status(error: BaseException | None) -> str:
    """Say how a run ended."""
    if error is None:
        return "done"
    return "failed" if isinstance(error, Exception) else "interrupted"


def _said(error: BaseException) -> str:
    """Return the message of an error; with its type where it is none of ours."""
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}".rstrip(": ")


def _hidden(value: Any) -> Any:
    """Return JSON types in which no text holds credentials."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted(str(key)): _hidden(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(one) for one in value]
    return value


def _plan(plan: Any, spelled: Callable[[str], str]) -> dict[str, Any]:
    """Return what is shown of a plan."""
    found = plan.to_dict()
    return {
        "table": spelled(plan.table()),
        "memory_limit": found.get("memory_limit"),
        "ledger": found.get("ledger", {}),
        "device_ledger": found.get("device_ledger", {}),
    }


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without its plan, in which long lists are cut."""

    def cut(value: Any) -> Any:
        if isinstance(value, list) and len(value) > MOST_ITEMS:
            return [*value[:MOST_ITEMS], f"… {len(value)} in all"]
        return value

    return {key: cut(value) for key, value in result.items() if key != "plan"}


def _lanes(recording: Recording) -> list[dict[str, Any]]:
    """Return the lanes of the timeline in the order of stages, each with its spans as columns."""
    if recording.spans is None:
        return []
    found = sorted(recording.spans.lanes(), key=lambda lane: LINES.index(lane[0]))
    return [
        {
            "stage": stage,
            "start": [round(span.start, 6) for span in spans],
            "stop": [round(span.stop, 6) for span in spans],
            "bytes": [span.nbytes for span in spans],
            "count": [span.count for span in spans],
            "busy": [round(span.busy, 6) for span in spans],
        }
        for stage, spans in found
    ]


def _stages(recording: Recording) -> list[dict[str, Any]]:
    """Return for each stage that moved or computed anything: bytes, threads, seconds in which any of them was
    busy, and what the plans say it takes."""
    if recording.spans is None:
        return []
    lanes = recording.spans.lanes()
    plans = [plan for plan in recording.plans if isinstance(plan, Plan)]
    least = [least_seconds(plan.flops, _moved(plan), plan.used_rates) for plan in plans]
    found = []
    for stage in STAGES:
        own = [spans for name, spans in lanes if name == stage]
        spans = [span for lane in own for span in lane]
        if not spans:
            continue
        busy, nbytes = _busy(spans), sum(span.nbytes for span in spans)
        found.append(
            {
                "stage": stage,
                "bytes": nbytes,
                "threads": len(own),
                "busy": busy,
                "rate": nbytes / busy if busy else 0.0,
                "predicted": sum(plan.stage_seconds.get(stage, 0.0) for plan in plans) if plans else None,
                "least": sum(one[stage] for one in least) if plans else None,
            }
        )
    return found


def _moved(plan: Plan) -> dict[str, int]:
    """Return the bytes that a plan moves in each stage."""
    return {
        "read": plan.bytes_read,
        "upload": plan.bytes_uploaded,
        "download": plan.bytes_downloaded,
        "write": plan.bytes_written,
    }


def _busy(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the spans runs."""
    total, end = 0.0, -1.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.stop - max(span.start, end))
        end = max(end, span.stop)
    return total


def _checks(result: dict[str, Any], recording: Recording) -> list[dict[str, Any]]:
    """Return what was checked, and how that went: True, False, or None where it was not."""
    found: list[dict[str, Any]] = []
    if "verified" in result:
        ok = result["verified"]
        said = "it was checked, and is right to rounding" if ok else "it was not checked"
        found.append({"what": "result", "ok": ok, "said": said})
    plan = result.get("plan")
    if plan and result.get("peak_host_bytes"):
        peak, limit = result["peak_host_bytes"], plan["memory_limit"]
        found.append(
            {
                "what": "memory limit",
                "ok": peak <= limit,
                "said": f"the process held up to {peak / limit:.1%} of the limit",
            }
        )
    if plan and plan.get("predicted_seconds") and recording.error is None and result.get("seconds"):
        ratio = plan["predicted_seconds"] / result["seconds"] - 1
        found.append(
            {
                "what": "prediction",
                "ok": None,
                "said": f"the plan predicted {plan['predicted_seconds']:.2f} s; the run took "
                f"{result['seconds']:.2f} s ({ratio:+.0%})",
            }
        )
    if overflowed := result.get("overflowed"):
        found.append(
            {"what": "overflow", "ok": False, "said": f"{overflowed} elements of C are infinite in its type"}
        )
    return found


def _part(part: Any) -> dict[str, Any]:
    """Return a line or a rich table of a benchmark as JSON types."""
    if isinstance(part, str):
        return {"text": part}
    heads = [str(column.header).replace("\n", " ") for column in part.columns]
    cells = [[str(cell) for cell in column.cells] for column in part.columns]
    right = [column.justify == "right" for column in part.columns]
    return {
        "title": str(part.title or ""),
        "heads": heads if part.show_header else [],
        "right": right,
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }
