"""How accurate fp16x3 is beside SGEMM, and ozaki2 beside DGEMM, over families of inputs: ordinary ones, and
hard ones.

    python benchmarks/accuracy.py [--commit ID] [--out FILE] [--always-split] [--only TEXT] [--kernel NAME]

Each row names the path that was taken: `split` (three float16 products), a number of moduli (products of
residues), or `fallback` (sums in float64). Errors are of C against a product of more digits (W): in float64
on the GPU, or, for float64 and complex128, of some rows and columns in NumPy's longest type. They are
relative in the Frobenius norm, and the largest |C − W| ÷ (|A|·|B|). SGEMM (CGEMM, DGEMM, ZGEMM) is cuBLAS',
in the same process, on the same operands. Exit 1 where a ratio is above its bound: 1.0 for the norm, 1.5 for
the largest.

`--always-split` takes the split, or residues, wherever the elements are finite: it shows what the choice is
worth.
"""

import json
import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from families import Family, Shape, families, wide_families

from ooc_gemm import __version__
from ooc_gemm.bench import kernels as bench
from ooc_gemm.cuda_kernels import scales
from ooc_gemm.cuda_kernels import split as splitting
from ooc_gemm.cuda_kernels.complex_gemm import ComplexGemm
from ooc_gemm.cuda_kernels.ozaki import Ozaki
from ooc_gemm.cuda_kernels.product import Operand, Product
from ooc_gemm.cuda_kernels.wgmma import open_tensor_gemm
from ooc_gemm.devices.cuda.gpus import require_cupy

RESULTS = Path(__file__).resolve().parent / "results"
M, N = 2048, 2304
"""Rows and columns of C: large enough that splitting into float16 pays, and that cuBLAS does not split k,
which would make it more accurate than a float32 sum."""
SAMPLED = 64, 72
"""Rows and columns of C of which errors in float64 are measured."""
MOST_NORM, MOST_LARGEST = 1.0, 1.5
SPEED = (8192, 16384)
REPEAT = 11

RIVALS = {"float32": "SGEMM", "complex64": "CGEMM", "float64": "DGEMM", "complex128": "ZGEMM"}


def _errors(c: Any, want: Any, size: Any) -> tuple[float, float]:
    """Return the relative error in the Frobenius norm, and the largest error relative to |A|·|B|."""
    difference = abs(c - want)
    norm = float((difference**2).sum() ** 0.5 / (abs(want) ** 2).sum() ** 0.5)
    return norm, float((difference / size.clip(1e-300)).max())


class _Product:
    """A product of one family, and what it should be."""

    def __init__(self, cupy: Any, dtype: str, family: Family):
        self.cupy, self.dtype, self.k = cupy, dtype, family.k
        r, shape = cupy.random.default_rng(11), Shape(M, N, family.k)
        a, b = family.draw(r, shape)
        if dtype.startswith("complex"):
            x, y = family.draw(r, shape)
            a, b = a + 1j * x, b + 1j * y
        stored = [x.get().astype(dtype) for x in (a, b)]
        self.a, self.b = map(cupy.asarray, stored)
        self.on_host = dtype in ("float64", "complex128")
        """Whether longer numbers than the device has are needed."""
        if not self.on_host:
            wide = "c16" if dtype == "complex64" else "f8"
            self.part = np.s_[:, :]
            # NumPy converts types, because CuPy flushes subnormal numbers to zero.
            left, right = (cupy.asarray(x.astype(wide)) for x in stored)
        else:
            rows, cols = (
                np.linspace(0, n - 1, count, dtype=int) for n, count in zip((M, N), SAMPLED, strict=True)
            )
            self.part = np.ix_(rows, cols)
            long = np.clongdouble if dtype == "complex128" else np.longdouble
            left, right = stored[0][rows].astype(long), stored[1][:, cols].astype(long)
        self.want, self.size = left @ right, abs(left) @ abs(right)

    def errors(self, c: Any) -> tuple[float, float]:
        """Return the errors of a product on the device."""
        found = c.get()[self.part].astype(self.want.dtype)
        return _errors(found if self.on_host else self.cupy.asarray(found), self.want, self.size)


def _measure(cupy: Any, kernel: str, dtype: str, family: Family, trans: tuple[bool, bool]) -> dict[str, Any]:
    product = _Product(cupy, dtype, family)
    theirs = product.a @ product.b
    a, b = (
        cupy.ascontiguousarray(x.T) if turned else x
        for x, turned in zip((product.a, product.b), trans, strict=True)
    )
    out, stream = cupy.full((M, N), np.nan, dtype), cupy.cuda.get_current_stream()
    gemm: Any
    if dtype == "complex64":
        gemm = ComplexGemm(*trans)
        state: Any = gemm.real
    elif kernel == "ozaki2":
        gemm = state = Ozaki(*trans, (dtype, dtype), chooses=False)
    else:
        gemm = state = open_tensor_gemm(kernel, *trans, dtype, dtype)
    left, right, target = (Operand(x.data.ptr, x.shape[1]) for x in (a, b, out))
    gemm(Product(M, N, family.k, 1.0, left, right, 0.0, target), stream)
    ours, base = product.errors(out), product.errors(theirs)
    made = str(state.moduli()) + " moduli" if kernel == "ozaki2" else "split"
    path = "fallback" if state.fell_back() else made
    ratios = [x / y if y else float(x > 0) for x, y in zip(ours, base, strict=True)]
    cupy.get_default_memory_pool().free_all_blocks()
    return {
        "family": family.name, "kernel": kernel, "dtype": dtype, "k": family.k, "path": path,
        "transposed": "".join("NT"[x] for x in trans), "rival": RIVALS[dtype],
        "relative_frobenius": ours[0], "rival_relative_frobenius": base[0], "ratio": ratios[0],
        "largest": ours[1], "rival_largest": base[1], "ratio_largest": ratios[1],
        "held": ratios[0] <= MOST_NORM and ratios[1] <= MOST_LARGEST,
    }  # fmt: skip


