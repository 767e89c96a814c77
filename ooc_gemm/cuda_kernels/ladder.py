"""Configurations of the kernels in kernels/ladder/, which take A and B as stored."""

from collections.abc import Callable

from .config import C_TYPE, Config


def naive(coalesced: bool) -> Callable[[str, bool, bool], list[Config]]:
    """Return `Kernel.configs` of kernels/ladder/naive.cu. `coalesced`: whether warps lie along the rows of
    C."""

    def configs(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
        macros = (("ELEMENT", C_TYPE[dtype]), ("BM", 32), ("BN", 32), ("COALESCED", int(coalesced)))
        return [Config("naive", dtype, 32, 32, (32, 32), macros)]

    return configs


_TILED = ((64, 32, 8), (64, 16, 16), (64, 64, 4), (32, 16, 16), (32, 32, 8), (32, 32, 32), (16, 16, 16))
"""TILE, BLOCK_X, BLOCK_Y; the fastest of each dtype before its others."""


def tiled(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
    """Return the configurations of kernels/ladder/tiled.cu, as `Kernel.configs` does."""
    found = []
    for tile, x, y in _TILED:
        macros: dict[str, int | str] = {
            "ELEMENT": C_TYPE[dtype], "TILE": tile, "BLOCK_X": x, "BLOCK_Y": y
        }  # fmt: skip
        if tile <= 32 or dtype != "float64":  # two tiles of 64 would need 64 KiB
            found.append(Config("tiled", dtype, tile, tile, (x, y), tuple(macros.items())))
    return found


_LADDER: dict[str, tuple[tuple[str, ...], dict[str, list[tuple[int, ...]]]]] = {
    # kernel: names of its macros, {dtype: their values, the fastest first}; "" is any other dtype
    "microtile": (
        ("BM", "BN", "BK", "TM"),
        {"": [(64, 32, 32, 16), (64, 64, 16, 16)], "float64": [(64, 64, 32, 16)]},
    ),
    "register_block": (
        ("BM", "BN", "BK", "TM", "TN"),
        {"": [(128, 128, 16, 8, 8), (64, 64, 32, 4, 4)], "float64": [(64, 64, 32, 8, 4)]},
    ),
    "rectangular": (
        ("BM", "BN", "BK", "TM", "TN"),
        {"": [(64, 128, 16, 16, 4), (64, 128, 32, 8, 4)], "float64": [(64, 128, 16, 8, 4)]},
    ),
    "vectorized": (
        ("BM", "BN", "BK", "TM", "TN"),
        {"": [(128, 128, 16, 8, 8), (64, 128, 16, 8, 8)], "float64": [(64, 64, 16, 8, 4)]},
    ),
    "warptile": (
        ("BM", "BN", "BK", "WM", "WN", "TM", "TN"),
        {
            "": [(128, 128, 16, 64, 32, 8, 8), (64, 128, 16, 32, 64, 8, 8)],
            "float64": [(64, 64, 16, 32, 32, 8, 4)],
        },
    ),
}


def rung(kernel: str) -> Callable[[str, bool, bool], list[Config]]:
    """Return `Kernel.configs` of a rung whose threads compute several elements each."""
    names, known = _LADDER[kernel]

    def configs(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
        found = []
        for values in known.get(dtype, known[""]):
            size = dict(zip(names, values, strict=True))
            threads = size["BM"] // size["TM"] * (size["BN"] // size.get("TN", 1))
            macros: dict[str, int | str] = {"ELEMENT": C_TYPE[dtype], **size}
            found.append(Config(kernel, dtype, size["BM"], size["BN"], (threads, 1), tuple(macros.items())))
        return found

    return configs


_HOPPER = {
    # kernel: BM, BN, STAGES, CLUSTER; other tiles were slower (H200)
    "warpgroup": (128, 128, 1, 1),
    "ring": (128, 256, 4, 1),
    "producer": (128, 256, 4, 1),
    "clusters": (128, 256, 4, 2),
}


def hopper(kernel: str) -> Callable[[str, bool, bool], list[Config]]:
    """Return `Kernel.configs` of a rung that uses Hopper's copy engine and tensor cores (wgmma.py)."""

    def configs(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
        (bm, bn, stages, cluster), bk = _HOPPER[kernel], 64
        macros: dict[str, int | str] = {
            "TYPE": 1, "PRODUCTS": 1, "BM": bm, "BN": bn, "BK": bk, "STAGES": stages, "CLUSTER": cluster,
            "GROUP": 8, "A_MN": 0, "B_MN": 1,
        }  # fmt: skip
        threads = {"warpgroup": 128, "ring": 2 * bm}.get(kernel, 128 + 2 * bm)
        shared = stages * 2 * (bm + bn) * bk + 1024  # for the alignment of the first stage
        return [Config(kernel, "float32", bm * cluster, bn, (threads, 1), tuple(macros.items()), shared)]

    return configs
