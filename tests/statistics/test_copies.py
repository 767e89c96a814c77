"""Neighbours among copies of rows: copies that fill all places of candidates hide no row that is nearer."""

import numpy as np
import pytest
from arrays import LAYOUTS
from conftest import make

import ooc_gemm
from ooc_gemm.run.operands import open_operand
from ooc_gemm.statistics import copies, ranking
from ooc_gemm.statistics.rescore import Rows
from ooc_gemm.statistics.rounding import Rounding

METRICS = ["cosine", "dot", "sqeuclidean"]


@pytest.fixture
def device(cpu_or_emulated_gpu):
    return cpu_or_emulated_gpu


def hidden(seed, noise, mean=2, copies=20):
    """A row, and others among which it is number `copies`, after copies of one that is near."""
    random = np.random.default_rng(seed)
    row = (mean + random.standard_normal(64)).astype("f4")
    near = row + np.float32(noise) * random.standard_normal(64).astype("f4")
    others = (mean + random.standard_normal((200, 64))).astype("f4")
    return row, np.concatenate([np.tile(near, (copies, 1)), row[None], others])


@pytest.mark.parametrize(("mean", "noise"), [(2, 3e-4), (20, 1e-2)])
@pytest.mark.parametrize("metric", ["cosine", "sqeuclidean"])
def test_copies_of_a_near_row_hide_no_nearer_one(metric, mean, noise, device):
    for seed in range(8):
        row, base = hidden(seed, noise, mean)
        if metric == "cosine" and mean > 2:
            continue  # cosines are equal in float64, too
        found = ooc_gemm.topk(row[None], base, k=1, metric=metric, device=device, verify=True)
        assert found.indices.tolist() == [[20]]
        assert found.rows_close == 0


def test_two_rows_with_copies_hide_no_nearer_one(device):
    """The copies that have not enough others before them still take all places of candidates."""
    for seed in range(8):
        row, base = hidden(seed, 3e-4)
        more = row + np.float32(3e-4) * np.random.default_rng(seed + 50).standard_normal((6, 64)).astype("f4")
        base = np.concatenate([np.repeat(more, 5, axis=0), base])
        found = ooc_gemm.topk(row[None], base, k=1, metric="sqeuclidean", device=device, verify=True)
        assert found.indices.tolist() == [[50]]


def test_a_row_that_copies_may_hide_is_told_where_memory_has_no_room_for_float64(monkeypatch):
    """Rows that differ by less than float32 tells, of which each comes a few times."""
    prepare, said = ranking.prepare, []

    def small(request, **options):
        if request.out_dtype is not None:
            raise ooc_gemm.BudgetError("no room")
        return prepare(request, **options)

    monkeypatch.setattr(ranking, "prepare", small)
    row, base = hidden(0, 3e-4)
    more = row + np.float32(3e-4) * np.random.default_rng(9).standard_normal((10, 64)).astype("f4")
    base = np.concatenate([np.repeat(more, 2, axis=0), base])
    found = ooc_gemm.topk(row[None], base, k=1, metric="sqeuclidean", device="cpu", notice=said.append)
    assert found.rows_close == 1
    assert len(said) == 1
    assert said[0].startswith("the last neighbours of 1 rows may be others")


def test_a_check_finds_a_nearer_row_that_was_lost_without_a_doubt(monkeypatch):
    """Also where the scores differ by less than the rounding of float32."""
    monkeypatch.setattr(copies, "often", lambda squares, before: np.empty(0, np.int64))
    monkeypatch.setattr(Rounding, "close", lambda self, about, *others: (about > np.inf, about > np.inf))
    found = []
    for seed in range(8):
        row, base = hidden(seed, 3e-4)
        try:
            ooc_gemm.topk(row[None], base, k=1, metric="sqeuclidean", device="cpu", verify=True)
        except ooc_gemm.VerificationError as error:
            found.append(str(error))
    assert found
    assert "is wrong in row 0" in found[0]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1"])
