"""--verify: every block of C is checked on its device; what fails is made once more, or reported."""

import itertools
import json

import numpy as np
import pytest
import zarr
from arrays import matrix
from conftest import gpu_missing, make, ooc
from faults import faulty, hard, upper_bits, with_blocks
from sessions import device_with

import ooc_gemm
import ooc_gemm.run.prepare
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.engine.check import ROWS, Rounding, Sums, compare
from ooc_gemm.planning.search import make_plan

OPS = (None, "transpose", "adjoint")
TYPES = ("f2", "f4", "f8", "c8", "c16", "i1", "u1", "i2", "i4", "i8")


def on(name="", values=(), gpu=()):
    """Parameters of a test: a device, and of some name all values on the CPU and some on a GPU, where each
    type takes its time to be compiled."""
    if not name:
        return pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    cases = [
        value._replace(values=("cpu", *value.values)) if hasattr(value, "marks") else ("cpu", value)
        for value in values
    ]
    cases += [pytest.param("cuda", value, marks=pytest.mark.gpu) for value in gpu]
    return pytest.mark.parametrize(("kind", name), cases)


@pytest.fixture(autouse=True)
def small_blocks(request, monkeypatch):
    """Of 64×32 in panels 48 deep: several of each even of small matrices."""
    case = getattr(request.node, "callspec", None)
    if case and case.params.get("kind") == "cuda" and (why := gpu_missing()):
        pytest.skip(why)
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(64, 32, 48))


def run(a, b, verify=True, **options):
    return ooc_gemm.multiply(a, b, verify=verify, chunks=(64, 32), **options)


def wide(dtype):
    return "i8" if np.dtype(dtype).kind in "iu" else None


class Once:
    """A bit of the block at this place of C is flipped, so many times."""

    def __init__(self, row, col, at, times=1):
        self.row, self.col, self.at, self.left = row, col, at, times

    def __call__(self, block):
        if (block.row, block.col) == (self.row, self.col) and self.left:
            self.left -= 1
            return self.at
        return None


# ------------------------------------------------------------------------------------------- right results


FAST = ("f4", "c8", "i1")
"""Types whose products are checked by `make test`; the others by `make test-all`."""


@on("dtype", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in TYPES], ["f2", "c8", "i2"])
@pytest.mark.parametrize("op_a", OPS)
def test_what_is_right_passes(dtype, kind, op_a):
    for (m, n, k), op_b in itertools.product(((1, 1, 1), (2, 3, 17), (129, 257, 133)), OPS):
        a, b = matrix((k, m) if op_a else (m, k), dtype, 1), matrix((n, k) if op_b else (k, n), dtype, 2)
        options = {f"{op}_{name}": True for op, name in ((op_a, "a"), (op_b, "b")) if op}
        result = run(a, b, out_dtype=wide(dtype), alpha=-3, device=kind, **options)
        assert result.verified is True
        assert result.to_dict()["verified"] is True
        plain = run(a, b, out_dtype=wide(dtype), alpha=-3, device=kind, verify=False, **options)
        assert np.array_equal(result.array, plain.array)


@on("dtype", TYPES, ["f4"])
def test_gram_passes(dtype, kind, monkeypatch):
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(64, 64, 48))
    for transpose in (False, True):
        a = matrix((133, 200) if transpose else (200, 133), dtype, 1)
        options = {"transpose": transpose, "chunks": (32, 32), "out_dtype": wide(dtype), "device": kind}
        result = ooc_gemm.gram(a, verify=True, **options)
        assert result.plan.problem.symmetric
        assert result.plan.block_count > 1
        assert result.verified is True


@on("dtype", ["f4", "f8", "c8", "i4"], ["c8"])
@pytest.mark.parametrize("k", [0, 100])
def test_an_old_c_passes(tmp_path, dtype, k, kind):
    a, b, c = matrix((100, k), dtype, 1), matrix((k, 80), dtype, 2), matrix((100, 80), dtype, 3)
    path = make(tmp_path / "c", c, chunks=(64, 32), compressors=None)
    for alpha, beta in ((2, -3), (0, 2), (1, 1)):
        before = zarr.open_array(path)[:]
        assert ooc_gemm.multiply(
            a, b, path, alpha=alpha, beta=beta, device=kind, verify=True, force=True
        ).verified
        exact = np.dtype(dtype).kind == "i"
        wanted = alpha * (a.astype("i8" if exact else "c16") @ b) + beta * before
        assert np.allclose(zarr.open_array(path)[:], wanted, rtol=1e-4, atol=0 if exact else 1e-3)


