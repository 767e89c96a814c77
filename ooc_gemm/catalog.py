"""Every kernel there is: what it is, what it takes, and the configurations it is shipped in.

A `Kernel` is a description; `Kernel.configs` yields what `nvrtc.compile` and `nvrtc.launch` take, the
default first. Nothing here needs a GPU, or anything but the standard library.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .nvrtc import Config

_C_TYPE = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long"}
"""NumPy's name of a type → its name in CUDA C++."""


@dataclass(frozen=True)
class Kernel:
    """One of the sources in kernels/."""

    name: str
    explanation: str
    """One line for `ooc-gemm bench kernels --list`."""
    dtypes: tuple[str, ...]
    """Types of A, B and C (all the same) that it is shipped for."""
    configs: Callable[[str, bool, bool], list[Config]]
    """(dtype, trans_a, trans_b) → configurations, the default first."""
    transposes: bool = True
    """Whether A may be stored k×m, and B n×k."""
    min_arch: int = 75
    """Least compute capability, times ten."""


def _ffma(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
    # What bounds the tile is the 128 registers of a thread: an 8-byte sum takes two. int64 also needs
    # several for each product.
    sizes = {"float32": (128, 128, 8, 8, 8), "float64": (128, 64, 8, 8, 4), "int64": (64, 64, 8, 4, 4)}
    bm, bn, bk, tm, tn = sizes[dtype]
    macros = {
        "ELEMENT": _C_TYPE[dtype], "BM": bm, "BN": bn, "BK": bk, "TM": tm, "TN": tn,
        "TRANS_A": int(trans_a), "TRANS_B": int(trans_b),
    }  # fmt: skip
    return [Config("ffma", dtype, bm, bn, (bm // tm * (bn // tn), 1), tuple(macros.items()))]


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "ffma",
            "shared-memory tiles, register blocks, double buffering: the fastest without tensor cores",
            ("float32", "float64", "int64"),
            _ffma,
        ),
    )
}
"""By name, the ladder first, rung by rung."""
