"""C ← α·op(A)·op(B) + β·C for chunked Zarr arrays larger than RAM and larger than the GPU.

>>> import ooc_gemm
>>> result = ooc_gemm.multiply("a.zarr", "b.zarr", "c.zarr", memory_limit="8GiB")
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Result, multiply, plan
    from .errors import BudgetError, DeviceError, Error, InputError, RangeError, StoreError
    from .plan import Plan
    from .random import random
    from .verify import Check, verify

__all__ = [
    "BudgetError",
    "Check",
    "DeviceError",
    "Error",
    "InputError",
    "Plan",
    "RangeError",
    "Result",
    "StoreError",
    "multiply",
    "plan",
    "random",
    "verify",
]

try:
    __version__ = version("ooc-gemm")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

_HOME = {
    "multiply": "api",
    "plan": "api",
    "Result": "api",
    "random": "random",
    "verify": "verify",
    "Check": "verify",
}
_HOME |= {"Plan": "plan"}


def __getattr__(name: str) -> Any:
    """Nothing heavy is imported before it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    globals()[name] = found  # also over the submodule of the same name that the import has bound here
    return found
