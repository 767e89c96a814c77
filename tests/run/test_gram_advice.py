"""The advice to compute a product of an array and its transpose as a symmetric one."""

import numpy as np
import pytest
import zarr

import ooc_gemm
from ooc_gemm import Operand

SAYS = "A and B are the same array, so C is symmetric: gram computes half of it"


@pytest.fixture
def tall(tmp_path):
    """A path of an array without chunks, which a plan does not miss."""
    path = tmp_path / "x.zarr"
    zarr.create_array(path, shape=(400_000, 2000), chunks=(4000, 2000), dtype="f4")
    return str(path)


def test_the_same_array_on_both_sides(tall):
    said = {
        ooc_gemm.plan(a, b, device="cpu", transpose_a=True).advice
        for a, b in ((tall, tall), (tall, f"file://{tall}"), (zarr.open_array(tall), zarr.open_array(tall)))
    }
    assert said == {SAYS}


@pytest.mark.parametrize(
    "options",
    [
        {"a": "x.zarr", "b": "other", "transpose_a": True},
        {"a": "square", "b": "square"},
        {"a": "square", "b": "square", "transpose_a": True, "transpose_b": True},
        {"a": Operand("x.zarr", transpose=True, center="columns"), "b": "x.zarr"},
        {"a": "square", "b": "square", "transpose_a": True, "beta": 1},
    ],
)
def test_other_products(tall, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    for name, shape in (("other", (400_000, 2000)), ("square", (20_000, 20_000))):
        zarr.create_array(name, shape=shape, chunks=(2000, 2000), dtype="f4")
    assert ooc_gemm.plan(**options, device="cpu").advice is None


def test_a_product_that_takes_no_time(tmp_path):
    x = np.ones((30, 20))
    assert ooc_gemm.plan(x, x, device="cpu", transpose_a=True).advice is None
