"""The kernels of ozaki2 against their specification (tests/helpers/ozaki.py), bit by bit, on the emulator of
kernels."""

import itertools
from itertools import cycle

import numpy as np
import ozaki
import pytest
from called import Called, given, made, number
from ozaki_on_cpu import LINE, STATE

from ooc_gemm.cuda_kernels import preparations, tensor_tiles
from ooc_gemm.cuda_kernels.compile import headers, kernel_source
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.cuda_kernels.moduli import FLOATING, MODULI, least_count, moduli_text
from ooc_gemm.ladder.emulator import compiler_missing, whole_source

pytestmark = pytest.mark.slow  # kernels are compiled with sanitizers
RNG = np.random.default_rng(8)
CALLS = {
    "depth_largest": (
        f"{number(0)}, {number(1)}, {given('double', 0)}, {number(2)}, {made('u32', 0)}, {made('u32', 1)}, "
        f"{made('double', 2)}"
    ),
    "equilibrate": f"{number(0)}, {given('u32', 0)}, {given('u32', 1)}, {made('int', 0)}, {made('State', 1)}",
    "lines": (
        f"{number(0)}, {number(1)}, {given('double', 0)}, {number(2)}, "
        f"{number(3)} ? {given('int', 1)} : nullptr, {number(4)}, "
        f"{number(6)} ? {given('u32', 2)} : nullptr, {number(6)} ? {given('double', 3)} : nullptr, "
        f"{made('Line', 0)}, "
        f"{made('signed char', 1)}, {number(5)}, {made('State', 2)}"
    ),
    "decide": (
        f"{number(0)}, {number(1)}, {number(2)}, {given('Line', 0)}, {made('int', 0)}, {given('Line', 1)}, "
        f"{made('int', 1)}, alpha, {made('State', 2)}"
    ),
    "residues": (
        f"{number(0)}, {number(1)}, {given('ELEMENT', 0)}, {number(2)}, {given('int', 1)}, {number(3)}, "
        f"{given('int', 2)}, {made('u32', 0)}, {number(4)}, {number(5)}, {given('State', 3)}"
    ),
    "recombine": (
        f"{number(0)}, {number(1)}, T({number(6)}), T({number(7)}), {given('u32', 0)}, {number(2)}, "
        f"{number(3)}, T({number(8)}), T({number(9)}), {made('T', 0)}, {number(4)}, {given('int', 1)}, "
        f"{given('int', 2)}, {given('State', 3)}"
    ),
}
"""Kernel → its arguments, in C++."""


@pytest.fixture(autouse=True)
def compiler():
    if why := compiler_missing():
        pytest.skip(why)


def called(folder, config, *names):
    """Some kernels of a source."""
    folder.mkdir(exist_ok=True)
    return Called(folder, config, {name: CALLS[name] for name in names}, whole_source(config.kernel))


def state(**fields):
    found = np.zeros(1, STATE)
    for name, value in fields.items():
        found[name] = value
    return found


SPECIAL = ("", "units", "subnormal", "huge", "zeros", "alone")


