"""Configurations of the kernels on tensor cores (wgmma.cu, dmma.cu, mma.cu), and which of them suits a
shape."""

from collections.abc import Iterator
from dataclasses import replace

from ..support.intervals import ceil_div
from .config import Config
from .moduli import moduli_text

ALONG_K = ("tf32", "int8")
"""Kinds for which wgmma takes only operands that lie along k. Other operands are transposed before."""

_WGMMA_TILES = (128, 256, 4, 2, 0, 1), (128, 64, 4, 1, 0, 2), (64, 64, 12, 1, 0, 1)
_WGMMA = {
    # kind: TYPE, element bytes, planes, PROMOTE, BK; tiles: BM, BN, STAGES, CLUSTER, ALONG_N, RESIDENT
    "fp16x3": (1, 2, 2, 64, 64, ((192, 128, 2, 2, 1, 1), (128, 128, 3, 2, 0, 1), (128, 64, 2, 1, 0, 2))),
    "fp16": (1, 2, 1, 0, 64, _WGMMA_TILES),
    "tf32": (2, 4, 1, 0, 32, _WGMMA_TILES),
    "int8": (3, 1, 1, 0, 128, _WGMMA_TILES),
}
"""The first tiles are the fastest that were measured on an H200 at 8192³. Those of 128×64 are for few
columns, or few tiles. Those of 64×64 waste no row or column of a thin C, and keep many bytes under way
(benchmarks/results). fp16x3 has none of these, because a split of thin operands does not pay. It has tiles
of 128×128 for products such as 4096³, whose larger tiles would leave multiprocessors idle."""


