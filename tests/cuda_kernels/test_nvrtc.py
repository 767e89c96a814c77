import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc_gemm.cuda_kernels import catalog, nvrtc, preparations
from ooc_gemm.support import cache as cache_folder
from ooc_gemm.support.errors import DeviceError

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
TRANS = tuple(product((False, True), repeat=2))
SMALL = catalog.ffma("float32", False, False)[-1]
"""Quick to compile."""


@pytest.fixture
def compiler() -> None:
    """Skips where NVRTC cannot be used."""
    try:
        nvrtc._version()
    except DeviceError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty kernel cache; not created yet."""
    monkeypatch.setenv("OOC_GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cupy() -> Any:
    """CuPy, on a machine with a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about machines without CUDA
        try:
            import cupy

            count = cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            pytest.skip(f"no CUDA device: {error}")
    if count == 0:
        pytest.skip("no CUDA device")
    return cupy


# ---- configurations ----------------------------------------------------------------------------


def test_one_object_sets_defines_grid_threads_and_shared_memory() -> None:
    config = nvrtc.Config("some", "float64", 128, 64, (256, 1), (("ELEMENT", "double"), ("BM", 128)), 1000)
    assert config.defines == ("-DELEMENT=double", "-DBM=128")
    assert (config.value("BM"), config.value("BN")) == (128, 0)
    assert config.grid(129, 64) == (2,)
    assert config.grid(0, 5) == (0,)
    assert config.grid(65536 * 128, 64) == (65536,)


def test_config_refuses_what_is_no_kernel() -> None:
    with pytest.raises(ValueError, match="name"):
        replace(SMALL, kernel="../ffma")


# ---- compilation -------------------------------------------------------------------------------


def _runs_on(kernel: catalog.Kernel, arch: str) -> bool:
    number = int(arch.removeprefix("sm_").removesuffix("a"))
    return kernel.min_arch <= number and kernel.only_arch in (None, number)


def _shipped(kernel: catalog.Kernel) -> list[nvrtc.Config]:
    """Every configuration, for all types and transpositions."""
    found = []
    for dtype, trans in product(kernel.dtypes, TRANS if kernel.transposes else TRANS[:1]):
        found += kernel.configs(dtype, *trans)
    return list(dict.fromkeys(found))


def _refused(configs: list[nvrtc.Config], arch: str) -> list[str]:
    """What the compiler says of those that do not compile, or spill registers."""

    def compiled(config: nvrtc.Config) -> str | None:
        try:
            nvrtc.compile(config, arch, check_spills=True)
        except DeviceError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        return [said for said in pool.map(compiled, configs) if said]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", catalog.KERNELS)
def test_a_configuration_of_every_kernel_compiles_without_spills(name: str) -> None:
    kernel = catalog.KERNELS[name]
    arch = next(arch for arch in ("sm_80", "sm_90a") if _runs_on(kernel, arch))
    assert _refused(kernel.configs(kernel.dtypes[0], False, False)[-1:], arch) == []


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("arch", "name"),
    [(arch, name) for arch in ARCHS for name, it in catalog.KERNELS.items() if _runs_on(it, arch)],
)
def test_shipped_kernels_compile_without_spills(arch: str, name: str) -> None:
    assert _refused(_shipped(catalog.KERNELS[name]), arch) == []


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ARCHS)
def test_checks_compile_without_spills(arch: str) -> None:
    assert _refused(list(dict.fromkeys(preparations.checks())), arch) == []


@pytest.mark.usefixtures("compiler")
def test_spills_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = """
    extern "C" __global__ void __launch_bounds__(1024) greedy(const double* x, double* y) {
        double v[64];
        for (int i = 0; i < 64; ++i) v[i] = x[i * threadIdx.x];
        for (int j = 0; j < 9; ++j) for (int i = 0; i < 64; ++i) v[i] += v[63 - i] * x[j];
        for (int i = 0; i < 64; ++i) y[i * threadIdx.x] = v[i];
    }"""
    monkeypatch.setattr(nvrtc, "kernel_source", lambda name: greedy)
    with pytest.raises(DeviceError, match=r"(?i)spill"):
        nvrtc.compile(replace(SMALL, kernel="greedy"), "sm_90a", check_spills=True)


