"""The cases of `answers.py`: their data, the commands of both sides, and how results are compared."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec

LIMIT = "512MiB"
OURS = [sys.executable, "-m", "ooc_gemm.cli"]


@dataclass(frozen=True)
class Case:
    """One statistic, computed by us and by others."""

    name: str
    make: Callable[[Path, bool], None]
    """Makes the data in a folder; true: a small one."""
    ours: list[str]
    """The command, run in that folder."""
    theirs: list[str] | None
    """None: nobody else does it within the memory."""
    error: Callable[[Path], float]
    """How far both results are from each other, or ours is from the truth."""
    accuracy: float
    """The largest error that passes."""
    bar: float | None
    """The largest ratio of our seconds to theirs that passes."""


def make_genotypes(folder: Path, small: bool) -> None:
    """Write genotypes of variants × samples with 1 % missing, as blosc chunks in Zarr and as plink's bed."""
    variants, samples, step = (4_000, 200, 1_000) if small else (200_000, 2_000, 10_000)
    rng = np.random.default_rng(0)
    codec = BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle", typesize=1)
    stored = zarr.create_array(
        folder / "g.zarr",
        shape=(variants, samples),
        chunks=(step, samples // 2),
        dtype="i1",
        compressors=codec,
    )
    code = np.array([3, 2, 0, 1], np.uint8)  # of 0, 1 and 2 alleles, and of a missing genotype
    with open(folder / "g.bed", "wb") as bed:
        bed.write(bytes([0x6C, 0x1B, 1]))
        for start in range(0, variants, step):
            share = rng.uniform(0.05, 0.5, (step, 1)).astype(np.float32)
            draw = rng.random((step, samples), np.float32)
            g = (draw < share * share).astype(np.int8) + (draw < share * (2 - share)).astype(np.int8)
            g[rng.random(g.shape, np.float32) < 0.01] = -1
            stored[start : start + step] = g
            four = code[g].reshape(step, samples // 4, 4)  # −1 is the last
            bed.write((four << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2).astype(np.uint8).tobytes())
    lines = (f"1\tv{v}\t0\t{v + 1}\tA\tC\n" for v in range(variants))
    (folder / "g.bim").write_text("".join(lines))
    (folder / "g.fam").write_text("".join(f"f{i} s{i} 0 0 1 -9\n" for i in range(samples)))


def grm_error(folder: Path) -> float:
    """The largest difference between our matrix and plink2's."""
    ours = zarr.open_array(folder / "k.zarr", mode="r")[:]
    theirs = np.fromfile(folder / "k.rel.bin").reshape(ours.shape)
    return float(np.abs(ours - theirs).max())


def make_table(folder: Path, small: bool) -> None:
    """Write a table of float32 whose columns are correlated and have means of up to 10⁴ deviations."""
    rows, cols, step = (20_000, 64, 4_000) if small else (1_000_000, 512, 16_384)
    rng = np.random.default_rng(0)
    mix = np.eye(cols, dtype=np.float32) + rng.standard_normal((cols, cols), np.float32) / cols**0.5
    means = 1e4 * rng.standard_normal(cols, np.float32)
    stored = zarr.create_array(
        folder / "x.zarr", shape=(rows, cols), chunks=(step, cols), dtype="f4", compressors=None
    )
    for start in range(0, rows, step):
        count = min(step, rows - start)
        stored[start : start + count] = rng.standard_normal((count, cols), np.float32) @ mix + means


def corrcoef_error(folder: Path) -> float:
    """The largest difference between our matrix and the correlations in float64, found part by part."""
    x = zarr.open_array(folder / "x.zarr", mode="r")
    parts = [slice(start, start + 16_384) for start in range(0, x.shape[0], 16_384)]
    mean = sum(x[part].sum(axis=0, dtype=np.float64) for part in parts) / x.shape[0]
    products = np.zeros((x.shape[1],) * 2)
    for part in parts:
        apart = x[part] - mean
        products += apart.T @ apart
    deviation = np.sqrt(np.diag(products))
    wanted = products / deviation / deviation[:, None]
    return float(np.abs(zarr.open_array(folder / "r.zarr", mode="r")[:] - wanted).max())


def make_rows(folder: Path, small: bool) -> None:
    """Write float32 rows of rank 30, and noise."""
    rows, cols, step = (8_000, 200, 2_000) if small else (400_000, 2_000, 2_000)
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((30, cols), np.float32) * np.linspace(4, 1, 30, dtype=np.float32)[:, None]
    stored = zarr.create_array(
        folder / "x.zarr", shape=(rows, cols), chunks=(step, cols), dtype="f4", compressors=None
    )
    for start in range(0, rows, step):
        part = rng.standard_normal((step, 30), np.float32) @ mix
        stored[start : start + step] = part + rng.standard_normal((step, cols), np.float32)


def pca_error(folder: Path) -> float:
    """The largest relative error of our singular values, which are the norms of the scores, and of dask's
    beside the roots of the eigenvalues of AᵀA in float64."""
    x = zarr.open_array(folder / "x.zarr", mode="r")
    sums, products = np.zeros(x.shape[1]), np.zeros((x.shape[1],) * 2)
    for start in range(0, x.shape[0], 16_000):
        part = x[start : start + 16_000].astype(np.float64)
        sums += part.sum(axis=0)
        products += part.T @ part
    products -= np.outer(sums, sums) / x.shape[0]
    wanted = np.sqrt(np.linalg.eigvalsh(products)[::-1][:COMPONENTS])
    scores = zarr.open_array(folder / "scores.zarr", mode="r")[:].astype(np.float64)
    theirs = np.load(folder / "s.npy")
    print("dask: relative error of the singular values", np.abs(theirs / wanted - 1).max())
    return float(np.abs(np.linalg.norm(scores, axis=0) / wanted - 1).max())


def write_rows(path: Path, rows: int, seed: int) -> None:
    """Write rows of float32 whose directions are not spread evenly."""
    rng, step = np.random.default_rng(seed), 8_192
    stored = zarr.create_array(
        path, shape=(rows, DEPTH), chunks=(min(rows, step), DEPTH), dtype="f4", compressors=None
    )
    for start in range(0, rows, step):
        count = min(step, rows - start)
        stored[start : start + count] = rng.standard_normal((count, DEPTH), np.float32) + 0.3


def make_search(queries: int) -> Callable[[Path, bool], None]:
    """What writes so many queries, and 200,000 rows among which their neighbours are sought."""

    def make(folder: Path, small: bool) -> None:
        write_rows(folder / "q.zarr", queries // 20 if small else queries, 1)
        write_rows(folder / "x.zarr", 10_000 if small else 200_000, 2)

    return make


def topk_error(folder: Path) -> float:
    """The share of neighbours that faiss finds and we do not."""
    return _left_out(np.load(folder / "i.npy"), _indices(folder))


def _indices(folder: Path) -> npt.NDArray[np.int64]:
    """The neighbours that we have found."""
    return np.asarray(zarr.open_array(folder / "n.zarr" / "indices", mode="r")[:])


def _left_out(wanted: npt.NDArray[np.int64], found: npt.NDArray[np.int64]) -> float:
    """The share of neighbours that were not found."""
    return 1 - float(np.mean([np.isin(one, other).mean() for one, other in zip(wanted, found, strict=True)]))


def make_self(folder: Path, small: bool) -> None:
    """Write rows whose neighbours are sought among themselves."""
    write_rows(folder / "x.zarr", 5_000 if small else 100_000, 3)


def self_error(folder: Path) -> float:
    """The share of neighbours of some rows that we do not find, beside cosines in float64."""
    x = zarr.open_array(folder / "x.zarr", mode="r")[:].astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    rows = np.random.default_rng(0).choice(len(x), 200, replace=False)
    cosines = x[rows] @ x.T
    cosines[np.arange(len(rows)), rows] = -2
    wanted = np.argpartition(-cosines, K, axis=1)[:, :K]
    return _left_out(wanted, _indices(folder)[rows])


def dask_grm_error(folder: Path) -> float:
    """The largest difference between our matrix and dask's."""
    return float(np.abs(zarr.open_array(folder / "k.zarr", mode="r")[:] - np.load(folder / "k.npy")).max())


DEPTH, K = 384, 10
COMPONENTS, ITERATIONS = 20, 4
DASK = """
import dask, dask.array as da, numpy as np
with dask.config.set(scheduler="threads", num_workers=2):
    np.save("r.npy", da.corrcoef(da.from_zarr("x.zarr"), rowvar=False).compute())
"""
DASK_PCA = f"""
import dask, dask.array as da, numpy as np
with dask.config.set(scheduler="threads", num_workers=2):
    x = da.from_zarr("x.zarr")
    x = x - x.mean(axis=0)
    options = dict(n_power_iter={ITERATIONS}, iterator="QR", compute=True)
    u, s, v = da.linalg.svd_compressed(x, {COMPONENTS}, **options)
    u, s = dask.compute(u * s, s)
    np.save("u.npy", u), np.save("s.npy", s)
"""
"""`iterator="power"` overflows in float32."""
DASK_GRM = """
import dask, dask.array as da, numpy as np
with dask.config.set(scheduler="threads", num_workers=2):
    x = da.from_zarr("g.zarr")
    there = x >= 0
    mean = da.where(there, x, 0).sum(axis=1) / there.sum(axis=1)
    mean = mean.astype("f4")[:, None]
    scale = da.sqrt(mean * (1 - mean / 2))
    z = da.where(there, (x - mean) / scale, 0).astype("f4")
    there = there.astype("f4")
    np.save("k.npy", ((z.T @ z) / (there.T @ there)).compute())
"""
FAISS = f"""
import faiss, numpy as np, zarr
faiss.omp_set_num_threads(2)
base, queries = (np.asarray(zarr.open_array(path, mode="r")[...]) for path in ("x.zarr", "q.zarr"))
for rows in (base, queries):
    faiss.normalize_L2(rows)
index = faiss.IndexFlatIP({DEPTH})
index.add(base)
np.save("i.npy", index.search(queries, {K})[1])
"""
GRM = [*OURS, "grm", "g.zarr", "k.zarr", "-f", "-M", LIMIT]
TOPK = [*OURS, "topk", "q.zarr", "x.zarr", "n.zarr", "-k", f"{K}", "-f", "-M", LIMIT]
CASES = [
    Case(
        "grm",
        make_genotypes,
        GRM,
        ["plink2", "--bfile", "g", "--make-rel", "square", "bin", "--threads", "2", "--out", "k"],
        grm_error,
        accuracy=1e-5,
        bar=1.0,
    ),
    Case(
        "corrcoef",
        make_table,
        [*OURS, "corrcoef", "x.zarr", "r.zarr", "--no-rowvar", "-f", "-M", LIMIT],
        [sys.executable, "-c", DASK],
        corrcoef_error,
        accuracy=1e-5,
        bar=0.5,
    ),
    Case(
        "pca",
        make_rows,
        [*OURS, "pca", "x.zarr", "scores.zarr", "-k", f"{COMPONENTS}", "-f", "-M", LIMIT, "-d", "cpu"],
        [sys.executable, "-c", DASK_PCA],
        pca_error,
        accuracy=1e-4,
        bar=0.5,
    ),
    Case(
        "grm-dask",
        make_genotypes,
        GRM,
        [sys.executable, "-c", DASK_GRM],
        dask_grm_error,
        accuracy=1e-5,
        bar=0.33,
    ),
    *(
        Case(
            f"topk-{queries}",
            make_search(queries),
            TOPK,
            [sys.executable, "-c", FAISS],
            topk_error,
            accuracy=1e-4,
            bar=1.1,
        )
        for queries in (2_000, 20_000)
    ),
    Case(
        "topk-self",
        make_self,
        [*OURS, "topk", "x.zarr", "n.zarr", "-k", f"{K}", "-f", "-M", LIMIT],
        None,
        self_error,
        accuracy=1e-4,
        bar=None,
    ),
]
