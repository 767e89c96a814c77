"""One NVIDIA GPU through CuPy."""

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...cuda_kernels import driver
from ...cuda_kernels.catalog import KERNELS
from ...cuda_kernels.roofline import most_flops
from ...engine.ports import (
    Arithmetic,
    Device,
    Failure,
    Limits,
    Operation,
)
from ...engine.reduction import Pairs
from ...planning.machine import Rates
from ...planning.plan import Plan
from ...support.errors import DeviceError, InputError, OutOfMemoryError
from ...support.trace import Trace
from . import choice
from .decoding import UndecodedError
from .gpu import GPU
from .gpus import CLOCK_RATE, CUBLAS_FULL, CUDA_FULL, attribute, memory_bandwidth, properties
from .pinned import HostMemory
from .rates import BANDWIDTH, CONTEXT_BYTES, MODULE_BYTES, limits, rates
from .session import CUDASession, LostPanelError

if TYPE_CHECKING:
    from ...planning.passes import PassPlan
    from .passes import CUDAPasses
    from .scoring import Scorer


class CUDA(GPU):
    """One GPU as a device."""

    reduces = False

    @property
    def standardizes(self) -> bool:
        """Where a kernel of ours counts pairs of missing elements."""
        return KERNELS["mma-int8"].runs_on(self.capability)

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
        """Chooses the kernel asked for, or the fastest known here that keeps the precision. Every integer sum
        is exact."""
        if kernel not in ("auto", "cublas", *KERNELS):
            names = ", ".join(("auto", "cublas", *KERNELS))
            raise InputError(f"{kernel!r} is not a kernel of {self.name}; choose among {names}")
        case = choice.Case(a, b, out, shape, bound, precision, self.capability)
        automatic = kernel == "auto"
        found = choice.fastest(case) if automatic else choice.arithmetic(kernel, case, "asked for")
        if found is None:
            raise InputError(f"kernel {kernel!r} cannot multiply {a} by {b} into {out}; use 'auto'")
        return found

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """Counts the context and cuBLAS. By default 90 % of free memory may be used."""
        return limits(arithmetic, self.free, device_memory_limit, self.multiprocessors)

    def rates(self, arithmetic: Arithmetic) -> Rates:
        """Derives default rates (not measured) from the number of multiprocessors and the clocks."""
        bandwidth = memory_bandwidth(self.runtime, self.index) or BANDWIDTH
        return rates(properties(self.runtime, self.index), arithmetic, bandwidth)

    def most_flops(self, kernel: str, panel: str) -> float:
        """Derives the bound from the architecture, the number of multiprocessors and the highest clock."""
        clock = 1e3 * attribute(self.runtime, CLOCK_RATE, self.index)
        return most_flops(kernel, panel, divmod(self.capability, 10), self.multiprocessors, clock)

    def open(self, plan: Plan, operation: Operation, trace: Trace) -> "CUDASession":
        """Allocates panels and blocks, makes streams, and loads the kernel."""
        return CUDASession(self, plan, operation, trace)

    def pass_limits(self, device_memory_limit: int | None) -> Limits:
        """Counts the context, cuBLAS and our own kernels. By default 90 % of free memory may be used."""
        products = Arithmetic("cublas", np.dtype(np.float32), np.dtype(np.float32))
        found = self.limits(products, device_memory_limit)
        return replace(found, device_baseline=found.device_baseline + MODULE_BYTES)

    def open_passes(self, plan: "PassPlan", stored: np.dtype[Any], panel: np.dtype[Any]) -> "CUDAPasses":
        """Allocates panels and sums, makes streams, and loads kernels."""
        from .passes import CUDAPasses

        return CUDAPasses(self, plan, stored, panel)

    def scorer(self, pairs: Pairs) -> "Scorer":
        """Allocates its memory, which the plan counts (`Problem.kept_bytes`)."""
        from .scoring import Scorer

        return Scorer(self, pairs)

    def host_memory(self) -> "HostMemory":
        """Returns memory that is pinned."""
        return HostMemory(self)

    def reaches(self, other: Device) -> bool:
        """Whether NVLink, or a bus that allows it, connects the devices."""
        if not isinstance(other, CUDA) or not driver.maps_memory(other.index):
            return False
        if not self.runtime.deviceCanAccessPeer(self.index, other.index):
            return False
        other.reached_by.add(self.index)
        return True

    def alive(self) -> bool:
        """An error in a kernel ends the whole context."""
        try:
            self._device.use()
            self.runtime.deviceSynchronize()
        except self.runtime.CUDARuntimeError:
            return False
        return True

    def explain(self, error: Exception) -> Failure | None:
        """Translates CuPy's errors. If memory ran out, another plan may count on half of what is free now."""
        if isinstance(error, UndecodedError):
            return Failure(DeviceError(f"{error}; run again with device='cpu'"), undecoded=True)
        if isinstance(error, LostPanelError):
            return Failure(DeviceError(f"{error}; run again with kernel='cublas'"), prepared=True)
        cuda = self.cupy.cuda
        failures = (
            self.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.cublas.CUBLASError,
            driver.DriverError,
        )  # fmt: skip
        full = isinstance(error, cuda.memory.OutOfMemoryError)
        if not (full or isinstance(error, failures)):
            return None
        if not full:
            code = CUBLAS_FULL if isinstance(error, cuda.cublas.CUBLASError) else CUDA_FULL
            if getattr(error, "status", None) != code:
                return Failure(DeviceError(f"{self.name} failed ({error}); run again, or use another device"))
        limit = None
        with contextlib.suppress(*failures):
            self.cupy.get_default_memory_pool().free_all_blocks()
            self.free = self.free_bytes()
            limit = CONTEXT_BYTES + self.free // 2
        full_error = OutOfMemoryError(
            f"{self.name} does not have the memory that the plan counts on ({error}); "
            "give a smaller device_memory_limit"
        )
        return Failure(full_error, limit)
