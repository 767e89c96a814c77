"""The programs that `engine.py` runs, each in a process of its own: `python peers.py NAME '{"argument":
value}'`.

The contestants and the helpers that make and check data. The last line on standard output is one JSON
object. A contestant imports all it needs first, then times its job, from opening the inputs to the
stored result, as `seconds`; the whole process is timed by `engine.py`.
"""

import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-5
"""Largest relative Frobenius error of the sampled rows."""
SAMPLED_ROWS = 64
REPORTED = ("kernel", "tflops", "stage_seconds", "bytes_read", "bytes_written", "bytes_uploaded",
            "bytes_downloaded", "peak_device_bytes")  # fmt: skip
"""Fields of ooc-gemm's result that the report keeps."""

Result = dict[str, Any]


@contextmanager
def timed() -> Iterator[Result]:
    """Store the seconds of the context's body, and the peak memory of the process, in the dictionary that is
    yielded."""
    gc.collect()
    result: Result = {}
    start = time.perf_counter()
    yield result
    result["seconds"] = time.perf_counter() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    result["peak_host_bytes"] = int(status["VmHWM"].split()[0]) * 1024


def create(path: str, shape: tuple[int, int], chunks: tuple[int, int]) -> Any:
    """Create an uncompressed zarr v3 array of float32."""
    import zarr

    return zarr.create_array(
        path, shape=shape, chunks=chunks, dtype="float32", compressors=None, zarr_format=3, fill_value=0
    )


def bands(array: Any) -> list[tuple[int, int]]:
    """Return the range of rows of each row of chunks."""
    rows, step = array.shape[0], array.chunks[0]
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


# Data


def make(path: str, shape: list[int], chunks: list[int], seed: int) -> Result:
    """Write a standard normal array by rows of chunks, of which each core holds one in memory."""
    m, n = shape
    array = create(path, (m, n), (chunks[0], chunks[1]))

    def write(band: tuple[int, int]) -> None:
        start, stop = band
        rng = np.random.default_rng([seed, start])
        array[start:stop] = rng.standard_normal((stop - start, n), dtype=np.float32)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(write, bands(array)))
    return {}


def sample(rows: int) -> Any:
    """Choose sorted rows, one at random from each of equal bands, so that every block of C is checked."""
    edges = np.linspace(0, rows, min(SAMPLED_ROWS, rows) + 1).astype(int)
    return np.random.default_rng(0).integers(edges[:-1], edges[1:])


def reference(a: str, b: str, out: str, gpu: bool = False) -> Result:
    """Compute the sampled rows of A·B in float64, by panels of k, and save them."""
    import zarr

    xp = import_module("cupy") if gpu else np
    x, y = zarr.open_array(a, mode="r"), zarr.open_array(b, mode="r")
    rows = sample(x.shape[0])
    left = np.empty((len(rows), x.shape[1]))
    for start, stop in bands(x):
        inside = (rows >= start) & (rows < stop)
        if inside.any():
            left[inside] = x[start:stop][rows[inside] - start]
    product = xp.zeros((len(rows), y.shape[1]))
    for start, stop in bands(y):
        product += xp.asarray(left[:, start:stop]) @ xp.asarray(y[start:stop]).astype(np.float64)
    np.save(out, product if xp is np else xp.asnumpy(product))
    return {}


