"""The result of a multiplication: sizes, times and counts."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ..planning.plan import Plan
from ..support.shown import Shown
from ..support.trace import Timeline
from .rechunk import Rechunked


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """What a multiplication did. Sizes in bytes, times in seconds."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    device: str
    kernel: str
    precision: str
    seconds: float
    tflops: float
    """2mnk operations a second; half as many where one half of C is the other's mirror image, and those of
    blocks that were done already do not count."""
    bytes_read: int
    """Bytes moved from the stores to the process, counted where they move."""
    bytes_written: int
    bytes_uploaded: int
    bytes_downloaded: int
    lower_bound_bytes: int
    """Least bytes any schedule moves with the memory that was allowed."""
    peak_host_bytes: int
    """The largest resident set that the process has had."""
    peak_device_bytes: int
    stage_seconds: dict[str, float]
    """Seconds that each stage was busy, added up over its threads."""
    blocks: int
    blocks_resumed: int
    verified: bool | None
    overflowed: int
    """Elements of C, as far as this run made them, that are infinite although the product is finite there:
    they are too large for C's type."""
    rechunked: tuple[Rechunked, ...]
    """Copies that were made first; `seconds` includes theirs."""
    plan: Plan = field(repr=False)
    bytes_passed: int = 0
    """Read by passes that found means and deviations of operands, beside `bytes_read`."""
    bytes_exchanged: int = 0
    """Bytes that workers of a cluster got from each other instead of the store."""
    array: Any = field(default=None, repr=False)
    """C: a NumPy array where no C was given, otherwise the zarr.Array that was written."""
    timeline: Timeline | None = field(default=None, repr=False)
    """When each stage was busy; None where the run was not traced."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        out = {key: value for key, value in self.__dict__.items() if key not in ("plan", "array", "timeline")}
        return {**out, "rechunked": [asdict(copy) for copy in self.rechunked], "plan": self.plan.to_dict()}
