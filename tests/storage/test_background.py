"""Files in memory: opened without giving up the interpreter, copied by threads of the C library's."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cupy_on_cpu
import numpy as np
import pytest
import zarr
from conftest import make
from sessions import device_with

import ooc_gemm
from ooc_gemm.bench import beside_copies, chunks, folders
from ooc_gemm.devices import open_device
from ooc_gemm.devices.cpu.device import CPU
from ooc_gemm.devices.cpu.session import CPUSession
from ooc_gemm.planning.schedule import Part, cut
from ooc_gemm.planning.traffic import piece_read_bytes
from ooc_gemm.storage.io import background, files
from ooc_gemm.storage.io.background import Job
from ooc_gemm.storage.io.stamps import stamp_of
from ooc_gemm.storage.read import inputs
from ooc_gemm.storage.write import opening
from ooc_gemm.support.buffers import page_aligned
from ooc_gemm.support.timed import by_one_thread

MiB = 1 << 20
RNG = np.random.default_rng(0)


@pytest.fixture
def memory():
    """A folder in memory."""
    if not files.in_background("/dev/shm"):
        pytest.skip("there are no files in memory here, or there was no C compiler")
    folder = Path(tempfile.mkdtemp(prefix="ooc-gemm-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("rows", "width", "apart"), [(1, 9, 20), (5, 5000, 5000), (7, 4096, 12345), (300, 8192, 16384)]
)
def test_parts_of_rows_are_read(memory, rows, width, apart):
    path, before = str(memory / "x"), open_files()
    stored = RNG.integers(0, 256, (rows, apart), np.uint8)
    Path(path).write_bytes(b"head" + stored.tobytes())
    into = np.zeros(2 * rows * width, np.uint8)
    half = Job(path, 4, width, rows, apart)
    assert files.start_read([half, half], into)()
    assert np.array_equal(into.reshape(2, rows, width), [stored[:, :width]] * 2)
    assert not files.start_read([half._replace(offset=4 + apart - width + 1)], into[: rows * width])()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("chunks", [(128, 4096), (1, 4096)])
def test_column_blocks_of_row_strips_are_read_in_the_background(memory, chunks, monkeypatch):
    """Many of the rows of such a chunk are not contiguous in its file: one thread would read them in turn."""
    begun, start = [], background.Transfer.__init__
    monkeypatch.setattr(files, "FEW_CORES", 1000)
    monkeypatch.setattr(background.Transfer, "__init__", lambda *args: begun.append(args[1]) or start(*args))
    x = RNG.standard_normal((300, 4096), "f4")
    path = make(memory / "x", x, chunks=chunks, compressors=None)
    source = inputs.open_input(path, "A").source
    buffer = page_aligned(1, 4 * MiB)[0]
    for cols in ((0, 2048), (1500, 4096), (4000, 4096)):
        for piece in cut("a", source.matrix, (100, 250), cols, buffer.nbytes):
            view, nbytes = source.start(piece, buffer)()
            assert np.array_equal(view, x[slice(*piece.rows), slice(*piece.cols)])
            assert nbytes == (piece.span[1] - piece.span[0]) * len(view) * 4
    assert bool(begun) == (chunks[0] > 1)  # the thread that asks for short parts copies them


def test_a_piece_has_parts_of_several_row_strips(memory):
    """Where the parts are narrow, one read of each would bring little."""
    x = RNG.standard_normal((100, 40_000), "f4")
    source = inputs.open_input(make(memory / "x", x, chunks=(4, 40_000), compressors=None), "A").source
    (slot,) = page_aligned(1, 1 << 18)
    pieces = list(cut("a", source.matrix, (3, 97), (1000, 3500), 1 << 18))
    assert [piece.rows for piece in pieces] == [(3, 24), (24, 48), (48, 72), (72, 96), (96, 97)]
    for piece in pieces:
        for view, nbytes in (source.start(piece, slot)(), source.read(piece, slot)):
            assert np.array_equal(view, x[slice(*piece.rows), slice(*piece.cols)])
            assert nbytes == view.nbytes == piece_read_bytes(source.matrix, piece)


def test_more_chunks_are_written_at_once_to_memory(memory, tmp_path):
    x = RNG.standard_normal((64, 64))
    options = {"device": "cpu", "chunks": (8, 8)}
    results = (ooc_gemm.multiply(x, x, folder / "c", **options) for folder in (memory, tmp_path))
    there, here = (result.plan.writers for result in results)
    assert there == files.writes_at_once(here) > here


def test_a_disk_is_not_memory(tmp_path):
    assert not files.in_background("/proc")
    assert not files.in_background(tmp_path / "nowhere")


@pytest.mark.parametrize("length", [1, 4095, MiB, 2 * MiB + 1, 4 * MiB, 9 * MiB + 4097])
def test_what_is_written_is_read(memory, length):
    path, before = str(memory / "x"), open_files()
    data, into = page_aligned(2, length)
    data[:] = RNG.integers(0, 256, length, np.uint8)
    assert files.start_write(path, data)()
    assert Path(path).read_bytes() == data.tobytes()
    assert files.start_read([Job(path, 0, len(into))], into)()
    assert np.array_equal(into, data)
    if length > 5000:
        part = into[: length - 5000]
        assert files.start_read([Job(path, 5000, len(part))], part)()
        assert np.array_equal(part, data[5000:])
    assert not files.start_read([Job(path, 1, len(into))], into)()  # it ends before
    assert open_files() == before


def test_what_cannot_be_opened(memory):
    before = open_files()
    (into,) = page_aligned(1, 4 * MiB)
    assert not files.start_read([Job(str(memory / "x"), 0, len(into))], into)()
    assert not files.start_read([Job(str(memory), 0, len(into))], into)()
    os.mkfifo(memory / "pipe")
    assert not files.start_read([Job(str(memory / "pipe"), 0, len(into))], into)()
    assert not files.start_write(str(memory), into)()
    assert open_files() == before


@pytest.mark.parametrize("cores", [0, 1000])
@pytest.mark.parametrize("count", [1, 2, 16, 40])
def test_short_parts_of_many_files(memory, monkeypatch, cores, count):
    """Where there are few cores, the thread that asks for them reads them. Several are one task otherwise,
    and those of one file share a descriptor."""
    monkeypatch.setattr(files, "FEW_CORES", cores)
    monkeypatch.setattr(background, "TASK_BYTES", 64 << 10)
    stored = RNG.integers(0, 256, (count, 30_000), np.uint8)
    jobs = []
    for number, data in enumerate(stored):
        path = memory / f"x{number // 3}"
        with open(path, "ab") as file:
            file.write(data.tobytes())
        jobs.append(Job(str(path), 30_000 * (number % 3), 30_000))
    before, into = open_files(), np.zeros(stored.size, np.uint8)
    assert files.start_read(jobs, into)()
    assert np.array_equal(into.reshape(stored.shape), stored)
    assert not files.start_read([*jobs[:-1], jobs[-1]._replace(offset=10**6)], into)()
    assert open_files() == before


def test_many_transfers_from_many_threads(memory):
    path, data = str(memory / "x"), RNG.integers(0, 256, 3 * MiB, np.uint8)
    Path(path).write_bytes(data.tobytes())

    def copied(number):
        (into,) = page_aligned(1, len(data))
        for turn in range(20):
            into[:] = 0
            transfer = background.Transfer([Job(path, 0, len(into))], os.O_RDONLY, into, 1 + turn % 7)
            if not (transfer.end() and np.array_equal(into, data)):
                return False
        return True

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(copied, range(12)))


def test_half_of_the_threads_read_where_there_is_something_to_read(memory):
    """To open a pipe takes until somebody opens its other end."""
    count, path = background.THREADS, memory / "x"
    path.write_bytes(b"read")
    ends = [memory / f"{kind}{number}" for kind in "rw" for number in range(count)]
    for end in ends:
        os.mkfifo(end)

    def started(end, flags, data):
        return background.Transfer([Job(str(end), 0, len(data))], flags, data)

    def let_go(some, flags):
        for end in some:
            os.close(os.open(end, flags))

    begun = [started(end, os.O_RDONLY, np.empty(1, np.uint8)) for end in ends[:count]]
    begun += [started(end, os.O_WRONLY, np.zeros(1, np.uint8)) for end in ends[count:]]
    into = np.empty(4, np.uint8)
    last = started(path, os.O_RDONLY, into)
    let_go(ends[:count], os.O_WRONLY)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(last.end)
        try:
            assert done.result(timeout=30)
        finally:
            let_go(ends[count:], os.O_RDONLY)
    assert into.tobytes() == b"read"
    for transfer in begun:
        assert not transfer.end()  # nothing is read at an offset of a pipe


LAYOUTS = {
    "one": {"chunks": (2000, 2000)},
    "many": {"chunks": (64, 50)},
    "wide": {"chunks": (64, 600)},
    "shards": {"chunks": (32, 32), "shards": (128, 64)},
    "fortran": {"chunks": (64, 50), "zarr_format": 2, "order": "F"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "background_c"), [("f4", True), ("i2", False)])
def test_products_in_memory(memory, layout, dtype, background_c):
    a, b = (RNG.integers(-9, 9, shape).astype(dtype) for shape in ((333, 444), (444, 555)))
    for name, values in (("a", a), ("b", b)):
        make(memory / name, values, compressors=None, **LAYOUTS[layout])
        assert inputs.open_input(str(memory / name)).source.asynchronous
    shutil.rmtree(memory / "a" / "c" / "0", ignore_errors=True)  # a row of chunks that are missing
    a = zarr.open_array(memory / "a")[...]
    before, kinds = open_files(), []

    class Watching(CPUSession):
        def upload(self, source, piece, buffer):
            kinds.append(threading.current_thread().name)
            return super().upload(source, piece, buffer)

    paths = [str(memory / name) for name in "abc"]
    result = ooc_gemm.multiply(
        *paths, device=device_with(Watching, CPU)(), chunks=(50, 70), memory_limit="150MiB", verify=True
    )
    assert np.array_equal(zarr.open_array(memory / "c")[...], a.astype("i8") @ b)
    assert result.bytes_read == result.plan.bytes_read
    assert len(set(kinds)) == 1  # one thread has them all
    assert open_files() == before
    block = np.dtype("f4" if background_c else "i4")
    target = opening.target_at(zarr.open_array(memory / "c"), "c", block, None)
    assert target.background == background_c


def test_nothing_is_under_way_when_one_of_many_has_failed():
    ended = []

    def begin(item, buffer):
        def end():
            ended.append(item)
            if item == 3:
                raise OSError("3")

        return end

    with pytest.raises(OSError, match="3"):
        by_one_thread(begin, range(100), page_aligned(4, 1), 60.0)
    assert ended == [0, 1, 2, 3, 4, 5, 6]


def test_inputs_that_change_while_they_are_read(memory):
    values = RNG.standard_normal((512, 512)).astype("f4")
    make(memory / "a", values, chunks=(512, 512), compressors=None)
    source = inputs.open_input(str(memory / "a")).source
    piece = next(cut("a", source.matrix, (0, 512), (0, 512), MiB))
    (slot,) = page_aligned(1, MiB)
    view, nbytes = source.start(piece, slot)()
    assert np.array_equal(view, values)
    assert nbytes == MiB
    chunk, before = memory / "a" / "c" / "0" / "0", open_files()
    os.truncate(chunk, MiB - 4)
    with pytest.raises(ooc_gemm.StoreError, match="holds 1048572 bytes instead of 1048576"):
        source.start(piece, slot)()
    chunk.unlink()
    with pytest.raises(ooc_gemm.StoreError, match="is gone"):
        source.start(piece, slot)()
    chunk.write_bytes(bytes(MiB + 1))
    with pytest.raises(ooc_gemm.StoreError, match="holds 1048577 bytes"):
        inputs.open_input(str(memory / "a")).source.start(piece, slot)()
    assert open_files() == before


def test_a_write_that_fails(memory, monkeypatch):
    """It is made again, where it says what the matter is."""
    array = zarr.create_array(memory / "c", shape=(60, 60), chunks=(50, 50), dtype="f4", compressors=None)
    target = opening.target_at(array, "c", np.dtype("f4"), None)
    assert target.background
    (slot,) = page_aligned(1, 50 * 50 * 4)
    part = Part((1, 1), 0, 0, 10, 10)
    target.view(part, slot)[...] = 3
    end = background.Transfer.end
    monkeypatch.setattr(background.Transfer, "end", lambda self: end(self) and False)
    assert target.start(part, slot)() == 10_000
    assert np.array_equal(array[50:, 50:], np.full((10, 10), 3, "f4"))

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "makedirs", full)
        with pytest.raises(ooc_gemm.StoreError, match="c/0/0 cannot be written: No space left"):
            target.start(Part((0, 0), 0, 0, 50, 50), slot)()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ooc_gemm.StoreError, match="c/1/1 cannot be written: No space left"):
        target.start(part, slot)()


FORKED = """
import os, sys
import numpy as np
import ooc_gemm
from ooc_gemm.storage.io import files
from ooc_gemm.planning.schedule import cut
def product():
    return ooc_gemm.multiply(sys.argv[1], sys.argv[1], device="cpu").array
