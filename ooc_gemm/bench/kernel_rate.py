"""Measures how fast a device multiplies, by panels of several depths.

    t(depth) = once + each · depth     `each` gives the kernel's rate, `once` what a panel costs besides

A fast device multiplies a shallow panel in less time than the host needs to start the kernel, and then t does
not depend on the depth. So panels are made deeper until `once` is a small part of t. A rate above what the
device can do at all (`Device.most_flops`) is refused.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from ..devices.cpu.device import CPU
from ..engine.ports import COMPUTE, UPLOAD, Arithmetic, Array, Device
from ..planning.problem import MiB
from ..planning.schedule import Piece
from ..run.prepare import prepare
from ..run.rates import kernel_key
from ..run.request import Operand, Precision, Request
from ..support.buffers import Bytes
from ..support.errors import DeviceError
from ..support.trace import Trace

Record = dict[str, Any]

STEADY = 0.3
"""Most seconds for which a kernel is timed at one depth, unless two products take longer."""
LEAST_STEADY = 0.03
"""Fewest such seconds, also where compiling other kernels has taken all the time: a block that is small
enough for less time shows how long a kernel takes to start, and not its rate."""
PRODUCT = 0.3
"""Share of that time which one product of the second of the DEPTHS takes at most."""
DEPTHS = (512, 2048)
"""Depths of the first two panels for which a kernel is timed."""
DEEPER = 4
"""Factor by which each further panel is deeper than the one before."""
LARGEST_SHARE = 0.2
"""The largest share of the deepest panel's time that may be independent of its depth."""
LONGEST_PRODUCT = 0.1
"""Seconds of a product up to which panels are made deeper, however little time there is for a kernel."""
LARGEST_PANEL = 512 * MiB
SIDES = (8192, 4096, 2048, 1024, 512)
"""Sides of the square blocks of C for which a kernel may be timed."""
LARGEST_BLOCK = 512 * MiB


class Random:
    """A random matrix whose parts are made when they are asked for."""

    def __init__(self, shape: tuple[int, int], dtype: str):
        self.shape, self.dtype = shape, np.dtype(dtype)

    def __getitem__(self, index: tuple[slice, slice]) -> Array:
        from .measure import random

        rows, cols = (part.stop - part.start for part in index)
        return random(np.random.Generator(np.random.SFC64(1)), rows, cols, self.dtype.name)


class ImplausibleError(DeviceError):
    """The measured rate is above what the device can do."""


def side_of(device: Device, arithmetic: Arithmetic, steady: float) -> int:
    """Return the side of the block of C for which the kernel is timed: large, but not so large that it takes
    long. steady: seconds for each depth."""
    rate = device.rates(arithmetic).flops
    side = next((n for n in SIDES if 2 * n * n * DEPTHS[1] / rate < PRODUCT * steady), SIDES[-1])
    while side * side * arithmetic.block.itemsize > LARGEST_BLOCK:
        side //= 2
    return side


def kernel_rate(
    device: Device,
    dtype: str,
    precision: Precision,
    kernel: str,
    side: int,
    steady: float = STEADY,
    least: int = 0,
) -> tuple[Record, Record]:
    """Measure one kernel on a large C block, for `steady` seconds at each depth. least: the depth from which
    the kernel multiplies as it does where it is chosen (`Arithmetic.least`). Returns its operations per
    second (`flops`) with what a panel costs besides, as the depth of a panel that would take as long
    (`thin`), and the bytes per second of uploads and downloads. Raises ImplausibleError if the rate is above
    what the device can do."""
    copies: Record = {}
    arithmetic: Arithmetic | None = None

    def seconds(depth: int) -> float:
        nonlocal copies, arithmetic
        took, copies, arithmetic = _timed(device, dtype, precision, kernel, (side, depth), steady)
        return took

    deepest = LARGEST_PANEL // (side * np.dtype(dtype).itemsize)
    each, once = line(seconds, deepest, max(steady, LONGEST_PRODUCT), depths_from(least))
    flops = 2.0 * side * side / each if each > 0 else math.inf
    assert arithmetic is not None
    most = device.most_flops(arithmetic.kernel, arithmetic.panel.name)
    if not (0 < flops <= most and math.isfinite(flops)):
        raise ImplausibleError(
            f"{kernel_key(arithmetic)} was measured at {flops / 1e12:.4g} Tflop/s on {device.model}, which "
            f"can do {most / 1e12:.4g} at most, so the rate is not kept; measure again on an idle device"
        )
    return {"flops": flops, "thin": once / each}, copies


