"""Plans of products too large to try: docs/scale.md says what they are."""

import functools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import scale  # noqa: E402

from ooc_gemm.planning.traffic import lower_bound_bytes  # noqa: E402
from ooc_gemm.run import prepare  # noqa: E402

pytestmark = pytest.mark.slow  # all these plans take ten seconds


@functools.cache
def plans():
    return list(scale.plans())


@functools.cache
def clusters():
    return list(scale.clusters())


def bound(gpus, plan):
    """The least that a memory as large as those of all GPUs reads and writes."""
    return lower_bound_bytes(plan.problem, gpus * scale.DEVICES[-1] * scale.GB)


def rows(first):
    """The cells of the page's rows whose first cell is like this."""
    lines = (ROOT / "docs" / "scale.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in cells if re.fullmatch(first, row[0])]


def test_the_page_says_what_the_planner_says():
    """Its numbers, as exactly as they are written."""
    for row, (job, device, disk, plan) in zip(rows(r"\d+ GB"), plans(), strict=True):
        assert row[:2] == [f"{device} GB", f"{disk:g} GB/s"]
        assert row[2].startswith(f"{plan.block_count} of "), job.title
        assert float(row[6]) == pytest.approx(plan.bytes_read / plan.lower_bound_bytes, abs=0.006), job.title
        assert float(row[8]) == pytest.approx(plan.predicted_seconds / 3600, abs=0.0006), job.title
    for row, (gpus, network, plan) in zip(rows(r"\d+"), clusters(), strict=True):
        assert row[:2] == [str(gpus), f"{network:g} GB/s"]
        assert row[2] == ("×".join(map(str, plan.team)) if plan.bytes_exchanged else "–")
        assert row[3].startswith(f"{plan.block_count} of ")
        assert float(row[7]) == pytest.approx(plan.bytes_read / bound(gpus, plan), abs=0.006)
        assert float(row[9]) == pytest.approx(plan.predicted_seconds, abs=0.6)


def rate(plan):
    """Of the kernel that the plan names, for panels as wide as the plan's."""
    kernel, panel = plan.problem.kernel.split(":")[0], {8: "float64", 2: "float16", 1: "int8"}
    return scale.measured(kernel, panel[plan.problem.panel_itemsize])


def test_plans_keep_their_limits_and_move_little():
    seen = 0
    for job, device, disk, plan in plans():
        p = plan.problem
        inputs = p.a.stored_bytes + (0 if p.symmetric else p.b.stored_bytes)
        assert plan.host_bytes <= scale.HOST
        assert plan.device_bytes <= device * scale.GB
        assert p.symmetric == ("gram" in job.title)
        assert inputs <= plan.bytes_read
        # Of sums in int64 a device holds half as many.
        assert plan.bytes_read <= 1.5 * plan.lower_bound_bytes * p.block_itemsize / 4
        assert plan.bytes_written == p.m * p.n * 4 or plan.bytes_written < 1.05 * p.m * p.n * 4
        moving = (plan.bytes_read + plan.bytes_written) / (disk * scale.GB)
        assert plan.predicted_seconds >= max(moving, plan.flops / rate(plan)) * 0.99
        seen += 1
    assert seen == len(scale.jobs()) * len(scale.DEVICES) * len(scale.DISKS)


def test_a_cluster_reads_little_where_its_network_allows(monkeypatch):
    """With the faster network no more than 1.2 times the bound; with the slower one no more than workers that
    hand nothing to each other."""
    plans = clusters()
    monkeypatch.setattr("ooc_gemm.planning.search.shapes", lambda p, workers: [])
    prepare._remembered.cache_clear()
    for (gpus, network, plan), (*_, alone) in zip(plans, scale.clusters(), strict=True):
        most = 1.2 * bound(gpus, plan) if network == max(scale.NETWORKS) else alone.bytes_read
        assert plan.bytes_read <= most, (gpus, network)
        assert plan.predicted_seconds <= alone.predicted_seconds
        assert plan.bytes_read >= plan.problem.a.stored_bytes + plan.problem.b.stored_bytes
        assert (plan.bytes_exchanged > 0) == (plan.team != alone.team)
        assert plan.host_bytes <= scale.NODE_HOST


def test_every_kernel_is_one_that_auto_takes_there():
    """Of 8-bit integers also where sums pass int32."""
    kernels = {}
    for job, *_, plan in plans():
        kernel = kernels.setdefault(job.title, plan.problem.kernel.split(":")[0])
        assert plan.problem.kernel.startswith(f"{kernel}:"), job.title
        if np.dtype(job.dtype).kind == "i":
            assert kernel == "int8", job.title
    assert set(kernels.values()) == {"fp16", "int8"}
