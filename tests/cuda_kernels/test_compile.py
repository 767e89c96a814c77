"""Configurations of kernels, and their compilation. No GPU is needed."""

import itertools
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ooc_gemm.cuda_kernels import catalog, preparations, tensor_tiles
from ooc_gemm.cuda_kernels import compile as compiler
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.support import cache as cache_folder
from ooc_gemm.support.errors import DeviceError

SETS = (("sm_75",), ("sm_80", "sm_86", "sm_89"), ("sm_90a",), ("sm_100", "sm_120"))
"""Architectures by the instructions that our kernels use: `__CUDA_ARCH__` is at least 800, 900 or 1000."""
KERNEL_SETS = (*SETS[:2], SETS[2] + SETS[3])
"""The same for kernels that multiply: only what goes before and after them looks at 1000."""
ARCHS = tuple(itertools.chain(*SETS))
TRANS = tuple(product((False, True), repeat=2))
SMALL = preparations.combine("rows")
"""Quick to compile, with a header."""


@pytest.fixture
def nvrtc() -> None:
    """Skips where NVRTC cannot be used."""
    try:
        compiler._version()
    except DeviceError as error:
        pytest.skip(f"no NVRTC: {error}")


# ---- configurations ----------------------------------------------------------------------------


def test_one_object_sets_defines_grid_threads_and_shared_memory() -> None:
    config = Config("some", "float64", 128, 64, (256, 1), (("ELEMENT", "double"), ("BM", 128)), 1000)
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
    return kernel.runs_on(int(arch.removeprefix("sm_").removesuffix("a")))


def _shipped(kernel: catalog.Kernel) -> list[Config]:
    """Every configuration, for all types and transpositions."""
    found = []
    for dtype, trans in product(kernel.dtypes, TRANS if kernel.transposes else TRANS[:1]):
        found += kernel.configs(dtype, *trans)
    return list(dict.fromkeys(found))


def _share(configs: Iterable[Config], arch: str, kernel: catalog.Kernel | None = None) -> list[Config]:
    """Those that are compiled for `arch`: architectures with the same instructions take turns, so that each
    configuration, of this kernel or of what goes with kernels, is compiled once for every set of them."""
    (alike,) = (archs for archs in (KERNEL_SETS if kernel else SETS) if arch in archs)
    turns = [it for it in alike if kernel is None or _runs_on(kernel, it)]
    return list(dict.fromkeys(configs))[turns.index(arch) :: len(turns)] if arch in turns else []


def _refused(configs: list[Config], arch: str) -> list[str]:
    """What the compiler says of those that do not compile, or spill registers."""

    def compiled(config: Config) -> str | None:
        try:
            compiler.compile_kernel(config, arch, check_spills=True)
        except DeviceError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        return [said for said in pool.map(compiled, configs) if said]


@pytest.mark.parametrize("name", catalog.KERNELS)
def test_every_configuration_is_compiled_for_every_set_of_instructions(name: str) -> None:
    kernel = catalog.KERNELS[name]
    configs = _shipped(kernel)
    for archs in KERNEL_SETS:
        shares = [_share(configs, arch, kernel) for arch in archs]
        wanted = configs if any(_runs_on(kernel, arch) for arch in archs) else []
        assert sorted(map(repr, itertools.chain(*shares))) == sorted(map(repr, wanted))


def test_architectures_of_a_set_have_the_same_source() -> None:
    bounds, of_kernels = set(), set()
    for path in compiler._kernels().glob("*/*.cu*"):
        text = path.read_text("utf-8")
        found = re.findall(r"__CUDA_ARCH__ (?:>=|<) (\d+)", text)
        assert text.count("__CUDA_ARCH__") == len(found) + text.count("defined(__CUDA_ARCH__)"), path
        bounds |= set(map(int, found))
        of_kernels |= set(map(int, found)) if path.parent.name != "prepare" else set()
    assert bounds > of_kernels > set()
    for sets, known in ((SETS, bounds), (KERNEL_SETS, of_kernels)):
        for archs in sets:
            numbers = [10 * int(arch.removeprefix("sm_").removesuffix("a")) for arch in archs]
            assert not any(min(numbers) < bound <= max(numbers) for bound in known)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("name", catalog.KERNELS)
