"""Arrays in the memory of a GPU."""

import itertools
from typing import Any

import numpy as np

from ...cuda_kernels import driver
from ...engine.ports import Array
from ...support.intervals import round_up
from .gpu import GPU

ALIGN = 512
"""Arrays begin at multiples of this many bytes."""


def allocate(device: GPU, wanted: dict[Any, tuple[int, np.dtype[Any]]]) -> dict[Any, Any]:
    """Allocate arrays, given by their elements and type, in one piece. It is allocated without CuPy's memory
    pool, which keeps more than it is asked for."""
    return _cut(device, wanted, device.cupy.cuda.Memory(sum(_sizes(wanted))))


def allocate_shared(
    device: GPU, wanted: dict[Any, tuple[int, np.dtype[Any]]]
) -> tuple[dict[Any, Any], driver.Memory]:
    """Allocate arrays in memory that can be shared with other devices. Returns them and the memory."""
    nbytes = sum(_sizes(wanted))
    owner = driver.Memory(nbytes, device.index)
    memory = device.cupy.cuda.UnownedMemory(owner.ptr, nbytes, owner, device.index)
    return _cut(device, wanted, memory), owner


def _sizes(wanted: dict[Any, tuple[int, np.dtype[Any]]]) -> list[int]:
    return [round_up(max(1, n * dtype.itemsize), ALIGN) for n, dtype in wanted.values()]


def _cut(device: GPU, wanted: dict[Any, tuple[int, np.dtype[Any]]], memory: Any) -> dict[Any, Any]:
    """Cut a piece of memory into arrays."""
    starts = itertools.accumulate(_sizes(wanted), initial=0)
    return {
        key: device.cupy.ndarray((elements,), dtype, device.cupy.cuda.MemoryPointer(memory, at))
        for (key, (elements, dtype)), at in zip(wanted.items(), starts, strict=False)
    }


def copy_2d(
    to: tuple[int, int], target: int, target_pitch: int, source: int, source_pitch: int, like: Array,
    stream: Any,
) -> None:  # fmt: skip
    """Start a 2-D copy of as many rows and bytes as `like` has. `to`: kinds of memory of the target and the
    source, as the driver numbers them. Pitches are the bytes from row to row."""
    rows, width = like.shape[0], like.shape[1] * like.itemsize
    if rows and width:
        target_pitch, source_pitch = max(target_pitch, width), max(source_pitch, width)
        driver.copy(to, target, target_pitch, source, source_pitch, width, rows, stream.ptr)
