"""The command line: the commands of `ooc-gemm`, and how their results are shown."""

from .entry import main

__all__ = ["main"]