def depths_from(least: int) -> tuple[int, int]:
    """Return the depths of the first two panels for which a kernel is timed, none of which is less."""
    first, second = DEPTHS
    while first < least:
        first, second = first * DEEPER, second * DEEPER
    return first, second


def line(
    seconds: Callable[[int], float],
    deepest: int,
    longest: float = math.inf,
    depths: tuple[int, int] | None = None,
) -> tuple[float, float]:
    """Return (each, once) of t(depth) = once + each · depth from the times of panels of `depths`, and of
    deeper ones, up to `deepest` and to products of `longest` seconds, while `once` is too large a share. If
    even the deepest panel does not tell the two apart, all of its time counts as depending on the depth: then
    the rate is too low, but never too high."""
    depths = depths or DEPTHS
    (first, second), (before, now) = depths, map(seconds, depths)
    while True:
        each = min((now - before) / (second - first), now / second)
        once = now - each * second
        if each > 0 and once <= LARGEST_SHARE * now:
            return each, once
        if second * DEEPER > deepest or now * DEEPER > longest:
            return now / second, 0.0
        first, before, second = second, now, second * DEEPER
        now = seconds(second)


def _timed(
    device: Device, dtype: str, precision: Precision, kernel: str, size: tuple[int, int], steady: float
) -> tuple[float, Record, Arithmetic]:
    """Return the seconds of the fastest of many multiplications, the rates of copies, and the arithmetic.
    size: the side of the block, and the depth of the panels. steady: for how many seconds they are repeated.
    Panels are uploaded again for each multiplication, because some kernels overwrite them."""
    side, depth = size
    a, b = Operand(Random((side, depth), dtype)), Operand(Random((depth, side), dtype))
    request = Request(
        a, b, writes=False, device=device, memory_limit="1TiB", precision=precision, kernel=kernel
    )
    job = prepare(request.check())
    arithmetic = job.operation.arithmetic
    panels, trace = replace(job.plan.k_panels, deepest=depth), Trace()
    plan = replace(job.plan, bm=side, bn=side, k_panels=panels, c_buffers=1)
    block = next(plan.blocks())
    pieces = list(plan.pieces(block, (0, depth)))
    part = next(plan.parts(block))
    slot = max(plan.slot_bytes, part.rows * part.cols * arithmetic.block.itemsize)
    rounds = 0
    session = device.open(plan, job.operation, trace)
    try:
        buffers = session.host_buffers(min(len(pieces), 8), slot)
        for buffer in buffers:
            buffer[:] = 0
            session.prepare(buffer)
        for p, buffer in zip(pieces, buffers, strict=False):  # other pieces get the same numbers
            job.sources[p.operand].source.read(p, buffer)
        views = [_view(p, buffer, dtype) for p, buffer in zip(pieces, cycle(buffers), strict=False)]
        end = time.perf_counter() + steady
        while rounds < 2 or (rounds < 50 and time.perf_counter() < end):
            for view, piece in zip(views, pieces, strict=True):
                session.upload(view, piece, 0)
            session.wait(COMPUTE, session.record(UPLOAD))
            session.multiply(block, (0, depth), (0, 0), 0, True)
            done = session.record(COMPUTE)
            session.wait(UPLOAD, done)
            rounds += 1
        target = buffers[0][: part.rows * part.cols * arithmetic.block.itemsize]
        target = target.view(arithmetic.block).reshape(part.rows, part.cols)
        done.synchronize()
        session.finish(block, 0)
        for _ in range(3):
            session.download(block, part, 0, target).synchronize()
    finally:
        session.close()
    # A copy of the CPU is made by one thread, and takes one of its cores: in `Rates`, all take part in all.
    cores = device.threads if isinstance(device, CPU) else 1
    uploaded, downloaded = rounds * sum(view.nbytes for view in views), 3 * target.nbytes
    copies = {
        "upload_bytes_per_second": cores * uploaded / trace.seconds["upload"],
        "download_bytes_per_second": cores * downloaded / trace.seconds["download"],
    }
    return trace.least["compute"], copies, arithmetic


def _view(piece: Piece, buffer: Bytes, dtype: str) -> Array:
    """Return the elements of a piece in a buffer."""
    shape, kind = piece.shape, np.dtype(dtype)
    return buffer[: math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