from ooc_gemm.storage.read import inputs
assert files.in_background(sys.argv[1])
before, source = product(), inputs.open_input(sys.argv[1]).source
piece, slot = next(cut("a", source.matrix, (0, 50), (0, 50), 10_000)), np.empty(10_000, np.uint8)
before_there = source.start(piece, slot)()[0].copy()
if (child := os.fork()) == 0:
    came = source.start(piece, slot)()[0]  # of an array that was opened before
    os._exit(0 if np.array_equal(product(), before) and np.array_equal(came, before_there) else 1)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_process_that_was_forked(memory):
    """The library's threads are not in it."""
    make(memory / "x", RNG.standard_normal((300, 300)).astype("f4"), chunks=(50, 50), compressors=None)
    subprocess.run([sys.executable, "-c", FORKED, str(memory / "x")], timeout=200, check=True)


@pytest.mark.parametrize("where", ["upload", "download"])
def test_a_run_that_fails_waits_for_what_is_under_way(memory, monkeypatch, where):
    monkeypatch.setattr(files, "SHORT_PART", 0)
    x = RNG.standard_normal((900, 900)).astype("f4")
    make(memory / "x", x, chunks=(100, 100), compressors=None)
    before = open_files()

    class Failing(CPUSession):
        left = 5

    def fail(self, *args):
        self.left -= 1
        if self.left < 0:
            raise MemoryError
        return getattr(CPUSession, where)(self, *args)

    setattr(Failing, where, fail)
    paths = [str(memory / name) for name in "xxc"]
    with pytest.raises(ooc_gemm.Error):
        ooc_gemm.multiply(
            *paths, device=device_with(Failing, CPU)(), chunks=(100, 100), memory_limit="150MiB"
        )
    assert open_files() == before
    ooc_gemm.multiply(*paths, device="cpu", chunks=(100, 100), resume=True)
    np.testing.assert_allclose(zarr.open_array(memory / "c")[...], x.astype("f8") @ x, atol=1e-3)


