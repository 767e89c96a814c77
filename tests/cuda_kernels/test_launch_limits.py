"""Every launch of a kernel is one that GPUs take, however large the product; without a GPU.

The host's own code runs, up to where it would call the driver. A GPU's memory holds no product that is large
along all axes, and the planner keeps each axis within MOST_EXTENT (the last tests)."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from products import as_product

from ooc_gemm.cuda_kernels import (
    catalog,
    complex_gemm,
    driver,
    fallback,
    launch,
    ozaki,
    preparations,
    residues,
    scales,
    scratch,
    split,
    tensor,
    transposition,
)
from ooc_gemm.cuda_kernels.product import Strips
from ooc_gemm.cuda_kernels.wgmma import open_tensor_gemm
from ooc_gemm.devices.cuda import check as cuda_check
from ooc_gemm.devices.cuda import session as cuda
from ooc_gemm.engine.ports import Arithmetic, Operation
from ooc_gemm.planning.ledger import MOST_EXTENT
from ooc_gemm.planning.schedule import Block
from ooc_gemm.support.errors import DeviceError

GiB = 1 << 30
DEVICE_BYTES = 192 * GiB
"""More than any GPU that we know of has."""
LONG = MOST_EXTENT
SHAPES = (
    (LONG, 1, 64), (1, LONG, 64), (64, 65, LONG), (3, 5, LONG), (LONG, 80, 1), (80, LONG, 1),
    (150_000, 150_000, 300), (20_000_000, 300, 500), (300, 20_000_000, 500),
    (3000, 3000, 10_000_000), (LONG, 64, 0), (1, 1, LONG),
)  # fmt: skip
LAUNCHED = []
"""(kernel, grid, block, shared bytes) of the test that runs."""
STREAM = SimpleNamespace(ptr=0)


class Recorded(driver.Kernel):
    """A kernel whose launches go as far as the driver."""

    def __call__(self, grid, block, args, stream, shared_bytes=0):
        super().__call__(grid, block, args, stream, shared_bytes)
        LAUNCHED.append((self._name, tuple(grid), tuple(block), shared_bytes))


class Device:
    """What CuPy says of the device in use."""

    def __init__(self, index=0):
        self.id, self.compute_capability = 0, "90"
        self.attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerMultiprocessor": 228 << 10}


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """Kernels are not compiled, memory is only counted, and what the driver would be told is dropped."""
    LAUNCHED.clear()

    def load(config, *names):
        return {name: Recorded(SimpleNamespace(ptr=1), name) for name in names or (config.kernel,)}

    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    modules = split, tensor, complex_gemm, transposition, cuda_check, fallback, launch, residues, scales
    for module in modules:
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(scratch.Scratch, "at", lambda self, name, nbytes: 1 << 20)
    monkeypatch.setattr(driver, "call", lambda name, *args: None)


def launched(*names):
    found = {name for name, *_ in LAUNCHED}
    assert found >= set(names), found


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((2**31,), (32,), 0), ((1, 65_536), (32,), 0), ((1, 1, 65_536), (32,), 0), ((2**32 + 5,), (32,), 0),
        ((1,), (1025,), 0), ((1,), (1, 1025), 0), ((1,), (1, 1, 65), 0), ((1,), (64, 32), 0),
        ((1,), (32,), (227 << 10) + 1), ((1,), (32,), -1), ((1, 1, 1, 1), (32,), 0),
    ],
)  # fmt: skip
def test_what_no_gpu_takes_is_refused_in_one_place(grid, block, shared):
    kernel = driver.Kernel(SimpleNamespace(ptr=1), "some")
    with pytest.raises(
        DeviceError, match=r"the kernel some would need .*; give a smaller device_memory_limit"
    ):
        kernel(grid, block, (np.int32(1),), STREAM, shared)


@pytest.mark.parametrize(
    ("grid", "block", "shared"), [((2**31 - 1, 65_535, 65_535), (1024,), 0), ((0,), (16, 1, 64), 227 << 10)]
)
def test_what_gpus_take_is_launched(grid, block, shared):
    Recorded(SimpleNamespace(ptr=1), "some")(grid, block, (np.int32(1),), STREAM, shared)
    (found,) = LAUNCHED
    assert found == ("some", grid, block, shared)


@pytest.mark.parametrize("kernel", [*catalog.KERNELS])
def test_configurations_are_ones_that_gpus_take(kernel):
    known = catalog.KERNELS[kernel]
    for dtype in known.dtypes:
        for trans_a, trans_b in (
            (False, False),
            *(((True, False), (False, True)) if known.transposes else ()),
        ):
            for config in known.configs(dtype, trans_a, trans_b):
                driver.check_launch(config.kernel, (1,), config.block, config.shared_bytes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [name for name, it in catalog.KERNELS.items() if it.launcher == "launch"])
def test_plain_kernels(kernel, shape):
    known = catalog.KERNELS[kernel]
    for dtype in known.dtypes:
        for config in known.configs(dtype, False, False):
            run = Recorded(SimpleNamespace(ptr=1), config.kernel)
            launch.launch(run, config, as_product(*shape, 1, 0, 1, 0, 1, 0, 0, 1), STREAM)
    assert LAUNCHED


def multiply(gemm, shape, alpha=1.0, lower=False):
    m, n, k = shape
    wanted = as_product(m, n, k, alpha, 1 << 20, max(m, k), 1 << 30, max(n, k), 0.0, 1 << 40, n)
    gemm(wanted, STREAM, strips=Strips(lower=lower))


TENSOR = [name for name, it in catalog.KERNELS.items() if it.launcher not in ("launch", "ozaki")]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", TENSOR)
def test_tensor_cores(kernel, shape, monkeypatch):
    """With all that prepares their operands and adds up slices; each of fp16x3's ways."""
    for dtype in catalog.KERNELS[kernel].dtypes:
        if dtype == "complex64":
            continue
        for trans_a, trans_b in ((False, False), (True, True)):
            if trans_a and not catalog.KERNELS[kernel].transposes:
                continue
            multiply(open_tensor_gemm(kernel, trans_a, trans_b, dtype, dtype), shape)
            with monkeypatch.context() as patch:
                patch.setattr(tensor, "split_pays", lambda *shape: True)
                multiply(open_tensor_gemm(kernel, trans_a, trans_b, dtype, dtype), shape)
    assert {name for name, *_ in LAUNCHED} & {"dmma", "mma", "wgmma", kernel}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(m, n, min(k, 10_000_000)) for m, n, k in SHAPES])
