"""Libraries that a user may have imported, while another thread is about to import them."""

import sys
from types import ModuleType

import numpy as np
import pytest

import ooc_gemm
from ooc_gemm.support.imported import imported


def test_a_class_is_found_where_its_module_is_imported():
    assert imported("numpy", "ndarray") is np.ndarray
    assert imported("no_such_module", "ndarray") == ()


@pytest.mark.parametrize("module", ["numpy.ma", "h5py", "xarray"])
def test_an_import_in_another_thread_is_half_done(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    x = np.arange(600.0).reshape(20, 30)
    found = ooc_gemm.multiply(x, x, transpose_b=True, device="cpu", memory_limit="1GiB")
    np.testing.assert_allclose(found.array, x @ x.T)
