"""Matrices of samples: the names of samples, which genotypes bring, are written beside them."""

import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..run.request import Request
from ..run.result import Result
from ..storage.io.zarr_internals import refuse_event_loop
from ..storage.read.dataset import Dataset, open_dataset
from ..storage.write import labels
from ..support.errors import InputError


@dataclass(frozen=True, repr=False)
class Labelled(Result):
    """What made a matrix of samples."""

    samples: Any = field(default=None, repr=False)
    """Names of the samples, a list of texts; None where the genotypes have none."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without the names."""
        return {key: value for key, value in super().to_dict().items() if key != "samples"}


@dataclass(frozen=True)
class Names:
    """The names of samples of a run. They are read when they are needed, and not held while it goes on."""

    data: Dataset
    count: int
    group: Any = None
    """The path of the group that gets them; None where nothing is stored."""

    def written(self) -> list[str] | None:
        """Read the names and write them beside the finished matrix; None where there are none. Raises
        InputError and StoreError."""
        found = self.data.sample_names(self.count)
        if self.group is not None and found is not None:
            labels.write_names(self.group, found)
        return found


def open_genotypes(g: Any, samples: Literal[0, 1] | None) -> tuple[Dataset, Literal[0, 1]]:
    """Open genotypes. samples: the axis of people as the user gives it. Returns that axis, too. Raises
    InputError."""
    refuse_event_loop()
    if samples not in (0, 1, None):
        raise InputError(f"samples is {samples}; give the axis of people, 0 or 1")
    data = open_dataset(g, "G")
    axis = samples if samples is not None else data.axis
    return data, 0 if axis == 0 else 1


def labelled(request: Request, data: Dataset, count: int, array: str) -> tuple[Request, Names]:
    """The request with the place of its matrix, and the names that are to be written beside it.

    request: its C is what the user gave, a group where samples have names. count: number of samples. array:
    name of the matrix in the group. Raises InputError where the names cannot be read, or not be written
    there.
    """
    found, c = data.sample_names(count), request.c
    if found is None or not isinstance(c, str | os.PathLike):
        return request, Names(data, count)
    place = labels.inside(c, array, found)
    return replace(request, c=place, dimensions=labels.DIMENSIONS), Names(data, count, c)
