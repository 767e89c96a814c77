"""Neighbours and pairs of rows for which float32 has too few digits, or no numbers that large or small."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from conftest import make
from least import least_limit

import ooc_gemm
from ooc_gemm.statistics import compared, ranking
from ooc_gemm.storage.write import rows as stored

METRICS = ["cosine", "dot", "sqeuclidean"]


@pytest.fixture
def device(cpu_or_emulated_gpu):
    return cpu_or_emulated_gpu


def clusters(apart=1e4, count=10, size=60, depth=3):
    """Rows around some points that are far from each other, on both sides of the origin."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((count, depth))
    centres *= apart / np.linalg.norm(centres, axis=1)[:, None]
    rows = np.repeat(centres, size, axis=0) + random.standard_normal((count * size, depth))
    return random.permutation(rows).astype("f4")


def exact(a, b, k, metric, others=False):
    """Indices by all scores in float64, of rows that are near 1 as a whole."""
    a, b = a.astype("f8"), b.astype("f8")
    if metric == "sqeuclidean":
        scores = -np.square(a[:, None] - b).sum(axis=2)
    elif metric == "dot":
        scores = a @ b.T
    else:
        a, b = (x / np.abs(x).max(axis=1, keepdims=True) for x in (a, b))
        scores = a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    if others:
        np.fill_diagonal(scores, -np.inf)
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("metric", ["cosine", "sqeuclidean"])
def test_rows_of_clusters_far_from_the_origin_find_their_neighbours(metric, device, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 64)
    x, said = clusters(), []
    if metric == "cosine":  # rows of a cluster in other directions
        x = clusters(1e4, 2, 300, 6)
    found = ooc_gemm.topk(x, k=3, metric=metric, device=device, verify=True, notice=said.append)
    np.testing.assert_array_equal(found.indices, exact(x, x, 3, metric, others=True))
    assert found.rows_close == 0
    assert found.bytes_read == found.plan.bytes_read
    assert sum("float64" in text for text in said) == 1


