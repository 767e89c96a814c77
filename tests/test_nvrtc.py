import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc_gemm import nvrtc
from ooc_gemm.errors import DeviceError

DTYPES = ("float32", "float64", "int64")
TRANS = tuple(product((False, True), repeat=2))
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
SMALL = nvrtc.Config("tiled", "float32", 32, 32, 4, 4, 4)
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
    config = nvrtc.Config("tiled", "float64", bm=128, bn=64, bk=8, tm=8, tn=4, trans_b=True)
    assert config.threads == 256
    assert config.shared_bytes == 2 * 8 * ((128 + 2) + (64 + 2)) * 8
    assert config.grid(129, 64) == (2,)
    assert config.grid(0, 5) == (0,)
    assert config.grid(65536 * 128, 64) == (65536,)
    assert set(config.defines) == {
        "-DELEMENT=double", "-DBM=128", "-DBN=64", "-DBK=8", "-DTM=8", "-DTN=4", "-DTRANS_A=0", "-DTRANS_B=1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"kernel": "../tiled"}, "name"),
        ({"bk": 0}, "positive"),
        ({"bm": 36, "tm": 8}, "multiples"),
        ({"tm": 2}, "those of 4"),
        ({"bm": 4}, "threads"),
        ({"bm": 128, "bn": 128}, "1024 threads"),
        ({"bk": 6}, "share"),
        ({"bm": 256, "bn": 256, "bk": 16, "tm": 16, "tn": 16}, "shared memory"),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_grid_refuses_more_blocks_than_a_launch_takes() -> None:
    with pytest.raises(ValueError, match="blocks"):
        SMALL.grid(2**31, 2**31)


def test_no_shipped_configuration_for_other_dtypes() -> None:
    with pytest.raises(ValueError, match="complex64"):
        nvrtc.tiled("complex64", False, False)


# ---- compilation -------------------------------------------------------------------------------


def _shipped() -> list[Any]:
    """Every architecture with every dtype, the transpositions in turn; on sm_90a all of them."""
    some = [
        (arch, dtype, *TRANS[(i + j) % 4]) for i, arch in enumerate(ARCHS) for j, dtype in enumerate(DTYPES)
    ]
    return sorted({*some, *(("sm_90a", dtype, *trans) for dtype in DTYPES for trans in TRANS)})


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("arch", "dtype", "trans_a", "trans_b"), _shipped())
def test_shipped_kernels_compile_without_spills(arch: str, dtype: str, trans_a: bool, trans_b: bool) -> None:
    cubin = nvrtc.compile(nvrtc.tiled(dtype, trans_a, trans_b), arch, check_spills=True)
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.usefixtures("compiler")
def test_spills_are_found() -> None:
    greedy = nvrtc.Config("tiled", "float64", 128, 128, 8, 8, 4)  # 512 threads: 64 registers for each
    with pytest.raises(DeviceError, match=r"(?i)spill"):
        nvrtc.compile(greedy, "sm_90a", check_spills=True)


@pytest.mark.usefixtures("compiler")
def test_second_compilation_is_read_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = nvrtc.compile(SMALL, "sm_80")
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]
    with monkeypatch.context() as patch:
        patch.delattr(nvrtc, "_compile")
        assert nvrtc.compile(SMALL, "sm_80") == cubin
        for other in (replace(SMALL, trans_a=True), replace(SMALL, bk=8)):
            with pytest.raises(NameError):
                nvrtc.compile(other, "sm_80")
        with pytest.raises(NameError):
            nvrtc.compile(SMALL, "sm_86")


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
    assert nvrtc._cache_dir() == Path("/home/somebody/.cache/ooc-gemm/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert nvrtc._cache_dir() == Path("/scratch/ooc-gemm/kernels")
    monkeypatch.setenv("OOC_GEMM_CACHE", "/kernels")
    assert nvrtc._cache_dir() == Path("/kernels")


@pytest.mark.usefixtures("compiler", "cache")
def test_broken_source_raises_with_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "kernel_source", lambda name: "__global__ void tiled() { wrong; }")
    with pytest.raises(DeviceError, match=r'(?s)tiled does not compile.*identifier "wrong" is undefined'):
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

    def __call__(self, grid: Any, block: Any, args: Any, **kwargs: Any) -> None:
        self.calls.append((grid, block, args, kwargs))


