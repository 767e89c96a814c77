"""What it costs a kernel to add a product to the C that is there, as for all panels of a block but the first.

    python benchmarks/old_c.py [--only KERNEL ...] [--repeat R] [--commit ID] [--out FILE]

C is 8192 × 6144, and panels have three depths. Products with β = 0 and with β = 1 take turns; a turn is some
launches, and the median of turns counts. Beside them stands the time in which the device's memory delivers C
once. Nothing is verified here.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import click
import cupy
from heads import head

from ooc_gemm.bench.gpu import open_gemm, out_dtype

RESULTS = Path(__file__).resolve().parent / "results"
M, N, DEPTHS = 8192, 6144, (512, 2048, 8192)
KERNELS = (
    ("fp16x3", "float32"), ("fp16", "float16"), ("tf32", "float32"), ("int8", "int8"),
    ("ozaki2", "float64"), ("dmma", "float64"), ("ffma", "float32"), ("cublas", "float32"),
    ("mma-fp16x3", "float32"), ("mma-fp16", "float16"), ("mma-tf32", "float32"), ("mma-int8", "int8"),
)  # fmt: skip
LAUNCHES = 4
"""Launches of a turn, after one that is not timed."""
LARGEST = 9
"""Largest magnitude of integers."""


def drawn(shape: tuple[int, int], dtype: str) -> Any:
    """Random values on the GPU: integers, or N(0, 1)."""
    if dtype == "int8":
        return cupy.random.randint(-LARGEST, LARGEST + 1, shape).astype(dtype)
    return cupy.random.standard_normal(shape, dtype="float32").astype(dtype)


def seconds(kernel: str, dtype: str, depth: int, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of a product with β = 0 and with β = 1, in each turn."""
    stream, found = cupy.cuda.Stream(non_blocking=True), dict[str, list[float]](zero=[], one=[])
    a, b = drawn((M, depth), dtype), drawn((depth, N), dtype)
    c = cupy.zeros((M, N), out_dtype(kernel, dtype))
    gemm = open_gemm(kernel, dtype, False, False, M, N, depth)
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(repeat):
        for beta, times in enumerate(found.values()):
            gemm(1, a, b, beta, c, stream)
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            for _ in range(LAUNCHES):
                gemm(1, a, b, beta, c, stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / LAUNCHES / 1e3)
    return found


def copy_rate() -> float:
    """Return the bytes per second at which the device's memory is read and written in a copy."""
    source = cupy.zeros(1 << 30, "uint8")
    target, times = cupy.empty_like(source), list[float]()
    for _ in range(5):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        cupy.copyto(target, source)
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return 2 * source.nbytes / min(times)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, help="A kernel: " + ", ".join(dict.fromkeys(x for x, _ in KERNELS)))
@click.option("--repeat", default=7, show_default=True, help="Turns of each.")
@click.option("--commit", help="What is measured, where there is no git repository.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "old_c_h200.json")
def main(only: tuple[str, ...], repeat: int, commit: str | None, out: Path) -> None:
    """Measure the kernels and write the results."""
    rate = copy_rate()
    report: dict[str, Any] = head("old C", commit) | {"m": M, "n": N, "bytes_per_second": rate, "rows": []}
    for kernel, dtype in KERNELS:
        for depth in DEPTHS if not only or kernel in only else ():
            times = seconds(kernel, dtype, depth, repeat)
            zero, one = map(statistics.median, times.values())
            read = M * N * cupy.dtype(out_dtype(kernel, dtype)).itemsize / rate
            row = {"kernel": kernel, "dtype": dtype, "depth": depth, "zero": zero, "one": one, "read": read}
            report["rows"].append(row | {"seconds": times})
            click.echo(
                f"{kernel:10} {dtype:8} {depth:5}: {zero * 1e3:.3f} ms, with the old C {one * 1e3:.3f} ms = "
                f"{one / zero:.2f}; to read it takes {read * 1e3:.3f} ms"
            )
            out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
