"""The ladder without a GPU: its kernels run on the CPU, are checked against NumPy, and their accesses to
memory are counted (`python -m ooc_gemm.ladder`)."""

from .emulator import Counts
from .rungs import RUNGS, Outcome, Run, climb

__all__ = ["RUNGS", "Counts", "Outcome", "Run", "climb"]