def test_launch_passes_typed_arguments() -> None:
    function = _Recorder()
    nvrtc.launch(function, SMALL, 33, 32, 0, 2, 256, 5, 512, 6, 0.5, 2**63, 7, stream="s")
    ((grid, block, args, kwargs),) = function.calls
    assert (grid, block, kwargs) == ((2,), (64,), {"stream": "s"})
    assert [arg.dtype.char for arg in args] == ["l", "l", "l", "f", "L", "l", "L", "l", "f", "L", "l"]
    assert args == (33, 32, 0, 2, 256, 5, 512, 6, 0.5, 2**63, 7)


def test_nothing_is_launched_for_an_empty_result() -> None:
    function = _Recorder()
    nvrtc.launch(function, SMALL, 0, 32, 8, 1, 0, 8, 0, 32, 0, 0, 32, stream=None)
    nvrtc.launch(function, SMALL, 32, 0, 8, 1, 0, 8, 0, 1, 0, 0, 1, stream=None)
    assert function.calls == []


def test_int64_takes_integer_factors_only() -> None:
    with pytest.raises(ValueError, match="integers"):
        nvrtc.launch(_Recorder(), nvrtc.tiled("int64", False, False), 1, 1, 1, 0.5, 0, 1, 0, 1, 0, 0, 1, None)


SHAPES = (
    (1, 1, 1), (2, 3, 2), (3, 17, 129), (17, 2, 3), (129, 257, 17), (257, 129, 8), (128, 128, 64),
    (130, 1, 257), (1, 258, 9), (129, 130, 0), (4100, 5, 7), (5, 4100, 7),
)  # fmt: skip
FACTORS = ((1, 0), (2, -3), (-1, 1), (0, 2))


@pytest.mark.gpu
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiled_agrees_with_numpy(cupy: Any, dtype: str, trans_a: bool, trans_b: bool) -> None:
    config = nvrtc.tiled(dtype, trans_a, trans_b)
    function = nvrtc.load(nvrtc.compile(config, _arch(cupy)), config.kernel)
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
        case = f"m={m} n={n} k={k} α={alpha} β={beta} pad={pad}"
        # Written so that NaN fails.
        assert (abs(c[:, :n] - want) <= bound).all(), case
        assert np.array_equal(c[:, n:], before[:, n:], equal_nan=dtype != "int64"), f"padding of C, {case}"


def _arch(cupy: Any) -> str:
    capability = cupy.cuda.Device().compute_capability
    return f"sm_{capability}" + ("a" if capability == "90" else "")


def _poison(dtype: str) -> float:
    return np.iinfo(dtype).max // 3 if dtype == "int64" else np.nan


def _stored(rng: np.random.Generator, shape: tuple[int, int], pad: int, dtype: str) -> np.ndarray:
    """Random rows, with `pad` poisoned columns to their right."""
    rows, cols = shape
    full = np.full((rows, cols + pad), _poison(dtype), dtype)
    random = rng.integers(-(2**25), 2**25, shape) if dtype == "int64" else rng.standard_normal(shape)
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
    wide = np.int64 if a.dtype == np.int64 else np.float64
    left = (a[:, :m].T if ta else a[:, :k]).astype(wide)
    right = (b[:, :k].T if tb else b[:, :n]).astype(wide)
    old = c[:, :n].astype(wide) * beta if beta else np.zeros((m, n), wide)
    want = alpha * (left @ right) + old
    if wide is np.int64:
        return want, 0
    return want, 2 * (k + 3) * np.finfo(a.dtype).eps * (abs(alpha) * (abs(left) @ abs(right)) + abs(old))
