"""Launches kernels/dmma.cu and kernels/mma.cu, the tensor cores as a warp uses them: which configuration
suits a shape, k in slices where C has too few tiles to go round, and the operands of mma.cu, which are those
of wgmma.cu.

    dmma        float64  ──────────────────────────────────────────────────────────► dmma
    mma-fp16x3  float32  ──split in two float16 planes, or ffma, as in wgmma.py────► mma, 3 products
    mma-fp16    float16  ──────────────────────────────────────────────────────────► mma
    mma-tf32    float32  ──an operand contiguous along m or n: transposed──────────► mma
    mma-int8    int8, uint8  ──likewise────────────────────────────────────────────► mma
                                          └── k in slices: a sum of the slices after it (sum.cu)
"""

from typing import Any

import numpy as np

from . import catalog, nvrtc
from .tiles import ceil_div, round_up
from .wgmma import _FLAG_BYTES, PITCH_BYTES, Wgmma, _load


class Mma(Wgmma):
    """C ← α·op(A)·op(B) + β·C by one of the kernels above, on the current device; called like Wgmma. Rows of
    A and B may start anywhere for dmma."""

    def __init__(
        self,
        kernel: str,
        trans_a: bool,
        trans_b: bool,
        a_type: str,
        b_type: str,
        config: nvrtc.Config | None = None,
    ):
        from cupy.cuda import Device

        self.kind, self._types = kernel.removeprefix("mma-"), {"a": a_type, "b": b_type}
        self._mn = {"a": trans_a, "b": not trans_b}
        self._turns = {name: mn and self.kind in ("tf32", "int8") for name, mn in self._mn.items()}
        if kernel == "dmma":
            self.configs = catalog.dmma("float64", trans_a, trans_b)
        else:
            a_mn, b_mn = (mn and not self._turns[name] for name, mn in self._mn.items())
            self.configs = catalog.mma(self.kind, a_mn, b_mn, a_type == "uint8", b_type == "uint8")
        if config is not None:
            self.configs = [config]
        attributes = Device().attributes
        self._multiprocessors = attributes["MultiProcessorCount"]
        self._shared = attributes["MaxSharedMemoryPerMultiprocessor"]
        self._functions: dict[nvrtc.Config, Any] = {}
        self._chosen: dict[tuple[int, int, int], tuple[nvrtc.Config, int]] = {}
        self._scalar = np.dtype(self.configs[0].dtype).type
        self._turn = {
            name: _load(catalog.transpose(self._types[name]))["transpose"]
            for name, wanted in self._turns.items()
            if wanted
        }
        self._sum = _load(catalog.sum_slices(self.configs[0].dtype))["sum"]
        if self.kind == "fp16x3":
            names = "row_exponents", "column_largest", "column_exponents", "split"
            self._split = {name: _load(catalog.split(not mn), *names) for name, mn in self._mn.items()}
            self._plain_config = catalog.guarded_ffma(trans_a, trans_b)
            self._plain = _load(self._plain_config)["ffma"]
        self._scratch: dict[str, Any] = {}

    def __call__(
        self,
        m: int,
        n: int,
        k: int,
        alpha: float,
        a_ptr: int,
        lda: int,
        b_ptr: int,
        ldb: int,
        beta: float,
        c_ptr: int,
        ldc: int,
        stream: Any,
        in_place: str = "",
    ) -> None:
        """Enqueue it."""
        if m == 0 or n == 0:
            return
        if alpha == 0:
            k = 0
        operands = {"a": (a_ptr, lda, m), "b": (b_ptr, ldb, n)}
        args: tuple[Any, ...]
        u, i32, i64, scalar = np.uintp, np.int32, np.int64, self._scalar
        exponents = skip = 0  # none
        if self.kind == "fp16x3" and k:
            exponents, skip = self._exponents(m, n, k, operands, stream)
            for name, (ptr, ld, lines) in operands.items():
                rows, cols = (k, lines) if self._mn[name] else (lines, k)
                planes = ptr if name in in_place else self._memory(f"planes {name}", rows * ld * 4)
                at = exponents + (4 * m if name == "b" else 0)
                args = i32(rows), i32(cols), u(ptr), i64(ld), u(at), u(planes), u(skip)
                self._split[name]["split"]((ceil_div(rows * ceil_div(cols, 64), 8),), (256,), args, 0, stream)
                operands[name] = (planes, ld, lines)
        for name, turn in self._turn.items():
            ptr, ld, lines = operands[name]
            size = np.dtype(self._types[name]).itemsize
            pitch = round_up(k, PITCH_BYTES // size)
            turned = self._memory(f"turned {name}", lines * pitch * size)
            args = i32(k), i32(lines), u(ptr), i64(ld), u(turned), i64(pitch)
            turn((ceil_div(k, 32) * ceil_div(lines, 32),), (32, 8), args, 0, stream)
            operands[name] = (turned, pitch, lines)

        config, slices = self.choose(m, n, k)
        factors, out = (scalar(alpha), scalar(beta)), (c_ptr, ldc)
        if slices > 1:
            factors = scalar(1), scalar(0)
            out = self._memory("partial", np.dtype(config.dtype).itemsize * slices * m * n), n
        (a, a_ld, _), (b, b_ld, _) = operands["a"], operands["b"]
        args = (
            i64(m), i64(n), i64(k), factors[0], u(a), i64(a_ld), u(b), i64(b_ld), factors[1], u(out[0]),
            i64(out[1]),
        )  # fmt: skip
        if self.kind == "fp16x3":
            args += u(exponents), u(exponents + 4 * m), u(skip)
        grid = (*config.grid(m, n), slices)
        self._function(config)(grid, config.block, args, config.shared_bytes, stream)
        if slices > 1:
            args = (
                i64(m), i32(n), i32(slices), scalar(alpha), u(out[0]), scalar(beta), u(c_ptr), i64(ldc),
                u(skip),
            )  # fmt: skip
            self._sum((ceil_div(m * n, 256),), (256,), args, 0, stream)
        if skip:
            self._fall_back(m, n, k, alpha, (a_ptr, lda), (b_ptr, ldb), beta, (c_ptr, ldc), skip, stream)

    def choose(self, m: int, n: int, k: int) -> tuple[nvrtc.Config, int]:
        """The configuration for the shape, and in how many slices k is cut."""
        shape = m, n, k
        if shape not in self._chosen:
            self._chosen[shape] = catalog.choose(self.configs, *shape, self._multiprocessors, self._shared)
        return self._chosen[shape]

    def _function(self, config: nvrtc.Config) -> Any:
        if config not in self._functions:
            self._functions[config] = _load(config)[config.kernel]
        return self._functions[config]

    def reserve(self, m: int, n: int, k: int) -> None:
        """As of Wgmma."""
        self._function(self.choose(m, n, k)[0])
        # A smaller product at an edge may be cut in slices: no more than there are places for tiles.
        places = [self._multiprocessors * c.value("RESIDENT") * c.bm * c.bn for c in self.configs]
        self._memory("partial", np.dtype(self._scalar).itemsize * max(places))
        if self.kind == "fp16x3":
            self._memory("flag", _FLAG_BYTES)
            self._memory("exponents", 4 * (m + n))
            self._memory("largest", 4 * max(m, n))