@on("dtype", ["f4", "f8", "c8"], ["f4"])
@pytest.mark.parametrize(
    "name", ["positive", "constant", "cancelling", "badly scaled", "one large", "denormal", "overflowing"]
)
def test_rounding_alone_is_no_error(name, dtype, kind, monkeypatch):
    rng = np.random.default_rng(7)
    for depth in (500, 5000):
        monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(64, 32, depth))
        a, b = hard(name, (150, 3000), rng, dtype), hard(name, (3000, 70), rng, dtype)
        assert run(a, b, device=kind).verified
        assert run(b, a, transpose_a=True, transpose_b=True, device=kind).verified
        monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(64, 64, depth))
        assert ooc_gemm.gram(a, device=kind, chunks=(64, 64), verify=True).verified


@on("precision", ["medium"], ["high", "medium"])
def test_lower_precision_is_no_error(precision, kind, monkeypatch):
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(704, 704, 512))
    for name in ("positive", "constant", "badly scaled"):
        rng = np.random.default_rng(7)
        a, b = hard(name, (700, 1500), rng, "f4"), hard(name, (1500, 700), rng, "f4")
        assert run(a, b, device=kind, precision=precision).verified


@on("dtype", ["f2", "f4", "f8", "c8"], ["f4", "c8"])
def test_nan_and_infinity_in_the_inputs_are_no_errors(dtype, kind):
    a, b = matrix((100, 90), dtype, 1), matrix((90, 70), dtype, 2)
    a[3, 4], a[90, 80], b[50, 60], b[7, 1] = np.nan, -np.inf, np.inf, np.nan
    assert run(a, b, device=kind).verified
    assert run(a[:, :60], b[:60], device=kind, alpha=0).verified


@pytest.mark.parametrize("change", ["zero row", "NaN", "large", "tiny", "constant"])
@pytest.mark.parametrize("shape", [(4000, 300), (600, 1000), (300, 4096)])
def test_rows_whose_squares_float32_does_not_hold_are_checked(shape, change):
    """They are converted to float64 in pieces, which are smaller than those that are not converted."""
    a, b = matrix(shape, "f4", 0), matrix((shape[1], 50), "f4", 1)
    if change == "zero row":
        a[7] = 0
    elif change == "NaN":
        a[7, 7] = np.nan
    elif change == "constant":
        a[:] = 0
    else:
        a *= np.float32(1e18 if change == "large" else 1e-20)
    assert ooc_gemm.multiply(a, b, verify=True, device=CPU(2), memory_limit="1GiB").verified
    assert ooc_gemm.multiply(b.T, a.T, verify=True, device=CPU(2), memory_limit="1GiB").verified


# ------------------------------------------------------------------------------------------- wrong results


@on("dtype", TYPES, ["f4", "c8", "i1", "i2"])
def test_a_flipped_bit_is_found_and_the_block_made_again(dtype, kind):
    a, b = matrix((150, 70), dtype, 1), matrix((70, 90), dtype, 2)
    options = {"out_dtype": wide(dtype), "alpha": 2}
    right = run(a, b, device=kind, **options)
    block = right.plan.problem.block_itemsize
    for bit in range(8 * block - 3, 8 * block):  # the sign, and the exponent's upper bits
        said = []
        once = Once(64, 32, (5, 17, bit))
        result = run(a, b, device=faulty(kind, once), notice=said.append, **options)
        assert once.left == 0
        assert np.array_equal(result.array, right.array)
        assert len([text for text in said if "rows 64–127 × columns 32–63" in text]) == 1


@on("dtype", ["f8", "c16"], ["f8", "c16"])
@pytest.mark.parametrize("factor", [1e200, 1e-200, 1e160, 1e-160])
@pytest.mark.parametrize("beta", [0, 1])
def test_a_flipped_bit_is_found_where_float64_does_not_hold_squares(tmp_path, factor, beta, dtype, kind):
    a, b, c = (matrix(shape, dtype, seed) for seed, shape in ((1, (150, 70)), (2, (70, 90)), (3, (150, 90))))
    a = a * factor
    paths = [make(tmp_path / name, c * factor, chunks=(64, 32), compressors=None) for name in ("x", "y")]
    right = ooc_gemm.multiply(a, b, paths[0], beta=beta, device=kind, verify=True, force=True)
    assert right.verified
    once = Once(64, 32, (5, 17, 60))
    assert ooc_gemm.multiply(
        a, b, paths[1], beta=beta, device=faulty(kind, once), verify=True, force=True
    ).verified
    assert once.left == 0
    assert np.array_equal(*(zarr.open_array(path, mode="r")[:] for path in paths))


