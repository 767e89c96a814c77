"""Compiles kernels with NVRTC, and keeps the machine code in the cache folder. No GPU is needed.

Config ──► source, headers, options ──► NVRTC, or the cache ──► cubin
"""

import contextlib
import hashlib
import json
import re
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ..support import cache
from ..support.errors import DeviceError
from .config import Config

_INCLUDE = re.compile(r'^#include "(common/\w+\.cuh)"$', re.MULTILINE)
_WHEELS = "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"
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
    if check_spills:
        return compile_uncached(config, arch, "--ptxas-options=--warn-on-spills", "--ptxas-options=-Werror")
    cubin = cached_kernel(config, arch)
    if cubin is None:
        cubin = compile_uncached(config, arch)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs a second at the next start
            cache.write(_cache_name(config, arch), cubin)
    return cubin


def cached_kernel(config: Config, arch: str) -> bytes | None:
    """Return the machine code of a kernel from the cache; None if it has to be compiled. Raises DeviceError
    if the compiler is missing."""
    cubin = cache.read(_cache_name(config, arch))
    # A machine that went down at the wrong moment leaves an empty file under the final name.
    return cubin if cubin is not None and cubin.startswith(b"\x7fELF") else None


def compile_uncached(config: Config, arch: str, *more: str) -> bytes:
    """Compile a kernel for `arch`, whatever the cache holds. `more`: options for the compiler. Raises
    DeviceError as `compile_kernel` does."""
    source, included, options = source_of(config, arch)
    return _compile(source, included, config.kernel, [*options, *more])


def source_of(config: Config, arch: str) -> tuple[str, dict[str, str], list[str]]:
    """Return what a kernel is compiled from: its text, its headers, and the options of the compiler."""
    source = kernel_source(config.kernel)
    return source, headers(source), [f"-arch={arch}", "-std=c++17", *config.defines]


def _cache_name(config: Config, arch: str) -> str:
    """Return the name of the file in the cache that holds the machine code of a kernel."""
    key = json.dumps([*source_of(config, arch), _version()])
    return f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"


def arch_of(compute_capability: str) -> str:
    """Return the architecture to compile for, for a compute capability such as "90". The suffix `a` allows
    instructions that only this architecture has."""
    return f"sm_{compute_capability}" + ("a" if compute_capability == "90" else "")


@lru_cache
def _version() -> str:
    """Return the versions of the wheels that bring NVRTC or, if there are none, of the library, which takes
    0.1 s to open. Raises DeviceError if it or its bindings are missing."""
    found = [f"{name} {version}" for name in _WHEELS if (version := _installed(name))]
    if found:
        return ", ".join(found)
    _, (_, major, minor) = _nvrtc()
    return f"{major}.{minor}"


def _installed(name: str) -> str:
    """Return the version of an installed distribution; empty if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _nvrtc() -> tuple[Any, Any]:
    """Return the bindings of NVRTC, and what it says of its version. Raises DeviceError if it or its bindings
    are missing."""
    try:
        from cuda.bindings import nvrtc

        return nvrtc, nvrtc.nvrtcVersion()  # the library itself is only opened by the first call
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"NVRTC, the CUDA run-time compiler, was not found ({error}); {_INSTALL}."
        ) from error


def _compile(source: str, included: dict[str, str], name: str, options: list[str]) -> bytes:
    """Compile the text of a kernel with these headers. Returns the cubin."""
    nvrtc, _ = _nvrtc()
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
