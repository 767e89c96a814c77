"""C ← α·op(A)·op(B) + β·C for chunked Zarr arrays larger than RAM and larger than the GPU.

>>> import ooc_gemm
>>> result = ooc_gemm.multiply("a.zarr", "b.zarr", "c.zarr", memory_limit="8GiB")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .support.errors import (
    BudgetError,
    DeviceError,
    Error,
    InputError,
    RangeError,
    StoreError,
    VerificationError,
)

if TYPE_CHECKING:
    from . import dask as dask
    from .api import gram, multiply, plan
    from .planning.plan import Plan
    from .reporting.report import report
    from .run.generate import random
    from .run.request import Operand
    from .run.result import Result
    from .run.verify import Check, verify
    from .statistics.components import PCA, SVD, pca, svd
    from .statistics.covariance import Covariance, corrcoef, cov
    from .statistics.kinship import Kinship, king
    from .statistics.neighbours import Neighbours, topk
    from .statistics.regression import LeastSquares, lstsq
    from .statistics.relationship import Relationship, grm
    from .statistics.threshold import Threshold, threshold

    __version__: str

__all__ = [
    "PCA",
    "SVD",
    "BudgetError",
    "Check",
    "Covariance",
    "DeviceError",
    "Error",
    "InputError",
    "Kinship",
    "LeastSquares",
    "Neighbours",
    "Operand",
    "Plan",
    "RangeError",
    "Relationship",
    "Result",
    "StoreError",
    "Threshold",
    "VerificationError",
    "corrcoef",
    "cov",
    "gram",
    "grm",
    "king",
    "lstsq",
    "multiply",
    "pca",
    "plan",
    "random",
    "report",
    "svd",
    "threshold",
    "topk",
    "verify",
]

_HOME = {
    "gram": "api",
    "multiply": "api",
    "plan": "api",
    "Operand": "run.request",
    "Plan": "planning.plan",
    "Result": "run.result",
    "random": "run.generate",
    "report": "reporting.report",
    "verify": "run.verify",
    "Check": "run.verify",
    "corrcoef": "statistics.covariance",
    "cov": "statistics.covariance",
    "Covariance": "statistics.covariance",
    "PCA": "statistics.components",
    "SVD": "statistics.components",
    "LeastSquares": "statistics.regression",
    "lstsq": "statistics.regression",
    "pca": "statistics.components",
    "svd": "statistics.components",
    "Neighbours": "statistics.neighbours",
    "topk": "statistics.neighbours",
    "Threshold": "statistics.threshold",
    "threshold": "statistics.threshold",
    "grm": "statistics.relationship",
    "king": "statistics.kinship",
    "Kinship": "statistics.kinship",
    "Relationship": "statistics.relationship",
}


def __getattr__(name: str) -> Any:
    """Nothing heavy is imported before it is used."""
    found: Any
    if name == "__version__":
        found = _version()
    elif name == "dask":
        found = import_module(".dask", __name__)
    elif name in _HOME:
        found = getattr(import_module(f".{_HOME[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names. `dask` is not in `__all__`, because it needs an extra that may not be installed."""
    return sorted([*__all__, "__doc__", "__name__", "__version__", "dask"])


def _version() -> str:
    """Return the version that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ooc-gemm")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"
