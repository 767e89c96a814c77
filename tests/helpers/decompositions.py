"""Arrays with known components, and what NumPy finds of them in float64."""

import numpy as np


def graded(shape, seed, mean=0.0, dtype="f8", ratio=0.7):
    """Singular values that fall by `ratio` from one to the next, and columns with means."""
    rng = np.random.default_rng(seed)
    rank = min(*shape, 30)
    u, v = (np.linalg.qr(rng.standard_normal((extent, rank)))[0] for extent in shape)
    values = (u * (100 * ratio ** np.arange(rank))) @ v.T + 1e-3 * rng.standard_normal(shape)
    return (values + mean * rng.standard_normal(shape[1])).astype(dtype)


def exact(values, k, centred=True):
    """The k largest singular values and vectors, with the signs that are promised."""
    wide = values.astype(np.float64)
    u, s, vt = np.linalg.svd(wide - wide.mean(axis=0) if centred else wide, full_matrices=False)
    signs = np.sign(vt[np.arange(k), np.abs(vt[:k]).argmax(axis=1)])
    return u[:, :k] * signs, s[:k], vt[:k] * signs[:, None], s


def close(found, expected, bound):
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


def check_pca(p, values, k, bound):
    u, s, vt, every = exact(values, k)
    close(p.singular_values, s, bound / 10)
    close(p.components, vt, bound)
    close(p.scores, u * s, bound)
    close(p.mean, values.astype("f8").mean(axis=0), bound)
    close(p.explained_variance, s**2 / (len(values) - 1), bound)
    close(p.explained_variance_ratio, s**2 / (every**2).sum(), bound)
