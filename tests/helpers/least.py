"""The smallest memory limit, as a refusal names it."""

import pytest

import ooc_gemm


def least_limit(run):
    """What the refusal of `run(memory_limit=1)` names; it must do, and what comes of it is the second."""
    with pytest.raises(ooc_gemm.BudgetError) as refused:
        run(memory_limit=1)
    least = refused.value.minimum_memory_limit
    with pytest.raises(ooc_gemm.BudgetError) as again:
        run(memory_limit=least // 2)
    assert again.value.minimum_memory_limit == least
    return least, run(memory_limit=least)
