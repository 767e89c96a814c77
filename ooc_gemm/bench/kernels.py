"""Times kernels on the GPU at hand, next to cuBLAS, and judges their results.

    for each type and shape:   operands ──► every contestant once, checked against float64
                                       └──► rounds: every contestant, each timed, in an order drawn anew

In one round every contestant runs once, so that all see the same clocks and temperatures. The report is a
plain dict, ready for JSON; tables.py shows it.
"""

import platform
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

from .. import __version__
from ..cuda_kernels.catalog import KERNELS
from ..cuda_kernels.config import Config
from ..cuda_kernels.roofline import peak_of, place, work
from ..cuda_kernels.tuning import SHAPES, choose
from ..devices.cuda.gpus import devices, require_cupy
from ..support.errors import InputError
from .gpu import Gemm, device_name, dtypes_of, open_gemm, out_dtype
from .measure import Case, Repeated, Stopwatch, rounding

STORED_N_BY_K = ("int8", "uint8")
"""Types whose B is always stored n×k. cuBLAS is ten times slower otherwise, which would flatter our
kernels."""
SIZES = (907, 1024, 1025, 2048, 2049, 4096, 8192)

Shape = tuple[int, int, int]
Report = Callable[[str], None]


def pairs(kernels: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """Return (kernel, type of A and B) of each contestant. By default that is every kernel of the catalog, in
    float32 if it takes that. Raises InputError if a named kernel takes none of the types."""
    found = []
    for kernel in kernels or KERNELS:
        takes = dtypes_of(kernel)
        default = ("float32",) if "float32" in takes else takes[:1]
        chosen = tuple(dtype for dtype in dtypes if dtype in takes) if dtypes else default
        if kernels and not chosen:
            raise InputError(f"kernel {kernel!r} takes {', '.join(takes)}, not {', '.join(dtypes)}")
        found += [(kernel, dtype) for dtype in chosen]
    if not found:
        raise InputError(f"no kernel takes {', '.join(dtypes)}; see ooc-gemm bench kernels --list")
    return list(dict.fromkeys(found))


def select(report: dict[str, Any], kernels: Sequence[str], dtypes: Sequence[str]) -> dict[str, Any]:
    """Return the report with the rows of some types and kernels, and of the rivals of these kernels. An empty
    list means all."""
    wanted = {*kernels, *map(rival, kernels)}
    rows = [
        row
        for row in report["rows"]
        if (not kernels or row["kernel"] in wanted) and (not dtypes or row["dtype"] in dtypes)
    ]
    return {**report, "rows": rows}


def rival(kernel: str) -> str:
    """Return the name with which a kernel's time is compared: cuBLAS at the same type and precision."""
    return "cublas-tf32" if kernel.endswith("tf32") else "cublas"


def run(
    chosen: Iterable[tuple[str, str]],
    shapes: Iterable[Shape],
    repeat: int = 7,
    trans_a: bool = False,
    trans_b: bool = False,
    threshold: float | None = None,
    progress: Report = lambda text: None,
) -> dict[str, Any]:
    """Measure and return the report. `threshold`: an element counts as beyond rounding if its error exceeds
    this, relative to the root mean square of the product. The default follows from the kernel's precision."""
    cupy = require_cupy("kernels run")
    device = devices()[cupy.cuda.Device().id]
    stream = cupy.cuda.Stream(non_blocking=True)
    stopwatch = Stopwatch(cupy, stream)
    kernels: dict[tuple[str, str], list[str]] = {}
    for kernel, dtype in chosen:
        kernels.setdefault((dtype, out_dtype(kernel, dtype)), []).append(kernel)
    rows = []
    for shape in shapes:
        for (dtype, out), names in kernels.items():
            case = Case(cupy, stream, dtype, trans_a, trans_b or dtype in STORED_N_BY_K, *shape, out)
            progress(f"{dtype} {size_of(*shape)}")
            rows += _measure(case, names, stopwatch, repeat, threshold, device)
            cupy.get_default_memory_pool().free_all_blocks()
    driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    return {
        "suite": "kernels",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "bandwidth_bytes_per_second": stopwatch.bandwidth,
        "repeat": repeat,
        "data": "random: N(0, 1), or integers over the range of int8; rows padded to 256 bytes",
        "versions": {
            "ooc-gemm": __version__,
            "python": platform.python_version(),
            "cupy": cupy.__version__,
            "cublas": cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()),
            "cuda_driver": driver,
            "cuda_runtime": runtime,
        },
        "rows": rows,
    }


def size_of(m: int, n: int, k: int) -> str:
    """`8192³`, or m×n×k."""
    return f"{m}³" if m == n == k else f"{m}×{n}×{k}"


