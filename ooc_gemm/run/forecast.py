"""Predicts what passes over an array take, for the plans of statistics that are no products of blocks."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.ports import Arithmetic, Device
from ..planning.machine import Budget, Rates
from ..planning.reads import one_pass
from ..planning.stream_plan import Cut, StreamPlan
from ..storage.read import addresses
from ..storage.read.source import Opened
from . import rates, rates_first
from .budget import of_stores
from .observer import Observer
from .rows import written
from .stream import PIECE_BYTES

NARROW = 16.0
"""Columns at which a product of a panel takes twice as long as its operations at full speed, because it waits
for memory."""
EIGEN_FLOPS = 12.0
"""Time of an eigendecomposition of an n×n matrix, in multiples of that of n³ operations of a product."""


@dataclass(frozen=True)
class Load:
    """What passes over an array do with it."""

    passes: int
    dtype: np.dtype[Any]
    """Type of panels."""
    products: tuple[tuple[float, int], ...]
    """Operations of products with panels in all passes, and the columns of the narrower operand."""
    touched: int = 0
    """How often each element of a panel is read or written in host memory beside products, in all passes."""
    eigen: int = 0
    """Rows and columns of a matrix that is decomposed at the end."""


@dataclass(frozen=True)
class Asked:
    """The passes that a statistic makes. Sizes in bytes."""

    opened: Opened
    """op(X)."""
    turned: bool
    """Whether op(X) is the transpose of what the user gave."""
    cut: Cut
    load: Load
    result: str
    """What is computed, for the reader of the plan."""
    device: Device
    memory_limit: int
    device_memory_limit: int | None
    out: Any
    """Path or URL of the array that is written; None where there is none."""
    shape: tuple[int, int]
    """Its shape, and …"""
    dtype: np.dtype[Any]
    """… type."""
    once: Opened | None = None
    """An array that is read once before the first pass."""

    @property
    def inputs(self) -> list[tuple[Opened, int]]:
        """The arrays, and how often each is read."""
        once = [] if self.once is None else [(self.once, 1)]
        return [(self.opened, self.load.passes), *once]

    @property
    def bytes_read(self) -> int:
        """Of all passes."""
        once = 0 if self.once is None else self.once.matrix.pass_bytes(self.once.shape[0])
        return self.load.passes * self.cut.bytes_read - self.later * self.cut.kept_bytes + once

    @property
    def later(self) -> int:
        """Number of passes after the first one."""
        return self.load.passes - 1

    @property
    def bytes_written(self) -> int:
        """Of whole chunks."""
        return 0 if self.out is None else written(self.shape, self.dtype)

    @property
    def target(self) -> rates.Place:
        """The local folder that is written to."""
        return None if self.out is None else addresses.local_path(self.out), self.bytes_written

    @property
    def arithmetic(self) -> Arithmetic:
        """What multiplies panels."""
        dtype, kernel = self.load.dtype, "cublas" if self.cut.device_ledger else "auto"
        return self.device.arithmetic(dtype, dtype, dtype, (1, 1, 1), 0, kernel, "highest")


def forecast(asked: Asked, observer: Observer) -> StreamPlan:
    """Return the plan of the passes, with rates that are measured where they are not known. Nothing else is
    read."""
    found = _rates(asked)
    wanted = rates_first.Wanted(
        device=asked.device,
        arithmetic=asked.arithmetic,
        inputs=tuple(one for one, _ in asked.inputs),
        c=asked.target,
        budget=Budget(
            host=asked.memory_limit,
            host_baseline=asked.cut.ledger["baseline"],
            device=sum(asked.cut.device_ledger.values()) or None,
            readers=asked.cut.readers,
            writers=1,
        ),
        read=found.read,
        seconds=_total(_stages(asked, found), found),
    )
    if said := rates_first.measure(wanted):
        observer.note(said)
        found = _rates(asked)
    stages, (rows, cols) = _stages(asked, found), asked.opened.shape
    height = min(asked.cut.height, rows)
    return StreamPlan(
        array=asked.opened.name,
        rows=cols if asked.turned else rows,
        columns=rows if asked.turned else cols,
        dtype=asked.opened.dtype.name,
        result=asked.result,
        device=asked.device.name,
        passes=asked.load.passes,
        panel_rows=cols if asked.turned else height,
        panel_columns=height if asked.turned else cols,
        readers=asked.cut.readers,
        bytes_read=asked.bytes_read,
        bytes_written=asked.bytes_written,
        input_bytes=sum(one.matrix.stored_bytes for one, _ in asked.inputs),
        ledger=asked.cut.ledger,
        device_ledger=asked.cut.device_ledger,
        memory_limit=asked.memory_limit,
        device_memory_limit=asked.device_memory_limit,
        stage_seconds=stages,
        predicted_seconds=_total(stages, found),
        rates=found.note,
    )


def _rates(asked: Asked) -> Rates:
    """Return the rates that are known."""
    inputs = [one for one, _ in asked.inputs]
    places = [(one.place, one.matrix.stored_bytes) for one in inputs]
    codecs = [one.source.codec for one in inputs]
    return of_stores(rates.known(asked.device, asked.arithmetic, places, asked.target, codecs), inputs)


def _stages(asked: Asked, known: Rates) -> dict[str, float]:
    """Return the seconds of each stage."""
    load, readers, reading = asked.load, asked.cut.readers, 0.0
    for one, times in asked.inputs:
        s, height = one.matrix, asked.cut.height if one is asked.opened else one.shape[0]
        steps = (s.rows, height) if s.transposed else (height, s.cols)
        call = known.read_seconds + known.latency / readers
        unread = asked.later * asked.cut.kept_bytes if one is asked.opened else 0
        once = one_pass(s, *steps, PIECE_BYTES).seconds(known, known.reading(readers), call)
        reading += (times - unread / max(1, asked.cut.bytes_read)) * once
    rows, cols = asked.opened.shape
    line, uploaded = cols * load.dtype.itemsize, load.passes * rows - asked.later * asked.cut.kept_rows
    computing = sum(flops / known.flops * (1 + NARROW / max(1, wide)) for flops, wide in load.products)
    computing += EIGEN_FLOPS * load.eigen**3 / known.flops
    if not asked.cut.device_ledger:  # a copy reads and writes
        computing += load.touched / 2 * rows * line / known.upload
    return {
        "read": reading,
        "upload": uploaded * line / known.upload,
        "compute": computing,
        "write": asked.bytes_written / known.write,
    }


def _total(stages: dict[str, float], known: Rates) -> float:
    """Return the seconds of all stages. Where they overlap, what is written at the end still follows."""
    if known.shared:
        return known.start + sum(stages.values())
    return known.start + stages["write"] + max(stages[name] for name in ("read", "upload", "compute"))
