"""From a kernel's configuration to a launch: defines, grid and threads come from one object."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import DeviceError
from .tiles import ceil_div

_ELEMENT = {"float32": "float", "float64": "double", "int64": "long long"}


@dataclass(frozen=True)
class Config:
    """One kernel in one configuration. A thread block makes bm×bn of C, a thread tm×tn."""

    name: str
    dtype: str
    """float32, float64 or int64."""
    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    trans_a: bool = False
    """A is stored k×m."""
    trans_b: bool = False
    """B is stored n×k."""

    def __post_init__(self) -> None:
        if self.dtype not in _ELEMENT:
            raise ValueError(
                f"kernel {self.name!r} has no type {self.dtype!r}; choose one of {', '.join(_ELEMENT)}"
            )
        if min(self.bm, self.bn, self.bk, self.tm, self.tn) < 1 or self.bm % self.tm or self.bn % self.tn:
            raise ValueError(f"a tile of {self.bm}×{self.bn} is not made of whole {self.tm}×{self.tn} pieces")
        if self.threads > 1024 or self.threads % 32:
            raise ValueError(f"{self.threads} threads are no whole number of warps up to 1024")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.bm // self.tm) * (self.bn // self.tn)

    @property
    def defines(self) -> dict[str, str]:
        """The macros the source is compiled with."""
        sizes = {"BM": self.bm, "BN": self.bn, "BK": self.bk, "TM": self.tm, "TN": self.tn}
        flags = {"TRANS_A": int(self.trans_a), "TRANS_B": int(self.trans_b)}
        return {"ELEMENT": _ELEMENT[self.dtype]} | {key: str(value) for key, value in (sizes | flags).items()}

    def grid(self, m: int, n: int) -> int:
        """Thread blocks for an m×n C, in one dimension."""
        return ceil_div(m, self.bm) * ceil_div(n, self.bn)


def tiled(dtype: str, trans_a: bool = False, trans_b: bool = False) -> Config:
    """The shipped configuration of `tiled`. Raises ValueError for a type it has none for."""
    bm, bn, bk, tm, tn = {
        "float32": (128, 128, 8, 8, 8),
        "float64": (64, 64, 8, 4, 4),
        "int64": (64, 64, 8, 4, 4),
    }.get(dtype, (1, 1, 1, 1, 1))
    return Config("tiled", dtype, bm, bn, bk, tm, tn, trans_a, trans_b)


def kernel_source(name: str) -> str:
    """The CUDA C++ source: beside this file in a wheel, beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels", here.parent / "kernels"):
        file = folder / f"{name}.cu"
        if file.is_file():
            return file.read_text()
    raise DeviceError(
        f"the source of kernel {name!r} is missing from this installation; install ooc-gemm again"
    )


def cache_folder() -> Path:
    """Where compiled kernels are kept: $OOC_GEMM_CACHE, or the user's cache folder."""
    base = os.environ.get("OOC_GEMM_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ooc-gemm"


def compile(config: Config, arch: str, *, check_spills: bool = False) -> bytes:
    """A cubin for `arch` (such as sm_90a), from the cache or by NVRTC. `check_spills` compiles anew and
    makes spilled registers an error. Raises DeviceError: NVRTC missing, or the compiler's log."""
    nvrtc = _nvrtc()
    source = kernel_source(config.name)
    options = ["--std=c++17", f"--gpu-architecture={arch}"]
    options += [f"-D{key}={value}" for key, value in config.defines.items()]
    if check_spills:
        return _compile(
            nvrtc, source, [*options, "--ptxas-options=--warn-on-spills", "--ptxas-options=-Werror"]
        )
    version = _check(nvrtc, nvrtc.nvrtcVersion())
    key = hashlib.sha256("\0".join([source, *options, repr(version)]).encode()).hexdigest()
    file = cache_folder() / "kernels" / f"{config.name}-{key[:32]}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        pass
    cubin = _compile(nvrtc, source, options)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            temporary.write(cubin)
        os.replace(temporary.name, file)
    except OSError:
        pass  # no cache: compiled again the next time
    return cubin


@lru_cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:
        raise DeviceError(
            f"kernels are compiled by NVRTC, which is not here ({error}); pip install 'ooc-gemm[cuda13]'"
        ) from error
    return nvrtc


def _check(nvrtc: Any, answer: Any) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"NVRTC failed: {status.name}")
    return values


def _compile(nvrtc: Any, source: str, options: list[str]) -> bytes:
    (program,) = _check(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            text = log.decode(errors="replace").rstrip("\0 \n")
            raise DeviceError(f"a kernel does not compile with {' '.join(options)}:\n{text}")
        (size,) = _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        cubin: bytes = b" " * size
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def load(cubin: bytes, name: str) -> Any:
    """The kernel `name` of a cubin, on the current device."""
    from cupy.cuda import function

    module = function.Module()
    module.load(cubin)
    return module.get_function(name)


def launch(
    kernel: Any,
    config: Config,
    m: int,
    n: int,
    k: int,
    alpha: float,
    a: int,
    lda: int,
    b: int,
    ldb: int,
    beta: float,
    c: int,
    ldc: int,
    stream: Any,
) -> None:
    """C (m×n, pointer, leading dimension) ← α·op(A)·op(B) + β·C on a CuPy stream. k = 0 gives β·C."""
    import numpy as np

    if m == 0 or n == 0:
        return
    scalar, size = np.dtype(config.dtype).type, np.int64
    sizes = size(m), size(n), size(k)
    left, right, out = (size(a), size(lda)), (size(b), size(ldb)), (size(c), size(ldc))
    kernel(
        (config.grid(m, n), 1, 1),
        (config.threads, 1, 1),
        (*sizes, scalar(alpha), *left, *right, scalar(beta), *out),
        stream=stream,
    )
