"""End to end on every device: Zarr in, Zarr out, against NumPy in float64 or exact integers."""

import itertools

import numcodecs
import numpy as np
import pytest
import zarr
from conftest import assert_same, make, matrix, product
from zarr.codecs import BloscCodec, BytesCodec, TransposeCodec, ZstdCodec

import ooc_gemm

MiB = 1 << 20
RAW = {"compressors": None}
LAYOUTS = {
    "tiny chunks": {"chunks": (3, 2), **RAW},
    "row strips": {"chunks": (4, 1000), **RAW},
    "column strips": {"chunks": (1000, 4), **RAW},
    "misaligned": {"chunks": (17, 13), **RAW},
    "one huge chunk": {"chunks": (700, 900), **RAW},
    "zstd": {"chunks": (17, 13), "compressors": ZstdCodec(level=1)},
    "blosc": {"chunks": (30, 20), "compressors": BloscCodec(cname="lz4")},
    "one huge zstd chunk": {"chunks": (300, 200), "compressors": ZstdCodec(level=1)},
    "sharded": {"chunks": (8, 8), "shards": (32, 16)},
    "sharded raw": {"chunks": (8, 8), "shards": (16, 32), **RAW},
    "transposed": {"chunks": (17, 13), "filters": [TransposeCodec(order=(1, 0))], **RAW},
    "transposed zstd": {
        "chunks": (17, 13),
        "filters": [TransposeCodec(order=(1, 0))],
        "compressors": ZstdCodec(level=1),
    },
    "not transposed": {"chunks": (17, 13), "filters": [TransposeCodec(order=(0, 1))], **RAW},
    "big-endian": {"chunks": (17, 13), "serializer": BytesCodec(endian="big"), **RAW},
    "v2": {"zarr_format": 2, "chunks": (17, 13), **RAW},
    "v2 Fortran": {"zarr_format": 2, "chunks": (17, 13), "order": "F", **RAW},
    "v2 Fortran zstd": {"zarr_format": 2, "chunks": (17, 13), "order": "F", "compressors": numcodecs.Zstd()},
    "v2 blosc": {"zarr_format": 2, "chunks": (17, 13), "compressors": numcodecs.Blosc()},
    "v2 filtered": {
        "zarr_format": 2,
        "chunks": (17, 13),
        "filters": [numcodecs.Shuffle(elementsize=4)],
        **RAW,
    },
    "v2 nested keys": {
        "zarr_format": 2,
        "chunks": (17, 13),
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
        **RAW,
    },
}
UNPREDICTED = {"sharded", "sharded raw"}


def smallest(*args, **options):
    """The least memory limit, as a refusal tells it."""
    with pytest.raises(ooc_gemm.BudgetError) as refused:
        ooc_gemm.plan(*args, memory_limit=1, **options)
    assert refused.value.minimum_memory_limit
    assert str(refused.value.minimum_memory_limit) in str(refused.value)
    return refused.value.minimum_memory_limit


def check_bytes(result, layout=""):
    plan = result.plan
    assert result.bytes_written == plan.bytes_written
    if layout not in UNPREDICTED:
        assert result.bytes_read == plan.bytes_read
    if plan.budget.device is not None:
        assert result.bytes_uploaded == plan.bytes_uploaded
        assert result.bytes_downloaded == plan.bytes_downloaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_inputs(tmp_path, layout, every_device, plain_baseline):
    a, b = matrix((61, 83), "f4", 1), matrix((83, 47), "f4", 2)
    paths = make(tmp_path / "a", a, **LAYOUTS[layout]), make(tmp_path / "b", b, **LAYOUTS[layout])
    least = smallest(*paths, device=every_device)
    for limit, transpose in ((least, False), (least + 64 * MiB, False), (least + 64 * MiB, True)):
        inputs = (paths[1], paths[0]) if transpose else paths
        options = {"transpose_a": transpose, "transpose_b": transpose}
        result = ooc_gemm.multiply(
            *inputs, tmp_path / "c", memory_limit=limit, device=every_device, force=True, **options
        )
        expected = product(a, b).T if transpose else product(a, b)
        assert_same(zarr.open_array(tmp_path / "c", mode="r")[:], expected)
        check_bytes(result, layout)
        assert result.plan.host_bytes <= limit


