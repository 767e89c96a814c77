"""Chunks that a GPU decodes, on a stand-in for one."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import make
from faults import sent_if_any, with_blocks
from sent_chunks import (
    BLOSC,
    CHECKSUM,
    CHUNKS,
    LZ4,
    RNG,
    ZSTD,
    before_each,
    decoded,
    matrices,
    product,
    stored,
)

import ooc_gemm
from ooc_gemm import StoreError
from ooc_gemm.devices.cuda import rates
from ooc_gemm.devices.cuda.decoding import Decoding
from ooc_gemm.planning import ledger
from ooc_gemm.planning.machine import Budget, Rates
from ooc_gemm.planning.problem import Problem
from ooc_gemm.planning.schedule import cut
from ooc_gemm.storage.io import files
from ooc_gemm.storage.read import compressed, inputs

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("codec", [ZSTD, BLOSC], ids=["zstd", "blosc"])
@pytest.mark.parametrize("ops", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i1", "i2", "c8"])
def test_products_of_what_the_device_decodes(dtype, ops, codec):
    x, y, wanted = matrices(dtype, ops=ops)
    stored(x, y, (codec, codec))
    found, c = product(transpose_a=ops[0], transpose_b=ops[1])
    assert np.array_equal(c, (wanted if dtype == "c8" else wanted.real).astype(c.dtype))
    assert decoded(found.plan.problem.a.encoded)
    assert found.plan.problem.b.encoded
    assert found.bytes_uploaded == found.plan.bytes_uploaded < x.nbytes + y.nbytes
    assert found.bytes_read == found.plan.bytes_read == found.bytes_uploaded
    assert "decoding" in found.plan.device_ledger
    assert "chunks of A and B are decoded on the device" in " ".join(str(found.plan).split())


@pytest.mark.parametrize("codecs", [(ZSTD, ZSTD), (BLOSC, BLOSC), (ZSTD, None), (CHECKSUM, ZSTD)])
def test_files_in_memory_are_read_in_the_background(memory, monkeypatch, codecs):
    """Where all chunks are raw or go to the device."""
    monkeypatch.chdir(memory)
    begun, real = [], files.start_read

    def start_read(jobs, *given):
        begun.extend(jobs)
        return real(jobs, *given)

    monkeypatch.setattr(files, "start_read", start_read)
    x, y, wanted = matrices(shape=(600, 500, 400))
    stored(x, y, codecs)
    found, c = product()
    assert np.array_equal(c, wanted.real)
    assert bool(found.plan.problem.a.encoded) is (codecs[0] is not CHECKSUM)
    assert len(begun) >= 42 + 28 * (codecs[0] is not CHECKSUM)
    assert decoded(found.plan.problem.b.encoded or "zstd")
    assert found.bytes_uploaded == found.plan.bytes_uploaded
    assert found.bytes_read == found.plan.bytes_read


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_pieces_in_memory_have_several_chunks_of_any_size(memory, monkeypatch, missing):
    """Unless the host would have to decode many of them."""
    monkeypatch.setattr(compressed, "STACKED_BYTES", 1000)
    monkeypatch.setattr(compressed, "LARGEST_SENT", 4 * CHUNKS[0] * CHUNKS[1] * 4)
    x = np.ones((8 * CHUNKS[0], 16 * CHUNKS[1]), "f4")
    for column in range(missing):  # the fill value, so these chunks are not stored
        x[: CHUNKS[0], column * CHUNKS[1] : (column + 1) * CHUNKS[1]] = 0
    for name, place in (("near", memory), ("far", Path.cwd())):
        make(str(place / name), x, compressors=ZSTD, chunks=CHUNKS, fill_value=0)
    near, far = inputs.open_input(memory / "near").source, inputs.open_input("far").source
    assert near.sends == far.sends == "zstd"
    assert near.sending().matrix.traits.stackable is (missing <= 2)
    assert not far.sending().matrix.traits.stackable


def test_chunks_in_memory_that_have_changed_are_not_taken(memory, monkeypatch):
    monkeypatch.chdir(memory)
    x, y, _ = matrices()
    stored(x, y)
    opened = inputs.open_input("a").sending().source
    piece = next(cut("a", opened.matrix, (0, CHUNKS[0]), (0, CHUNKS[1]), 1 << 20))
    slot = np.empty(1 << 16, "u1")
    path, good = Path("a/c/0/0"), Path("a/c/0/0").read_bytes()
    assert opened.asynchronous
    assert opened.start(piece, slot)()[0].tobytes() == good
    path.write_bytes(good[:-9])  # shorter: it comes as it is, and the device finds out
    view, nbytes = opened.start(piece, slot)()
    assert (view.ndim, nbytes) == (1, len(good) - 9)
    make("other", x[: CHUNKS[0], : CHUNKS[1]], compressors=CHECKSUM, chunks=CHUNKS)
    shutil.copy("other/c/0/0", path)
    view, _ = opened.start(piece, slot)()
    assert np.array_equal(view, x[: CHUNKS[0], : CHUNKS[1]])
    path.unlink()
    with pytest.raises(StoreError, match="chunk c/0/0 is gone"):
        opened.start(piece, slot)()


@pytest.mark.parametrize("codecs", [(ZSTD, None), (None, ZSTD), (ZSTD, LZ4)])
def test_one_operand_alone(codecs):
    x, y, wanted = matrices()
    stored(x, y, codecs)
    found, c = product()
    assert np.array_equal(c, wanted.real)
    assert decoded()
    names = [codec.to_dict()["name"] if codec is ZSTD else "" for codec in codecs]
    assert [found.plan.problem.a.encoded, found.plan.problem.b.encoded] == names
    assert found.bytes_uploaded == found.plan.bytes_uploaded


@pytest.mark.parametrize("dtype", ["f4", "i1"])
@pytest.mark.parametrize("ops", [(False, False), (True, True)])
def test_blocks_and_panels_that_cut_through_chunks(monkeypatch, dtype, ops):
    x, y, wanted = matrices(dtype, ops=ops)
    stored(x, y)
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(128, 96, 80))
    monkeypatch.setattr(ooc_gemm.run.prepare, "_fastest", sent_if_any)
    found, c = product(transpose_a=ops[0], transpose_b=ops[1], chunks=(32, 48))
    assert found.plan.block_count > 4
    assert np.array_equal(c, wanted.real)
    assert decoded() > 8
    assert found.bytes_uploaded == found.plan.bytes_uploaded


def test_pieces_that_stay_in_host_memory_are_decoded_again(monkeypatch):
    x, y, wanted = matrices(shape=(600, 500, 400))
    stored(x, y)
    make_some = with_blocks(128, 144, 160)
    monkeypatch.setattr(ooc_gemm.run.prepare, "_fastest", sent_if_any)
    monkeypatch.setattr(
        ooc_gemm.run.prepare, "make_plan", lambda *given: make_some(*given).with_cache(1 << 10)
    )
    found, c = product(chunks=(32, 48))
    assert np.array_equal(c, wanted.real)
    assert found.plan.cache_slots > 10
    assert found.plan.problem.a.encoded
    assert decoded()
    assert found.bytes_read == found.plan.bytes_read < found.bytes_uploaded == found.plan.bytes_uploaded


@pytest.mark.parametrize("deep", [False, True])
def test_the_host_decodes_while_the_device_multiplies_for_long(monkeypatch, deep):
    """The device would multiply nothing meanwhile."""
    x, y, _ = matrices()
    stored(x, y)
    monkeypatch.setattr(rates, "UNPACK", 1e7)
    opened = [inputs.open_input(name) for name in "ab"]
    sides = [replace(one.matrix, chunk_rows=1024, chunk_cols=1024) for one in opened]
    sides = [replace(s, rows=8192, cols=8192, stored=(1 << 20,) * 64) for s in sides]
    p = Problem(8192, 8192, 8192, *sides, sides[0], 4, 4)
    given = Rates(1e12 if deep else 1e14, 1e9, 1e9, 1e9, 1e9, shared=False, decode=1e9, unpack=2e8)
    found = ooc_gemm.run.prepare._sent(
        p, SimpleNamespace(a=opened[0], b=opened[1]), Budget(8 << 30, 0, 8 << 30, decodes=64), given
    )
    assert bool(found) is not deep
    assert not found or found.a.encoded == "zstd"


@pytest.mark.parametrize("faster", ["device", "host"])
def test_plans_are_compared_where_the_device_does_not_read_everything_once(monkeypatch, faster):
    """Memory in which chunks are decoded is missing for blocks of C."""
    x, y, wanted = matrices()
    stored(x, y)
    seen, real = [], ooc_gemm.run.prepare.make_plan
    small = with_blocks(128, 144, 160)

    def make_some(problem, budget, given):
        plan = (small if problem.a.encoded else real)(problem, budget, given)
        seen.append(plan)
        seconds = 1.0 if bool(problem.a.encoded) is (faster == "device") else 2.0
        return replace(plan, predicted_seconds=seconds)

    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", make_some)
    found, c = product(chunks=(32, 48))
    assert np.array_equal(c, wanted.real)
    assert len(seen) == 2
    assert seen[0].bytes_read > seen[1].bytes_read
    assert bool(found.plan.problem.a.encoded) is (faster == "device")


def test_operands_of_two_compressors():
    x, y, wanted = matrices()
    stored(x, y, (ZSTD, BLOSC))
    found, c = product()
    assert np.array_equal(c, wanted.real)
    assert decoded("zstd")
    assert decoded("blosc")
    assert found.bytes_uploaded == found.plan.bytes_uploaded


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("chunks", [(30, 70), (64, 72)], ids=["with gaps", "without gaps"])
@pytest.mark.parametrize("ops", [(False, False), (True, True)])
def test_a_piece_of_several_chunks_goes_to_its_panel(request, monkeypatch, ops, chunks, sharded):
    """Whether decoded chunks lie side by side, and whether all are decoded at a time or three."""
    monkeypatch.setattr(ledger, "MOST_DECODED", 3)
    x, y, wanted = matrices(shape=(400, 500, 450), ops=ops)
    shards = tuple(4 * side for side in chunks) if sharded else None
    for name, values in (("a", x), ("b", y)):
        make(name, np.ascontiguousarray(values), compressors=ZSTD, chunks=chunks, shards=shards)
    monkeypatch.setattr(ooc_gemm.run.prepare, "_fastest", sent_if_any)
    monkeypatch.setattr(ooc_gemm.run.prepare, "make_plan", with_blocks(100, 110, 130))
    pieces, upload = [], Decoding.upload

    def spied(self, data, piece, buffer):
        pieces.append(-(-piece.rows[1] // chunks[0]) - piece.rows[0] // chunks[0])
        return upload(self, data, piece, buffer)

    monkeypatch.setattr(Decoding, "upload", spied)
    found, c = product(transpose_a=ops[0], transpose_b=ops[1], chunks=(50, 55))
    assert np.array_equal(c, wanted.real)
    assert (max(pieces) > 1) is ("stacked" in request.node.name)
    assert decoded() >= sum(pieces) / 3
    assert found.bytes_uploaded == found.plan.bytes_uploaded


def test_the_timeline_shows_what_the_device_decodes():
    x, y, _ = matrices()
    stored(x, y)
    with ooc_gemm.report("report.html"):
        found = ooc_gemm.multiply("a", "b", "c", device="cuda", trace="trace.json")
    names = {event["name"].split()[0] for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert {"upload", "decode", "compute"} <= names
    assert "decode" in Path("report.html").read_text()
    assert "decode" not in found.stage_seconds


def test_old_values_are_added():
    x, y, wanted = matrices()
    stored(x, y)
    old = RNG.integers(-9, 9, wanted.shape).astype("f4")
    make("c", old, compressors=ZSTD, chunks=CHUNKS)
    _, c = product(beta=2.0)
    assert np.array_equal(c, wanted.real + 2 * old)
    assert decoded()


@pytest.mark.parametrize("fill", [0, 3])
def test_chunks_that_are_missing(monkeypatch, fill):
    monkeypatch.setattr(compressed, "SENT", 1)
    x, y, _ = matrices()
    stored(x, y)
    x[64:128, 72:144] = fill
    make("a", x, compressors=ZSTD, chunks=CHUNKS, fill_value=fill, overwrite=True)
    assert not Path("a/c/1/1").exists()
    found, c = product()
    assert np.array_equal(c, x.astype("f8") @ y)
    assert decoded()
    assert found.bytes_read == found.plan.bytes_read


@pytest.mark.parametrize("columns", [1, 2])
def test_the_host_decodes_arrays_with_many_pieces_that_it_must_decode(columns):
    """Of chunks of which a piece has several, one that is missing is enough."""
    x = np.ones((8 * CHUNKS[0], 20 * CHUNKS[1]), "f4")
    x[: CHUNKS[0], : columns * CHUNKS[1]] = 0  # the fill value, so these chunks are not stored
    make("a", x, compressors=ZSTD, chunks=CHUNKS, fill_value=0)
    source = inputs.open_input("a").source
    assert bool(source.sends) is (columns == 1 or not source.matrix.traits.stackable)


def test_frames_with_checksums_are_decoded_on_the_host():
    x, y, wanted = matrices()
    stored(x, y, (CHECKSUM, ZSTD))
    shutil.move("a", "other")
    make("a", x, compressors=ZSTD, chunks=CHUNKS)
    shutil.copy("other/c/1/1", "a/c/1/1")
    found, c = product()
    assert np.array_equal(c, wanted.real)
    assert found.plan.problem.a.encoded
    assert decoded()


def test_chunks_of_two_sizes(monkeypatch):
    """Those of the larger size are decoded in more parts."""
    monkeypatch.setattr(ledger, "DECODED_PART", 4000)
    x, y, wanted = matrices()
    make("a", x, compressors=BLOSC, chunks=(128, 144))
    make("b", y, compressors=BLOSC, chunks=CHUNKS)
    seen = []
    before_each(monkeypatch, "blosc", lambda args, stream: seen.append(int(args[2])))
    _, c = product()
    assert np.array_equal(c, wanted.real)
    assert set(seen) == {128 * 144 * 4 // 4000 + 1}


@pytest.mark.parametrize("codec", [ZSTD, BLOSC])
def test_chunks_that_are_not_compressed_are_decoded_on_the_host(codec):
    """They are as large as before. One of many does not matter."""
    noise = RNG.integers(0, 256, (1024, 1024), "u1")
    make("noise", noise, compressors=codec, chunks=(64, 64))
    assert inputs.open_input("noise").source.sends == ""
    few = np.ones_like(noise)
    few[:64, :64] = noise[:64, :64]
    make("few", few, compressors=codec, chunks=(64, 64))
    assert inputs.open_input("few").source.sends == codec.to_dict()["name"]
    make("z", np.eye(1024, dtype="u1"), compressors=codec, chunks=(64, 64))
    found = ooc_gemm.multiply("few", "z", "c", device="cuda", out_dtype="i4")
    assert np.array_equal(zarr.open_array("c")[...], few)
    assert found.plan.problem.a.encoded


def test_arrays_with_checksums_are_decoded_on_the_host():
    x, y, wanted = matrices()
    stored(x, y, (CHECKSUM, ZSTD))
    _, c = product()
    assert np.array_equal(c, wanted.real)
    assert decoded()


def test_a_symmetric_product():
    x, *_ = matrices("i1")
    make("a", x, compressors=ZSTD, chunks=CHUNKS)
    found = ooc_gemm.gram("a", "c", device="cuda")
    assert np.array_equal(zarr.open_array("c")[...], x.astype("i8") @ x.T)
    assert decoded()
    assert found.bytes_uploaded == found.plan.bytes_uploaded


def test_elements_that_are_transformed():
    x, y, _ = matrices()
    stored(x, y)
    given = ooc_gemm.Operand("a", center="columns", scale=("rows", np.full(len(x), 2.0)))
    ooc_gemm.multiply(given, "b", "c", device="cuda", out_dtype="f8")
    wanted = (x - x.mean(0, dtype="f8")) / 2 @ y
    assert np.allclose(zarr.open_array("c")[...], wanted, atol=1e-3)
    assert decoded()


def test_chunks_of_which_the_host_looks_at_each_element():
    """Sums of int32 may exceed int64, by their type."""
    x, y, wanted = matrices("i4")
    stored(x, y)
    _, c = product()
    assert np.array_equal(c, wanted.real)
    assert not decoded()


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_chunk_is_named(cut):
    x, y, _ = matrices()
    stored(x, y)
    path = Path("b/c/2/1")
    data = path.read_bytes()
    path.write_bytes(data[:-9] if cut else data[:8] + bytes([255] * 8) + data[16:])
    with pytest.raises(StoreError, match=r"b: chunk c/2/1 cannot be read or decoded"):
        product()
    assert decoded()
    assert not Path("c/zarr.json").exists()


def test_a_chunk_that_has_grown_does_not_go_to_the_device():
    """The device has room for chunks of the sizes that they had."""
    x, y, _ = matrices()
    stored(x, y)
    opened = inputs.open_input("a")
    piece = next(cut("a", opened.matrix, (0, CHUNKS[0]), (0, CHUNKS[1]), 1 << 20))
    slot = np.empty(1 << 16, "u1")
    assert opened.sending().source.read(piece, slot)[0].ndim == 1
    other = RNG.standard_normal(CHUNKS).astype("f4")  # which cannot be compressed
    make("other", other, compressors=ZSTD, chunks=CHUNKS)
    shutil.copy("other/c/0/0", "a/c/0/0")
    view, _ = opened.sending().source.read(piece, slot)
    assert np.array_equal(view, other)


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_what_the_device_alone_cannot_decode_is_decoded_on_the_host(monkeypatch, beta):
    x, y, wanted = matrices()
    stored(x, y)
    old = RNG.integers(-9, 9, wanted.shape).astype("f4")
    if beta:
        make("c", old, compressors=None, chunks=CHUNKS)

    def failing(self, grid, frames, count, parts, stored, to, rooms, room_bytes, failed):
        cupy_on_cpu.matrix(failed, 1, 1, 1, "u4")[...] += np.uint32(1)

    monkeypatch.setattr(cupy_on_cpu.Kernel, "zstd", failing)
    _, c = product(beta=beta)
    assert np.array_equal(c, wanted.real + beta * old)
    assert decoded()
