"""Plans of products too large to try: docs/scale.md says what they are."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import scale  # noqa: E402


def test_the_page_is_what_the_planner_says():
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "scale.py"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == (ROOT / "docs" / "scale.md").read_text("utf-8")


def test_plans_keep_their_limits_and_move_little():
    seen = 0
    for job, device, disk, plan in scale.plans():
        p = job.problem
        inputs = p.a.stored_bytes + (0 if p.symmetric else p.b.stored_bytes)
        assert plan.host_bytes <= scale.HOST
        assert plan.device_bytes <= device * scale.GB
        assert inputs <= plan.bytes_read <= 1.5 * plan.lower_bound_bytes
        assert plan.bytes_written == p.m * p.n * 4 or plan.bytes_written < 1.05 * p.m * p.n * 4
        moving = (plan.bytes_read + plan.bytes_written) / (disk * scale.GB)
        assert plan.predicted_seconds >= max(moving, p.flops / job.flops) * 0.99
        seen += 1
    assert seen == len(scale.jobs()) * len(scale.DEVICES) * len(scale.DISKS)