def test_equal_scores_of_integers_are_in_no_doubt(metric, dtype, device):
    """Scores of integers that are not equal differ by more than rounding."""
    random = np.random.default_rng(2)
    x = random.integers(0, 3, (400, 4)).astype(dtype)
    x[::7] = 0
    said = []
    found = ooc_gemm.topk(x, k=5, metric=metric, device=device, notice=said.append, verify=True)
    assert found.rows_close
    assert not said


def test_integers_that_meet_others_are_compared_again():
    """A row of A that holds others is compared in float64 where scores are close."""
    b = np.repeat(np.random.default_rng(3).integers(0, 3, (40, 4)), 8, axis=0).astype("f4")
    a = b[:40] + np.float32(1 / 3)
    said = []
    ooc_gemm.topk(a, b, k=1, metric="dot", device="cpu", notice=said.append, verify=True)
    assert any("float64" in text for text in said)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i2", "i8"])
def test_copies_are_what_is_equal_in_all_elements(tmp_path, dtype, layout):
    x = np.random.default_rng(4).integers(1, 99, (135, 52)).astype(dtype)
    x[[20, 70, 71]], x[80], x[81] = x[3], x[3], x[3]
    x[80, 40] += 1
    x[81, [3, 4]] = x[3, [4, 3]] if x[3, 3] != x[3, 4] else x[3, [4, 3]] + 1
    if dtype == "i8":
        x[:, 0], x[80, 40] = 2**62, x[3, 40]
        x[80, 0] += 1  # in float64 that is the same number
    if dtype[0] == "f":
        x[[3, 20, 70], 7], x[71, 7] = 0.0, -0.0
    marks = copies.marks(Rows(open_operand(make(tmp_path / "x", x, **LAYOUTS[layout]), "A")))
    same = (marks == marks[3]).all(axis=1)
    assert np.flatnonzero(same).tolist() == [3, 20, 70, 71]
    assert copies.behind(np.arange(135), marks, 1).tolist() == [20, 70, 71]
    assert copies.behind(np.arange(135), marks, 3).tolist() == [71]
    assert not len(copies.behind(np.arange(135), marks, 4))
    assert not len(copies.behind(np.arange(3), marks[:3], 9))


def test_rows_may_be_copies_whose_squares_come_often():
    squares = np.array([3.0, np.nan, 1] * 7 + [2] * 6)
    assert copies.often(squares, 1).tolist() == [i for i in range(21) if i % 3 != 1]
    assert copies.often(squares, 5).tolist() == [i for i in range(21) if i % 3 != 1]
    assert not len(copies.often(squares, 7))
    assert not len(copies.often(squares, 99))


@pytest.mark.parametrize("metric", METRICS)
def test_the_first_copies_are_found_in_their_order(metric, device, tmp_path):
    """Where a row is its own neighbour, and where it is not."""
    random = np.random.default_rng(5)
    x = random.permutation(np.repeat(random.standard_normal((7, 9)), 20, axis=0)).astype("f4")
    at = make(tmp_path / "x", x, chunks=(32, 4))
    for own in (True, False):
        found = ooc_gemm.topk(at, k=12, metric=metric, device=device, include_self=own, verify=True)
        for row in range(140):
            some = np.flatnonzero((x == x[found.indices[row, 0]]).all(axis=1))
            assert found.indices[row].tolist() == some[(some != row) | own][:12].tolist()
        assert found.rows_close == 0
        assert found.bytes_read == found.plan.bytes_read


def test_rows_that_are_multiplied_to_the_same_are_no_copies(device):
    """Their dot products differ."""
    row = np.random.default_rng(6).standard_normal(5)
    b = row * 2.0 ** np.repeat([600, 601, 602], 8)[:, None]
    found = ooc_gemm.topk(row[None], b, k=2, metric="dot", device=device, verify=True)
    assert found.indices.tolist() == [[16, 17]]
