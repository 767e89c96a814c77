"""Operands: inputs with op()."""

from dataclasses import replace
from typing import Any

from ..storage.read import store
from ..storage.read.local import Source


def open_operand(spec: Any, name: str, transpose: bool = False) -> Source:
    """An input with op() in its matrix: a transposition of a Fortran-order array is none. `name`: what
    messages call it where it is not stored under one."""
    source = store.open_source(spec, store.role(spec, name))
    if transpose:
        source.matrix = replace(source.matrix, transposed=not source.matrix.transposed)
    return source
