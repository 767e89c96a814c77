"""How accurate fp16x3 is beside SGEMM, over families of inputs: ordinary ones, and hard ones.

    python benchmarks/accuracy.py [--commit ID] [--out FILE] [--always-split] [--only TEXT]

Each row names the path that was taken: `split` (three float16 products) or `fallback` (sums in float64).
Errors are of C against a product in float64 (W): relative in the Frobenius norm, and the largest
|C − W| ÷ (|A|·|B|). SGEMM (CGEMM for complex64) is cuBLAS', in the same process, on the same operands. Exit 1
where a ratio is above its bound: 1.0 for the norm, 1.5 for the largest.

`--always-split` takes the split wherever the elements are finite: it shows what the choice is worth.
"""

import json
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from ooc_gemm import __version__
from ooc_gemm.bench import kernels as bench
from ooc_gemm.cuda_kernels import split as splitting
from ooc_gemm.cuda_kernels.complex_gemm import ComplexGemm
from ooc_gemm.cuda_kernels.product import Operand, Product
from ooc_gemm.cuda_kernels.wgmma import open_tensor_gemm
from ooc_gemm.devices.cuda.gpus import require_cupy

RESULTS = Path(__file__).resolve().parent / "results"
M, N = 2048, 2304
"""Rows and columns of C: large enough that splitting into float16 pays, and that cuBLAS does not split k,
which would make it more accurate than a float32 sum."""
MOST_NORM, MOST_LARGEST = 1.0, 1.5
SPEED = (8192, 16384)
REPEAT = 11

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Family:
    """A family of inputs. `draw` makes A (M×k) and B (k×N) from a random generator of CuPy's and k."""

    name: str
    k: int
    draw: Callable[[Any, int], Pair]


def _normal(r: Any, k: int) -> Pair:
    return r.standard_normal((M, k)), r.standard_normal((k, N))


def _uniform(r: Any, k: int) -> Pair:
    return r.random((M, k)), r.random((k, N))


def _scaled(a: float, b: float) -> Callable[[Any, int], Pair]:
    """Multiply N(0, 1) by constants."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        return x * a, y * b

    return draw


def _shifted(shift: int, count: int = 1) -> Callable[[Any, int], Pair]:
    """Multiply some columns of A by 2^shift and the matching rows of B by 2^-shift."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        at = slice(k // 3, k // 3 + count)
        x[:, at] *= 2.0**shift
        y[at] *= 2.0**-shift
        return x, y

    return draw


def _units(width: int, rows: bool, columns: bool, inverse: bool = True) -> Callable[[Any, int], Pair]:
    """Give rows of A and columns of B, or columns of A, units of 2^u with u within ±width. The rows of B get
    the inverse units of A's columns, or none."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        if rows:
            x *= 2.0 ** r.integers(-width, width + 1, (M, 1))
            y *= 2.0 ** r.integers(-width, width + 1, (1, N))
        if columns:
            unit = 2.0 ** r.integers(-width, width + 1, (1, k))
            x *= unit
            if inverse:
                y /= unit.T
        return x, y

    return draw


def _outliers(factor: float, columns: int, zeros: float) -> Callable[[Any, int], Pair]:
    """Multiply some columns of A by a factor; in the matching rows of B a share of the elements is zero."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        x[:, :columns] *= factor
        y[:columns, : int(zeros * N)] = 0
        return x, y

    return draw


