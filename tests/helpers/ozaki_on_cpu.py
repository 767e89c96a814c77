"""The kernels of ozaki2 for `cupy_on_cpu`: their specification (ozaki.py) on memory."""

from typing import ClassVar

import numpy as np
import ozaki

from ooc_gemm.cuda_kernels.moduli import MODULI

STATE = np.dtype([("fallback", "u4"), ("moduli", "u4"), ("shifted", "u4"), ("least", "i4")])
LINE = np.dtype([("squares", "f8"), ("exponent", "i4"), ("", "i4")])


def matrix(at, rows, cols, ld, dtype):
    from cupy_on_cpu import matrix

    return matrix(at, rows, cols, ld, dtype)


def vector(at, count, dtype):
    return matrix(at, 1, count, count, dtype)[0]


class OzakiKernels:
    """Methods of `cupy_on_cpu.Kernel`. `config`: what the kernel is compiled with."""

    decided: ClassVar[list[int]] = []
    """How many moduli products took in a test; 0: that product fell back."""

    def _element(self):
        return "c16" if self.config.value("PARTS") == 2 else "f8"

    def depth_largest(self, grid, rows, cols, x, ld, largest, tops, squares):
        assert grid[0] == -(-rows // 128) * -(-cols * self.config.value("PARTS") // 256)
        x = matrix(x, rows, cols, ld, self._element())
        for at, found in ((largest, ozaki.depth_largest(x)), (tops, ozaki.line_largest(x))):
            there = vector(at, len(found), "u4")
            there[...] = np.maximum(there, found)
        matrix(squares, 1, grid[0] // -(-rows // 128) * rows, 1, "f8")[...] = np.nan  # memory of its own

    def equilibrate(self, grid, k, a, b, depth, state):
        found = ozaki.equilibrate(vector(a, k, "u4"), vector(b, k, "u4"))
        vector(depth, k, "i4")[...], vector(state, 1, STATE)["shifted"] = found

    def lines(self, grid, rows, cols, x, ld, depth, sign, tops, squares, lines, magnitudes, pitch, state):
        x, state = matrix(x, rows, cols, ld, self._element()), vector(state, 1, STATE)
        assert bool(tops) == bool(depth) == bool(squares)
        assert not tops or np.array_equal(vector(tops, rows, "u4"), ozaki.line_largest(x))
        if not np.isfinite(x).all():
            state["fallback"] = 1
            self.decided.append(0)
            return
        shifted = depth and state["shifted"][0]
        found = ozaki.Lines(x, vector(depth, cols, "i4") if shifted else None, sign)
        width = found.magnitudes.shape[1]
        matrix(magnitudes, rows, width, pitch, "i1")[...] = found.magnitudes
        there = vector(lines, rows, LINE)
        there["squares"], there["exponent"] = found.squares, found.exponents

    def decide(self, grid, m, n, k, a, a_scales, b, b_scales, tolerance, state):
        state = vector(state, 1, STATE)
        if state["fallback"]:
            return
        sides = []
        for at, count in ((a, m), (b, n)):
            lines = object.__new__(ozaki.Lines)
            there = vector(at, count, LINE)
            lines.squares, lines.exponents = there["squares"].copy(), there["exponent"].copy()
            sides.append(lines)
        count = ozaki.decide(*sides, k, int(state["least"][0]), tolerance)
        state["moduli"], state["fallback"] = count, not count
        self.decided.append(count)
        for lines, at in zip(sides, (a_scales, b_scales), strict=True):
            if count:
                vector(at, len(lines.squares), "i4")[...] = lines.scales(count)

    def residues(self, grid, rows, cols, x, ld, depth, sign, scales, planes, pitch, plane, state):
        value, count = self.config.value, self.config.value("COUNT")
        assert grid[0] == rows * -(-cols // (1024 if value("PARTS") == 2 else 2048))
        assert ld * np.dtype(self.config.dtype).itemsize % 16 == 0
        x = matrix(x, rows, cols, ld, self.config.dtype)
        x = x.conj() if value("CONJUGATE") else x
        if value("FLOATING"):
            state = vector(state, 1, STATE)[0]
            if state["fallback"]:
                return
            count = int(state["moduli"])
            lines = object.__new__(ozaki.Lines)
            d = vector(depth, cols, "i4") if state["shifted"] else np.zeros(cols, int)
            lines.kept = d != ozaki.DROPPED
            lines.shift = np.where(lines.kept, sign * d, 0)
            whole = ozaki.integers(x, vector(scales, rows, "i4"), lines)
        else:
            whole = x.astype("i8")[None]
        found = ozaki.planes(whole, count)
        for number, one in enumerate(found.reshape(-1, rows, cols)):
            matrix(planes + 4 * number * plane, rows, cols, 4 * pitch, "i1")[...] = one

    def products_of_residues(self, a, b, m, n, k, c, ldc, plane, lines, count, moduli):
        """`wgmma` with EPILOGUE = 1. `a`, `b`: addresses and bytes from row to row."""
        per, moduli = self.config.value("PER_MODULUS"), vector(count, 1, "u4")[0] if count else moduli
        for number in range(per * int(moduli)):
            x, y = (
                matrix(at + number * apart * pitch, rows, k, pitch, "i1")
                for (at, pitch), apart, rows in zip((a, b), lines, (m, n), strict=True)
            )
            sums = ozaki.exact(x, y)
            assert np.abs(sums).max(initial=0) <= 2**30
            matrix(c + number * plane, m, n, ldc, "i1")[...] = ozaki.residue(sums, MODULI[number // per])

    def recombine(
        self, grid, m, n, alpha, alpha_im, planes, pitch, plane, beta, beta_im, c, ldc, rows, cols, state
    ):  # fmt: skip
        parts, dtype = self.config.value("PARTS"), self.config.dtype
        assert grid[0] == m * -(-n // 1024)
        per, count = 3 if parts == 2 else 1, int(dict(self.config.macros)["TABLES"][1:].split(",")[0])
        if self.config.value("FLOATING"):
            state = vector(state, 1, STATE)[0]
            if state["fallback"]:
                return
            count = int(state["moduli"])
        sums = np.array(
            [
                [matrix(planes + 4 * (j * per + i) * plane, m, n, 4 * pitch, "i1") for i in range(per)]
                for j in range(count)
            ]
        )
        c = matrix(c, m, n, ldc, dtype)
        if self.config.value("FLOATING"):
            found = ozaki.recombine(sums, vector(rows, m, "i4"), vector(cols, n, "i4"))
        else:
            found = ozaki.found(sums)[0].astype("i8")
        if parts == 2:
            alpha, beta = complex(alpha, alpha_im), complex(beta, beta_im)
        c[...] = alpha * found + (beta * c if beta else 0)

    def embed(self, grid, rows, cols, x, ldx, y, ldy, run):
        """`double k` alone."""
        assert (self.config.value("MODE"), self.config.dtype) == (3, "complex128")
        if not vector(run, 1, "u4")[0]:
            return
        x = matrix(x, rows, cols, ldx, "c16")
        x = x.conj() if self.config.value("CONJUGATE") else x
        sign = -1 if self.config.value("CONJUGATE_OTHER") else 1
        y = matrix(y, 2 * rows, 2 * cols, ldy, "f8")
        y[::2, ::2], y[::2, 1::2], y[1::2, ::2], y[1::2, 1::2] = x.real, -sign * x.imag, x.imag, sign * x.real

    def combine(self, grid, m, n, alpha_re, alpha_im, p, ldp, beta_re, beta_im, c, ldc, run):
        """`elements` alone."""
        assert (self.config.value("LAYOUT"), self.config.dtype) == (2, "complex128")
        if vector(run, 1, "u4")[0]:
            z, c, beta = (
                matrix(p, m, n, ldp // 2, "c16"),
                matrix(c, m, n, ldc, "c16"),
                complex(beta_re, beta_im),
            )
            c[...] = complex(alpha_re, alpha_im) * z + (beta * c if beta else 0)
