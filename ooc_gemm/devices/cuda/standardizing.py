"""Standardizes panels on a GPU before they are multiplied (kernels/prepare/standardize.cu, compute stream).

panel ──standardize──► panel, and a panel M of bytes: 1 where an element is missing
                                M ──transposed where k is not along its rows──► counts += M·Mᵀ, in int32
"""

import math
from typing import Any

import numpy as np

from ...cuda_kernels import preparations
from ...cuda_kernels.launch import load
from ...cuda_kernels.product import Operand, Product, Strips
from ...cuda_kernels.transposition import Transposition
from ...cuda_kernels.wgmma import open_tensor_gemm
from ...engine.ports import Array, Operation
from ...engine.standardize import Standardizer
from ...planning.plan import Plan
from ...support.intervals import round_up
from .gpu import GPU
from .panels import Layout

PITCH = 16
"""Rows of panels of bytes begin at multiples of this many."""
_TO_HOST = 2
"""cudaMemcpyKind."""
_NONE, _NUMBER, _NAN = 0, 1, 2
"""What is missing, as standardize.cu numbers it."""


class Standardizing:
    """What standardizes the panels of one run, with what it finds, on the device."""

    def __init__(self, plan: Plan, operation: Operation, layout: Layout, device: GPU, allocate: Any):
        """`allocate`: {name: (elements, dtype)} → device arrays. Panels are those of op(A), or of op(B) where
        op(A) has bands."""
        assert operation.standardizer, "there is something to do"
        self._standardizer: Standardizer = operation.standardizer
        self._rule, self._runtime = self._standardizer.rule, device.runtime
        operand = "b" if len(plan.budget.weights) > 1 else "a"
        self._panel, self._along_k = operation.arithmetic.panel, layout.along_k(operand)
        m, k, bk = plan.problem.m, plan.problem.k, plan.bk
        self._m, self._bytes = m, round_up(bk if self._along_k else m, PITCH)
        self._config = preparations.standardize(self._panel.name, self._along_k)
        self._kernel = load(self._config)[self._config.kernel]
        int8, int32 = np.dtype(np.int8), np.dtype(np.int32)
        wanted: dict[str, tuple[int, np.dtype[Any]]] = {
            "shares": (k, np.dtype(np.float64)),
            "lacking": (1, np.dtype(np.uint64)),
        }
        if self._rule.paired:
            wanted["marks"] = self._bytes * (m if self._along_k else bk), int8
            wanted["counts"] = m * m, int32
            if not self._along_k:
                wanted["turned"] = m * round_up(bk, PITCH), int8
                self._turn = Transposition("int8")
            self._mirror = Transposition("int32")
            name = "int8" if device.capability == 90 else "mma-int8"
            self._count = open_tensor_gemm(name, False, True, "int8", "int8")
            self._count.reserve(m, m, bk)
        self._memory = allocate(wanted)

    def standardize(self, a: Operand, panel: tuple[int, int], stream: Any) -> None:
        """Start to standardize the panel that lies at `a`. `panel`: its first place along k, and the
        one after its last."""
        start, k = panel[0], panel[1] - panel[0]
        if start == 0:
            self._standardizer.begin()
            with stream:
                self._memory["lacking"].fill(0)
        marks = self._memory["marks"].data.ptr if self._rule.paired else 0
        places = 32 if self._along_k else 1
        i32, i64, u = np.int32, np.int64, np.uintp
        gone, missing = self._gone()
        args = (
            i32(k), i32(self._m), u(a.ptr), i64(a.ld), i32(gone), missing, np.float64(self._rule.least),
            i32(self._rule.scaled), u(self._memory["shares"].data.ptr + 8 * start), u(marks),
            i64(self._bytes), u(self._memory["lacking"].data.ptr),
        )  # fmt: skip
        self._kernel((math.ceil(k / places),), self._config.block, args, stream)
        if self._rule.paired:
            self._add_pairs(Operand(marks, self._bytes), k, start == 0, stream)

    def _gone(self) -> tuple[int, Any]:
        """Return which elements are missing, as the kernel numbers it, and the number that they equal."""
        missing = self._rule.missing
        if missing is None:
            return _NONE, self._panel.type(0)
        return (_NAN, self._panel.type(0)) if math.isnan(missing) else (_NUMBER, self._panel.type(missing))

    def _add_pairs(self, marks: Operand, k: int, first: bool, stream: Any) -> None:
        """Start to count at how many places of a panel two rows both lack their element."""
        if not self._along_k:
            turned = Operand(self._memory["turned"].data.ptr, round_up(k, PITCH))
            self._turn(k, self._m, marks, turned, stream)
            marks = turned
        counts = Operand(self._memory["counts"].data.ptr, self._m)
        product = Product(self._m, self._m, k, 1.0, marks, marks, 0.0 if first else 1.0, counts)
        self._count(product, stream, strips=Strips(lower=True))

    def deliver(self, stream: Any) -> None:
        """Wait for the stream, and hand over what was found in all panels, if that is kept."""
        if not self._standardizer.keeps:
            return
        counts = None
        if self._rule.paired:
            self._mirror.mirror(self._m, Operand(self._memory["counts"].data.ptr, self._m), stream)
            counts = self._fetched("counts", stream).reshape(self._m, self._m)
        shares, lacking = self._fetched("shares", stream), self._fetched("lacking", stream)
        self._standardizer.take(shares, int(lacking[0]), counts)

    def _fetched(self, name: str, stream: Any) -> Array:
        """Return a copy of an array in host memory, after all that is in the stream."""
        memory = self._memory[name]
        found = np.empty(memory.shape, memory.dtype)
        self._runtime.memcpyAsync(found.ctypes.data, memory.data.ptr, found.nbytes, _TO_HOST, stream.ptr)
        stream.synchronize()
        return found
