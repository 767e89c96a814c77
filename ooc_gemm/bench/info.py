"""Lists what this machine has, and measures how fast it is: all rates that plans use, taken with the engine's
own readers, writers, ring and devices, so that predictions concern what is run."""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..cuda_kernels.roofline import most_flops
from ..devices import open_device
from ..devices.cpu.blas import gemm
from ..devices.cpu.device import CPU, processor
from ..devices.several import Several
from ..engine.execute import execute
from ..engine.ports import COMPUTE, UPLOAD, Array, Device, Limits
from ..engine.ring import Event
from ..planning.problem import Matrix, MiB
from ..planning.schedule import Part, Piece, cut
from ..run.prepare import prepare
from ..run.rates import FILE, FOLDERS, file_system, fresh_rate, kernel_key, possible, sound, today
from ..run.request import Operand, Precision, Request
from ..storage.io import background
from ..storage.io.files import chunks_at_once, in_background, in_memory, writes_at_once
from ..storage.read import inputs, source
from ..storage.write import layout, opening, staging_folder
from ..storage.write.publication import Publication
from ..storage.write.target import Target
from ..support.buffers import Bytes
from ..support.cache import distrusted, folder
from ..support.errors import InputError
from ..support.memory import default_memory_limit
from ..support.remembered import not_written, recall, remember
from ..support.timed import by_one_thread, for_a_while
from ..support.trace import Trace
from . import kernel_rate
from .io import drop, files_in

Record = dict[str, Any]
Say = Callable[[str], None]

CHUNK = 2048
"""Rows and columns of the float32 chunks that are written and read, of 16 MiB each."""
FOLDER_BYTES = 1 << 30
"""Bytes that are written and read in a folder, unless that takes longer than LONGEST."""
SECONDS = 10.0
"""Seconds that all measurements take by default. What comes last gets the time that is left."""
IN_FOLDERS = 0.45
"""Share of a device's time that measurements in folders take. Kernels and memory take the rest."""
STEPS = 14
"""Number of measurements in a folder, each of which gets an equal time, and of waits for the disk."""
LONGEST = 2.0
"""The most seconds that one measurement of a folder takes."""
DEPTHS = 4
"""Number of depths of panels at which most kernels are timed, with what preparing them takes."""
PIECE_BYTES = 64 << 10
"""Size of the pieces that show what a read costs besides its bytes."""
TOUCHED_BYTES = 256 * MiB
TYPES: tuple[tuple[str, Precision], ...] = (
    *(
        (dtype, "highest")
        for dtype in ("float32", "float64", "float16", "complex64", "complex128", "int8", "uint8")
    ),
    ("float32", "medium"),
)


def collect() -> Record:
    """Return the devices, the memory (sizes in bytes), and the rates that are remembered of these devices."""
    from threadpoolctl import threadpool_info

    blas = [info for info in threadpool_info() if info["user_api"] == "blas"]
    found: Record = {
        "processor": processor(),
        "cores": CPU().threads,
        "memory_bytes": psutil.virtual_memory().total,
        "default_memory_limit_bytes": default_memory_limit(),
        "blas": ", ".join(f"{info['internal_api']} {info['version']}" for info in blas) or "not found",
        "in_place_gemm": gemm("f")[0],
        "files_in_memory": "copied by "
        + ("a compiled library" if background.THERE else "Python: no C compiler compiled the library"),
    }
    try:
        from ..devices.cuda.gpus import devices

        found["gpus"] = devices()
    except Exception as error:
        found["gpu"] = f"none ({error})"
    models = [CPU().model, *(gpu["name"] for gpu in found.get("gpus", []))]
    known = recall(FILE)
    found["rates"] = {model: known[model] for model in models if model in known}
    most: dict[str, Callable[[str, str], float]] = {CPU().model: CPU().most_flops}
    for gpu in found.get("gpus", []):
        major, minor = map(int, gpu["compute_capability"].split("."))
        most[gpu["name"]] = partial(
            most_flops, capability=(major, minor), multiprocessors=gpu["multiprocessors"],
            clock_hertz=gpu["clock_hertz"],
        )  # fmt: skip
    for model, rates in found["rates"].items():
        rates["flops"] = possible(rates.get("flops"), most[model])
    found["cache"] = distrusted() or str(folder())
    return found


