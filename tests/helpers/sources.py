"""The modules of ooc_gemm as syntax trees, each of which is parsed once in a process."""

import ast
import functools
from pathlib import Path

import ooc_gemm

PACKAGE = Path(ooc_gemm.__file__).parent


@functools.cache
def trees():
    """Return the tree of every module by its path in the package, in order."""
    return {
        file.relative_to(PACKAGE): ast.parse(file.read_text("utf-8"))
        for file in sorted(PACKAGE.rglob("*.py"))
    }
