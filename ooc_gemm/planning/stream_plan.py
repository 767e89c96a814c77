"""A plan of passes over one array that make no product of blocks: of components, and of a linear model."""

from dataclasses import dataclass, field
from typing import Any

from ..support.intervals import ceil_div
from ..support.shown import Shown
from . import report


@dataclass(frozen=True)
class Cut:
    """How a pass cuts op(X), and what it takes."""

    height: int
    """Rows of op(X) in a panel; the last one may have fewer."""
    readers: int
    """Number of threads that read."""
    bytes_read: int
    """Bytes that a pass moves from the store."""
    ledger: dict[str, int]
    """Bytes of host memory, by what holds them."""
    device_ledger: dict[str, int]
    """Bytes of the device's memory, by what holds them; empty where it computes in host memory."""
    kept_rows: int = 0
    """Rows of op(X) that stay on the device, so that passes after the first one do not upload them."""
    kept_bytes: int = 0
    """Bytes that each pass after the first one need not move from the store, because what they hold is kept
    in memory."""


@dataclass(frozen=True, repr=False)
class StreamPlan(Shown):
    """What passes over an array X are going to take. Sizes in bytes, times in seconds."""

    array: str
    """How messages call X."""
    rows: int
    columns: int
    dtype: str
    result: str
    """What is computed, for the reader of the plan."""
    device: str
    passes: int
    """How often X is read."""
    panel_rows: int
    """Rows of X in a panel."""
    panel_columns: int
    """Columns of X in a panel."""
    readers: int
    """Number of threads that read."""
    bytes_read: int
    bytes_written: int
    input_bytes: int
    """Bytes of all stored chunks of the inputs."""
    ledger: dict[str, int] = field(repr=False)
    """Bytes of host memory, by what holds them."""
    device_ledger: dict[str, int] = field(repr=False)
    """Bytes of the device's memory, by what holds them."""
    memory_limit: int
    device_memory_limit: int | None
    stage_seconds: dict[str, float] = field(repr=False)
    """Predicted seconds that each stage is busy."""
    predicted_seconds: float
    rates: str
    """Where the rates come from with which seconds are predicted."""

    @property
    def panels(self) -> int:
        """Number of panels of a pass."""
        return ceil_div(self.rows, self.panel_rows) * ceil_div(self.columns, self.panel_columns)

    @property
    def host_bytes(self) -> int:
        """Host memory in bytes that the passes take: the sum of the ledger."""
        return sum(self.ledger.values())

    @property
    def device_bytes(self) -> int:
        """The same of the device's memory."""
        return sum(self.device_ledger.values())

    def __str__(self) -> str:
        """Return the plan as a table."""
        found, panels = self.to_dict(), "panel" if self.panels == 1 else "panels"
        passes = f"{self.passes}, each in {self.panels} {panels} of {self.panel_rows}×{self.panel_columns}"
        rows = [
            ("array", f"{self.array}: {self.rows}×{self.columns} {self.dtype}"),
            ("result", self.result),
            ("device", self.device),
            ("passes", passes),
            ("read", f"{report.mib(self.bytes_read)} (the inputs hold {report.mib(self.input_bytes)})"),
            ("written", report.mib(self.bytes_written)),
        ]
        return report.lines([*rows, *report.time_rows(found), *report.memory_rows(found)])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON types."""
        more = ("panels", "host_bytes", "device_bytes")
        return {name: getattr(self, name) for name in (*self.__dataclass_fields__, *more)}
