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


def _orthonormal(columns, bound):
    assert np.abs(columns.T @ columns - np.eye(columns.shape[1])).max() <= bound


def check_svd(q, values, bound):
    """Both sets of vectors are orthonormal, values fall, and x·v = u·diag(s)."""
    x, u, v = values.astype("f8"), q.u.astype("f8"), q.vt.T.astype("f8")
    _orthonormal(u, bound)
    _orthonormal(v, bound)
    assert (np.diff(q.singular_values) <= 0).all()
    close(u * q.singular_values, x @ v, bound)


def check_scores(p, values, bound):
    """Scores are orthogonal products of the centred array with the components, and singular values their
    norms."""
    x, scores, v = values.astype("f8"), p.scores.astype("f8"), p.components.T.astype("f8")
    close(scores, (x - x.mean(axis=0)) @ v, bound)
    _orthonormal(v, bound)
    # Products with x are rounded in proportion to its largest singular value.
    falls = p.singular_values[0] / p.singular_values[-1]
    _orthonormal(scores / p.singular_values, max(bound, 4 * np.finfo("f8").eps * falls))
    assert (np.diff(p.singular_values) <= 0).all()
    close(p.explained_variance, p.singular_values**2 / (len(x) - 1), bound)