def test_only_rows_that_need_it_are_compared_again(tmp_path, monkeypatch):
    """And a run that was interrupted continues to the same result."""
    monkeypatch.setattr(compared, "CHUNK_ROWS", 100)
    random = np.random.default_rng(1)
    near = random.standard_normal((300, 3)).astype("f4")
    a, b = np.concatenate([near, clusters(1e4)[:200]]), np.concatenate([near, clusters(1e4)])
    at, bt = make(tmp_path / "a", a), make(tmp_path / "b", b)
    options = {"k": 3, "metric": "sqeuclidean", "device": "cpu"}
    said = []
    whole = ooc_gemm.topk(at, bt, tmp_path / "whole", **options, notice=said.append)
    np.testing.assert_array_equal(whole.indices[...], exact(a, b, 3, "sqeuclidean"))
    assert whole.bytes_read == whole.plan.bytes_read
    assert whole.bytes_written == whole.plan.bytes_written == 500 * 3 * 12
    assert any("200 rows" in text for text in said)
    for count in (1, 3, 4):
        out = tmp_path / f"{count}"
        write, left = stored.RowArrays.write, iter(range(count))

        def limited(self, *args, write=write, left=left):
            if next(left, None) is None:
                raise ooc_gemm.StoreError("the plug is pulled")
            return write(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(stored.RowArrays, "write", limited)
            with pytest.raises(ooc_gemm.StoreError, match="plug"):
                ooc_gemm.topk(at, bt, out, **options)
        found = ooc_gemm.topk(at, bt, out, resume=True, **options)
        assert found.rows_resumed == 100 * count
        assert found.bytes_read == found.plan.bytes_read
        assert found.bytes_written == found.plan.bytes_written
        for name in ("indices", "values"):
            np.testing.assert_array_equal(getattr(found, name)[...], getattr(whole, name)[...])


def test_rows_in_doubt_are_told_where_memory_has_no_room_for_float64(monkeypatch):
    x, said, prepare = clusters(), [], ranking.prepare

    def small(request, **options):
        if request.out_dtype is not None:
            raise ooc_gemm.BudgetError("no room")
        return prepare(request, **options)

    monkeypatch.setattr(ranking, "prepare", small)
    found = ooc_gemm.topk(x, k=3, metric="sqeuclidean", device="cpu", notice=said.append, verify=True)
    assert found.rows_close > 500
    assert said == [
        f"the last neighbours of {found.rows_close} rows may be others, whose scores differ from theirs by "
        "no more than rounding"
    ]


@pytest.mark.parametrize("metric", METRICS)
def test_equal_scores_are_not_compared_again(metric):
    random = np.random.default_rng(2)
    for x in (
        np.repeat(random.standard_normal((10, 8)), 40, axis=0).astype("f4"),
        random.integers(0, 3, (400, 4)).astype("f4"),
        random.integers(-2, 3, (400, 6)).astype("i1"),
    ):
        said = []
        found = ooc_gemm.topk(x, k=5, metric=metric, device="cpu", notice=said.append, verify=True)
        assert not found.rows_close or len(np.unique(x, axis=0)) > 10  # the ten are known to be copies
        assert not said


def wide(size, seed, rows=50, depth=17):
    """Rows of float32 whose elements are about so large."""
    values = np.random.default_rng(seed).standard_normal((rows, depth))
    with np.errstate(over="ignore"):
        return (values * size).astype("f4")


@pytest.mark.parametrize(
    ("left", "right", "metrics"),
    [
        (1e30, 1e10, METRICS),
        (1e-20, np.logspace(-30, 10, 333)[:, None], ["cosine", "dot"]),
        (1, np.logspace(-43, 30, 333)[:, None], ["cosine"]),
        (1e-40, 1, ["cosine", "dot"]),
        (1e-30, 1e-12, METRICS),
        (1e37, 1, ["cosine", "dot"]),
        (1, 1e20, METRICS),
    ],
)
def test_products_that_float32_cannot_hold(left, right, metrics):
    a, b = wide(left, 3), wide(right, 4, 333)
    for metric in metrics:
        said = []
        found = ooc_gemm.topk(a, b, k=5, metric=metric, device="cpu", verify=True, notice=said.append)
        assert np.isinf(found.values).any() == any("too large for float32" in text for text in said)
        want = exact(a, b, 5, metric)
        if metric == "sqeuclidean" and left == 1e30:  # distances are equal in float64
            want = np.argsort(-(a.astype("f8") @ b.T.astype("f8")), axis=1)[:, :11]
            assert all(set(some) <= set(row) for some, row in zip(found.indices, want, strict=True))
            continue
        np.testing.assert_array_equal(found.indices, want)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("size", [2.0**600, 2.0**-600, 2.0**1020, 2.0**-900])
@pytest.mark.parametrize("both", [True, False])
def test_rows_whose_squares_float64_does_not_hold(metric, size, both, device, tmp_path, monkeypatch):
    """They have the neighbours of rows that are multiplied by a power of two."""
    monkeypatch.setattr(compared, "CHUNK_ROWS", 32)
    a, b = np.random.default_rng(7).standard_normal((2, 90, 5))
    a[3], a[4], b[[4, 5]], b[6] = 0, np.nan, [[np.nan], [np.inf]], 0
    other = None if both else b
    want = ooc_gemm.topk(a, other, k=3, metric=metric, device="cpu")
    large = make(tmp_path / "a", a * size, chunks=(40, 3))
    some = None if both else make(tmp_path / "b", b * size, chunks=(30, 5))
    said = []
    found = ooc_gemm.topk(large, some, k=3, metric=metric, device=device, verify=True, notice=said.append)
    np.testing.assert_array_equal(found.indices, want.indices)
    with np.errstate(all="ignore"):
        values = want.values if metric == "cosine" else want.values * size * size
    np.testing.assert_allclose(found.values, values, rtol=1e-12)
    assert found.bytes_read == found.plan.bytes_read
    assert any("values are too" in text for text in said) == (metric != "cosine")
    assert not any("rows of" in text for text in said)


@pytest.mark.parametrize(
    ("left", "right", "metrics"),
    [
        (2.0**600, 1, METRICS),
        (2.0**-600, 1, ["cosine", "dot"]),
        (1, 2.0**600, METRICS),
        (2.0**-900, 2.0**900, ["cosine", "dot"]),
        (np.logspace(-300, 300, 90)[:, None], 1, ["cosine", "dot"]),
        (1, np.logspace(300, -300, 90)[:, None], ["cosine"]),
    ],
)
def test_one_array_whose_squares_float64_does_not_hold(left, right, metrics, device, tmp_path, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 32)
    a, b = np.random.default_rng(8).standard_normal((2, 90, 5))
    for metric in metrics:
        said = []
        found = ooc_gemm.topk(
            a * left, b * right, k=3, metric=metric, device=device, verify=True, notice=said.append
        )
        one, other = (a, b) if metric != "dot" else (a, b * right)
        if metric != "sqeuclidean":
            np.testing.assert_array_equal(found.indices, exact(one, other, 3, metric))
        elif left == 1:
            np.testing.assert_array_equal(found.indices, exact(0 * a, b, 3, metric))
        else:  # distances are equal in float64
            want = exact(a, b, 11, "dot")
            assert all(set(some) <= set(row) for some, row in zip(found.indices, want, strict=True))
        assert found.bytes_read == found.plan.bytes_read
        assert sum("sought again" in text for text in said) <= 1
        assert metric == "sqeuclidean" or not any(" have elements " in text for text in said)


@pytest.mark.parametrize(("left", "right"), [(2.0**600, 2.0**600), (2.0**600, 1)])
def test_the_first_plan_has_room_for_what_such_rows_are_multiplied_with(left, right, device):
    a, b = np.random.default_rng(8).standard_normal((2, 9000, 2))
    a, b = a[:3000] * left, b * right
    run = partial(ooc_gemm.topk, k=3, device=device)
    least, found = least_limit(partial(run, a, b))
    plain = run(a / left, b / right, memory_limit=least)
    assert found.plan.ledger == plain.plan.ledger
    assert found.plan.ledger["transforms"] >= 8 * 12000
    assert found.plan.device_ledger.get("transforms") == plain.plan.device_ledger.get("transforms")


@pytest.mark.parametrize("size", [2.0**600, 2.0**-600])
@pytest.mark.parametrize("interrupted", [True, False])
def test_such_rows_are_checked_that_an_earlier_run_has_found(size, interrupted, tmp_path, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 8)
    a, b = np.random.default_rng(9).standard_normal((2, 16, 5))
    a[:8] *= size
    at, bt, out = make(tmp_path / "a", a), make(tmp_path / "b", b), tmp_path / "out"
    with monkeypatch.context() as patch:
        if interrupted:  # after the rows that were multiplied are written, which come last
            patch.setattr(stored.RowArrays, "commit", None)
            with pytest.raises(TypeError):
                ooc_gemm.topk(at, bt, out, k=3, device="cpu")
        else:
            ooc_gemm.topk(at, bt, out, k=3, device="cpu")
    found = ooc_gemm.topk(at, bt, out, k=3, device="cpu", resume=True, verify=True)
    assert (found.verified, found.rows_resumed) == (True, 16)
    assert found.bytes_read == found.plan.bytes_read
    np.testing.assert_array_equal(found.indices, exact(a, b, 3, "cosine"))


@pytest.mark.parametrize(("size", "left", "right"), [(1e200, 39, 1), (1e-200, 39, 37), (1e-250, 39, 37)])
def test_a_warning_tells_of_rows_that_are_much_smaller_than_others(size, left, right):
    a, b = np.random.default_rng(7).standard_normal((2, 40, 5))
    a[3], b[[4, 5]], b[0] = 0, [[np.nan], [np.inf]], b[0] / size
    b, a = b * size, a if size > 1 else a * size
    said = []
    ooc_gemm.topk(a, b, k=3, metric="sqeuclidean", device="cpu", notice=said.append)
    small = [text.split(" are ")[0] for text in said if "so much smaller than the largest row" in text]
    assert small == [f"{right} rows of B", f"{left} rows of A"]
    assert not any(" have elements " in text for text in said)


@pytest.mark.parametrize("which", ["both", "a", "b", "narrow a"])
def test_dot_products_with_rows_that_differ_by_more_than_float64_does(which, device, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 16)
    sizes = np.repeat([1e250, 1e-250, 1, 1e-20, 2.0**1010], 8)[:, None]
    random = np.random.default_rng(13)
    a, b = random.standard_normal((2, 40, 5))
    a, b = a * (sizes if which != "b" else 1), random.permutation(b * sizes)
    if which == "narrow a":
        a = random.standard_normal((40, 5)).astype("f4")
        a[0] *= np.float32(1e37)
    a[3] = b[5] = 0
    other = None if which == "both" else b
    b = a if which == "both" else b
    wanted = np.array(true_scores(a, b))
    k = 39 if which == "both" else 40
    found = ooc_gemm.topk(a, other, k=k, metric="dot", device=device, verify=True, notice=lambda said: None)
    for row, indices in enumerate(found.indices):
        order = sorted(range(40), key=lambda j: (-wanted[row, j], j))
        if which == "both":
            order.remove(row)
        assert indices.tolist() == order
    values = np.vectorize(nearest_float)(np.take_along_axis(wanted, found.indices, 1))
    np.testing.assert_allclose(found.values, values, rtol=1e-11, atol=1e-322)
    assert found.bytes_read == found.plan.bytes_read
    few = ooc_gemm.topk(a, other, k=4, metric="dot", device=device, verify=True, notice=lambda said: None)
    np.testing.assert_array_equal(few.indices, found.indices[:, :4])


def reached(a, b, least, centred):
    """Where cosines, or correlations, reach a value."""
    a, b = (x.astype("f8") / np.abs(x.astype("f8")).max(axis=1, keepdims=True) for x in (a, b))
    if centred:
        a, b = (x - x.mean(axis=1, keepdims=True) for x in (a, b))
    return a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1) >= least


