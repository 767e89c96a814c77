"""How far a run says that it is."""

import itertools

import numpy as np
import pytest
from faults import with_blocks

import ooc_gemm

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("symmetric", [False, True])
def test_it_is_the_share_of_all_operations(monkeypatch, symmetric):
    """Blocks at the edges are smaller, and those on a diagonal take half as many."""
    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", with_blocks(100, 100, 64))
    a, said = RNG.standard_normal((230, 150)), []

    def progress(fraction, plan, trace):
        said.append(fraction)

    options = {"chunks": (50, 50), "device": "cpu", "progress": progress}
    call = ooc_gemm.gram(a, **options) if symmetric else ooc_gemm.multiply(a, a.T.copy(), **options)
    plan = call.plan
    assert (plan.block_count, plan.panel_count) == (6 if symmetric else 9, 3)
    each = [block.flops(stop - start) for block in plan.blocks() for start, stop in plan.panels()]
    steps = [made / plan.flops for made in itertools.accumulate(each)]
    assert said[-1] == steps[-1] == 1
    before = {fraction for fraction in said if 0 < fraction < 0.99999}  # C is committed at the end
    assert before <= set(steps)
    assert len(before) > 4
