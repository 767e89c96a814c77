"""What it costs a kernel to add a product to the C that is there, as for all panels of a block but the first.

    python benchmarks/old_c.py [--only KERNEL ...] [--repeat R] [--commit ID] [--out FILE]

C is 8192 × 6144, and panels have three depths. Products with β = 0 and with β = 1 take turns in random order,
and the median counts. Beside them stands the time in which the device's memory delivers C once. Nothing is
verified here.
"""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import click
import cupy
from heads import head

from ooc_gemm.bench.gpu import open_gemm, out_dtype
from ooc_gemm.bench.kernels import rounds
from ooc_gemm.bench.measure import Case, Stopwatch

RESULTS = Path(__file__).resolve().parent / "results"
M, N, DEPTHS = 8192, 6144, (512, 2048, 8192)
KERNELS = (
    ("fp16x3", "float32"), ("fp16", "float16"), ("tf32", "float32"), ("int8", "int8"),
    ("ozaki2", "float64"), ("dmma", "float64"), ("ffma", "float32"), ("cublas", "float32"),
    ("mma-fp16x3", "float32"), ("mma-fp16", "float16"), ("mma-tf32", "float32"), ("mma-int8", "int8"),
)  # fmt: skip


def seconds(stopwatch: Stopwatch, case: Case, kernel: str, repeat: int) -> dict[int, list[float]]:
    """Return the seconds of a product with β = 0 and with β = 1, in each round."""
    gemm = open_gemm(kernel, case.dtype, False, False, case.m, case.n, case.k)

    def start(beta: int) -> None:
        gemm(1, case.a, case.b, beta, case.c, case.stream)

    return rounds({beta: stopwatch.repeated(partial(start, beta)) for beta in (0, 1)}, stopwatch, repeat)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, help="A kernel: " + ", ".join(dict.fromkeys(x for x, _ in KERNELS)))
@click.option("--repeat", default=7, show_default=True, help="Rounds.")
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "old_c_h200.json")
def main(only: tuple[str, ...], repeat: int, commit: str | None, out: Path) -> None:
    """Measure the kernels and write the results."""
    stream = cupy.cuda.Stream(non_blocking=True)
    stopwatch = Stopwatch(cupy, stream)
    rate, rows = stopwatch.bandwidth, list[dict[str, Any]]()
    report = head("old C", commit) | {"m": M, "n": N, "bytes_per_second": rate, "rows": rows}
    for kernel, dtype in KERNELS:
        for depth in DEPTHS if not only or kernel in only else ():
            case = Case(cupy, stream, dtype, False, False, M, N, depth, out_dtype(kernel, dtype))
            times = seconds(stopwatch, case, kernel, repeat)
            zero, one = map(statistics.median, (times[0], times[1]))
            read = M * N * case.c.dtype.itemsize / rate
            row = {"kernel": kernel, "dtype": dtype, "depth": depth, "zero": zero, "one": one, "read": read}
            rows.append(row | {"seconds": times})
            click.echo(
                f"{kernel:10} {dtype:8} {depth:5}: {zero * 1e3:.3f} ms, with the old C {one * 1e3:.3f} ms = "
                f"{one / zero:.2f}; to read it takes {read * 1e3:.3f} ms"
            )
            out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
