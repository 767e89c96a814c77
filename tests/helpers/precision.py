"""Paths of the product in three float16 products (fp16x3)."""

import pytest

from ooc_gemm.cuda_kernels import split


def always(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """fp16x3 takes one path for all finite elements, also for the few terms of small tests."""
    share, terms = (1e30, 0.0) if path == "split" else (-1.0, 1e30)
    monkeypatch.setattr(split, "LOW_SHARE", share)
    monkeypatch.setattr(split, "LEAST_TERMS", terms)
    monkeypatch.setattr(split, "LEAST_DENSITY", 0.0)
