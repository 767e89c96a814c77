"""The kernels that there are, and which configuration of one is chosen for a shape."""

import pytest

from ooc_gemm.cuda_kernels import catalog, ffma
from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.cuda_kernels.tensor_tiles import choose_mma, choose_wgmma, dmma, mma, wgmma

MMA = {
    "dmma": "float64",
    "mma-fp16x3": "float32",
    "mma-fp16": "float16",
    "mma-tf32": "float32",
    "mma-int8": "int8",
}
"""Kernels that use the tensor cores as a warp does, and a type of their operands."""


@pytest.mark.parametrize("kind", ["fp16x3", "fp16", "tf32", "int8"])
def test_wgmma_is_chosen_to_fill_the_device(kind: str) -> None:
    configs = wgmma(kind, False, False)
    thin = configs[2:] if kind != "fp16x3" else []
    wide, *middle, narrow = configs[: len(configs) - len(thin)]
    assert choose_wgmma(configs, 8192, 8192, 8192, 132) == (wide, 1)
    for config in middle:  # 4096³ in the largest tiles leaves more multiprocessors idle in the last round
        assert choose_wgmma(configs, 4096, 4096, 4096, 132) == (config, 1)
    assert choose_wgmma(configs, 131072, 64, 4096, 132) == (narrow, 1)
    assert choose_wgmma(configs, 8192, 8192, 64, 132) == (wide, 1)
    assert choose_wgmma(configs, 1024, 1024, 1024, 132)[0] == narrow
    if thin:
        for m, n in ((64, 8192), (8192, 64), (1, 8192)):
            assert choose_wgmma(configs, m, n, 8192, 132) == (thin[0], 1)
        assert choose_wgmma(configs, 64, 1024, 65536, 132) == (thin[0], 8)
    config, slices = choose_wgmma(configs, 256, 256, 65536, 132)
    assert slices * config.grid(256, 256)[0] >= 60
    assert choose_wgmma(configs, 256, 256, 64, 132)[1] == 1


def test_an_unknown_kind_of_wgmma_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16"):
        wgmma("bf16", False, False)


@pytest.mark.parametrize("kernel", MMA)
@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (64, 64, 8192), (1, 5000, 0)])
def test_something_fits_the_smallest_multiprocessor(kernel: str, shape: tuple[int, int, int]) -> None:
    configs = catalog.KERNELS[kernel].configs(MMA[kernel], False, False)
    config, slices = choose_mma(configs, *shape, 84, shared=100 << 10)
    assert 0 < config.shared_bytes <= 99 << 10
    assert 1 <= slices <= max(1, shape[2] // 256)


def test_mma_is_chosen_to_fill_the_device() -> None:
    configs = dmma("float64", False, False)
    large, small = (
        choose_mma(configs, 8192, 8192, 8192, 132),
        choose_mma(configs, 512, 512, 512, 132),
    )
    assert large == (configs[0], 1)
    assert small[0].bm * small[0].bn < large[0].bm * large[0].bn
    config, slices = choose_mma(configs, 64, 64, 65536, 132)
    assert slices * config.grid(64, 64)[0] >= 100
    assert choose_mma(configs, 64, 64, 64, 132)[1] == 1


def test_an_unknown_kind_of_mma_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16"):
        mma("bf16", False, False)


def test_ffma_is_chosen_by_shape() -> None:
    configs = ffma.ffma("float32", False, False)

    def chosen(*shape: int) -> Config:
        return ffma.choose_ffma(configs, *shape, 132)

    assert chosen(8192, 8192, 8192) == configs[0]
    assert chosen(131072, 64, 4096).bn == 64  # no half-empty tiles
    assert chosen(512, 512, 8192).value("SPLIT") > 1  # few tiles
    assert chosen(4096, 4096, 64).value("SPLIT") == 1


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_there_are_kernels_for_every_architecture(arch: int) -> None:
    found = [it for it in catalog.KERNELS.values() if it.min_arch <= arch and it.only_arch in (None, arch)]
    configs = [config for it in found for dtype in it.dtypes for config in it.configs(dtype, False, False)]
    assert {config.kernel for config in configs} >= {"ffma", "tiled"}
