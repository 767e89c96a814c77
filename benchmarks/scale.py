"""What the planner says of products too large to try: prints docs/scale.md.

python benchmarks/scale.py > docs/scale.md
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from ooc_gemm.devices.cuda.device import CUDA
from ooc_gemm.devices.cuda.rates import panel_depth
from ooc_gemm.engine.ports import Arithmetic, Limits
from ooc_gemm.planning.machine import Rates
from ooc_gemm.planning.plan import Plan
from ooc_gemm.planning.problem import Matrix, MiB
from ooc_gemm.planning.traffic import lower_bound_bytes
from ooc_gemm.run.prepare import prepare
from ooc_gemm.run.request import Operand, Request
from ooc_gemm.storage.read.source import Opened, Source

RESULTS = Path(__file__).parent / "results" / "kernels_h200.json"
GB, GiB = 10**9, 1 << 30
HOST = 64 * GiB
DEVICES = (24, 80, 141)
"""Device memory in GB."""
BANDWIDTH = 4.8e12
"""Bytes per second of device memory."""
DISKS = (3.4, 24.0)
"""Rates of disks in GB/s. Reads and writes take turns."""


PAGE = """# At scale, on paper

What `ooc_gemm.plan` says of products too large to try here; `python benchmarks/scale.py` prints this page.
One GPU as fast as an H200 with so much memory, 64 GiB of host memory, inputs in raw chunks of 4096², reads
and writes one after the other. The kernel is the one that `--kernel auto` takes, at the rate that it reaches
on an H200 with the largest matrices that were tried (benchmarks/results/kernels_h200.json). The bound is the
least that any schedule moves between store and a fast memory of the device's size; host memory that keeps
chunks can pass below it.
"""
CLUSTERS = (8, 64, 512)
"""Numbers of GPUs, eight in each node."""
NETWORKS = (12.0, 2.0)
"""GB/s that a node gets from the others, and gives to them."""
NODE, NODE_HOST, STORE = 8, 512 * GiB, 100e9
"""GPUs of a node, its host memory, and bytes a second of the store that all nodes share."""
CLUSTER_PAGE = """## 400,000³ float16 on a cluster

Nodes of eight such GPUs with 141 GB each, a worker a node (`--device cuda:all`), 512 GiB of host memory a
node, and a store that gives all nodes together 100 GB/s. The network gives each node what the table says: 12
GB/s are 100 Gbit/s, and 2 GB/s are more than the event loop of one process has moved over TCP where it was
tried (1 GB/s on a busy core), so the rows with 12 GB/s count on a faster transport. Workers of a team make as
many blocks at the same time, read each chunk once between them, and hand it to each other. The bound is that
of one fast memory as large as all GPUs together.