def pair(lines, k, dtype, special):
    """op(A) of so many lines, and the transpose of op(B)."""

    def draw(lines):
        x = RNG.standard_normal((lines, k))
        return x + 1j * RNG.standard_normal((lines, k)) if dtype == "complex128" else x

    x, y = draw(lines), draw(max(2, lines // 2))
    if special == "units":
        units = 2.0 ** RNG.integers(-300, 301, k)
        x, y = x * units, y / units
    elif special == "subnormal":
        x *= 2.0**-1060
    elif special == "huge":
        x, y = x * 2.0**1000, y * 2.0**-900
    elif special == "zeros":
        x[0], x[:, ::3], y[:, ::5] = 0, 0, 0
        x[-1, -1] = 5e-324
    elif special == "alone":
        x[:, k // 2] *= 1e9
        y[:, k // 2] = 0
    return x, y


def with_padding(x, pitch=4):
    """Rows of a multiple of some elements, with poison behind them."""
    full = np.full(
        (len(x), -(-x.shape[1] // pitch) * pitch + pitch), np.nan if x.dtype.kind in "fc" else 77, x.dtype
    )
    full[:, : x.shape[1]] = x
    return full


SHAPES = ((1, 1), (5, 130), (3, 1027), (130, 33))
"""Lines and k."""


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_scales(tmp_path, dtype):
    names = "depth_largest", "equilibrate", "lines", "decide"
    run, parts = called(tmp_path, preparations.scale(dtype), *names), 2 if dtype == "complex128" else 1
    for (count, k), special in ((shape, special) for shape in SHAPES for special in SPECIAL):
        x, y = pair(count, k, dtype, special)
        largest, tops = [], []
        for z in (x, y):
            full, across = with_padding(z), -(-parts * k // 256)
            blocks = -(-len(z) // 128) * across
            room = [np.zeros(k, "u4"), np.zeros(len(z), "u4"), np.full((len(z), across), np.nan)]
            of_depth, *of_lines = run("depth_largest", blocks, (len(z), k, full.shape[1]), [full], room)
            assert np.array_equal(of_depth, ozaki.depth_largest(z))
            assert np.array_equal(of_lines[0], ozaki.line_largest(z))
            largest.append(of_depth), tops.append(of_lines)
        depth, found = run("equilibrate", 1, (k,), largest, [np.zeros(k, "i4"), state()])
        wanted, shifted = ozaki.equilibrate(*largest)
        assert np.array_equal(depth, wanted)
        assert found["shifted"] == shifted
        assert shifted or special not in ("units", "alone") or k == 1
        lines = []
        for (z, sign, top), known in itertools.product(((x, 1, tops[0]), (y, -1, tops[1])), (0, 1)):
            wanted = ozaki.Lines(z, depth if shifted else None, sign)
            full, width = with_padding(z), len(ozaki.sampled(k))
            numbers = len(z), k, full.shape[1], 1, sign, width + 5, known
            room = [np.zeros(len(z), LINE), np.full((len(z), width + 5), 99, "i1"), state(shifted=shifted)]
            made_lines, magnitudes, found = run("lines", 3, numbers, [full, depth, *top], room)
            assert np.array_equal(made_lines["exponent"], wanted.exponents)
            np.testing.assert_allclose(made_lines["squares"], wanted.squares, rtol=1e-14)
            assert np.array_equal(magnitudes[:, :width], wanted.magnitudes)
            assert (magnitudes[:, width:] == 99).all()
            assert not found["fallback"]
            lines.append((made_lines, wanted))
        (made_x, want_x), _, (made_y, want_y), _ = lines
        smallest = ozaki.least(want_x, want_y)
        for tolerance in (0.25, 1e-30, 1e30, 0.25 / 2**6):
            wanted = ozaki.decide(want_x, want_y, k, smallest, tolerance)
            room = [
                np.full(len(x), 99, "i4"),
                np.full(len(y), 99, "i4"),
                state(shifted=shifted, least=smallest),
            ]
            scales_x, scales_y, found = run(
                "decide", 1, (len(x), len(y), k), [made_x, made_y], room, tolerance
            )
            assert (found["moduli"], found["fallback"]) == (wanted, wanted == 0)
            if wanted:
                assert np.array_equal(scales_x, want_x.scales(wanted))
                assert np.array_equal(scales_y, want_y.scales(wanted))


def test_infinity_and_nan_raise_the_flag(tmp_path):
    run = called(tmp_path, preparations.scale("float64"), "lines")
    for value in (np.inf, -np.inf, np.nan):
        x, _ = pair(3, 700, "float64", "")
        x[1, 600] = value
        for known in (0, 1):
            room = [np.zeros(3, LINE), np.zeros((3, 700), "i1"), state()]
            numbers = 3, 700, 700, 0, 1, 700, known
            inputs = [x, np.zeros(1), ozaki.line_largest(x), np.full((3, 3), value)]
            *_, found = run("lines", 2, numbers, inputs, room)
            assert found["fallback"]


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_residues_and_what_becomes_of_them(tmp_path, dtype, conjugate):
    if conjugate and dtype == "float64":
        pytest.skip("real numbers have no conjugates")
    parts, each = (3, 4) if dtype == "complex128" else (1, 8)
    cut = called(tmp_path / "a", preparations.residues(dtype, conjugate=conjugate), "residues")
    join = called(tmp_path / "b", preparations.recombine(dtype), "recombine")
    for (count, k), special, moduli in zip(SHAPES * 3, cycle(SPECIAL), cycle(FLOATING), strict=False):
        x, y = pair(count, k, dtype, special)
        depth, shifted = ozaki.equilibrate(ozaki.depth_largest(x), ozaki.depth_largest(y))
        sides = []
        for z, sign in ((x, 1), (y, -1)):
            lines = ozaki.Lines(z, depth if shifted else None, sign)
            scales = lines.scales(moduli).astype("i4")
            turned = z.conj() if conjugate else z
            wanted = ozaki.planes(ozaki.integers(turned, scales, lines), moduli)
            full, pitch = with_padding(z), -(-k // 16) * 16
            shape = moduli, parts, len(z), pitch
            numbers = len(z), k, full.shape[1], sign, pitch // 4, len(z) * pitch // 4
            arrays = [full, depth.astype("i4"), scales, state(moduli=moduli, shifted=shifted)]
            room = [np.full(shape, 99, "i1")]
            (found,) = cut("residues", len(z) * -(-k // (256 * each)), numbers, arrays, room)
            assert np.array_equal(found[..., :k], wanted)
            assert (found[..., -(-k // each) * each :] == 99).all()
            sides.append((wanted, scales))
        sums = ozaki.products(sides[0][0], sides[1][0])
        wanted = ozaki.recombine(sums, sides[0][1], sides[1][1])
        for alpha, beta in ((1, 0), (2, -3)):
            check_joined(join, sums, [scales for _, scales in sides], wanted, alpha, beta)


def check_joined(join, sums, scales, wanted, alpha, beta):
    """C of residues, in rows that begin at multiples of 16 bytes or between them."""
    moduli, parts, m, n = sums.shape
    pitch = -(-n // 16) * 16
    full = np.full((moduli, parts, m, pitch), 55, "i1")
    full[..., :n] = sums
    for pad in (0, 1, 2):
        old = np.full((m, n + pad), np.nan, wanted.dtype)
        old[:, :n] = RNG.integers(-9, 9, (m, n)) if beta else np.nan
        numbers = m, n, pitch // 4, m * pitch // 4, n + pad, 0, alpha, 0, beta, 0
        arrays = [full, *scales, state(moduli=moduli)]
        (c,) = join("recombine", m * -(-n // 1024), numbers, arrays, [old])
        want = alpha * wanted + (beta * old[:, :n] if beta else 0)
        assert c[:, :n].tobytes() == (want + 0.0).tobytes() or np.array_equal(c[:, :n], want)
        assert np.isnan(c[:, n:]).all()


def test_sums_of_all_sizes_are_found(tmp_path):
    """From 0 up to the bound, of both signs; rounded once, to even where they lie in between."""
    join = called(tmp_path, preparations.recombine("float64"), "recombine")
    for moduli in FLOATING:
        most = ozaki.bound(moduli)
        sizes = [
            0,
            1,
            2**53 + 1,
            2**53 + 3,
            2**64 - 1,
            2**64,
            2**64 + 2**11,
            2**100 + 2**47,
            2**100 + 2**47 + 1,
        ]
        sizes += [
            most,
            most - 1,
            *(int(x) << shift for x in RNG.integers(1, 2**60, 9) for shift in (0, 30, 50)),
        ]
        values = np.array([sign * min(x, most) for x in sizes for sign in (1, -1)], object)
        residues = np.array([ozaki.residue(values, p).astype("i1") for p in MODULI[:moduli]], "i1")
        sums = residues.reshape(moduli, 1, 2, -1)
        assert np.array_equal(ozaki.found(sums).ravel(), values)
        scales = np.array([3, -2], "i4"), RNG.integers(-900, 900, sums.shape[3]).astype("i4")
        check_joined(join, sums, scales, ozaki.recombine(sums, *scales), 1, 0)
        far = np.array([1060, 1100], "i4"), np.array([0] * sums.shape[3], "i4")  # subnormal results
        check_joined(join, sums, far, ozaki.recombine(sums, *far), 1, 0)


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "uint32"])
def test_integers(tmp_path, dtype):
    info, k = np.iinfo(dtype), 33
    most = max(-int(info.min), int(info.max))
    count = least_count(min(most * most * k, 2**63 - 1))
    x, y = (RNG.integers(info.min, info.max, (lines, k), dtype, endpoint=True) for lines in (5, 9))
    if most**2 * k >= 2**63:
        x //= 64
    x[0], y[1] = info.min, info.max
    sides = []
    cut = called(tmp_path / "a", preparations.residues(dtype, count), "residues")
    for z in (x, y):
        full, pitch = with_padding(z), 48
        numbers = len(z), k, full.shape[1], 1, pitch // 4, len(z) * pitch // 4
        room = [np.full((count, 1, len(z), pitch), 99, "i1")]
        (found,) = cut("residues", len(z), numbers, [full], room)
        wanted = ozaki.planes(z.astype("i8")[None], count)
        assert np.array_equal(found[..., :k], wanted)
        sides.append(wanted)
    sums = ozaki.products(*sides)
    want = x.astype("i8") @ y.astype("i8").T
    assert np.array_equal(ozaki.found(sums)[0], x.astype(object) @ y.astype(object).T)
    join = called(tmp_path / "b", preparations.recombine("int64", (count,)), "recombine")
    full = np.zeros((count, 1, 5, 16), "i1")
    full[..., :9] = sums
    for alpha, beta in ((1, 0), (-3, 2), (0, 1)):
        old = RNG.integers(-(2**61), 2**61, (5, 11))
        (c,) = join("recombine", 5, (5, 9, 4, 20, 11, 0, alpha, 0, beta, 0), [full], [old])
        with np.errstate(over="ignore"):
            assert np.array_equal(c[:, :9], alpha * want + beta * old[:, :9])
        assert np.array_equal(c[:, 9:], old[:, 9:])


HELD = """
    S d[ACC];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 0; i < ACC; ++i) {
        const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
        d[i] = sums[row * BN + col];
    }
"""
"""Sums as the instructions of wgmma.cu spread them over the threads of a warpgroup."""
ENDS = {
    1: (
        "const int* sums, char* out, int pitch, int col, int m, int n, int number",
        "store_residues(d, out, pitch, 16 * warp, col, m, n, modulus(number))",
        ", ".join([given("int", 0), made("char", 0), *map(number, range(5))]),
    ),
    2: (
        "const int* sums, int* least, int col, int m, int n",
        "store_least(d, least, 16 * warp, col, m, n)",
        ", ".join([given("int", 0), made("int", 0), *map(number, range(1, 4))]),
    ),
}
"""EPILOGUE → parameters of a kernel, how it calls the end of wgmma.cu, and its arguments."""


@pytest.mark.parametrize("epilogue", ENDS)
def test_sums_leave_the_tensor_cores(tmp_path, epilogue):
    """As residues, and as the least of them."""
    source, included = whole_source("wgmma"), headers(kernel_source("residues"))
    ends = source[source.index("#if EPILOGUE == 1\n// The residues of") : source.index("// ---- the kernel")]
    parameters, end, arguments = ENDS[epilogue]
    text = "using S = int;\nconstexpr int ACC = BN / 2;\n"
    text += included["common/types.cuh"] + included["common/residues.cuh"] + ends
    text += f'extern "C" __global__ void end({parameters}) {{{HELD} {end}; }}\n'
    macros = (("EPILOGUE", epilogue), ("BN", 64), ("MODULI", moduli_text()))
    config = Config("end", "int32", 64, 64, (128, 1), macros)
    run = Called(tmp_path, config, {"end": arguments}, text)
    for m, n, col in ((64, 64, 0), (61, 70, 16), (3, 30, 0), (1, 1, 0)):
        sums = RNG.integers(-(2**30), 2**30, (64, 64), "i4", endpoint=True)
        sums[0, :4] = 2**30, -(2**30), 127, -128
        inside = sums[:m, : n - col]
        if epilogue == 2:
            (least,) = run("end", 1, (0, col, m, n), [sums], [np.array([2**31 - 1], "i4")])
            assert least == inside.min()
            continue
        for index, p in enumerate(MODULI):
            pitch, width = col + 64, inside.shape[1]
            (out,) = run("end", 1, (pitch, col, m, n, index), [sums], [np.full((64, pitch), 99, "i1")])
            assert np.array_equal(out[:m, col : col + width], ozaki.residue(inside.astype("i8"), p))
            assert (out[m:] == 99).all()
            assert (out[:, :col] == 99).all()
    shipped = tensor_tiles.of_residues(3), tensor_tiles.of_magnitudes()
    assert [config.value("EPILOGUE") for config in shipped] == list(ENDS)
