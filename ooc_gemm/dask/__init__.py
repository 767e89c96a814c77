"""The Dask side: products of dask arrays, and products made by a `distributed` cluster.

Needs the extra `distributed`.
"""

from .arrays import matmul
from .local_cluster import on
from .multiply import gram, multiply

__all__ = ["gram", "matmul", "multiply", "on"]
