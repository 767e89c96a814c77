"""Configurations of kernels/production/ffma.cu, and which of them suits a shape."""

from dataclasses import replace

from ..support.intervals import ceil_div
from .config import C_TYPE, Config

_FFMA_NAMES = "BM", "BN", "BK", "WM", "WN", "TM", "TN", "STAGES", "RESIDENT"
_FFMA: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]] = {
    # values of the above; PARTS for op(A)·op(B) of NN, NT, TN, TT; every SPLIT
    "float32": [
        ((128, 256, 16, 64, 64, 16, 8, 2, 1), (6, 4, 8, 8), (1,)),
        ((64, 128, 8, 32, 64, 8, 8, 4, 4), (1, 1, 1, 1), (1, 2, 4, 8)),
        ((64, 64, 8, 32, 64, 8, 8, 4, 8), (1, 1, 1, 1), (1, 2)),
    ],
    "float64": [((128, 64, 8, 64, 32, 8, 8, 4, 2), (1, 1, 1, 1), (1,))],
    "int64": [((64, 64, 8, 16, 32, 4, 4, 4, 2), (1, 1, 1, 1), (1,))],
}
"""The tiles of ffma.cu, the largest first: the fastest measured on an H200 of those that every
architecture has shared memory for."""


def ffma(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
    """Return the configurations of ffma.cu, the one for a large C first. `trans_a`, `trans_b`: whether A is
    stored k×m, and B n×k."""
    size = 4 if dtype == "float32" else 8
    found = []
    for values, parts, splits in _FFMA[dtype]:
        tile = dict(zip(_FFMA_NAMES, values, strict=True))
        bm, bn = tile["BM"], tile["BN"]
        threads = 32 * (bm // tile["WM"]) * (bn // tile["WN"])
        ring = tile["STAGES"] * tile["BK"] * (bm * size + 16 + bn * size + 16)
        for split in splits:
            macros: dict[str, int | str] = {
                "ELEMENT": C_TYPE[dtype], **tile, "PARTS": parts[2 * trans_a + trans_b], "SPLIT": split,
                "TRANS_A": int(trans_a), "TRANS_B": int(trans_b),
            }  # fmt: skip
            shared = max(ring, bm * bn * size) if split > 1 else ring
            found.append(Config("ffma", dtype, bm, bn, (threads, 1), tuple(macros.items()), shared))
    return found


def choose_ffma(configs: list[Config], m: int, n: int, k: int, multiprocessors: int) -> Config:
    """Return the configuration of ffma.cu with the least estimated time."""
    return min(configs, key=lambda config: _ffma_time(config, m, n, k, multiprocessors))


def _ffma_time(config: Config, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Estimate the time of a product, in an arbitrary unit. The constants are fitted to the times of 29
    shapes on an H200."""
    bm, bn, split, resident = config.bm, config.bn, config.value("SPLIT"), config.value("RESIDENT")
    # Larger clusters do not fit everywhere.
    usable = multiprocessors if split < 4 else max(1, int(0.94 * multiprocessors))

    def together(blocks: int) -> float:
        """Return the time that one multiprocessor takes for so many blocks at once. It waits the more, the
        fewer sums are under way."""
        sums = blocks * config.block[0] * config.value("TM") * config.value("TN")
        return blocks / (1 - 1800 / sums) if blocks else 0.0

    waves, rest = divmod(ceil_div(m, bm) * ceil_div(n, bn) * split, resident * usable)
    each_k = bm * bn + 8 * (bm + bn)  # products, and copies
    depth = k / split + 40 / resident  # start and end, in which other blocks go on
    exchange = 1.07 if split > 1 else 1.0
    return exchange * each_k * depth * (waves * together(resident) + together(ceil_div(rest, usable)))


def guarded(config: Config) -> Config:
    """Return a configuration of `ffma` that does nothing unless a flag on the device is set."""
    return replace(config, macros=(*config.macros, ("GUARDED", 1)))