def _runs(only: str, kernels: tuple[str, ...]) -> Iterator[tuple[str, str, Family, tuple[bool, bool]]]:
    """Yield kernels, types, families, and whether A and B are stored transposed."""
    chosen = [family for family in families() if only in family.name]
    some = [family for family in chosen if family.k < 65536][::5]
    wide = [family for family in wide_families() if only in family.name]
    runs = [
        *(("fp16x3", "float32", family, (False, False)) for family in chosen),
        *(("fp16x3", "float32", family, (True, True)) for family in some),
        *(("mma-fp16x3", "float32", family, (False, False)) for family in some),
        *(("fp16x3", "complex64", family, (False, True)) for family in some),
        *(("ozaki2", "float64", family, (False, True)) for family in (*chosen, *wide)),
        *(("ozaki2", "complex128", family, (False, True)) for family in (*some, *wide[::3])),
    ]
    yield from (run for run in runs if not kernels or run[0] in kernels)


TIMED = (
    (False, (("fp16x3", "float32"), ("mma-fp16x3", "float32"), ("fp16x3", "complex64"))),
    (True, (("ozaki2", "float64"), ("ozaki2", "complex128"), ("ozaki2", "int16"), ("ozaki2", "int32"))),
)
"""Whether B is stored n×k, and kernels with types. The engine places panels of ozaki2 so."""


def _timed(kernels: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows of the benchmark of kernels."""
    rows, shapes = list[dict[str, Any]](), [(size, size, size) for size in SPEED]
    for trans_b, pairs in TIMED:
        chosen = [pair for pair in pairs if not kernels or pair[0] in kernels]
        if chosen:
            rows += bench.run(chosen, shapes, REPEAT, trans_b=trans_b)["rows"]
    return rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False), default=RESULTS / "accuracy_h200.json")
@click.option("--always-split", is_flag=True, help="Take the split wherever the elements are finite.")
@click.option("--only", default="", help="Families whose name contains this text.")
@click.option("--kernel", "kernels", multiple=True, help="This kernel alone (several times: these).")
@click.option("--speed/--no-speed", default=True, help="Also time the kernels beside cuBLAS.")
def main(
    commit: str | None, out: str, always_split: bool, only: str, kernels: tuple[str, ...], speed: bool
) -> None:
    """Measure all families and write the results. Exit status 1: a bound does not hold."""
    if commit is None:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    if always_split:
        splitting.LOW_SHARE = 1e30
        splitting.LEAST_TERMS = splitting.LEAST_DENSITY = 0
        scales.TOLERANCE = 1e30
    cupy, rows = require_cupy("kernels run"), list[dict[str, Any]]()
    for run in _runs(only, kernels):
        rows.append(row := _measure(cupy, *run))
        click.echo(
            f"{row['kernel']:10} {row['dtype']:9} {row['family'][:52]:52} k={row['k']:<5} {row['path']:8} "
            f"{row['relative_frobenius']:.2e} {row['rival_relative_frobenius']:.2e} {row['ratio']:5.2f}  "
            f"{row['largest']:.2e} {row['rival_largest']:.2e} {row['ratio_largest']:5.2f}"
            + ("" if row["held"] else "  <-- above its bound")
        )
    report: dict[str, Any] = {
        "suite": "accuracy",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "m": M,
        "n": N,
        "versions": {
            "ooc-gemm": __version__,
            "python": platform.python_version(),
            "cupy": cupy.__version__,
            "cublas": cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()),
        },
        "rows": rows,
    }
    if speed:
        measured = _timed(kernels)
        report["speed"] = [
            {key: row[key] for key in ("kernel", "dtype", "m", "n", "k", "seconds", "tflops", "ratio")}
            for row in measured
            if not row["failed"]
        ]
        for row in report["speed"]:
            click.echo(
                f"{row['kernel']:10} {row['dtype']:9} {row['m']}³ {row['tflops']:.1f} {row['ratio'] or 0:.2f}"
            )
    Path(out).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    names, bad = {row["family"] for row in rows}, [row for row in rows if not row["held"]]
    quick = {row["family"] for row in rows if row["path"] != "fallback"}
    said = f"{len(quick)} without the fallback; {len(bad)} of {len(rows)} rows above a bound"
    click.echo(f"{len(names)} families, {said}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
