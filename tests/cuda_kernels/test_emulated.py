"""The kernels that are plain CUDA C++, on the CPU: against NumPy at ragged shapes, and with mistakes made on
purpose, each of which must be found."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from ooc_gemm.cuda_kernels.catalog import KERNELS
from ooc_gemm.cuda_kernels.compile import kernel_source
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.ladder.emulator import (
    ORDERS,
    PLAIN,
    SIGNATURE,
    Emulator,
    Fault,
    Problem,
    compiler_missing,
    whole_source,
)

if why := compiler_missing():
    pytest.skip(why, allow_module_level=True)
pytestmark = pytest.mark.slow  # it compiles every kernel with sanitizers

LADDER = {
    "naive-uncoalesced", "naive", "tiled", "microtile", "register", "rectangular", "vectorized", "warptile"
}  # fmt: skip
BARRIER = "__syncthreads();"
FACTORS = ((1, 0), (2, -3), (-1, 1), (0, 2), (3, 0))
"""α and β."""
LAYOUTS = ((0, 1, 0), (3, 1, 1), (1, 4, 0), (4, 4, 3))
"""Least padding of a row, what its length is a multiple of, and how far from a 16-byte boundary the first
one begins. Only the third lets kernels use 16-byte accesses at any shape."""


def _shipped(name: str) -> dict[str, Config]:
    """A sample for the first type; for other types and transposed operands, the default. The names are the
    values of the macros."""
    kernel = KERNELS[name]
    first, *others = kernel.dtypes
    every = kernel.configs(first, False, False)
    configs = every[:: len(every) // 8 + 1]
    if kernel.transposes:
        configs += [
            kernel.configs(first, *trans)[0] for trans in ((True, False), (False, True), (True, True))
        ]
    configs += [kernel.configs(dtype, False, False)[0] for dtype in others]
    return {" ".join(str(value) for _, value in config.macros): config for config in configs}


def test_the_ladder_is_here() -> None:
    assert set(PLAIN) >= LADDER


def _mistaken(name: str) -> dict[str, str]:
    """The source with one barrier removed, for each of the kernel's own (those of headers belong to copies
    that the CPU does not make); `tiled` without the guard of A's or B's rows."""
    kernel = _default(name).kernel
    source, own = whole_source(kernel), kernel_source(kernel).count(BARRIER)
    parts = source.split(BARRIER)
    found = {
        f"without barrier {i}": BARRIER.join(parts[:i]) + ";" + BARRIER.join(parts[i:])
        for i in range(len(parts) - own, len(parts))
    }
    if name == "tiled":
        for matrix in "AB":
            found[f"unguarded {matrix}"] = re.sub(rf"\w+ < \w+ && (.* \? {matrix}\[)", r"\1", source)
    return found


def _default(name: str) -> Config:
    return next(iter(_shipped(name).values()))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Emulator]:
    """A program for a kernel, with all that is run of it; it is compiled when a test first asks for it."""

    @functools.cache
    def compiled(name: str) -> Emulator:
        shipped = {label: (config, whole_source(config.kernel)) for label, config in _shipped(name).items()}
        mistaken = {label: (_default(name), source) for label, source in _mistaken(name).items()}
        return Emulator(tmp_path_factory.mktemp("kernel"), shipped | mistaken)

    return compiled


@pytest.mark.parametrize(("name", "label"), [(name, label) for name in PLAIN for label in _shipped(name)])
def test_kernel_agrees_with_numpy(program: Callable[[str], Emulator], name: str, label: str) -> None:
    config = _shipped(name)[label]
    bm, bn = config.bm, config.bn
    shapes = (
        (1, 1, 1), (2, bn + 3, 9), (bm + 1, 5, 34), (4, 7, 3), (bm - 1, bn - 2, 67), (5, 6, 0),
        (bm + 5, bn + 6, 17), (bm, bn - 4, 33), (3, 2 * bn, 16), (2 * bm + 2, 1, 5), (bm, bn, 40),
    )  # fmt: skip
    problems = [
        _problem(config, *shape, *factors, order, *layout)
        for shape, factors, order, layout in zip(
            shapes, cycle(FACTORS), cycle(ORDERS), cycle(LAYOUTS), strict=False
        )
    ]
    results = program(name).run(label, problems)
    for problem, result in zip(problems, results, strict=True):
        assert not _wrong(config, problem, result)


@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name in PLAIN for label in _mistaken(name) if "barrier" in label]
)
def test_every_barrier_is_needed(program: Callable[[str], Emulator], name: str, label: str) -> None:
    config = _default(name)
    problems = [_problem(config, config.bm, config.bn - 1, 70, 1, 0, order) for order in ORDERS]
    results = program(name).run(label, problems)
    assert any(map(_wrong, [config] * len(ORDERS), problems, results))


@pytest.fixture
def short_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the names of functions and lines, whose search takes longest where faults are expected."""
    monkeypatch.setenv("ASAN_OPTIONS", "symbolize=0")


