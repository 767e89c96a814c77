"""How accurate products of residues are (ozaki2), over families of inputs, by the specification of its
kernels in NumPy. No GPU is needed.

    python benchmarks/residues.py [--commit ID] [--out FILE] [--only TEXT] [--most-k K]

Each row has the errors of C for 13 to 16 moduli, whatever would be judged, and beside them those of float64
sums: `turn` adds up one product after the other, rounded once each, as a GPU's DGEMM does, and `blas` is
NumPy's. Errors are relative in the Frobenius norm, and the largest |C − W| ÷ (|A|·|B|), where W is a product
in NumPy's longest type. `moduli` is how many are taken; 0: float64 sums make the product.

Prints the errors relative to `turn`, in the Frobenius norm. Exit 1 where those of the moduli that are taken
are above 1.0, or the largest above 1.5.
"""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from families import Family, Shape, families, wide_families

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import ozaki

RESULTS = Path(__file__).resolve().parent / "results"
M, N = 32, 36
COUNTS = (13, 14, 15, 16)
MOST_NORM, MOST_LARGEST = 1.0, 1.5


def in_turn(a: Any, b: Any) -> Any:
    """Return A·B in float64, each sum one product after the other. The longest type holds a product and a sum
    of two numbers with eleven bits more, so that each is rounded once to float64, as good as always."""
    total, left, right = np.zeros((len(a), b.shape[1])), a.astype("g"), b.astype("g")
    for k in range(a.shape[1]):
        total = (total + left[:, k, None] * right[k]).astype("f8")
    return total


def measure(family: Family) -> dict[str, Any]:
    a, b = family.draw(np.random.default_rng(11), Shape(M, N, family.k))
    want, size = a.astype("g") @ b.astype("g"), abs(a).astype("g") @ abs(b).astype("g")

    def errors(c: Any) -> tuple[float, float]:
        difference = abs(c - want)
        norm = float(np.sqrt((difference**2).sum() / (want**2).sum()))
        return norm, float((difference / size.clip(1e-300)).max())

    found = {"turn": errors(in_turn(a, b)), "blas": errors(a @ b)}
    found |= {str(count): errors(ozaki.multiply(a, b.T, (count,))[0]) for count in COUNTS}
    _, moduli = ozaki.multiply(a, b.T)
    ours, base = found[str(moduli or "turn")], found["turn"]
    held = ours[0] <= MOST_NORM * base[0] and ours[1] <= MOST_LARGEST * base[1]
    return {"family": family.name, "k": family.k, "moduli": moduli, "errors": found, "held": held}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False), default=RESULTS / "residues.json")
@click.option("--only", default="", help="Families whose name contains this text.")
@click.option("--most-k", default=8192, help="Leave out deeper families.")
def main(commit: str | None, out: str, only: str, most_k: int) -> None:
    """Measure all families and write the results."""
    if commit is None:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    chosen = [x for x in (*families(), *wide_families()) if only in x.name and x.k <= most_k]
    rows = []
    print("| inputs | k | in turn | blas |", " | ".join(map(str, COUNTS)), "| taken |")
    print("|---" * (5 + len(COUNTS)) + "|")
    for family in chosen:
        with np.errstate(all="ignore"):
            rows.append(row := measure(family))
        base = row["errors"]["turn"][0]
        cells = [f"{base:.1e}"]
        cells += [f"{row['errors'][name][0] / (base or 1):.2f}" for name in ("blas", *map(str, COUNTS))]
        said = "" if row["held"] else " <-- above its bound"
        taken = row["moduli"] or "float64"
        print(f"| {family.name} | {family.k} | {' | '.join(cells)} | {taken} |{said}", flush=True)
    report = {
        "suite": "residues", "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit,
        "m": M, "n": N, "numpy": np.__version__, "rows": rows,
    }  # fmt: skip
    Path(out).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    bad = [row for row in rows if not row["held"]]
    print(f"{len(rows)} rows, {sum(row['moduli'] > 0 for row in rows)} by residues; {len(bad)} above a bound")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
