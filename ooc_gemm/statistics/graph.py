"""The graph of neighbours as a sparse matrix in compressed rows."""

import numpy as np

from .rescore import Array


def graph_rows(indices: Array, values: Array, metric: str) -> tuple[Array, Array, Array]:
    """(data, columns, elements of each row) of some rows of the graph, columns in ascending order.

    indices, values: of the neighbours, −1 where there is none. Data are distances, 1 − cosine or squared, or
    dot products.
    """
    order = np.argsort(indices, axis=1, kind="stable")
    indices, values = (np.take_along_axis(x, order, 1) for x in (indices, values))
    there = indices >= 0
    data = 1 - values[there] if metric == "cosine" else values[there]
    return data, indices[there], there.sum(axis=1)