@pytest.mark.parametrize("layout", ["tiny chunks", "zstd", "one huge chunk", "v2", "v2 blosc", "big-endian"])
def test_every_layout_of_an_existing_c(tmp_path, layout, every_device, plain_baseline):
    a, b, c = matrix((61, 20), "f4", 1), matrix((20, 47), "f4", 2), matrix((61, 47), "f4", 3)
    path = make(tmp_path / "c", c, **LAYOUTS[layout])
    result = ooc_gemm.multiply(a, b, path, alpha=2, beta=-3, memory_limit="512MiB", device=every_device)
    assert_same(zarr.open_array(path, mode="r")[:], 2 * product(a, b) - 3.0 * c)
    check_bytes(result)


@pytest.mark.parametrize("layout", ["sharded", "transposed", "v2 Fortran"])
def test_a_c_that_cannot_be_updated_in_place_is_refused(tmp_path, layout):
    c = matrix((61, 47), "f4", 3)
    path = make(tmp_path / "c", c, **LAYOUTS[layout])
    with pytest.raises(ooc_gemm.InputError, match="updated in place"):
        ooc_gemm.multiply(np.ones((61, 2), "f4"), np.ones((2, 47), "f4"), path, beta=1, device="cpu")
    assert np.array_equal(zarr.open_array(path, mode="r")[:], c)


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (10, 7)},
        {"chunks": (1000, 1)},
        {"chunks": (10, 7), "compressor": "zstd"},
        {"chunks": (10, 7), "compressor": "zstd:9"},
        {"chunks": (10, 7), "compressor": "blosc"},
        {"chunks": (8, 4), "shards": (16, 16)},
        {"chunks": (8, 4), "shards": (16, 16), "compressor": "zstd"},
        {"out_dtype": "f8"},
        {"out_dtype": "f2"},
        {"out_dtype": "c8"},
    ],
)
def test_every_layout_of_a_new_c(tmp_path, options, every_device):
    a, b = matrix((61, 20), "f4", 1), matrix((20, 47), "f4", 2)
    result = ooc_gemm.multiply(a, b, tmp_path / "c", device=every_device, **options)
    c = zarr.open_array(tmp_path / "c", mode="r")
    assert_same(c[:], product(a, b))
    assert c.dtype == np.dtype(options.get("out_dtype", "f4")) == np.dtype(result.out_dtype)
    assert c.chunks == options.get("chunks", c.chunks)
    assert c.shards == options.get("shards")
    assert bool(c.compressors) == (options.get("compressor", "none") != "none")
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("*.partial"))
    check_bytes(result)


SIDES = (1, 2, 3, 17, 129)
RAGGED = [
    *itertools.product((1, 3, 17), repeat=3),
    *((m, 2, 129) for m in SIDES),
    (907, 17, 129),
    (17, 907, 129),
    (129, 129, 1025),
    (1, 907, 1025),
    (1025, 1, 907),
    (907, 1025, 3),
    (257, 255, 256),
]


@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_ragged_shapes_in_little_memory(tmp_path, shape, every_device, plain_baseline):
    m, n, k = shape
    rng = np.random.default_rng([m, n, k])
    a, b = matrix((m, k), "f4", 1), matrix((k, n), "f4", 2)
    paths = []
    for name, values in (("a", a), ("b", b)):
        grid = [max(1, int(side * rng.uniform(0.2, 1.2))) for side in values.shape]
        paths.append(make(tmp_path / name, values, chunks=tuple(grid), compressors=None))
    least = smallest(*paths, device=every_device)
    result = ooc_gemm.multiply(*paths, tmp_path / "c", memory_limit=least, device=every_device)
    assert_same(zarr.open_array(tmp_path / "c", mode="r")[:], product(a, b))
    check_bytes(result)


