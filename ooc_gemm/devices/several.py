"""Several devices as one: a block of C is cut into bands of rows, one for each (`several_session.py`). The
height of a band is in proportion to the speed of its device."""

from dataclasses import replace
from typing import Any

import numpy as np

from ..engine.ports import (
    Arithmetic,
    Failure,
    HostMemory,
    Limits,
    Member,
    Operation,
)
from ..planning.machine import Rates
from ..planning.plan import Plan
from ..planning.problem import MiB
from ..support.errors import DeviceError, InputError
from ..support.trace import Trace
from .several_session import SeveralSession

UPLOADS_AT_ONCE = 3
"""Number of devices whose copies host memory can feed at full speed. More devices share this rate: four H200,
each of which copies 55 GB/s alone, reach 161 GB/s together."""

MOST_READERS, MOST_WRITERS = 32, 16
"""Most threads that read, and that write, for all devices together. With more of them runs are slower,
because each has a slot that must be pinned for all devices."""

MORE_HOST_BYTES = 256 * MiB
"""Host memory, in bytes, that each device after the first takes for its CUDA context."""


class Several:
    """Two or more devices that work as one. All of them use the same arithmetic."""

    reduces = False
    scorer = None

    def __init__(self, devices: list[Member], weights: list[int] | None = None):
        """`weights`: the relative speed of each device; by default all are equal."""
        self.devices, self._weights = devices, tuple(weights or [1] * len(devices))
        kind = devices[0].name.partition(":")[0]
        self._indices = [int(device.name.partition(":")[2] or 0) for device in devices]
        self.name = f"{kind}:{','.join(map(str, self._indices))}"
        models = list(dict.fromkeys(device.model for device in devices))
        self.model = " and ".join(models)
        """Rates are remembered under the model of one device."""
        self._linked = all(one.reaches(other) for one in devices for other in devices if one is not other)

    @property
    def standardizes(self) -> bool:
        """Whether all devices do: each standardizes its own panel of op(B)."""
        return all(device.standardizes for device in self.devices)

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
        """Returns what the first device chooses that all can do. Raises InputError if there is nothing."""
        refused: InputError | None = None
        for device in self.devices:
            found = device.arithmetic(a, b, out, shape, bound, kernel, precision)
            try:
                same = [
                    other.arithmetic(a, b, out, shape, bound, found.kernel, precision)
                    for other in self.devices
                ]
            except InputError as error:
                refused = error
                continue
            if all(replace(other, why=found.why, other=found.other) == found for other in same):
                return found
        raise refused or InputError(
            f"{self.name} have no kernel in common for these types; name one with kernel='NAME'"
        )

    def limits(self, arithmetic: Arithmetic, device_memory_limit: int | None) -> Limits:
        """Each device may use as much memory as the device with the least."""
        each = [device.limits(arithmetic, device_memory_limit) for device in self.devices]
        least = [limits.device for limits in each if limits.device is not None]
        return replace(
            each[0],
            host_baseline=each[0].host_baseline + MORE_HOST_BYTES * (len(each) - 1),
            device=min(least, default=None),
            device_baseline=max(limits.device_baseline for limits in each),
            readers=min(MOST_READERS, sum(limits.readers for limits in each)),
            writers=min(MOST_WRITERS, sum(limits.writers for limits in each)),
            weights=self._weights,
            linked=self._linked and arithmetic.block != np.int64,  # each looks at all of these: `Overflow`
            transforms=all(limits.transforms for limits in each),
            decodes=0,
            most_kept=0,  # parts of C are downloaded from several of them
        )

    def rates(self, arithmetic: Arithmetic) -> Rates:
        """Sums the rates of the devices. Copies add up only as far as host memory can feed them."""
        each = [device.rates(arithmetic) for device in self.devices]
        copies = min(len(each), UPLOADS_AT_ONCE)
        return replace(
            each[0],
            flops=sum(rates.flops for rates in each),
            upload=copies * each[0].upload,
            download=copies * each[0].download,
            devices=len(each),
            at_once=copies,
        )

    def most_flops(self, kernel: str, panel: str) -> float:
        """Sums the limits of the devices."""
        return sum(device.most_flops(kernel, panel) for device in self.devices)

    def open(self, plan: Plan, operation: Operation, trace: Trace) -> "SeveralSession":
        """Opens a session on each device, all at once."""
        return SeveralSession(self.devices, self._weights, plan, operation, trace)

    def host_memory(self) -> HostMemory:
        """Delegates to the first device: memory that is pinned for one device is pinned for all."""
        return self.devices[0].host_memory()

    def explain(self, error: Exception) -> Failure | None:
        """Returns a Failure with the other devices if one no longer answers, else that of a device."""
        alive, indices = [device.alive() for device in self.devices], tuple(self._indices)
        found = [found for device in self.devices if (found := device.explain(error))]
        continued = f"failed ({error}); continue with resume=True"
        if not any(alive):
            return Failure(DeviceError(f"one of {self.name} {continued}"), devices=indices)
        if not all(alive):
            each = list(zip(self.devices, self._weights, alive, strict=True))
            left = [device for device, _, lives in each if lives]
            weights = [weight for _, weight, lives in each if lives]
            dead = " and ".join(device.name for device, _, lives in each if not lives)
            rest = left[0] if len(left) == 1 else Several(left, weights)
            return Failure(DeviceError(f"{dead} {continued}"), left=rest, devices=indices)
        full = [one for one in found if one.limit is not None]
        return min(full, key=lambda one: one.limit or 0) if full else next(iter(found), None)
