"""Products on a GPU, cut into strips of C; without a GPU, on matrices that lie in host memory."""

from itertools import pairwise

import cupy_on_cpu
import numpy as np
import pytest

from ooc_gemm.cuda_kernels.product import LEAST_STRIP, Operand, Product, Strips, diagonal_strips


@pytest.mark.parametrize("extent", [1, 63, LEAST_STRIP, LEAST_STRIP + 1, 5000, 100_003])
def test_diagonal_strips_cover_all_rows(extent):
    found = list(diagonal_strips(extent))
    assert found[0][0] == 0
    assert all(stop == start for (_, stop), (start, _) in pairwise(found))
    assert found[-1][1] == extent
    assert all(start % 64 == 0 for start, _ in found)


def test_strips_of_a_product():
    rows = ((0, 64), (64, 150))
    assert list(Strips().of(150, 90)) == [(0, 150, 90)]
    assert list(Strips(rows).of(150, 90)) == [(0, 64, 90), (64, 150, 90)]
    assert list(Strips(rows, lower=True).of(150, 150)) == [(0, 64, 64), (64, 150, 150)]
    assert list(Strips(rows, lower=True).of(150, 300)) == [(0, 64, 128), (64, 150, 300)]  # re and im


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("lower", [False, True])
def test_a_product_is_the_sum_of_its_strips(trans_a, lower):
    rng, m, k = np.random.default_rng(1), 150, 37
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, m))
    stored, c = (a.T if trans_a else a).copy(), rng.standard_normal((m, m + 5))
    want = 2 * a @ b - c[:, :m]
    given = c.copy()
    operands = [Operand(x.ctypes.data, x.shape[1]) for x in (stored, b, c)]
    product = Product(m, m, k, 2.0, operands[0], operands[1], -1.0, operands[2])
    for start, stop, width in Strips(((0, 64), (64, m)), lower).of(m, m):
        part = product.rows(start, stop, width, 8 * (1 if trans_a else k), 8)
        assert (part.m, part.n, part.k) == (stop - start, width, k)
        cupy_on_cpu.gemm(
            part.m, part.n, part.k, part.alpha, part.a.ptr, part.a.ld, part.b.ptr, part.b.ld, part.beta,
            part.c.ptr, part.c.ld, (trans_a, False), ("f8", "f8"),
        )  # fmt: skip
    made = np.tri(m, m, dtype=bool) if lower else np.ones((m, m), bool)
    assert (abs(c[:, :m] - want) <= 1e-12)[made].all()
    assert np.array_equal(c[:, m:], given[:, m:])


@pytest.mark.parametrize(("m", "n", "pitch"), [(1000, 700, 1), (1000, 3, 16), (600, 2000, 16), (256, 1, 1)])
@pytest.mark.parametrize("rows", [(), ((0, 320), (320, 450))])
def test_tiles_make_up_strips(m, n, pitch, rows):
    """Each element of C is in one tile, whose padded rows fit the memory."""
    rows = (*rows, (rows[-1][1], m)) if rows and rows[-1][1] < m else rows and ((0, m),)
    elements, columns = 256 * 800, 144
    strips, made, seen = Strips(rows), np.zeros((m, n), int), []
    for covered, tiles in strips.tiled(m, n, elements, columns, pitch):
        seen += covered
        for tile in tiles:
            (top, bottom), (left, right) = tile.rows, tile.cols
            made[top:bottom, left:right] += 1
            assert right - left <= columns
            assert (bottom - top) * -(-(right - left) // pitch) * pitch <= elements
            assert (tile.lower, tile.above) == (False, 0)
    assert seen == list(strips.of(m, n))
    assert (made == 1).all()


@pytest.mark.parametrize("above", [0, 300])
def test_tiles_of_a_symmetric_matrix_end_on_its_diagonal(above):
    m, strips = 1000, Strips(lower=True, above=above)
    n, made = above + m, np.zeros((m, above + m), int)
    ((covered, tiles),) = strips.tiled(m, n, 256 * n, n)
    assert covered == list(strips.of(m, n))
    for tile in tiles:
        (top, bottom), (left, right) = tile.rows, tile.cols
        made[top:bottom, left:right] += 1
        assert (left, right, tile.above) == (0, above + bottom, above + top)
    assert (made <= 1).all()
    assert made[np.tri(m, n, above, dtype=bool)].all()
    assert len(tiles) == 4
    assert all(not tile.lower for _, tiles in strips.tiled(m, n, 256 * n, n - 1) for tile in tiles)
