"""Our CUDA kernels at ragged shapes, made to be run under compute-sanitizer:

    compute-sanitizer --tool memcheck  python benchmarks/kernels_sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/kernels_sanitize.py
    python benchmarks/kernels_sanitize.py --time --json FILE

Every matrix is an allocation of its own, of exactly the bytes it has, so that a step over its end is seen.
With --time: TFLOP/s of `tiled` and of cuBLAS, one after the other, at 8192³; the sanitizer would spoil it.
"""

import json
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import Any

import click
import cupy
import numpy as np

from ooc_gemm import nvrtc

SHAPES = (
    (1, 1, 1), (2, 3, 5), (17, 3, 2), (33, 129, 17), (127, 128, 9), (129, 257, 7), (257, 65, 64),
    (128, 128, 16), (1, 300, 33), (300, 1, 33), (2100, 3, 5), (66, 130, 0),
)  # fmt: skip
FACTORS = ((1, 0), (2, -3))
"""(α, β)."""
PAD = 3
"""Columns by which the rows of every matrix are longer than they need be, in every second case."""
SIZE, REPEATS = 8192, 5


def function_of(config: nvrtc.Config) -> Any:
    """The kernel, for the current device."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    arch = f"sm_{properties['major']}{properties['minor']}" + ("a" if properties["major"] >= 9 else "")
    return nvrtc.load(nvrtc.compile(config, arch), config.kernel)


def title(config: nvrtc.Config) -> str:
    """Kernel, type, and N or T for each of A and B."""
    return f"{config.kernel} {config.dtype} {'NT'[config.trans_a]}{'NT'[config.trans_b]}"


def stored(rng: np.random.Generator, rows: int, cols: int, pad: int, dtype: str) -> np.ndarray:
    """A random matrix in rows of cols + pad elements; the last row ends at its last element. 1-D."""
    values = (
        rng.integers(-(2**25), 2**25, (rows, cols)) if dtype == "int64" else rng.random((rows, cols)) - 0.5
    )
    full = np.full((rows, cols + pad), -(2**40) if dtype == "int64" else np.nan, dtype)
    full[:, :cols] = values
    return full.ravel()[: max(full.size - pad, 0)]


def view(flat: np.ndarray, rows: int, cols: int, pad: int) -> np.ndarray:
    """The rows×cols matrix in what `stored` made."""
    strides = ((cols + pad) * flat.itemsize, flat.itemsize)
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), strides)


def check(
    config: nvrtc.Config, function: Any, m: int, n: int, k: int, alpha: int, beta: int, pad: int
) -> float:
    """One launch against NumPy: the largest error over its bound, to be at most 1 (int64: exactly 0)."""
    dtype, rng = config.dtype, np.random.default_rng(m + 1000 * n + k)
    a_shape = (k, m) if config.trans_a else (m, k)
    b_shape = (n, k) if config.trans_b else (k, n)
    a, b, c = (stored(rng, *shape, pad, dtype) for shape in (a_shape, b_shape, (m, n)))
    wide = np.int64 if dtype == "int64" else np.float64
    left, right, old = (view(x, *s, pad).astype(wide) for x, s in ((a, a_shape), (b, b_shape), (c, (m, n))))
    left, right = left.T if config.trans_a else left, right.T if config.trans_b else right
    if beta == 0 and wide is np.float64:
        c[:] = np.nan
    on_device = [cupy.asarray(x) for x in (a, b, c)]
    (da, lda), (db, ldb), (dc, ldc) = (
        (x.data.ptr, cols + pad) for x, cols in zip(on_device, (a_shape[1], b_shape[1], n), strict=True)
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    nvrtc.launch(function, config, m, n, k, alpha, da, lda, db, ldb, beta, dc, ldc, stream)
    stream.synchronize()
    got = view(on_device[2].get(), m, n, pad)
    want = alpha * (left @ right) + beta * old
    if wide is np.int64:
        return 0.0 if np.array_equal(got, want) else np.inf
    magnitude = abs(alpha) * (abs(left) @ abs(right)) + abs(beta * old)
    bound = 2 * (k + 3) * np.finfo(dtype).eps * magnitude + np.finfo(dtype).tiny
    return float((abs(got - want) / bound).max())  # NaN where the result is


def correctness() -> list[str]:
    """Runs and prints every case; the failed ones."""
    failed = []
    cupy.cuda.set_allocator(None)  # one cudaMalloc a matrix: a pool would hide a step into a neighbour
    for dtype, trans_a, trans_b in product(("float32", "float64", "int64"), (False, True), (False, True)):
        config = nvrtc.tiled(dtype, trans_a, trans_b)
        function = function_of(config)
        for i, ((m, n, k), (alpha, beta)) in enumerate(product(SHAPES, FACTORS)):
            pad = PAD * (i // 2 % 2)
            worst = check(config, function, m, n, k, alpha, beta, pad)
            case = f"{title(config)} m={m} n={n} k={k} α={alpha} β={beta} pad={pad}"
            right = worst <= 1  # so that NaN fails
            print(f"{'ok  ' if right else 'FAIL'} {case}: {worst:.2g} of the bound", flush=True)
            if not right:
                failed.append(case)
    return failed


def compare(config: nvrtc.Config, a: Any, b: Any) -> dict[str, Any]:
    """TFLOP/s of the kernel and of cuBLAS at SIZE³, run in turns; medians of REPEATS."""
    function, stream = function_of(config), cupy.cuda.get_current_stream()
    c = cupy.empty_like(a)
    op_a, op_b = a.T if config.trans_a else a, b.T if config.trans_b else b

    def ours() -> None:
        pointers = a.data.ptr, SIZE, b.data.ptr, SIZE, 0, c.data.ptr, SIZE
        nvrtc.launch(function, config, SIZE, SIZE, SIZE, 1, *pointers, stream)

    def cublas() -> None:
        cupy.matmul(op_a, op_b, out=c)

    contestants = {config.kernel: ours, "cublas": cublas}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(REPEATS + 1):  # the first warms up
        for name, run in contestants.items():
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            run()
            stop.record()
            stop.synchronize()
            if repeat:
                seconds[name].append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    tflops = {name: 2 * SIZE**3 / median(times) / 1e12 for name, times in seconds.items()}
    ratio = tflops[config.kernel] / tflops["cublas"]
    print(
        f"{title(config)} {SIZE}³: {tflops[config.kernel]:.1f} TFLOP/s, cuBLAS {tflops['cublas']:.1f}, "
        f"ratio {ratio:.2f}",
        flush=True,
    )
    return {"config": asdict(config), "size": SIZE, "tflops": tflops, "ratio": ratio, "seconds": seconds}


def timing() -> list[dict[str, Any]]:
    """`compare` on random data for each floating-point type and transposition."""
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    rng, rows = np.random.default_rng(0), []
    for dtype in (np.float32, np.float64):
        a, b = (cupy.asarray(rng.random((SIZE, SIZE), dtype) - dtype(0.5)) for _ in range(2))
        for trans_a, trans_b in product((False, True), repeat=2):
            rows.append(compare(nvrtc.tiled(np.dtype(dtype).name, trans_a, trans_b), a, b))
    return rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--time", "timed", is_flag=True, help="Measure as well, against cuBLAS.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write what was found here.")
def main(timed: bool, path: str | None) -> None:
    """Check every shipped kernel at ragged shapes; exit 1 where a result is wrong."""
    failed = correctness()
    report: dict[str, Any] = {"failed": failed, "timing": timing() if timed else []}
    report["device"] = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(f"{len(failed)} failed")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