| GPUs | network | team | blocks of C | read | handed over | written | read ÷ bound | most of it | seconds |
|---|---|---|---|---|---|---|---|---|---|"""
HEAD = """| device | disk | blocks of C | host cache | read | written | read ÷ bound | most of it | hours |
|---|---|---|---|---|---|---|---|---|"""


@cache
def measured(kernel: str, dtype: str) -> float:
    """Return the operations per second of a kernel on an H200, for the largest square matrices that were
    tried."""
    rows = [
        row
        for row in json.loads(RESULTS.read_text("utf-8"))["rows"]
        if (row["kernel"], row["dtype"]) == (kernel, dtype)
        and row["m"] == row["n"] == row["k"]
        and row["correct"]
    ]
    return 1e12 * max(rows, key=lambda row: row["m"])["tflops"]


class Paper(CUDA):
    """An H200 that does not exist here. Plans are made for it: it chooses kernels and has the limits of a
    GPU, but nothing runs on it."""

    name, model = "cuda", "an H200 on paper"

    def __init__(self, memory: int, disk: float):
        """`memory`: device memory in bytes. `disk`: bytes per second, read or written."""
        self.capability, self.multiprocessors, self.free, self._disk = 90, 132, memory, disk

    def rates(self, arithmetic: Arithmetic) -> Rates:
        flops = measured(arithmetic.kernel, arithmetic.panel.name)
        thin = panel_depth(flops, arithmetic, BANDWIDTH)
        return Rates(
            flops, self._disk, self._disk, 54e9, 52e9, shared=False, piece_seconds=28e-6, turns=1.0, thin=thin
        )


class PaperCluster(Paper):
    """A cluster of nodes with NODE such GPUs and one worker each."""

    def __init__(self, memory: int, nodes: int, network: float):
        super().__init__(memory, STORE)
        self._nodes, self._network = nodes, network

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        one = super().limits(arithmetic, device_memory_limit)
        return replace(
            one, host_baseline=2500 * MiB, readers=24, writers=16, weights=(1,) * NODE, workers=self._nodes
        )

    def rates(self, arithmetic: Arithmetic) -> Rates:
        one = super().rates(arithmetic)
        return replace(
            one,
            flops=NODE * one.flops,
            upload=3 * one.upload,
            download=3 * one.download,
            devices=NODE,
            at_once=3,
            network=self._network,
        )


@dataclass(frozen=True)
class Job:
    """A product: what A and B hold, and how many rows and columns they have."""

    title: str
    dtype: str
    shape: tuple[int, int]
    out_dtype: str | None = None
    symmetric: bool = False
    """The product is A·Aᵀ, as of `gram`."""

    def plan(self, device: CUDA, host: int, memory: int) -> Plan:
        """Plan the product with the code that plans a run, for arrays that are not stored anywhere."""
        kind = np.dtype(self.dtype)
        matrix = Matrix(*self.shape, kind.itemsize, 4096, 4096)
        a, b = (Opened(Source(name, kind, matrix), matrix) for name in "AB")
        right = Operand(b, transpose=self.symmetric)
        request = Request(
            Operand(a),
            right,
            device=device,
            memory_limit=host,
            device_memory_limit=memory,
            out_dtype=self.out_dtype,
            symmetric=self.symmetric,
            writes=False,
        )
        return prepare(request.check()).plan  # as `multiply` and `gram` have it


def jobs() -> list[Job]:
    """Return the jobs: 400k × 400k float16, and the relationship matrix of 100,000 people × 1,000,000 markers
    in int8."""
    return [
        Job("400,000³ float16, C in float32", "float16", (400_000, 400_000), "float32"),
        Job("gram of 100,000 × 1,000,000 int8, C in int32", "int8", (100_000, 1_000_000), symmetric=True),
        Job("gram of 100,000 × 100,000 int8, C in int32", "int8", (100_000, 100_000), symmetric=True),
    ]


def plans() -> Iterator[tuple[Job, int, float, Plan]]:
    """Yield the plan of each job for each device and each disk."""
    for job in jobs():
        for device in DEVICES:
            for disk in DISKS:
                yield job, device, disk, job.plan(Paper(device * GB, disk * GB), HOST, device * GB)


def clusters() -> Iterator[tuple[int, float, Plan]]:
    """Yield the plan of the first job for each cluster and each network. Its rates are those of a node."""
    memory = DEVICES[-1] * GB
    for gpus in CLUSTERS:
        for network in NETWORKS:
            cluster = PaperCluster(memory, gpus // NODE, network * GB)
            yield gpus, network, jobs()[0].plan(cluster, NODE_HOST, memory)


def size(nbytes: int) -> str:
    return f"{nbytes / 1e12:.2f} TB" if nbytes >= 1e12 else f"{nbytes / 1e9:.0f} GB"


def main() -> None:
    """Print the page."""
    print(PAGE)
    last = ""
    for job, device, disk, plan in plans():
        if job.title != last:
            last = job.title
            print(f"## {job.title}\n\nKernel {plan.problem.kernel}.\n\n{HEAD}")
        stage = max(plan.stage_seconds, key=lambda name: plan.stage_seconds[name])
        cache = plan.cache_slots * plan.slot_bytes
        print(
            f"| {device} GB | {disk:g} GB/s | {plan.block_count} of {plan.bm}×{plan.bn} | "
            f"{f'{cache / GiB:.0f} GiB' if cache else '–'} | "
            f"{size(plan.bytes_read)} | {size(plan.bytes_written)} | "
            f"{plan.bytes_read / plan.lower_bound_bytes:.2f} | {stage} | "
            f"{plan.predicted_seconds / 3600:.3f} |"
        )
        if (device, disk) == (DEVICES[-1], DISKS[-1]):
            print()
    print(CLUSTER_PAGE)
    for gpus, network, plan in clusters():
        stage = max(plan.stage_seconds, key=lambda name: plan.stage_seconds[name])
        bound = lower_bound_bytes(plan.problem, gpus * DEVICES[-1] * GB)
        team = "×".join(map(str, plan.team)) if plan.bytes_exchanged else "–"
        print(
            f"| {gpus} | {network:g} GB/s | {team} | {plan.block_count} of {plan.bm}×{plan.bn} | "
            f"{size(plan.bytes_read)} | {size(plan.bytes_exchanged) if plan.bytes_exchanged else '–'} | "
            f"{size(plan.bytes_written)} | {plan.bytes_read / bound:.2f} | {stage} | "
            f"{plan.predicted_seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
