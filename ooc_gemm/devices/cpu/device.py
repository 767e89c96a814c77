"""The CPU as a device: panels and C blocks lie in host memory, and BLAS multiplies tiles of the block."""

import math
import os
import platform
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from ...engine.ports import Arithmetic, Device, Limits, Operation
from ...planning.machine import Rates
from ...planning.plan import Plan
from ...planning.problem import MiB
from ...support.errors import InputError
from ...support.trace import Trace
from . import eight_bit, integers, matmul_integer
from .blas import by_parts_bytes, gemm
from .check import TILE_ELEMENTS
from .session import CPUSession, HostMemory

INTERPRETER_BYTES = 80 * MiB
"""Memory of Python with everything that this package imports, and room for what the heap does not give
back."""
WORKER_BYTES = 12 * MiB
"""Memory for each worker, into which BLAS packs operands. For the tiles of blocks that are cut along k it
takes 1.5 MiB of this, and the sums of these blocks (`workers.beside`) at most 4 MiB."""

START = 0.04
"""Seconds for opening, planning and finishing (two cores: 2048³ uint8 takes .09 s in a warm process, and all
stages together .05; 2026-11-28)."""

CLOCK_HERTZ = 8e9
BYTES_PER_CLOCK = 512
"""The most bytes of results that a core computes in a clock cycle. Two vector units of 64 bytes that multiply
and add compute 256; matrix units, such as Apple's, compute more."""