@on("dtype", ["i1", "u1", "i2", "i4"], ["i1", "i2"])
def test_the_lowest_bit_of_an_integer_is_found(dtype, kind):
    a, b = matrix((150, 70), dtype, 1), matrix((70, 90), dtype, 2)
    lowest = 45 if kind == "cuda" and dtype == "i2" else 0  # held as float64 there
    device = faulty(kind, once := Once(0, 0, (63, 31, lowest)))
    result = run(a, b, device=device, out_dtype="i8")
    assert once.left == 0
    assert np.array_equal(result.array, a.astype("i8") @ b)


@on()
def test_every_failed_block_is_made_again(kind):
    a, b = matrix((300, 70), "f4", 1), matrix((70, 200), "f4", 2)
    left = {(64 * i, 32 * j) for i in range(5) for j in range(7) if (i + j) % 2}

    def fault(block):
        if (block.row, block.col) not in left:
            return None
        left.remove((block.row, block.col))
        return block.rows - 1, block.cols - 1, 30

    result = run(a, b, device=faulty(kind, fault))
    assert not left
    assert np.array_equal(result.array, run(a, b, device=kind).array)


@on()
def test_what_is_wrong_twice_is_an_error(tmp_path, kind):
    a, b = matrix((150, 70), "f4", 1), matrix((70, 90), "f4", 2)
    device = faulty(kind, Once(64, 32, (5, 17, 30), times=2))
    with pytest.raises(ooc_gemm.VerificationError, match="rows 64–127 × columns 32–63") as error:
        run(a, b, c=str(tmp_path / "c"), device=device)
    assert isinstance(error.value, ArithmeticError)
    assert error.value.blocks == (((64, 128), (32, 64)),)
    assert str(tmp_path / "c") in str(error.value)
    assert not (tmp_path / "c/zarr.json").exists()


def test_what_was_wrong_is_made_by_another_device(tmp_path):
    a, b = matrix((150, 70), "f4", 1), matrix((70, 90), "f4", 2)
    paths = [make(tmp_path / "a", a, chunks=(64, 64)), make(tmp_path / "b", b, chunks=(64, 64))]
    once = Once(64, 32, (5, 17, 30), times=2)
    with pytest.raises(ooc_gemm.VerificationError, match="resume"):
        run(*paths, c=str(tmp_path / "c"), device=faulty("cpu", once))
    result = run(*paths, c=str(tmp_path / "c"), device="cpu", resume=True)
    assert result.blocks - result.blocks_resumed == 1
    assert np.array_equal(zarr.open_array(tmp_path / "c")[:], run(a, b, device="cpu").array)


@on()
def test_an_old_c_is_updated_once(tmp_path, kind):
    a, b, c = matrix((150, 70), "f4", 1), matrix((70, 90), "f4", 2), matrix((150, 90), "f4", 3)
    path = make(tmp_path / "c", c, chunks=(64, 32), compressors=None)
    other = make(tmp_path / "d", c, chunks=(64, 32), compressors=None)
    ooc_gemm.multiply(a, b, other, beta=3, device=kind)
    once = Once(64, 0, (5, 17, 30))
    ooc_gemm.multiply(a, b, path, beta=3, device=faulty(kind, once), verify=True)
    assert once.left == 0
    assert np.array_equal(zarr.open_array(path)[:], zarr.open_array(other)[:])


@on()
@pytest.mark.parametrize(("row", "col"), [(64, 64), (128, 0)])
def test_gram_is_checked_on_and_off_the_diagonal(row, col, kind, monkeypatch):
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(64, 64, 48))
    a, once = matrix((200, 100), "f4", 1), Once(row, col, (9, 33, 30))
    result = ooc_gemm.gram(a, verify=True, chunks=(32, 32), device=faulty(kind, once))
    assert once.left == 0
    assert np.array_equal(result.array, ooc_gemm.gram(a, chunks=(32, 32), device=kind).array)


def test_without_verify_nothing_is_checked():
    result = ooc_gemm.multiply(np.ones((3, 4)), np.ones((4, 5)), device="cpu")
    assert result.verified is None
    assert result.plan.ledger["checks"] == result.plan.device_ledger.get("checks", 0) == 0


