"""What is asked for: one product, with everything that can change C, its cost or its place."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..engine.ports import Device
from ..support.errors import InputError
from ..support.memory import default_memory_limit, parse_size
from .scalars import scalar

Precision = Literal["highest", "high", "medium"]
Op = Literal["none", "transpose", "adjoint"]


@dataclass(frozen=True)
class Operand:
    """An input with its op()."""

    array: Any
    """A path, a URL, a zarr.Array, or anything with shape, dtype and slicing."""
    transpose: bool = False
    adjoint: bool = False

    @property
    def op(self) -> Op:
        """What is done to the matrix before it is multiplied."""
        return "adjoint" if self.adjoint else "transpose" if self.transpose else "none"


@dataclass(frozen=True)
class Request:
    """C ← α·op(A)·op(B) + β·C. None means that a value is left to its default or, in a run that continues an
    interrupted one, to what that one was begun with."""

    a: Operand
    b: Operand
    c: Any = None
    """A path, a URL or an open zarr.Array; None for a new NumPy array."""
    alpha: complex | None = None
    beta: complex | None = None
    memory_limit: str | int | None = None
    device: str | Device = "auto"
    device_memory_limit: str | int | None = None
    precision: Precision = "highest"
    kernel: str = "auto"
    out_dtype: Any = None
    chunks: tuple[int, int] | None = None
    shards: tuple[int, int] | None = None
    compressor: str | None = None
    rechunk: bool = False
    verify: bool = False
    force: bool = False
    resume: bool = False
    symmetric: bool = False
    """op(B) is op(A)ᵀ: one half of C is computed, unless β is not 0."""
    writes: bool = True
    """False where only a plan is wanted."""

    def check(self) -> "Request":
        """The same request with numbers for α, β and the memory limits.

        Raises InputError where what is asked for cannot be, whatever the arrays hold.
        """
        alpha, beta = scalar("alpha", self.alpha), scalar("beta", self.beta)
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise InputError(f"{self.precision!r} is not a precision; choose one of {known}")
        if any(operand.transpose and operand.adjoint for operand in (self.a, self.b)):
            raise InputError("an operand is either transposed or its adjoint taken; give one of the two")
        if self.resume and self.c is None:
            raise InputError("only a C that is stored can be continued; leave out resume=True")
        if beta and self.c is None and self.writes:
            raise InputError("beta is not 0, so there must be a C to read; give its path")
        host, device = self.memory_limit, self.device_memory_limit
        return replace(
            self,
            alpha=alpha,
            beta=beta,
            memory_limit=default_memory_limit() if host is None else parse_size(host),
            device_memory_limit=None if device is None else parse_size(device),
        )
