"""Five experiments with the ladder. Each is a list of runs, and the columns that tell what they show."""

from collections.abc import Callable
from dataclasses import dataclass

from ..cuda_kernels.catalog import KERNELS
from ..support.intervals import ceil_div
from .rungs import RUNGS, Outcome, Run


@dataclass(frozen=True)
class Experiment:
    """One question, and what is run to answer it."""

    question: str
    runs: Callable[[], list[Run]]
    columns: tuple[str, ...]
    """Names of COLUMNS that are shown."""
    on_a_gpu: str
    """The command that times the same on a GPU."""


def _macros(outcome: Outcome) -> str:
    """The values of a configuration's macros, without the type, such as `64·32·8`."""
    return "·".join(str(value) for name, value in outcome.run.config.macros if name != "ELEMENT")


def _blocks(outcome: Outcome) -> int:
    run = outcome.run
    return ceil_div(run.m, run.config.bm) * ceil_div(run.n, run.config.bn)


def _per_product(count: int, outcome: Outcome) -> str:
    """A count for each multiply-add that the product needs."""
    return f"{count / outcome.products:.3g}"


COLUMNS: dict[str, tuple[str, Callable[[Outcome], str]]] = {
    "rung": ("the kernel", lambda it: it.run.rung),
    "type": ("the type of the elements", lambda it: it.run.config.dtype),
    "N": ("m = n = k", lambda it: str(it.run.n)),
    "macros": ("tile and thread block, as kernels/ladder names them", _macros),
    "threads": ("threads of a block, along x and y", lambda it: "×".join(map(str, it.run.config.block))),
    "blocks": ("thread blocks", lambda it: str(_blocks(it))),
    "operations": (
        "additions and multiplications; 2 are needed",
        lambda it: _per_product(it.counts.operations, it),
    ),
    "loads": (
        "elements read from global memory",
        lambda it: _per_product(it.counts.global_loads, it),
    ),
    "lines": (
        "lines of 128 bytes that warps read and wrote in global memory",
        lambda it: _per_product(it.counts.global_load_lines + it.counts.global_store_lines, it),
    ),
    "shared": (
        "elements read from shared memory",
        lambda it: _per_product(it.counts.shared_loads, it),
    ),
    "passes": (
        "passes of warps over the banks of shared memory, to read and to write",
        lambda it: _per_product(it.counts.shared_load_passes + it.counts.shared_store_passes, it),
    ),
    "flop/byte": ("needed operations for each byte asked of global memory", lambda it: f"{it.intensity:.3g}"),
    "error": (
        "largest error, relative to |A|·|B|; NumPy computes in a wider type",
        lambda it: f"{it.error:.1e}",
    ),
    "NumPy": ("whether the result agrees with NumPy's", lambda it: "agrees" if it.correct else "DIFFERS"),
}
"""Name of a column → what it means, and its text. Loads, lines, operations, shared and passes are given for
each multiply-add that the product needs."""

COUNTS = ("operations", "loads", "lines", "shared", "passes", "flop/byte", "NumPy")


def _square(rung: str, size: int, dtype: str = "float32", index: int = 0) -> Run:
    return Run.of(rung, size, size, size, dtype, index)


def _tiled(*tiles: int) -> list[int]:
    """Return the numbers of the first configurations of `tiled` with these tiles."""
    sides = [config.bm for config in KERNELS["tiled"].configs("float32", False, False)]
    return [sides.index(tile) for tile in tiles]


EXPERIMENTS = {
    "block-sizes": Experiment(
        "How do loads from global memory fall with the side of a tile, and what does a small N make of it?",
        lambda: [_square("tiled", size, index=i) for i in _tiled(16, 32, 64) for size in (32, 64, 128)],
        ("macros", "N", "blocks", "operations", "loads", "lines", "flop/byte", "NumPy"),
        "ooc-gemm bench kernels --kernel tiled --tune",
    ),
    "odd-sizes": Experiment(
        "What does it cost if N is no multiple of the tile?",
        lambda: [
            _square(rung, size) for rung in ("naive", "tiled", "warptile") for size in (63, 64, 65, 128, 129)
        ],
        ("rung", "N", "blocks", "operations", "loads", "lines", "passes", "NumPy"),
        "ooc-gemm bench kernels --kernel naive --kernel tiled --kernel warptile "
        "--size 2047 --size 2048 --size 2049",
    ),
    "thread-block-shapes": Experiment(
        "What does the shape of the thread block change, with the same tile?",
        lambda: [
            _square("tiled", 128, index=i)
            for i in range(len(KERNELS["tiled"].configs("float32", False, False)))
        ],
        ("macros", "threads", "loads", "lines", "shared", "passes", "NumPy"),
        "ooc-gemm bench kernels --kernel tiled --tune",
    ),
    "types": Experiment(
        "What do integers, float32 and float64 cost, and how far are they from the exact result?",
        lambda: [
            _square(rung, 128, dtype)
            for rung in ("tiled", "rectangular")
            for dtype in ("int32", "float32", "float64")
        ],
        ("rung", "type", "loads", "lines", "passes", "flop/byte", "error", "NumPy"),
        "ooc-gemm bench kernels --kernel tiled --kernel rectangular "
        "--dtype int32 --dtype float32 --dtype float64 --size 2048",
    ),
    "roofline": Experiment(
        "How fast can each rung be at most, if every load is answered by global memory?",
        lambda: [_square(rung, 128) for rung in RUNGS],
        ("rung", "loads", "lines", "flop/byte", "NumPy"),
        "ooc-gemm bench kernels --size 4096 --plot roofline.svg",
    ),
}
"""The experiments by name."""


def table(outcomes: list[Outcome], columns: tuple[str, ...]) -> list[list[str]]:
    """Return the texts of a table, a list for each run."""
    return [[COLUMNS[name][1](outcome) for name in columns] for outcome in outcomes]


def roof(outcome: Outcome, peak: float, bandwidth: float) -> float:
    """Return the operations a second that a run can reach at most on a device with this peak (operations a
    second) and bandwidth (bytes a second)."""
    return min(peak, bandwidth * outcome.intensity)
