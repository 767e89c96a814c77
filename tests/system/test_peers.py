"""Random programs over the options of `multiply`, `gram`, `plan` and `verify`, and over chunks of
`ooc_gemm.dask.matmul`: NumPy computes the same with more digits, or with Python's integers."""

import shutil
import warnings
from fractions import Fraction

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from zarr.storage import MemoryStore

import ooc_gemm
from examples import examples
from ooc_gemm import InputError, RangeError

settings.register_profile(
    "peers",
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PEERS = settings.get_profile("peers")
CPU = {"device": "cpu", "memory_limit": "1GiB"}
TYPES = ("f2", "f4", "f8", "c8", "c16", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")


# ---------------------------------------------------------------------------------------------- operands


def strided(values):
    """Every second column, from the last row to the first, of a larger array."""
    wide = np.zeros((values.shape[0], 2 * values.shape[1]), values.dtype)
    wide[::-1, ::2] = values
    return wide[::-1, ::2]


def frozen(values):
    values = values.copy()
    values.flags.writeable = False
    return values


def in_zarr(place, values, **layout):
    """Stored in small chunks."""
    chunks = tuple(max(1, min(4, size)) for size in values.shape)
    array = zarr.create_array(place, shape=values.shape, dtype=values.dtype, chunks=chunks, **layout)
    array[...] = values
    return array


def path(place, values, **layout):
    in_zarr(place, values, **layout)
    return place


BIG, GZIP = zarr.codecs.BytesCodec(endian="big"), zarr.codecs.GzipCodec()
KINDS = {
    "array": lambda place, values: values,
    "Fortran": lambda place, values: np.asfortranarray(values),
    "strided": lambda place, values: strided(values),
    "read only": lambda place, values: frozen(values),
    "big endian": lambda place, values: values.astype(values.dtype.newbyteorder(">")),
    "path": lambda place, values: path(place, values, compressors=None),
    "compressed": lambda place, values: path(place, values, compressors=GZIP),
    "version 2": lambda place, values: path(place, values, zarr_format=2, order="F", compressors=None),
    "big endian chunks": lambda place, values: path(place, values, serializer=BIG, compressors=GZIP),
    "open": lambda place, values: in_zarr(place, values, compressors=None),
    "in memory": lambda place, values: in_zarr(MemoryStore(), values, compressors=GZIP),
}


@st.composite
def matrices(draw, shape, dtype):
    """Small numbers, and where the type has them now and then some that are not finite."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.integers(0 if dtype.kind == "u" else -9, 10, shape).astype("f8")
    if dtype.kind in "fc":
        values = values / 8
    values = (values + 1j * rng.integers(-9, 10, shape)).astype(dtype) if dtype.kind == "c" else values
    values = values.astype(dtype)
    if dtype.kind == "f" and values.size and draw(st.integers(0, 3)) == 0:
        values.flat[rng.integers(0, values.size, 2)] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    if dtype.kind in "iu" and values.size and draw(st.integers(0, 5)) == 0:
        values.flat[rng.integers(0, values.size)] = np.iinfo(dtype).max
    return values


SIZES = st.sampled_from([0, 1, 1, 2, 3, 5, 9])
KIND = st.sampled_from(sorted(KINDS))
REAL = st.sampled_from([1, 0, -2, 3.0, np.int64(2), np.float32(-3), np.uint8(2), True, Fraction(2)])
BROKEN = st.sampled_from([0.5, -2.25, np.float64(0.125), np.float16(1.5), Fraction(1, 4)])
COMPLEX = st.sampled_from([1j, 2 - 0.5j, np.complex64(1 + 1j)])


def scalars(dtype):
    """What α and β may be for results of a type."""
    return REAL if dtype.kind in "iu" else REAL | BROKEN | (COMPLEX if dtype.kind == "c" else BROKEN)


# ---------------------------------------------------------------------------------------------- the oracle


def exactly(values):
    """In a type whose sums are right, or more exact than any that is tested."""
    kinds = {"i": object, "u": object, "f": np.longdouble, "c": np.clongdouble}
    return values.astype(kinds[values.dtype.kind])


def scaled(factor, values):
    """factor · values; nothing where the factor is 0, as in BLAS."""
    if factor == 0:
        return np.zeros_like(values)
    if values.dtype == object:
        return int(factor) * values
    factor = complex(factor)
    return (factor if factor.imag else factor.real) * values


def product(a, b, alpha=1, beta=0, c=None):
    """α·a·b + β·c, and the sum of the magnitudes of what is added."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        integers = np.result_type(a, b).kind in "iu"
        if not integers:
            a, b = (x.astype("f8") if x.dtype.kind in "iu" else x for x in (a, b))
        want = scaled(alpha, exactly(a) @ exactly(b) if a.size and b.size else zeros(a, b, integers))
        size = np.abs(exactly(a)) @ np.abs(exactly(b)) if a.size and b.size else abs(want)
        size = size * magnitude(alpha, integers)
        if beta != 0:
            want = want + scaled(beta, exactly(c))
            size = size + magnitude(beta, integers) * np.abs(exactly(c))
    return want, size


def magnitude(factor, integers):
    return abs(int(factor)) if integers else abs(complex(factor))


def zeros(a, b, integers):
    shape = (a.shape[0], b.shape[1])
    return np.full(shape, 0, object) if integers else np.zeros(shape, np.result_type(exactly(a), exactly(b)))


def fits(want, dtype):
    """Whether integers are all in a type's range."""
    info = np.iinfo(dtype)
    return all(info.min <= int(x) <= info.max for x in want.flat)


def surely_fits(a, b, want, size, dtype):
    """Whether there is no reason to refuse an exact product: the results fit, and so does the bound that is
    known without any sums, of the largest elements."""
    largest = [max((abs(int(x)) for x in values.flat), default=0) for values in (a, b)]
    bound = np.array([a.shape[1] * largest[0] * largest[1]], object)
    return fits(want, dtype) and fits(size, dtype) and fits(bound, np.int64)


def check(found, want, size):
    """NaN and infinities where they belong, and all else right to rounding."""
    assert found.shape == want.shape
    if found.dtype.kind in "iu":
        assert (found.astype(object) == want).all()
        return
    sure = np.isfinite(size.astype("f8"))
    error = np.abs(found[sure].astype(np.clongdouble) - want[sure].astype(np.clongdouble))
    room = 16 * np.finfo(found.dtype).eps * (size[sure] + np.abs(want[sure])) + np.finfo(found.dtype).tiny
    large = np.abs(want[sure]) > 0.99 * np.finfo(found.dtype).max  # may round to an infinity
    assert ((error <= room) | large).all()
    if found.dtype.kind == "f":
        assert np.array_equal(np.isnan(found), np.isnan(want.astype("f8")))
        infinite = ~sure & np.isinf(want.astype("f8"))
        assert np.array_equal(found[infinite], want[infinite].astype(found.dtype))


# ---------------------------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@given(data=st.data())
@settings(PEERS, max_examples=examples(60))
def test_multiply(folder, data):
    shutil.rmtree(folder)
    folder.mkdir()
    m, n, k = (data.draw(SIZES) for _ in "mnk")
    kinds = [np.dtype(data.draw(st.sampled_from(TYPES))) for _ in "ab"]
    turns = [data.draw(st.sampled_from(["none", "transpose", "adjoint"])) for _ in "ab"]
    operands, given_as, options = [], [], dict(CPU)
    for name, dtype, turn, shape in zip("ab", kinds, turns, [(m, k), (k, n)], strict=True):
        op = data.draw(matrices(shape, dtype))
        held = op if turn == "none" else (op.conj() if turn == "adjoint" else op).T.copy()
        operands.append(op)
        given_as.append(KINDS[data.draw(KIND)](str(folder / name), held))
        if turn != "none":
            options[f"{turn}_{name}"] = True
    try:
        natural = np.dtype(ooc_gemm.multiply(*given_as, **options).out_dtype)
    except RangeError:
        want, size = product(*operands)
        assert not surely_fits(*operands, want, size, np.result_type(*kinds))
        return
    alpha = data.draw(scalars(natural))
    to = data.draw(st.sampled_from(["nothing", "new", "old", "beta"]))
    beta, c, old = 0, None, None
    if to != "nothing":
        c = str(folder / "c")
    if to in ("old", "beta"):
        old = data.draw(matrices((m, n), natural))
        if natural.kind in "fc" and old.size and to == "old":
            old.flat[0] = np.nan
        in_zarr(c, old, compressors=None)
    if to == "beta":
        options["beta"] = beta = data.draw(scalars(natural))
    options["force"] = beta == 0
    want, size = product(*operands, alpha, beta, old)
    try:
        result = ooc_gemm.multiply(*given_as, c, alpha=alpha, **options)
    except RangeError:
        assert not surely_fits(*operands, want, size, natural)
        return
    assert (result.m, result.n, result.k) == (m, n, k)
    assert result.out_dtype == natural.name
    if natural.kind in "iu":
        assert fits(want, natural), "a sum that does not fit is an error"
    found = result.array if c is None else zarr.open_array(c, mode="r")[...]
    check(found, want, size)
    if c is not None and beta == 0 and alpha == 1 and np.isfinite(size.astype("f8")).all():
        turned = {name: value for name, value in options.items() if name.startswith(("transpose", "adjoint"))}
        assert ooc_gemm.verify(*given_as, c, **turned).ok


@given(data=st.data())
@settings(PEERS, max_examples=examples(25))
def test_gram(folder, data):
    shutil.rmtree(folder)
    folder.mkdir()
    dtype, transpose = np.dtype(data.draw(st.sampled_from(TYPES))), data.draw(st.booleans())
    a = data.draw(matrices((data.draw(SIZES), data.draw(SIZES)), dtype))
    held = KINDS[data.draw(KIND)](str(folder / "a"), a)
    c = data.draw(st.sampled_from([None, str(folder / "c")]))
    alpha = data.draw(scalars(dtype))
    left = a.T if transpose else a
    want, size = product(left, left.T, alpha)
    try:
        result = ooc_gemm.gram(held, c, transpose=transpose, alpha=alpha, **CPU)
    except RangeError:
        assert not surely_fits(left, left.T, want, size, dtype)
        return
    found = result.array if c is None else zarr.open_array(c, mode="r")[...]
    check(found, want, size)
    if dtype.kind != "c":
        assert np.array_equal(found, found.T, equal_nan=dtype.kind == "f")


@given(data=st.data())
@settings(PEERS, max_examples=examples(15))
def test_plan(folder, data):
    """It says what a run will do, and needs nothing but the arrays."""
    shutil.rmtree(folder)
    folder.mkdir()
    m, n, k = (data.draw(SIZES) for _ in "mnk")
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "f8", "c8"])))
    kind = st.sampled_from(["array", "strided", "path", "compressed", "version 2"])
    a = KINDS[data.draw(kind)](str(folder / "a"), data.draw(matrices((m, k), dtype)))
    b = KINDS[data.draw(kind)](str(folder / "b"), data.draw(matrices((k, n), dtype)))
    options = {**CPU, "chunks": data.draw(st.sampled_from([(1, 1), (2, 3), (64, 64)]))}
    plan = ooc_gemm.plan(a, b, **options)
    result = ooc_gemm.multiply(a, b, str(folder / "c"), **options)
    assert (result.bytes_read, result.bytes_written) == (plan.bytes_read, plan.bytes_written)
    assert str(plan)