@pytest.mark.parametrize("apart", [0, MiB])
def test_pieces_of_several_chunks(memory, monkeypatch, apart):
    """Of those that lie one below the other; whatever is odd about one of them is found."""
    monkeypatch.setattr(files, "SHORT_PART", apart)
    x = RNG.standard_normal((1000, 130)).astype("f4")
    make(memory / "x", x, chunks=(100, 50), compressors=None)
    source = inputs.open_input(str(memory / "x")).source
    assert source.matrix.traits.stackable
    (slot,) = page_aligned(1, 4 * source.matrix.chunk_bytes + 5000)
    rows, cols, before = (30, 970), (0, 130), open_files()
    pieces = list(cut("a", source.matrix, rows, cols, len(slot)))
    assert [piece.rows for piece in pieces[::3]] == [(30, 400), (400, 800), (800, 970)]
    seen = np.zeros(x.shape, int)
    for piece in pieces:
        for view, nbytes in (source.start(piece, slot)(), source.read(piece, slot)):
            assert np.array_equal(view, x[slice(*piece.rows), slice(*piece.cols)])
            assert nbytes == (piece.rows[1] - piece.rows[0]) * 50 * 4
        seen[slice(*piece.rows), slice(*piece.cols)] += 1
    assert (seen[30:970] == 1).all()

    shutil.move(memory / "x" / "c" / "5" / "0", memory / "gone")
    with pytest.raises(ooc_gemm.StoreError, match="c/5/0 is gone"):
        source.start(pieces[3], slot)()
    source = inputs.open_input(str(memory / "x")).source
    view, nbytes = source.start(pieces[3], slot)()
    want = x[400:800, :50].copy()
    want[100:200] = 0
    assert np.array_equal(view, want)
    assert nbytes == 300 * 50 * 4
    os.truncate(memory / "x" / "c" / "7" / "0", 100)
    with pytest.raises(ooc_gemm.StoreError, match="c/7/0 holds 100 bytes instead of 20000"):
        source.start(pieces[3], slot)()
    assert open_files() == before