@pytest.mark.usefixtures("short_reports")
@pytest.mark.parametrize("size", ["m", "n", "k"])
@pytest.mark.parametrize("name", PLAIN)
def test_reading_beyond_an_edge_is_found(program: Callable[[str], Emulator], name: str, size: str) -> None:
    """The matrices are smaller by one than the kernel is told."""
    label, config = next(iter(_shipped(name).items()))
    problem = _problem(config, config.bm - 1, config.bn - 1, 13, 1, 0, "forward")
    problem = replace(problem, **{size: getattr(problem, size) + 1})
    with pytest.raises(Fault, match=r"(?s)AddressSanitizer.*READ of size"):
        program(name).run(label, [problem])


@pytest.mark.usefixtures("short_reports")
@pytest.mark.parametrize("matrix", ["A", "B"])
def test_missing_guard_is_found(program: Callable[[str], Emulator], matrix: str) -> None:
    config = _default("tiled")
    problem = _problem(config, config.bm - 1, config.bn, 13, 1, 0, "forward")
    with pytest.raises(Fault, match=r"(?s)AddressSanitizer.*READ of size"):
        program("tiled").run(f"unguarded {matrix}", [problem])


# ---- the emulator itself -----------------------------------------------------------------------

TOY = Config("toy", "float32", 64, 64, (64, 1), ())
TOYS = {
    "early return": (
        "if (threadIdx.x < 5) __syncthreads();",
        "thread 0 .* line 3, but thread 5 has returned",
    ),
    "two barriers": (
        "if (threadIdx.x < 5) __syncthreads();\nelse __syncthreads();",
        "thread 0 .* 3, but thread 5 in line 4",
    ),
    "part of a warp": ("if (threadIdx.x != 40) __syncwarp();", "thread 32 .* but thread 40 has returned"),
    "beyond shared memory": (
        "__shared__ T tile[60]; tile[threadIdx.x] = 0;",
        "index 60 out of bounds",
    ),
    "unaligned vector": (
        "struct alignas(16) Vec { T v[4]; }; Vec v = *reinterpret_cast<const Vec*>(A); C[0] = v.v[0];",
        "misaligned address",
    ),
    "B for α = 0": ("C[0] = B[0];", "(?s)AddressSanitizer.*READ of size"),
    "before C": ("C[-1] = 0;", "(?s)AddressSanitizer.*WRITE of size"),
}
EXCHANGE = "__shared__ T x[64]; x[threadIdx.x] = threadIdx.x; {} C[threadIdx.x] = x[threadIdx.x ^ 1];"
"""Between neighbours."""


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Kernels for blocks of 64 threads."""
    bodies = {label: body for label, (body, _) in TOYS.items()}
    bodies["exchange"] = EXCHANGE.format("__syncwarp();")
    bodies["exchange without a barrier"] = EXCHANGE.format("")
    bodies["one warp only"] = "if (threadIdx.x < 32) { __syncwarp(); }"
    head = f'using T = float;\nextern "C" __global__ void toy({SIGNATURE}) {{\n'
    sources = {label: (TOY, f"{head}{body}\n}}\n") for label, body in bodies.items()}
    return Emulator(tmp_path_factory.mktemp("toys"), sources)


@pytest.mark.usefixtures("short_reports")
@pytest.mark.parametrize("label", TOYS)
def test_fault_is_reported(toys: Emulator, label: str) -> None:
    problem = _problem(TOY, 1, 64, 1, 0, 1, "forward", shift=label == "unaligned vector")
    with pytest.raises(Fault, match=TOYS[label][1]):
        toys.run(label, [problem])


@pytest.mark.parametrize("order", ORDERS)
def test_barrier_of_a_warp(toys: Emulator, order: str) -> None:
    problem = _problem(TOY, 1, 64, 1, 0, 1, order)
    neighbours = np.arange(64).reshape(1, 64) ^ 1
    (result,) = toys.run("exchange", [problem])
    assert np.array_equal(result, neighbours)
    (result,) = toys.run("exchange without a barrier", [problem])
    assert not np.array_equal(result, neighbours)
    (result,) = toys.run("one warp only", [problem])
    assert np.array_equal(result, problem.c)


# ---- problems and results ----------------------------------------------------------------------


def _problem(
    config: Config,
    m: int,
    n: int,
    k: int,
    alpha: int,
    beta: int,
    order: str,
    pad: int = 0,
    multiple: int = 1,
    shift: int = 0,
) -> Problem:
    """Random matrices with poisoned padding. C is all poison where it must not be read."""
    rng = np.random.default_rng(7)
    dtype = np.dtype(config.dtype)
    poison = np.nan if dtype.kind == "f" else np.iinfo(dtype).max // 3

    def stored(rows: int, cols: int) -> np.ndarray:
        ld = -(-(cols + pad) // multiple) * multiple
        full = np.full((rows, ld), poison, dtype)
        shape = (rows, cols)
        full[:, :cols] = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(-999, 999, shape)
        return full

    a = stored(k, m) if config.value("TRANS_A") else stored(m, k)
    b = stored(n, k) if config.value("TRANS_B") else stored(k, n)
    c = stored(m, n)
    if beta == 0:
        c[:] = poison
    return Problem(m, n, k, alpha, a, b, beta, c, order, shift)


def _wrong(config: Config, problem: Problem, result: np.ndarray) -> str:
    """What is wrong with a result; empty if nothing is."""
    p = problem
    wide = np.float64 if result.dtype.kind == "f" else np.int64
    a = (p.a[:, : p.m].T if config.value("TRANS_A") else p.a[:, : p.k]).astype(wide)
    b = (p.b[:, : p.k].T if config.value("TRANS_B") else p.b[:, : p.n]).astype(wide)
    old = p.beta * p.c[:, : p.n].astype(wide) if p.beta else np.zeros((p.m, p.n), wide)
    # k + 2 roundings of the kernel, and those of NumPy.
    eps = np.finfo(result.dtype).eps if result.dtype.kind == "f" else 0
    bound = 2 * (p.k + 3) * eps * (abs(p.alpha) * (abs(a) @ abs(b)) + abs(old))
    right = abs(result[:, : p.n] - (p.alpha * (a @ b) + old)) <= bound  # NaN is not right
    case = f"m={p.m} n={p.n} k={p.k} α={p.alpha} β={p.beta} ld={p.a.shape[1]} {p.order}"
    if not right.all():
        return f"{np.count_nonzero(~right)} elements, the first at {np.argwhere(~right)[0]}: {case}"
    if result[:, p.n :].tobytes() != p.c[:, p.n :].tobytes():
        return f"padding of C is written: {case}"
    return ""