def measure(folders: Iterable[str], say: Say = lambda text: None, seconds: float = SECONDS) -> list[str]:
    """Measure every device here, and each folder's file system with each, and remember the rates.

    `folders`: paths of folders that can be written to. `say` is called with what is measured next.
    `seconds`: about how long all of it may take, without compiling kernels that are not in the cache.

    Returns a sentence for each rate that was measured and is not remembered. Raises InputError if a folder
    has no space left.
    """
    places, refused, end = [Path(folder) for folder in folders], [], time.perf_counter() + seconds
    devices = list(_devices())
    for number, device in enumerate(devices):
        left = (end - time.perf_counter()) / (len(devices) - number)
        refused += measure_with(device, places, say, seconds=left)
        if device.name == "cuda" and (together := open_device("cuda:all")).name != "cuda":
            refused += measure_places(together, places, say)
    return [*refused, *filter(None, [not_written()])]


def measure_with(
    device: Device,
    places: Iterable[Path],
    say: Say = lambda text: None,
    dtypes: Iterable[str] | None = None,
    seconds: float = SECONDS,
) -> list[str]:
    """Measure one device (only kernels for `dtypes`, if given) and the file systems of `places`, within about
    so many seconds, and remember the rates. A kernel's rate that cannot be true is not remembered; a sentence
    about it is returned."""
    places, end = list(places), time.perf_counter() + seconds
    record = measure_device(device, say, dtypes, seconds * (1 - IN_FOLDERS if places else 1.0))
    refused = record.pop("refused")
    known = recall(FILE).get(device.model, {}).get("flops")
    known = {key: rate for key, rate in possible(known, device.most_flops).items() if key not in refused}
    record["flops"] = known | record["flops"]
    said = _without_unsound(record, device.model)
    remember(FILE, device.model, record)
    said += measure_places(device, places, say, max(end - time.perf_counter(), seconds * IN_FOLDERS / 2))
    return [*refused.values(), *said]


def _without_unsound(record: Record, where: str) -> list[str]:
    """Take rates that cannot be true out of what was measured, in place. Returns a sentence for each."""
    ending = "_bytes_per_second"
    names = [name for name in record if name.endswith(ending) and not sound(record[name])]
    return [
        f"{name.removesuffix(ending)} was measured at {record.pop(name) / 1e9:.4g} GB/s on {where}, which "
        "the cores of this machine cannot reach, so the rate is not kept; measure again on an idle machine"
        for name in names
    ]


def measure_places(
    device: Device, places: Iterable[Path], say: Say = lambda text: None, seconds: float = SECONDS
) -> list[str]:
    """Measure the file system of each place with a device within about so many seconds, and remember the
    rates. Returns a sentence for each that cannot be true."""
    places, refused = list(places), list[str]()
    key = FOLDERS[len(limits_of(device).weights) > 1]
    known = recall(FILE).get(device.model, {}).get(key, {})
    for place in places:
        say(f"{device.name}: reading and writing in {place}")
        record = measure_folder(place, device, seconds / len(places) / STEPS)
        refused += _without_unsound(record, str(place))
        known[file_system(place)] = record
    remember(FILE, device.model, {key: known})
    return refused


def _devices() -> Iterator[Device]:
    yield CPU()
    automatic = open_device("auto")
    if automatic.name != "cpu":
        yield automatic


# ---- devices -----------------------------------------------------------------------------------