def test_many_blocks_of_many_panels_with_an_existing_c(tmp_path, every_device, plain_baseline):
    a, b, c = matrix((210, 190), "f8", 1), matrix((190, 170), "f8", 2), matrix((210, 170), "f8", 3)
    paths = (
        make(tmp_path / "a", a, chunks=(30, 23), compressors=None),
        make(tmp_path / "b", b, chunks=(19, 40)),
        make(tmp_path / "c", c, chunks=(32, 48), compressors=None),
    )
    if every_device == "cuda":
        options = {}
    elif isinstance(every_device, str) or every_device.name == "recording":
        with pytest.raises(ooc_gemm.BudgetError) as refused:
            ooc_gemm.multiply(*paths, beta=1, memory_limit=1, device=every_device)
        options = {"memory_limit": refused.value.minimum_memory_limit}
    else:
        with pytest.raises(ooc_gemm.BudgetError) as refused:
            ooc_gemm.multiply(*paths, beta=1, device_memory_limit=1, device=every_device)
        least = refused.value.minimum_device_memory_limit
        options = {"device_memory_limit": 2 * least}
    result = ooc_gemm.multiply(*paths, beta=-1, device=every_device, **options)
    assert_same(zarr.open_array(paths[2], mode="r")[:], product(a, b) - c)
    if options:
        assert result.plan.block_count >= 4
        assert result.plan.panel_count >= 3
    if "device_memory_limit" in options:
        assert result.plan.c_buffers == 2 or result.plan.block_count >= 20
    check_bytes(result)


TYPES = ["f2", "f4", "f8", "c8", "c16", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]


@pytest.mark.parametrize("dtype", TYPES)
def test_types_transposes_and_adjoints(dtype, every_device):
    m, n, k = 29, 18, 35
    wide = "i8" if np.dtype(dtype).kind in "iu" else None
    for op_a, op_b in itertools.product((None, "transpose", "adjoint"), repeat=2):
        a, b = matrix((k, m) if op_a else (m, k), dtype, 1), matrix((n, k) if op_b else (k, n), dtype, 2)
        options = {f"{op}_{name}": True for op, name in ((op_a, "a"), (op_b, "b")) if op}
        left, right = (
            {None: x, "transpose": x.T, "adjoint": x.conj().T}[op] for x, op in ((a, op_a), (b, op_b))
        )
        found = ooc_gemm.multiply(a, b, alpha=3, out_dtype=wide, device=every_device, **options).array
        assert_same(found, 3 * product(left, right))


@pytest.mark.parametrize(
    "pair",
    [("i1", "u1"), ("i1", "i2"), ("i1", "f2"), ("i1", "f4"), ("i4", "f4"), ("u8", "i8"), ("f2", "f4"),
     ("f4", "f8"), ("f4", "c8"), ("f8", "c8"), ("c8", "c16"), ("i8", "c8"), ("u2", "i4")],
    ids=str,
)  # fmt: skip
def test_mixed_types_promote_as_in_numpy(pair, every_device):
    for first, second in (pair, pair[::-1]):
        a, b = matrix((13, 40), first, 1) // (1 if first[0] in "fc" else 50), matrix((40, 21), second, 2)
        if np.dtype(first).kind == "c":
            a = matrix((13, 40), first, 1)
        if np.dtype(second).kind in "iu":
            b = b // 50
        result = ooc_gemm.multiply(a, b, device=every_device)
        eight_bits = np.dtype(first).itemsize == np.dtype(second).itemsize == 1
        assert result.array.dtype == (np.int32 if eight_bits else np.result_type(a, b))
        assert_same(result.array, product(a, b))


def test_complex_factors(tmp_path, every_device):
    a, b, c = matrix((20, 30), "c16", 1), matrix((30, 10), "c16", 2), matrix((20, 10), "c16", 3)
    path = make(tmp_path / "c", c, chunks=(7, 7), compressors=None)
    ooc_gemm.multiply(a, b, path, alpha=1 - 2j, beta=0.5j, device=every_device)
    assert_same(zarr.open_array(path, mode="r")[:], (1 - 2j) * product(a, b) + 0.5j * c)


@pytest.mark.parametrize("dtype", ["i1", "i4", "i8"])
def test_integer_factors(tmp_path, dtype, every_device):
    a, b = matrix((20, 30), dtype, 1), matrix((30, 10), dtype, 2)
    c = matrix((20, 10), "i4" if dtype == "i1" else dtype, 3)
    path = make(tmp_path / "c", c, chunks=(7, 7), compressors=None)
    ooc_gemm.multiply(a, b, path, alpha=-2, beta=7, device=every_device)
    assert_same(zarr.open_array(path, mode="r")[:], -2 * product(a, b) + 7 * c.astype("i8"))


