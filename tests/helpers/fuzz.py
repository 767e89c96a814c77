"""Hostile arrays: valid ones of many layouts, after mutations of their metadata, and now and then of a chunk.

    python tests/helpers/fuzz.py --count 10000 --seed 6 [--out FILE]

opens each as an operand, plans its product with its own transpose, which opens it twice more, and reads
pieces, in a process of its own that is watched: whatever the metadata says, it either works or is a clean
error, soon and with little memory. What takes too long is tried again, three times in all, for the machine
may have been busy with other work; the least time counts. Prints a table; exit status 1 where something else
happened, which is kept to be looked at.
"""

import argparse
import bz2
import collections
import contextlib
import gzip
import json
import lzma
import math
import multiprocessing
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numcodecs
import numpy as np
import zarr

import ooc_gemm
from ooc_gemm.planning.schedule import cut
from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.read import inputs
from ooc_gemm.support.memory import resident_bytes

MiB = 1 << 20
SECONDS, GROWTH = 1.0, 300 * MiB
"""What one document may take, by the clock and of processors."""
TRIES = 3
PLANNED = 4096
"""Chunks; with more a plan takes longer, as the product would."""

warnings.filterwarnings("ignore", message="Numcodecs codecs are not in the Zarr")
LAYOUTS = {
    "raw": {"compressors": None},
    "zstd": {"compressors": [zarr.codecs.ZstdCodec(level=1)]},
    "blosc": {"compressors": [zarr.codecs.BloscCodec()]},
    "gzip": {"compressors": [zarr.codecs.GzipCodec(level=1)]},
    "big endian": {"compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")},
    "two codecs": {"compressors": [zarr.codecs.ZstdCodec(level=1), zarr.codecs.Crc32cCodec()]},
    "three codecs": {"compressors": [zarr.codecs.GzipCodec(), zarr.codecs.BloscCodec()]},
    "Fortran": {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
    "shards": {"shards": (8, 8), "compressors": None},
    "zstd shards": {"shards": (8, 8)},
    "gzip shards": {"shards": (8, 8), "compressors": [zarr.codecs.GzipCodec(), zarr.codecs.Crc32cCodec()]},
    "delta": {"filters": [zarr.codecs.numcodecs.Delta(dtype="<i4")], "dtype": "i4"},
    "lzma": {"compressors": [zarr.codecs.numcodecs.LZMA(preset=1)]},
    "bz2": {"compressors": [zarr.codecs.numcodecs.BZ2(level=1)]},
    "v2": {"zarr_format": 2, "compressors": None},
    "v2 zstd": {"zarr_format": 2},
    "v2 blosc": {"zarr_format": 2, "compressors": numcodecs.Blosc()},
    "v2 zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib(1)},
    "v2 lz4": {"zarr_format": 2, "compressors": numcodecs.LZ4()},
    "v2 Fortran": {"zarr_format": 2, "order": "F", "compressors": None},
    "v2 big endian": {"zarr_format": 2, "dtype": ">f4"},
    "v2 filters": {
        "zarr_format": 2,
        "filters": [numcodecs.Delta("f8", "f4"), numcodecs.Shuffle(4)],
        "compressors": numcodecs.BZ2(),
        "dtype": "f8",
    },
}


def make_layouts(folder):
    """One valid array of every layout; their paths."""
    values, paths = np.random.default_rng(0).integers(-99, 99, (12, 10)), {}
    for name, options in LAYOUTS.items():
        options = {"dtype": "f4", "chunks": (4, 4), **options}
        paths[name] = Path(folder, name)
        array = zarr.create_array(paths[name], shape=(12, 10), **options)
        array[...] = values
    return paths


# ---------------------------------------------------------------------------------------------- documents

SMALL = [0, -1, 1, 2, 3, 4, 8, 12, 0.5, -0.0, True, False, 1e308, float("nan"), float("inf"), -float("inf")]
LARGE = [(1 << bits) - less for bits in (16, 20, 31, 32, 40, 48, 62, 63, 64) for less in (0, 1)]
NUMBERS = [*SMALL, *LARGE, 10**400]


def split(words):
    return words.split()


WORDS = split("""x 0 12 .. ../../x /etc/passwd c/0/0 . / NaN Infinity 0x7fc00000 AAAA default v2 regular
    rectilinear array group f4 <f8 >i2 |O |S9 <U99999999 float64 int8 bool string r99999999 bytes C F start
    end little big""")