# ---------------------------------------------------------------------------------------------- dask arrays


def cuts(total):
    """Chunks of a dimension, some of no length."""
    edges = st.lists(st.integers(0, total), max_size=4).map(lambda inner: [0, *sorted(inner), total])
    return edges.map(lambda e: tuple(int(size) for size in np.diff(e)))


@given(data=st.data())
@settings(PEERS, max_examples=examples(50))
def test_matmul_of_chunks_of_no_length(data):
    pytest.importorskip("distributed")
    import dask.array as da

    import ooc_gemm.dask.arrays

    m, n, k = (data.draw(SIZES) for _ in "mnk")
    kinds = [np.dtype(data.draw(st.sampled_from(TYPES))) for _ in "ab"]
    down, along_a, along_b, across = (data.draw(cuts(size)) for size in (m, k, k, n))
    a, b = data.draw(matrices((m, k), kinds[0])), data.draw(matrices((k, n), kinds[1]))
    x = da.from_array(a, chunks=(down, along_a))
    y = da.from_array(b, chunks=(along_b, across))
    room, depth = data.draw(st.sampled_from([(3, 400), (1, 40_000)])), data.draw(st.sampled_from([1, 3, 256]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ooc_gemm.dask.arrays, "tasks_at_a_time", lambda _: room)
        patch.setattr(ooc_gemm.dask.arrays, "LEAST_DEPTH", min(depth, 4))
        patch.setattr(ooc_gemm.dask.arrays, "MOST_DEPTH", depth)
        z = ooc_gemm.dask.matmul(x, y)
    assert (z.shape, z.chunks) == ((m, n), (down, across))
    want, size = product(a, b)
    rows = slice(data.draw(st.integers(0, m)), None)
    try:
        found = z.compute(scheduler="synchronous")
        part = z[rows].compute(scheduler="threads")
    except RangeError:
        assert not surely_fits(a, b, want, size, z.dtype)
        return
    check(found, want, size)
    check(part, want[rows], size[rows])


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize(
    "value", ["2", b"2", [2.0], np.array([1.0, 2.0]), np.array([[2.0]]), object(), float("nan"), float("inf")]
)
def test_what_is_no_number_is_refused(tmp_path, name, value):
    a = np.ones((3, 3), "f4")
    c = path(str(tmp_path / "c"), a)
    for run in (
        lambda: ooc_gemm.multiply(a, a, c, **{name: value}, **CPU),
        lambda: ooc_gemm.gram(a, c, **{name: value}, **CPU),
        lambda: ooc_gemm.plan(a, a, **{name: value}, **CPU),
    ):
        with pytest.raises((InputError, TypeError), match=name):
            run()
    assert np.array_equal(zarr.open_array(c, mode="r")[...], a)


def test_c_is_neither_a_nor_b(tmp_path):
    values = np.ones((3, 3), "f4")
    stored = path(str(tmp_path / "a"), values)
    opened, store = zarr.open_array(stored), MemoryStore()
    memory = in_zarr(store, values)
    again = zarr.open_array(store)
    for a, c in (
        (stored, stored),
        (stored, opened),
        (opened, stored),
        (opened, opened),
        (stored, f"{tmp_path}/./a/"),
        (memory, memory),
        (memory, again),
    ):
        for run in (
            lambda a=a, c=c: ooc_gemm.multiply(a, values, c, force=True, **CPU),
            lambda a=a, c=c: ooc_gemm.multiply(values, a, c, force=True, **CPU),
            lambda a=a, c=c: ooc_gemm.multiply(a, values, c, beta=1, **CPU),
            lambda a=a, c=c: ooc_gemm.gram(a, c, force=True, **CPU),
        ):
            with pytest.raises(InputError, match="input"):
                run()
    for array in (opened, memory):
        assert np.array_equal(array[...], values)


@pytest.mark.parametrize("c", [np.zeros((3, 3), "f4"), [[0.0]], 3, b"c"])
def test_c_is_a_place(c):
    a = np.ones((3, 3), "f4")
    with pytest.raises((InputError, TypeError)):
        ooc_gemm.multiply(a, a, c, **CPU)


@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 4), (3, 0, 0), (0, 4, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("dtype", ["f4", "i8", "c16"])
def test_extents_of_nothing(tmp_path, shape, dtype):
    m, n, k = shape
    a, b = np.ones((m, k), dtype), np.ones((k, n), dtype)
    stored = path(str(tmp_path / "a"), a), path(str(tmp_path / "b"), b)
    for operands in ((a, b), stored):
        result = ooc_gemm.multiply(*operands, **CPU)
        assert np.array_equal(result.array, np.zeros((m, n)))
    ooc_gemm.multiply(*stored, str(tmp_path / "c"), **CPU)
    assert np.array_equal(zarr.open_array(tmp_path / "c")[...], np.zeros((m, n)))
    assert ooc_gemm.verify(*stored, str(tmp_path / "c")).ok
    assert str(ooc_gemm.plan(*stored, **CPU))
    assert ooc_gemm.gram(a, **CPU).array.shape == (m, m)
    assert ooc_gemm.gram(a, transpose=True, **CPU).array.shape == (k, k)


def test_matmul_of_no_rows_and_no_columns():
    da = pytest.importorskip("dask.array")
    pytest.importorskip("distributed")
    import ooc_gemm.dask.arrays

    for m, n, k in ((0, 0, 3), (0, 2, 0), (3, 0, 2), (0, 0, 0)):
        x, y = da.ones((m, k), chunks=2), da.ones((k, n), chunks=2)
        assert np.array_equal(ooc_gemm.dask.matmul(x, y).compute(), np.zeros((m, n)))
