"""Memory of this process, as Linux tells it, beside what psutil finds."""

import sys

import psutil
import pytest

from ooc_gemm.support import memory

MiB = 1 << 20
resident_bytes = memory.resident_bytes  # which tests replace (conftest)


def test_the_resident_set_and_free_memory_are_what_psutil_finds():
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, abs=16 * MiB)
    assert memory._available_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.5)


def test_a_little_more_memory_leaves_the_baseline_as_it_is(monkeypatch):
    """It is what plans are made for, and remembered by."""

    def baseline(held, usual=0):
        monkeypatch.setattr(memory, "resident_bytes", lambda: held)
        return memory.baseline_bytes(usual)

    assert baseline(1030 * MiB) == baseline(1080 * MiB) == 1088 * MiB
    assert baseline(100 * MiB) == 112 * MiB
    assert baseline(0) == 0
    assert baseline(100 * MiB, 300 * MiB) == 300 * MiB
    for held in range(1, 3 << 30, 77 * MiB + 1):
        assert held <= baseline(held) <= max(held + 16 * MiB, held * 17 / 16)
    baseline(1000 * MiB)
    growth = memory.Growth()
    baseline(1017 * MiB)
    assert (growth.of(10 * MiB), growth.of(1 << 30)) == (10 * MiB, 32 * MiB)


def test_without_proc_psutil_is_asked(monkeypatch):
    def missing(path, *args, **options):
        raise FileNotFoundError(path)

    monkeypatch.setattr(memory.Path, "read_text", missing)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Found", (), {"available": 12345})())
    assert memory._available_bytes() == 12345
    assert resident_bytes() > MiB
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError):
        resident_bytes()
