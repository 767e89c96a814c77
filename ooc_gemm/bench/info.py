"""Lists what this machine has, and measures how fast it is: all rates that plans use, taken with the engine's
own readers, writers, ring and devices, so that predictions concern what is run."""

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
from ..engine.ports import Array, Device
from ..planning.problem import Matrix, MiB
from ..planning.schedule import Part, Piece
from ..run import cold_start
from ..run.prepare import prepare
from ..run.rates import FILE, FOLDERS, file_system, fresh_rate, kernel_key, possible, sound, today
from ..run.request import Operand, Precision, Request
from ..storage.io import background
from ..storage.read import source
from ..support.buffers import Bytes
from ..support.cache import distrusted, folder
from ..support.memory import default_memory_limit
from ..support.remembered import not_written, recall, remember
from ..support.trace import Trace
from . import chunks, kernel_rate
from .folders import STEPS, measure_folder

Record = dict[str, Any]
Say = Callable[[str], None]

SECONDS = 10.0
"""Seconds that all measurements take by default. What comes last gets the time that is left."""
IN_FOLDERS = 0.45
"""Share of a device's time that measurements in folders take. Kernels and memory take the rest."""
DEPTHS = 4
"""Number of depths of panels at which most kernels are timed, with what preparing them takes."""
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
    key = FOLDERS[len(chunks.limits_of(device).weights) > 1]
    known = dict(recall(FILE).get(device.model, {}).get(key, {}))
    for place in places:
        say(f"{device.name}: reading and writing in {place}")
        record = measure_folder(place, device, seconds / len(places) / STEPS)
        refused += _without_unsound(record, str(place))
        known[file_system(place)] = record
    remember(FILE, device.model, {key: known})
    cold_start.note_used(device)
    return refused


def _devices() -> Iterator[Device]:
    yield CPU()
    automatic = open_device("auto")
    if automatic.name != "cpu":
        yield automatic


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

    with ThreadPoolExecutor(chunks.limits_of(device).readers) as pool:
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


class _Nothing(source.Source):
    """A source whose pieces need no reading."""

    def read(self, piece: Piece, slot: Bytes) -> tuple[Array, int]:
        return self._place(piece, slot), 0


class _Nowhere:
    """A target that discards C."""

    background, bring = False, None

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
            execute(plan, session, {"a": source, "b": source}, lambda: _Nowhere(problem.c), Trace())
            done = time.perf_counter()
        finally:
            session.close()
        return (done - started) / count, started - start + time.perf_counter() - done

    found = [run() for _ in range(2)]
    return min(each for each, _ in found), min(fixed for _, fixed in found)
