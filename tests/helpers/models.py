"""Linear models, and the coefficients that NumPy finds of them in float64."""

import numpy as np


def problem(m, n, t, seed, mean=0.0, dtype="f8"):
    """x with columns of different units, and y that is not quite in their span."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, n)) + mean) * 10.0 ** rng.uniform(-3, 3, n)
    y = x @ (rng.standard_normal((n, t)) / np.abs(x).mean(axis=0)[:, None]) + 0.1 * rng.standard_normal(
        (m, t)
    )
    return x.astype(dtype), (y + 7).astype(dtype)


def exact(x, y, ridge=0.0, intercept=False):
    """Coefficients and intercept by QR of the array itself, with rows for the ridge."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    means = (x.mean(axis=0), y.mean(axis=0)) if intercept else (np.zeros(x.shape[1]), 0.0)
    left = np.vstack([x - means[0], np.sqrt(ridge) * np.eye(x.shape[1])])
    unit = np.linalg.norm(left, axis=0)
    right = np.concatenate([y - means[1], np.zeros((x.shape[1], *y.shape[1:]))])
    w = (np.linalg.lstsq(left / unit, right, rcond=1e-15)[0].T / unit).T
    return w, means[1] - means[0] @ w


def close(found, expected, x, bound=1e-8):
    """Each coefficient in the unit of its column."""
    assert found.shape == expected.shape
    unit = np.linalg.norm(x.astype("f8"), axis=0).reshape(-1, *[1] * (found.ndim - 1))
    assert np.isfinite(found).all()
    assert np.abs((found - expected) * unit).max() <= bound * np.abs(expected * unit).max()