def test_one_array_given_twice(tmp_path, every_device):
    g = matrix((47, 90), "i1", 1)
    path = make(tmp_path / "g", g, chunks=(20, 31), compressors=None)
    result = ooc_gemm.multiply(path, path, tmp_path / "k", transpose_b=True, device=every_device)
    assert_same(zarr.open_array(tmp_path / "k", mode="r")[:], product(g, g.T))
    check_bytes(result)
    array = zarr.open_array(path, mode="r")
    assert_same(ooc_gemm.multiply(array, array, transpose_a=True, device=every_device).array, product(g.T, g))


@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("beta", [0, 3])
def test_no_k_gives_beta_c(tmp_path, compressors, beta, every_device):
    c = matrix((23, 14), "f4", 1)
    path = make(tmp_path / "c", c, chunks=(5, 6), compressors=compressors)
    empty = np.empty((23, 0), "f4"), np.empty((0, 14), "f4")
    ooc_gemm.multiply(*empty, path, beta=beta, force=beta == 0, device=every_device)
    assert_same(zarr.open_array(path, mode="r")[:], beta * c.astype("f8"))
    stored = [make(tmp_path / name, x, chunks=(4, 4)) for name, x in zip("ab", empty, strict=True)]
    assert_same(ooc_gemm.multiply(*stored, device=every_device).array, np.zeros((23, 14)))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_products(tmp_path, shape, every_device):
    m, n = shape
    a, b = np.ones((m, 3), "f4"), np.ones((3, n), "f4")
    assert ooc_gemm.multiply(a, b, device=every_device).array.shape == shape
    ooc_gemm.multiply(a, b, tmp_path / "c", device=every_device)
    c = zarr.open_array(tmp_path / "c", mode="r")
    assert c.shape == shape
    assert c.dtype == np.float32
    ooc_gemm.multiply(a, b, tmp_path / "c", beta=2, device=every_device)
    assert ooc_gemm.verify(a, b, tmp_path / "c").ok


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
def test_nan_and_infinity_come_out_where_numpy_has_them(dtype, every_device):
    a, b = matrix((40, 30), dtype, 1), matrix((30, 20), dtype, 2)
    a[3, 4], a[5, 6], b[7, 8] = np.nan, np.inf, -np.inf
    b[6, :] = np.where(np.arange(20) == 11, 0, 1)  # Inf · 0
    found = ooc_gemm.multiply(a, b, device=every_device).array
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.result_type(dtype, "f4")) @ b.astype(np.result_type(dtype, "f4"))
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    if dtype != "c8":
        assert_same(found, product(a, b))


def test_beta_sees_the_nan_in_c_and_beta_0_does_not(tmp_path, every_device):
    a, b = matrix((40, 30), "f4", 1), matrix((30, 20), "f4", 2)
    c = np.zeros((40, 20), "f4")
    c[4, 5], c[6, 7] = np.nan, np.inf
    path = make(tmp_path / "c", c, chunks=(16, 16), compressors=None)
    ooc_gemm.multiply(a, b, path, beta=0.5, device=every_device)
    assert_same(zarr.open_array(path, mode="r")[:], product(a, b) + 0.5 * c.astype("f8"))
    ooc_gemm.multiply(a, b, path, beta=0, force=True, device=every_device)
    assert_same(zarr.open_array(path, mode="r")[:], product(a, b))


def test_float16_adds_up_in_float32_and_overflows_to_infinity(every_device):
    a = np.full((3, 20_000), 1 / 16, "f2")
    assert np.array_equal(
        ooc_gemm.multiply(a, a, transpose_b=True, device=every_device).array, np.full((3, 3), 78.125)
    )
    large = np.full((2, 2), 300, "f2")
    assert np.isinf(ooc_gemm.multiply(large, large, device=every_device).array).all()
    exact = ooc_gemm.multiply(large, large, device=every_device, out_dtype="f4").array
    assert np.array_equal(exact, np.full((2, 2), 180_000, "f4"))


MISSING = {
    "raw": {"fill_value": 3, **RAW},
    "zstd": {"fill_value": 3},
    "transposed": {"fill_value": 3, "filters": [TransposeCodec(order=(1, 0))], **RAW},
    "no fill value": {},
    "v2": {"zarr_format": 2, "fill_value": 3, **RAW},
    "v2 zstd": {"zarr_format": 2, "fill_value": 3},
    "v2 no fill value": {"zarr_format": 2, "fill_value": None, **RAW},
    "NaN": {"fill_value": np.nan, **RAW},
}


