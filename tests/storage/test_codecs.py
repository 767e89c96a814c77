"""Every codec with every kind of chunk and every type: read by the engine, and equal to what was stored."""

import itertools
import warnings

import numpy as np
import pytest
import zarr
from numcodecs import BZ2, LZ4, LZMA, Blosc, GZip, Zlib, Zstd

from ooc_gemm import InputError, multiply
from ooc_gemm.planning.schedule import cut
from ooc_gemm.storage.read import inputs
from ooc_gemm.storage.read.source import Source

TYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
BLOSC = list(
    itertools.product(["blosclz", "lz4", "lz4hc", "zlib", "zstd"], ["noshuffle", "shuffle", "bitshuffle"])
)
SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
CODECS_3 = {
    "raw": [],
    "zstd": [{"name": "zstd", "configuration": {"level": 3, "checksum": False}}],
    "zstd with a checksum": [{"name": "zstd", "configuration": {"level": 19, "checksum": True}}],
    "gzip": [{"name": "gzip", "configuration": {"level": 5}}],
    "crc32c": [{"name": "crc32c"}],
    "zstd and crc32c": [
        {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
        {"name": "crc32c"},
    ],
    **{
        f"blosc {name} {shuffle}": [
            {
                "name": "blosc",
                "configuration": {
                    "cname": name,
                    "clevel": 5,
                    "shuffle": shuffle,
                    "typesize": 4,
                    "blocksize": 0,
                },
            }
        ]
        for name, shuffle in BLOSC
    },
    "lz4": [{"name": "numcodecs.lz4", "configuration": {"acceleration": 1}}],
    "zlib": [{"name": "numcodecs.zlib", "configuration": {"level": 1}}],
    "bz2": [{"name": "numcodecs.bz2", "configuration": {"level": 1}}],
    "lzma": [
        {"name": "numcodecs.lzma", "configuration": {"format": 1, "check": -1, "preset": 1, "filters": None}}
    ],
}
CODECS_2 = {
    "raw": None,
    "zstd": Zstd(3),
    "zstd with a checksum": Zstd(3, checksum=True),
    **{f"blosc {name} {shuffle}": Blosc(name, 5, SHUFFLES[shuffle]) for name, shuffle in BLOSC},
    "lz4": LZ4(),
    "gzip": GZip(5),
    "zlib": Zlib(1),
    "bz2": BZ2(1),
    "lzma": LZMA(preset=1),
}
# Shape and chunks: one element, whole chunks, chunks that reach past both edges.
GRIDS = {
    "one element": ((1, 1), (1, 1)),
    "edges": ((19, 13), (8, 5)),
    "one large chunk": ((40, 30), (64, 64)),
}


def contents(kind, shape, dtype):
    """What chunks hold. `constant` and `zeros` compress to a few bytes, `noise` does not compress."""
    dtype = np.dtype(dtype)
    if kind == "noise":
        raw = np.random.default_rng(7).bytes(shape[0] * shape[1] * dtype.itemsize)
        values = np.frombuffer(raw, dtype).reshape(shape).copy()
        if dtype.kind in "fc":
            values[~np.isfinite(values)] = 1
        return values
    return np.full(shape, {"zeros": 0, "constant": 3}[kind], dtype)


def elements(source: Source):
    """All that a source reads, as its user sees it, by pieces of whole chunks."""
    s = source.matrix
    found = np.empty((s.rows, s.cols), source.dtype)
    slot = np.empty(max(1, 2 * s.chunk_bytes), np.uint8)
    for piece in cut("a", s, (0, s.rows), (0, s.cols), s.chunk_bytes):
        view, _ = source.read(piece, slot)
        found[slice(*piece.rows), slice(*piece.cols)] = view
    return found.T if s.transposed else found


def stored(place, version, codec, values, chunks, order="C", shards=None):
    """An array that zarr writes, also where its chunks hold nothing but the fill value."""
    options = {"config": {"write_empty_chunks": True}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of codecs that are not in the specification
        if version == 2:
            options |= {"zarr_format": 2, "compressors": CODECS_2[codec], "order": order}
        else:
            options |= {"compressors": CODECS_3[codec], "shards": shards}
        array = zarr.create_array(
            str(place), shape=values.shape, dtype=values.dtype, chunks=chunks, fill_value=0, **options
        )
        array[...] = values
    return str(place)


LAYOUTS = [
    *((3, codec, None) for codec in CODECS_3),
    *((3, codec, 2) for codec in CODECS_3),
    *((2, codec, None) for codec in CODECS_2),
]


@pytest.mark.parametrize(("version", "codec", "shard"), LAYOUTS)
def test_every_codec_gives_back_what_was_stored(tmp_path, version, codec, shard):
    """Types in turn: each codec meets every type, and every pair of contents and grid."""
    kinds = ("constant", "zeros", "noise")
    types = itertools.cycle(TYPES[(len(codec) + version) % len(TYPES) :] + TYPES)
    cases = [(kind, grid, next(types)) for kind in kinds for grid in GRIDS]
    cases += [("constant", "one element", next(types)) for _ in range(len(TYPES) - len(cases))]
    for number, (kind, grid, dtype) in enumerate(cases):
        shape, chunks = GRIDS[grid]
        values = contents(kind, shape, dtype)
        shards = shard and (chunks[0] * shard, chunks[1] * shard)
        place = stored(tmp_path / str(number), version, codec, values, chunks, shards=shards)
        found = elements(inputs.open_input(place).source)
        assert found.tobytes() == values.tobytes(), (kind, grid, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("version", "codec"), [(3, "zstd"), (2, "blosc lz4 shuffle"), (2, "lz4")])
def test_constant_chunks_of_every_type_are_multiplied(tmp_path, version, codec, dtype):
    shape, chunks = GRIDS["edges"]
    a = stored(tmp_path / "a", version, codec, contents("constant", shape, dtype), chunks)
    b = stored(tmp_path / "b", version, codec, contents("constant", shape[::-1], dtype), chunks[::-1])
    result = multiply(a, b, device="cpu")
    assert np.all(result.array == 9 * shape[1])


def test_one_element_with_zarrs_own_defaults(tmp_path):
    """What `zarr.save` makes of a matrix of one element: zstd takes 13 bytes for it."""
    for name, value in (("a", 3.0), ("b", 5.0)):
        zarr.save_array(str(tmp_path / name), np.full((1, 1), value))
    assert multiply(str(tmp_path / "a"), str(tmp_path / "b"), device="cpu").array[0, 0] == 15


@pytest.mark.parametrize("codec", CODECS_2)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_arrays_without_elements(tmp_path, codec, shape):
    a = stored(tmp_path / "a", 2, codec, np.empty(shape, "f4"), (4, 4))
    b = np.ones((shape[1], 3), "f4")
    assert np.array_equal(multiply(a, b, device="cpu").array, np.zeros((shape[0], 3), "f4"))


@pytest.mark.parametrize("codec", [name for name in CODECS_2 if name.partition(" ")[0] != "raw"])
@pytest.mark.parametrize("size", [0, 1, 4, 5, 8, 12, 15])
def test_chunks_that_are_cut_off_are_refused(tmp_path, codec, size):
    """However little is left of it: a sentence, and no crash of a decompressor."""
    place = stored(tmp_path / "a", 2, codec, contents("noise", (64, 64), "f4"), (64, 64))
    (chunk,) = (tmp_path / "a").glob("0*")
    chunk.write_bytes(chunk.read_bytes()[:size])
    with pytest.raises(OSError, match=r"chunk 0\.0 cannot be read or decoded"):
        elements(inputs.open_input(place).source)


@pytest.mark.parametrize(("version", "shards"), [(2, None), (3, None), (3, (8, 8))])
def test_a_compressor_that_blosc_lacks_here_is_named(tmp_path, version, shards):
    """No chunk is said to be broken."""
    codec = Blosc(cname="lz4") if version == 2 else zarr.codecs.BloscCodec(cname="lz4")
    a = np.arange(256, dtype="f4").reshape(16, 16)
    options = {"shards": shards} if shards else {}
    zarr.create_array(
        tmp_path / "a", data=a, chunks=(4, 4), compressors=codec, zarr_format=version, **options
    )
    document = tmp_path / "a" / (".zarray" if version == 2 else "zarr.json")
    document.write_text(document.read_text().replace('"lz4"', '"snappy"'))
    with pytest.raises(InputError, match="is compressed with snappy in blosc, which numcodecs cannot"):
        multiply(tmp_path / "a", a)
