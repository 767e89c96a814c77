"""What all GEMMs on tensor cores share: operands prepared for the instructions, k in slices where C has too
few tiles for all multiprocessors, and the fallback of fp16x3.

    fp16x3   float32  ──powers of two along m, n and k──► split in two float16 planes ──► 3 products
                                          └── inaccurate, NaN, Inf: sums in float64, decided on the device
    fp16     float16  ─────────────────────────────────────────────────────────────────► 1 product
    tf32     float32  ──for wgmma, an operand contiguous along m or n: transposed──────► 1 product
    int8     int8, uint8  ──likewise, also for mma─────────────────────────────────────► 1 product
    dmma     float64  ─────────────────────────────────────────────────────────────────► 1 product
                                       └── k in slices: their sum, always in the same order (sum.cu)

wgmma.py and mma.py launch the product itself.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np

from ..support.intervals import ceil_div, round_up
from . import preparations
from .config import Config
from .fallback import Fallback
from .launch import Functions, load
from .product import Operand, Product, Strips
from .scratch import Scratch
from .split import PITCH_BYTES, Split, Splitter, split_pays
from .tensor_tiles import ALONG_K
from .transposition import Transposition

_SUM_THREADS = 256
"""Threads of a block of sum.cu."""


class TensorGemm(ABC):
    """C ← α·op(A)·op(B) + β·C by one of the kinds above, on the current device.

    C is float32; int32 for int8, float64 for dmma. If no configuration is given, each product takes the one
    that suits its shape, or plain float32 where a split would not pay.
    """

    def __init__(
        self,
        kernel: str,
        trans_a: bool,
        trans_b: bool,
        a_type: str,
        b_type: str,
        config: Config | None = None,
        spared: int = 0,
    ):
        """`kernel`: its name in the catalog. `trans_a`, `trans_b`: whether A is stored k×m, and B n×k.
        `a_type`, `b_type`: NumPy's names of the stored types. `config`: the only configuration to use.
        `spared`: the multiprocessors on which no thread block of products stays for long."""
        from cupy.cuda import Device

        self.kind, self._types = kernel.removeprefix("mma-"), {"a": a_type, "b": b_type}
        self._mn = {"a": trans_a, "b": not trans_b}
        """Whether a stored operand is contiguous along m or n, and not along k."""
        self.configs = self._shipped(*self._mn.values()) if config is None else [config]
        self._chooses = config is None
        self._chosen: dict[tuple[int, int, int], tuple[Config, int]] = {}
        attributes = Device().attributes
        self._multiprocessors = int(attributes["MultiProcessorCount"]) - spared
        self._shared = int(attributes["MaxSharedMemoryPerMultiprocessor"])
        self._scalar = np.dtype(self.configs[0].dtype).type
        self._c_bytes = np.dtype(self.configs[0].dtype).itemsize
        self._function = Functions()
        self._turn: dict[str, Transposition] = {}
        self.scratch = Scratch()
        self._sum = load(preparations.sum_slices(self.configs[0].dtype))["sum"]
        self._splitter: Splitter | None = None
        if self.kind == "fp16x3":
            self._splitter = Splitter(self._mn, self._multiprocessors, self.scratch)
            self._fall_back = Fallback(self._mn, self._multiprocessors, self._shared, self._function)

    @abstractmethod
    def _shipped(self, a_mn: bool, b_mn: bool) -> list[Config]:
        """Return the configurations for operands contiguous along m or n (`mn`) or along k."""

    @abstractmethod
    def _choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        """Find what `choose` returns."""

    @abstractmethod
    def _multiply(self, config: Config, slices: int, product: Product, split: Split, stream: Any) -> None:
        """Start the product of prepared operands. Slice number s is stored s·m·ldc elements behind C."""

    def turned(self, config: Config) -> list[str]:
        """Return the names of operands that must be transposed, because the kernel takes them only along
        k."""
        if self.kind not in ALONG_K:
            return []
        return [name for name, mn in self._mn.items() if mn and not config.value(f"{name.upper()}_MN")]

    def choose(self, m: int, n: int, k: int) -> tuple[Config, int]:
        """Return the configuration for the shape, and the number of slices in which k is cut. They are
        remembered, because the blocks of a plan have few shapes."""
        if (m, n, k) not in self._chosen:
            self._chosen[m, n, k] = self._choose(m, n, k)
        return self._chosen[m, n, k]

    def __call__(
        self, product: Product, stream: Any, in_place: str = "", strips: Strips | None = None
    ) -> None:
        """Start the product in a CuPy stream of the current device. Returns at once.

        Rows of A and B must start at multiples of PITCH_BYTES (fp16x3), of 16 bytes, or anywhere (dmma).
        `in_place`: names of operands that may be overwritten, with those that stay; fp16x3 takes scratch
        memory for the others. `strips`: the strips in which C is made, by default one. If C is symmetric, and
        A and B have one address, they are prepared once. Only the real parts of α and β are used.
        """
        if product.m == 0 or product.n == 0:
            return
        if product.alpha == 0:
            product = replace(product, k=0)
        strips = strips or Strips()
        prepared, split, thin = product, Split(), False
        if self._splitter and product.k:
            pays = any(product.stay) or split_pays(product.m, product.n, product.k)
            thin = self._chooses and not pays
            if thin:
                split = Split(flag=self._splitter.state(1, stream))
            else:
                symmetric = strips.lower and product.a.ptr == product.b.ptr
                prepared, split = self._splitter.split(product, symmetric, in_place, stream)
        at_once = not thin and self._makes_triangle(prepared, split, strips, stream)
        for start, stop, width in strips.of(product.m, product.n):
            if not (thin or at_once):
                self._product(self._rows(prepared, start, stop, width), split.below(start), stream)
            if split.flag:  # the operands may not have been split
                self._fall_back(self._rows(product, start, stop, width), split.flag, stream)
            strips.after(stop)

    def _makes_triangle(self, product: Product, split: Split, strips: Strips, stream: Any) -> bool:
        """Start the product of all strips of a symmetric C in one launch, if the kernel can."""
        return False

    def _rows(self, product: Product, start: int, stop: int, width: int) -> Product:
        """Return the product for one strip of C."""
        step = np.dtype(self._types["a"]).itemsize * (1 if self._mn["a"] else product.a.ld)
        return product.rows(start, stop, width, step, self._c_bytes)

    def _product(self, product: Product, split: Split, stream: Any) -> None:
        """Start a product of operands that are split, or need not be."""
        m, n, c = product.m, product.n, product.c
        config, slices = self.choose(m, n, product.k)
        product = self._turn_operands(config, product, stream)
        if slices == 1:
            self._multiply(config, 1, product, split, stream)
            return
        parts = self.scratch.at("slices", self._c_bytes * slices * m * n)
        of_slices = replace(product, alpha=1.0, beta=0.0, c=Operand(parts, n))
        self._multiply(config, slices, of_slices, split, stream)
        alpha, beta = self._factors(product)
        args = (
            np.int64(m), np.int32(n), np.int32(slices), alpha, np.uintp(parts), beta, np.uintp(c.ptr),
            np.int64(c.ld), np.uintp(split.flag),
        )  # fmt: skip
        self._sum((ceil_div(m * n, _SUM_THREADS),), (_SUM_THREADS,), args, stream)

    def _factors(self, product: Product) -> tuple[Any, Any]:
        """α and β in the type of C."""
        return self._scalar(product.alpha.real), self._scalar(product.beta.real)

    def _turn_operands(self, config: Config, product: Product, stream: Any) -> Product:
        """Transpose the operands that must lie along k and do not. Returns the product of what is then
        there."""
        k = product.k
        for name in self.turned(config):
            dtype = self._types[name]
            if dtype not in self._turn:
                self._turn[dtype] = Transposition(dtype)
            operand, lines = (product.a, product.m) if name == "a" else (product.b, product.n)
            size = np.dtype(dtype).itemsize
            pitch = round_up(k, PITCH_BYTES // size)
            turned = Operand(self.scratch.at(f"turned {name}", lines * pitch * size), pitch)
            self._turn[dtype](k, lines, operand, turned, stream)
            product = replace(product, a=turned) if name == "a" else replace(product, b=turned)
        return product

    @property
    def lost(self) -> Any:
        """An array of one element, which is not 0 if a product was not made because the device no longer had
        a panel that stays as it was (`Splitter.lost`). It is known when the product would be complete."""
        return self._splitter.lost if self._splitter else np.zeros(1, np.uint32)

    def fell_back(self) -> bool:
        """Wait for the device, and return whether the fallback made the last product of fp16x3."""
        assert self._splitter, "other kinds have no fallback"
        return self._splitter.fell_back()

    def reserve(self, m: int, n: int, k: int, in_place: str = "ab", stay: tuple[int, int] = (0, 0)) -> None:
        """Load the kernel, and allocate scratch memory for products up to m×n×k whose operands need not be
        transposed. `in_place`: as in calls. `stay`: numbers of panels of A and B that stay on the device and
        are split where they lie."""
        config, _ = self.choose(m, n, k)
        self._function(config)
        # A smaller product at an edge may be cut in slices: no more than there are places for tiles.
        places = [self._multiprocessors * c.value("RESIDENT") * c.bm * c.bn for c in self.configs]
        self.scratch.at("slices", self._c_bytes * max(places))
        if self._splitter:
            self._fall_back.reserve()
            self._splitter.reserve(m, n, k, in_place, stay)
