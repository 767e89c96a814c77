"""Random products for the stress test: cases by number, stored by zarr itself in every layout that the engine
should read, and checked without the engine.

All integer cases and half of the floating-point ones hold small integers, whose sums of products every type
holds exactly: then each element of C must be right to the bit. The others hold normal numbers, right to
rounding.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numcodecs
import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from ..planning.problem import MiB
from ..support.intervals import ceil_div, ranges

Array = npt.NDArray[Any]

TYPES = ["float16", "float32", "float64", "complex64", "complex128", "int8", "uint8", "int16", "int32"]
PRODUCTS = {"complex64": 3e8, "complex128": 1e8, "int8": 3e8, "uint8": 3e8, "int16": 3e8, "int32": 3e7}
"""The most products m·n·k of an ordinary case by type, 10⁹ for other types: a second of work of a slow
machine."""
CHUNKS, CHUNKS_OF_C = 1000, 100
"""The most chunks of an ordinary A or B, and of C. zarr takes a millisecond to write one, and a block of one
chunk of C reads a strip of A and of B."""
LEVELS = {"zstd": (-7, 22), "blosc": (0, 9), "gzip": (0, 9), "zlib": (0, 9), "bz2": (1, 9), "lzma": (0, 9)}
"""Compressor → lowest and highest level."""
SLOW_BYTES = 8 * MiB
"""Larger arrays are compressed at low levels, because the highest ones take seconds for each MiB."""
CHUNK_BYTES = 48 * MiB
LARGE_EVERY, HEAVY_EVERY = 40, 10
"""One case in LARGE_EVERY has far more data than memory. One in HEAVY_EVERY has a few very large chunks of
noise, which show how much memory decoders and encoders hold."""
BAND_BYTES = 32 * MiB
"""Bytes that are written or read at a time, unless a chunk is larger."""


@dataclass(frozen=True)
class Stored:
    """A matrix, and how it is stored."""

    shape: tuple[int, int]
    dtype: str
    chunks: tuple[int, int]
    shards: tuple[int, int] | None = None
    codec: str = "none"
    level: int = 1
    """Level of the codec, if it has levels."""
    version: Literal[2, 3] = 3
    fortran: bool = False
    big_endian: bool = False
    holes: bool = False
    """Whether some chunks are missing, so that their elements have the fill value 2."""

    @property
    def nbytes(self) -> int:
        """Size of the decoded array, in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def unit(self) -> tuple[int, int]:
        """Shape of what is written at a time: a shard or a chunk."""
        return self.shards or self.chunks

    def __str__(self) -> str:
        shards = f" in {self.shards[0]}×{self.shards[1]}" if self.shards else ""
        marks = [
            *([self.codec + (f":{self.level}" if self.codec in LEVELS else "")] * (self.codec != "none")),
            *(["v2"] if self.version == 2 else []),
            *(["F"] if self.fortran else []),
            *([">"] if self.big_endian else []),
            *(["holes"] if self.holes else []),
        ]
        return " ".join([f"{self.chunks[0]}×{self.chunks[1]}{shards}", *marks])