def test_a_configuration_of_every_kernel_compiles_without_spills(name: str) -> None:
    kernel = catalog.KERNELS[name]
    arch = next(arch for arch in ("sm_80", "sm_90a") if _runs_on(kernel, arch))
    assert _refused(kernel.configs(kernel.dtypes[0], False, False)[-1:], arch) == []


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize(
    "config",
    [
        *(preparations.survey(k_inner) for k_inner in (False, True)),
        *(preparations.split(k_inner) for k_inner in (False, True)),
        *(preparations.transpose(name) for name in ("int8", "float16", "float32", "int64", "complex128")),
        preparations.narrow("float32", "float16"),
        preparations.narrow("int64", "uint64"),
        *(preparations.cut(size) for size in (2, 4, 8)),
        preparations.sum_slices("int64", "int32"),
        preparations.embed("rows"),
        preparations.embed("double n", True, False),
        preparations.embed("double k", True, True),
        preparations.combine("rows"),
        preparations.combine("pairs", True, False),
        preparations.combine("elements"),
        *(tensor_tiles.float64_sums(*trans)[0] for trans in TRANS),
        tensor_tiles.folded_sums()[0],
        *(preparations.scale(dtype) for dtype in ("float64", "complex128")),
        *(preparations.residues(dtype) for dtype in ("float64", "uint32")),
        preparations.residues("complex128", conjugate=True),
        *(preparations.recombine(dtype) for dtype in ("float64", "complex128")),
        preparations.recombine("int64", (9,)),
        preparations.embed("double k", True, False, dtype="complex128"),
        preparations.combine("elements", dtype="complex128"),
    ],
)
def test_preparations_compile_without_spills(config: Config, arch: str) -> None:
    if config.kernel == "dmma" and arch == "sm_75":
        pytest.skip("float64 tensor cores exist from compute capability 8.0")
    if config.kernel in ("scale", "survey", "split") and arch == "sm_75":
        pytest.skip("warps find the largest number from compute capability 8.0, which these products need")
    assert compiler.compile_kernel(config, arch, check_spills=True).startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("arch", "name"),
    [(arch, name) for arch in ARCHS for name, it in catalog.KERNELS.items() if _runs_on(it, arch)],
)
def test_shipped_kernels_compile_without_spills(arch: str, name: str) -> None:
    kernel = catalog.KERNELS[name]
    assert _refused(_share(_shipped(kernel), arch, kernel), arch) == []


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHS)
def test_checks_compile_without_spills(arch: str) -> None:
    assert _refused(_share(preparations.checks(), arch), arch) == []


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHS)
def test_transforms_and_reductions_compile_without_spills(arch: str) -> None:
    centres = (preparations.centre(dtype) for dtype in ("float32", "float64"))
    sums = preparations.sum_slices("float64", "float32")  # of passes
    configs = [*preparations.places(), *preparations.bests(), *preparations.all_pairs()]
    configs += preparations.standardizes()
    assert _refused(_share([*configs, *centres, sums], arch), arch) == []


@pytest.mark.usefixtures("nvrtc")
def test_a_transform_and_a_reduction_compile_without_spills() -> None:
    configs = [preparations.place("int8", "float32", turned) for turned in (False, True)]
    configs += [preparations.best("float32", "float32"), preparations.pairs("float16", "float16")]
    configs += [preparations.centre(dtype) for dtype in ("float32", "float64")]
    configs += preparations.standardizes()
    assert _refused(configs, "sm_90a") == []


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHS)
def test_conversions_of_c_compile_without_spills(arch: str) -> None:
    assert _refused(_share(preparations.narrows(), arch), arch) == []


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
def test_what_decodes_compiles_without_spills(arch: str, shared: int) -> None:
    configs = [preparations.decode(name, shared) for name in ("zstd", "blosc")]
    assert configs[0].shared_bytes <= shared
    assert _refused(_share(configs, arch), arch) == []


