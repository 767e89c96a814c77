"""Exact products of integers on the CPU, against Python's integers."""

import itertools

import numpy as np
import pytest
import zarr
from conftest import make
from faults import with_blocks
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import ooc_gemm
import ooc_gemm.run.prepare
from examples import examples
from ooc_gemm.devices.cpu import integers, tiles
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.integers import EXACT_BITS, LEAST_DEPTH, SLICE_DEPTH, Integers, parts_of
from ooc_gemm.devices.cpu.tiles import TILE
from ooc_gemm.devices.several import Several

TYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
INT64_MAX = 2**63 - 1
PANELS = {"f": np.float32, "d": np.float64, "q": np.int64}


def objects(x):
    """The matrix with Python's integers."""
    return x.astype(object)


def product(a, b):
    """a·b of Python's integers."""
    return objects(a).dot(objects(b)) if a.shape[1] else np.zeros((len(a), b.shape[1]), object)


def bits(dtype):
    return min(63, np.iinfo(dtype).bits - (np.dtype(dtype).kind == "i"))


def random(rng, shape, dtype, most):
    """Values of all magnitudes up to 2^most − 1; the largest magnitude is among them."""
    low = 0 if np.dtype(dtype).kind == "u" else -(2**most) + 1
    x = rng.integers(low, 2**most, shape, np.int64 if most < 63 else np.uint64 if low == 0 else np.int64)
    if x.size:
        x.reshape(-1)[0] = 2**most - 1
    return x.astype(dtype)


# ------------------------------------------------------------------------------------------ depth and slices


@given(
    st.sampled_from("dq"),
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.integers(1, 1 << 20),
    st.booleans(),
)
@example("q", 2**63, 0, 5, False)
@example("q", 1, 2**63, 1, False)
@example("d", 2**31, 2**31, 2, True)
@settings(max_examples=examples(500), deadline=None)
def test_partial_sums_are_exact(panel, x, y, k, narrow):
    """If the sums fit int64, no partial sum in float64 exceeds 2^53, and parts are deep."""
    if narrow:
        y %= max(1, INT64_MAX // max(1, x * k))
    elif x * y * k > INT64_MAX:
        x, y = x % 2**31 + 1, y % 2**11
    how = parts_of(np.dtype(PANELS[panel]), (x, y), k)
    assert 1 <= how.depth <= k
    if how.cut is None:
        assert x * y * how.depth <= 2**53 or how.depth == 1
        assert max(x, y) <= 2**53 or 0 in (x, y)
    else:
        small, large = sorted((x, y))
        assert (x, y)[how.cut] == large
        assert small * how.depth * 2**how.shift <= 2**53  # products with lo < 2^shift
        assert small * how.depth * ((large >> how.shift) + 1) <= 2**53  # products with hi
    if x * y * k <= INT64_MAX:
        assert how.depth >= min(k, LEAST_DEPTH)


@given(st.integers(0, 255), st.integers(0, 255), st.integers(1, 1 << 22))
@settings(deadline=None)
def test_bytes_are_multiplied_as_deep_as_their_values_allow(x, y, k):
    how = parts_of(np.dtype(np.float32), (x, y), k)
    assert how.cut is None
    assert how.depth == min(k, 2**24 // (max(1, x) * max(1, y))) >= min(k, 258)
    assert x * y * how.depth <= 2 ** EXACT_BITS["f"]


def arithmetic(a, b, out="i8"):
    return CPU().arithmetic(np.dtype(a), np.dtype(b), np.dtype(out), (9, 9, 9), 2**62, "auto", "highest")


@pytest.mark.parametrize(("a", "b"), [("i1", "u1"), ("i2", "i2"), ("i4", "u4"), ("i8", "i4"), ("i8", "i8")])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (-3, 2)])
def test_a_tile_of_every_layout(a, b, alpha, beta, monkeypatch):
    """Parts are shallow, and strips end within the tile."""
    monkeypatch.setattr(integers, "SLICE_DEPTH", 8)
    monkeypatch.setattr(integers, "STRIP", 5)
    monkeypatch.setattr(tiles, "TILE", 16)
    rng, chosen = np.random.default_rng(3), arithmetic(a, b)
    ints = Integers(chosen, 1)
    m, n, k = 37, 23, 29
    most = [min(bits(x), 27) for x in (a, b)]
    for turned_a, turned_b, wide in itertools.product((False, True), repeat=3):
        x, y = random(rng, (m, k), a, most[0]), random(rng, (k, n), b, most[1])
        old = rng.integers(-(2**30), 2**30, (m, n))
        out = np.zeros((m, n + 9), np.int64)[:, :n] if wide else np.empty((m, n), np.int64)
        out[...] = old
        left, right = x.astype(chosen.panel), y.astype(chosen.panel)
        left = left.T.copy().T if turned_a else left
        right = right.T.copy().T if turned_b else right
        ints.tile(left, right, (2 ** most[0], 2 ** most[1]), alpha, beta, out)(slice(m), slice(n))
        assert np.array_equal(objects(out), alpha * product(x, y) + beta * objects(old))


