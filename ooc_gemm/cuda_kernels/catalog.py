"""Every kernel there is: what it is, what it takes, and the configurations it is shipped in.

A `Kernel` is a description; `Kernel.configs` returns what `compile_kernel` and `launch` take. Nothing here
needs a GPU, or anything but the standard library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import ladder
from .config import Config
from .ffma import choose_ffma, ffma
from .tensor_tiles import dmma, mma, of_magnitudes, of_residues, wgmma


@dataclass(frozen=True)
class Kernel:
    """One of the sources in kernels/."""

    name: str
    explanation: str
    """One line for `ooc-gemm bench kernels --list`."""
    dtypes: tuple[str, ...]
    """Types of A and B that it is shipped for. C has the same type, but float32 for float16, int32 for
    integers of 8 bits, and what `out` says."""
    configs: Callable[[str, bool, bool], list[Config]]
    """(dtype, trans_a, trans_b) → configurations, the default first."""
    transposes: bool = True
    """Whether A may be stored k×m, and B n×k."""
    min_arch: int = 75
    """The least compute capability that it runs on, times ten."""
    only_arch: int | None = None
    """The only compute capability that has its instructions, times ten; None if others have them, too."""
    choose: Callable[[list[Config], int, int, int, int], Config] = lambda configs, m, n, k, _: configs[0]
    """(configurations, m, n, k, multiprocessors) → the configuration to use if none was measured."""
    launcher: Literal["launch", "rung", "wgmma", "mma", "ozaki"] = "launch"
    """Who knows its arguments: `launch` for the signature that the ladder and ffma share, `rung` for
    `wgmma.Rung`, or the module."""
    out: tuple[tuple[str, str], ...] = ()
    """Pairs of a type of A and B and the type of C, where that is not as usual."""

    def runs_on(self, capability: int) -> bool:
        """Return whether GPUs of a compute capability, times ten, have its instructions."""
        return self.min_arch <= capability and self.only_arch in (None, capability)


_SIMPLE = ("float32", "float64", "int32")


def _rungs() -> list[Kernel]:
    """Return the kernels of the classical ladder, which take A and B as stored."""
    rungs = (
        (
            "naive-uncoalesced",
            "one thread an element, warps down the columns of C",
            _SIMPLE,
            ladder.naive(False),
        ),
        ("naive", "one thread an element, warps along the rows of C", _SIMPLE, ladder.naive(True)),
        ("tiled", "square tiles in shared memory", _SIMPLE, ladder.tiled),
        ("microtile", "several rows of C a thread", _SIMPLE, ladder.rung("microtile")),
        (
            "register",
            "a block of neighbouring elements a thread, in registers",
            _SIMPLE,
            ladder.rung("register_block"),
        ),
        (
            "rectangular",
            "tiles of any sides; the elements of a warp side by side",
            _SIMPLE,
            ladder.rung("rectangular"),
        ),
        (
            "vectorized",
            "16-byte accesses, A transposed in shared memory",
            _SIMPLE[:2],
            ladder.rung("vectorized"),
        ),
        (
            "warptile",
            "block, warp and thread tiles; loads run ahead of the products",
            _SIMPLE[:2],
            ladder.rung("warptile"),
        ),
    )
    return [Kernel(name, text, dtypes, configs, transposes=False) for name, text, dtypes, configs in rungs]


def _hopper_rungs() -> list[Kernel]:
    """Return the last rungs of the ladder, which `wgmma.Rung` launches."""
    explained = {
        "warpgroup": "Hopper's copy engine brings tiles, one warpgroup multiplies them",
        "ring": "copies run ahead in a ring of stages, with barriers",
        "producer": "one warpgroup orders copies, two multiply and have its registers",
        "clusters": "pairs of thread blocks share tiles by multicast, on a persistent grid",
    }
    return [
        Kernel(
            name, text, ("float16",), ladder.hopper(name), transposes=False, min_arch=90, only_arch=90,
            launcher="rung",
        )
        for name, text in explained.items()
    ]  # fmt: skip


def _of_kind(
    make: Callable[[str, bool, bool, bool, bool], list[Config]], kind: str
) -> Callable[[str, bool, bool], list[Config]]:
    """Return `Kernel.configs` for one kind of `wgmma` or `mma`."""
    return lambda dtype, trans_a, trans_b: make(
        kind, trans_a, not trans_b, dtype == "uint8", dtype == "uint8"
    )


def _hopper() -> list[Kernel]:
    """Return the kernels that wgmma.py launches."""
    explained = {
        "fp16x3": (
            "three float16 products on Hopper's tensor cores, as accurate as float32",
            ("float32", "complex64"),
        ),
        "fp16": ("float16 on Hopper's tensor cores, sums in float32", ("float16",)),
        "tf32": ("one TF32 product on Hopper's tensor cores: 11 significant bits", ("float32",)),
        "int8": ("8-bit integers on Hopper's tensor cores, exact sums in int32", ("int8", "uint8")),
    }

    return [
        Kernel(kind, text, dtypes, _of_kind(wgmma, kind), min_arch=90, only_arch=90, launcher="wgmma")
        for kind, (text, dtypes) in explained.items()
    ]


def _residues(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
    """Return the products of ozaki2: of residues, and of magnitudes for floating-point numbers."""
    product = of_residues(3 if dtype == "complex128" else 1)
    return [product] if "int" in dtype else [product, of_magnitudes()]


def _warp_level() -> list[Kernel]:
    """Return the kernels that mma.py launches."""
    explained = {
        "fp16x3": ("three float16 products on tensor cores before or after Hopper's", ("float32",)),
        "fp16": ("float16 on the same, sums in float32", ("float16",)),
        "tf32": ("one TF32 product on the same", ("float32",)),
        "int8": ("8-bit integers on the same, exact sums in int32", ("int8", "uint8")),
    }

    return [
        Kernel("dmma", "float64 on the tensor cores", ("float64",), dmma, min_arch=80, launcher="mma"),
        *(
            Kernel(f"mma-{kind}", text, dtypes, _of_kind(mma, kind), min_arch=80, launcher="mma")
            for kind, (text, dtypes) in explained.items()
        ),
    ]


KERNELS = {
    kernel.name: kernel
    for kernel in (
        *_rungs(),
        *_hopper_rungs(),
        Kernel(
            "ffma",
            "shared-memory tiles, register blocks, double buffering: the fastest without tensor cores",
            ("float32", "float64", "int64"),
            ffma,
            choose=choose_ffma,
        ),
        *_hopper(),
        Kernel(
            "ozaki2",
            "float64, complex128 and wide integers by 8-bit residues on Hopper's tensor cores",
            ("float64", "complex128", "int16", "int32"),
            _residues,
            min_arch=90,
            only_arch=90,
            launcher="ozaki",
            out=(("int16", "int64"), ("int32", "int64")),
        ),
        *_warp_level(),
    )
}
"""All kernels by name: the ladder first, rung by rung."""