@pytest.mark.usefixtures("nvrtc")
def test_spills_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = """
    extern "C" __global__ void __launch_bounds__(1024) greedy(const double* x, double* y) {
        double v[64];
        for (int i = 0; i < 64; ++i) v[i] = x[i * threadIdx.x];
        for (int j = 0; j < 9; ++j) for (int i = 0; i < 64; ++i) v[i] += v[63 - i] * x[j];
        for (int i = 0; i < 64; ++i) y[i * threadIdx.x] = v[i];
    }"""
    monkeypatch.setattr(compiler, "kernel_source", lambda name: greedy)
    with pytest.raises(DeviceError, match=r"(?i)spill"):
        compiler.compile_kernel(replace(SMALL, kernel="greedy"), "sm_90a", check_spills=True)


@pytest.mark.usefixtures("nvrtc")
def test_second_compilation_is_read_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compiler.compile_kernel(SMALL, "sm_80")
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]
    with monkeypatch.context() as patch:
        patch.delattr(compiler, "_compile")
        assert compiler.compile_kernel(SMALL, "sm_80") == cubin
        with pytest.raises(NameError):
            compiler.compile_kernel(replace(SMALL, macros=(*SMALL.macros, ("MORE", 1))), "sm_80")
        with pytest.raises(NameError):
            compiler.compile_kernel(SMALL, "sm_86")


@pytest.mark.usefixtures("nvrtc", "cache")
def test_another_header_makes_another_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the cache contains the texts of the headers that a kernel includes."""
    included = compiler.headers(compiler.kernel_source(SMALL.kernel))
    assert "common/complex.cuh" in included
    before = compiler.compile_kernel(SMALL, "sm_80")
    monkeypatch.setattr(
        compiler, "_compile", lambda source, included, *rest: included["common/complex.cuh"].encode()
    )
    assert compiler.compile_kernel(SMALL, "sm_80") == before
    changed = included | {"common/complex.cuh": "another"}
    monkeypatch.setattr(compiler, "headers", lambda source: changed)
    assert compiler.compile_kernel(SMALL, "sm_80") == b"another"


def test_headers_are_shared_and_the_classical_ladder_needs_none() -> None:
    """Every header serves several kernels and includes none itself, which `headers` would not find."""
    folder = compiler._kernels()
    uses = {path: compiler.headers(path.read_text("utf-8")) for path in folder.glob("*/*.cu")}
    assert {path.parent.name for path in uses} == {"ladder", "production", "prepare"}
    for path in folder.glob("common/*"):
        assert path.suffix == ".cuh"
        assert "#include" not in path.read_text("utf-8")
        assert sum(f"common/{path.name}" in used for used in uses.values()) > 1, path
    for path, used in uses.items():
        assert path.read_text("utf-8").count("#include") == len(used), path
        assert path.parent.name != "ladder" or not used or catalog.KERNELS[path.stem].launcher == "rung"
    names = [path.name for path in uses]
    assert len(set(names)) == len(names), "kernels are found by their names alone"


@pytest.mark.usefixtures("nvrtc")
def test_damaged_cache_entry_is_replaced(cache: Path) -> None:
    cubin = compiler.compile_kernel(SMALL, "sm_80")
    (entry,) = cache.iterdir()
    entry.write_bytes(b"")
    assert compiler.compile_kernel(SMALL, "sm_80") == cubin
    assert entry.read_bytes() == cubin


@pytest.mark.usefixtures("nvrtc")
def test_unwritable_cache_is_no_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")  # permissions do not stop root
    assert compiler.compile_kernel(SMALL, "sm_80").startswith(b"\x7fELF")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("OOC_GEMM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder.folder() == Path("/home/somebody/.cache/ooc-gemm/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache_folder.folder() == Path("/scratch/ooc-gemm/kernels")
    monkeypatch.setenv("OOC_GEMM_CACHE", "/kernels")
    assert cache_folder.folder() == Path("/kernels")


@pytest.mark.usefixtures("nvrtc", "cache")
def test_broken_source_raises_with_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "kernel_source", lambda name: "__global__ void combine() { wrong; }")
    with pytest.raises(DeviceError, match=r'(?s)combine does not compile.*identifier "wrong" is undefined'):
        compiler.compile_kernel(SMALL, "sm_80")


def test_missing_source_raises() -> None:
    with pytest.raises(DeviceError, match=r"absent\.cu"):
        compiler.kernel_source("absent")


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler._version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"pip install 'ooc-gemm\[cuda13\]'"):
        compiler.compile_kernel(SMALL, "sm_80")
