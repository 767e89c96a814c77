"""Makes the page of a report. All that it loads is in it, and it may load nothing else."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..support.memory import spelled_size
from .figures import figures


def page(found: Mapping[str, Any]) -> str:
    """Return the HTML of a report. `found`: what `gather` has returned, as JSON types. Every text in it is
    escaped, because arrays may have any name."""
    drawn = figures(found)
    script, boxes = components(drawn) if drawn else ("", {})
    bokeh = Resources(mode="inline", components=["bokeh"]).render_js() if drawn else ""
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"size": spelled_size, "value": _value, "words": lambda key: key.replace("_", " ")}
    template = made.from_string(files(__package__).joinpath("page.html").read_text("utf-8"))
    return template.render(
        found,
        bokeh=Markup(bokeh),
        script=Markup(script),
        figures={name: Markup(box) for name, box in boxes.items()},
    )


def _value(value: Any, key: str) -> str:
    """Return a value of a result as text. The name of its key says which unit it has."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int) and "bytes" in key:
        return spelled_size(value)
    if isinstance(value, float):
        return f"{value:.4g} s" if key.endswith("seconds") else f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_value(one, key) for one in value) or "–"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(one, f'{name}_{key}')}" for name, one in value.items()) or "–"
    return str(value)