def test_stamps_and_lines(memory):
    """As Python's own calls have them, without giving up the interpreter."""
    path = memory / "x"
    path.write_bytes(b"abc")
    os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    assert stamp_of(path) == stamp_of(path, asynchronous=True) == (3, 1_700_000_000_123_456_789)
    for nothing in (memory / "y", path / "z"):
        assert stamp_of(nothing) == stamp_of(nothing, asynchronous=True) == (0, 0)
    with pytest.raises(OSError, match="too long"):
        stamp_of("x" * 5000, asynchronous=True)
    with open(path, "ab", buffering=0) as file:
        background.append(file.fileno(), b"def" * 100_000, str(path))
        background.append(file.fileno(), b"", str(path))
    assert path.read_bytes() == b"abc" + b"def" * 100_000
    with open(path, "rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        background.append(file.fileno(), b"x", str(path))


def test_small_chunks_do_not_take_all_files(memory):
    """Of those that a process may open."""
    x = RNG.standard_normal((2000, 10)).astype("f4")
    make(memory / "x", x, chunks=(10, 10), compressors=None)
    source, before = inputs.open_input(str(memory / "x")).source, open_files()
    (slot,) = page_aligned(1, MiB)
    pieces = list(cut("a", source.matrix, (0, 2000), (0, 10), MiB))
    assert len(pieces) == 4
    for piece in pieces:
        end = source.start(piece, slot)
        assert open_files() - before <= background.THREADS
        assert np.array_equal(end()[0], x[slice(*piece.rows)])
    assert open_files() == before


@pytest.mark.slow
def test_reads_and_writes_are_also_measured_at_once(memory, monkeypatch):
    """In the background, as a product does both: what they have of the memory then is not assumed."""
    under_way, together = [0], []

    def counting(*args):
        under_way[0] += 1
        try:
            return by_one_thread(*args)
        finally:
            together.append(under_way[0])
            under_way[0] -= 1

    monkeypatch.setattr(chunks, "by_one_thread", counting)
    found = folders.measure_folder(memory, CPU())
    assert max(together) == 2
    assert 0.5 <= found["turns"] <= 1
    assert not list(memory.iterdir())


@pytest.mark.slow
def test_copies_to_a_device_are_measured_beside_reads_and_writes(memory, monkeypatch):
    """With real products on a GPU that is emulated, of chunks small enough for it."""
    cupy_on_cpu.install(monkeypatch)
    device = open_device("cuda")
    copies = {"upload_bytes_per_second": 1e9, "download_bytes_per_second": 1e9}
    monkeypatch.setattr(beside_copies, "recall", lambda file: {device.model: copies})
    monkeypatch.setattr(chunks, "SIDE", 256)
    monkeypatch.setattr(chunks, "FOLDER_BYTES", 8 * 256 * 256 * 4)
    moved = []

    def noted(begin, items, *args):
        seconds, sizes = by_one_thread(begin, items, *args)
        if begin.__name__ in ("bring", "store"):
            moved.append((begin.__name__, sum(sizes)))
        return seconds, sizes

    monkeypatch.setattr(beside_copies, "by_one_thread", noted)
    found = folders.measure_folder(memory, device)
    assert {0.5 <= found[name] <= 1 for name in ("entering", "leaving", "turns")} == {True}
    all_of = 8 * 256 * 256 * 4
    assert moved[:6] == 3 * [("bring", all_of)] + 3 * [("store", all_of)]
    assert sorted(name for name, _ in moved[6:]) == 3 * ["bring"] + 3 * ["store"]
    assert max(nbytes for _, nbytes in moved[6:]) == all_of
    assert cupy_on_cpu.sent
    assert cupy_on_cpu.brought
    assert not list(memory.iterdir())
