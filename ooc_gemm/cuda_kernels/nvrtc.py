"""Our own CUDA kernels: their configurations, compilation, and launch. Nothing here but `load` and
`launch` needs a GPU, and importing this module needs nothing but the standard library.

    Config ──defines──► compile(config, arch) ──cubin──► load ──function──► launch(function, config, …)
       └───────────────────── grid, threads, shared memory ──────────────────────┘
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..support import cache
from ..support.errors import DeviceError
from ..support.intervals import ceil_div
from .driver import Kernel

_STATIC_SHARED = 48 << 10
"""Bytes of shared memory a block gets without asking for more."""
_MAX_DYNAMIC_SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_INCLUDE = re.compile(r'^#include "(common/\w+\.cuh)"$', re.MULTILINE)
_INSTALL = "install it with pip install 'ooc-gemm[cuda13]' (for a CUDA 12 driver: 'ooc-gemm[cuda12]')"


C_TYPE = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long"}
"""NumPy's name of a type → its name in CUDA C++."""


@dataclass(frozen=True)
class Config:
    """Everything that a kernel is compiled and launched with. Made in catalog.py; what must hold between
    the numbers is asserted in the kernel, where it is explained."""

    kernel: str
    """Name of the source file in kernels/*/, without its suffix, and of the function in it."""
    dtype: str
    """NumPy's name for the type of α, β and C."""
    bm: int
    """Rows of C a thread block computes."""
    bn: int
    """Columns of C a thread block computes."""
    block: tuple[int, int]
    """Threads of a block along x and y."""
    macros: tuple[tuple[str, int | str], ...]
    """What the source leaves open: names and values, BM and BN among them."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block; 0 where the kernel declares its own."""

    def __post_init__(self) -> None:
        if not self.kernel.isidentifier():
            raise ValueError(f"{self.kernel!r} is no kernel name")

    def value(self, name: str) -> int:
        """Of a macro that is a number; 0 where it is not set."""
        return int(dict(self.macros).get(name, 0))

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros, as compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.macros)

    def grid(self, m: int, n: int) -> tuple[int]:
        """Thread blocks for an m×n matrix C, in one dimension."""
        return (ceil_div(m, self.bm) * ceil_div(n, self.bn) * max(1, self.value("SPLIT")),)


def kernel_source(name: str) -> str:
    """The text of the kernel `name`, from one of the folders in kernels/."""
    found = next(_kernels().glob(f"*/{name}.cu"), None)
    if found is None:
        raise DeviceError(
            f"The kernel source {name}.cu is missing from this installation; reinstall ooc-gemm."
        )
    return found.read_text(encoding="utf-8")


def headers(source: str) -> dict[str, str]:
    """The headers that the text of a kernel includes: their names, as it includes them, and their texts."""
    return {name: (_kernels() / name).read_text(encoding="utf-8") for name in _INCLUDE.findall(source)}


def _kernels() -> Path:
    """The folder kernels/: in the package (installed), or beside it (checkout)."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def compile(config: Config, arch: str, check_spills: bool = False) -> bytes:
    """Machine code (a cubin) of a kernel for `arch`, such as "sm_90a"; from the disk cache where it is.

    `check_spills`: compile anew, and fail where registers spill to memory. Raises DeviceError where the
    compiler is missing or refuses; what it said is in the message.
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
    """What to compile for a device of e.g. "90". The `a` stands for instructions of that very chip."""
    return f"sm_{compute_capability}" + ("a" if compute_capability == "90" else "")


def load(cubin: bytes, config: Config) -> Kernel:
    """The kernel, on the current device; it keeps its module loaded."""
    return load_all(cubin, config, (config.kernel,))[config.kernel]


def load_all(cubin: bytes, config: Config, names: Iterable[str]) -> dict[str, Kernel]:
    """Several kernels of one source."""
    from cupy.cuda import driver, function

    module = function.Module()
    module.load(cubin)
    found = {name: module.get_function(name) for name in names}
    if config.shared_bytes > _STATIC_SHARED:
        for kernel in found.values():
            driver.funcSetAttribute(kernel.ptr, _MAX_DYNAMIC_SHARED_SIZE, config.shared_bytes)
    return {name: Kernel(kernel, name) for name, kernel in found.items()}


def launch(
    function: Any,
    config: Config,
    m: int,
    n: int,
    k: int,
    alpha: float,
    a_ptr: int,
    lda: int,
    b_ptr: int,
    ldb: int,
    beta: float,
    c_ptr: int,
    ldc: int,
    stream: Any,
    guard: int | None = None,
) -> None:
    """C ← α·op(A)·op(B) + β·C on a CuPy stream of the current device; returns at once.

    Row-major matrices at device addresses, `ld*` elements from one stored row to the next. With β = 0 C
    is not read; with α = 0 or k = 0, neither A nor B. `guard`, for kernels compiled with GUARDED: the
    address of a 32-bit flag without which nothing is done. ValueError where α or β is no value of the dtype.
    """
    import numpy as np

    if m == 0 or n == 0:
        return
    scalar = np.dtype(config.dtype).type
    if config.dtype == "int64" and (alpha != int(alpha) or beta != int(beta)):
        raise ValueError(f"α = {alpha} and β = {beta} must be integers for an int64 product")
    i64, pointer = np.int64, np.uintp
    args = (
        i64(m), i64(n), i64(k), scalar(alpha), pointer(a_ptr), i64(lda), pointer(b_ptr), i64(ldb),
        scalar(beta), pointer(c_ptr), i64(ldc), *(() if guard is None else (pointer(guard),)),
    )  # fmt: skip
    function(config.grid(m, n), config.block, args, stream, config.shared_bytes)


@lru_cache
def _version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library. DeviceError where it or its bindings are missing."""
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
