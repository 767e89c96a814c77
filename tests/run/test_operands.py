"""Operands: op() belongs to the operand that is asked for, not to the array that was opened for it."""

from dataclasses import replace

import numpy as np
import pytest
import zarr

import ooc_gemm
from ooc_gemm.planning.traits import LOCAL
from ooc_gemm.run import operands
from ooc_gemm.run.operands import open_operand
from ooc_gemm.storage.read import inputs

RNG = np.random.default_rng(3)
A = RNG.integers(-9, 9, (30, 20)).astype("f4")
CPU = {"device": "cpu", "memory_limit": "1GiB"}


@pytest.fixture(params=["C", "F"])
def opened(tmp_path, request):
    filters = [zarr.codecs.TransposeCodec(order=(1, 0))] if request.param == "F" else None
    array = zarr.create_array(tmp_path / "a", shape=A.shape, chunks=(10, 10), dtype="f4", filters=filters)
    array[...] = A
    return inputs.open_input(str(tmp_path / "a"))


def test_an_open_input_is_multiplied_twice(opened):
    for _ in range(2):
        assert np.array_equal(ooc_gemm.multiply(opened, A, transpose_a=True, **CPU).array, A.T @ A)
        assert opened.shape == A.shape
    assert np.array_equal(ooc_gemm.multiply(opened, A.T, **CPU).array, A @ A.T)


def test_one_open_input_is_both_operands(opened):
    assert np.array_equal(ooc_gemm.gram(opened, **CPU).array, A @ A.T)
    assert np.array_equal(ooc_gemm.multiply(opened, opened, transpose_a=True, **CPU).array, A.T @ A)
    assert ooc_gemm.verify(opened, opened, A.T @ A, transpose_a=True).ok


def test_a_stored_array_that_is_both_operands_is_opened_once(tmp_path, monkeypatch):
    """To open it lists its chunks."""
    path, names = str(tmp_path / "a"), []
    zarr.create_array(path, data=A, chunks=(10, 10))
    zarr.create_array(str(tmp_path / "b"), data=A, chunks=(10, 10))
    real = operands.open_input
    monkeypatch.setattr(operands, "open_input", lambda spec, name: names.append(name) or real(spec, name))
    assert np.array_equal(ooc_gemm.gram(path, transpose=True, **CPU).array, A.T @ A)
    assert np.array_equal(ooc_gemm.multiply(path, path, transpose_b=True, **CPU).array, A @ A.T)
    assert len(names) == 2
    ooc_gemm.multiply(path, str(tmp_path / "b"), transpose_b=True, **CPU)
    assert len(names) == 4


def test_a_transposition_changes_the_matrix_alone(opened):
    other = open_operand(opened, "A").transpose()
    assert other.shape == A.T.shape
    assert other.source is opened.source
    assert other.snapshot is opened.snapshot
    assert other.transpose() == opened
    assert opened.traits == replace(LOCAL, stackable=True)  # its chunks are small
