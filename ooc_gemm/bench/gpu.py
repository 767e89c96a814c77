"""One way to run every GEMM on a GPU: our kernels, and cuBLAS beside them.

    open_gemm(kernel, dtype, …, m, n, k) ──► Gemm ──gemm(α, A, B, β, C, stream)──► enqueued, not waited for

Matrices are 2-D CuPy arrays as stored (A is k×m where trans_a), row-major, whose rows may be padded, and
must be to multiples of `tensor.PITCH_BYTES` for what runs on tensor cores.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from ..cuda_kernels import cublas, nvrtc
from ..cuda_kernels.catalog import KERNELS
from ..cuda_kernels.complex_gemm import ComplexGemm
from ..cuda_kernels.mma import Mma
from ..cuda_kernels.nvrtc import Config
from ..cuda_kernels.roofline import OUT_DTYPE
from ..cuda_kernels.tuning import best_config
from ..cuda_kernels.wgmma import Wgmma
from ..devices.cuda.gpus import require_cupy
from ..support.errors import InputError


class Gemm(Protocol):
    """C ← α·op(A)·op(B) + β·C for one shape and type, compiled and ready."""

    @property
    def config(self) -> Config | None:
        """The configuration that the kernel was compiled with; None for cuBLAS."""

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of C for which each element of A and B is loaded once; None: not known."""

    def __call__(self, alpha: complex, a: Any, b: Any, beta: complex, c: Any, stream: Any) -> None:
        """Enqueue the product. Raises ValueError if an array has another shape than the one it was opened
        for."""


_CUBLAS_TYPES = {
    "cublas": ("float32", "float64", "float16", "int8", "complex64", "complex128"),
    "cublas-tf32": ("float32",),
}
"""Types of A and B that cuBLAS is measured with."""
CUBLAS = {
    "cublas": "cuBLAS: float32 as SGEMM, float16 with float32 sums, int8 with int32 sums",
    "cublas-tf32": "cuBLAS: float32 rounded to TF32 for the tensor cores",
}
"""Name → explanation in one line."""


def device_name(cupy: Any) -> str:
    """Return the name of the current device, as `ooc-gemm info` shows it."""
    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


def dtypes_of(kernel: str) -> tuple[str, ...]:
    """Return the types of A and B that a kernel takes. Raises InputError if there is no such kernel."""
    if kernel in KERNELS:
        return KERNELS[kernel].dtypes
    if kernel in CUBLAS:
        return _CUBLAS_TYPES[kernel]
    raise InputError(f"{kernel!r} is not a kernel; choose among {', '.join((*KERNELS, *CUBLAS))}")


def open_gemm(
    kernel: str,
    dtype: str,
    trans_a: bool,
    trans_b: bool,
    m: int,
    n: int,
    k: int,
    config: Config | None = None,
) -> Gemm:
    """A kernel of the catalog, or of CUBLAS, for m×k times k×n on the current device; `dtype` is the type
    of A and B. Without a config, the best known for the shape.

    InputError where there is no such kernel, or it takes no such type or operands, or the device is too old.
    """
    if dtype not in dtypes_of(kernel):
        raise InputError(f"kernel {kernel!r} does not take {dtype}; it takes {', '.join(dtypes_of(kernel))}")
    cupy = require_cupy("kernels run")
    if kernel in CUBLAS:
        return _Cublas(cupy.cuda, kernel, dtype, trans_a, trans_b, m, n, k)
    found = KERNELS[kernel]
    if (trans_a or trans_b) and not found.transposes:
        raise InputError(f"kernel {kernel!r} takes no transposed operands")
    capability = int(cupy.cuda.Device().compute_capability)
    if found.only_arch not in (None, capability):
        only, has = found.only_arch / 10, capability / 10
        raise InputError(f"kernel {kernel!r} is for compute capability {only} alone, and this GPU has {has}")
    if capability < found.min_arch:
        least, has = found.min_arch / 10, capability / 10
        raise InputError(f"kernel {kernel!r} needs compute capability {least}, and this GPU has {has}")
    if found.launcher != "nvrtc":
        return _Tensor(kernel, dtype, trans_a, trans_b, m, n, k, config)
    device = device_name(cupy), int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    config = config or best_config(kernel, dtype, trans_a, trans_b, m, n, k, *device)
    function = nvrtc.load(nvrtc.compile(config, nvrtc.arch_of(str(capability))), config)
    return _Plain(function, config, trans_a, trans_b, m, n, k)