def wgmma(
    kind: str, a_mn: bool, b_mn: bool, a_unsigned: bool = False, b_unsigned: bool = False
) -> list[Config]:
    """Return the configurations of wgmma.cu, the largest tiles first.

    `a_mn`, `b_mn`: whether the operand is contiguous along m or n, and not along k. `a_unsigned`,
    `b_unsigned`: whether its integers are unsigned. Raises ValueError if there is no such kind.
    """
    if kind not in _WGMMA:
        raise ValueError(f"no {kind}; there is {', '.join(_WGMMA)}")
    if kind in ALONG_K:
        a_mn = b_mn = False
    type_, size, planes, promote, bk, tiles = _WGMMA[kind]
    group, dtype, found = 8, "int32" if kind == "int8" else "float32", []
    for bm, bn, stages, cluster, along_n, resident in tiles:
        macros: dict[str, int | str] = {
            "EPILOGUE": 0, "TYPE": type_, "PRODUCTS": 3 if planes == 2 else 1, "PROMOTE": promote,
            "BM": bm, "BN": bn, "BK": bk, "STAGES": stages, "CLUSTER": cluster, "ALONG_N": along_n,
            "RESIDENT": resident, "GROUP": group, "A_MN": int(a_mn), "B_MN": int(b_mn), "A_UNSIGNED":
            int(a_unsigned), "B_UNSIGNED": int(b_unsigned),
        }  # fmt: skip
        shared = stages * planes * (bm + bn) * bk * size + 1024  # for the alignment of the first stage
        threads = 128 * (1 + bm // 64)
        of_cluster = (bm, bn * cluster) if along_n else (bm * cluster, bn)
        found.append(Config("wgmma", dtype, *of_cluster, (threads, 1), tuple(macros.items()), shared))
    return found


def of_residues(per_modulus: int) -> Config:
    """Return the configuration of wgmma.cu that multiplies planes of residues, and stores the residues of the
    sums. `per_modulus`: planes for each modulus."""
    return _with(wgmma("int8", False, False)[0], EPILOGUE=1, PER_MODULUS=per_modulus, MODULI=moduli_text())


def of_magnitudes() -> Config:
    """Return the configuration of wgmma.cu that finds the least of the sums of products of magnitudes."""
    return _with(wgmma("int8", False, False)[0], EPILOGUE=2)


def _with(config: Config, **macros: int | str) -> Config:
    """Return a configuration with other values of macros."""
    return replace(config, macros=tuple((dict(config.macros) | macros).items()))


_SUM_SLICES = 1_200_000
"""Time that `choose_wgmma` counts for adding up slices, in its unit: twenty steps of a wide tile."""


def choose_wgmma(configs: list[Config], m: int, n: int, k: int, multiprocessors: int) -> tuple[Config, int]:
    """Return the configuration of wgmma.cu, and the number of slices of k, with the least estimated time:
    rounds of tiles × steps of a tile × time of a step, but no less than memory takes to deliver A and B. The
    constants are fitted to an H200."""

    def plans(config: Config) -> Iterator[tuple[float, Config, int]]:
        bm, bn, bk, cluster = (config.value(name) for name in ("BM", "BN", "BK", "CLUSTER"))
        tiles, places = config.grid(m, n)[0], multiprocessors // cluster
        # The products of a step, and what the rows of A and columns of B that are fetched for them cost.
        step = config.value("PRODUCTS") * (bm * bn + 112 * (bm + bn // cluster))
        most = max(1, min(places // max(1, tiles), k // max(512, bk)))
        for slices in {1, most}:
            rounds, steps = ceil_div(tiles * slices, places), ceil_div(k, bk * slices)
            time = max(rounds * steps * step, 3.2 * (m + n) * k / bk)
            yield time + (_SUM_SLICES if slices > 1 else 0), config, slices

    _, config, slices = min((plan for config in configs for plan in plans(config)), key=lambda plan: plan[0])
    return config, slices


_Tiles = tuple[tuple[int, int, int, int, int, int], ...]
_DMMA: _Tiles = (
    # BM, BN, STAGES, RESIDENT; rows and columns of a warp
    (128, 128, 5, 1, 64, 32),
    (96, 128, 5, 1, 48, 32),
    (96, 64, 5, 2, 48, 16),
    (64, 128, 6, 1, 32, 32),
    (64, 64, 5, 2, 32, 16),
    (32, 32, 6, 4, 16, 16),
)
"""The fastest at 8192³ first, then those for a small C and little shared memory (measured on an H200)."""


def dmma(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
    """Return the configurations of dmma.cu, the fastest for a large C first. `trans_a`, `trans_b`: whether A
    is stored k×m, and B n×k."""
    # Two operands along k take more registers: NT has a tile of its own. 96 rows along m or n cannot be dealt
    # out.
    not_for = {(128, 128): "NT", (96, 128): "NT TN", (96, 64): "NT TN TT", (64, 128): "NN TN TT"}
    trans = "NT"[trans_a] + "NT"[trans_b]
    return _dmma(dtype, trans_a, trans_b, tuple(t for t in _DMMA if trans not in not_for.get(t[:2], "")))


def _dmma(dtype: str, trans_a: bool, trans_b: bool, tiles: _Tiles, fold: int = 0) -> list[Config]:
    """Return the configurations of dmma.cu with these tiles."""
    found = []
    for bm, bn, stages, resident, wm, wn in tiles:
        # The instruction's left operand is B, unless A is transposed.
        if trans_a:
            bm, bn, wm, wn = bn, bm, wn, wm
        macros: dict[str, int | str] = {
            "SOURCE": "double", "BM": bm, "BN": bn, "BK": 16, "WM": wm, "WN": wn, "STAGES": stages,
            "RESIDENT": resident, "K_STEP": 8, "GROUP": 8, "TRANS_A": int(trans_a), "TRANS_B": int(trans_b),
            "FOLD": fold,
        }  # fmt: skip
        threads, shared = 32 * (bm // wm) * (bn // wn), stages * (bm + bn) * 16 * 8
        found.append(Config("dmma", dtype, bm, bn, (threads, 1), tuple(macros.items()), shared))
    return found


_LOOPING = 3
"""Most thread blocks on a multiprocessor whose threads have a register for a loop over tiles."""


def float64_sums(trans_a: bool, trans_b: bool) -> list[Config]:
    """Return the configurations of dmma.cu for a product of float32 whose products and sums are float64, as
    are α and β. They do nothing unless a flag on the device is set."""
    return [
        replace(
            _with(config, SOURCE="float", GUARDED=1, RESIDENT=min(_LOOPING, config.value("RESIDENT"))),
            dtype="float32", shared_bytes=config.shared_bytes // 2,
        )
        for config in dmma("float64", trans_a, trans_b)
    ]  # fmt: skip


_FOLD = 4
"""Steps of k, of 16 elements each, that are added up with rounding errors."""
_FOLDED: _Tiles = (
    (96, 64, 5, 1, 48, 16),
    (64, 64, 5, 1, 16, 16),
    (32, 32, 6, 4, 16, 16),
)
"""As `_DMMA`, for the three sums that each element of C needs in registers."""


def folded_sums() -> list[Config]:
    """Return the configurations of dmma.cu for a product of float64 along k whose errors are those of sums of
    64 terms, whatever k is. They do nothing unless a flag on the device is set."""
    return [_with(config, GUARDED=1) for config in _dmma("float64", False, True, _FOLDED, _FOLD)]


_MMA_TILES = (
    (128, 256, 128, 64, 64, 3, 1),
    (128, 256, 64, 64, 64, 4, 1),
    (128, 64, 64, 64, 32, 4, 2),
    (64, 64, 64, 32, 32, 4, 3),
)
"""The fastest at 8192³ first, then those that fit the 99 KiB of a block on sm_86, 89 and 120, and a small
C."""
_MMA_THIN = (64, 256, 128, 64, 32, 4, 1)
"""For few rows of op(A): the fastest tile that a large B streams through (measured on an H200)."""
_MMA = {
    # kind: TYPE, element bytes, planes; BM, BN, BK in bytes, WM, WN, STAGES, RESIDENT
    "fp16x3": (1, 2, 2, ((64, 128, 64, 64, 32, 4, 2), (64, 64, 64, 32, 32, 3, 3))),
    "fp16": (1, 2, 1, _MMA_TILES),
    "tf32": (2, 4, 1, (*_MMA_TILES, _MMA_THIN)),
    "int8": (3, 1, 1, _MMA_TILES),
}


def mma(
    kind: str, a_mn: bool, b_mn: bool, a_unsigned: bool = False, b_unsigned: bool = False
) -> list[Config]:
    """Return the configurations of mma.cu, for the same kinds and operands as `wgmma`."""
    if kind not in _MMA:
        raise ValueError(f"no {kind}; there is {', '.join(_MMA)}")
    if kind == "int8":  # operands that do not lie along k are turned before
        a_mn = b_mn = False
    type_, size, planes, tiles = _MMA[kind]
    found = []
    for bm, bn, bk, wm, wn, stages, resident in tiles:
        macros: dict[str, int | str] = {
            "TYPE": type_, "PRODUCTS": 3 if planes == 2 else 1, "BM": bm, "BN": bn, "BK": bk // size,
            "WM": wm, "WN": wn, "STAGES": stages, "RESIDENT": resident, "GROUP": 8,
            "A_MN": int(a_mn), "B_MN": int(b_mn), "A_UNSIGNED": int(a_unsigned),
            "B_UNSIGNED": int(b_unsigned),
        }  # fmt: skip
        threads, shared = 32 * (bm // wm) * (bn // wn), stages * planes * (bm + bn) * bk
        dtype = "int32" if kind == "int8" else "float32"
        found.append(Config("mma", dtype, bm, bn, (threads, 1), tuple(macros.items()), shared))
    return found


_RESERVED_SHARED = 1 << 10
"""Bytes of shared memory that the system reserves for itself in each block."""


_SUM_COST = {"dmma": 1_600_000, "mma": 6_000_000}
"""Products that a multiprocessor could compute while the slices are added up. Most of this time is the start
of a kernel."""


def choose_mma(
    configs: list[Config],
    m: int,
    n: int,
    k: int,
    multiprocessors: int,
    shared: int = 228 << 10,
    most_slices: int = 64,
) -> tuple[Config, int]:
    """Return the configuration of dmma.cu or mma.cu, and the number of slices of k, that give the busiest
    multiprocessor the least work, counted in products. `shared`: bytes of shared memory of a
    multiprocessor."""

    def plans(config: Config) -> Iterator[tuple[float, Config, int]]:
        resident = min(config.value("RESIDENT"), shared // (config.shared_bytes + _RESERVED_SHARED))
        tiles, places = config.grid(m, n)[0], multiprocessors * resident
        for slices in range(1, most_slices + 1):
            if slices > 1 and (tiles * slices > places or slices * 256 > k):
                break
            rounds, rest = divmod(tiles * slices, places)
            # Eight warps keep a multiprocessor busy.
            alone = max(ceil_div(rest, multiprocessors), 256 / config.block[0]) if rest else 0
            # Beginning and end of a tile, as so many products deep; small tiles fetch more for each product.
            depth, fetched = ceil_div(k, slices) + 64 / resident, 1 + 8 / config.bm + 8 / config.bn
            work = (rounds * resident + alone) * config.bm * config.bn * depth * fetched
            yield work + (_SUM_COST[config.kernel] if slices > 1 else 0), config, slices

    fitting = [config for config in configs if config.shared_bytes + _RESERVED_SHARED <= shared]
    best = min((plan for config in fitting for plan in plans(config)), key=lambda plan: plan[0])
    return best[1:]