@dataclass(frozen=True)
class Case:
    """One product: C ← α·op(A)·op(B) + β·C, or the same with A·Aᵀ."""

    seed: int
    number: int
    m: int
    n: int
    k: int
    a: Stored
    b: Stored | None
    """The second operand; None where the product is `gram`."""
    c: Stored
    """The old C if β ≠ 0; otherwise only its shape and type count."""
    op_a: str
    """`N` for the operand as stored, `T` for its transpose, `C` for its adjoint."""
    op_b: str
    alpha: complex
    beta: complex
    options: tuple[str, ...]
    """Options of the command line: how a new C is stored, and what is done in addition."""
    normal: bool
    """Whether values are normal numbers instead of small integers."""
    spare: tuple[float, float]
    """How ample the limits of host and device are, each in [0, 1]. Up to ½ the limit lies between the
    smallest (0) and twice that (½); above ½ it lies between the smallest and an ample one, on a logarithmic
    scale."""

    @property
    def data_bytes(self) -> int:
        """Size of A, B and C together, in bytes."""
        return self.a.nbytes + (self.b.nbytes if self.b else 0) + self.c.nbytes

    def limit(self, least: int, device: bool = False) -> int:
        """Return the limit of the case, in bytes, between the smallest one and one that holds everything
        twice."""
        spare, small = self.spare[device], 64 << 10
        if spare <= 0.5:
            return int(least * (1 + 2 * spare))
        return least + int(small * ((self.data_bytes + 32 * MiB) * 2 / small) ** spare)

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of the command line."""
        said = [f"--alpha={self.alpha}", f"--beta={self.beta}", *self.options]
        a, b, c = (str(folder / name) for name in "abc")
        if self.b is None:
            return ["gram", a, c, *(["--transpose"] if self.op_a == "T" else []), *said]
        for side, op in (("a", self.op_a), ("b", self.op_b)):
            said += {"N": [], "T": [f"--transpose-{side}"], "C": [f"--adjoint-{side}"]}[op]
        return ["multiply", a, b, c, *said]

    @property
    def stored(self) -> dict[str, str]:
        """How A, B and C are stored, in a few words each."""
        valued = (option[2:].replace(",", "×") for option in self.options if "=" in option)
        said = dict(option.split("=") for option in valued)
        made = said.get("chunks", "as planned") + (f" in {said['shards']}" if "shards" in said else "")
        c = f"{made} {said.get('compressor', '')}".strip()
        return {"a": str(self.a), "b": str(self.b or ""), "c": str(self.c) if self.beta else c}

    @property
    def what(self) -> str:
        """The product as a formula, such as `A·Bᵀ`, for tables of cases."""
        marks = {"N": "", "T": "ᵀ", "C": "ᴴ"}
        a, b = f"A{marks[self.op_a]}", f"{'A' if self.b is None else 'B'}{marks[self.op_b]}"
        alpha = "" if self.alpha == 1 else f"{self.alpha:g}·"
        return f"{alpha}{a}·{b}" + (f" {self.beta:+g}·C" if self.beta else "")

    @property
    def types(self) -> str:
        """NumPy's short names of the types of A, B and C, for tables of cases."""
        found = (self.a, self.b or self.a, self.c)
        return " ".join(np.dtype(one.dtype).str[1:] for one in found)


# ------------------------------------------------------------------------------------------------ drawing