def _elements(factor: float, share: float) -> Callable[[Any, int], Pair]:
    """Multiply a share of A's elements, at least one, by a factor."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        chosen = r.random((M, k)) < share
        chosen[7, k // 2] = True
        x[chosen] *= factor
        return x, y

    return draw


def _lognormal(sigma: float) -> Callable[[Any, int], Pair]:
    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        return np.exp(sigma * x), np.exp(sigma * y)

    return draw


def _mean(mean: float) -> Callable[[Any, int], Pair]:
    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        return x + mean, y + mean

    return draw


def _cancelling(rest: float) -> Callable[[Any, int], Pair]:
    """Let the second half of every sum cancel the first, except for `rest` of it."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        x[:, k // 2 :] = x[:, : k - k // 2]
        y[k // 2 :] = -y[: k - k // 2] + rest * y[k // 2 :]
        return x, y

    return draw


def _sparse(share: float) -> Callable[[Any, int], Pair]:
    """Let only a share of A's elements be nonzero."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        return x * (r.random((M, k)) < share), y

    return draw


def _counts(most: int) -> Callable[[Any, int], Pair]:
    """Let A hold small integers, as genotypes and word counts are."""

    def draw(r: Any, k: int) -> Pair:
        return r.integers(0, most + 1, (M, k)).astype("f8"), r.standard_normal((k, N))

    return draw


def _whole(most: int) -> Callable[[Any, int], Pair]:
    """Let A and B hold integers whose sums float32 holds exactly."""

    def draw(r: Any, k: int) -> Pair:
        x, y = (r.integers(-most, most + 1, shape).astype("f8") for shape in ((M, k), (k, N)))
        return x, y

    return draw


def _tailed(r: Any, k: int) -> Pair:
    """Draw ratios of normal numbers (Cauchy's distribution)."""
    (x, y), (u, v) = _normal(r, k), _normal(r, k)
    return x / u, y / v


def _exponents(spread: int) -> Callable[[Any, int], Pair]:
    """Give every element a unit of its own."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        return (
            x * 2.0 ** r.integers(-spread, spread + 1, x.shape),
            y * 2.0 ** r.integers(-spread, spread + 1, y.shape),
        )

    return draw


def _blocks(shift: int) -> Callable[[Any, int], Pair]:
    """Multiply half of A's columns by 2^shift. Half of B's columns meet only those, the others only the
    rest."""

    def draw(r: Any, k: int) -> Pair:
        x, y = _normal(r, k)
        x[:, : k // 2] *= 2.0**shift
        y[: k // 2, : N // 2] = 0
        y[k // 2 :, N // 2 :] = 0
        return x, y

    return draw


def families() -> Iterator[Family]:
    for k in (512, 1024, 8192, 65536):
        yield Family("N(0, 1)", k, _normal)
        yield Family("U(0, 1)", k, _uniform)
        yield Family("means of 1000", k, _mean(1e3))
        yield Family("lognormal, sigma 1", k, _lognormal(1))
        yield Family("cancelling but for 2^-10", k, _cancelling(2.0**-10))
        yield Family("one column x 2^24, B's row x 2^-24", k, _shifted(24))
        yield Family("a column x 1e7 meets a row of zeros", k, _outliers(1e7, 1, 1))
        yield Family("half of A zeros", k, _sparse(0.5))
    for shift in range(0, 41, 2):
        yield Family(f"one column x 2^{shift}, B's row x 2^-{shift}", 1024, _shifted(shift))
    for shift in range(-40, 1, 8):
        yield Family(f"10 columns x 2^{shift}, B's rows x 2^{-shift}", 1024, _shifted(shift, 10))
    for shift in (23, 40):
        yield Family(f"one column x 2^{shift}, B's row x 2^-{shift}", 8192, _shifted(shift))
    for width in (1, 2, 4, 8, 12, 16, 20, 25, 30):
        yield Family(f"units within 2^±{width} over columns", 4096, _units(width, False, True))
        yield Family(
            f"units within 2^±{width} over columns of A alone", 4096, _units(width, False, True, False)
        )
        yield Family(f"units within 2^±{width} over rows", 4096, _units(width, True, False))
        yield Family(f"units within 2^±{width} over both", 4096, _units(width, True, True))
    for power in (2, 4, 7, 10):
        for columns, zeros in ((1, 1), (1, 0.5), (1, 0.01), (20, 1), (20, 0.5)):
            name = f"{columns} columns x 1e{power} meet rows with {zeros:.0%} zeros"
            yield Family(name, 1024, _outliers(10.0**power, columns, zeros))
    for share in (0, 1e-6, 1e-3):
        yield Family(f"{share:g} of A's elements x 1e9", 4096, _elements(1e9, share))
    for sigma in range(1, 9):
        yield Family(f"lognormal, sigma {sigma}", 4096, _lognormal(sigma))
    for mean in (1, 10, 1e5):
        yield Family(f"means of {mean:g}", 1024, _mean(mean))
    for rest in (0.5, 2.0**-5, 2.0**-20):
        yield Family(f"cancelling but for {rest:.2g}", 1024, _cancelling(rest))
    for size in (1e-19, 1e-20, 1e-21, 1e-22):
        yield Family(f"{size:g} times {size:g}: subnormal results", 1024, _scaled(size, size))
    yield Family("1e30 times 1e-30", 1024, _scaled(1e30, 1e-30))
    yield Family("subnormal elements", 1024, _scaled(1e-40, 1e20))
    for share in (0.3, 0.1, 0.03, 0.01):
        for k in (1024, 8192):
            yield Family(f"{share:.0%} of A not zero", k, _sparse(share))
    for most in (1, 2, 255):
        yield Family(f"A of integers up to {most}", 1024, _counts(most))
    for most in (1, 8, 60):
        for k in (1024, 8192):
            yield Family(f"integers within ±{most}, sums exact in float32", k, _whole(most))
    yield Family("Cauchy's distribution", 4096, _tailed)
    for spread in (1, 2, 4, 8, 12, 40):
        yield Family(f"a unit within 2^±{spread} for each element", 4096, _exponents(spread))
    for shift in (4, 10, 20, 32, 40):
        yield Family(f"blocks, half of them x 2^{shift}", 1024, _blocks(shift))


def _errors(cupy: Any, c: Any, want: Any, size: Any) -> tuple[float, float]:
    """Return the relative error in the Frobenius norm, and the largest error relative to |A|·|B|. NumPy
    converts types, because CuPy flushes subnormal numbers to zero."""
    difference = cupy.abs(cupy.asarray(c.get().astype(want.dtype)) - want)
    norm = float(cupy.linalg.norm(difference) / cupy.linalg.norm(want))
    return norm, float((difference / cupy.maximum(size, 1e-300)).max())


def _measure(cupy: Any, kernel: str, dtype: str, family: Family, trans: tuple[bool, bool]) -> dict[str, Any]:
    r = cupy.random.default_rng(11)
    wide, rival = ("c16", "CGEMM") if dtype == "complex64" else ("f8", "SGEMM")
    a, b = family.draw(r, family.k)
    if dtype == "complex64":
        (x, y) = family.draw(r, family.k)
        a, b = a + 1j * x, b + 1j * y
    stored = [x.get().astype(dtype) for x in (a, b)]
    a, b = (cupy.asarray(x.astype(wide)) for x in stored)
    want, size = a @ b, cupy.abs(a) @ cupy.abs(b)
    a, b = map(cupy.asarray, stored)
    theirs = a @ b
    if trans[0]:
        a = cupy.ascontiguousarray(a.T)
    if trans[1]:
        b = cupy.ascontiguousarray(b.T)
    out, stream = cupy.full((M, N), np.nan, dtype), cupy.cuda.get_current_stream()
    gemm: Any
    if dtype == "complex64":
        gemm = ComplexGemm(*trans)
        state: Any = gemm.real
    else:
        gemm = state = open_tensor_gemm(kernel, *trans, dtype, dtype)
    left, right, target = (Operand(x.data.ptr, x.shape[1]) for x in (a, b, out))
    gemm(Product(M, N, family.k, 1.0, left, right, 0.0, target), stream)
    ours, base = _errors(cupy, out, want, size), _errors(cupy, theirs, want, size)
    path = "fallback" if state.fell_back() else "split"
    ratios = [x / y if y else float(x > 0) for x, y in zip(ours, base, strict=True)]
    cupy.get_default_memory_pool().free_all_blocks()
    return {
        "family": family.name, "kernel": kernel, "dtype": dtype, "k": family.k, "path": path,
        "transposed": "".join("NT"[x] for x in trans), "rival": rival,
        "relative_frobenius": ours[0], "rival_relative_frobenius": base[0], "ratio": ratios[0],
        "largest": ours[1], "rival_largest": base[1], "ratio_largest": ratios[1],
        "held": ratios[0] <= MOST_NORM and ratios[1] <= MOST_LARGEST,
    }  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False), default=RESULTS / "accuracy_h200.json")
@click.option("--always-split", is_flag=True, help="Take the split wherever the elements are finite.")
@click.option("--only", default="", help="Families whose name contains this text.")
@click.option("--speed/--no-speed", default=True, help="Also time the kernels beside cuBLAS.")
def main(commit: str | None, out: str, always_split: bool, only: str, speed: bool) -> None:
    """Measure all families and write the results. Exit status 1: a bound does not hold."""
    if commit is None:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    if always_split:
        splitting.LOW_SHARE = 1e30
        splitting.LEAST_TERMS = splitting.LEAST_DENSITY = 0
    cupy, rows = require_cupy("kernels run"), list[dict[str, Any]]()
    chosen = [family for family in families() if only in family.name]
    runs = [("fp16x3", "float32", family, (False, False)) for family in chosen]
    some = [family for family in chosen if family.k < 65536][::5]
    runs += [("fp16x3", "float32", family, (True, True)) for family in some]
    runs += [("mma-fp16x3", "float32", family, (False, False)) for family in some]
    runs += [("fp16x3", "complex64", family, (False, True)) for family in some]
    for run in runs:
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
        kernels = [("fp16x3", "float32"), ("mma-fp16x3", "float32"), ("fp16x3", "complex64")]
        timed = bench.run(kernels, [(size, size, size) for size in SPEED], REPEAT)["rows"]
        report["speed"] = [
            {key: row[key] for key in ("kernel", "dtype", "m", "n", "k", "seconds", "tflops", "ratio")}
            for row in timed
            if not row["failed"]
        ]
        for row in report["speed"]:
            click.echo(
                f"{row['kernel']:10} {row['dtype']:9} {row['m']}³ {row['tflops']:.1f} {row['ratio']:.2f}"
            )
    Path(out).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    split = {row["family"] for row in rows if row["path"] == "split"}
    names, bad = {row["family"] for row in rows}, [row for row in rows if not row["held"]]
    click.echo(f"{len(names)} families, {len(split)} by split; {len(bad)} of {len(rows)} rows above a bound")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
