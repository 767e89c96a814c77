"""Kernels that come compiled with the package. No GPU is needed."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import cupy_on_cpu
import numpy as np
import pytest

import ooc_gemm
from ooc_gemm.cuda_kernels import build, launch, precompiled, preparations
from ooc_gemm.cuda_kernels import compile as compiler
from ooc_gemm.support.errors import DeviceError

FIRST, SECOND, THIRD = (preparations.combine(rows) for rows in ("rows", "pairs", "elements"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the package looks for archives: empty."""
    monkeypatch.setattr(precompiled, "FOLDER", tmp_path)
    precompiled._archive.cache_clear()
    yield tmp_path
    precompiled._archive.cache_clear()


@pytest.fixture
def archive(folder: Path) -> Path:
    """An archive with two kernels for sm_80."""
    try:
        compiler._version()
    except DeviceError as error:
        pytest.skip(f"no NVRTC: {error}")
    said: list[str] = []
    path = build.build(folder, "sm_80", [FIRST, SECOND], said.append)
    assert said == [f"sm_80.zip: 2 kernels, {path.stat().st_size / 2**20:.1f} MiB"]
    return path


def test_what_was_compiled_is_found(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (FIRST, SECOND):
        cubin = compiler.compile_uncached(config, "sm_80")
        assert cubin.startswith(b"\x7fELF")
        for arch in ("sm_80", "sm_86", "sm_89"):
            assert precompiled.precompiled(config, arch) == cubin
    assert precompiled.precompiled(THIRD, "sm_80") is None
    assert precompiled.precompiled(FIRST, "sm_90a") is None
    text = compiler.kernel_source(FIRST.kernel)
    monkeypatch.setattr(compiler, "kernel_source", lambda name: text + "\n")
    assert precompiled.precompiled(FIRST, "sm_80") is None, "the source has changed since"


def test_a_damaged_archive_is_as_good_as_none(archive: Path) -> None:
    whole = archive.read_bytes()
    for damaged in (whole[:100], b"", whole[:40] + bytes(2000) + whole[2040:]):
        archive.write_bytes(damaged)
        precompiled._archive.cache_clear()
        assert precompiled.precompiled(FIRST, "sm_80") is None


def test_nothing_is_there_in_a_checkout(folder: Path) -> None:
    assert precompiled.precompiled(FIRST, "sm_80") is None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bytes, tuple[str, ...]]]]:
    """What is loaded on a stand-in for a GPU, whose driver refuses machine code that begins with "new"."""
    load, loaded = launch.load, []
    cupy_on_cpu.install(monkeypatch)
    monkeypatch.setattr(launch, "load", load)
    from cupy.cuda import driver

    def take(cubin, config, *names):
        if cubin.startswith(b"new"):
            raise driver.CUDADriverError
        loaded.append((cubin, names))
        return {}

    monkeypatch.setattr(launch, "load_module", take)
    launch._loaded.cache_clear()
    yield loaded
    launch._loaded.cache_clear()


def test_a_kernel_of_the_package_is_loaded_before_the_cache_is_asked(device, monkeypatch) -> None:
    monkeypatch.setattr(launch, "cached_kernel", lambda config, arch: pytest.fail("the cache was asked"))
    monkeypatch.setattr(launch, "precompiled", lambda config, arch: f"of {arch}".encode())
    launch.load(FIRST, "a", "b")
    assert device == [(b"of sm_90a", ("a", "b"))]


def test_a_driver_that_is_too_old_for_it_takes_what_is_compiled_here(device, monkeypatch) -> None:
    monkeypatch.setattr(launch, "precompiled", lambda config, arch: b"newer than the driver")
    monkeypatch.setattr(launch, "cached_kernel", lambda config, arch: b"from the cache")
    launch.load(FIRST)
    assert device == [(b"from the cache", ())]


REAL = "f2", "f4", "f8", "i1", "u1", "i2", "i4", "i8"
PRODUCTS = (
    *((dtype, dtype, {}) for dtype in (*REAL, "c8", "c16")),
    ("i1", "u1", {}),
    ("u1", "i1", {}),
    ("i1", "f4", {}),
    ("f4", "f4", {"out_dtype": "float16"}),
    *((dtype, "f4", {"center": "rows"}) for dtype in REAL),
    *(("f4", "f4", {"kernel": kernel}) for kernel in ("fp16x3", "mma-fp16x3", "ffma")),
    *(("f4", "f4", {"precision": "medium", "kernel": kernel}) for kernel in ("tf32", "mma-tf32")),
    *(("f2", "f2", {"kernel": kernel}) for kernel in ("fp16", "mma-fp16")),
    *(("f8", "f8", {"kernel": kernel}) for kernel in ("dmma", "ffma")),
    ("c8", "c8", {"kernel": "fp16x3"}),
    ("i2", "i2", {"kernel": "int8"}),
    *((dtype, dtype, {"kernel": "ozaki2"}) for dtype in ("f8", "c16")),
)
"""Types of A and B, and options; `center` is one of A."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["90", "80", "120"])
def test_products_need_no_kernel_that_does_not_come_with_the_package(monkeypatch, capability) -> None:
    cupy_on_cpu.install(monkeypatch, capability)
    needed = set()

    class Noting(cupy_on_cpu.Kernel):
        def __init__(self, config, name):
            needed.add(config)
            super().__init__(config, name)

        def __call__(self, *args):
            """Computes nothing: the stand-in does not know all of them."""

    monkeypatch.setattr(cupy_on_cpu, "Kernel", Noting)
    for (a, b, options), transposed in itertools.product(PRODUCTS, (False, True)):
        x, y = (np.ones((40, 40), dtype) for dtype in (a, b))
        x = ooc_gemm.Operand(x, center=options.get("center"))
        options = {name: value for name, value in options.items() if name != "center"}
        hopper, others = ("fp16x3", "tf32", "fp16", "int8", "ozaki2"), ("mma-fp16x3", "mma-fp16")
        if options.get("kernel") in (others if capability == "90" else hopper):
            continue
        options |= {"transpose_a": transposed, "transpose_b": not transposed}
        ooc_gemm.multiply(x, y, device="cuda", **options)
    arch = compiler.arch_of(capability)
    assert {"split", "ffma", "place", "narrow", "transpose"} < {config.kernel for config in needed}
    shipped = {precompiled.name_of(config, arch) for config in build.shipped(arch)}
    assert [config for config in needed if precompiled.name_of(config, arch) not in shipped] == []
