"""How results and plans show themselves: one line in a console, a table in a notebook."""

from collections.abc import Iterable
from dataclasses import Field
from html import escape
from typing import Any, ClassVar

from .memory import spelled_size
from .trace import Timeline

NOT_SHORT = frozenset({"dtype", "precision", "bytes_uploaded", "bytes_downloaded", "lower_bound_bytes"})
"""Fields that only a table shows."""
COLOURS = {
    "read": "#4c78a8",
    "upload": "#72b7b2",
    "compute": "#f58518",
    "download": "#b279a2",
    "write": "#54a24b",
}


class Shown:
    """A frozen dataclass that shows itself. Fields with `repr=False` are left out."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __repr__(self) -> str:
        """The class with its main fields, without those that are zero or missing."""
        some = (f"{name}={_short(value)}" for name, value in self._shown() if name not in NOT_SHORT and value)
        return f"{type(self).__name__}({', '.join(some)})"

    def _repr_html_(self) -> str:
        """A table of the fields; below it the plan, and a timeline where the run was traced."""
        rows = ((_title(name), _spelled(name, value)) for name, value in self._shown() if value is not None)
        parts = [table(type(self).__name__, rows)]
        if timeline := getattr(self, "timeline", None):
            parts.append(drawn(timeline))
        if (plan := getattr(self, "plan", None)) is not None:
            parts.append(f"<details><summary>Plan</summary>{plan._repr_html_()}</details>")
        return "\n".join(parts)

    def _shown(self) -> Iterable[tuple[str, Any]]:
        """Yield the names and values of fields that are texts or numbers."""
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if field.repr and (value is None or isinstance(value, str | bool | int | float)):
                yield name, value


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return an HTML table of names and texts. Whatever they hold is shown as text."""
    cell = "text-align:left;vertical-align:top;white-space:pre-wrap"
    lines = (
        f'<tr><th style="{cell}">{escape(name)}</th><td style="{cell}">{escape(text)}</td></tr>'
        for name, text in rows
    )
    caption = '<caption style="text-align:left"><b>' + escape(title) + "</b></caption>"
    return f"<table>{caption}<tbody>{''.join(lines)}</tbody></table>"


def drawn(timeline: Timeline) -> str:
    """Return an SVG picture of a timeline: a line for each stage, darker where it was busier."""
    left, width, line = 80, 600, 18
    parts = []
    for number, (stage, shares) in enumerate(timeline.busy.items()):
        y, step = number * line, width / max(1, len(shares))
        parts.append(f'<text x="0" y="{y + 13}" font-size="12" fill="currentColor">{escape(stage)}</text>')
        parts += [
            f'<rect x="{left + at * step:.1f}" y="{y + 2}" width="{step:.2f}" height="{line - 4}" '
            f'fill="{COLOURS.get(stage, "#888888")}" fill-opacity="{share:.2f}"/>'
            for at, share in enumerate(shares)
            if share >= 0.005
        ]
    end = len(timeline.busy) * line + 12
    parts.append(f'<text x="{left}" y="{end}" font-size="11" fill="currentColor">0 s</text>')
    parts.append(
        f'<text x="{left + width}" y="{end}" font-size="11" fill="currentColor" text-anchor="end">'
        f"{timeline.seconds:.2f} s</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width} {end + 4}" '
        f'style="max-width:{left + width}px;width:100%" role="img" '
        f'aria-label="Share of time in which each stage was busy">{"".join(parts)}</svg>'
    )


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def _title(name: str) -> str:
    known = {"tflops": "TFLOP/s", "seconds": "time"}
    return known.get(name, name.replace("_bytes", "_memory" if "peak" in name else "").replace("_", " "))


def _spelled(name: str, value: Any) -> str:
    """Return the value of a field as text, with its unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if name.startswith("bytes_") or name.endswith("_bytes"):
        return spelled_size(value)
    if name == "seconds":
        return f"{value:.3g} s"
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"