@pytest.mark.parametrize("dtype", ["f4", "i2"])
@pytest.mark.parametrize("options", MISSING)
def test_missing_chunks_are_the_fill_value(tmp_path, dtype, options, every_device):
    if options == "NaN" and dtype == "i2":
        pytest.skip("no integer is NaN")
    array = zarr.create_array(
        tmp_path / "a", shape=(50, 50), chunks=(20, 20), dtype=dtype, **MISSING[options]
    )
    array[20:40, 20:40] = 1
    result = ooc_gemm.multiply(tmp_path / "a", tmp_path / "a", device=every_device)
    values = zarr.open_array(tmp_path / "a", mode="r")[:]
    assert_same(result.array, product(values, values))
    check_bytes(result)


def test_all_chunks_of_a_result_are_written_even_zeros(tmp_path, every_device):
    zero = np.zeros((30, 30), "f4")
    result = ooc_gemm.multiply(zero, zero, tmp_path / "c", chunks=(10, 10), device=every_device)
    assert len([file for file in (tmp_path / "c/c").rglob("*") if file.is_file()]) == 9
    check_bytes(result)


def test_every_way_to_name_an_array(tmp_path, every_device):
    a, b = matrix((30, 20), "f4", 1), matrix((20, 10), "f4", 2)
    zarr.create_group(tmp_path / "data.zarr")
    zarr.create_group(tmp_path / "old.zarr", zarr_format=2)
    left = make(tmp_path / "data.zarr" / "x", a, chunks=(8, 8))
    right = make(tmp_path / "old.zarr" / "deep" / "y", b, chunks=(8, 8), zarr_format=2, compressors=None)
    (tmp_path / "a link").symlink_to(left)
    memory = zarr.create_array({}, shape=b.shape, chunks=(7, 7), dtype="f4")
    memory[...] = b
    expected = product(a, b)
    cases = [
        (left, right),
        (tmp_path / "a link", tmp_path / "old.zarr/../old.zarr/deep/y/"),
        ((tmp_path / "data.zarr" / "x").as_uri(), right),
        ((tmp_path / "a link").as_uri(), memory),
        (zarr.open_array(left, mode="r"), zarr.open_group(tmp_path / "old.zarr", mode="r")["deep/y"]),
        (a, np.asfortranarray(b)),
        (a.astype(">f4"), b[::-1][::-1]),
    ]
    for x, y in cases:
        assert_same(ooc_gemm.multiply(x, y, device=every_device).array, expected)
    for index, c in enumerate(
        [tmp_path / "data.zarr" / "c", str(tmp_path / "new" / "group" / "c"), (tmp_path / "d e").as_uri()]
    ):
        ooc_gemm.multiply(left, right, c, device=every_device)
        assert_same(
            zarr.open_array(str(c), mode="r")[:] if index < 2 else zarr.open_array(tmp_path / "d e")[:],
            expected,
        )
    handle = zarr.create_array(tmp_path / "handle", shape=(1, 1), chunks=(1, 1), dtype="i1")
    with pytest.raises(ooc_gemm.InputError, match="exists"):
        ooc_gemm.multiply(left, right, handle, device=every_device)
    ooc_gemm.multiply(left, right, handle, force=True, device=every_device)
    assert_same(zarr.open_array(tmp_path / "handle", mode="r")[:], expected)


def test_a_c_in_memory_that_exists_is_not_replaced_unasked():
    c = zarr.create_array({}, shape=(2, 2), chunks=(1, 1), dtype="f4", fill_value=7)
    with pytest.raises(ooc_gemm.InputError, match="exists"):
        ooc_gemm.multiply(np.ones((2, 2)), np.ones((2, 2)), c, device="cpu")
    assert (c[:] == 7).all()
    ooc_gemm.multiply(np.ones((2, 2), "f4"), np.ones((2, 2), "f4"), c, force=True, device="cpu")
    assert (zarr.open_array(c.store, mode="r")[:] == 2).all()


