"""Runs rungs of the ladder on the CPU, compares them with NumPy, and counts what they do."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..cuda_kernels.catalog import KERNELS
from ..cuda_kernels.config import Config
from ..support.errors import DeviceError, InputError
from .emulator import LARGEST_MATRIX, PLAIN, Counts, Emulator, Fault, Problem, compiler_missing, whole_source

RUNGS = tuple(name for name in PLAIN if not KERNELS[name].transposes)
"""Names of the kernels that can be run, from the slowest to the fastest on a GPU."""
HOPPER_RUNGS = tuple(name for name, kernel in KERNELS.items() if kernel.launcher == "rung")
"""Names of the rungs above them, which cannot be run here."""


@dataclass(frozen=True)
class Run:
    """One product C = A·B by one configuration of a rung."""

    rung: str
    """Name of the kernel, one of RUNGS."""
    config: Config
    m: int
    """Rows of A and C."""
    n: int
    """Columns of B and C."""
    k: int
    """Columns of A, rows of B."""

    @classmethod
    def of(cls, rung: str, m: int, n: int, k: int, dtype: str = "float32", index: int = 0) -> "Run":
        """Return the run of a rung's configuration number `index` (default: 0, the fastest on a GPU). Raises
        InputError if there is no such rung, if it needs a GPU, if it does not take the type, or if a matrix
        is too large."""
        if rung in HOPPER_RUNGS:
            raise InputError(
                f"The rung {rung!r} needs a GPU of compute capability 9.0 (Hopper): its instructions cannot "
                "be emulated on the CPU. On such a GPU `ooc-gemm bench kernels` times it."
            )
        if rung not in RUNGS:
            raise InputError(f"There is no rung {rung!r}; there are {', '.join(RUNGS)}.")
        if dtype not in KERNELS[rung].dtypes:
            raise InputError(f"The rung {rung!r} takes {', '.join(KERNELS[rung].dtypes)}, not {dtype}.")
        largest = max(m * k, k * n, m * n) * np.dtype(dtype).itemsize
        if min(m, n, k) < 1 or largest > LARGEST_MATRIX:
            raise InputError(
                f"m = {m}, n = {n}, k = {k} cannot be run: each must be 1 or more, and A, B and C may have "
                f"{LARGEST_MATRIX >> 20} MiB each, as 512×512 elements of float32 have."
            )
        return cls(rung, KERNELS[rung].configs(dtype, False, False)[index], m, n, k)


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    run: Run
    counts: Counts
    error: float
    """Largest error of an element, relative to the element of |A|·|B|; 0 for integers that are right."""
    correct: bool
    """Whether all errors are within those of k + 2 roundings. Integers must be equal."""

    @property
    def products(self) -> int:
        """Number of multiply-adds that C = A·B needs: m·n·k."""
        return self.run.m * self.run.n * self.run.k

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are read from and written to global memory."""
        return (self.counts.global_loads + self.counts.global_stores) * np.dtype(
            self.run.config.dtype
        ).itemsize

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: needed operations, 2·m·n·k, for each of these bytes."""
        return 2 * self.products / self.nbytes


def climb(runs: Iterable[Run]) -> list[Outcome]:
    """Compile the kernels of some runs for the CPU, run them on random matrices, and return the outcomes.

    Elements are drawn from N(0, 1), or from the integers from -999 to 998. Raises DeviceError if g++ or its
    sanitizers are missing, or if a kernel accesses what it must not.
    """
    if why := compiler_missing():
        raise DeviceError(f"{why}; on Debian and Ubuntu: apt install g++")
    runs = list(runs)
    labels = {config: str(i) for i, config in enumerate(dict.fromkeys(run.config for run in runs))}
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-ladder-") as folder:
        kernels = {label: (config, whole_source(config.kernel)) for config, label in labels.items()}
        emulator = Emulator(Path(folder), kernels, counting=True)
        found = []
        for run in runs:
            problem = _problem(run)
            try:
                ((c, counts),) = emulator.run_counted(labels[run.config], [problem])
            except Fault as fault:
                raise DeviceError(f"The kernel {run.rung} failed on the CPU: {fault}") from fault
            found.append(Outcome(run, counts, *_compared(problem, c)))
    return found


def _problem(run: Run) -> Problem:
    """Random matrices. C is poison, which is not to be read."""
    rng, dtype = np.random.default_rng(7), np.dtype(run.config.dtype)

    def drawn(rows: int, cols: int) -> np.ndarray:
        values = (
            rng.standard_normal((rows, cols)) if dtype.kind == "f" else rng.integers(-999, 999, (rows, cols))
        )
        return values.astype(dtype)

    poison = np.nan if dtype.kind == "f" else np.iinfo(dtype).max
    c = np.full((run.m, run.n), poison, dtype)
    return Problem(run.m, run.n, run.k, 1, drawn(run.m, run.k), drawn(run.k, run.n), 0, c, "forward")


def _compared(problem: Problem, c: np.ndarray) -> tuple[float, bool]:
    """Return the largest relative error, and whether it is small enough."""
    whole = c.dtype.kind == "i"
    wide: Any = np.int64 if whole else np.longdouble
    a, b = problem.a.astype(wide), problem.b.astype(wide)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = abs(c - a @ b) / np.maximum(abs(a) @ abs(b), 1 if whole else 0)
    error = float(errors.max())
    return error, bool(error <= (0 if whole else 2 * (problem.k + 3) * np.finfo(c.dtype).eps))
