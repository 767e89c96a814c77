"""What statistics report that are made in passes over an array."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..support.shown import Shown


@dataclass(frozen=True, repr=False)
class Passes(Shown):
    """What the passes over the array took. Sizes in bytes, times in seconds."""

    passes: int
    """How often the array was read."""
    seconds: float
    bytes_read: int
    bytes_written: int
    peak_host_bytes: int
    """The largest resident set the process has had."""
    device: str
    """Name of the device."""
    peak_device_bytes: int
    """The most memory that was held of a device with memory of its own; 0 where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types, without the fields that `repr` leaves out, which are arrays."""
        fields = type(self).__dataclass_fields__.values()
        values = {one.name: getattr(self, one.name) for one in fields if one.repr}
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()
        }