class CPU:
    """NumPy's BLAS on this machine's cores."""

    name = "cpu"
    reduces = standardizes = True
    scorer = None

    def __init__(self, threads: int | None = None):
        """`threads`: number of workers that multiply; by default one for each core that this process may
        use."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.threads = threads or cores or 1
        self.model = f"{processor()}, {self.threads} threads"

    def arithmetic(
        self,
        a: np.dtype[Any],
        b: np.dtype[Any],
        out: np.dtype[Any],
        shape: tuple[int, int, int],
        bound: int,
        kernel: str,
        precision: str,
    ) -> Arithmetic:
        """BLAS multiplies floating-point numbers (float16 in float32). It also multiplies integers: those of
        8 bits in float32, others in float64, those of more than 16 bits in slices (`integers`). Large
        products of 8 bits are multiplied as they are where that is possible (`eight_bit`)."""
        names = list[str]()
        if out.kind in "fc":
            panel = np.result_type(a, b, out, np.float32)
            found = Arithmetic(gemm(panel.char)[0], panel, panel, why="NumPy's BLAS")
        else:
            found = _integer_arithmetic(a, b, bound)
            if a.itemsize == b.itemsize == 1:
                names.append(eight_bit.KERNEL)
                found = _as_they_are(found, a, b, shape, kernel)
        if kernel not in ("auto", found.kernel):
            use = ", ".join(map(repr, [found.kernel, *names]))
            raise InputError(f"kernel {kernel!r} cannot multiply {a} by {b} on the CPU; use {use} or 'auto'")
        return found

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """The workspace holds the packing buffers of BLAS and, for each worker, the temporary tile of exact
        integers or the parts of complex numbers."""
        scratch, host = integers.scratch_bytes(arithmetic), INTERPRETER_BYTES
        if arithmetic.block.kind == "c":
            scratch = by_parts_bytes(arithmetic.block)
        if arithmetic.kernel == eight_bit.KERNEL:
            scratch, host = eight_bit.scratch_bytes(arithmetic), host + matmul_integer.HOST_BYTES
        return Limits(
            host_baseline=host,
            device=None,
            device_baseline=0,
            workspace=self.threads * (WORKER_BYTES + scratch),
            readers=min(8, max(4, self.threads)),
            writers=min(8, max(2, self.threads // 2)),
            check=self.threads * TILE_ELEMENTS * arithmetic.check_type.itemsize,
            transforms=True,
            lanes=0 if arithmetic.exact else self.threads,
        )

    def rates(self, arithmetic: Arithmetic) -> Rates:
        """Rates of one core with 256-bit vectors times the number of cores, which all stages share."""
        each = 60e9 if arithmetic.panel.char in "fF" else 30e9
        if arithmetic.panel.kind == "c":
            each /= 4  # real operations for one complex multiplication and addition, counted as two
        if arithmetic.kernel == "slices":
            each /= 2
        if arithmetic.kernel == eight_bit.KERNEL:
            each = 180e9
        copies = 4e9 * self.threads
        return Rates(each * self.threads, copies, copies / 4, copies, copies, shared=True, start=START)

    def most_flops(self, kernel: str, panel: str) -> float:
        """Twice the rate of two vector units of 512 bits, at a clock rate that no processor reaches."""
        dtype = np.dtype(panel)
        parts = 2 if dtype.kind == "c" else 1
        return self.threads * CLOCK_HERTZ * BYTES_PER_CLOCK / (dtype.itemsize / parts) / parts**2

    def open(self, plan: Plan, operation: Operation, trace: Trace) -> "CPUSession":
        """Allocates panels and blocks, and limits BLAS to one thread in this process until the session is
        closed."""
        return CPUSession(self, plan, operation, trace)

    def host_memory(self) -> "HostMemory":
        """Returns plain memory."""
        return HostMemory()

    def reaches(self, other: Device) -> bool:
        """Whether the other device is a CPU device, too."""
        return isinstance(other, CPU)

    def alive(self) -> bool:
        """Returns true: the CPU cannot be lost."""
        return True

    def explain(self, error: Exception) -> None:
        """Returns None: BLAS raises no errors of its own."""


def _integer_arithmetic(a: np.dtype[Any], b: np.dtype[Any], bound: int) -> Arithmetic:
    """Choose how integers of these types are multiplied. `bound`: no sum exceeds it."""
    bits, block = 8 * max(a.itemsize, b.itemsize), np.int32 if bound < 2**31 else np.int64
    exact = partial(Arithmetic, largest=(largest(a), largest(b)), exact=True)
    if bits == 8:
        found = exact("blas", np.dtype(np.float32), np.dtype(block), why="exact partial sums in float32")
    elif bits == 16:
        found = exact("blas", np.dtype(np.float64), np.dtype(block), why="exact partial sums in float64")
    else:
        panel, why = np.float64 if bits == 32 else np.int64, "exact partial sums of slices in float64"
        found = exact("slices", np.dtype(panel), np.dtype(np.int64), why=why)
    return found


def _as_they_are(
    found: Arithmetic, a: np.dtype[Any], b: np.dtype[Any], shape: tuple[int, int, int], kernel: str
) -> Arithmetic:
    """Return how 8-bit integers are multiplied without a conversion, if that is asked for or faster; else
    `found`, which is also what smaller memory holds. Raises InputError where it is asked for and not
    possible."""
    automatic = kernel == "auto" and 2.0 * math.prod(shape) >= eight_bit.LEAST_OPERATIONS
    if kernel == eight_bit.KERNEL and not matmul_integer.exact():
        why = "on this processor onnxruntime does not multiply bytes exactly"
        if not matmul_integer.installed():
            why = "there is no onnxruntime; install it with pip install 'ooc-gemm[int8]'"
        raise InputError(f"kernel 'int8' cannot be used on the CPU: {why}; or use 'auto'")
    if automatic and not matmul_integer.installed():
        return replace(found, why=f"{found.why}; pip install 'ooc-gemm[int8]' may be faster")
    if not (kernel == eight_bit.KERNEL or (automatic and matmul_integer.exact())):
        return found
    return replace(
        found, kernel=eight_bit.KERNEL, panel=a, panel_b=b if b != a else None, why="bytes, by onnxruntime",
        other=found if automatic else None, checked_in=np.dtype(np.int64),
    )  # fmt: skip


@cache
def processor() -> str:
    """Return the model name of the CPU. The system takes milliseconds to tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def largest(dtype: np.dtype[Any]) -> int:
    """The largest magnitude an integer type can hold."""
    info = np.iinfo(dtype)
    return max(-int(info.min), int(info.max))
