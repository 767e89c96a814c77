"""Shows what --verify finds, and that it raises no false alarm:

    python benchmarks/flips.py [--device cpu|cuda] [--flips 1000] [--clean 10000] [DTYPE]...

Single bits of C blocks are flipped before they are checked: the sign, the exponent, the upper eight bits of
the mantissa, or any bit of an integer. A flip counts where it changes its element by more than its row's
tolerance, which is worked out anew from A and B. And blocks nobody touched are checked, of inputs that round
badly. Exit status 1 where a flip that counts was missed, or an alarm was false.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np

import ooc_gemm
import ooc_gemm.run.prepare
from ooc_gemm.engine.check import Sums

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from faults import faulty, flip_bit, hard, upper_bits, with_blocks

TYPES = "float16", "float32", "float64", "complex64", "complex128", "int8", "uint8", "int16", "int32"
INPUTS = "normal", "positive", "constant", "cancelling", "badly scaled", "one large", "denormal"
FLOATS = "fc"


def operands(dtype: np.dtype, name: str, side: int, k: int, rng: np.random.Generator):
    """Make op(A) and op(B) of a family of inputs."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        low, high = max(info.min, -(2**24)), min(info.max, 2**24)
        if name == "constant":
            return np.full((side, k), high, dtype), np.full((k, side), low or high, dtype)
        return tuple(rng.integers(low, high, shape, dtype, endpoint=True) for shape in ((side, k), (k, side)))
    real = np.dtype(dtype.type(0).real.dtype)
    with np.errstate(all="ignore"):
        a, b = hard(name, (side, k), rng, "f8"), hard(name, (k, side), rng, "f8")
        if name == "denormal":
            scale = float(np.finfo(real).tiny / np.finfo("f8").tiny) ** 0.5
            a, b = a * scale, b * scale
        if real == np.float16:  # of numbers that it holds
            a, b = (x / max(1.0, np.abs(x).max() / 100) for x in (a, b))
        if dtype.kind == "c":
            a, b = a + 1j * rng.standard_normal(a.shape) * abs(a), b * (1 + 0.5j)
        return a.astype(dtype), b.astype(dtype)


def multiply(a, b, device, side, depth, **options):
    """Multiply in blocks of side × side and panels of depth `depth`."""
    ooc_gemm.run.prepare.make_plan = with_blocks(side, side, depth)
    out = "int64" if a.dtype.kind in "iu" else np.result_type(a, np.float32)
    return ooc_gemm.multiply(a, b, device=device, verify=True, chunks=(side, side), out_dtype=out, **options)


@contextmanager
def told():
    """Record the rounding that verdicts are given."""
    found, verdict = [], Sums.verdict

    def listening(self, *args):
        found.append(args[-1])
        return verdict(self, *args)

    Sums.verdict = listening
    try:
        yield found
    finally:
        Sums.verdict = verdict


def clean(dtype: np.dtype, device: str, count: int) -> tuple[int, int]:
    """Check blocks that are right. Returns the number of blocks, and of false alarms."""
    rng, checked, alarms = np.random.default_rng(3), 0, 0
    names = INPUTS if dtype.kind in FLOATS else INPUTS[:3]
    across = int((count / (2 * len(names))) ** 0.5) + 1
    for name in names:
        for k, depth in ((257, 64), (3000, 3000)):
            a, b = operands(dtype, name, 32 * across, k, rng)
            said: list[str] = []
            try:
                checked += multiply(a, b, device, 32, depth, notice=said.append).blocks
            except ooc_gemm.VerificationError as error:
                alarms += len(error.blocks)
                print("false alarm:", dtype, name, k, error)
            alarms += len(said)
    return checked, alarms


def flips(dtype: np.dtype, device: str, count: int) -> tuple[int, int, int]:
    """Flip bits of blocks. Returns the number of bits flipped, of those that count, and of those of them that
    were found."""
    rng, across, k = np.random.default_rng(5), int(count**0.5) + 1, 300
    a, b = operands(dtype, "normal", 32 * across, k, rng)
    plain = multiply(a, b, device, 32, 100)
    block = plain.plan.problem.block_itemsize
    exact = dtype.kind in "iu"
    wide = np.dtype(dtype if not exact and dtype != np.float16 else np.float32)
    held = wide if not exact else np.dtype({4: "int32", 8: "int64"}[block])
    if exact and device == "cuda" and dtype.itemsize == 2:
        held = np.dtype("float64")
    bits = upper_bits(held)
    made: dict[tuple[int, int], tuple[int, int, int]] = {}

    def fault(x):
        if (x.row, x.col) in made or len(made) == count:
            return None
        made[x.row, x.col] = flip = (
            int(rng.integers(x.rows)),
            int(rng.integers(x.cols)),
            int(rng.choice(bits)),
        )
        return flip

    with told() as rounding_told:
        again = multiply(a, b, faulty(device, fault), 32, 100)
    rounding = rounding_told[-1]
    # How much each flip changed, and the tolerance of its row, worked out anew.
    counted, found = 0, 0
    with np.errstate(all="ignore"):
        for (row, col), (i, j, bit) in made.items():
            element = plain.array[row + i : row + i + 1, col + j].astype(held)
            flipped = element.copy()
            flip_bit(flipped, bit)
            rows, cols = a[row + i].astype("c16"), b[:, col : col + 32].astype("c16")
            scale = np.linalg.norm(rows) * np.linalg.norm(cols)
            tolerance = rounding.tolerance(np.array(scale), k, cols.shape[1])
            tolerance = 0 if exact else tolerance
            change = abs(flipped[0].astype("c16") - element[0].astype("c16"))
            counts = not change <= tolerance
            # What is not found stays in C.
            right = again.array[row + i, col + j] == plain.array[row + i, col + j]
            counted += counts
            found += counts and bool(right)
    return len(made), counted, found


@click.command()
@click.option("--device", default="cpu")
@click.option("--flips", "flip_count", default=1000)
@click.option("--clean", "clean_count", default=10_000)
@click.argument("dtypes", nargs=-1)
def main(device: str, flip_count: int, clean_count: int, dtypes: tuple[str, ...]) -> None:
    """Flip bits of blocks before they are checked, and check blocks that are right."""
    wrong = False
    print(f"{'type':<12}{'flips':>8}{'count':>8}{'found':>8}{'clean':>9}{'alarms':>8}")
    for name in dtypes or TYPES:
        dtype = np.dtype(name)
        made, counted, found = flips(dtype, device, flip_count) if flip_count else (0, 0, 0)
        checked, alarms = clean(dtype, device, clean_count) if clean_count else (0, 0)
        wrong |= found < counted or alarms > 0
        print(f"{name:<12}{made:>8}{counted:>8}{found:>8}{checked:>9}{alarms:>8}", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
