"""Scores of pairs of rows in float64, and what of them is to be found."""

import numpy as np
from scipy import sparse


def rows(shape, dtype, seed):
    values = np.random.default_rng(seed).standard_normal(shape)
    return (values * 40).astype(dtype) if np.dtype(dtype).kind in "iu" else values.astype(dtype)


def scores(a, b, metric):
    """All scores, in float64; those of a row of zeros are 0, of a constant row NaN with correlations."""
    a, b = a.astype("f8"), b.astype("f8")
    with np.errstate(all="ignore"):
        if metric == "correlation":
            a, b = (x - x.mean(axis=1, keepdims=True) for x in (a, b))
        lengths = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)
        if metric == "correlation":
            return a @ b.T / lengths
        return a @ b.T if metric == "dot" else a @ b.T / np.where(lengths == 0, 1, lengths)


def value(all_scores, share):
    """A value that this share of the scores reaches, and none of them is near."""
    found = np.sort(all_scores[np.isfinite(all_scores)])
    near = int((1 - share) * len(found))
    some = found[near : near + len(found) // 400 + 2]
    at = int(np.argmax(np.diff(some)))
    return float((some[at] + some[at + 1]) / 2)


def dense(found):
    """The matrix, and NaN where nothing was kept."""
    data, indices, ends = found.csr()
    matrix = sparse.csr_matrix((data, indices, ends), shape=found.shape)
    assert matrix.has_canonical_format
    assert (indices.dtype, ends.dtype, len(data)) == (np.int64, np.int64, found.count)
    out = np.full(found.shape, np.nan)
    out[np.repeat(np.arange(found.shape[0]), np.diff(ends)), indices] = data
    return out


def assert_found(found, wanted, least, bound=1e-5, absolute=False):
    reach = np.abs(wanted) >= least if absolute else wanted >= least
    out = dense(found)
    assert reach.sum() == found.count
    assert np.array_equal(np.isfinite(out), reach)
    scale = np.abs(wanted[np.isfinite(wanted)]).max()
    assert np.abs(out[reach] - wanted[reach]).max(initial=0) <= bound * scale
