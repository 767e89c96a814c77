"""Configurations of the kernels in kernels/prepare/: what runs before and after products."""

from collections.abc import Iterator, Sequence

from .config import C_TYPE, Config
from .moduli import FLOATING, MODULI, bounds_text, moduli_text, tables_text


def split(k_inner: bool) -> Config:
    """Return the configuration of split.cu. `k_inner`: whether the matrix is contiguous along k."""
    return Config("split", "float32", 1, 64, (256, 1), (("K_INNER", int(k_inner)),))


def survey(k_inner: bool) -> Config:
    """Return the configuration of survey.cu. `k_inner`: whether the matrix is contiguous along k."""
    return Config("survey", "float32", 1, 64, (256, 1), (("K_INNER", int(k_inner)),))


def decode(compressor: str, shared_bytes: int) -> Config:
    """Return the configuration of zstd.cu or blosc.cu. `shared_bytes`: the most shared memory of a thread
    block. As many blocks of zstd are decoded at a time as there is room for tables in it, up to 32."""
    at_once = max(1, min(32, (shared_bytes - (12 << 10)) // 5888))
    shared = 5888 * at_once + (12 << 10)
    macros = ("BLOCKS", at_once), ("SHARED_BYTES", shared)
    return Config(compressor, "uint8", 1, 1, (512, 1), macros, shared)


def sum_slices(dtype: str, part: str = "") -> Config:
    """Return the configuration of sum.cu. `dtype`: NumPy's name for the type of C: float32, float64, int32 or
    int64. `part`: that of the slices, by default the same."""
    c = C_TYPE[dtype]
    wraps = "unsigned long long" if dtype == "int64" else c
    macros = ("ELEMENT", c), ("PART", C_TYPE[part or dtype]), ("SUM", wraps)
    return Config("sum", dtype, 1, 256, (256, 1), macros)


def cut(size: int) -> Config:
    """Return the configuration of bytes.cu for integers of `size` bytes."""
    element = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[size]
    return Config("bytes", f"uint{8 * size}", 1, 4 * 256, (256, 1), (("ELEMENT", element),))


_REAL = {"complex64": "float", "complex128": "double"}


def embed(
    mode: str, conjugate: bool = False, conjugate_other: bool = False, *, dtype: str = "complex64"
) -> Config:
    """Return the configuration of embed.cu. `mode`: `rows`, `double n` or `double k`. `conjugate`,
    `conjugate_other`: whether op() conjugates this operand, and the other one. `dtype`: complex64, or
    complex128, for which a flag on the device says whether to run."""
    macros: dict[str, int | str] = {
        "REAL": _REAL[dtype], "GUARDED": int(dtype == "complex128"),
        "MODE": {"rows": 1, "double n": 2, "double k": 3}[mode],
        "CONJUGATE": int(conjugate), "CONJUGATE_OTHER": int(conjugate_other),
    }  # fmt: skip
    return Config("embed", dtype, 8, 32, (32, 8), tuple(macros.items()))


def combine(
    product: str, conjugate_a: bool = False, conjugate_b: bool = False, *, dtype: str = "complex64"
) -> Config:
    """Return the configuration of combine.cu for what a real `product` makes: `rows` of re and of im, `pairs`
    of them of which four make an element, or `elements` as they are in C. `dtype`: as for `embed`."""
    macros: dict[str, int | str] = {
        "REAL": _REAL[dtype], "GUARDED": int(dtype == "complex128"),
        "LAYOUT": {"rows": 0, "pairs": 1, "elements": 2}[product],
        "CONJUGATE_A": int(conjugate_a), "CONJUGATE_B": int(conjugate_b),
    }  # fmt: skip
    return Config("combine", dtype, 1, 256, (256, 1), tuple(macros.items()))


GRAIN = 32
"""Magnitudes are so many times as large as the root of the mean square of their line."""
SAMPLE, SPAN = 32, 128
"""Of SPAN elements in a row, the first SAMPLE have magnitudes: 256 bytes of float64, and a quarter of a
product."""


def scale(dtype: str) -> Config:
    """Return the configuration of scale.cu. `dtype`: float64 or complex128."""
    macros: dict[str, int | str] = {
        "PARTS": 2 if dtype == "complex128" else 1, "GRAIN": GRAIN, "SAMPLE": SAMPLE, "SPAN": SPAN,
        "BOUNDS": bounds_text(),
    }  # fmt: skip
    return Config("scale", dtype, 1, 1024, (1024, 1), tuple(macros.items()))


def residues(dtype: str, count: int = len(MODULI), conjugate: bool = False) -> Config:
    """Return the configuration of residues.cu. `dtype`: NumPy's name for the type of the operand. `count`:
    the number of moduli, at most for float64 and complex128. `conjugate`: whether op() conjugates it."""
    floating, parts = dtype in ("float64", "complex128"), 2 if dtype == "complex128" else 1
    macros: dict[str, int | str] = {
        "ELEMENT": _PART[dtype], "FLOATING": int(floating), "PARTS": parts,
        "CONJUGATE": int(conjugate), "COUNT": count, "MODULI": moduli_text(),
    }  # fmt: skip
    return Config("residues", dtype, 1, 8 // parts * 256, (256, 1), tuple(macros.items()))


def recombine(dtype: str, counts: Sequence[int] = FLOATING) -> Config:
    """Return the configuration of recombine.cu. `dtype`: NumPy's name for the type of C: float64, complex128
    or int64. `counts`: the numbers of moduli that there may be."""
    limbs, parts = 2 if dtype == "int64" else 4, 2 if dtype == "complex128" else 1
    raised = 1 << (25 if parts == 2 else 23)
    macros: dict[str, int | str] = {
        "ELEMENT": _PART[dtype], "FLOATING": int(dtype != "int64"), "PARTS": parts, "LIMBS": limbs,
        "RAISED": raised, "TABLES": tables_text(counts, limbs, raised),
    }  # fmt: skip
    return Config("recombine", dtype, 1, 4 * 256, (256, 1), tuple(macros.items()))


_CHECKED = {
    # NumPy's name: ELEMENT, KIND
    "float16": ("unsigned short", 4),
    "float32": ("float", 1),
    "float64": ("double", 1),
    "complex64": ("float", 2),
    "complex128": ("double", 2),
    "int8": ("signed char", 3),
    "uint8": ("unsigned char", 3),
    "int16": ("short", 3),
    "uint16": ("unsigned short", 3),
    "int32": ("int", 3),
    "uint32": ("unsigned", 3),
    "int64": ("long long", 3),
    "uint64": ("unsigned long long", 3),
}


def check(dtype: str, exact: bool, vec: int, wide: bool = False) -> Config:
    """Return the configuration of check.cu for panels or blocks of this type. `exact`: whether they hold
    integers. Rows start at multiples of `vec` elements. `wide`: whether sums of integers are int64, whatever
    the type; those of types of 8 bytes are."""
    element, kind = _CHECKED[dtype]
    macros: dict[str, int | str] = {
        "ELEMENT": element, "KIND": 3 if exact else kind, "VEC": vec,
        "WIDE": int(wide or dtype in ("int64", "uint64", "float64")),
    }  # fmt: skip
    return Config("check", dtype, 8, 256, (256, 1), tuple(macros.items()))


def checks() -> Iterator[Config]:
    """Yield all configurations of check.cu."""
    for dtype, (_, kind) in _CHECKED.items():
        size = int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
        for vec in sorted({1, 2 if dtype == "float64" else 1, 16 // size}):
            for exact in {kind == 3, kind == 3 or dtype == "float64"}:
                for wide in {kind == 3} | ({False} if dtype in ("int8", "uint8", "int32") else set()):
                    yield check(dtype, exact, vec, wide)


_NARROWED = {
    # NumPy's name of the type of sums: of the types that it is narrowed to
    "float32": ("float16",),
    "float64": ("float16", "float32"),
    "complex128": ("complex64",),
    "int32": ("int8", "int16", "uint8", "uint16", "uint32"),
    "int64": ("int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"),
}
_EXACT = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
"""What float64 is narrowed to where it holds integers."""
_PART = {
    "float16": "unsigned short", "float32": "float", "float64": "double", "complex64": "float",
    "complex128": "double", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned",
    "uint64": "unsigned long long",
}  # fmt: skip
"""NumPy's name of a type → the type of its elements, or of their parts, in CUDA C++."""


def narrow(sums: str, out: str) -> Config:
    """Return the configuration of narrow.cu for blocks of the type `sums` and a C of the type `out`, both by
    NumPy's names. Raises ValueError if it does not convert one to the other."""
    if out not in _NARROWED.get(sums, ()) + (_EXACT if sums == "float64" else ()):
        raise ValueError(f"blocks of {sums} are not narrowed to {out}")
    kind = {"f": 1, "c": 2}.get(out[0], 3)
    macros: dict[str, int | str] = {
        "FROM": _PART[sums], "TO": _PART[out], "KIND": 4 if out == "float16" else kind
    }  # fmt: skip
    return Config("narrow", out, 1, 2048, (256, 1), tuple(macros.items()))


def narrows() -> Iterator[Config]:
    """Yield all configurations of narrow.cu."""
    for sums, types in _NARROWED.items():
        for out in types + (_EXACT if sums == "float64" else ()):
            yield narrow(sums, out)


def transpose(dtype: str) -> Config:
    """Return the configuration of transpose.cu. `dtype`: NumPy's name for the type, of which only the size
    matters."""
    size = int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
    element = {1: "unsigned char", 2: "unsigned short", 4: "float", 8: "double", 16: "double2"}[size]
    side = 32 * max(1, 4 // size)
    return Config("transpose", dtype, side, side, (32, 8), (("ELEMENT", element),))


_STORED = {
    # NumPy's name: C++
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "unsigned short",
    "float32": "float",
    "float64": "double",
}


def place(stored: str, panel: str, turned: bool) -> Config:
    """Return the configuration of place.cu. `stored`, `panel`: NumPy's names for the types of what is stored
    and of panels. `turned`: whether panels are transposed against what is stored."""
    macros: dict[str, int | str] = {
        "SOURCE": _STORED[stored],
        "HALF": int(stored == "float16"),
        "REAL": "float" if panel in ("float32", "complex64") else "double",
        "COMPLEX": int(panel.startswith("complex")),
        "TURNED": int(turned),
    }
    return Config("place", panel, 32, 32, (32, 8), tuple(macros.items()))


def places() -> Iterator[Config]:
    """Yield all configurations of place.cu."""
    for stored in _STORED:
        for panel in ("float32", "float64", "complex64", "complex128"):
            for turned in (False, True):
                yield place(stored, panel, turned)


def centre(dtype: str) -> Config:
    """Return the configuration of centre.cu. `dtype`: NumPy's name for the type of panels, float32 or
    float64."""
    return Config("centre", dtype, 32, 32, (32, 8), (("ELEMENT", C_TYPE[dtype]),))


def standardize(dtype: str, along_k: bool) -> Config:
    """Return the configuration of standardize.cu. `dtype`: NumPy's name for the type of panels, float32 or
    float64. `along_k`: whether k lies along their rows."""
    block = 1024 if along_k else 256, 1
    return Config("standardize", dtype, 1, 1, block, (("REAL", C_TYPE[dtype]), ("ALONG_K", int(along_k))))


def standardizes() -> Iterator[Config]:
    """Yield all configurations of standardize.cu."""
    for dtype in ("float32", "float64"):
        for along_k in (False, True):
            yield standardize(dtype, along_k)


def best(dtype: str, scores: str) -> Config:
    """Return the configuration of best.cu. `dtype`, `scores`: NumPy's names for the types of C (float32,
    float64, int32 or int64) and of scores (float32 or float64)."""
    macros: dict[str, int | str] = {"ELEMENT": C_TYPE[dtype], "SCORE": C_TYPE[scores]}
    return Config("best", dtype, 1, 256, (256, 1), tuple(macros.items()))


def bests() -> Iterator[Config]:
    """Yield all configurations of best.cu."""
    for dtype in C_TYPE:
        yield best(dtype, "float32" if dtype == "float32" else "float64")


def pairs(left: str, right: str) -> Config:
    """Return the configuration of pairs.cu. `left`, `right`: NumPy's names for the types of the rows."""
    macros: dict[str, int | str] = {
        side: "Half" if name == "float16" else _STORED[name]
        for side, name in (("LEFT", left), ("RIGHT", right))
    }
    return Config("pairs", "float64", 1, 256, (256, 1), tuple(macros.items()))


def all_pairs() -> Iterator[Config]:
    """Yield configurations of pairs.cu with every type on either side."""
    for name in _STORED:
        yield pairs(name, name)
        if name != "float16":
            yield pairs(name, "float16")