@pytest.mark.parametrize(("a", "b"), [("i1", "i1"), ("i2", "i2"), ("i4", "i4"), ("i8", "i8")])
def test_the_largest_tile_fits_its_scratch(a, b):
    chosen = arithmetic(a, b)
    rng, most = np.random.default_rng(4), min(bits(a), 25)
    x, y = (random(rng, shape, a, most) for shape in ((TILE, SLICE_DEPTH + 1), (SLICE_DEPTH + 1, TILE)))
    out = np.empty((TILE, TILE), chosen.block)
    tile = Integers(chosen, 1).tile(
        x.astype(chosen.panel), y.astype(chosen.panel), (2**most, 2**most), 1, 0, out
    )
    tile(slice(TILE), slice(TILE))
    rows = [0, 500, TILE - 1]
    assert np.array_equal(objects(out[rows]), product(x[rows], y))


@pytest.mark.parametrize(("a", "b"), [("u1", "u1"), ("i1", "u1"), ("u1", "i1")])
@pytest.mark.parametrize("alpha", [1, -3])
def test_panels_of_positive_elements_are_centred(a, b, alpha):
    """So that parts are as deep as those of int8; sums are those of the panels as they were."""
    rng, chosen, k = np.random.default_rng(5), arithmetic(a, b), 1500
    ints = Integers(chosen, 1)
    x, y = random(rng, (37, k), a, bits(a)), random(rng, (k, 23), b, bits(b))
    left, right = x.astype(chosen.panel), y.T.astype(chosen.panel).T
    largest = int(abs(objects(x)).max()), int(abs(objects(y)).max())
    dealt = []

    def deal(work, extent):
        dealt.append(extent)
        work(slice(0, 5))
        work(slice(5, extent))

    centred, less = ints.centred(left, right, largest, deal)
    assert dealt == [37, 23]
    assert parts_of(chosen.panel, less, k).depth >= 1000 > parts_of(chosen.panel, largest, k).depth
    assert abs(left).max() <= less[0]
    assert abs(right).max() <= less[1]
    out = np.empty((37, 23), np.int64)
    ints.tile(left, right, less, alpha, 0, out, centred)(slice(37), slice(23))
    assert np.array_equal(objects(out), alpha * product(x, y))


@pytest.mark.parametrize(("most", "k"), [(2, 1500), (255, 200)])
def test_deep_panels_are_left_as_they_are(most, k):
    ints, x = Integers(arithmetic("u1", "u1"), 1), np.full((9, k), most, np.float32)
    assert ints.centred(x, x.T, (most, most), None) == (None, (most, most))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_products_of_uint8(tmp_path, symmetric, layout):
    rng = np.random.default_rng(6)
    x, y = (rng.integers(0, 256, shape, "u1") for shape in ((70, 3000), (3000, 50)))
    y = x.T if symmetric else y
    old = rng.integers(-99, 99, (70, y.shape[1])).astype("i4")
    c = make(tmp_path / "c", old, chunks=(32, 32))
    x = np.asarray(x, order=layout)
    given = {"device": "cpu", "memory_limit": "1GiB", "verify": True}
    found = ooc_gemm.gram(x, **given).array if symmetric else ooc_gemm.multiply(x, y, **given).array
    assert np.array_equal(found, x.astype("i8") @ y.astype("i8"))
    done = ooc_gemm.multiply(x, y, c, alpha=-2, beta=3, **given)
    assert done.verified
    assert np.array_equal(zarr.open_array(c)[...], -2 * (x.astype("i8") @ y.astype("i8")) + 3 * old)


