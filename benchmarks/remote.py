"""The engine against the store's own client, on a real S3 server with 20 ms of latency and 1 % errors.

    python benchmarks/remote.py [--json FILE]

All move the same chunks with as many requests at a time through the same proxy, in turns: the client
(obstore, in threads) gets every chunk of A and B into memory once and puts as many as C has; the engine
multiplies; and the engine does all of that but multiply. Server, proxy and engine share the cores of one
machine: where BLAS takes those of the server, the last tells what its way from and to the store is worth.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import s3
from engine import git

from ooc_gemm.storage.read import addresses

SHAPES = {"reads": (16, 16, 1 << 25), "writes": (8192, 16384, 16), "both": (4096, 4096, 2048)}
"""m, n, k. The first two have at most four operations a byte, so that the store is the limit; with 16 and
more (64×64×2097152) BLAS takes a good part of the cores that it shares with the server. Each takes seconds,
so that the round trips of opening and finishing count little."""
CHUNK_BYTES = 4 << 20
LATENCY, ERRORS = 0.02, 0.01


@contextmanager
def proxy(port, latency, errors):
    """Run a proxy, and yield its port and what it has seen."""
    command = [sys.executable, s3.__file__, str(port), str(latency), str(errors)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    seen = {}
    try:
        yield int(process.stdout.readline()), seen
    finally:
        seen |= json.loads(process.communicate("")[0])


def make(url, name):
    """Write an array in chunks of CHUNK_BYTES."""
    import ooc_gemm

    m, n, k = SHAPES[name]
    for matrix, shape in (("a", (m, k)), ("b", (k, n))):
        side = min(*shape, 1024)
        rows, cols = (min(extent, CHUNK_BYTES // 4 // side) if extent != side else side for extent in shape)
        ooc_gemm.random(f"{url}/{name}/{matrix}", shape, chunks=(rows, cols))


def still():
    """Return a CPU device that does not multiply."""
    from ooc_gemm.devices.cpu.device import CPU
    from ooc_gemm.devices.cpu.session import CPUSession

    class StillSession(CPUSession):
        def _multiply(self, *args):
            pass

    class Still(CPU):
        def open(self, *args):
            return StillSession(self, *args)

    return Still()


def moving(trace):
    """Return the seconds from the first request of data to the last chunk stored, without opening, planning
    and finishing."""
    events = [e for e in json.loads(Path(trace).read_text())["traceEvents"] if e["name"] in ("read", "write")]
    return (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)) / 1e6


def client_seconds(url, sizes, c_chunks, c_bytes, readers, writers):
    """Time the store's own client, which gets all chunks and then puts all."""
    import obstore

    from ooc_gemm.storage.io import client

    store, prefix = client.connect(url, 60.0)
    data = np.random.default_rng(0).integers(0, 255, c_bytes, dtype=np.uint8)

    def get(key):
        into = np.empty(sizes[key], np.uint8)
        into[:] = np.frombuffer(
            obstore.get_range(store, f"{prefix}/{key}", start=0, length=sizes[key]), np.uint8
        )

    def put(number):
        obstore.put(store, f"{prefix}/client/c/{number}", data, use_multipart=False)

    start = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(get, sizes))
    read = time.perf_counter() - start
    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(put, range(c_chunks)))
    return read, time.perf_counter() - start - read


