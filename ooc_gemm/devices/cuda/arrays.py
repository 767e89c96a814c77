"""Arrays in the memory of a GPU."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...cuda_kernels import driver
from ...support.intervals import round_up
from .gpu import GPU

ALIGN = 512
"""Arrays begin at multiples of this many bytes."""


def allocate(
    device: GPU, wanted: dict[Any, tuple[int, np.dtype[Any]]], reached_by: Iterable[int] = ()
) -> dict[Any, Any]:
    """Allocate arrays, given by their elements and type, in one piece. It is allocated without CuPy's memory
    pool, which keeps more than it is asked for. `reached_by`: other devices that may reach into it."""
    cuda = device.cupy.cuda
    sizes = [round_up(max(1, n * dtype.itemsize), ALIGN) for n, dtype in wanted.values()]
    if reached_by:
        owner = driver.Memory(sum(sizes), device.index, reached_by)
        memory = cuda.UnownedMemory(owner.ptr, sum(sizes), owner, device.index)
    else:
        memory = cuda.Memory(sum(sizes))
    starts = itertools.accumulate(sizes, initial=0)
    return {
        key: device.cupy.ndarray((elements,), dtype, cuda.MemoryPointer(memory, at))
        for (key, (elements, dtype)), at in zip(wanted.items(), starts, strict=False)
    }
