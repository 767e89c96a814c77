"""What compressors work in is in the ledger: measured in processes of their own, by the kernel's account."""

import json
import subprocess
import sys

import numpy as np
import pytest
import zarr
from conftest import make, ooc

from ooc_gemm.planning.problem import MiB, Work
from ooc_gemm.storage.format import codec_memory, shards

MEASURE = """
import json, sys, threading
import numcodecs
import numpy as np
from ooc_gemm.storage.format import codec
from ooc_gemm.support import buffers as pages

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

def more(work):
    work()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    made = work()
    return status("VmHWM") - before, made

def measure(configuration, values):
    options = {key: value for key, value in configuration.items() if key != "id"}
    ours = codec.find(configuration["id"], options)
    encoder = ours or numcodecs.get_codec(configuration)
    encoding, made = more(lambda: encoder.encode(values))
    data, out = np.frombuffer(made, np.uint8), np.ones(values.nbytes, np.uint8)
    decoder = ours or codec.bounded(configuration["id"], options, values.nbytes, True)
    decoding, _ = more(lambda: decoder.decode(data, out))
    found.append((encoding - len(made), decoding))

pages.give_back()
found = []
sides = json.loads(sys.argv[2])
for configuration in json.loads(sys.argv[1]):
    for side in sides:
        rng = np.random.default_rng(0)
        for values in (rng.random((side, side), np.float32), rng.integers(0, 9, (side, side), np.int32)):
            thread = threading.Thread(target=measure, args=(configuration, values))
            thread.start()
            thread.join()
print(json.dumps(found))
"""

CODECS = [
    *({"id": "zstd", "level": level} for level in (-5, 1, 4, 9, 13)),
    *({"id": "blosc", "cname": "zstd", "clevel": level, "shuffle": 2} for level in (3, 9)),
    *({"id": "blosc", "cname": name, "clevel": 5, "shuffle": 1} for name in ("lz4", "zlib")),
    {"id": "gzip", "level": 6},
    {"id": "zlib", "level": 6},
    {"id": "lz4"},
]
SLOW = [{"id": "zstd", "level": 19}, {"id": "bz2"}]
SLOW += [{"id": "lzma", "preset": preset} for preset in (0, None)]


def measured(codecs, sides):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(codecs), json.dumps(sides)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return iter(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is measured in /proc")
@pytest.mark.parametrize(("codecs", "sides"), [(CODECS, (200, 800)), (SLOW, (400,))], ids=["quick", "slow"])
def test_no_compressor_takes_more_than_the_ledger_says(codecs, sides):
    """Two chunks are counted beside: what is made of one, and its copy in another type."""
    found, most = measured(codecs, sides), 0
    for codec in codecs:
        name, configuration = codec["id"], {key: value for key, value in codec.items() if key != "id"}
        for side in sides:
            nbytes = 4 * side * side
            for _ in range(2):
                encoding, decoding = next(found)
                assert encoding <= codec_memory.encoding(name, configuration).bytes_for(nbytes), codec
                beside = nbytes if name in ("bz2", "lzma") else 0  # they make a chunk of their own
                assert decoding - beside <= codec_memory.decoding(name, configuration).bytes_for(nbytes), (
                    codec
                )
                most = max(most, encoding)
    assert most > 8 * MiB  # so much is there to be noticed


def test_a_work_is_never_less_than_its_parts():
    one, other = Work(3, 2, 100), Work(5, 4, 10)
    for size in (0, 1, 2, 3, 16, 17, 1000):
        assert (one + other).bytes_for(size) >= max(one.bytes_for(size), other.bytes_for(size))
    assert [one.bytes_for(size) for size in (1, 2, 3, 16, 33, 10**6)] == [5, 7, 11, 35, 103, 103]


PRODUCT = """
import sys
from ooc_gemm import api, BudgetError
a, b, c, compressor, factor = sys.argv[1:6]
options = dict(device="cpu", compressor=compressor, chunks=(1024, 1024))
if len(sys.argv) > 6:
    options.update(shards=(2048, 1024))
try:
    api.multiply(a, b, c, memory_limit=1, **options)
except BudgetError as error:
    limit = int(error.minimum_memory_limit * float(factor))
result = api.multiply(a, b, c, memory_limit=limit, **options)
print(result.peak_host_bytes, limit, result.plan.ledger["encoding"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressor", "factor", "sharded"),
    [("zstd:12", 1.5, ()), ("zstd:12", 1, ("shards",)), ("zstd:15", 1, ()), ("blosc", 1, ("shards",))],
)
def test_a_product_with_strong_compression_stays_within_its_limit(tmp_path, compressor, factor, sharded):
    rng = np.random.default_rng(1)
    values = rng.integers(-9, 9, (2048, 2048)).astype(np.float32)
    a, b = (make(tmp_path / name, values, chunks=(1024, 1024), compressors=None) for name in "ab")
    c = str(tmp_path / "c")
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT, a, b, c, compressor, str(factor), *sharded],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    peak, limit, encoding = map(int, done.stdout.split())
    assert peak <= limit
    assert encoding > (48 * MiB if compressor != "blosc" else 2 * MiB)
    found = zarr.open_array(c, mode="r")
    assert found.shards == ((2048, 1024) if sharded else None)
    assert np.array_equal(found[:], values @ values)


@pytest.mark.parametrize("compressor", ["none", "zstd:2", "blosc"])
@pytest.mark.parametrize("shape", [(7, 5), (8, 6), (13, 1)])
def test_shards_that_are_made_here_are_what_zarr_reads(tmp_path, compressor, shape):
    rng = np.random.default_rng(2)
    a, b = rng.integers(-5, 5, (shape[0], 9)).astype("f8"), rng.integers(-5, 5, (9, shape[1])).astype("f4")
    paths = [make(tmp_path / name, values, chunks=(4, 4)) for name, values in zip("ab", (a, b), strict=True)]
    done = ooc(
        *("multiply", *paths, tmp_path / "c", "--chunks=2,3", "--shards=4,6", f"--compressor={compressor}"),
        "--verify",
    )
    assert done.code == 0, done.err
    for pipeline in ("zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs.ZarrsCodecPipeline"):
        with zarr.config.set({"codec_pipeline.path": pipeline}):
            found = zarr.open_array(tmp_path / "c", mode="r")
            assert (found.chunks, found.shards) == ((2, 3), (4, 6))
            assert np.array_equal(found[:], a @ b)


@pytest.mark.parametrize("at_end", [True, False])
def test_the_index_of_a_shard_stands_where_it_is_asked_for(at_end):
    chunks = [np.full(n, n, np.uint8) for n in (3, 1, 0, 7)]
    how = shards.Index(4, at_end)
    made = shards.make(chunks, bytes, how, np.zeros(shards.most_bytes(how, 7), np.uint8))
    nbytes = 16 * 4 + 4
    index = made[-nbytes:] if at_end else made[:nbytes]
    extents = index[:-4].view("<u8").reshape(4, 2).tolist()
    assert [made[at : at + size].tobytes() for at, size in extents] == [bytes(chunk) for chunk in chunks]
    assert len(made) == nbytes + 11