def measure_device(
    device: Device,
    say: Say = lambda text: None,
    dtypes: Iterable[str] | None = None,
    seconds: float = SECONDS,
) -> Record:
    """Measure copies, fresh memory, the ring, and every kernel that `auto` chooses for `dtypes` (by default
    all types).

    It takes about `seconds`. If there are several devices, the first is measured, because planning multiplies
    the rate of one by their number. `refused` in the record says of each kernel whose rate cannot be true why
    that is so.
    """
    if isinstance(device, Several):
        device = device.devices[0]
    wanted = None if dtypes is None else set(dtypes)
    refused: dict[str, str] = {}
    record: Record = {"date": today(), "brief": False, "flops": {}, "refused": refused}
    kernels = [(dtype, precision, "auto") for dtype, precision in TYPES]
    if device.name != "cpu":
        kernels.append(("float32", "highest", "cublas"))
    kernels = [kind for kind in kernels if wanted is None or kind[0] in wanted] or kernels[:1]
    end = time.perf_counter() + seconds
    for number, (dtype, precision, kernel) in enumerate(kernels):
        one = np.dtype(dtype)
        arithmetic = device.arithmetic(
            one, one, _out(dtype), (kernel_rate.SIDES[0],) * 3, 1, kernel, precision
        )
        key = kernel_key(arithmetic)
        if key not in record["flops"]:
            say(f"{device.name}: multiplying {dtype}, {kernel}")
            each = max(0.0, end - time.perf_counter()) / (len(kernels) + 1 - number)
            steady = min(kernel_rate.STEADY, max(kernel_rate.LEAST_STEADY, each / DEPTHS))
            side = kernel_rate.side_of(device, arithmetic, steady)
            try:
                record["flops"][key], copies = kernel_rate.kernel_rate(
                    device,
                    dtype,
                    precision,
                    arithmetic.kernel if arithmetic.other else kernel,  # also where the side is small
                    side,
                    steady,
                    arithmetic.least[1],
                )
            except kernel_rate.ImplausibleError as error:
                refused[key] = str(error)
                continue
            record = copies | record  # of the first type, float32
    say(f"{device.name}: memory and the ring")
    record["touch_bytes_per_second"] = _touch_rate(device)
    record["piece_seconds"], record["start_seconds"] = _ring_seconds(device)
    return record


def _out(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.int32 if dtype in ("int8", "uint8") else dtype)


