"""Arrays to test with: values of every type, layouts of every kind, and a comparison that no NaN passes."""

import numpy as np
import zarr

LAYOUTS = {
    "tiny": {"chunks": (7, 5), "compressors": None},
    "rows": {"chunks": (16, 1000), "compressors": None},
    "cols": {"chunks": (1000, 16), "compressors": None},
    "one": {"chunks": (2000, 2000), "compressors": None},
    "zstd": {"chunks": (64, 50)},
    "shards": {"chunks": (32, 32), "shards": (128, 64)},
    "v2": {"chunks": (64, 50), "compressors": None, "zarr_format": 2},
    "v2-fortran": {"chunks": (64, 50), "compressors": None, "zarr_format": 2, "order": "F"},
    "v2-fortran-encoded": {"chunks": (64, 50), "zarr_format": 2, "order": "F"},
    "transposed": {
        "chunks": (64, 50),
        "compressors": None,
        "filters": [zarr.codecs.TransposeCodec(order=(1, 0))],
    },
    "big-endian": {
        "chunks": (64, 50),
        "compressors": None,
        "serializer": zarr.codecs.BytesCodec(endian="big"),
    },
}


def matrix(shape, dtype, seed):
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(max(info.min, -200), min(info.max, 200), shape, dtype, endpoint=True)
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype.kind == "c" else values).astype(dtype)


def assert_close(found, expected, bound):
    assert found.shape == expected.shape
    assert not np.isnan(found).any()
    assert np.linalg.norm(found - expected) <= bound * max(np.linalg.norm(expected), 1e-300)