@pytest.mark.parametrize("metric", ["cosine", "correlation"])
@pytest.mark.parametrize(
    ("left", "right", "dtype"),
    [
        (1e-40, 1, "f4"),
        (1e-20, np.logspace(-40, 10, 333)[:, None], "f4"),
        (1e38, 1e30, "f4"),
        (1e200, 1, "f8"),
        (1, 1e-200, "f8"),
        (1e-170, np.logspace(-300, 300, 333)[:, None], "f8"),
    ],
)
def test_pairs_of_rows_that_are_large_or_small(metric, left, right, dtype):
    random = np.random.default_rng(5)
    a, b = random.uniform(-2, 2, (50, 17)) * left, random.uniform(-2, 2, (333, 17)) * right
    a, b = a.astype(dtype), b.astype(dtype)
    a[3] = b[7] = 0
    with np.errstate(all="ignore"):
        want = reached(a, b, 0.3, metric == "correlation")
    found = ooc_gemm.threshold(a, b, least=0.3, metric=metric, device="cpu", verify=True)
    assert found.bytes_read == found.plan.bytes_read
    there = np.zeros(want.shape, bool)
    there[np.repeat(np.arange(50), np.diff(found.indptr)), found.indices] = True
    np.testing.assert_array_equal(there, want)


def test_a_scale_that_float32_does_not_hold_is_refused():
    x = np.random.default_rng(6).standard_normal((4, 30)) * 1e-39
    x = x.astype("f4")
    with pytest.raises(ooc_gemm.InputError, match=r"out_dtype=.float64."):
        ooc_gemm.corrcoef(x, device="cpu")
    found = ooc_gemm.corrcoef(x, device="cpu", out_dtype="float64")
    np.testing.assert_allclose(found.array, np.corrcoef(x.astype("f8") * 1e39), rtol=1e-6)
    for by in (1e-41, 1e40):
        with pytest.raises(ooc_gemm.InputError, match=r"out_dtype=.float64."):
            ooc_gemm.multiply(ooc_gemm.Operand(x, scale=("rows", np.full(4, by))), x.T.copy(), device="cpu")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["u4", "i8", "u8"])