# ----------------------------------------------------------------------------------------- whole products


@given(
    types=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(0, 150)),
    room=st.integers(0, 62),
    scalars=st.tuples(st.integers(-9, 9), st.integers(-9, 9)),
    turned=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32),
)
@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],  # shrinking would take minutes
)
def test_products_of_all_types_equal_those_of_pythons_integers(
    types, shape, room, scalars, turned, seed, tmp_path, monkeypatch
):
    """Every sum that fits int64 by the largest elements is exact; the others are refused, and never wrap."""
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(32, 32, 48))
    (m, n, k), (alpha, beta), rng = shape, scalars, np.random.default_rng(seed)
    most_a = min(bits(types[0]), room)
    a, b = (
        random(rng, (m, k), types[0], most_a),
        random(rng, (k, n), types[1], min(bits(types[1]), 62 - most_a)),
    )
    old = rng.integers(-(2**40), 2**40, (m, n))
    want = alpha * product(a, b) + beta * objects(old)
    path = make(tmp_path / "c", old, chunks=(32, 32), compressors=None, overwrite=True)
    given = [x.T.copy() if turn else x for x, turn in zip((a, b), turned, strict=True)]
    options = {"transpose_a": turned[0], "transpose_b": turned[1], "alpha": alpha, "beta": beta}
    options |= {} if beta else {"force": True, "chunks": (32, 32), "out_dtype": "i8"}
    tops = [int(abs(objects(x)).max(initial=0)) for x in (a, b, old)]
    bound = abs(alpha) * tops[0] * tops[1] * k + abs(beta) * tops[2]
    try:
        result = ooc_gemm.multiply(*given, path, device="cpu", verify=True, **options)
    except ooc_gemm.RangeError:
        assert bound > INT64_MAX
        return
    assert result.verified or 0 in (m, n)
    assert np.array_equal(objects(zarr.open_array(path)[...]), want)