@pytest.mark.parametrize("dtype", ["float64", "complex128", "uint32"])
def test_residues(shape, dtype, monkeypatch):
    """Both ways of ozaki2, with all that goes with them. uint32 has the most planes of integers. What is
    deeper is multiplied in more panels, whose launches are these again."""
    for trans_a, trans_b in ((False, True), (True, False)):
        for alpha in (2.0, 1j) if dtype == "complex128" else (2.0,):
            multiply(ozaki.Ozaki(trans_a, trans_b, (dtype, dtype)), shape, alpha)
            if max(shape[:2]) <= ozaki.MOST_LINES:  # else it is never made of residues at once
                with monkeypatch.context() as patch:
                    patch.setattr(ozaki, "residues_pay", lambda m, n, k, dtype: True)
                    multiply(ozaki.Ozaki(trans_a, trans_b, (dtype, dtype)), shape, alpha)
    launched("recombine" if dtype == "uint32" else "dmma")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alpha", [2.0, 1j])
def test_complex_numbers_by_real_products(shape, alpha):
    for trans_a, trans_b in ((False, False), (True, True)):
        multiply(complex_gemm.ComplexGemm(trans_a, trans_b), shape, alpha)
    launched(*(("embed",) if shape[2] else ()), *(("combine",) if alpha == 1j else ()))


@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (1, 1), (1, LONG), (LONG, 1), (64, 20_000_000), (20_000_000, 64), (300, LONG), (LONG, 300),
        (2**17, 2**17),
    ],
)  # fmt: skip
def test_the_check_of_a_block(rows, cols):
    """Of panels and blocks in all types, whichever way they lie, also of more than 65,535·256 rows."""
    checks = object.__new__(cuda_check.Checks)
    array = SimpleNamespace(data=SimpleNamespace(ptr=1 << 20))
    for config in preparations.checks():
        dtype = np.dtype(config.dtype)
        if rows * cols * dtype.itemsize > DEVICE_BYTES:
            continue
        exact = config.value("KIND") == 3
        checks._op = Operation(Arithmetic("some", dtype, dtype, exact=exact))
        kernels = checks._kernels(dtype, config.value("VEC"))
        for name in ("rows", "columns"):
            checks._times(kernels, name, (rows, cols), 1 << 20, cols, array, array, array, False, STREAM)
    launched("rows", "columns")


def test_a_symmetric_block_is_turned():
    session, n = object.__new__(cuda.CUDASession), 220_000  # 194 GB of float32
    session._device = SimpleNamespace(use=lambda: None)
    session._streams = {cuda.COMPUTE: STREAM, cuda.DOWNLOAD: STREAM}
    session._arrays = {
        key: SimpleNamespace(data=SimpleNamespace(ptr=1), itemsize=4) for key in (("c", 0), "mirrored")
    }
    nothing = lambda *args, **more: None  # noqa: E731
    session._timing = SimpleNamespace(begin=nothing, end=nothing)
    session._turn = {"float32": transposition.Transposition("float32")}
    session._leaving = None
    session._op = Operation(Arithmetic("some", np.dtype("f4"), np.dtype("f4")))
    block = Block(0, 0, n, 0, n, diagonal=True)
    session.mirror(block, 0)
    assert LAUNCHED[0][1] == (6875**2,)
