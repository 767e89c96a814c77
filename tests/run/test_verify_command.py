"""`verify`: what was made right passes, whatever it was made with; what is wrong does not."""

import json

import numpy as np
import pytest
import zarr
from conftest import make, ooc

import ooc_gemm
from ooc_gemm import InputError, gram, multiply, verify

CPU = {"device": "cpu"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """a (60×50), b (50×40), their transposes at, bt, and z (60×50, complex)."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((60, 50)), rng.standard_normal((50, 40))
    for name, values in {"a": a, "at": a.T, "b": b, "bt": b.T, "z": a + 1j * a[::-1]}.items():
        make(name, values, chunks=(20, 20))
    return tmp_path


MADE = {
    "alpha": (("a", "b"), {"alpha": 2.5}, "2.5·A·B"),
    "a negative alpha": (("a", "b"), {"alpha": -3}, "-3·A·B"),
    "alpha 0": (("a", "b"), {"alpha": 0}, "0·A·B"),
    "transposed": (("at", "b"), {"transpose_a": True, "alpha": 2}, "2·Aᵀ·B"),
    "both transposed": (("at", "bt"), {"transpose_a": True, "transpose_b": True}, "Aᵀ·Bᵀ"),
    "complex": (("z", "b"), {"alpha": 1 - 2j}, "1-2j·A·B"),
    "complex alpha of real arrays": (("a", "b"), {"alpha": 2j, "out_dtype": "c16"}, "0+2j·A·B"),
    "adjoint": (("z", "z"), {"adjoint_a": True, "alpha": 2}, "2·Aᴴ·B"),
    "adjoint of b": (("z", "z"), {"adjoint_b": True}, "A·Bᴴ"),
    "float32": (("a", "b"), {"alpha": 1e30, "out_dtype": "f4"}, "1e+30·A·B"),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("case", MADE)
def test_what_the_attributes_record(here, case, version):
    """Nothing of it has to be given again; all of it can be."""
    operands, options, formula = MADE[case]
    extra = {}
    if version == 2:  # an old C of that version, which β = 0·… would replace: update it with β = 1 from zeros
        shape = tuple(np.array([60, 40]) if operands[1] in ("b", "bt") else [60, 60])
        shape = (50, 50) if case == "adjoint" else shape
        dtype = "c16" if "z" in operands or "c16" in options.values() else "f8"
        dtype = "f4" if options.get("out_dtype") == "f4" else dtype
        make("c", np.zeros(shape, dtype), chunks=(20, 20), zarr_format=2)
        make("old", np.zeros(shape, dtype), chunks=(20, 20))
        extra = {"beta": 1}
    multiply(*operands, "c", **options, **extra, **CPU)
    before = {"old": "old"} if extra else {}
    found = verify(*operands, "c", **before)
    assert found.ok
    assert found.formula == formula + (" + 1·old C" if extra else "")
    assert found.alpha == options.get("alpha", 1)
    given = {key: value for key, value in options.items() if key != "out_dtype"}
    assert verify(*operands, "c", **{"alpha": 1, **given, **extra, **before}).ok
    if case != "alpha 0":
        assert not verify(*operands, "c", alpha=1.01 * options.get("alpha", 1), **before).ok
    wrong = zarr.open_array("c", mode="r+")
    wrong[7, 8] += np.abs(wrong[...]).max() + 1
    found = verify(*operands, "c", **before)
    assert (found.ok, found.first_wrong, found.rows_wrong) == (False, 7, 1)


@pytest.mark.parametrize("transpose", [False, True])
def test_gram(here, transpose):
    gram("a", "g", transpose=transpose, alpha=3, **CPU)
    found = verify("a", "a", "g")
    assert (found.ok, found.formula) == (True, "3·Aᵀ·B" if transpose else "3·A·Bᵀ")
    flag = {"transpose_a": True} if transpose else {"transpose_b": True}
    assert verify("a", "a", "g", alpha=3, **flag).ok


def test_the_old_c(here):
    old = np.random.default_rng(2).standard_normal((60, 40))
    for name in ("c", "old"):
        make(name, old, chunks=(20, 20))
    multiply("a", "b", "c", alpha=2, beta=-0.5, **CPU)
    with pytest.raises(
        InputError, match=r"c was made with beta = -0.5 .* give that C as old='PATH', or beta=0"
    ):
        verify("a", "b", "c")
    with pytest.raises(InputError, match=r"if c was made with beta = 3 of a C .*, it cannot be checked"):
        verify("a", "b", "c", beta=3)
    assert verify("a", "b", "c", old="old").ok
    assert verify("a", "b", "c", old=old).formula == "2·A·B + -0.5·old C"
    assert not verify("a", "b", "c", old="old", beta=0.5).ok
    assert not verify("a", "b", "c", beta=0).ok
    old[7, 8] += 1e-3
    assert verify("a", "b", "c", old=old).first_wrong == 7
    with pytest.raises(InputError, match="beta is 0"):
        verify("a", "b", "c", beta=0, old="old")
    with pytest.raises(InputError, match="the shapes do not fit"):
        verify("a", "b", "c", old="a")


def test_numbers_that_are_given_count_more_than_recorded_ones(here):
    multiply("a", "b", "c", alpha=2, **CPU)
    zarr.open_array("c", mode="r+")[...] = zarr.open_array("c")[...] / 2
    assert not verify("a", "b", "c").ok
    assert verify("a", "b", "c", alpha=1).ok
    multiply("at", "b", "c", transpose_a=True, force=True, **CPU)
    assert verify("a", "b", "c", transpose_a=False).ok
    with pytest.raises(InputError, match=r"C = Aᵀ·B: op\(a\) 50×60"):
        verify("a", "b", "c")


@pytest.mark.parametrize(
    "attributes",
    [
        {"ooc-gemm": 1},
        {"ooc-gemm": {"options": [1]}},
        {"ooc-gemm": {"options": {"alpha": "nan", "beta": "x", "op(A)": "twice", "op(B)": 7}}},
        {"ooc-gemm": {"options": {"alpha": {"a": 1}, "beta": "1e999"}}},
        {"other": {"alpha": 2}},
    ],
)
def test_attributes_that_cannot_be_right_count_as_none(here, attributes):
    c = zarr.open_array(make("c", zarr.open_array("a")[...] @ zarr.open_array("b")[...], chunks=(20, 20)))
    c.attrs.update(attributes)
    assert verify("a", "b", "c").formula == "A·B"
    assert verify("a", "b", "c").ok


def test_inputs_in_memory_are_recorded_by_their_options(here):
    """A journal cannot name them; the attributes still say what C is."""
    a, b = zarr.open_array("a")[...], zarr.open_array("b")[...]
    multiply(a, b, "c", alpha=7, **CPU)
    assert verify(a, b, "c").ok


def test_the_command(here):
    assert ooc("multiply", "at", "b", "c", "-d", "cpu", "--transpose-a", "--alpha", "2").code == 0
    done = ooc("verify", "at", "b", "c")
    assert (done.code, done.out.partition(",")[0]) == (0, "c is 2·Aᵀ·B")
    assert ooc("verify", "at", "b", "c", "--transpose-a", "--alpha", "2").code == 0
    assert ooc("verify", "a", "b", "c", "--no-transpose-a").code == 0
    done = ooc("verify", "at", "b", "c", "--alpha", "1")
    assert done.code == 3
    assert done.err.startswith("Error: c is not Aᵀ·B: 60 rows are wrong")
    ooc("multiply", "a", "b", "old", "-d", "cpu")
    assert ooc("multiply", "at", "b", "c", "-d", "cpu", "--transpose-a", "--beta", "3").code == 0
    done = ooc("verify", "at", "b", "c")
    assert (done.code, done.out) == (2, "")
    assert "give that C as --old PATH, or --beta 0" in done.err
    ooc("multiply", "a", "b", "old", "-d", "cpu", "-f", "--alpha", "2")
    assert json.loads(ooc("verify", "at", "b", "c", "--old", "old", "--json").out)["beta"] == 3
    multiply("z", "b", "d", alpha=1j, **CPU)
    assert json.loads(ooc("verify", "z", "b", "d", "--json").out)["alpha"] == "1j"


# ------------------------------------------------------------------------- rounding, as it comes out


def rounded(name):
    """A, B and options of products whose rounding is large, or whose results are at the ends of a type."""
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((90, 700))
    return {
        "float16": (normal.astype("f2"), {}),
        "float16 near its smallest": ((normal * 1e-4).astype("f2"), {}),
        "float16 past its largest": ((normal * 100).astype("f2"), {}),
        "float32 near its smallest": ((normal * 1e-22).astype("f4"), {}),
        "float32 past its largest": ((normal * 1e19).astype("f4"), {}),
        "float32 made float16": (normal.astype("f4"), {"out_dtype": "f4"}),
        "float64 made float32": (normal, {"out_dtype": "f4"}),
        "float64 near its smallest": (normal * 1e-161, {}),
        "float64 far from 1": (normal * 1e-90, {}),
        "int8 made float32": (rng.integers(0, 127, (90, 30000)).astype("i1"), {"out_dtype": "f4"}),
        "int32 made float32": (rng.integers(-(2**31), 2**31, (90, 700)).astype("i4"), {"out_dtype": "f4"}),
        "int64 past float64": (rng.integers(-(2**25), 2**25, (90, 700)), {"alpha": 7}),
        "all alike": (np.full((90, 5000), 0.1, "f4"), {}),
        "complex64": (normal.astype("c8") * (1 + 1j), {"alpha": 0.1 + 3j}),
        "large alpha, small product": ((normal * 1e-20).astype("f4"), {"alpha": 1e30}),
        "small alpha, large product": ((normal * 1e17).astype("f4"), {"alpha": 1e-30}),
    }[name]


CASES = [
    *("float16", "float16 near its smallest", "float16 past its largest", "float32 near its smallest"),
    *(
        "float32 past its largest",
        "float32 made float16",
        "float64 made float32",
        "float64 near its smallest",
    ),
    *("float64 far from 1", "int8 made float32", "int32 made float32", "int64 past float64", "all alike"),
    *("complex64", "large alpha, small product", "small alpha, large product"),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*infinite in C:UserWarning")
def test_rounding_is_no_error(name):
    a, options = rounded(name)
    c = multiply(a, a.T, **CPU, **options).array
    alpha = options.get("alpha", 1)
    for seed in range(5):
        assert verify(a, a.T, c, alpha=alpha, seed=seed).ok
    if np.isfinite(c).all() and "smallest" not in name:
        c[3, 4] = -2 * c[3, 3]  # a diagonal element is as large as the row's norm allows
        assert verify(a, a.T, c, alpha=alpha).first_wrong == 3


def test_rows_that_the_type_of_c_cannot_hold_are_counted():
    a = np.full((9, 700), 100, "f2")
    a[4:] = 0.01
    with pytest.warns(UserWarning, match="16 elements are infinite"):
        c = multiply(a, a.T, **CPU).array
    found = verify(a, a.T, c)
    assert (found.ok, found.rows_not_finite) == (True, 4)
    c[6, 6] = np.inf  # where the product is 0.07, and its row and B too small for 65504
    assert verify(a, a.T, c).rows_wrong == 1


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e-160, 1e160, 1e200, 1e300])
def test_what_is_wrong_is_found_where_float64_does_not_hold_squares(size):
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((50, 30)) * size, rng.standard_normal((30, 20))
    c = a @ b
    assert verify(a, b, c).ok
    assert verify(b.T, a.T, c.T.copy()).ok
    for wrong in (np.zeros_like(c), 1.01 * c):
        assert verify(a, b, wrong).rows_wrong == 50
        assert verify(b.T, a.T, wrong.T.copy()).rows_wrong == 20


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
@pytest.mark.filterwarnings("error")
def test_errors_are_found_in_columns_and_terms_of_any_size(dtype):
    """Large numbers do not hide errors beside them."""
    rng, most = np.random.default_rng(6), 14 if dtype == "f4" else 120
    a, b = rng.standard_normal((50, 30)), rng.standard_normal((30, 20))
    units, columns = (10.0 ** rng.integers(-most, most, size) for size in (30, 20))
    large = b.copy()
    large[0, 7] = 10.0**most
    cases = {
        "units along k": (a * units, b / units[:, None]),
        "columns": (a, b * columns),
        "one element": (a, large),
    }
    for name, (x, y) in cases.items():
        x, y = x.astype(dtype), y.astype(dtype)
        c = (x.astype(np.result_type(dtype, "f8")) @ y).astype(dtype)
        assert verify(x, y, c).ok, name
        for column in range(20):
            wrong = c.copy()
            wrong[:, column] *= 1.5
            assert verify(x, y, wrong).rows_wrong >= 40, (name, column)


def test_integers_that_are_off_by_one():
    a = np.random.default_rng(4).integers(-100, 100, (50, 60)).astype("i1")
    c = multiply(a, a.T, alpha=3, **CPU).array
    assert verify(a, a.T, c, alpha=3).ok
    c[2, 2] += 1
    assert verify(a, a.T, c, alpha=3).first_wrong == 2


def test_progress(here):
    multiply("at", "b", "c", transpose_a=True, alpha=2, **CPU)
    seen = []
    assert verify("at", "b", "c", progress=lambda *found: seen.append(found)).ok
    whole = (60 * 50 + 50 * 40 + 60 * 40) * 8
    done = [first for first, _ in seen]
    assert done == sorted(done)
    assert (done[0] > 0, done[-1]) == (True, whole)
    assert {total for _, total in seen} == {whole}


def test_what_is_not_applied_is_said(here):
    masked, said = np.ma.masked_array(np.eye(3), mask=np.eye(3) > 0), []
    with pytest.warns(UserWarning, match="A has a mask, which is not applied"):
        verify(masked, np.eye(3), np.eye(3))
    verify(masked, np.eye(3), np.eye(3), notice=said.append)
    assert len(said) == 1
    zarr.open_array("a").attrs["scale_factor"] = 2.0
    multiply("a", "b", "c", notice=said.append, **CPU)
    done = ooc("verify", "a", "b", "c")
    assert (done.code, "a has scale_factor in its attributes" in done.err) == (0, True)


def test_full_signature():
    with pytest.raises(TypeError, match=r"^verify\(\) got an unexpected keyword argument 'aplha'"):
        ooc_gemm.verify(1, 2, 3, aplha=1)