def _touch_rate(device: Device) -> float:
    """Return the bytes per second of what fresh memory costs in addition to memory that was used before:
    readers touch it, the device makes it ready, and it is freed."""
    count, memory = 32, device.host_memory()

    def touch(buffer: Bytes) -> None:
        buffer[:] = 0
        memory.prepare(buffer)

    with ThreadPoolExecutor(limits_of(device).readers) as pool:
        start = time.perf_counter()
        buffers = memory.host_buffers(count, TOUCHED_BYTES // count)
        list(pool.map(touch, buffers))
        again = time.perf_counter()
        list(pool.map(touch, buffers))
        once_more = time.perf_counter() - again
    del buffers
    memory.close()
    first = time.perf_counter() - start - once_more
    return fresh_rate(TOUCHED_BYTES, first, once_more)


def limits_of(device: Device) -> Limits:
    """Return the limits of a device for float32. Readers and writers are the same for all types."""
    one = np.dtype(np.float32)
    return device.limits(device.arithmetic(one, one, one, (CHUNK,) * 3, 0, "auto", "highest"), None)


class _Nothing(source.Source):
    """A source whose pieces need no reading."""

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        return self._place(piece, slot), 0


class _Nowhere:
    """A target that discards C."""

    background = False

    def __init__(self, c: Matrix):
        self._c = c

    def note_lost(self, elements: int, least: int, greatest: int) -> None:
        pass

    def view(self, part: Part, slot: Bytes) -> Array:
        return slot[: part.rows * part.cols * 4].view(np.float32).reshape(part.rows, part.cols)

    def start(self, part: Part, slot: Bytes) -> Callable[[], int]:
        return int

    def cancel(self) -> None:
        pass


def _ring_seconds(device: Device) -> tuple[float, float]:
    """Return the seconds that one piece takes through ring and device besides its bytes, and the seconds that
    starting and closing the device take."""
    side, chunk = 512, 16
    random = kernel_rate.Random((side, side), "float32")
    request = Request(Operand(random), Operand(random), device=device, memory_limit="1TiB", writes=False)
    job = prepare(request.check())
    small = Matrix(side, side, 4, chunk, chunk)
    problem = replace(job.plan.problem, a=small, b=small)
    plan = replace(job.plan, problem=problem, slot_bytes=chunk * chunk * 4)
    source = _Nothing("nothing", np.dtype(np.float32), small)
    count = sum(1 for block in plan.blocks() for panel in plan.panels() for _ in plan.pieces(block, panel))

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        session = device.open(plan, job.operation, Trace())
        try:
            started = time.perf_counter()
            execute(plan, session, {"a": source, "b": source}, _Nowhere(problem.c), Trace())
            done = time.perf_counter()
        finally:
            session.close()
        return (done - started) / count, started - start + time.perf_counter() - done

    found = [run() for _ in range(2)]
    return min(each for each, _ in found), min(fixed for _, fixed in found)


# ---- folders -----------------------------------------------------------------------------------


def chunks_that_fit(place: Path) -> int:
    """Return how many chunks are written to measure a folder. Raises InputError if there is no space for
    them."""
    count = min(FOLDER_BYTES, psutil.disk_usage(str(place)).free // 4) // (CHUNK * CHUNK * 4)
    if count < 2:
        raise InputError(f"{place} has too little space left to measure it; name another folder")
    return count


def fill_with_noise(buffers: list[Bytes]) -> None:
    """Fill each buffer, of the size of a chunk, with noise; no two are alike."""
    numbers = np.random.default_rng(0).standard_normal(CHUNK * CHUNK, np.float32)
    for index, buffer in enumerate(buffers):
        buffer.view(np.float32)[:] = np.roll(numbers, index)


def measure_folder(place: Path, device: Device, longest: float = LONGEST) -> Record:
    """Measure the rates that the engine's readers and writers reach on a file system, with the device's
    buffers and as many threads as it takes, and each for at most `longest` seconds. The files are removed
    afterwards."""
    limits, memory = limits_of(device), device.host_memory()
    count = chunks_that_fit(place)
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-", dir=place) as scratch:
        writers = writes_at_once(limits.writers) if in_background(place) else limits.writers
        buffers = memory.host_buffers(limits.readers + writers, CHUNK * CHUNK * 4)
        found = _folder_rates(Path(scratch), buffers, count, limits.readers, min(LONGEST, longest))
        del buffers
        if limits.device is not None and in_background(place):
            found |= _beside_copies(Path(scratch), device, found)
        return found


def _folder_rates(scratch: Path, buffers: list[Bytes], count: int, readers: int, longest: float) -> Record:
    chunk = CHUNK * CHUNK * 4
    # Arrays so large that the page cache is passed by, of which only the first chunks are stored.
    large = max(count, staging_folder.DIRECT_BYTES // chunk)
    output = layout.Output((large * CHUNK, CHUNK), np.dtype("f4"), (CHUNK, CHUNK), None, "none")
    fill_with_noise(buffers)
    for_reading, for_writing = buffers[:readers], buffers[readers:]

    def write(target: Target[Publication], index: int, buffer: Bytes) -> int:
        return target.write(Part((index, 0), 0, 0, CHUNK, CHUNK), buffer)

    def written(
        items: Iterable[int], target: Target[Publication], most: float = longest
    ) -> tuple[float, list[int]]:
        if not target.background:
            return for_a_while(partial(write, target), items, for_writing, most)
        return by_one_thread(
            lambda index, buffer: target.start(Part((index, 0), 0, 0, CHUNK, CHUNK), buffer),
            items, for_writing, most,
        )  # fmt: skip

    target = _empty_target(scratch / "a", output)
    seconds, sizes = written(range(count), target)
    write_rate = sum(sizes) / seconds
    there, memory = range(len(sizes)), in_memory(os.stat(scratch).st_dev)
    for _ in range(3 if memory else 0):  # a virtual machine may have been given the memory only now
        target = _empty_target(scratch / "a", output)
        write_rate = max(write_rate, _per_second(written(there, target)))
    target.sink.commit()
    source = inputs.open_input(str(scratch / "a")).source

    def pieces_of(index: int, slot_bytes: int = chunk) -> Iterator[Piece]:
        return cut("a", source.matrix, (index * CHUNK, (index + 1) * CHUNK), (0, CHUNK), slot_bytes)

    def read(index: int, buffer: Bytes, slot_bytes: int = chunk) -> int:
        return sum(source.read(piece, buffer)[1] for piece in pieces_of(index, slot_bytes))

    def came(items: Iterable[int] = there, most: float = longest) -> tuple[float, list[int]]:
        if not source.asynchronous:
            return for_a_while(read, items, for_reading, most)
        seconds, found = by_one_thread(
            lambda index, buffer: source.start(next(pieces_of(index)), buffer),
            items, for_reading[: chunks_at_once(readers)], most,
        )  # fmt: skip
        return seconds, [nbytes for _, nbytes in found]

    forget(scratch / "a")
    cold = _per_second(came())
    keep(scratch / "a")
    cached = max(_per_second(came()) for _ in range(3))
    if memory:  # there is but one way
        cold = cached = max(cached, cold)
    seconds, moved = for_a_while(partial(read, slot_bytes=PIECE_BYTES), there[:4], for_reading, longest)
    pieces = sum(moved) / PIECE_BYTES
    piece_seconds = max(0.0, seconds - sum(moved) / cached) / pieces
    forget(scratch / "a")
    reads = max(1, min(len(there), round(len(there) * cold / max(cold, write_rate))))
    writes = max(1, min(len(there), round(reads * write_rate / cold)))

    def both() -> float:
        """Return the seconds of reading and writing at once, with so much of each that both alone take
        equally long."""
        target = _empty_target(scratch / "b", output)
        with ThreadPoolExecutor(1) as other:
            start = time.perf_counter()
            writing = other.submit(written, range(writes), target, math.inf)
            came(range(reads), math.inf)
            writing.result()
            return time.perf_counter() - start

    together = min(both() for _ in range(3 if memory else 1))
    alone = reads * chunk / cold + writes * chunk / write_rate
    few = min(len(there), max(1, staging_folder.DIRECT_BYTES // chunk - 1))
    small = replace(output, shape=(few * CHUNK, CHUNK))
    target = _empty_target(scratch / "small", small)
    write_cached = write_rate
    if not memory:
        write_cached = _per_second(for_a_while(partial(write, target), range(few), for_writing, longest))
    packed = replace(output, compressor="zstd")
    target = _empty_target(scratch / "z", packed)
    some = range(min(len(there), 2 * readers))
    for_a_while(partial(write, target), some, for_writing)
    target.sink.commit()
    source = inputs.open_input(str(scratch / "z")).source
    seconds, moved = for_a_while(read, some, for_reading, longest)
    return {
        "date": today(),
        "read_bytes_per_second": cold,
        "cached_bytes_per_second": max(cached, cold),
        "write_bytes_per_second": write_rate,
        "write_cached_bytes_per_second": write_cached,
        "turns": min(1.0, max(0.5, together / alone)),
        "decode_bytes_per_second": len(moved) * chunk / seconds,
        "piece_seconds": piece_seconds,
    }


def _empty_target(place: Path, output: layout.Output) -> Target[Publication]:
    """Return a new array. What is there is removed before, because whoever replaces files waits until the
    system has freed their memory."""
    shutil.rmtree(place, ignore_errors=True)
    return opening.create_target(str(place), output, output.dtype)


def _beside_copies(scratch: Path, device: Device, rates: Record) -> Record:
    """Return how reads and writes of files in memory share the host's memory with copies to and from a device
    (`Rates.entering`, `leaving`): the time of both at once over the sum of their times alone. `rates`: of the
    file system."""
    alone_at = recall(FILE).get(device.model, {}) | rates
    if not {"upload_bytes_per_second", "download_bytes_per_second"} <= alone_at.keys():
        return {}
    count = sum(not path.endswith("zarr.json") for path in files_in(scratch / "a"))
    source, chunk = inputs.open_input(str(scratch / "a")).source, CHUNK * CHUNK * 4
    output = layout.Output((count * CHUNK, CHUNK), np.dtype("f4"), (CHUNK, CHUNK), None, "none")
    random = Operand(kernel_rate.Random((CHUNK, CHUNK), "float32"))
    job = prepare(Request(random, random, writes=False, device=device, memory_limit="1TiB").check())
    whole, panels = Matrix(CHUNK, CHUNK, 4, CHUNK, CHUNK), replace(job.plan.k_panels, deepest=CHUNK)
    plan = replace(
        job.plan, problem=replace(job.plan.problem, a=whole, b=whole, c=whole), bm=CHUNK, bn=CHUNK,
        k_panels=panels, c_buffers=1, slot_bytes=chunk,
    )  # fmt: skip
    block = next(plan.blocks())
    part, pieces = next(plan.parts(block)), list(plan.pieces(block, (0, CHUNK)))
    limits, session = limits_of(device), device.open(plan, job.operation, Trace())

    def view(buffer: Bytes) -> Array:
        return buffer.view(np.float32).reshape(CHUNK, CHUNK)

    Begin = Callable[[int, Bytes], Callable[[], int]]

    def bringing() -> Begin:
        copied: dict[int, Event] = {}  # address of a buffer → the end of the last copy from it

        def bring(index: int, buffer: Bytes) -> Callable[[], int]:
            if before := copied.get(buffer.ctypes.data):
                before.synchronize()
            rows = index * CHUNK, (index + 1) * CHUNK
            end = source.start(next(cut("a", source.matrix, rows, (0, CHUNK), chunk)), buffer)

            def done() -> int:
                came, nbytes = end()
                copied[buffer.ctypes.data] = session.upload(came, pieces[0], 0)
                return nbytes

            return done

        return bring

    def storing() -> Begin:
        target = _empty_target(scratch / "beside", output)

        def store(index: int, buffer: Bytes) -> Callable[[], int]:
            session.download(block, part, 0, view(buffer)).synchronize()
            return target.start(Part((index, 0), 0, 0, CHUNK, CHUNK), buffer)

        return store

    def moving(begin: Begin, slots: list[Bytes]) -> float:
        start = time.perf_counter()
        by_one_thread(begin, range(count), slots, math.inf)
        session.record(UPLOAD).synchronize()
        return time.perf_counter() - start

    def share(begin: Callable[[], Begin], slots: list[Bytes], *ways: str) -> float:
        seconds = min(moving(begin(), slots) for _ in range(3))
        alone = sum(count * chunk / alone_at[f"{way}_bytes_per_second"] for way in ways)
        return float(min(1.0, max(0.5, seconds / alone)))

    try:
        buffers = session.host_buffers(writes_at_once(limits.writers), chunk)
        for buffer in buffers:
            buffer[:] = 0
            session.prepare(buffer)
        for piece in pieces:
            session.upload(view(buffers[0]), piece, 0)
        session.wait(COMPUTE, session.record(UPLOAD))
        session.multiply(block, (0, CHUNK), 0, 0, True)
        session.record(COMPUTE).synchronize()
        session.finish(block, 0)
        readers = buffers[: chunks_at_once(limits.readers) + 2]  # and two that are copied meanwhile
        entering = share(bringing, readers, "read", "upload")
        return {"entering": entering, "leaving": share(storing, buffers, "write", "download")}
    finally:
        session.close()


def _per_second(found: tuple[float, list[int]]) -> float:
    seconds, moved = found
    return sum(moved) / seconds


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache, if the system allows it."""
    drop(files_in(folder))


def keep(folder: Path) -> None:
    """Read the files of a folder into the page cache."""
    buffer = bytearray(4 * MiB)
    for path in files_in(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
