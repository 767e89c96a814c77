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
