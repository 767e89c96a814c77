"""Which configuration of a kernel runs fastest here: measured once, remembered beside the cubins.

The file maps device name → "kernel dtype NT class" → macros, and is read anew each time. A configuration
that the catalog no longer ships counts as not remembered.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from ..support.remembered import recall, remember
from .catalog import KERNELS
from .config import Config

FILE = "tuned.json"

SHAPES = {
    "small": (1024, 1024, 1024),
    "deep": (1024, 1024, 16384),
    "short": (64, 8192, 8192),
    "narrow": (8192, 64, 8192),
    "large": (8192, 8192, 8192),
}
"""Class of shapes → the m, n, k that is timed for it."""


def shape_class(m: int, n: int, k: int) -> str:
    """Return the class of a shape. It depends on whether C has enough tiles, and on whether tiles fit its
    sides."""
    if min(m, n) <= 256 < 1024 <= max(m, n):
        return "short" if m <= n else "narrow"
    if m * n <= 1536 * 1536:
        return "deep" if k >= 8 * max(m, n) else "small"
    return "large"


def best_config(
    kernel: str,
    dtype: str,
    trans_a: bool,
    trans_b: bool,
    m: int,
    n: int,
    k: int,
    device: str,
    multiprocessors: int,
) -> Config:
    """Return the configuration that is remembered for the device's name and the shape's class; if there is
    none, the one that the catalog chooses."""
    configs = KERNELS[kernel].configs(dtype, trans_a, trans_b)
    known = recall(FILE).get(device, {})
    macros = known.get(_key(kernel, dtype, trans_a, trans_b, shape_class(m, n, k)))
    found = next((config for config in configs if dict(config.macros) == macros), None)
    return found or KERNELS[kernel].choose(configs, m, n, k, multiprocessors)


@dataclass(frozen=True)
class Choice:
    """The fastest configuration for one class of shapes."""

    kernel: str
    dtype: str
    trans_a: bool
    trans_b: bool
    shape: str
    config: Config
    seconds: float
    default_seconds: float | None
    """None if the default failed."""


Timer = Callable[[str, str, bool, bool, tuple[int, int, int], list[Config]], list[float | None]]
"""(kernel, dtype, trans_a, trans_b, (m, n, k), configs) → seconds of each configuration, None for one that
failed."""


def choose(pairs: Iterable[tuple[str, str]], timer: Timer, device: str) -> Iterator[Choice]:
    """Time the configurations of the given kernels and types, and remember the best of each class at once.
    Kernels with a single configuration, and those whose module chooses by itself, are left out."""
    for (kernel, dtype), (trans_a, trans_b) in product(pairs, product((False, True), repeat=2)):
        if KERNELS[kernel].launcher != "launch" or ((trans_a or trans_b) and not KERNELS[kernel].transposes):
            continue
        configs = KERNELS[kernel].configs(dtype, trans_a, trans_b)
        for name, shape in SHAPES.items() if len(configs) > 1 else ():
            seconds = timer(kernel, dtype, trans_a, trans_b, shape, configs)
            ranked = sorted((s, i) for i, s in enumerate(seconds) if s is not None)
            if ranked:
                least, index = ranked[0]
                choice = Choice(kernel, dtype, trans_a, trans_b, name, configs[index], least, seconds[0])
                key = _key(kernel, dtype, trans_a, trans_b, name)
                remember(FILE, device, {key: dict(choice.config.macros)})
                yield choice


def _key(kernel: str, dtype: str, trans_a: bool, trans_b: bool, shape: str) -> str:
    return f"{kernel} {dtype} {'NT'[trans_a]}{'NT'[trans_b]} {shape}"
