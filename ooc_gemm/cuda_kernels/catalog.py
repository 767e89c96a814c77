"""Every kernel there is: what it is, what it takes, and the configurations it is shipped in.

A `Kernel` is a description; `Kernel.configs` yields what `nvrtc.compile` and `nvrtc.launch` take, the
default first. Nothing here needs a GPU, or anything but the standard library.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..support.intervals import ceil_div
from . import ladder
from .nvrtc import C_TYPE, Config


@dataclass(frozen=True)
class Kernel:
    """One of the sources in kernels/."""

    name: str
    explanation: str
    """One line for `ooc-gemm bench kernels --list`."""
    dtypes: tuple[str, ...]
    """Types of A and B that it is shipped for; C's differs for float16 (float32) and 8 bits (int32)."""
    configs: Callable[[str, bool, bool], list[Config]]
    """(dtype, trans_a, trans_b) → configurations, the default first."""
    transposes: bool = True
    """Whether A may be stored k×m, and B n×k."""
    min_arch: int = 75
    """Least compute capability, times ten."""
    only_arch: int | None = None
    """The only one that has its instructions."""
    choose: Callable[[list[Config], int, int, int, int], Config] = lambda configs, m, n, k, _: configs[0]
    """(configurations, m, n, k, multiprocessors) → the one that suits, where nothing was measured."""
    launcher: str = "nvrtc"
    """The module that knows its arguments: `nvrtc.launch` for the signature that most kernels share."""


_SIMPLE = ("float32", "float64", "int32")


def _rungs() -> list[Kernel]:
    """The classical ladder. Its kernels take A and B as stored."""
    rungs = (
        (
            "naive-uncoalesced",
            "one thread an element, warps down the columns of C",
            _SIMPLE,
            ladder.naive(False),
        ),
        ("naive", "one thread an element, warps along the rows of C", _SIMPLE, ladder.naive(True)),
        ("tiled", "square tiles in shared memory", _SIMPLE, ladder.tiled),
        ("microtile", "several rows of C a thread", _SIMPLE, ladder.rung("microtile")),
        (
            "register",
            "a block of neighbouring elements a thread, in registers",
            _SIMPLE,
            ladder.rung("register_block"),
        ),
        (
            "rectangular",
            "tiles of any sides; the elements of a warp side by side",
            _SIMPLE,
            ladder.rung("rectangular"),
        ),
        (
            "vectorized",
            "16-byte accesses, A transposed in shared memory",
            _SIMPLE[:2],
            ladder.rung("vectorized"),
        ),
        (
            "warptile",
            "block, warp and thread tiles; loads run ahead of the products",
            _SIMPLE[:2],
            ladder.rung("warptile"),
        ),
    )
    return [Kernel(name, text, dtypes, configs, transposes=False) for name, text, dtypes, configs in rungs]


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
    """ffma.cu: the configuration for a large C first."""
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
    """The configuration of ffma.cu that should take the least time."""
    return min(configs, key=lambda config: _ffma_time(config, m, n, k, multiprocessors))


def _ffma_time(config: Config, m: int, n: int, k: int, multiprocessors: int) -> float:
    """An estimate, in any unit, its constants fitted to what an H200 took for 29 shapes."""
    bm, bn, split, resident = config.bm, config.bn, config.value("SPLIT"), config.value("RESIDENT")
    # Larger clusters do not fit everywhere.
    usable = multiprocessors if split < 4 else max(1, int(0.94 * multiprocessors))

    def together(blocks: int) -> float:
        """Time of that many on one multiprocessor: the fewer sums are under way, the more it waits."""
        sums = blocks * config.block[0] * config.value("TM") * config.value("TN")
        return blocks / (1 - 1800 / sums) if blocks else 0.0

    waves, rest = divmod(ceil_div(m, bm) * ceil_div(n, bn) * split, resident * usable)
    each_k = bm * bn + 8 * (bm + bn)  # products, and copies
    depth = k / split + 40 / resident  # start and end, in which other blocks go on
    exchange = 1.07 if split > 1 else 1.0
    return exchange * each_k * depth * (waves * together(resident) + together(ceil_div(rest, usable)))


def guarded(config: Config) -> Config:
    """`ffma` that runs only where a flag on the device says so."""
    return replace(config, macros=(*config.macros, ("GUARDED", 1)))


ALONG_K = ("tf32", "int8")
"""Kinds of which wgmma takes operands that lie along k only: others are turned before."""