def _measure(
    case: Case,
    kernels: list[str],
    stopwatch: Stopwatch,
    repeat: int,
    threshold: float | None,
    device: dict[str, Any],
) -> list[dict[str, Any]]:
    """Measure one shape, and return a row for cuBLAS and for each kernel."""
    shape = case.m, case.n, case.k
    rows: dict[str, dict[str, Any]] = {}
    running: dict[str, tuple[Gemm, Repeated]] = {}
    rivals = [name for name in map(rival, kernels) if case.dtype in dtypes_of(name)]
    for kernel in dict.fromkeys((*rivals, *kernels)):
        row = rows[kernel] = {
            "kernel": kernel, "dtype": case.dtype, "trans_a": case.trans_a, "trans_b": case.trans_b,
            "m": case.m, "n": case.n, "k": case.k, "config": None, "failed": None,
        }  # fmt: skip
        try:
            gemm = open_gemm(kernel, case.dtype, case.trans_a, case.trans_b, *shape)
            row["config"] = None if gemm.config is None else dict(gemm.config.macros)
            limit = rounding(kernel, case.dtype, case.k) if threshold is None else threshold
            row["error"] = found = case.check(gemm, limit)
            row["correct"] = found["beyond_percent"] == 0 and found["not_finite"] == 0
            running[kernel] = gemm, stopwatch.repeated(partial(case.run, gemm))
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"
    seconds = rounds({name: repeated for name, (_, repeated) in running.items()}, stopwatch, repeat)
    for kernel, times in seconds.items():
        row, (gemm, _) = rows[kernel], running[kernel]
        typical, base = median(times), seconds.get(rival(kernel))
        asked = work(case.dtype, *shape, gemm.tile, case.out)
        flops = asked.operations / typical
        peaks = {name.removesuffix("_flops"): rate for name, rate in device["peak"].items()}
        peak, peak_flops = peak_of(kernel, case.dtype, peaks) or (None, None)
        roof = place(flops, asked.intensity, peak_flops, stopwatch.bandwidth)
        row |= {
            "seconds": typical,
            "seconds_all": times,
            "tflops": flops / 1e12,
            "rival": rival(kernel) if base else None,
            "ratio": median(base) / typical if base else None,
            "operations": asked.operations,
            "loads": asked.loads,
            "stores": asked.stores,
            "accesses_ratio": asked.accesses_ratio,
            "intensity": asked.intensity,
            "peak": peak,
            "peak_flops": peak_flops,
            "roof": None if roof is None else asdict(roof),
        }
    return list(rows.values())


def rounds(running: dict[Any, Repeated], stopwatch: Stopwatch, repeat: int) -> dict[Any, list[float]]:
    """Return the seconds of each contestant in each round. The order is random in each round: a GPU at its
    power limit lowers its clocks a little later, and in a fixed or alternating order the same contestant
    would always pay for another's power."""
    seconds: dict[Any, list[float]] = {key: [] for key in running}
    draw = random.Random(1)
    for _ in range(repeat):
        for key in draw.sample(list(running), len(running)):
            seconds[key].append(stopwatch.time(running[key]))
    return seconds


def tune(
    chosen: Iterable[tuple[str, str]], repeat: int = 7, progress: Report = lambda text: None
) -> Iterator[dict[str, Any]]:
    """Find the fastest configuration of each kernel for each class of shapes, and remember it. A
    configuration that fails, or whose result is wrong, is left out."""
    cupy = require_cupy("kernels run")
    stream = cupy.cuda.Stream(non_blocking=True)
    stopwatch = Stopwatch(cupy, stream)

    def time(
        kernel: str, dtype: str, trans_a: bool, trans_b: bool, shape: Shape, configs: list[Config]
    ) -> list[float | None]:
        progress(f"{kernel} {dtype} {'NT'[trans_a]}{'NT'[trans_b]} {size_of(*shape)}")
        case = Case(cupy, stream, dtype, trans_a, trans_b, *shape, out_dtype(kernel, dtype))
        running: dict[Any, Repeated] = {}
        for index, config in enumerate(configs):
            try:
                gemm = open_gemm(kernel, dtype, trans_a, trans_b, *shape, config)
                found = case.check(gemm, rounding(kernel, dtype, shape[2]))
                if found["beyond_percent"] == 0 and found["not_finite"] == 0:
                    running[index] = stopwatch.repeated(partial(case.run, gemm))
            except Exception as error:
                progress(f"{kernel} {dict(config.macros)}: {error}")
        seconds = rounds(running, stopwatch, repeat)
        return [median(seconds[i]) if i in seconds else None for i in range(len(configs))]

    ours = [(kernel, dtype) for kernel, dtype in chosen if kernel in KERNELS]
    for choice in choose(ours, time, device_name(cupy)):
        yield {
            "kernel": choice.kernel,
            "dtype": choice.dtype,
            "transposed": f"{'NT'[choice.trans_a]}{'NT'[choice.trans_b]}",
            "class": choice.shape,
            "shape": SHAPES[choice.shape],
            "config": dict(choice.config.macros),
            "seconds": choice.seconds,
            "default_seconds": choice.default_seconds,
        }
