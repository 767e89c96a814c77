"""What survey.cu and split.cu find out about the lines of operands of fp16x3, on the emulator of kernels."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from called import Called, given, made, number

from ooc_gemm.cuda_kernels import preparations
from ooc_gemm.ladder.emulator import compiler_missing, whole_source

pytestmark = pytest.mark.slow  # kernels are compiled with sanitizers
LINE = np.dtype(
    [("sum", "f8"), ("squares", "f8"), ("largest", "u4"), ("unlike", "u4"), ("low", "u4"), ("_", "u4")]
)
STATE = np.dtype([("fallback", "u4"), ("shifted", "u4"), ("recount", "u4"), ("sides", "u4", 6)])
KEPT = np.dtype([("made", "u4"), ("found", "u4", 3)])
INFINITE = np.float32(np.inf).view("u4")
TOP, LOW, SPREAD, DROPPED = 14, 0.125, 3, -(1 << 20)
_SWEEP = f"{number(0)}, {number(1)}, {given('float', 0)}, {number(2)}"
_KEPT = f"{number(4)} ? {made('Kept', 3)} : nullptr"
_COUNTED = (
    f"{_SWEEP}, {given('int', 1)}, {number(3)}, {made('Line', 0)}, {made('int', 1)}, {made('State', 2)}, "
    f"{_KEPT}"
)
CALLS = {
    "survey": f"{_SWEEP}, {made('Line', 0)}, {number(3)} ? {made('u32', 1)} : nullptr, {_KEPT}",
    "settle": (
        f"{number(0)}, {number(1)}, {made('Line', 0)}, {made('int', 1)}, {made('int', 1)} + {number(0)}, "
        f"{made('State', 2)}, {_KEPT}, nullptr"
    ),
    "equilibrate": f"{number(0)}, {given('u32', 0)}, {given('u32', 1)}, {made('int', 0)}, {made('State', 1)}",
    "judge": (
        f"{number(0)}, {number(1)}, {number(2)}, {given('Line', 0)}, {given('Line', 1)}, 0.25f, 32.0f, "
        f"{number(3)}, {made('State', 0)}, {_KEPT}, nullptr"
    ),
    "split": (
        f"{number(0)}, {number(1)}, {made('float', 0)}, {number(2)}, {given('int', 0)}, {number(3)}, "
        f"{given('int', 1)}, {made('u32', 0)}, {made('State', 1)}, {made('Kept', 2)}, {made('u32', 3)}"
    ),
    "keep": f"{made('State', 1)}, {made('Kept', 2)}, nullptr, {made('u32', 3)}, {number(0)}, nullptr, 0",
    "row_lines": _COUNTED, "column_largest": _COUNTED, "column_counts": _COUNTED,
    "column_exponents": f"{number(0)}, {made('Line', 0)}, {made('int', 1)}, {made('State', 2)}, {_KEPT}",
}  # fmt: skip
"""Kernel → its arguments, in C++."""
SURVEY = "survey", "settle"
"""Kernels of survey.cu; the others are in split.cu."""
WIDE = "survey", "equilibrate", "judge", "row_lines"
"""Kernels whose blocks have 512 threads."""
RNG = np.random.default_rng(3)
HALVES = {
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x))': "h = __builtin_bit_cast(unsigned short, _Float16(x))",
    'asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(h))': "back = __builtin_bit_cast(_Float16, h)",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(l) : "f"(x - back))': (
        "l = __builtin_bit_cast(unsigned short, _Float16(x - back))"
    ),
}
"""Instructions that the emulator lacks, and what stands for them."""


@pytest.fixture(scope="module", params=[True, False], ids=["along k", "along m or n"])
def along_k(request):
    """Whether the operand lies along k."""
    return request.param


@pytest.fixture(scope="module")
def run(along_k, tmp_path_factory):
    """The kernels of split.cu."""
    if why := compiler_missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("split")
    text = whole_source("split")
    for asm, plain in HALVES.items():
        assert asm in text
        text = text.replace(asm, plain)
    survey = {name: CALLS[name] for name in SURVEY}
    split = {name: call for name, call in CALLS.items() if name not in SURVEY}
    sources = (preparations.survey(along_k), survey, whole_source("survey")), (
        preparations.split(along_k), split, text
    )  # fmt: skip
    runs = {}
    for (config, calls, source), threads in product(sources, (256, 512)):
        (inside := folder / f"{config.kernel}{threads}").mkdir()
        called = Called(inside, replace(config, block=(threads, 1)), calls, source)
        runs |= {name: called for name in calls if (512 if name in WIDE else 256) == threads}
    return lambda name, *args: runs[name](name, *args)


def normal(lines, k):
    return RNG.standard_normal((lines, k))


def with_zeros(lines, k):
    x = normal(lines, k)
    x[0], x[:, ::3] = 0, 0
    x[-1] = 0
    x[-1, -1] = 1e-45
    return x


def of_many_sizes(lines, k):
    return normal(lines, k) * 2.0 ** RNG.integers(-30, 30, (lines, k))


def of_one_unit_a_line(lines, k):
    return normal(lines, k) * 2.0 ** RNG.integers(-120, 120, (lines, 1))


def with_a_quiet_part(lines, k):
    x = normal(lines, k)
    x[:, k // 2 :] *= 2.0**-12
    return x


def subnormal(lines, k):
    return normal(lines, k) * 2.0**-130


def with_nan(lines, k):
    x = normal(lines, k)
    x[lines // 2, k // 3] = np.nan
    return x


FAMILIES = (
    normal, with_zeros, of_many_sizes, of_one_unit_a_line, with_a_quiet_part, subnormal, with_nan,
)  # fmt: skip
SHAPES = (1, 1), (5, 130), (3, 1027), (300, 67), (70, 515)
"""Lines and k."""


def stored(x, along_k):
    """A matrix as it is stored: rows of a multiple of 64 elements, with poison behind them."""
    x = x if along_k else x.T
    full = np.full((len(x), -(-x.shape[1] // 64) * 64), np.nan, "f4")
    full[:, : x.shape[1]] = x
    return full


def exponent_of(largest):
    """What brings a magnitude to 2^14 …; 0 for zero."""
    return np.where(largest > 0, np.frexp(np.where(largest > 0, largest, 1))[1] - 1 - TOP, 0)


def counts(x, exponents):
    """Sums of scaled magnitudes, each rounded down, and of their squares, and the number of low elements."""
    y = np.ldexp(np.abs(x).astype("f8"), -exponents[:, None])
    whole = np.floor(y)
    return whole.sum(1), (whole**2).sum(1), ((y != 0) & (y < LOW)).sum(1)


def surveyed(run, x, along_k):
    """Lines, with sums in units of 2^exponent, exponents, state and the largest elements of every k. A block
    takes up to two tiles."""
    full, (count, k) = stored(x, along_k), x.shape
    tiles = -(-count // 64) * -(-k // 256) if along_k else -(-k // 256) * -(-count // 256)
    blocks = -(-tiles // 2)
    shape = (count, k) if along_k else (k, count)
    lines, largest = run(
        "survey", blocks, (*shape, full.shape[1], 1), [full], [np.zeros(count, LINE), np.zeros(k, "u4")]
    )
    room = [lines, np.zeros(count, "i4"), np.zeros(1, STATE)]
    lines, exponents, state = run("settle", -(-count // 256), (count, 0), [], room)
    lines = lines.copy()
    lines["sum"] *= 2.0**-exponents
    lines["squares"] *= 4.0**-exponents
    return lines, exponents, state[0], largest


def test_the_survey(run, along_k):
    for (count, k), family in ((shape, family) for shape in SHAPES for family in FAMILIES):
        x = family(count, k).astype("f4")
        case = family.__name__, count, k
        lines, exponents, state, largest = surveyed(run, x, along_k)
        assert np.array_equal(largest, np.abs(x).max(0).view("u4")) or np.isnan(x).any(), case
        finite = np.isfinite(x).all(1)
        assert state["fallback"] == (not finite.all()), case
        top = np.abs(x).max(1)
        assert np.array_equal(exponents[finite], exponent_of(top)[finite]), case
        part = 256 if along_k else 32
        parts = [np.abs(x[:, at : at + part]).max(1) for at in range(0, k, part)]
        least = np.min([np.where(p > 0, p, np.inf) for p in parts], 0)
        order = lambda y: np.frexp(y)[1]  # noqa: E731
        spread = np.where(top > 0, order(top) - order(np.where(top > 0, least, 1)), 0)
        if finite.all():
            assert state["recount"] == (spread > SPREAD).any(), case
            kept = lines[top > 0]
            mass = (kept["sum"] / 2 ** (TOP + 1)).astype("f4").min()
            terms = (kept["sum"] / kept["squares"] * kept["sum"]).astype("f4").min()
            sides = [INFINITE - mass.view("u4"), INFINITE - terms.view("u4"), kept["low"].max()]
            assert np.array_equal(state["sides"][:3], sides), case
        exact = counts(x, exponent_of(top))
        good = finite & (spread <= SPREAD)
        whole = np.ldexp(np.abs(x).astype("f8"), -exponent_of(top)[:, None])
        assert (lines["sum"] >= exact[0])[good].all(), case
        assert (lines["sum"] <= whole.sum(1))[good].all(), case
        assert (lines["squares"] >= exact[1])[good].all(), case
        assert (lines["squares"] <= (whole**2).sum(1))[good].all(), case
        assert (lines["low"] >= exact[2])[good].all(), case
        assert (lines["low"] <= ((whole != 0) & (whole < LOW * 2**SPREAD)).sum(1))[good].all(), case


@pytest.mark.parametrize("shifted", [False, True])
def test_lines_are_counted_again(run, along_k, shifted):
    for (count, k), family in ((shape, family) for shape in SHAPES for family in FAMILIES[:-1]):
        x = family(count, k).astype("f4")
        lines, exponents, state, _ = surveyed(run, x, along_k)
        depth = RNG.integers(-20, 20, k).astype("i4")
        depth[::7] = DROPPED
        state = np.array([(0, shifted, 1, [0] * 6)], STATE)
        used = np.where(depth == DROPPED, 0, depth) if shifted else np.zeros(k, int)
        kept = (depth != DROPPED) if shifted else np.ones(k, bool)
        y = np.where(kept, np.ldexp(x.astype("f8"), -used), 0)
        full = stored(x, along_k)
        rows, cols = (count, k) if along_k else (k, count)
        numbers, inputs, room = (rows, cols, full.shape[1], -1), [full, depth], [lines, exponents, state]
        if along_k:
            lines, found, _ = run("row_lines", 3, numbers, inputs, room)
        else:
            blocks = -(-rows // 128) * -(-cols // 256)
            room = run("column_largest", blocks, numbers, inputs, room)
            room = run("column_exponents", -(-cols // 256), (cols,), [], room)
            lines, found, _ = run("column_counts", blocks, numbers, inputs, room)
        case = family.__name__, count, k
        top = np.abs(y).max(1)
        some = top > 0
        assert np.array_equal(found[some], exponent_of(top)[some]), case
        exact = counts(y, found)
        for name, wanted in zip(("sum", "squares", "low"), exact, strict=True):
            assert np.array_equal(lines[name][some], wanted[some]), (name, case)


def test_the_judge(run, along_k):
    def judged(x, y, first, recount):
        (lines, _, one, _), (others, _, other, _) = (surveyed(run, z.astype("f4"), along_k) for z in (x, y))
        state = np.array([(0, 0, recount, [*one["sides"][:3], *other["sides"][:3]])], STATE)
        numbers = len(x), len(y), x.shape[1], first
        (state,) = run("judge", 1, numbers, [lines, others], [state])
        return int(state["fallback"][0]), int(state["recount"][0])

    x, y = normal(40, 300), normal(30, 300)
    assert judged(x, y, 1, 0) == (0, 0)
    assert judged(x, y, 0, 1) == (0, 1)
    few = x.copy()
    few[:, 5:] = 0  # five terms, where float32 rounds less
    assert judged(few, few[:30], 1, 0) == (0, 1)
    assert judged(few, few[:30], 0, 1) == (1, 1)
    assert judged(few, few[:30], 0, 0) == (0, 0)  # it has been decided already


def test_a_panel_that_stays_is_split_once(run, along_k):
    """And a product that needs it as it was is not made, which the device says."""
    x = normal(70, 515).astype("f4")
    full, _ = stored(x, along_k), x.shape
    rows, cols = full.shape[0], x.shape[1] if along_k else x.shape[0]
    exponents = exponent_of(np.abs(x).max(1)).astype("i4")
    blocks = -(-rows * -(-cols // 64) // 64)  # each takes segments twice
    sides = [INFINITE - 5, INFINITE - 6, 7, 0, 0, 0]

    def after(panel, kept, **decided):
        state = np.zeros(1, STATE)
        state["sides"] = sides
        for name, value in decided.items():
            state[name] = value
        room = [panel, state, kept, np.zeros(1, "u4")]
        numbers, inputs = (rows, cols, full.shape[1], 1), [np.zeros(515, "i4"), exponents]
        panel, _, _, lost = run("split", blocks, numbers, inputs, room)
        _, _, kept, known = run("keep", 1, (9,), [], [panel, state, kept, np.zeros(1, "u4")])
        assert known[0] == (0 if decided.keys() & {"fallback", "shifted"} else 9)
        return panel, kept, int(lost[0])

    none = np.zeros(1, KEPT)
    planes, kept, lost = after(full, none)
    assert (kept["made"], lost) == (1, 0)
    assert kept["found"].tolist() == [sides[:3]]
    halves = planes.view("f2").reshape(len(planes), -1, 2, 64).astype("f8").sum(2).reshape(len(planes), -1)
    scales = exponents[:, None] if along_k else exponents
    assert np.allclose(np.ldexp(halves[:, :cols], scales), full[:, :cols], rtol=2.0**-21, atol=0)
    again, kept, lost = after(planes, kept, recount=1)
    assert np.array_equal(again.view("u4"), planes.view("u4"))
    assert (kept["made"], lost) == (1, 0)
    for decided in {"fallback": 1}, {"shifted": 1, "recount": 1}:
        again, _, lost = after(planes, kept, **decided)
        assert lost
        assert np.array_equal(again.view("u4"), planes.view("u4"))
    for decided, needed in (({"fallback": 1}, 0), ({"shifted": 1}, 1), ({"shifted": 1, "fallback": 1}, 0)):
        as_it_was, kept, lost = after(full, none, **decided)
        assert (kept["made"], lost) == (0, needed)
        assert np.array_equal(as_it_was.view("u4"), full.view("u4"))


def test_a_panel_that_holds_planes_is_not_looked_at(run, along_k):
    count, k = 70, 515
    poison = np.full((count, k), np.nan, "f4")
    full = stored(poison, along_k)
    kept = np.array([(1, [INFINITE - 5, INFINITE - 6, 7])], KEPT)
    shape = (count, k) if along_k else (k, count)
    lines, exponents, state = np.zeros(count, LINE), np.arange(count, dtype="i4"), np.zeros(1, STATE)
    room = [lines, np.zeros(k, "u4"), state, kept]
    blocks = -(-count // 64) * -(-k // 256) if along_k else -(-k // 256) * -(-count // 256)
    found = run("survey", blocks, (*shape, full.shape[1], 1, 1), [full], room)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(found, room, strict=True))
    room = [lines, exponents, state, kept]
    _, settled, state, _ = run("settle", 1, (count, 0, 0, 0, 1), [], room)
    assert np.array_equal(settled, exponents)
    assert state["sides"][0].tolist() == [*kept["found"][0], 0, 0, 0]
    assert not state["fallback"]
    assert not state["recount"]
    state = np.array([(0, 0, 1, [0] * 6)], STATE)
    numbers, inputs = (*shape, full.shape[1], 1, 1), [full, np.zeros(k, "i4")]
    names = ("row_lines",) if along_k else ("column_largest", "column_counts")
    for name in names:
        room = [lines, exponents, state, kept]
        found = run(name, 3, numbers, inputs, room)
        assert all(one.tobytes() == other.tobytes() for one, other in zip(found, room, strict=True)), name
    if not along_k:
        found = run("column_exponents", 1, (count, 0, 0, 0, 1), [], room)
        assert np.array_equal(found[1], exponents)


def test_what_is_remembered_of_a_panel_is_judged(run, along_k):
    """Its own lines are not known any more."""
    lines, _, one, _ = surveyed(run, normal(40, 300).astype("f4"), along_k)
    state = np.array([(0, 0, 1, [*one["sides"][:3], *one["sides"][:3]])], STATE)
    none = np.zeros_like(lines)
    for low, falls_back in ((0, 0), (1 << 20, 1)):
        state["sides"][0, 2] = low
        room = [state, np.zeros(0), np.zeros(0), np.array([(1, [0] * 3)], KEPT)]
        found, *_ = run("judge", 1, (40, 40, 300, 0, 1), [none, lines], room)
        assert found["fallback"][0] == falls_back
        assert np.array_equal(found["sides"][0, :3], state["sides"][0, :3])