def test_a_c_at_a_url_that_exists_is_not_replaced_unasked():
    one = np.ones((2, 2), "f4")
    ooc_gemm.multiply(one, one, "memory://bucket/c", device="cpu")
    assert (zarr.open_array("memory://bucket/c", mode="r")[:] == 2).all()
    with pytest.raises(ooc_gemm.InputError, match="exists"):
        ooc_gemm.multiply(one, 5 * one, "memory://bucket/c", device="cpu")
    assert (zarr.open_array("memory://bucket/c", mode="r")[:] == 2).all()
    assert_same(ooc_gemm.multiply("memory://bucket/c", one, device="cpu").array, np.full((2, 2), 4.0))


def test_force_leaves_nothing_of_the_old_c(tmp_path, every_device):
    make(tmp_path / "c", np.ones((50, 50)), chunks=(5, 5), compressors=None, zarr_format=2)
    ooc_gemm.multiply(np.ones((4, 4)), np.ones((4, 4)), tmp_path / "c", force=True, device=every_device)
    files = sorted(
        str(file.relative_to(tmp_path / "c")) for file in (tmp_path / "c").rglob("*") if file.is_file()
    )
    assert files == ["c/0/0", "zarr.json"]


K = 131_072
"""2^14 · 2^17 = 2^31: one more than int32 holds."""


@pytest.mark.parametrize("sign", [1, -1])
def test_int8_extremes_never_wrap(sign, every_device):
    a, b = np.full((2, K), -128, "i1"), np.full((K, 3), -128 if sign > 0 else 127, "i1")
    expected = product(a, b)
    exact = ooc_gemm.multiply(a, b, out_dtype="i8", device=every_device).array
    assert_same(exact, expected)
    if sign > 0:
        with pytest.raises(ooc_gemm.RangeError, match="2147483648 does not fit int32"):
            ooc_gemm.multiply(a, b, device=every_device)
        assert_same(ooc_gemm.multiply(a[:, 1:], b[1:], device=every_device).array, product(a[:, 1:], b[1:]))
    else:
        assert_same(ooc_gemm.multiply(a, b, device=every_device).array, expected)


@pytest.mark.parametrize("dtype", ["u1", "i2", "u2"])
def test_small_integer_extremes_are_exact(dtype, every_device):
    info = np.iinfo(dtype)
    a = np.full((3, 5000), info.max, dtype)
    a[1, ::2] = info.min
    a[2] = np.arange(5000) % 251
    assert_same(
        ooc_gemm.multiply(a, a, transpose_b=True, out_dtype="i8", device=every_device).array, product(a, a.T)
    )


def test_wide_integers_never_wrap(every_device):
    big = np.full((2, 2), 2**31)
    assert_same(ooc_gemm.multiply(big, big // 4, device=every_device).array, product(big, big // 4))
    with pytest.raises(ooc_gemm.RangeError, match="int64"):
        ooc_gemm.multiply(big, big, device=every_device)
    with pytest.raises(ooc_gemm.RangeError, match="int64"):
        ooc_gemm.multiply(np.full((2, 2), 2**63, "u8"), np.ones((2, 2), "u8"), device=every_device)
    with pytest.raises(ooc_gemm.RangeError, match="does not fit"):
        ooc_gemm.multiply(np.full((2, 2), 200, "i2"), np.full((2, 2), 200, "i2"), device=every_device)
    with pytest.raises(ooc_gemm.RangeError, match="does not fit"):
        ooc_gemm.multiply(
            np.full((2, 2), -1, "i2"), np.ones((2, 2), "i2"), out_dtype="u2", device=every_device
        )


def test_progress_reaches_the_end(every_device):
    seen = []
    ooc_gemm.multiply(
        np.ones((9, 9)),
        np.ones((9, 9)),
        device=every_device,
        progress=lambda fraction, plan, trace: seen.append(fraction),
    )
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_the_trace_has_every_stage(tmp_path, every_device):
    import json

    a = make(tmp_path / "a", matrix((40, 40), "f4", 1), chunks=(10, 10))
    result = ooc_gemm.multiply(a, a, tmp_path / "c", trace=tmp_path / "t.json", device=every_device)
    events = [
        event for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["ph"] == "X"
    ]
    wanted = {"read", "upload", "compute", "download", "write"}
    assert {event["name"] for event in events} >= wanted - (
        {"compute"} if result.device in ("late", "early") else set()
    )
    for stage, moved in (("read", result.bytes_read), ("write", result.bytes_written)):
        assert sum(event["args"]["bytes"] for event in events if event["name"] == stage) == moved