@dataclass(frozen=True)
class _Plain:
    """A kernel with the signature that all kernels of the ladder share."""

    function: Any
    config: Config
    trans_a: bool
    trans_b: bool
    m: int
    n: int
    k: int

    @property
    def tile(self) -> tuple[int, int]:
        """The tile of the configuration; 1×1 if threads share nothing."""
        return (1, 1) if self.config.kernel.startswith("naive") else (self.config.bm, self.config.bn)

    def __call__(self, alpha: complex, a: Any, b: Any, beta: complex, c: Any, stream: Any) -> None:
        m, n, k = self.m, self.n, self.k
        lda, ldb, ldc = _leading(a, m, k, self.trans_a), _leading(b, k, n, self.trans_b), _leading(c, m, n)
        nvrtc.launch(
            self.function, self.config, m, n, k, alpha, a.data.ptr, lda, b.data.ptr, ldb, beta,  # type: ignore[arg-type]
            c.data.ptr, ldc, stream,
        )  # fmt: skip


class _Tensor:
    """A kernel that wgmma.py or mma.py launches. They choose the configuration if none is given."""

    def __init__(
        self,
        kernel: str,
        dtype: str,
        trans_a: bool,
        trans_b: bool,
        m: int,
        n: int,
        k: int,
        config: Config | None,
    ):
        self._shape, self._trans = (m, n, k), (trans_a, trans_b)
        if dtype == "complex64":
            self._gemm: Any = ComplexGemm(trans_a, trans_b, config=config)
            self.config = self._gemm.real.choose(m, 2 * n, 2 * k)[0]
        else:
            kind = Wgmma if KERNELS[kernel].launcher == "wgmma" else Mma
            self._gemm = kind(kernel, trans_a, trans_b, dtype, dtype, config)
            self.config = self._gemm.choose(m, n, k)[0]

    @property
    def tile(self) -> tuple[int, int]:
        return self.config.bm, self.config.bn

    def __call__(self, alpha: complex, a: Any, b: Any, beta: complex, c: Any, stream: Any) -> None:
        m, n, k = self._shape
        lda, ldb = _leading(a, m, k, self._trans[0]), _leading(b, k, n, self._trans[1])
        self._gemm(
            m, n, k, alpha, a.data.ptr, lda, b.data.ptr, ldb, beta, c.data.ptr, _leading(c, m, n), stream
        )


@dataclass(frozen=True)
class _Cublas:
    """cuBLAS is column-major, so it computes Cᵀ = op(B)ᵀ·op(A)ᵀ of the operands as they lie."""

    cuda: Any
    kernel: str
    dtype: str
    trans_a: bool
    trans_b: bool
    m: int
    n: int
    k: int
    config: None = None
    tile: None = None

    def __call__(self, alpha: complex, a: Any, b: Any, beta: complex, c: Any, stream: Any) -> None:
        m, n, k = self.m, self.n, self.k
        lda, ldb, ldc = _leading(a, m, k, self.trans_a), _leading(b, k, n, self.trans_b), _leading(c, m, n)
        if m == 0 or n == 0:
            return
        types = self.dtype, OUT_DTYPE.get(self.dtype, self.dtype)
        operations = cublas.operation(self.trans_a), cublas.operation(self.trans_b)
        cublas.gemm(
            self.cuda, m, n, k, alpha, a.data.ptr, lda, b.data.ptr, ldb, beta, c.data.ptr, ldc, stream,
            operations=operations, types=types, tf32=self.kernel == "cublas-tf32",
        )  # fmt: skip


def _leading(array: Any, rows: int, cols: int, transposed: bool = False) -> int:
    """Return the elements from one stored row to the next. Raises ValueError if the array is not rows×cols as
    stored."""
    shape = (cols, rows) if transposed else (rows, cols)
    if array.shape != shape or (shape[1] > 1 and array.strides[1] != array.itemsize):
        raise ValueError(
            f"an array of shape {array.shape} and strides {array.strides} is not {shape} in rows"
        )
    return max(int(array.strides[0] // array.itemsize), shape[1], 1)
