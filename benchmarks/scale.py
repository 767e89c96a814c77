"""What the planner says of products too large to try: prints docs/scale.md.

python benchmarks/scale.py > docs/scale.md
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ooc_gemm.plan import Plan, lower_bound_bytes
from ooc_gemm.planner import make_plan
from ooc_gemm.problem import Budget, Matrix, MiB, Problem, Rates

GB, GiB = 10**9, 1 << 30
HOST = 64 * GiB
DEVICES = (24, 80, 141)
"""GB of device memory."""
DISKS = (3.4, 24.0)
"""GB/s read, and written, one after the other."""


PAGE = """# At scale, on paper

What the planner says of products too large to try here; `python benchmarks/scale.py` prints this page. One
GPU as fast as an H200 with so much memory, 64 GiB of host memory, inputs in raw chunks of 4096², reads and
writes one after the other. The bound is the least that any schedule moves between store and a fast memory of
the device's size; host memory that keeps chunks can pass below it.
"""
CLUSTERS = (8, 64, 512)
"""GPUs, eight to a node."""
NODE, NODE_HOST, STORE = 8, 512 * GiB, 100e9
"""GPUs of a node, its host memory, and bytes a second of the store that all nodes share."""
CLUSTER_PAGE = """## 400,000³ float16 on a cluster

Nodes of eight such GPUs with 141 GB each, a worker a node (`--device cuda:all`), 512 GiB of host memory a
node, and a store that gives all nodes together 100 GB/s. Superblocks are blocks of the plan; a worker makes
one at a time, and reads what it needs itself. The bound is that of one fast memory as large as all GPUs
together, which only workers that hand on chunks to each other could reach.

| GPUs | superblocks | read | written | read ÷ bound of all memory | most of it | seconds |
|---|---|---|---|---|---|---|"""
HEAD = """| device | disk | blocks of C | host cache | read | written | read ÷ bound | most of it | hours |
|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Job:
    """A product, and what multiplies it on an H200 (benchmarks/results/kernels_h200.json)."""

    title: str
    problem: Problem
    flops: float


def jobs() -> list[Job]:
    """400k × 400k float16, and the relationship matrix of 100,000 people × 1,000,000 markers in int8."""
    side, people, markers = 400_000, 100_000, 1_000_000
    half = Matrix(side, side, 2, 4096, 4096)
    genotypes = Matrix(people, markers, 1, 4096, 4096)
    return [
        Job(
            "400,000³ float16, C in float32",
            Problem(side, side, side, half, half, Matrix(side, side, 4, 1, 1), 2, 4, pitch=8),
            745e12,
        ),
        Job(
            "gram of 100,000 × 1,000,000 int8, C in int32",
            Problem(
                people,
                people,
                markers,
                genotypes,
                replace(genotypes, transposed=True),
                Matrix(people, people, 4, 1, 1),
                1,
                4,
                pitch=16,
                symmetric=True,
            ),
            1500e12,
        ),
    ]


def plans() -> Iterator[tuple[Job, int, float, Plan]]:
    """Each job with each device and each disk."""
    for job in jobs():
        for device in DEVICES:
            for disk in DISKS:
                budget = Budget(HOST, 600 * MiB, device * GB, 560 * MiB, readers=16, writers=8)
                rates = Rates(
                    job.flops, disk * GB, disk * GB, 54e9, 52e9, shared=False, piece_seconds=28e-6, turns=1.0
                )
                yield job, device, disk, make_plan(job.problem, budget, rates)


def clusters() -> Iterator[tuple[int, Plan]]:
    """The first job on clusters; rates are a node's."""
    job = jobs()[0]
    for gpus in CLUSTERS:
        nodes = gpus // NODE
        budget = Budget(
            NODE_HOST, 2500 * MiB, DEVICES[-1] * GB, 560 * MiB,
            readers=24, writers=16, weights=(1,) * NODE, workers=nodes,
        )  # fmt: skip
        rates = Rates(
            NODE * job.flops, STORE / nodes, STORE / nodes, 3 * 54e9, 3 * 52e9,
            shared=False, piece_seconds=28e-6, turns=1.0, devices=NODE, at_once=3,
        )  # fmt: skip
        yield gpus, make_plan(job.problem, budget, rates)


def size(nbytes: int) -> str:
    return f"{nbytes / 1e12:.2f} TB" if nbytes >= 1e12 else f"{nbytes / 1e9:.0f} GB"


def main() -> None:
    """Print the page."""
    print(PAGE)
    last = ""
    for job, device, disk, plan in plans():
        if job.title != last:
            last = job.title
            print(f"## {job.title}\n\n{HEAD}")
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
    for gpus, plan in clusters():
        stage = max(plan.stage_seconds, key=lambda name: plan.stage_seconds[name])
        bound = lower_bound_bytes(plan.problem, gpus * DEVICES[-1] * GB)
        print(
            f"| {gpus} | {plan.block_count} of {plan.bm}×{plan.bn} | {size(plan.bytes_read)} | "
            f"{size(plan.bytes_written)} | {plan.bytes_read / bound:.2f} | {stage} | "
            f"{plan.predicted_seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
