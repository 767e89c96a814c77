"""Plans of products too large to try: docs/scale.md says what they are."""

import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import scale  # noqa: E402


def test_the_page_is_what_the_planner_says():
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "scale.py"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == (ROOT / "docs" / "scale.md").read_text("utf-8")


def rate(plan):
    """Of the kernel that the plan names, for panels as wide as the plan's."""
    kernel, panel = plan.problem.kernel.split(":")[0], {8: "float64", 2: "float16", 1: "int8"}
    return scale.measured(kernel, panel[plan.problem.panel_itemsize])


def test_plans_keep_their_limits_and_move_little():
    seen = 0
    for job, device, disk, plan in scale.plans():
        p = plan.problem
        inputs = p.a.stored_bytes + (0 if p.symmetric else p.b.stored_bytes)
        assert plan.host_bytes <= scale.HOST
        assert plan.device_bytes <= device * scale.GB
        assert p.symmetric == ("gram" in job.title)
        assert inputs <= plan.bytes_read
        # Of 8-bit integers whose panels are float64 a device holds an eighth.
        assert plan.bytes_read <= 1.5 * plan.lower_bound_bytes * p.panel_itemsize / p.a.itemsize
        assert plan.bytes_written == p.m * p.n * 4 or plan.bytes_written < 1.05 * p.m * p.n * 4
        moving = (plan.bytes_read + plan.bytes_written) / (disk * scale.GB)
        assert plan.predicted_seconds >= max(moving, plan.flops / rate(plan)) * 0.99
        seen += 1
    assert seen == len(scale.jobs()) * len(scale.DEVICES) * len(scale.DISKS)


def test_every_kernel_is_one_that_auto_takes_there():
    """The page once predicted with the int8 kernel where sums pass int32, which `auto` refuses."""
    kernels = {}
    for job, *_, plan in scale.plans():
        kernel = kernels.setdefault(job.title, plan.problem.kernel.split(":")[0])
        assert plan.problem.kernel.startswith(f"{kernel}:"), job.title
        if np.dtype(job.dtype).kind == "i":
            assert (kernel == "int8") == (plan.problem.k * 128**2 < 2**31), job.title
    assert set(kernels.values()) == {"fp16", "int8", "cublas"}
