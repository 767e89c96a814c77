"""Configurations of the kernels in kernels/prepare/: what runs before and after products."""

from collections.abc import Iterator

from .config import C_TYPE, Config


def split(k_inner: bool) -> Config:
    """Return the configuration of split.cu. `k_inner`: whether the matrix is contiguous along k."""
    return Config("split", "float32", 1, 64, (256, 1), (("K_INNER", int(k_inner)),))


def sum_slices(dtype: str) -> Config:
    """Return the configuration of sum.cu for float32, float64 or int32."""
    return Config("sum", dtype, 1, 256, (256, 1), (("ELEMENT", C_TYPE[dtype]),))


def embed(mode: str, conjugate: bool = False, conjugate_other: bool = False) -> Config:
    """Return the configuration of embed.cu. `mode`: `rows`, `double n` or `double k`. `conjugate`,
    `conjugate_other`: whether op() conjugates this operand, and the other one."""
    macros: dict[str, int | str] = {
        "MODE": {"rows": 1, "double n": 2, "double k": 3}[mode],
        "CONJUGATE": int(conjugate),
        "CONJUGATE_OTHER": int(conjugate_other),
    }
    return Config("embed", "complex64", 8, 32, (32, 8), tuple(macros.items()))


def combine(product: str, conjugate_a: bool = False, conjugate_b: bool = False) -> Config:
    """Return the configuration of combine.cu for what a real `product` makes: `rows` of re and of im, `pairs`
    of them of which four make an element, or `elements` as they are in C."""
    macros: dict[str, int | str] = {
        "LAYOUT": {"rows": 0, "pairs": 1, "elements": 2}[product],
        "CONJUGATE_A": int(conjugate_a), "CONJUGATE_B": int(conjugate_b),
    }  # fmt: skip
    return Config("combine", "complex64", 1, 256, (256, 1), tuple(macros.items()))


_CHECKED = {
    # NumPy's name: ELEMENT, KIND
    "float16": ("unsigned short", 4),
    "float32": ("float", 1),
    "float64": ("double", 1),
    "complex64": ("float", 2),
    "complex128": ("double", 2),
    "int8": ("signed char", 3),
    "uint8": ("unsigned char", 3),
    "int32": ("int", 3),
    "int64": ("long long", 3),
}


def check(dtype: str, exact: bool, vec: int) -> Config:
    """Return the configuration of check.cu for panels or blocks of this type. `exact`: whether they hold
    integers. Rows start at multiples of `vec` elements."""
    element, kind = _CHECKED[dtype]
    macros: dict[str, int | str] = {"ELEMENT": element, "KIND": 3 if exact else kind, "VEC": vec}
    return Config("check", dtype, 8, 256, (256, 1), tuple(macros.items()))


def checks() -> Iterator[Config]:
    """Yield all configurations of check.cu."""
    for dtype, (_, kind) in _CHECKED.items():
        size = int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
        for vec in sorted({1, 2 if dtype == "float64" else 1, 16 // size}):
            for exact in {kind == 3, kind == 3 or dtype == "float64"}:
                yield check(dtype, exact, vec)


def transpose(dtype: str) -> Config:
    """Return the configuration of transpose.cu. `dtype`: NumPy's name for the type, of which only the size
    matters."""
    size = int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
    element = {1: "unsigned char", 4: "float", 8: "double", 16: "double2"}[size]
    return Config("transpose", dtype, 32, 32, (32, 8), (("ELEMENT", element),))


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
