"""The hardware that the engine runs on."""

import contextlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..support.errors import InputError

if TYPE_CHECKING:  # `begin` is called before anything else is imported
    from ..engine.ports import Device


GPU_HOST_BYTES = 704 << 20
"""What the resident set of a process with a CUDA context, CuPy and cuBLAS counts as (measured 480 to 560
MiB)."""


def within(name: object, memory_limit: int) -> str:
    """Return the name of the device for this limit of host memory, in bytes: `cpu` for `auto` where what a
    GPU's libraries take is more, else what is given, which `open_device` refuses if it is no name. Raises
    InputError for an array."""
    if getattr(name, "shape", ()):
        raise InputError("device is an array; give a name, such as cpu")
    return "cpu" if str(name) == "auto" and memory_limit < GPU_HOST_BYTES else str(name)


def begin(name: str, memory_limit: str | None = None) -> None:
    """Begin to make ready the GPU that `open_device` of this name would return, in the background.
    memory_limit: as it is given on the command line. Errors are left to others."""
    from ..support.memory import memory_limit_of

    with contextlib.suppress(InputError):
        name = within(name, memory_limit_of(memory_limit))
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cuda") or find_spec("cupy") is None:
        return
    from ..cuda_kernels import driver

    first = number.split(",")[0]
    driver.begin(int(first) if first.isdigit() else 0)


def open_device(name: str) -> "Device":
    """The device of a name: `auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:N`, `cuda:N,M,…` or
    `cuda:all`.

    Raises InputError where there is no such device.
    """
    if name == "cpu":
        from .cpu.device import CPU

        return CPU()
    kind, _, number = name.partition(":")
    if kind == "cuda":
        from .cuda.device import CUDA
        from .cuda.gpus import count

        wanted = [str(index) for index in range(count())] if number == "all" else (number or "0").split(",")
        if not all(part.isdigit() for part in wanted) or len(set(wanted)) < len(wanted):
            raise InputError(f"device {name!r} names no GPUs; write cuda, cuda:1, cuda:0,1 or cuda:all")
        found = [CUDA(int(index)) for index in wanted]
        if len(found) == 1:
            return found[0]
        from .several import Several

        return Several(list(found), [device.speed for device in found])
    if name == "auto":
        if find_spec("cupy") is not None:
            try:
                return open_device("cuda")
            except InputError:
                pass
        return open_device("cpu")
    raise InputError(f"{name!r} is not a device; choose auto, cpu, cuda, cuda:0,1 or cuda:all")
