"""Draws docs/pictures/limits.svg from `benchmarks/results/*.json`: the share of the hardware's limit that
runs reach, on an axis that ends at the limit.

    python benchmarks/figures.py [--check]        --check writes nothing; exit status 1 if the figure differs
"""

import argparse
import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from tables import LIMITS

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "pictures" / "limits.svg"
LEFT, RIGHT, TOP, STEP = 340, 40, 60, 26
WIDTH = 860
INK, GREY = "#1f2937", "#6b7280"
PEAKS = ("ffma", "tf32", "fp16", "int8")
"""Kernels that are shown beside the machine's peak for their type."""
COLOURS = {"one H100": "#0f766e", "two cores": "#b45309"}


def load(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    return report


def bars() -> Iterator[tuple[str, str, float]]:
    """Yield machine, title and share of the limit."""
    rows = load("limits_h100")["rows"]
    for name in ("tmpfs", "disk", "cublas"):
        title = LIMITS[name].replace("`", "")
        if name == "cublas":
            title = "32768³, tmpfs, cuBLAS' SGEMM"
        row = rows[name]
        yield "one H100", title, row.get("in_turn_seconds", row["limit_seconds"]) / row["seconds"]
    row = load("answers_pca_h100")["cases"][0]
    yield "one H100", f"pca of 4,000,000×4,096, -D {row['limits']['device_memory_limit']}", 1 / row["ratio"]
    for row in load("kernels_8192_h100")["rows"]:
        if row["kernel"] in PEAKS:
            yield (
                "one H100",
                f"kernel {row['kernel']}, 8192³, of the peak",
                row["tflops"] * 1e12 / row["peak_flops"],
            )
    (case,) = (case for case in load("cpu")["cases"] if case["name"] == "16384")
    alone, own = (
        next(row["median_seconds"] for row in case["contestants"] if row["name"] == name)
        for name in ("numpy", "ooc-gemm")
    )
    yield "two cores", "16384³, -M 512MiB", alone / own


def draw() -> str:
    """Return the figure."""
    found = list(bars())
    height, span = TOP + STEP * len(found) + 58, WIDTH - LEFT - RIGHT
    bottom = TOP + STEP * len(found)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
        "<title>Share of the hardware's limit that runs reach</title>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10" fill="#ffffff" '
        'stroke="#d1d5db"/>',
    ]
    for i, (machine, colour) in enumerate(COLOURS.items()):
        out.append(f'<rect x="{LEFT + 110 * i}" y="20" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 110 * i + 18}" y="31">{machine}</text>')
    for tick in range(0, 101, 20):
        x = LEFT + span * tick / 100
        stroke, wide = (INK, 2) if tick == 100 else ("#d1d5db", 1)
        out.append(
            f'<line x1="{x:.0f}" y1="{TOP - 8}" x2="{x:.0f}" y2="{bottom}" stroke="{stroke}" '
            f'stroke-width="{wide}"/>'
        )
        out.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle" fill="{GREY}">{tick} %</text>')
    for i, (machine, title, share) in enumerate(found):
        y, width = TOP + STEP * i, span * min(share, 1)
        out.append(f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(title)}</text>')
        out.append(
            f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="17" rx="2" fill="{COLOURS[machine]}"/>'
        )
        inside = share > 0.2
        at, anchor, fill = (width - 6, "end", "#ffffff") if inside else (width + 6, "start", INK)
        text = f"{share:.0%}".replace("%", " %")
        out.append(
            f'<text x="{LEFT + at:.0f}" y="{y + 13}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
        )
    out.append(
        f'<text x="{LEFT + span / 2:.0f}" y="{bottom + 42}" text-anchor="middle">share of the limit</text>'
    )
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the figure differs")
    check, new = parser.parse_args().check, draw()
    if check and (not FIGURE.is_file() or FIGURE.read_text("utf-8") != new):
        print(f"{FIGURE.relative_to(ROOT)} differs; run python benchmarks/figures.py", file=sys.stderr)
        return 1
    if not check:
        FIGURE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