def test_neighbours_among_integers_whose_products_are_beyond_int64(metric, dtype, device):
    x, said = np.random.default_rng(14).integers(2**31, 2**32, (60, 3)).astype(dtype), []
    for other in (None, x.astype("u4"), x + x[::-1]):
        found = ooc_gemm.topk(x, other, k=4, metric=metric, device=device, verify=True, notice=said.append)
        want = exact(x, x if other is None else other, 4, metric, others=other is None)
        np.testing.assert_array_equal(found.indices, want)
        assert found.bytes_read == found.plan.bytes_read
    assert sum("int64" in text for text in said) == 3
    assert len(said) == 3
    small = x >> np.array(16, dtype)
    ooc_gemm.topk(small, k=4, metric=metric, device=device, notice=said.append)
    assert len(said) == 3


def true_scores(a, b):
    """Dot products without rounding."""
    return [
        [
            sum((Fraction(float(x)) * Fraction(float(y)) for x, y in zip(r, s, strict=True)), Fraction())
            for s in b
        ]
        for r in a
    ]


def nearest_float(x):
    try:
        return float(x)
    except OverflowError:
        return np.inf if x > 0 else -np.inf


SIZES = np.repeat([1e-200, 1e-160, 1e-20, 1, 1e150, 1e200, 1e250, 1e-250, 2.0**1020, 2.0**-1060], 3)