WORDS += ["", "\0", "\ud800", "\x1b[31m", "\\", "é" * 1000, "9" * 5000]
CODECS = split("""bytes endian transpose sharding_indexed zstd gzip blosc crc32c vlen-utf8 scale_offset
    cast_value nonsense numcodecs.delta numcodecs.lzma numcodecs.shuffle numcodecs.zlib""")
IDS = split("""zstd blosc gzip zlib lz4 bz2 lzma shuffle delta astype fixedscaleoffset quantize bitround
    packbits pickle json2 msgpack2 vlen-utf8 crc32 fletcher32""")
OPTIONS = split("""level clevel cname shuffle typesize blocksize checksum endian order dtype astype id
    encode_dtype decode_dtype elementsize format filters preset chunk_shape codecs index_codecs
    index_location digits scale offset keepbits kind""")
KEYS = split("""zarr_format node_type shape data_type chunk_grid chunk_key_encoding codecs dtype fill_value
    attributes dimension_names storage_transformers chunks compressor filters order dimension_separator
    consolidated_metadata must_understand name configuration""")
PLAIN = {"name": "bytes", "configuration": {"endian": "little"}}


def value(r, depth=0):
    """Anything that JSON can say."""
    kind = r.randrange(12 if depth < 4 else 7)
    if kind < 3:
        return r.choice(NUMBERS)
    if kind < 6:
        return r.choice(WORDS)
    if kind == 6:
        return None
    if kind == 7:
        return [value(r, depth + 1) for _ in range(r.randrange(4))]
    if kind == 8:
        return {r.choice(KEYS + OPTIONS): value(r, depth + 1) for _ in range(r.randrange(4))}
    if kind == 9:
        return [r.choice(NUMBERS), r.choice(NUMBERS)]
    return codec(r, depth + 1)


def codec(r, depth=0):
    """A codec with options that it may or may not have."""
    options = {r.choice(OPTIONS): value(r, depth + 1) for _ in range(r.randrange(3))}
    if r.randrange(2):
        return {"id": r.choice(IDS), **options}
    name = r.choice(CODECS)
    if name == "sharding_indexed":
        inner = [codec(r, depth + 1) for _ in range(r.randrange(3))] if depth < 3 else []
        index = r.choice([["bytes", "crc32c"], [PLAIN], [codec(r)]])
        sides = r.choice([[1, 1], [2, 2], [4, 4], [8, 8], value(r, 3)])
        options = {
            "chunk_shape": sides,
            "codecs": [{"name": "bytes"}, *inner],
            "index_codecs": index,
            **options,
        }
    return {"name": name, "configuration": options}


def places(document):
    """Every (container, key) in it."""
    stack, found = [document], []
    while stack:
        at = stack.pop()
        for key in at if isinstance(at, dict) else range(len(at)):
            found.append((at, key))
            if isinstance(at[key], dict | list):
                stack.append(at[key])
    return found


