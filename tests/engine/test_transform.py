"""Transforms of elements against the formula in float64, of whole matrices and of pieces."""

import numpy as np
import pytest
from arrays import matrix

from ooc_gemm.engine import transform
from ooc_gemm.engine.transform import Lines, Transform


def vectors(shape, seed=3):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(extent) + 2 for extent in (*shape, *shape)]


def formula(x, vectors, missing):
    r, c, s, t = vectors
    found = (x.astype("f8") - r[:, None] - c) * s[:, None] * t
    gone = np.isnan(x) if missing is not None and np.isnan(missing) else x == missing
    return found if missing is None else np.where(gone, 0, found)


@pytest.mark.parametrize("panel", ["f4", "f8"])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (300, 7), (3, 0), (0, 3), (2, 700)])
def test_pieces_of_a_matrix(monkeypatch, shape, dtype, panel):
    monkeypatch.setattr(transform, "STRIP", 256)  # so that there are several, of rows and of columns
    x, by, panel = matrix(shape, dtype, 1), vectors(shape), np.dtype(panel)
    x[::2, ::3] = 100
    changed = Transform(Lines.of(by[0], by[2], panel), Lines.of(by[1], by[3], panel), missing=100.0)
    whole = np.full((shape[0], shape[1] + 2), 7, panel)  # rows of a panel need not touch
    cuts = [sorted({0, extent // 3, extent}) for extent in shape]
    for rows in zip(cuts[0], cuts[0][1:], strict=False):
        for cols in zip(cuts[1], cuts[1][1:], strict=False):
            place = whole[slice(*rows), slice(*cols)]
            changed.place(x[slice(*rows), slice(*cols)], rows, cols, place)
    wanted = formula(x, by, 100)
    bound = 4 * np.finfo(panel).eps * (1 + np.abs(wanted).max(initial=0))
    assert np.abs(whole[:, : shape[1]] - wanted).max(initial=0) <= bound
    assert (whole[:, shape[1] :] == 7).all()


def test_a_large_shift_leaves_all_digits():
    x = (1e6 + np.random.default_rng(0).standard_normal((500, 40))).astype("f4")
    mean = x.astype("f8").mean(axis=0)
    out = np.empty(x.shape, "f4")
    Transform(cols=Lines.of(mean, None, np.dtype("f4"))).place(x, (0, 500), (0, 40), out)
    assert np.abs(out - (x - mean)).max() <= 1e-6


def test_nan_as_a_missing_element_and_as_a_value():
    x = np.array([[1, np.nan, np.inf, -np.inf]], "f4")
    ones = Lines.of(np.ones(4), None, np.dtype("f4"))
    out = np.empty((1, 4), "f4")
    Transform(cols=ones, missing=np.nan).place(x, (0, 1), (0, 4), out)
    assert np.array_equal(out, [[0, 0, np.inf, -np.inf]])
    Transform(cols=ones, missing=-1.0).place(x, (0, 1), (0, 4), out)
    assert np.array_equal(out, [[0, np.nan, np.inf, -np.inf]], equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "missing"),
    [
        ("i1", 200.0),
        ("i1", 0.5),
        ("u1", -1.0),
        ("i4", np.nan),
        ("i4", np.inf),
        ("f4", 1e-60),
        ("f4", 1e39),
        ("f4", 16777217),
        ("f2", 2049.0),
    ],
)
def test_no_element_is_missing_that_its_type_cannot_hold(dtype, missing):
    x = np.arange(6, dtype=dtype).reshape(2, 3)
    assert transform.missing_of(x, missing) is None
    out = np.empty((2, 3), "f8")
    Transform(missing=missing).place(x, (0, 2), (0, 3), out)
    assert np.array_equal(out, x)
