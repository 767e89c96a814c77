"""kernels/prepare/place.cu against what a transform does on the CPU, bit by bit: on the
emulator of kernels, and on a GPU."""

from itertools import cycle

import numpy as np
import pytest
from conftest import gpu_missing

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.devices.cuda.transforms import as_compared
from ooc_gemm.engine.transform import Lines, Transform
from ooc_gemm.ladder.emulator import ORDERS, SIGNATURE, Emulator, Problem, compiler_missing, whole_source

SHAPES = ((1, 1), (3, 70), (130, 5), (32, 64), (65, 97))
"""The tiles are of 32×32."""
CASES = [
    # stored, panel, turned, missing
    ("int8", "float32", False, -3.0), ("uint8", "float32", True, 200.0), ("int16", "float64", False, None),
    ("uint16", "float32", True, 65535.0), ("int32", "float64", True, 0.5), ("uint32", "float64", False, -1.0),
    ("int64", "float64", False, 5.0), ("uint64", "float64", True, 7.0), ("float16", "float32", False, np.inf),
    ("float16", "float64", True, np.nan), ("float32", "float32", False, np.nan),
    ("float32", "float32", True, 1e20),
    ("float64", "float64", True, -np.inf), ("float32", "float64", False, None),
]  # fmt: skip


def values(shape, dtype):
    """Of all magnitudes, with what is no number."""
    rng, dtype = np.random.default_rng(1), np.dtype(dtype)
    count = int(np.prod(shape))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        found = rng.integers(info.min, info.max, count, dtype, endpoint=True)
        found[::3] = rng.integers(max(info.min, -9), 9, len(found[::3]))
        found[:: max(1, count // 7)] = info.max
        return found.reshape(shape)
    with np.errstate(over="ignore"):
        found = (rng.standard_normal(count) * 2.0 ** rng.integers(-26, 18, count)).astype(dtype)
    found[::5] = np.float32(1e20) if dtype != np.float16 else np.float16(65504)
    for start, value in enumerate((np.nan, np.inf, -np.inf, -0.0)):
        found[start::11] = value
    return found.reshape(shape)


def transform(shape, real, missing):
    """With all four vectors, as the host splits them."""
    rng = np.random.default_rng(2)
    rows, cols, down, across = (rng.standard_normal(extent) for extent in (*shape, *shape))
    return Transform(Lines.of(rows, down, real), Lines.of(cols, across, real), missing, fill=2.5)


CALL = """
extern "C" __global__ void called({signature}) {{
    const Real* const v = reinterpret_cast<const Real*>(B);
    place(m, n, reinterpret_cast<const SOURCE*>(A), lda, C, ldc, v, v + ldb, v + 2 * ldb, v + 3 * ldb,
          v + 4 * ldb, v + 5 * ldb, {gone}, Source({missing}), Real(beta));
}}
"""
"""Gives the kernel the arguments of a product: X as A, the vectors as rows of B, Y as C, the fill as β."""


def wrapped(index, stored, panel, turned, missing):
    """A configuration and a source that the emulator takes."""
    config = preparations.place(stored, panel, turned)
    gone, number = as_compared(missing, np.dtype(stored))
    text = f"{'-' if number < 0 else ''}__builtin_inf()" if np.isinf(number) else repr(number.item())
    signature = SIGNATURE.replace("T ", "Real ").replace("T*", "Real*")
    macros = (*config.macros, ("place", f"place{index}"))
    call = CALL.format(signature=signature, gone=gone, missing=text)
    return Config("called", panel, config.bm, config.bn, config.block, macros), whole_source("place") + call


def arguments(shape, stored, panel, turned, missing, least_pitch=0):
    """X with padded rows, a transform, the place for Y, and what belongs there."""
    real = np.dtype(panel)
    x, change = values(shape, stored), transform(shape, real, missing)
    full = np.zeros((shape[0], shape[1] + 3), stored)
    full[:, : shape[1]] = x
    high, wide = shape[::-1] if turned else shape
    room = np.full((high + 1, max(wide, least_pitch) + 2), 7, real)
    wanted = np.empty(shape, real)
    change.place(x, (0, shape[0]), (0, shape[1]), wanted)
    return full, change, room, wanted.T if turned else wanted


def check(found, wanted):
    """Bit by bit, but NaN is NaN; and nothing else was written to."""
    number, part = ~np.isnan(wanted), found[: wanted.shape[0], : wanted.shape[1]]
    assert np.array_equal(np.isnan(part), ~number)
    assert part[number].tobytes() == wanted[number].tobytes()
    assert (found[:, wanted.shape[1] :] == 7).all()
    assert (found[wanted.shape[0] :] == 7).all()


def vectors_of(change):
    """The six vectors, in the kernel's order."""
    rows, cols = change.rows, change.cols
    return *rows.shift, rows.scale, *cols.shift, cols.scale


@pytest.mark.slow
def test_it_agrees_with_the_cpu_on_the_emulator(tmp_path):
    if why := compiler_missing():
        pytest.skip(why)
    kernels = {str(case): wrapped(i, *case) for i, case in enumerate(CASES)}
    emulator = Emulator(tmp_path, kernels)
    for case, label in zip(CASES, kernels, strict=True):
        problems, wanted = [], []
        for shape, order in zip(SHAPES, cycle(ORDERS), strict=False):
            full, change, room, right = arguments(shape, *case, least_pitch=max(shape))
            vectors = np.zeros((6, max(shape)), room.dtype)
            for row, vector in zip(vectors, vectors_of(change), strict=True):
                row[: len(vector)] = vector
            problems.append(Problem(*shape, shape[1], 1, full, vectors, change.fill, room, order))
            wanted.append(right)
        for result, right in zip(emulator.run(label, problems), wanted, strict=True):
            check(result, right)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_the_cpu_on_a_gpu(case):
    if why := gpu_missing():
        pytest.skip(why)
    import cupy

    from ooc_gemm.cuda_kernels.launch import load

    stored, panel, turned, missing = case
    config, real = preparations.place(stored, panel, turned), np.dtype(panel)
    gone, number = as_compared(missing, np.dtype(stored))
    i64, u = np.int64, np.uintp
    for rows, cols in (*SHAPES, (1000, 3), (2, 70_001)):
        full, change, room, wanted = arguments((rows, cols), *case)
        x, y, vectors = cupy.asarray(full), cupy.asarray(room), [cupy.asarray(v) for v in vectors_of(change)]
        args = (
            i64(rows), i64(cols), u(x.data.ptr), i64(full.shape[1]), u(y.data.ptr), i64(room.shape[1]),
            *(u(v.data.ptr) for v in vectors), np.int32(gone), number, real.type(change.fill),
        )  # fmt: skip
        load(config)["place"](config.grid(rows, cols), config.block, args, cupy.cuda.get_current_stream())
        check(y.get(), wanted)


@pytest.mark.parametrize(
    ("dtype", "missing", "found"),
    [
        ("i1", None, (0, 0)), ("i1", -9.0, (1, -9)), ("i1", 200.0, (0, 0)), ("i1", 0.5, (0, 0)),
        ("i1", np.nan, (0, 0)), ("u8", 2.0**63, (1, 2**63)), ("f2", 0.1, (1, float(np.float16(0.1)))),
        ("f2", 1e9, (0, 0)),        ("f2", np.nan, (2, 0)), ("f4", 1e300, (0, 0)), ("f8", 1e300, (1, 1e300)),
        ("f4", -np.inf, (1, -np.inf)),
    ],
)  # fmt: skip
def test_what_is_missing(dtype, missing, found):
    kind, number = as_compared(missing, np.dtype(dtype))
    assert (kind, number) == found
    assert number.dtype == ("f4" if dtype == "f2" else dtype)