# ------------------------------------------------------------------------------------------- the command line


def test_the_command_says_so(tmp_path, monkeypatch):
    for name, shape in (("a", (150, 70)), ("b", (70, 90))):
        make(tmp_path / name, matrix(shape, "f4", 1), chunks=(64, 64), compressors=None)
    paths = [tmp_path / name for name in "abc"]
    done = ooc("multiply", *paths, "--verify", "--chunks", "64,32", "-d", "cpu", "--json")
    assert done.code == 0
    assert json.loads(done.out)["verified"] is True
    with monkeypatch.context() as patch:
        patch.setattr(ooc_gemm.run.prepare, "make_plan", make_plan)
        done = ooc("gram", paths[0], tmp_path / "g", "--verify", "-d", "cpu")
    assert done.code == 0
    assert "checked" in done.out
    device = faulty("cpu", Once(64, 32, (5, 17, 30), times=9))
    monkeypatch.setattr(ooc_gemm.run.executor, "open_device", lambda name: device)
    done = ooc("multiply", *paths, "--verify", "--chunks", "64,32", "-f")
    assert done.code == 3
    assert "rows 64–127 × columns 32–63" in done.err
    assert done.out == ""
    assert not (tmp_path / "c/zarr.json").exists()


# ------------------------------------------------------------------------------------------- pieces of it


def test_the_ledger_is_what_is_held(monkeypatch):
    held = {}

    class Weighed(CPUSession):
        def close(self):
            if self._checks:
                checks, sums = self._checks, self._checks._sums
                arrays = [checks._x, checks._y, *vars(sums).values()]
                held["bytes"] = sum(array.nbytes for array in arrays)
                held["scratch"] = sum(checks._scratch.get().nbytes for _ in range(self.threads))
            super().close()

    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", make_plan)
    for dtype in ("f4", "c8", "i1"):
        a, b = matrix((300, 200), dtype, 1), matrix((200, 100), dtype, 2)
        device = device_with(Weighed, CPU)()
        plans = [
            ooc_gemm.multiply(a, b, device=device, verify=verify, memory_limit="2GiB").plan
            for verify in (True, False)
        ]
        assert held["bytes"] == plans[0].ledger["checks"]
        assert held["scratch"] == plans[0].ledger["workspace"] - plans[1].ledger["workspace"]


def test_nan_is_never_right_alone():
    one, nan, inf = np.ones(1), np.full(1, np.nan), np.full(1, np.inf)
    for found, wanted, wrong in (
        (one, one, False), (nan, nan, False), (inf, nan, False), (nan, one, True), (one, nan, True),
        (inf, one, True), (one, inf, True), (one, one + 1, True),
    ):  # fmt: skip
        assert compare(found, wanted, np.full(1, 0.5))[0].tolist() == [wrong]
    assert compare(one, one, nan)[0].tolist() == [True]


def test_tolerance_grows_with_what_is_rounded():
    scale = np.ones(1)
    half = Rounding.of(np.dtype("f4")).tolerance(scale, 100, 10)
    assert 8 * 14 * 2**-24 <= half < 8.1 * 14 * 2**-24
    assert Rounding.of(np.dtype("f4"), run=800).tolerance(scale, 1000, 10) > 8 * (35 + 100) * 2**-24
    assert Rounding.of(np.dtype("f4"), operands=2**-11).tolerance(scale, 100, 10) > 2**-7
    assert upper_bits("f4", 1) == list(range(22, 32))


def test_the_first_of_many_rows_is_named():
    rows, n, k = 3 * ROWS, 8, 5
    memory = np.zeros(rows * (3 * 8 + 16) + k * 8, np.uint8)
    sums = Sums.within(memory, rows, k, np.dtype("f8"))
    sums.a[:], sums.b[:] = 1, 1
    sums.found[:] = sums.product[:] = np.arange(rows)
    rounding = Rounding.of(np.dtype("f4"))
    assert sums.verdict(rows, k, n, 1, 0, rounding).ok
    sums.found[2 * ROWS + 7] += 1e-3
    sums.found[2 * ROWS + 9] = np.nan
    assert sums.verdict(rows, k, n, 1, 0, rounding).row == 2 * ROWS + 7
    assert sums.verdict(rows, k, n, 1, 0, rounding).worst == np.inf
    assert sums.verdict(2 * ROWS, k, n, 1, 0, rounding).ok
