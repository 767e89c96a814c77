"""Compiles kernels with NVRTC, and keeps the machine code in the cache folder. No GPU is needed.

Config ──► source, headers, options ──► NVRTC, or the cache ──► cubin
"""

import contextlib
import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..support import cache
from ..support.errors import DeviceError
from .config import Config

_INCLUDE = re.compile(r'^#include "(common/\w+\.cuh)"$', re.MULTILINE)
_INSTALL = "install it with pip install 'ooc-gemm[cuda13]' (for a CUDA 12 driver: 'ooc-gemm[cuda12]')"


def kernel_source(name: str) -> str:
    """Return the text of the kernel `name`, which lies in one of the folders in kernels/. Raises DeviceError
    if it is missing."""
    found = next(_kernels().glob(f"*/{name}.cu"), None)
    if found is None:
        raise DeviceError(
            f"The kernel source {name}.cu is missing from this installation; reinstall ooc-gemm."
        )
    return found.read_text(encoding="utf-8")


def headers(source: str) -> dict[str, str]:
    """Return the headers that the text of a kernel includes: their names, as it includes them, and their
    texts."""
    return {name: (_kernels() / name).read_text(encoding="utf-8") for name in _INCLUDE.findall(source)}


def _kernels() -> Path:
    """Return the folder kernels/, which lies in the package if it is installed, and beside it in a
    checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def compile_kernel(config: Config, arch: str, check_spills: bool = False) -> bytes:
    """Return the machine code (a cubin) of a kernel for `arch`, such as "sm_90a", from the cache if it is
    there.

    `check_spills`: compile without the cache, and fail if registers spill to memory. Raises DeviceError if
    the compiler is missing or reports errors; the message contains its log.
    """
    version = _version()
    source = kernel_source(config.kernel)
    included = headers(source)
    options = [f"-arch={arch}", "-std=c++17", "-lineinfo", *config.defines]
    if check_spills:
        options += ["--ptxas-options=--warn-on-spills", "--ptxas-options=-Werror"]
        return _compile(source, included, config.kernel, options)
    key = hashlib.sha256(json.dumps([source, included, options, version]).encode()).hexdigest()
    name = f"{key}.cubin"
    cubin = cache.read(name)
    # A machine that went down at the wrong moment leaves an empty file under the final name.
    if cubin is None or not cubin.startswith(b"\x7fELF"):
        cubin = _compile(source, included, config.kernel, options)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs a second at the next start
            cache.write(name, cubin)
    return cubin


def arch_of(compute_capability: str) -> str:
    """Return the architecture to compile for, for a compute capability such as "90". The suffix `a` allows
    instructions that only this architecture has."""
    return f"sm_{compute_capability}" + ("a" if compute_capability == "90" else "")


@lru_cache
def _version() -> tuple[int, int]:
    """Return the version (major, minor) of the NVRTC library. Raises DeviceError if it or its bindings are
    missing."""
    try:
        from cuda.bindings import nvrtc

        # The library itself is only opened by the first call.
        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"NVRTC, the CUDA run-time compiler, was not found ({error}); {_INSTALL}."
        ) from error
    return major, minor


def _compile(source: str, included: dict[str, str], name: str, options: list[str]) -> bytes:
    """Compile the text of a kernel with these headers. Returns the cubin."""
    from cuda.bindings import nvrtc

    success = nvrtc.nvrtcResult.NVRTC_SUCCESS

    def check(result: Any, *values: Any) -> Any:
        if result != success:
            message = nvrtc.nvrtcGetErrorString(result)[1].decode()
            raise DeviceError(f"NVRTC failed on the kernel {name}: {message}.")
        return values[0] if values else None

    texts, names = ([part.encode() for part in parts] for parts in (included.values(), included))
    program = check(
        *nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), len(included), texts, names)
    )
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if result != success:
            log = bytearray(check(*nvrtc.nvrtcGetProgramLogSize(program)))
            check(*nvrtc.nvrtcGetProgramLog(program, log))
            said = log.decode(errors="replace").rstrip("\0\n")
            raise DeviceError(f"The kernel {name} does not compile with {' '.join(options)}:\n{said}")
        cubin = bytearray(check(*nvrtc.nvrtcGetCUBINSize(program)))
        check(*nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
