"""Loads compiled kernels, and launches those that share the signature of the ladder.

    Config ──compile_kernel──► cubin ──load_module──► Kernel ──launch(kernel, config, product, stream)──► C
       └───────────────────────── grid, threads, shared memory ───────────────┘

A kernel that neither came with the package nor is in the cache is compiled in a thread of its own, while the
first panels are read. It is loaded when it is first launched.

Whoever calls a function of this file has CuPy and a GPU. Importing it needs neither.
"""

from concurrent.futures import Future
from contextlib import suppress
from functools import cache, cached_property
from threading import Lock, Thread
from typing import Any

import numpy as np

from ..support.errors import DeviceError
from .compile import arch_of, cached_kernel, compile_kernel
from .config import Config
from .driver import Kernel
from .precompiled import precompiled
from .product import Product

_STATIC_SHARED = 48 << 10
"""Bytes of shared memory that a block gets without asking for more."""
_MAX_DYNAMIC_SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


def load_module(cubin: bytes, config: Config, *names: str) -> dict[str, Kernel]:
    """Load machine code on the current device. Returns its kernels of these names, by default the one that
    the configuration is named for. The kernels keep the module loaded."""
    found = _functions(cubin, config, *names)
    return {name: Kernel(function, name) for name, function in found.items()}


def _functions(cubin: bytes, config: Config, *names: str) -> dict[str, Any]:
    """Load machine code on the current device. Returns CuPy's functions of these names."""
    from cupy.cuda import driver, function

    module = function.Module()
    module.load(cubin)
    found = {name: module.get_function(name) for name in names or (config.kernel,)}
    if config.shared_bytes > _STATIC_SHARED:
        for kernel in found.values():
            driver.funcSetAttribute(kernel.ptr, _MAX_DYNAMIC_SHARED_SIZE, config.shared_bytes)
    return found


def load(config: Config, *names: str) -> dict[str, Kernel]:
    """Return kernels of one source for the current device, as `load_module` does. They stay loaded for the
    life of the process. What is not in the cache is compiled in the background, where the first launch waits
    for it and raises its DeviceError. Raises DeviceError if the compiler is missing."""
    from cupy.cuda import Device

    return _loaded(Device().id, config, names)


class Functions:
    """Kernels that configurations are named for, each loaded when it is first asked for."""

    def __init__(self) -> None:
        self._found: dict[Config, Kernel] = {}

    def __call__(self, config: Config) -> Kernel:
        """Return the kernel of a configuration for the current device, which must always be the same."""
        if config not in self._found:
            self._found[config] = load(config)[config.kernel]
        return self._found[config]


@cache
def _loaded(device: int, config: Config, names: tuple[str, ...]) -> dict[str, Kernel]:
    """Kernels of one source on the current device, whose number is `device`."""
    from cupy.cuda import Device, driver

    arch = arch_of(Device(device).compute_capability)
    if (cubin := precompiled(config, arch)) is not None:
        with suppress(driver.CUDADriverError):  # the driver is older than the compiler that made it
            return load_module(cubin, config, *names)
    if (cubin := cached_kernel(config, arch)) is not None:
        return load_module(cubin, config, *names)
    coming = _Coming(config, arch, names)
    return {name: Kernel(_Function(coming, name), name) for name in names or (config.kernel,)}


@cache
def _compiled(config: Config, arch: str) -> Future[bytes]:
    """Begin to compile a kernel in a thread of its own. Several devices share what comes of it."""
    found = Future[bytes]()

    def work() -> None:
        try:
            found.set_result(compile_kernel(config, arch))
        except BaseException as error:
            found.set_exception(error)

    Thread(target=work, name="ooc-gemm compiler").start()
    return found


class _Coming:
    """Kernels of one source that is being compiled."""

    def __init__(self, config: Config, arch: str, names: tuple[str, ...]):
        self._config, self._names, self._cubin = config, names, _compiled(config, arch)
        self._lock = Lock()
        self._found: dict[str, Any] | None = None

    def function(self, name: str) -> Any:
        """Return a function, loaded on the current device, when it is compiled. Raises DeviceError."""
        with self._lock:
            if self._found is None:
                try:
                    cubin = self._cubin.result()
                except DeviceError:
                    _loaded.cache_clear()  # so that the next run tries again
                    _compiled.cache_clear()
                    raise
                self._found = _functions(cubin, self._config, *self._names)
            return self._found[name]


class _Function:
    """Stands for CuPy's function until it is loaded."""

    def __init__(self, coming: _Coming, name: str):
        self._coming, self._name = coming, name

    @cached_property
    def ptr(self) -> int:
        """Address of the function for launches."""
        return int(self._coming.function(self._name).ptr)


def launch(function: Any, config: Config, product: Product, stream: Any, guard: int | None = None) -> None:
    """Start a kernel of the ladder, or ffma, in a CuPy stream of the current device. Returns at once.

    `guard`, for kernels compiled with GUARDED: the address of a 32-bit flag without which nothing is done.
    Only the real parts of α and β are used. Raises ValueError if α or β is no value of the type of C.
    """
    m, n, alpha, beta = product.m, product.n, product.alpha.real, product.beta.real
    if m == 0 or n == 0:
        return
    scalar = np.dtype(config.dtype).type
    if config.dtype == "int64" and (alpha != int(alpha) or beta != int(beta)):
        raise ValueError(f"α = {alpha} and β = {beta} must be integers for an int64 product")
    i64, pointer = np.int64, np.uintp
    a, b, c = product.a, product.b, product.c
    args = (
        i64(m), i64(n), i64(product.k), scalar(alpha), pointer(a.ptr), i64(a.ld), pointer(b.ptr), i64(b.ld),
        scalar(beta), pointer(c.ptr), i64(c.ld), *(() if guard is None else (pointer(guard),)),
    )  # fmt: skip
    function(config.grid(m, n), config.block, args, stream, config.shared_bytes)