@pytest.mark.usefixtures("compiler")
def test_second_compilation_is_read_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = nvrtc.compile(SMALL, "sm_80")
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]
    with monkeypatch.context() as patch:
        patch.delattr(nvrtc, "_compile")
        assert nvrtc.compile(SMALL, "sm_80") == cubin
        with pytest.raises(NameError):
            nvrtc.compile(replace(SMALL, macros=(*SMALL.macros, ("MORE", 1))), "sm_80")
        with pytest.raises(NameError):
            nvrtc.compile(SMALL, "sm_86")


@pytest.mark.usefixtures("compiler", "cache")
def test_another_header_makes_another_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the cache contains the texts of the headers that a kernel includes."""
    included = nvrtc.headers(nvrtc.kernel_source(SMALL.kernel))
    assert "common/types.cuh" in included
    before = nvrtc.compile(SMALL, "sm_80")
    monkeypatch.setattr(
        nvrtc, "_compile", lambda source, included, *rest: included["common/types.cuh"].encode()
    )
    assert nvrtc.compile(SMALL, "sm_80") == before
    changed = included | {"common/types.cuh": "another"}
    monkeypatch.setattr(nvrtc, "headers", lambda source: changed)
    assert nvrtc.compile(SMALL, "sm_80") == b"another"


def test_headers_are_shared_and_the_ladder_needs_none() -> None:
    """Every header serves several kernels and includes none itself, which `headers` would not find."""
    folder = nvrtc._kernels()
    uses = {path: nvrtc.headers(path.read_text("utf-8")) for path in folder.glob("*/*.cu")}
    assert {path.parent.name for path in uses} == {"ladder", "production", "prepare"}
    for path in folder.glob("common/*"):
        assert path.suffix == ".cuh"
        assert "#include" not in path.read_text("utf-8")
        assert sum(f"common/{path.name}" in used for used in uses.values()) > 1, path
    for path, used in uses.items():
        assert path.read_text("utf-8").count("#include") == len(used), path
        assert path.parent.name != "ladder" or not used
    names = [path.name for path in uses]
    assert len(set(names)) == len(names), "kernels are found by their names alone"


@pytest.mark.usefixtures("compiler")
def test_damaged_cache_entry_is_replaced(cache: Path) -> None:
    cubin = nvrtc.compile(SMALL, "sm_80")
    (entry,) = cache.iterdir()
    entry.write_bytes(b"")
    assert nvrtc.compile(SMALL, "sm_80") == cubin
    assert entry.read_bytes() == cubin


@pytest.mark.usefixtures("compiler")
def test_unwritable_cache_is_no_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")  # permissions do not stop root
    assert nvrtc.compile(SMALL, "sm_80").startswith(b"\x7fELF")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("OOC_GEMM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder.folder() == Path("/home/somebody/.cache/ooc-gemm/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache_folder.folder() == Path("/scratch/ooc-gemm/kernels")
    monkeypatch.setenv("OOC_GEMM_CACHE", "/kernels")
    assert cache_folder.folder() == Path("/kernels")


@pytest.mark.usefixtures("compiler", "cache")
def test_broken_source_raises_with_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "kernel_source", lambda name: "__global__ void ffma() { wrong; }")
    with pytest.raises(DeviceError, match=r'(?s)ffma does not compile.*identifier "wrong" is undefined'):
        nvrtc.compile(SMALL, "sm_80")


def test_missing_source_raises() -> None:
    with pytest.raises(DeviceError, match=r"absent\.cu"):
        nvrtc.kernel_source("absent")


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc._version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"pip install 'ooc-gemm\[cuda13\]'"):
        nvrtc.compile(SMALL, "sm_80")


# ---- launching ---------------------------------------------------------------------------------


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *call: Any) -> None:
        self.calls.append(call)


def test_launch_passes_typed_arguments() -> None:
    function = _Recorder()
    config = nvrtc.Config("some", "float32", 32, 32, (64, 1), ())
    nvrtc.launch(function, config, 33, 32, 0, 2, 256, 5, 512, 6, 0.5, 2**63, 7, stream="s")
    ((grid, block, args, stream, shared),) = function.calls
    assert (grid, block, shared, stream) == ((2,), (64, 1), 0, "s")
    assert [arg.dtype.char for arg in args] == ["l", "l", "l", "f", "L", "l", "L", "l", "f", "L", "l"]
    assert args == (33, 32, 0, 2, 256, 5, 512, 6, 0.5, 2**63, 7)


def test_nothing_is_launched_for_an_empty_result() -> None:
    function = _Recorder()
    nvrtc.launch(function, SMALL, 0, 32, 8, 1, 0, 8, 0, 32, 0, 0, 32, stream=None)
    nvrtc.launch(function, SMALL, 32, 0, 8, 1, 0, 8, 0, 1, 0, 0, 1, stream=None)
    assert function.calls == []


def test_int64_takes_integer_factors_only() -> None:
    with pytest.raises(ValueError, match="integers"):
        nvrtc.launch(_Recorder(), replace(SMALL, dtype="int64"), 1, 1, 1, 0.5, 0, 1, 0, 1, 0, 0, 1, None)


SHAPES = (
    (1, 1, 1), (2, 3, 2), (3, 17, 129), (17, 2, 3), (129, 257, 17), (257, 129, 8), (128, 128, 64),
    (130, 1, 257), (1, 258, 9), (129, 130, 0), (4100, 5, 7), (5, 4100, 7),
)  # fmt: skip
FACTORS = ((1, 0), (2, -3), (-1, 1), (0, 2))
LAUNCHED = [
    (name, dtype, *trans)
    for name, kernel in catalog.KERNELS.items()
    if kernel.launcher == "nvrtc" and kernel.transposes  # the ladder: test_ladder.py
    for dtype in kernel.dtypes
    for trans in (TRANS if kernel.transposes else TRANS[:1])
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype", "trans_a", "trans_b"), LAUNCHED)
def test_kernel_agrees_with_numpy(cupy: Any, name: str, dtype: str, trans_a: bool, trans_b: bool) -> None:
    arch = nvrtc.arch_of(cupy.cuda.Device().compute_capability)
    for config in catalog.KERNELS[name].configs(dtype, trans_a, trans_b):
        function = nvrtc.load(nvrtc.compile(config, arch), config)
        rng = np.random.default_rng(5)
        for (m, n, k), (alpha, beta), pad in product(SHAPES, FACTORS, (0, 3)):
            a = _stored(rng, (k, m) if trans_a else (m, k), pad, dtype)
            b = _stored(rng, (n, k) if trans_b else (k, n), pad, dtype)
            c = _stored(rng, (m, n), pad, dtype)
            if beta == 0:
                c[:] = _poison(dtype)
            before = c.copy()
            with cupy.cuda.Stream(non_blocking=True) as stream:
                da, db, dc = (cupy.asarray(x) for x in (a, b, c))
                left, right, out = ((x.data.ptr, x.shape[1]) for x in (da, db, dc))
                nvrtc.launch(function, config, m, n, k, alpha, *left, *right, beta, *out, stream)
                c = dc.get(stream=stream)
                stream.synchronize()
            want, bound = _oracle(a, b, before, m, n, k, alpha, beta, trans_a, trans_b)
            case = f"{config} m={m} n={n} k={k} α={alpha} β={beta} pad={pad}"
            # Written so that NaN fails.
            assert (abs(c[:, :n] - want) <= bound).all(), case
            assert np.array_equal(c[:, n:], before[:, n:], equal_nan=dtype[0] == "f"), f"padding of C, {case}"


def _poison(dtype: str) -> float:
    return np.nan if dtype[0] == "f" else np.iinfo(dtype).max // 3


def _stored(rng: np.random.Generator, shape: tuple[int, int], pad: int, dtype: str) -> np.ndarray:
    """Random rows, with `pad` poisoned columns to their right."""
    rows, cols = shape
    full = np.full((rows, cols + pad), _poison(dtype), dtype)
    largest = {"int32": 2**9, "int64": 2**25}.get(dtype)
    random = rng.standard_normal(shape) if largest is None else rng.integers(-largest, largest, shape)
    full[:, :cols] = random
    return full


def _oracle(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    m: int,
    n: int,
    k: int,
    alpha: int,
    beta: int,
    ta: bool,
    tb: bool,
) -> tuple[np.ndarray, np.ndarray | int]:
    """The result by NumPy in float64 or int64, and how far each element may be from it: the rounding
    of k + 2 operations on magnitudes, and the oracle's own."""
    wide = np.int64 if a.dtype.kind == "i" else np.float64
    left = (a[:, :m].T if ta else a[:, :k]).astype(wide)
    right = (b[:, :k].T if tb else b[:, :n]).astype(wide)
    old = c[:, :n].astype(wide) * beta if beta else np.zeros((m, n), wide)
    want = alpha * (left @ right) + old
    if wide is np.int64:
        return want, 0
    return want, 2 * (k + 3) * np.finfo(a.dtype).eps * (abs(alpha) * (abs(left) @ abs(right)) + abs(old))
