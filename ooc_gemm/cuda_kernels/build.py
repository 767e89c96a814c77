"""Compiles the kernels that come with the package, for common architectures. `make wheel` runs this file,
which writes what precompiled.py reads. It needs NVRTC, and no GPU."""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from os import cpu_count
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from . import preparations, tensor_tiles
from .catalog import KERNELS
from .compile import compile_uncached
from .config import Config
from .fallback import FLOAT64_AT_FULL_RATE
from .ffma import ffma, guarded
from .precompiled import FOLDER, name_of

ARCHITECTURES = "sm_80", "sm_90a", "sm_100", "sm_120"
_SHARED_KIB = {"sm_80": 163, "sm_90a": 227, "sm_100": 227, "sm_120": 99}
"""KiB of shared memory that a thread block may have (CUDA C Programming Guide, technical specifications)."""
_TRANS = tuple(product((False, True), repeat=2))


def shipped(arch: str) -> list[Config]:
    """Return the configurations that come with the package for an architecture: those that products choose
    without being told, and all that prepares and finishes them."""
    number = int(arch.removeprefix("sm_").removesuffix("a"))
    found = [*_products(number), *_fallbacks(str(number)), *_preparations()]
    found += [preparations.decode(name, _SHARED_KIB[arch] << 10) for name in ("zstd", "blosc")]
    if KERNELS["ozaki2"].runs_on(number):
        found += _residues()
    return list(dict.fromkeys(found))


def _products(number: int) -> Iterator[Config]:
    """Yield the kernels of products."""
    for kernel in KERNELS.values():
        in_ladder = kernel.launcher in ("launch", "rung") and kernel.name != "ffma"
        if in_ladder or not kernel.runs_on(number):
            continue
        if number == 90 and kernel.name in ("mma-fp16x3", "mma-fp16", "mma-int8"):
            continue  # wgmma takes their place
        for dtype, trans in product(kernel.dtypes, _TRANS):
            yield from kernel.configs(dtype, *trans)
    for unsigned in ((False, True), (True, False)):  # integers of both kinds in one product
        yield from (tensor_tiles.wgmma if number == 90 else tensor_tiles.mma)("int8", False, False, *unsigned)


def _fallbacks(capability: str) -> Iterator[Config]:
    """Yield the kernels that replace fp16x3 where it would be inaccurate."""
    for trans in _TRANS:
        if capability in FLOAT64_AT_FULL_RATE:
            yield from tensor_tiles.float64_sums(*trans)
        else:
            yield from map(guarded, ffma("float32", *trans))


def _preparations() -> Iterator[Config]:
    """Yield the kernels that run before and after products."""
    yield from map(preparations.survey, (False, True))
    yield from map(preparations.split, (False, True))
    for sums in ("float32", "float64", "int32", "int64"):
        yield preparations.sum_slices(sums)
    for sums, part in (("int64", "int32"), ("float64", "float32")):
        yield preparations.sum_slices(sums, part)
    yield from map(preparations.cut, (2, 4, 8))
    for conjugate in _TRANS:
        for mode in ("rows", "double n", "double k"):
            yield preparations.embed(mode, *conjugate)
        for rows in ("rows", "pairs", "elements"):
            yield preparations.combine(rows, *conjugate)
    for dtype in ("int8", "float16", "float32", "float64", "complex128"):  # of each size
        yield preparations.transpose(dtype)
    yield from map(preparations.centre, ("float32", "float64"))
    p = preparations
    for several in (p.checks, p.narrows, p.places, p.bests, p.all_pairs, p.standardizes):
        yield from several()


def _residues() -> Iterator[Config]:
    """Yield what runs before and after products of residues of floating-point numbers, and in their place."""
    yield from tensor_tiles.folded_sums()
    for dtype in ("float64", "complex128"):
        yield preparations.scale(dtype)
        yield preparations.residues(dtype)
        yield preparations.recombine(dtype)
    yield preparations.residues("complex128", conjugate=True)
    yield preparations.combine("elements", dtype="complex128")
    for conjugate in _TRANS:
        yield preparations.embed("double k", *conjugate, dtype="complex128")


def build(
    folder: Path, arch: str, configs: Iterable[Config], report: Callable[[str], object] = lambda text: None
) -> Path:
    """Compile kernels for an architecture into an archive in a folder, which is made if it is missing.
    Returns its path. Raises DeviceError if the compiler is missing or reports errors, and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path, configs = folder / f"{arch}.zip", list(configs)
    with (
        ThreadPoolExecutor(cpu_count()) as pool,
        ZipFile(path, "w", ZIP_DEFLATED, compresslevel=9) as archive,
    ):
        for config, cubin in zip(
            configs, pool.map(lambda config: compile_uncached(config, arch), configs), strict=True
        ):
            archive.writestr(name_of(config, arch), cubin)
    report(f"{path.name}: {len(configs)} kernels, {path.stat().st_size / 2**20:.1f} MiB")
    return path


if __name__ == "__main__":
    for architecture in sys.argv[1:] or ARCHITECTURES:
        build(FOLDER, architecture, shipped(architecture), print)