@pytest.mark.parametrize("dtype", TYPES)
def test_extreme_values(dtype):
    """The least and the largest number of each type, times what int64 still holds."""
    info = np.iinfo(dtype)
    x = np.array([[info.min, 1], [info.max, 0]], dtype)
    ones = np.array([[1, 0], [0, 1]], "i1")
    if np.iinfo(dtype).bits < 64:
        found = ooc_gemm.multiply(x, ones, device="cpu", out_dtype="i8", verify=True).array
        assert np.array_equal(objects(found), objects(x))
    else:
        with pytest.raises(ooc_gemm.RangeError, match=r"may exceed int64|past int64"):
            ooc_gemm.multiply(x, ones, device="cpu")
    half = np.array([[info.max // 2]], dtype)
    assert ooc_gemm.multiply(half, ones[:1, :1], device="cpu").array[0, 0] == info.max // 2


@pytest.mark.parametrize("out_dtype", [None, "int16"])
@pytest.mark.parametrize("force", [False, True])
def test_what_integers_do_not_hold_leaves_no_unfinished_c(tmp_path, out_dtype, force):
    """No run could continue it. What it was to replace is there again. The error says what helps."""
    large, one, c = np.full((2, 2), 2**62), np.ones((2, 2), "i8"), str(tmp_path / "c")
    if force:
        ooc_gemm.multiply(one, one, c)
    with pytest.raises(ooc_gemm.RangeError, match="out_dtype"):
        ooc_gemm.multiply(large, one, c, out_dtype=out_dtype, force=force)
    if force:
        assert np.array_equal(zarr.open_array(c)[:], one @ one)
    else:
        assert not (tmp_path / "c").exists()
    ooc_gemm.multiply(large, one, c, out_dtype="float64", force=force)
    assert np.array_equal(zarr.open_array(c)[:], np.full((2, 2), 2.0**63))


def test_int64_min_is_no_number_past_int64():
    x = np.array([[-(2**63)]])
    with pytest.raises(ooc_gemm.RangeError, match="a sum of products may exceed int64"):
        ooc_gemm.multiply(x, np.array([[1]]), device="cpu")
    assert ooc_gemm.multiply(x, np.array([[0]]), device="cpu").array[0, 0] == 0


@pytest.mark.parametrize(("dtype", "most"), [("i1", -128), ("u1", 255), ("i2", -(2**15)), ("i4", 2**23 - 1)])
def test_a_long_row_of_the_largest_products(dtype, most):
    """k = 100,000. Sums of 8-bit numbers nearly fill int32."""
    k = 100_000
    a, b = np.full((2, k), most, dtype), np.full((k, 3), most, dtype)
    result = ooc_gemm.multiply(a, b, device="cpu", out_dtype="i8", verify=True)
    assert np.all(result.array == most * most * k)
    if dtype == "u1":
        with pytest.raises(ooc_gemm.RangeError, match="does not fit int32"):
            ooc_gemm.multiply(a, b, device="cpu")


@pytest.mark.parametrize("k", [0, 3])
def test_an_old_c_times_beta_never_wraps(tmp_path, k):
    ones = np.ones((4, k), "i4"), np.ones((k, 4), "i4")
    path = make(tmp_path / "c", np.full((4, 4), 2**62), chunks=(4, 4))
    with pytest.raises(ooc_gemm.RangeError, match="may exceed int64"):
        ooc_gemm.multiply(*ones, path, beta=2, device="cpu")
    path = make(tmp_path / "d", np.full((4, 4), 2**62), chunks=(4, 4))
    ooc_gemm.multiply(*ones, path, beta=-1, device="cpu")
    assert np.all(zarr.open_array(path)[...] == k - 2**62)


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "i8"])
@pytest.mark.parametrize("transpose", [False, True])
def test_gram_matrices(dtype, transpose, tmp_path, monkeypatch):
    """Blocks on the diagonal multiply a panel by itself, whose elements are cut for one of the two."""
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(32, 32, 48))
    x = random(np.random.default_rng(6), (130, 110), dtype, min(bits(dtype), 27))
    path = make(tmp_path / "x", x.T if transpose else x, chunks=(40, 30))
    result = ooc_gemm.gram(path, transpose=transpose, device="cpu", verify=True, chunks=(16, 16))
    assert np.array_equal(objects(result.array), product(x, x.T))


@pytest.mark.parametrize("dtype", ["i1", "i4"])
def test_several_devices(dtype, monkeypatch):
    """A panel that was passed on counts with the largest values of its type."""
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(64, 32, 48))
    rng = np.random.default_rng(8)
    a, b = random(rng, (150, 333), dtype, 7), random(rng, (333, 90), dtype, 7)
    device = Several([CPU(1) for _ in range(3)], [1, 2, 1])
    result = ooc_gemm.multiply(a, b, device=device, chunks=(32, 32), verify=True)
    assert np.array_equal(objects(result.array), product(a, b))


@pytest.mark.parametrize("dtype", ["i1", "i2"])
def test_the_values_of_each_panel_count(dtype, tmp_path, monkeypatch):
    """One panel holds large values and the next ones small values, in every row of blocks."""
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(32, 32, 48))
    rng = np.random.default_rng(9)
    a, b = random(rng, (100, 190), dtype, 1), random(rng, (190, 70), dtype, bits(dtype))
    a[40:60, 50:90] = np.iinfo(dtype).min
    path = make(tmp_path / "a", a, chunks=(20, 30))
    result = ooc_gemm.multiply(path, b, device="cpu", chunks=(32, 32), verify=True)
    assert np.array_equal(objects(result.array), product(a, b))


@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_the_check_finds_a_wrong_bit_of_cut_elements(dtype, monkeypatch):
    x = random(np.random.default_rng(5), (70, 80), dtype, 27)
    add = tiles.add
    monkeypatch.setattr(
        tiles, "add", lambda products, shift, *rest: add(products, shift + 1 if shift else 0, *rest)
    )
    with pytest.raises(ooc_gemm.VerificationError):
        ooc_gemm.multiply(x, x.T, device="cpu", verify=True)