@pytest.mark.parametrize("least", [0.0, 0.1, -0.1, 1e-320, -1e-310, 1e300, -1e300])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("both", [True, False])
def test_dot_products_of_rows_that_are_large_or_small(least, absolute, both, device, monkeypatch):
    """Those that float64 does not hold are compared, too."""
    monkeypatch.setattr(compared, "CHUNK_ROWS", 16)
    a, b = np.random.default_rng(11).standard_normal((2, 30, 4)) * SIZES[:, None]
    a[1], b[2] = 0, [1e200, -1e200, 1e-200, 0]
    a[4] = [1e-200, 1e-200, 1e200, 3]
    b = a if both else b
    wanted = true_scores(a, b)
    size = [[abs(x) if absolute else x for x in row] for row in wanted]
    keeps = np.array([[x >= Fraction(least) for x in row] for row in size])
    if both:
        np.fill_diagonal(keeps, False)
    said = []
    found = ooc_gemm.threshold(
        a, None if both else b, least=least, metric="dot", absolute=absolute, device=device, verify=True,
        notice=said.append,
    )  # fmt: skip
    there = np.zeros(keeps.shape, bool)
    there[np.repeat(np.arange(30), np.diff(found.indptr)), found.indices] = True
    np.testing.assert_array_equal(there, keeps)
    values = np.array([[nearest_float(x) for x in row] for row in wanted])[keeps]
    np.testing.assert_allclose(found.data, values, rtol=1e-12, atol=1e-322)
    assert found.bytes_read == found.plan.bytes_read
    lost = (
        np.isinf([[nearest_float(x) for x in row] for row in wanted]) & ~(both & np.eye(30, dtype=bool))
    ).sum()
    assert any(
        f"{lost} dot products are too large for float64, and count as infinite" in text for text in said
    )


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
@pytest.mark.parametrize("largest", [1e300, 1.7e308])
def test_neighbours_that_are_tiny_beside_the_largest_row(dtype, largest, device):
    a = np.array([[5, 2], [127, 3]]).astype(dtype)
    b = np.random.default_rng(3).uniform(0.1, 1, (40, 2)) * np.logspace(-303, -290, 40)[:, None]
    b[:3] = [[-largest, 0.1], [-largest / 3, 0], [largest / 1e10, -largest / 1e2]]
    found = ooc_gemm.topk(a, b, k=30, metric="dot", device=device)
    scores = np.array([[nearest_float(x) for x in row] for row in true_scores(a, b)])
    best = np.argsort(-scores, axis=1, kind="stable")[:, :30]
    np.testing.assert_array_equal(found.indices, best)
    np.testing.assert_allclose(found.values, np.take_along_axis(scores, best, 1), rtol=1e-12)


def test_dot_products_of_rows_that_are_large_or_small_in_a_store_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_ROWS", 16)
    a = np.random.default_rng(12).standard_normal((90, 5)) * np.logspace(-250, 250, 90)[:, None]
    at = make(tmp_path / "a", a, chunks=(40, 3))
    run = partial(ooc_gemm.threshold, at, out=tmp_path / "out", least=0.5, metric="dot", device="cpu")
    with pytest.warns(UserWarning, match="too large for float64"):
        least, found = least_limit(run)
    run = partial(run, memory_limit=least, resume=True)
    assert run().rows_resumed == 90
    want = ooc_gemm.threshold(a, least=0.5, metric="dot", device="cpu", notice=lambda said: None)
    for mine, other in zip(found.csr(), want.csr(), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(("small", "found"), [(2.0**-100, 1), (2.0**-200, 0)])
def test_a_score_may_be_lost_where_elements_of_a_row_differ_by_more_than_float64_does(small, found, device):
    """As docs/statistics.md says of rows whose largest element meets a 0."""
    a, b = np.array([[2.0**1000, small]]), np.array([[0, 2.0**-400]])
    assert a[0] @ b[0] == small * 2.0**-400
    got = ooc_gemm.threshold(a, b, least=2.0**-700, metric="dot", device=device)
    assert got.count == found