def mutate(r, document):
    """One change of the document's structure or values."""
    at, key = r.choice(places(document) or [(document, "")])
    change = r.randrange(10)
    if change < 4:
        at[key] = value(r)
    elif change == 4:
        with contextlib.suppress(KeyError):
            del at[key]
    elif change == 5 and isinstance(at[key], int):
        at[key] = at[key] * r.choice([-1, 2, 1000, 1 << 20, 0.5]) + r.choice([0, 1, -1])
    elif change == 6:
        document[r.choice(KEYS)] = value(r)
    elif change == 7:
        other, where = r.choice(places(document) or [(document, "")])
        at[key] = json.loads(json.dumps(other.get(where) if isinstance(other, dict) else other[where]))
    elif change == 8:
        chain = [codec(r) for _ in range(r.randrange(4))]
        if "codecs" in document:
            document["codecs"] = r.choice([chain, [PLAIN, *chain]])
        else:
            document["filters"], document["compressor"] = r.choice([None, chain]), r.choice([None, codec(r)])
    else:
        sides = [
            r.choice([1, 3, 1 << 20, 1 << 21, 1 << 31, 1 << 44, r.randrange(1, 1 << 62)]) for _ in range(2)
        ]
        document["shape"] = sides
        chunks = [max(1, side // r.choice([1, 2, 1000, 2048, 1 << 22])) for side in sides]
        if "chunks" in document:
            document["chunks"] = chunks
        else:
            document["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": chunks}}


def spoil(r, text):
    """One change of the document's bytes."""
    change = r.randrange(9)
    if change == 0:
        return text[: r.randrange(len(text))]
    if change == 1:
        at = r.randrange(len(text))
        return text[:at] + bytes([r.randrange(256)]) + text[at + 1 :]
    if change == 2:
        return text.replace(b"4", r.choice([b"NaN", b"-4", b"4e9", b"4.0", b'"4"', b"4" * 5000]))
    if change == 3:
        return r.choice([b"\xff\xfe", b"\xef\xbb\xbf", b"\0"]) + text
    if change == 4:
        return r.choice([b"[", b'{"a":']) * r.choice([100, 5_000, 1_000_000])
    if change == 5:
        filler = r.choice([b"[],", b"{},", b'"x",', b"0,", b'{"":0},']) * r.choice([1_000, 500_000])
        return text.rstrip()[:-1] + b',"attributes":{"x":[' + filler + b"0]}}"
    if change == 6:
        return text + r.choice([b" ", b"\n"]) * r.choice([100, 5 * MiB])
    if change == 7:
        return r.choice([b"", b"null", b"[]", b"0", b'""', b"{}"])
    return text.rstrip()[:-1] + b"," + text.lstrip()[1:]


def zeros(n):
    """Bombs: a little of every compressor that becomes n bytes."""
    plain = bytes(n)
    yield from (
        gzip.compress(plain),
        zlib.compress(plain),
        bz2.compress(plain),
        lzma.compress(plain, preset=0),
    )
    yield from (bytes(one.encode(plain)) for one in (numcodecs.Zstd(1), numcodecs.Blosc(), numcodecs.LZ4()))


BOMBS: list[bytes] = []


def spoil_chunk(r, path):
    """One change of a chunk."""
    if not BOMBS:
        BOMBS.extend(zeros(64 * MiB))
    held, change = path.read_bytes(), r.randrange(8)
    if change == 0:
        return path.write_bytes(held[: r.randrange(len(held))])
    if change == 1:
        return path.write_bytes(held + bytes(r.randrange(100)))
    if change == 2:
        changed = bytearray(held)
        for _ in range(r.randrange(1, 9)):
            changed[r.randrange(len(changed))] = r.choice([0, 255, r.randrange(256)])
        return path.write_bytes(changed)
    if change == 3:
        return path.write_bytes(r.choice(BOMBS))
    if change == 4:
        return os.truncate(path, r.choice([1 << 20, 1 << 40]))
    path.unlink()
    if change == 5:
        return os.mkfifo(path)
    return path.symlink_to(r.choice([path.name, "/dev/zero", "..", "nowhere"]))


def make_hostile(r, layouts, place):
    """A hostile array at a place; what kind it was made of."""
    name = r.choice(list(layouts))
    shutil.copytree(layouts[name], place)
    file = next(place / key for key in unfinished.METADATA if (place / key).exists())
    document = json.loads(file.read_text())
    for _ in range(r.randrange(4)):
        mutate(r, document)
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    file.write_bytes(spoil(r, text) if r.randrange(8) == 0 else text)
    if r.randrange(3) == 0:
        spoil_chunk(r, r.choice(sorted(path for path in place.rglob("*") if path.is_file() and path != file)))
    return name


# ---------------------------------------------------------------------------------------------- what happens


@dataclass
class Done:
    """What became of a document."""

    seed: int
    seconds: float
    """By the clock; the least of all tries."""
    cpu: float
    """Seconds of processors; the least, too."""
    first: float = math.inf
    """Seconds of the first try."""
    growth: int = 0
    found: str = ""
    """As `attempt` says, or more than a word."""

    @property
    def slow(self):
        return max(self.seconds, self.cpu) > SECONDS

    @property
    def bad(self):
        return self.slow or self.growth > GROWTH or " " in self.found


def attempt(path):
    """Open, plan, read: "read", "open" where there are many chunks, or the name of a clean error. Raises
    what is none."""
    try:
        return use(path)
    except (ooc_gemm.InputError, ooc_gemm.BudgetError, ooc_gemm.StoreError) as error:
        check_clean(error, path)
        return type(error).__name__


def use(path):
    source = inputs.open_input(path).source
    s = source.matrix
    if s.grid[0] * s.grid[1] > PLANNED:
        return "open"
    limit = resident_bytes() + 256 * MiB
    ooc_gemm.plan(path, path, transpose_b=True, memory_limit=limit, device="cpu")
    pieces = cut("a", s, (0, s.rows), (0, s.cols), max(s.itemsize, 4 * MiB))
    for piece, _ in zip(pieces, range(8), strict=False):
        nbytes = (piece.rows[1] - piece.rows[0]) * (piece.span[1] - piece.span[0]) * s.itemsize
        if nbytes > 64 * MiB:  # more than a plan would give it
            break
        view, _ = source.read(piece, np.empty(nbytes, np.uint8))
        assert view.dtype == source.dtype
    return "read"


def check_clean(error, path):
    """One line that names the array, or what takes too much memory, and can be shown."""
    said = str(error)
    assert str(path) in said or isinstance(error, ooc_gemm.BudgetError)
    assert len(said.splitlines()) == 1
    assert said.isprintable()
    assert len(said) < len(str(path)) + 1000


def peak_of(work):
    """What it returned, the seconds of processors, and the bytes by which the resident set grew at most."""
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    started = time.process_time()  # others may be at work on this machine
    found = work()
    seconds = time.process_time() - started
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return found, seconds, int(line.split()[1]) * 1024 - before


def try_one(seed, layouts, folder):
    """What became of the document of a seed."""
    place = Path(folder, str(seed))
    make_hostile(random.Random(seed), layouts, place)
    before = sorted(Path(folder).rglob("*"))

    def work():
        try:
            return attempt(place)
        except Exception:
            return traceback.format_exc()

    done, tries = Done(seed, math.inf, math.inf), 0
    while tries < TRIES and done.slow:
        started, tries = time.monotonic(), tries + 1
        found, cpu, growth = peak_of(work)
        seconds = time.monotonic() - started
        first = seconds if tries == 1 else done.first
        done = Done(
            seed, min(seconds, done.seconds), min(cpu, done.cpu), first, max(growth, done.growth), found
        )
    assert sorted(Path(folder).rglob("*")) == before, "something was written"
    if not done.bad:
        shutil.rmtree(place)  # others are kept
    return done


def worker(pipe, layouts, folder):
    """Tries the seeds that come."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    valid = {attempt(path) for path in layouts.values()}
    pipe.send(valid)
    while (seed := pipe.recv()) is not None:
        pipe.send(try_one(seed, layouts, folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first document; the next has the next one"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for what it came to")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="fuzz-")
    layouts = make_layouts(Path(folder, "valid"))
    kept, process, pipe = Path(folder, "kept"), None, None
    kept.mkdir()
    every = []
    for seed in range(args.seed, args.seed + args.count):
        if process is None:
            pipe, other = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=worker, args=(other, layouts, kept))
            process.start()
            other.close()
            assert pipe.recv() == {"read"}, "not even valid arrays can be read"
        pipe.send(seed)
        try:
            done = pipe.recv() if pipe.poll(60) else Done(seed, 60.0, 60.0, found="no answer for 60 s")
        except EOFError:
            done = Done(seed, math.inf, math.inf, found="the process died")
        if done.first == math.inf:
            process.kill()
            process.join()
            process = None
        every.append(done)
        if done.bad:
            print(done, flush=True)
    if process is not None:
        pipe.send(None)
        process.join()
    report = report_of(args.seed, every)
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if not report["bad"]:
        shutil.rmtree(folder)
    else:
        print(f"kept in {kept}")
    return 1 if report["bad"] else 0


def report_of(seed, every):
    """What all came to, and where; of times and memory the most."""
    most = {
        key: max(every, key=lambda done: getattr(done, key)) for key in ("seconds", "cpu", "first", "growth")
    }
    outcomes = collections.Counter("something else" if " " in done.found else done.found for done in every)
    git = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty"]
    return {
        "suite": "fuzz",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numcodecs", "numpy", "zarr")},
        },
        "cores": os.cpu_count(),
        "load": os.getloadavg()[2],
        "seed": seed,
        "count": len(every),
        "outcomes": dict(outcomes.most_common()),
        "bad": [done.seed for done in every if done.bad],
        "tried_again": [done.seed for done in every if done.first > SECONDS],
        "slowest_seconds": round(most["seconds"].seconds, 2),
        "slowest_processor_seconds": round(most["cpu"].cpu, 2),
        "slowest_first_try_seconds": round(most["first"].first, 2),
        "largest_mib": round(most["growth"].growth / MiB),
        "seeds": {key: done.seed for key, done in most.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
