"""The pieces of a product that the workers of a CPU share, and small blocks whose panels are cut along k."""

import os

import numpy as np
import pytest
from arrays import assert_close, matrix
from conftest import make
from hypothesis import given
from hypothesis import strategies as st

import ooc_gemm
from ooc_gemm.devices.cpu import blas, session
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.workers import LEAST_RANGE, LEAST_TILE, SHARES, beside, cut

DEEP = 5 * LEAST_RANGE + 77


@pytest.fixture
def one_panel(monkeypatch):
    """Make all of k one panel, so that there is something to cut."""
    monkeypatch.setattr("ooc_gemm.planning.search.depths", lambda problem, budget: [problem.k])


@given(st.integers(1, 1500), st.integers(1, 1500), st.integers(0, 40_000), st.integers(1, 64), st.booleans())
def test_pieces_cover_a_product_once_and_their_sums_have_room(m, n, k, threads, lower):
    n = m if lower else n
    room = beside(threads, m * n)
    tiles, ranges = cut((m, n), k, 2048, threads, room, lower)
    assert (len(ranges) - 1) * m * n <= room
    assert [one.start for one in ranges] == [0, *(one.stop for one in ranges[:-1])]
    assert ranges[-1].stop == k
    covered = np.zeros((m, n), np.uint8)
    for tile in tiles:
        covered[tile] += 1
    assert covered.max() == 1
    assert covered[np.tri(m, n, dtype=bool)].all() if lower else covered.all()


@pytest.mark.parametrize("threads", [1, 2, 16, 64])
@pytest.mark.parametrize("side", [20, 256, 300, 768])
@pytest.mark.parametrize("lower", [False, True])
def test_a_small_block_of_deep_panels_has_work_for_all(threads, side, lower):
    room = beside(threads, side**2)
    tiles, ranges = cut((side, side), 1 << 18, 2048, threads, room, lower)
    assert len(tiles) * len(ranges) >= SHARES * threads or len(ranges) == 1 + room // side**2
    assert len(tiles) * len(ranges) >= 2 * threads


def test_shallow_panels_and_large_blocks_are_not_cut_along_k():
    assert len(cut((300, 300), 2 * LEAST_RANGE - 1, 2048, 8, beside(8, 90_000), False).ranges) == 1
    most = SHARES * 2 * LEAST_TILE**2
    assert beside(2, most) == most
    assert beside(2, most + 1) == 0


def product(folder, a, b, c, threads):
    """Return 2ab − 3c."""
    c = make(folder / f"{len(os.listdir(folder))}.zarr", c)
    found = ooc_gemm.multiply(a, b, c, alpha=2, beta=-3, memory_limit="1GiB", device=CPU(threads))
    assert found.plan.bk == a.shape[1]
    return found.array[...]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("char", "fdFD")
def test_floating_point_numbers(tmp_path, one_panel, char, threads):
    a, b, c = matrix((70, DEEP), char, 1), matrix((DEEP, 90), char, 2), matrix((70, 90), char, 3)
    wide = "D" if char in "FD" else "d"
    want = 2 * (a.astype(wide) @ b.astype(wide)) - 3 * c.astype(wide)
    out = [product(tmp_path, a, b, c, threads) for _ in range(2)]
    assert_close(out[0], want, 1e-6 if char in "fF" else 1e-14)
    assert (out[0] == out[1]).all()  # whichever worker is first


@pytest.mark.parametrize("types", ["i1 i1", "u1 u1", "u1 i1", "i2 u2", "i4 i4", "i8 i4"])
def test_integers(tmp_path, one_panel, types):
    """Of the largest magnitudes of which the sums fit, so that panels of bytes are centred and others cut."""
    rng = np.random.default_rng(5)
    first, second = types.split()
    most = [min(np.iinfo(one).max, 2**22) for one in (first, second)]
    a, b = (
        rng.integers(0, top + 1, shape).astype(one)
        for one, top, shape in zip((first, second), most, ((70, DEEP), (DEEP, 90)), strict=True)
    )
    c = rng.integers(-9, 9, (70, 90))
    want = 2 * (a.astype("i8") @ b.astype("i8")) - 3 * c
    assert (product(tmp_path, a, b, c, 3) == want).all()


def test_what_is_not_finite_stays_so(one_panel):
    a, b = matrix((20, DEEP), "f", 1), matrix((DEEP, 30), "f", 2)
    a[3, 10], a[4, -1], a[5, 10], a[5, -1] = np.inf, np.nan, np.inf, -np.inf
    b[[10, -1]] = 1
    found = ooc_gemm.multiply(a, b, memory_limit="1GiB", device=CPU(2)).array[...]
    assert (found[3] == np.inf).all()
    assert np.isnan(found[[4, 5]]).all()
    assert np.isfinite(np.delete(found, [3, 4, 5], 0)).all()


@pytest.mark.parametrize("side", [40, 600])
@pytest.mark.parametrize("char", "fdFi")
@pytest.mark.parametrize("transpose", [False, True])
def test_a_symmetric_product(one_panel, char, transpose, side, monkeypatch):
    """One half of it is computed, and no old element of the other half gets into the result."""
    fresh = session.np.empty

    def garbage(*args, **options):
        found = fresh(*args, **options)
        if found.dtype.kind in "fc":
            found[...] = np.nan
        return found

    monkeypatch.setattr(session.np, "empty", garbage)
    rows = matrix((side, DEEP), "f", 1).astype(char) if char != "i" else matrix((side, DEEP), "i1", 1)
    found = ooc_gemm.gram(
        rows.T if transpose else rows, transpose=transpose, device=CPU(2), memory_limit="1GiB"
    )
    assert found.plan.bk == DEEP
    wide = rows.astype("D" if char == "F" else "d" if char != "i" else "i8")
    want, array = wide @ wide.conj().T, found.array[...]
    if transpose:
        want = want.conj()
    assert_close(array, want, 1e-14 if char == "d" else 1e-6)
    assert (array == array.conj().T).all()


@pytest.mark.parametrize("char", "fd")
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (2, -3), (-1, 1)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 7), (7, 1), (300, 290)])
def test_half_of_a_symmetric_product_by_blas(char, alpha, beta, n, k):
    half = blas.syrk(char)
    for a in (matrix((n + 2, k + 3), char, 1)[:n, :k], matrix((k, n), char, 2).T):
        c = np.full((n, n + 5), np.nan, char)[:, :n] if beta == 0 else matrix((n, n), char, 3)
        want = alpha * (a.astype("d") @ a.T.astype("d")) + (beta * c.astype("d") if beta else 0)
        half(a, c, complex(alpha), complex(beta))
        assert_close(np.tril(c), np.tril(want), 1e-6 if char == "f" else 1e-14)


def test_without_a_blas_library_there_is_no_such_half(monkeypatch):
    monkeypatch.setattr(blas, "_library", lambda: None)
    assert blas.syrk.__wrapped__("d") is None
    assert blas.syrk("F") is None
