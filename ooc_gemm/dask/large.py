"""Sends objects with large arrays to workers. The arrays lie in a file that workers share with the client,
and not in messages of the scheduler. The file holds elements alone, so whoever can write to it can run
nothing."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Large:
    """An object without the elements of its arrays."""

    rest: bytes
    sizes: tuple[int, ...]
    """Bytes of each array, in the order in which they lie in the file."""
    file: str

    @classmethod
    def written(cls, what: Any, file: Path) -> "Large":
        """Write the arrays of an object into a new file. Raises OSError."""
        arrays: list[pickle.PickleBuffer] = []
        rest = pickle.dumps(what, protocol=5, buffer_callback=arrays.append)
        with open(file, "xb") as out:
            sizes = tuple(out.write(array.raw()) for array in arrays)
        return cls(rest, sizes, str(file))

    def read(self) -> Any:
        """Return the object, with arrays that are read from the file. Raises OSError."""
        with open(self.file, "rb") as data:
            arrays = [np.fromfile(data, np.uint8, size) for size in self.sizes]
        return pickle.loads(self.rest, buffers=arrays)
