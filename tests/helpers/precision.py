"""Paths of products that are judged on the device: fp16x3 and ozaki2."""

import pytest

from ooc_gemm.cuda_kernels import ozaki, scales, split


def always(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """fp16x3 takes one path for all finite elements, also for the few terms of small tests."""
    share, terms = (1e30, 0.0) if path == "split" else (-1.0, 1e30)
    monkeypatch.setattr(split, "LOW_SHARE", share)
    monkeypatch.setattr(split, "LEAST_TERMS", terms)
    monkeypatch.setattr(split, "LEAST_DENSITY", 0.0)


def ozaki_always(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """ozaki2 takes one path for all finite elements, also at small shapes: `residues` or `fallback`.
    `chosen`: it is judged which is accurate enough."""
    monkeypatch.setattr(ozaki, "residues_pay", lambda m, n, k: True)
    if path != "chosen":
        monkeypatch.setattr(scales, "TOLERANCE", {"residues": 1e30, "fallback": 0.0}[path])