def compare(name, url, rounds):
    import ooc_gemm

    m, n, k = SHAPES[name]
    paths = [f"{url}/{name}/{matrix}" for matrix in "abc"]
    a, b, c = paths
    objects = addresses.objects_at(f"{url}/{name}")
    sizes = {key: size for key, (size, *_) in objects.list() if key[:4] in ("a/c/", "b/c/")}
    side = min(m, 1024)
    trace = os.path.join(tempfile.gettempdir(), f"remote-{os.getpid()}.json")
    options: dict[str, Any] = {"memory_limit": "4GiB", "chunks": (side, side), "force": True, "trace": trace}
    found = defaultdict(list)
    for _ in range(rounds):
        found["still"].append(ooc_gemm.multiply(a, b, c, device=still(), **options).seconds)
        found["still_moving"].append(moving(options["trace"]))
        result = ooc_gemm.multiply(a, b, c, device="cpu", **options)
        found["engine"].append(result.seconds)
        found["engine_moving"].append(moving(options["trace"]))
        plan = result.plan
        count = (m // side) * (n // side)
        read, write = client_seconds(
            f"{url}/{name}", sizes, count, 4 * side * side, plan.readers, plan.writers
        )
        found["client"].append(read + write)
        found["client_read"].append(read)
        found["client_write"].append(write)
        assert result.bytes_read == plan.bytes_read >= sum(sizes.values())
        assert result.bytes_written == plan.bytes_written
    moved = result.bytes_read + result.bytes_written
    assert ooc_gemm.verify(a, b, c).ok
    os.unlink(trace)
    engine, client, alone = (median(found[name]) for name in ("engine", "client", "still"))
    return {
        "shape": [m, n, k],
        "bytes": moved,
        "requests_at_a_time": [plan.readers, plan.writers],
        "engine_seconds": engine,
        "engine_without_blas_seconds": alone,
        "client_seconds": client,
        "client_read_bytes_per_second": result.bytes_read / median(found["client_read"]),
        "client_write_bytes_per_second": result.bytes_written / median(found["client_write"]),
        "blas_seconds": result.stage_seconds["compute"],
        "engine_bytes_per_second": moved / engine,
        "client_bytes_per_second": moved / client,
        "ratio": client / engine,
        "ratio_without_blas": client / alone,
        "ratio_moving": client / median(found["engine_moving"]),
        "ratio_moving_without_blas": client / median(found["still_moving"]),
        "rounds": {key: [round(one, 3) for one in value] for key, value in found.items()},
        "peak_host_bytes": result.peak_host_bytes,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    args = parser.parse_args()
    if why := s3.missing():
        sys.exit(f"this benchmark {why}")

    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    conditions = {"slow and failing": (LATENCY, ERRORS), "as it is": (0.0, 0.0)}
    results = {label: {} for label in conditions}
    for name in args.shapes:  # each with a server of its own, which keeps what is deleted
        with tempfile.TemporaryDirectory(dir=shm) as folder, s3.server(Path(folder) / "s3") as port:
            url = f"s3://{s3.BUCKET}"
            os.environ.update(s3.environment(port))
            make(url, name)
            for label, (latency, errors) in conditions.items():
                with proxy(port, latency, errors) as (between, seen):
                    os.environ.update(s3.environment(between))
                    found = compare(name, url, args.rounds if latency else 1)
                results[label][name] = found | {"proxy": seen}
    titles = f"{'requests':>10}{'client':>9}{'engine':>9}{'ratio':>7}{'moving':>8}"
    titles += f"{'no BLAS':>10}{'ratio':>7}{'moving':>8}"
    print(f"{'':18}{'m×n×k':>18}{'MiB':>6}{titles}")
    for label, rows in results.items():
        for row in rows.values():
            shape = "×".join(map(str, row["shape"]))
            at_once = "+".join(map(str, row["requests_at_a_time"]))
            print(
                f"{label:18}{shape:>18}{row['bytes'] >> 20:>6}{at_once:>10}"
                f"{row['client_seconds']:>7.2f} s{row['engine_seconds']:>7.2f} s{row['ratio']:>7.2f}"
                f"{row['ratio_moving']:>8.2f}{row['engine_without_blas_seconds']:>8.2f} s"
                f"{row['ratio_without_blas']:>7.2f}{row['ratio_moving_without_blas']:>8.2f}"
            )
    if args.json:
        about = {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "server": "SeaweedFS",
            "latency_seconds": LATENCY,
            "errors": ERRORS,
            "date": time.strftime("%Y-%m-%d"),
            "commit": git("rev-parse", "--short", "HEAD"),
            "load_average": os.getloadavg(),
        }
        args.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