_WGMMA_TILES = (128, 256, 4, 2, 1), (128, 64, 4, 1, 2), (64, 64, 12, 1, 1)
_WGMMA = {
    # kind: TYPE, element bytes, planes, PROMOTE, BK; wide, narrow, thin: BM, BN, STAGES, CLUSTER, RESIDENT
    "fp16x3": (1, 2, 2, 64, 64, ((128, 192, 2, 2, 1), (128, 64, 2, 1, 2))),
    "fp16": (1, 2, 1, 0, 64, _WGMMA_TILES),
    "tf32": (2, 4, 1, 0, 32, _WGMMA_TILES),
    "int8": (3, 1, 1, 0, 128, _WGMMA_TILES),
}
"""Wide: the best measured on an H200 at 8192³; narrow: for few columns, or few tiles; thin: where no row or
column may be wasted and many bytes must be under way (benchmarks/results). A split of thin operands would not
pay, so that fp16x3 has none for those."""


def wgmma(
    kind: str, a_mn: bool, b_mn: bool, a_unsigned: bool = False, b_unsigned: bool = False
) -> list[Config]:
    """wgmma.cu, wide, narrow and thin, for operands contiguous along m or n (`mn`) or along k.
    ValueError for a kind it does not have."""
    if kind not in _WGMMA:
        raise ValueError(f"no {kind}; there is {', '.join(_WGMMA)}")
    if kind in ALONG_K:
        a_mn = b_mn = False
    type_, size, planes, promote, bk, tiles = _WGMMA[kind]
    group, dtype, found = 8, "int32" if kind == "int8" else "float32", []
    for bm, bn, stages, cluster, resident in tiles:
        macros: dict[str, int | str] = {
            "TYPE": type_, "PRODUCTS": 3 if planes == 2 else 1, "PROMOTE": promote, "BM": bm, "BN": bn,
            "BK": bk, "STAGES": stages, "CLUSTER": cluster, "RESIDENT": resident, "GROUP": group,
            "A_MN": int(a_mn), "B_MN": int(b_mn),
            "A_UNSIGNED": int(a_unsigned), "B_UNSIGNED": int(b_unsigned),
        }  # fmt: skip
        shared = stages * planes * (bm + bn) * bk * size + 1024  # for the alignment of the first stage
        threads = 128 * (1 + bm // 64)
        found.append(Config("wgmma", dtype, bm * cluster, bn, (threads, 1), tuple(macros.items()), shared))
    return found


_SUM_SLICES = 1_200_000
"""What `choose_wgmma` takes adding up slices for, in its unit: twenty steps of a wide tile."""


def choose_wgmma(configs: list[Config], m: int, n: int, k: int, multiprocessors: int) -> tuple[Config, int]:
    """Of wgmma.cu: the configuration, and in how many slices k is cut, that keep a device busy for
    the shortest: rounds of tiles × steps of a tile × time of a step, but no less than memory takes to deliver
    A and B; fitted to an H200."""

    def plans(config: Config) -> Iterator[tuple[float, Config, int]]:
        bm, bk, cluster = (config.value(name) for name in ("BM", "BK", "CLUSTER"))
        tiles, places = config.grid(m, n)[0], multiprocessors // cluster
        # The products of a step, and the rows of A and columns of B that are fetched for them.
        step = config.value("PRODUCTS") * (bm * config.bn + 112 * (bm + config.bn // cluster))
        most = max(1, min(places // max(1, tiles), k // max(512, bk)))
        for slices in {1, most}:
            rounds, steps = ceil_div(tiles * slices, places), ceil_div(k, bk * slices)
            time = max(rounds * steps * step, 3.2 * (m + n) * k / bk)
            yield time + (_SUM_SLICES if slices > 1 else 0), config, slices

    _, config, slices = min((plan for config in configs for plan in plans(config)), key=lambda plan: plan[0])
    return config, slices


def _of_kind(
    make: Callable[[str, bool, bool, bool, bool], list[Config]], kind: str
) -> Callable[[str, bool, bool], list[Config]]:
    """`Kernel.configs` of a kind, from `wgmma` or `mma`."""
    return lambda dtype, trans_a, trans_b: make(
        kind, trans_a, not trans_b, dtype == "uint8", dtype == "uint8"
    )


def _hopper() -> list[Kernel]:
    """What wgmma.py launches."""
    explained = {
        "fp16x3": (
            "three float16 products on Hopper's tensor cores, as accurate as float32",
            ("float32", "complex64"),
        ),
        "fp16": ("float16 on Hopper's tensor cores, sums in float32", ("float16",)),
        "tf32": ("one TF32 product on Hopper's tensor cores: 11 significant bits", ("float32",)),
        "int8": ("8-bit integers on Hopper's tensor cores, exact sums in int32", ("int8", "uint8")),
    }

    return [
        Kernel(kind, text, dtypes, _of_kind(wgmma, kind), min_arch=90, only_arch=90, launcher="wgmma")
        for kind, (text, dtypes) in explained.items()
    ]


_DMMA = (
    # BM, BN, STAGES, RESIDENT; rows and columns of a warp
    (128, 128, 5, 1, 64, 32),
    (96, 128, 5, 1, 48, 32),
    (96, 64, 5, 2, 48, 16),
    (64, 128, 6, 1, 32, 32),
    (64, 64, 5, 2, 32, 16),
    (32, 32, 6, 4, 16, 16),
)
"""The fastest at 8192³ first, then for small C and little shared memory (measured on an H200)."""


def dmma(dtype: str, trans_a: bool, trans_b: bool) -> list[Config]:
    """dmma.cu."""
    found = []
    for bm, bn, stages, resident, wm, wn in _DMMA:
        # Two operands along k take more registers: NT has a tile of its own. 96 rows along m or n cannot be
        # dealt out.
        not_for = {(128, 128): "NT", (96, 128): "NT TN", (96, 64): "NT TN TT", (64, 128): "NN TN TT"}
        if "NT"[trans_a] + "NT"[trans_b] in not_for.get((bm, bn), ""):
            continue
        # The instruction's left operand is B, unless A is transposed.
        if trans_a:
            bm, bn, wm, wn = bn, bm, wn, wm
        macros: dict[str, int | str] = {
            "SOURCE": "double", "BM": bm, "BN": bn, "BK": 16, "WM": wm, "WN": wn, "STAGES": stages,
            "RESIDENT": resident, "K_STEP": 8, "GROUP": 8, "TRANS_A": int(trans_a), "TRANS_B": int(trans_b),
        }  # fmt: skip
        threads, shared = 32 * (bm // wm) * (bn // wn), stages * (bm + bn) * 16 * 8
        found.append(Config("dmma", dtype, bm, bn, (threads, 1), tuple(macros.items()), shared))
    return found


def float64_sums(trans_a: bool, trans_b: bool) -> list[Config]:
    """dmma.cu for float32, with products and sums in float64, which runs only where a flag on the
    device says so. α and β are float64."""
    found = []
    for config in dmma("float64", trans_a, trans_b):
        macros = {**dict(config.macros), "SOURCE": "float", "GUARDED": 1}
        shared = config.shared_bytes // 2
        found.append(replace(config, dtype="float32", macros=tuple(macros.items()), shared_bytes=shared))
    return found


_MMA_TILES = (
    (128, 256, 128, 64, 64, 3, 1),
    (128, 256, 64, 64, 64, 4, 1),
    (128, 64, 64, 64, 32, 4, 2),
    (64, 64, 64, 32, 32, 4, 3),
)
"""The fastest at 8192³ first, then what fits the 99 KiB of a block on sm_86, 89 and 120, and small C."""
_MMA_THIN = (64, 256, 128, 64, 32, 4, 1)
"""For few rows of op(A): the fastest of those that a large B streams through (measured on an H200)."""
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
    """mma.cu, of the same kinds and operands as `wgmma`."""
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
"""Bytes that the system takes for itself for each block."""


_SUM_COST = {"dmma": 1_600_000, "mma": 6_000_000}
"""What a multiprocessor could multiply while the slices are added up: mostly the start of a kernel."""


def choose_mma(
    configs: list[Config],
    m: int,
    n: int,
    k: int,
    multiprocessors: int,
    shared: int = 228 << 10,
    most_slices: int = 64,
) -> tuple[Config, int]:
    """Of dmma.cu or mma.cu: the configuration, and in how many slices k is cut, by the work of the
    busiest multiprocessor, in products. `shared`: bytes of shared memory of a multiprocessor."""

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


def _warp_level() -> list[Kernel]:
    """What mma.py launches."""
    explained = {
        "fp16x3": ("three float16 products on tensor cores before or after Hopper's", ("float32",)),
        "fp16": ("float16 on the same, sums in float32", ("float16",)),
        "tf32": ("one TF32 product on the same", ("float32",)),
        "int8": ("8-bit integers on the same, exact sums in int32", ("int8", "uint8")),
    }

    return [
        Kernel("dmma", "float64 on the tensor cores", ("float64",), dmma, min_arch=80, launcher="mma"),
        *(
            Kernel(f"mma-{kind}", text, dtypes, _of_kind(mma, kind), min_arch=80, launcher="mma")
            for kind, (text, dtypes) in explained.items()
        ),
    ]


KERNELS = {
    kernel.name: kernel
    for kernel in (
        *_rungs(),
        Kernel(
            "ffma",
            "shared-memory tiles, register blocks, double buffering: the fastest without tensor cores",
            ("float32", "float64", "int64"),
            ffma,
            choose=choose_ffma,
        ),
        *_hopper(),
        *_warp_level(),
    )
}
"""By name, the ladder first, rung by rung."""
