"""Nearest neighbours of handwritten digits, which come with scikit-learn, by `ooc_gemm.topk`.

The 1,797 images of 8×8 pixels are stored as a Zarr array. The ten nearest other images of each are found
within a memory limit, and compared with what scikit-learn finds. Then each digit is guessed from its
neighbours.

    python examples/digits.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import zarr
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

import ooc_gemm

NEIGHBOURS = 10


def main() -> int:
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder, "digits.zarr")
        zarr.create_array(images, data=digits.data.astype("float32"), chunks=(256, 64))
        found = ooc_gemm.topk(
            images,
            out=Path(folder, "neighbours.zarr"),
            k=NEIGHBOURS,
            metric="sqeuclidean",
            memory_limit="512MiB",
            device="cpu",
        )
        indices, values = found.indices[...], found.values[...]

    theirs = NearestNeighbors(n_neighbors=NEIGHBOURS, metric="sqeuclidean", algorithm="brute")
    distances, _ = theirs.fit(digits.data).kneighbors()
    same = np.array_equal(values, distances)
    print(f"distances to {NEIGHBOURS} neighbours are {'the same as' if same else 'not'} scikit-learn's")

    counts = np.array([np.bincount(row, minlength=10) for row in digits.target[indices]])
    right = counts.argmax(axis=1) == digits.target
    print(f"{right.sum()} of {len(right)} digits are what most of their neighbours are")
    return 0 if same and right.mean() > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