def check(c: str, reference: str) -> Result:
    """Check that C is whole, finite, and right in the sampled rows. Every element is read."""
    import zarr

    expected = np.load(reference)
    array = zarr.open_array(c, mode="r")
    if array.shape[1] != expected.shape[1] or array.dtype != np.float32:
        return {"correct": False, "problem": f"C is {array.shape} {array.dtype}"}
    rows = sample(array.shape[0])

    def look(band: tuple[int, int]) -> tuple[bool, float]:
        start, stop = band
        part = array[start:stop]
        inside = (rows >= start) & (rows < stop)
        difference = part[rows[inside] - start] - expected[inside]
        return bool(np.isfinite(part).all()), float(np.square(difference).sum())

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        looks = list(pool.map(look, bands(array)))
    chunks = math.prod(-(-extent // size) for extent, size in zip(array.shape, array.chunks, strict=True))
    missing = chunks - array.nchunks_initialized
    error = math.sqrt(math.fsum(squares for _, squares in looks)) / float(np.linalg.norm(expected))
    finite = all(good for good, _ in looks)
    # Written so that a NaN fails.
    return {
        "error": error if math.isfinite(error) else str(error),
        "finite": finite,
        "missing_chunks": missing,
        "correct": finite and not missing and error < TOLERANCE,
    }


def info(packages: list[str], gpu: bool = False) -> Result:
    """Return versions. The imports also warm the byte code and the page cache."""
    found: Result = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            import_module(package)
            found[package] = version(package.replace("_", "-"))
        except PackageNotFoundError:
            found[package] = getattr(sys.modules[package], "__version__", "checkout")
        except ImportError:
            found[package] = None
    from threadpoolctl import threadpool_info

    found["blas"] = [
        f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}".strip()
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
    if gpu:
        import cupy

        runtime = cupy.cuda.runtime
        found["gpu"] = runtime.getDeviceProperties(0)["name"].decode()
        found["cuda_runtime"], found["cuda_driver"] = runtime.runtimeGetVersion(), runtime.driverGetVersion()
    return found


# Contestants on the CPU


def numpy(a: str, b: str, c: str, chunks: list[int]) -> Result:
    """Load both arrays into memory, multiply by @, and store."""
    import zarr

    with timed() as result:
        x, y = zarr.open_array(a, mode="r")[:], zarr.open_array(b, mode="r")[:]
        product = x @ y
        create(c, product.shape, (chunks[0], chunks[1]))[:] = product
    return result


def numpy_matmul(shape: list[int]) -> Result:
    """Time NumPy's @ alone, on two random matrices."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32)
    with timed() as result:
        x @ y
    return result


def dask(a: str, b: str, c: str) -> Result:
    """Multiply by dask.array: from_zarr, @, to_zarr, on threads."""
    import dask as dask_
    import dask.array as da
    import zarr  # noqa: F401

    with timed() as result, dask_.config.set(scheduler="threads"):
        (da.from_zarr(a) @ da.from_zarr(b)).to_zarr(c, compressors=None)
    return result


def cubed(a: str, b: str, c: str, work_dir: str, allowed_mem: int) -> Result:
    """Multiply by cubed with its default executor (threads) and without compression."""
    import cubed as cubed_
    import cubed.array_api as xp
    import zarr  # noqa: F401

    with timed() as result:
        spec = cubed_.Spec(work_dir=work_dir, allowed_mem=allowed_mem, zarr_compressor=None)
        product = xp.matmul(cubed_.from_zarr(a, spec=spec), cubed_.from_zarr(b, spec=spec))
        cubed_.store(product, create(c, product.shape, product.chunksize))
    return result


# Contestants on the GPU: the imports are not timed, the CUDA context is.


def _load_cuda() -> Any:
    """Return CuPy with its libraries loaded and in the page cache, even after the cache was dropped.

    No context is created, because that belongs to the time."""
    import cupy
    import zarr  # noqa: F401

    import_module("cupy_backends.cuda.libs.cublas")
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    buffer = bytearray(16 << 20)
    for path in sorted(mapped):
        if path.startswith("/") and ".so" in path and Path(path).is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return cupy


def gpu_ooc_gemm(
    a: str, b: str, c: str, host: str, device: str, trace: str | None = None, kernel: str = "auto"
) -> Result:
    """Multiply by ooc-gemm through its Python interface."""
    import pkgutil

    import ooc_gemm

    for module in pkgutil.walk_packages(ooc_gemm.__path__, "ooc_gemm."):
        if module.name not in ("ooc_gemm.dask", "ooc_gemm.__main__"):
            import_module(module.name)
    _load_cuda()
    options: dict[str, Any] = {"trace": trace} if trace else {}
    with timed() as result:
        done = ooc_gemm.multiply(
            a, b, c, memory_limit=host, device="cuda", device_memory_limit=device, kernel=kernel, **options
        )
    plan = {field: getattr(done.plan, field) for field in ("bytes_read", "bytes_written")}
    return {**{field: getattr(done, field) for field in REPORTED}, "plan": plan, **result}


def gpu_cupy(a: str, b: str, c: str, chunks: list[int]) -> Result:
    """Load both arrays into the memory of the GPU, multiply by @, and store."""
    cupy = _load_cuda()
    import zarr

    with timed() as result:
        x, y = (cupy.asarray(zarr.open_array(path, mode="r")[:]) for path in (a, b))
        product = cupy.asnumpy(x @ y)
        create(c, product.shape, (chunks[0], chunks[1]))[:] = product
    return result


def gpu_dask(a: str, b: str, c: str) -> Result:
    """Multiply by dask.array with CuPy blocks."""
    cupy = _load_cuda()
    import dask as dask_
    import dask.array as da

    with timed() as result, dask_.config.set(scheduler="threads"):
        x, y = (da.from_zarr(path).map_blocks(cupy.asarray) for path in (a, b))
        product = (x @ y).map_blocks(cupy.asnumpy, dtype=np.float32, meta=np.empty((0, 0), np.float32))
        product.to_zarr(c, compressors=None)
    return result


def gpu_loop(a: str, b: str, c: str, chunks: list[int], block: int) -> Result:
    """Multiply by a loop as one writes it by hand: a block of C stays on the GPU while the panels stream
    by."""
    cupy = _load_cuda()
    import zarr

    with timed() as result:
        x, y = zarr.open_array(a, mode="r"), zarr.open_array(b, mode="r")
        (m, k), n = x.shape, y.shape[1]
        z = create(c, (m, n), (chunks[0], chunks[1]))
        for i in range(0, m, block):
            for j in range(0, n, block):
                part = cupy.zeros((min(block, m - i), min(block, n - j)), dtype=np.float32)
                for p in range(0, k, block):
                    left = cupy.asarray(x[i : i + block, p : p + block])
                    part += left @ cupy.asarray(y[p : p + block, j : j + block])
                z[i : i + block, j : j + block] = cupy.asnumpy(part)
    return result


def copy(source: str, target: str) -> Result:
    """Copy the files of a directory with a thread for each core."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = []
        for folder, _, files in os.walk(source):
            place = Path(target, os.path.relpath(folder, source))
            place.mkdir(parents=True, exist_ok=True)
            jobs += [pool.submit(shutil.copyfile, Path(folder, file), place / file) for file in files]
        for job in jobs:
            job.result()
    return {}


COMMANDS = {
    command.__name__: command
    for command in (
        make, copy, reference, check, info,
        numpy, numpy_matmul, dask, cubed,
        gpu_ooc_gemm, gpu_cupy, gpu_dask, gpu_loop,
    )
}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]](**json.loads(sys.argv[2]))))
