"""Runs of many chunks in an object store, and runs that are interrupted there."""

import pytest
from shelf import put, slowly, wait_for

import ooc_gemm


def long_run(shelf, rng):
    """A, B, and how to make C in many chunks, slowly."""
    a, b = rng.integers(-9, 9, (400, 100)).astype("f4"), rng.integers(-9, 9, (100, 400)).astype("f4")
    put(f"{shelf}/a", a)
    put(f"{shelf}/b", b)
    with pytest.raises(ooc_gemm.BudgetError) as small:
        ooc_gemm.plan(f"{shelf}/a", f"{shelf}/b", memory_limit=1, device="cpu", chunks=(50, 50))
    limit = str(small.value.minimum_memory_limit + 100_000)
    args = ("multiply", f"{shelf}/a", f"{shelf}/b", f"{shelf}/c", "-d", "cpu", "-M", limit)
    return (*args, "--chunks", "50,50"), a.astype("f8") @ b


def puts(proxy):
    return sum(method == "PUT" and "/c/c/" in path for method, path in proxy.seen)


def journal_puts(proxy):
    return sum(method == "PUT" and path.endswith("ooc-gemm.journal") for method, path in proxy.seen)


def interrupted(args, proxy, sent, saved=3):
    """A run that ends when some chunks are done, and the journal was put so many times."""
    proxy.latency = 0.03
    proxy.seen.clear()
    process = slowly(*args)
    wait_for(lambda: process.poll() is not None or (puts(proxy) >= 20 and journal_puts(proxy) >= saved))
    assert process.poll() is None, process.communicate()
    process.send_signal(sent)
    process.communicate(timeout=200)
    proxy.latency = 0
    proxy.seen.clear()