def draw(seed: int, number: int, largest: int) -> Case:
    """Return the case of this seed and number, which is always the same. `largest`: the most bytes of A, B
    and C together."""
    rng = random.Random(f"{seed} {number}")
    if number % LARGE_EVERY == LARGE_EVERY - 1:
        return _large(rng, seed, number, largest)
    if number % HEAVY_EVERY == HEAVY_EVERY // 2:
        return _heavy(rng, seed, number, largest)
    one = rng.choice(TYPES)
    types = one, one if rng.random() < 0.7 else rng.choice(TYPES)
    gram = rng.random() < 0.25
    if gram:
        types = one, one
    m, n, k = _extents(rng, min(PRODUCTS.get(t, 1e9) for t in types), largest // 32, gram)
    alpha, beta = _scalars(rng, types)
    ops = [rng.choice("NTC" if np.dtype(t).kind == "c" else "NT") for t in types]
    if gram:
        ops = ["N", "T"] if rng.random() < 0.5 else ["T", "N"]
    out, said = _out(rng, types)
    a = _stored(rng, (m, k) if ops[0] == "N" else (k, m), types[0])
    b = None if gram else _stored(rng, (k, n) if ops[1] == "N" else (n, k), types[1])
    c = replace(_stored(rng, (m, n), out, CHUNKS_OF_C), shards=None, fortran=False, holes=False)
    if beta == 0:
        said += _layout_of_c(rng, c)
    said += [option for option in ("--verify", "--rechunk") if rng.random() < 0.2]
    normal = all(np.dtype(t).kind in "fc" for t in types) and rng.random() < 0.5
    spare = tuple(0.0 if rng.random() < 0.3 else rng.random() / 2 for _ in range(2))
    return Case(
        seed, number, m, n, k, a, b, c, ops[0], ops[1], alpha, beta, tuple(said), normal, (spare[0], spare[1])
    )


def _large(rng: random.Random, seed: int, number: int, largest: int) -> Case:
    """Draw a case of much data and few products: few columns of B, few rows of A, or an outer product."""
    dtype = rng.choice(["int8", "float16", "float32"])
    size = rng.choice(["A", "B", "C"])
    out = "int32" if dtype == "int8" else "float32"
    item = np.dtype(out if size == "C" else dtype).itemsize
    elements = largest * rng.uniform(0.4, 0.9) / item
    thin = rng.randrange(1, 9)
    one = round(math.sqrt(elements) * 2 ** rng.uniform(-1, 1)) // 64 * 64 + rng.choice((0, 1, 37))
    other = max(1, int(elements / max(1, one)))
    m, n, k = {"A": (one, thin, other), "B": (thin, one, other), "C": (one, other, thin)}[size]
    chunk = rng.choice([(256, 1024), (64, 4096), (1024, 1024), (501, 997)])
    least = rng.choice([16, 64, 256])
    made = (least if size != "B" else thin, least * (4 if size == "B" else 1) if size != "A" else thin)
    if size == "C":
        made = (chunk[0], 256)
    ops = rng.choice(["NN", "TN", "NT", "TT"])
    a = Stored((m, k) if ops[0] == "N" else (k, m), dtype, chunk)
    b = Stored((k, n) if ops[1] == "N" else (n, k), dtype, chunk)
    c = Stored((m, n), out, made)
    said = (f"--chunks={made[0]},{made[1]}", f"--out-dtype={out}")
    spare = 0.0 if rng.random() < 0.7 else rng.uniform(0.5, 0.9)
    return Case(seed, number, m, n, k, a, b, c, ops[0], ops[1], 1, 0, said, False, (spare, spare))


def _heavy(rng: random.Random, seed: int, number: int, largest: int) -> Case:
    """Draw a case of a few large chunks of A or C that codecs cannot make smaller."""
    dtype = rng.choice(["float32", "float64", "complex128"])
    side = math.isqrt(round(min(CHUNK_BYTES, largest // 8) * rng.uniform(0.2, 1)) // np.dtype(dtype).itemsize)
    one, other, thin = side * rng.choice((1, 1, 2)), side * rng.choice((1, 2, 3)), rng.randrange(1, 33)
    a = _stored(rng, (one, other), dtype)
    shards = (side, side) if rng.random() < 0.2 and a.version == 3 else None
    a = replace(a, chunks=(ceil_div(side, 2),) * 2 if shards else (side, side), shards=None, holes=False)
    if shards:
        a = replace(a, shards=(2 * a.chunks[0], 2 * a.chunks[1]))
    if rng.random() < 0.7:
        b = replace(_stored(rng, (other, thin), dtype), holes=False)
        c = Stored((one, thin), dtype, (side, thin))
        return Case(seed, number, one, thin, other, a, b, c, "N", "N", 1, 0, (), True, (0.0, 0.0))
    a, c = replace(_stored(rng, (one, thin), dtype), holes=False), replace(a, shards=None, fortran=False)
    b = replace(_stored(rng, (thin, other), dtype), holes=False)
    beta = rng.choice((0, 1))
    compressor = rng.choice(["zstd:1", "zstd:5", "blosc"])
    said = [] if beta else [f"--chunks={side},{side}", f"--compressor={compressor}"]
    if not beta and shards:
        said.append(f"--shards={side},{side}")
    return Case(seed, number, one, other, thin, a, b, c, "N", "N", 1, beta, tuple(said), True, (0.0, 0.0))


def _extents(rng: random.Random, products: float, nbytes: int, gram: bool) -> tuple[int, int, int]:
    def one() -> int:
        luck = rng.random()
        return 0 if luck < 0.02 else 1 if luck < 0.06 else round(2 ** rng.uniform(1 if luck < 0.3 else 8, 13))

    m, n, k = one(), one(), one()
    n = m if gram else n
    while m * n * k > products or max(m * n, m * k, n * k) * 16 > nbytes:
        if gram:
            m, k = (m, max(1, k // 2)) if k > m else (m // 2, k)
            n = m
        else:
            top = max(m, n, k)
            m, n, k = (x // 2 if x == top else x for x in (m, n, k))
    return m, n, k


def _scalars(rng: random.Random, types: tuple[str, str]) -> tuple[complex, complex]:
    kinds = {np.dtype(t).kind for t in types}
    alphas: list[complex] = [1, 1, 1, 1, -1, 2, 0]
    betas: list[complex] = [0, 0, 0, 0, 0, 1, -1, 2]
    if kinds & {"f", "c"}:
        alphas, betas = [*alphas, 0.5], [*betas, -0.5]
    if "c" in kinds:
        alphas, betas = [*alphas, 1 - 2j], [*betas, 1j]
    return rng.choice(alphas), rng.choice(betas)


def _out(rng: random.Random, types: tuple[str, str]) -> tuple[str, list[str]]:
    """Draw the type of C, and return it with the option that asks for it, unless it is the default."""
    a, b = map(np.dtype, types)
    natural: np.dtype[Any] = np.result_type(a, b)
    if natural.kind in "iu":
        natural = np.dtype(np.int32 if a.itemsize == b.itemsize == 1 else np.int64)
    wider = {"e": "float32", "f": "float64", "F": "complex128", "i": "int64"}.get(natural.char)
    if wider and rng.random() < 0.2:
        return wider, [f"--out-dtype={wider}"]
    return natural.name, []


def _layout_of_c(rng: random.Random, c: Stored) -> list[str]:
    said = []
    if rng.random() < 0.5:
        said.append(f"--chunks={c.chunks[0]},{c.chunks[1]}")
        if rng.random() < 0.4 and math.prod(c.chunks) * np.dtype(c.dtype).itemsize <= 4 * MiB:
            down, across = rng.randrange(1, 4), rng.randrange(1, 4)
            said.append(f"--shards={c.chunks[0] * down},{c.chunks[1] * across}")
    if rng.random() < 0.5:
        highest = LEVELS["zstd"][1] if c.nbytes <= SLOW_BYTES else 6
        level = rng.randrange(LEVELS["zstd"][0], highest + 1)
        said.append(f"--compressor={rng.choice(['zstd', f'zstd:{level}', f'zstd:{level}', 'blosc'])}")
    return said


def _stored(rng: random.Random, shape: tuple[int, int], dtype: str, most: int = CHUNKS) -> Stored:
    version: Literal[2, 3] = 2 if rng.random() < 0.3 else 3
    chunks = _chunks(rng, shape, np.dtype(dtype).itemsize, most)
    shards = None
    if version == 3 and rng.random() < 0.2 and math.prod(chunks) * np.dtype(dtype).itemsize <= 4 * MiB:
        shards = chunks[0] * rng.randrange(1, 5), chunks[1] * rng.randrange(1, 5)
    codecs = ["none", "none", "none", "zstd", "zstd", "blosc", "blosc", "gzip"]
    codecs += ["lz4", "zlib", "bz2", "lzma"] if version == 2 else ["crc32c"]
    codec = rng.choice(codecs)
    low, high = LEVELS.get(codec, (1, 1))
    if math.prod(shape) * np.dtype(dtype).itemsize > SLOW_BYTES:
        high = max(low, min(high, 3))
    return Stored(
        shape,
        dtype,
        chunks,
        shards,
        codec,
        rng.randrange(low, high + 1),
        version,
        fortran=rng.random() < 0.2,
        big_endian=np.dtype(dtype).itemsize > 1 and rng.random() < 0.15,
        holes=rng.random() < 0.1,
    )


def _chunks(rng: random.Random, shape: tuple[int, int], itemsize: int, most: int) -> tuple[int, int]:
    rows, cols = (max(1, extent) for extent in shape)
    few, primes = rng.choice((1, 7, 32, 100)), (37, 53, 127, 211, 499, 1009)
    side = rng.choice((64, 128, 256, 512, 1000))
    down, across = rng.choice(
        [
            (side, side),
            (few, cols),
            (rows, few),
            (rng.randrange(1, 17), rng.randrange(1, 17)),
            (rng.choice(primes), rng.choice(primes)),
            (rows + rng.randrange(1, 50), cols + rng.randrange(1, 50)),
            (rows, cols),
        ]
    )
    while ceil_div(rows, down) * ceil_div(cols, across) > most:
        down, across = (2 * down + 1, across) if down < across else (down, 2 * across + 1)
    while down * across * itemsize > CHUNK_BYTES:
        down, across = (ceil_div(down, 2), across) if down > across else (down, ceil_div(across, 2))
    return down, across


# ------------------------------------------------------------------------------------------------ storing


def store(case: Case, folder: Path) -> None:
    """Write A, B and, if β ≠ 0, the old C."""
    write(folder / "a", case.a, (case.seed, case.number, 1), case.normal)
    if case.b:
        write(folder / "b", case.b, (case.seed, case.number, 2), case.normal)
    if case.beta:
        for name in ("c", "old"):
            write(folder / name, case.c, (case.seed, case.number, 3), case.normal)


def write(path: Path, stored: Stored, key: tuple[int, ...], normal: bool) -> None:
    """Write an array, one band of rows at a time."""
    dtype = np.dtype(stored.dtype)
    options: dict[str, Any] = {"fill_value": 2 if stored.holes else 0}
    if stored.version == 2:
        level = {"level": stored.level}
        ids: dict[str, dict[str, Any]] = {
            "zstd": level,
            "blosc": {"cname": "zstd" if stored.level % 2 else "lz4", "clevel": stored.level},
            "gzip": level,
            "zlib": level,
            "bz2": level,
            "lzma": {"preset": stored.level},
            "lz4": {},
        }
        codec = ids.get(stored.codec)
        options["compressors"] = None if codec is None else numcodecs.get_codec({"id": stored.codec, **codec})
        options["order"] = "F" if stored.fortran else "C"
        dtype = dtype.newbyteorder(">") if stored.big_endian else dtype
    else:
        known: dict[str, Any] = {
            "zstd": lambda level: ZstdCodec(level=level),
            "blosc": lambda level: BloscCodec(cname="zstd" if level % 2 else "lz4", clevel=level),
            "gzip": lambda level: GzipCodec(level=level),
            "crc32c": lambda level: Crc32cCodec(),
        }
        options["compressors"] = known[stored.codec](stored.level) if stored.codec in known else None
        if stored.fortran:
            options["filters"] = [TransposeCodec(order=(1, 0))]
        if stored.big_endian:
            options["serializer"] = BytesCodec(endian="big")
    array = zarr.create_array(
        path, shape=stored.shape, dtype=dtype, chunks=stored.chunks, shards=stored.shards,
        zarr_format=stored.version, **options,
    )  # fmt: skip
    for index, (start, stop) in enumerate(_bands(stored.shape, stored.unit[0], dtype.itemsize)):
        if not (stored.holes and index % 3 == 1) and stored.shape[1]:
            array[start:stop] = _values((*key, index), (stop - start, stored.shape[1]), stored.dtype, normal)


def _bands(shape: tuple[int, int], rows: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole rows of chunks, of about BAND_BYTES each."""
    fitting = BAND_BYTES // max(1, shape[1] * itemsize)
    return ranges(shape[0], max(rows, fitting // rows * rows))


def _values(key: tuple[int, ...], shape: tuple[int, int], dtype: str, normal: bool) -> Array:
    rng, kind = np.random.default_rng(key), np.dtype(dtype)

    def part() -> Array:
        if normal:
            return rng.standard_normal(
                shape, np.float64 if dtype in ("float64", "complex128") else np.float32
            )
        return rng.integers(0 if kind.kind == "u" else -3, 3, shape, np.int8, endpoint=True)

    if kind.kind == "c":
        both = np.empty(shape, kind)
        both.real, both.imag = part(), part()
        return both
    return part().astype(kind)


# ------------------------------------------------------------------------------------------------ checking


def check(case: Case, folder: Path) -> str | None:
    """Return what is wrong with C, or None. A small C is compared with NumPy's product in float64, a large
    one by its product with a random vector; integers are compared exactly."""
    c = zarr.open_array(folder / "c", mode="r")
    if c.shape != (case.m, case.n) or c.dtype.newbyteorder("=") != np.dtype(case.c.dtype):
        return f"C is {c.shape} {c.dtype}, not {(case.m, case.n)} {case.c.dtype}"
    if case.number % LARGE_EVERY == LARGE_EVERY - 1:
        return _check_by_vector(case, folder)
    return _check_all(case, folder)


def _check_all(case: Case, folder: Path) -> str | None:
    a, b = (_wide(array[...], op) for array, op in _operands(case, folder))
    expected = case.alpha * (a @ b)
    bound = abs(case.alpha) * (np.abs(a) @ np.abs(b))
    if case.beta:
        old = _wide(zarr.open_array(folder / "old", mode="r")[...])
        expected, bound = expected + case.beta * old, bound + abs(case.beta) * np.abs(old)
    found: Any = zarr.open_array(folder / "c", mode="r")[...]
    out = np.dtype(case.c.dtype)
    with np.errstate(all="ignore"):
        if case.normal:
            inputs = (case.a, case.b or case.a)
            unit = max(float(np.finfo(np.result_type(one.dtype, np.float32)).eps) for one in inputs) / 2
            stored = np.finfo(out)
            bound = 8 * unit * (math.sqrt(case.k) + 4) * bound + float(stored.smallest_subnormal)
            bound += 2 * float(stored.eps) * np.abs(expected)
            right = np.abs(_wide(found) - expected) <= bound
        else:
            right = found == (expected if out.kind == "c" else expected.real).astype(out)
    return _first(~right, found, expected)


def _check_by_vector(case: Case, folder: Path) -> str | None:
    x = np.random.default_rng((case.seed, case.number)).integers(1, 9, (case.n, 1)).astype(np.float64)
    (a, op_a), (b, op_b) = _operands(case, folder)
    expected = _times(a, _times(b, x, op_b), op_a)
    found = _times(zarr.open_array(folder / "c", mode="r"), x, "N")
    return _first(~(found == expected), found, expected)


def _operands(case: Case, folder: Path) -> list[tuple[Any, str]]:
    b = folder / ("b" if case.b else "a")
    return [(zarr.open_array(path, mode="r"), op) for path, op in ((folder / "a", case.op_a), (b, case.op_b))]


def _wide(values: Any, op: str = "N") -> Array:
    wide: Array = np.asarray(values)
    wide = wide.astype(np.complex128 if wide.dtype.kind == "c" else np.float64)
    wide = wide.conj() if op == "C" else wide
    return wide if op == "N" else wide.T


def _times(array: Any, x: Array, op: str) -> Array:
    """Compute op(array)·x, one band of rows at a time."""
    out = np.zeros((array.shape[0 if op == "N" else 1], x.shape[1]))
    rows = (array.shards or array.chunks)[0]
    for start, stop in _bands(array.shape, rows, array.dtype.itemsize):
        band = _wide(array[start:stop], op)
        if op == "N":
            out[start:stop] = band @ x
        else:
            out += band @ x[start:stop]
    return out


def _first(wrong: Array, found: Any, expected: Array) -> str | None:
    if not wrong.any():
        return None
    at = tuple(int(index) for index in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} elements are wrong, the first at {at}: {found[at]} instead of {expected[at]}"
