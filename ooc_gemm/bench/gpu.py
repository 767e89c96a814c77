"""One way to run every GEMM on a GPU: our kernels, and cuBLAS beside them.

    open_gemm(kernel, dtype, …, m, n, k) ──► Gemm ──gemm(α, A, B, β, C, stream)──► enqueued, not waited for

Matrices are 2-D CuPy arrays as stored (A is k×m where trans_a), row-major, whose rows may be padded, and
must be to multiples of `split.PITCH_BYTES` for what runs on tensor cores.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from ..cuda_kernels import cublas
from ..cuda_kernels.catalog import KERNELS
from ..cuda_kernels.compile import arch_of, compile_kernel
from ..cuda_kernels.complex_gemm import ComplexGemm
from ..cuda_kernels.config import Config
from ..cuda_kernels.launch import launch, load_module
from ..cuda_kernels.ozaki import Ozaki
from ..cuda_kernels.product import Operand, Product
from ..cuda_kernels.roofline import OUT_DTYPE
from ..cuda_kernels.tuning import best_config
from ..cuda_kernels.wgmma import open_tensor_gemm
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


def out_dtype(kernel: str, dtype: str) -> str:
    """Return the type of C of a kernel for operands of a type."""
    special = dict(KERNELS[kernel].out) if kernel in KERNELS else {}
    return special.get(dtype) or OUT_DTYPE.get(dtype, dtype)


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
    """Open a kernel of the catalog, or of CUBLAS, for products of m×k by k×n on the current device.

    `dtype`: type of A and B. `trans_a`, `trans_b`: whether A is stored k×m, and B n×k. `config`: the
    configuration to use, by default the best known for the shape. Raises InputError if there is no such
    kernel, if it does not take this type or these operands, or if the device is too old.
    """
    if dtype not in dtypes_of(kernel):
        raise InputError(f"kernel {kernel!r} does not take {dtype}; it takes {', '.join(dtypes_of(kernel))}")
    cupy = require_cupy("kernels run")
    if kernel in CUBLAS:
        return _Cublas(cupy.cuda, kernel, dtype, _Shape(m, n, k, trans_a, trans_b))
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
    shape = _Shape(m, n, k, trans_a, trans_b)
    if found.launcher != "launch":
        return _Tensor(kernel, dtype, shape, config)
    device = device_name(cupy), int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    config = config or best_config(kernel, dtype, trans_a, trans_b, m, n, k, *device)
    function = load_module(compile_kernel(config, arch_of(str(capability))), config)[config.kernel]
    return _Plain(function, config, shape)


@dataclass(frozen=True)
class _Shape:
    """The shape that a GEMM was opened for."""

    m: int
    n: int
    k: int
    trans_a: bool
    """Whether A is stored k×m."""
    trans_b: bool
    """Whether B is stored n×k."""

    def product(self, alpha: complex, a: Any, b: Any, beta: complex, c: Any) -> Product:
        """Return the product of these arrays. Raises ValueError if one of them has another shape."""
        m, n, k = self.m, self.n, self.k
        left, right = _operand(a, m, k, self.trans_a), _operand(b, k, n, self.trans_b)
        return Product(m, n, k, alpha, left, right, beta, _operand(c, m, n))


@dataclass(frozen=True)
class _Plain:
    """A kernel with the signature that the ladder and ffma share."""

    function: Any
    config: Config
    shape: _Shape

    @property
    def tile(self) -> tuple[int, int]:
        """The tile of the configuration; 1×1 if threads share nothing."""
        return (1, 1) if self.config.kernel.startswith("naive") else (self.config.bm, self.config.bn)

    def __call__(self, alpha: complex, a: Any, b: Any, beta: complex, c: Any, stream: Any) -> None:
        launch(self.function, self.config, self.shape.product(alpha, a, b, beta, c), stream)


class _Tensor:
    """A kernel that wgmma.py, mma.py or ozaki.py launches. They choose the configuration if none is given."""

    def __init__(self, kernel: str, dtype: str, shape: _Shape, config: Config | None):
        self._shape, trans, (m, n, k) = shape, (shape.trans_a, shape.trans_b), (shape.m, shape.n, shape.k)
        if dtype == "complex64":
            self._gemm: Any = ComplexGemm(*trans, config=config)
            self.config = self._gemm.real.choose(m, 2 * n, 2 * k)[0]
        elif KERNELS[kernel].launcher == "ozaki":
            self._gemm = Ozaki(*trans, (dtype, dtype), depth=k, chooses=config is None)
            self.config = self._gemm.residues.config
        else:
            self._gemm = open_tensor_gemm(kernel, *trans, dtype, dtype, config)
            self.config = self._gemm.choose(m, n, k)[0]

    @property
    def tile(self) -> tuple[int, int]:
        return self.config.bm, self.config.bn

    def __call__(self, alpha: complex, a: Any, b: Any, beta: complex, c: Any, stream: Any) -> None:
        self._gemm(self._shape.product(alpha, a, b, beta, c), stream)


@dataclass(frozen=True)
class _Cublas:
    """cuBLAS, which is measured beside our kernels."""

    cuda: Any
    kernel: str
    dtype: str
    shape: _Shape
    config: None = None
    tile: None = None

    def __call__(self, alpha: complex, a: Any, b: Any, beta: complex, c: Any, stream: Any) -> None:
        product = self.shape.product(alpha, a, b, beta, c)
        if product.m == 0 or product.n == 0:
            return
        types = self.dtype, OUT_DTYPE.get(self.dtype, self.dtype)
        operations = cublas.operation(self.shape.trans_a), cublas.operation(self.shape.trans_b)
        tf32 = self.kernel == "cublas-tf32"
        cublas.gemm(self.cuda, product, stream, operations=operations, types=types, tf32=tf32)


def _operand(array: Any, rows: int, cols: int, transposed: bool = False) -> Operand:
    """Return an array as an operand. Raises ValueError if it is not rows×cols, or the transpose, in rows."""
    shape = (cols, rows) if transposed else (rows, cols)
    if array.shape != shape or (shape[1] > 1 and array.strides[1] != array.itemsize):
        raise ValueError(
            f"an array of shape {array.shape} and strides {array.strides} is not {shape} in rows"
        )
    return Operand(array.data.ptr, max(int(array.strides[0] // array.itemsize), shape[1], 1))
