"""Relationships of 500 people from 10,000 variants, by `ooc_gemm.grm` and `king` within a memory limit.

The genotypes are the sample set toydata of the package bed-reader. They are stored as VCF Zarr, as bio2zarr
writes it. Principal components are those of the relationship matrix, which xarray opens with the names of the
people. They are compared with those of the standardised genotypes in memory.

    python examples/genotypes.py
"""

import importlib.util
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import zarr

import ooc_gemm

LIMIT = "512MiB"
COMPONENTS = 4


def load() -> tuple[np.ndarray, list[str]]:
    """Read the genotypes, variants × people, −1 where missing, and the names of the people."""
    spec = importlib.util.find_spec("bed_reader")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("Error: the genotypes are in the package bed-reader; pip install 'ooc-gemm[demo]'")
    from bed_reader import open_bed

    place = Path(spec.submodule_search_locations[0]) / "tests" / "data" / "toydata.5chrom.bed"
    with open_bed(place) as bed:
        g = bed.read(dtype="int8").T  # −127 where missing
        return np.maximum(g, -1), list(bed.iid)


def store(path: Path, g: np.ndarray, people: list[str]) -> None:
    """Write calls of two alleles each."""
    calls = np.stack([g > 0, g > 1], axis=-1).astype("i1")
    calls[g < 0] = -1
    names = ("variants", "samples", "ploidy")
    group = zarr.create_group(path)
    group.create_array("call_genotype", data=calls, chunks=(1000, 250, 2), dimension_names=names)
    with warnings.catch_warnings(action="ignore"):  # texts have no specification in Zarr yet
        group.create_array("sample_id", data=np.array(people, np.dtypes.StringDType()))


def main() -> int:
    g, people = load()
    with tempfile.TemporaryDirectory() as folder:
        calls, out = Path(folder, "calls.vcz"), Path(folder, "k.zarr")
        store(calls, g, people)
        made = ooc_gemm.grm(calls, out, memory_limit=LIMIT)
        kinship = ooc_gemm.king(calls, memory_limit=LIMIT)
        k = zarr.open_array(out / "stat_genomic_relationship", mode="r")[...].astype(np.float64)
    values, vectors = np.linalg.eigh(k)

    x = np.ma.masked_equal(g, -1).astype(np.float64)
    p = x.mean(axis=1, keepdims=True) / 2
    z = ((x - 2 * p) / np.ma.sqrt(2 * p * (1 - p))).filled(0)
    u, s, _ = np.linalg.svd(z.T, full_matrices=False)
    same = made.samples == people
    same &= np.allclose(values[::-1][:COMPONENTS], s[:COMPONENTS] ** 2 / len(z), rtol=1e-4)
    same &= np.allclose(np.abs(np.vecdot(vectors.T[::-1][:COMPONENTS], u.T[:COMPONENTS])), 1, atol=1e-4)
    said = "the same as" if same else "not"
    print(f"{len(people)} people, {made.variants:,} variants, {made.missing} genotypes missing")
    print(f"principal components are {said} those of the standardised genotypes")
    for value in values[::-1][:COMPONENTS]:
        print(f"{value / values.sum():6.1%} of the variance")
    first, second = np.unravel_index(np.argmax(np.triu(kinship.array, 1)), k.shape)
    print(f"closest: {people[first]} and {people[second]}, kinship {kinship.array[first, second]:.3f}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
