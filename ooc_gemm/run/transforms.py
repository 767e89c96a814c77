"""From what is asked of an operand (`Operand`) to what the device does to its elements (`Transform`).

`Wanted` knows an operand after it has been opened. Everything about it but the means and deviations that a
pass over the array must find is known before a plan is made: the type of the transformed elements, the bytes
of the vectors, and the words by which a journal tells one transform from another.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from ..engine.transform import SCRATCH_BYTES, Array, Transform, as_element, is_whole
from ..engine.transform import Lines as Vectors
from ..storage.format.conventions import Decoding
from ..storage.io.stamps import digest
from ..storage.read.source import Opened
from ..storage.read.table import as_table
from ..storage.write.recorded import ELEMENTS
from ..support.errors import InputError, Refusals
from .decoding import PLAIN, decoded
from .request import Axis, Lines, Operand, Request, numbers
from .scalars import is_one_of, real

Where = Literal["shift", "scale"]


def real_type(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of elements that are transformed: float32, or float64 where that does not hold the type
    of what is stored."""
    return np.result_type(stored, np.float32)


def held(divisors: Array, panel: np.dtype[Any], weights: Array | float = 1.0) -> Array:
    """Which quotients weights/divisors keep their digits in the type of a panel. Those by 0, infinity or NaN,
    and those of weights 0, are what they are."""
    info = np.finfo(panel)
    with np.errstate(all="ignore"):
        sizes = np.abs(weights / divisors)
    plain = np.isfinite(divisors) & (divisors != 0) & (weights != 0)
    found: Array = ~plain | ((sizes >= info.smallest_normal) & (sizes <= info.max))
    return found


@dataclass(frozen=True, eq=False)
class Wanted:
    """A transform that is asked for, of an operand that is open."""

    operand: Operand
    """In units of the stored elements."""
    opened: Opened
    """With its op()."""
    k_cols: bool
    """k runs along the columns of the stored matrix S, not along its rows."""
    decoding: Decoding = PLAIN
    """How stored elements were decoded, where that was asked for."""

    def check(self) -> "Wanted":
        """The same. Raises InputError where it cannot be applied, whatever the array holds."""
        name, dtype = self.opened.name, self.opened.dtype
        if dtype.kind == "c":
            raise InputError(f"{name} holds {dtype}, and only real arrays are centred, scaled or weighted")
        if self.operand.missing is not None:
            self._check_missing(real("missing", self.operand.missing))
        for word, vector, length in self._given:
            if vector.shape != (length,):
                raise InputError(
                    f"{word} of {name} has shape {vector.shape}, but needs {length} numbers; give one each"
                )
        if self._weights is not None and not np.isfinite(self._weights).all():
            raise InputError(f"weights of {name} are not all finite; leave out what has none")
        return self

    def _check_missing(self, missing: float) -> None:
        """Raise InputError for an integer that stands for another one only by rounding."""
        dtype = self.opened.dtype
        if dtype.kind == "f" and is_whole(missing) and as_element(missing, dtype) is None:
            raise InputError(
                f"missing is {missing:.0f}, which {dtype} does not hold; give the number that "
                f"{self.opened.name} has for it"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the transformed elements."""
        return real_type(self.opened.dtype)

    def nbytes(self, panel: np.dtype[Any]) -> int:
        """Bytes of the vectors, for panels of a type."""
        s, operand = self.opened.matrix, self.operand
        extents = {"rows": s.rows, "cols": s.cols}
        found = 0
        for word, lines, times in (("center", operand.center, 2), ("scale", operand.scale, 1)):
            if lines is not None:
                found += times * extents[self._side(_axis(lines, word))]
        if operand.weights is not None:
            found += s.cols if self.k_cols else s.rows
        return found * panel.itemsize

    @property
    def key(self) -> tuple[Any, ...]:
        """Two operands with the same have the same means and deviations."""
        operand = self.operand
        named = tuple(x if isinstance(x, str) else id(x) for x in (operand.center, operand.scale))
        return id(operand.array), named, operand.missing, self.decoding, id(operand.table)

    def found_in(self, limit: int) -> tuple["Wanted", int]:
        """The same with numbers in the place of names, and the bytes that passes over the array read."""
        from .moments import Moments, column_moments, deviations  # most products need no passes

        operand, read = self.operand, 0
        found: dict[Axis, Moments] = {}
        looked = self._looked_through()
        for lines, opened in looked.items():
            found[lines], nbytes = column_moments(opened, limit, operand.missing)
            read += nbytes
        if isinstance(operand.center, str):
            one = found[operand.center]
            operand = replace(operand, center=(operand.center, np.where(one.count == 0, 0.0, one.mean)))
        if isinstance(operand.scale, str):
            axis, factor = operand.scale, self.decoding.factor
            deviation, more = deviations(looked[axis], limit, found[axis], operand.missing)
            read += more
            deviation = np.where(deviation == 0, 1 / factor, np.copysign(deviation, factor))
            operand = replace(operand, scale=(operand.scale, deviation))
        return replace(self, operand=operand), read

    def check_memory(self, limit: int, refusals: Refusals) -> None:
        """Note where the limit is too small for `found_in`."""
        from .moments import the_pass  # as above

        for opened in self._looked_through().values():
            with refusals.noted():
                the_pass(opened, limit)

    def _looked_through(self) -> dict[Axis, Opened]:
        """The array whose columns have the moments that are asked for by name, for each axis."""
        asked = [x for x in (self.operand.center, self.operand.scale) if isinstance(x, str)]
        s = self.opened.matrix
        return {
            axis: replace(self.opened, matrix=replace(s, transposed=self._side(axis) == "rows"))
            for axis in asked
        }

    def spelled(self) -> dict[str, Any]:
        """What makes the transform what it is, as JSON types."""
        operand, vectors = self.operand, {word: vector for word, vector, _ in self._given}
        found: dict[str, Any] = {}
        for word, lines in (("center", operand.center), ("scale", operand.scale)):
            if lines is not None:
                found[word] = _axis(lines, word)
        for word, vector in vectors.items():
            found[f"{word} by"] = digest([vector.tobytes()])
        if operand.missing is not None:
            found["missing"] = str(float(operand.missing))
        if self.decoding != PLAIN:
            found["decoded by"] = [self.decoding.factor, self.decoding.offset]
        return found

    def transform(self, panel: np.dtype[Any]) -> Transform:
        """The transform, with vectors in the panels' type. Raises InputError where that holds no such
        factors."""
        shift, divisors = self._vector("shift"), self._vector("scale")
        weights = {} if self._weights is None else {"cols" if self.k_cols else "rows": self._weights}
        lines: list[Vectors] = []
        for side in ("rows", "cols"):
            size = np.abs(shift.get(side, np.zeros(1)))
            if (np.isfinite(size) & (size > np.finfo(panel).max)).any():
                self._refuse("center", panel)
            factors = self._factors(divisors.get(side), weights.get(side), panel)
            lines.append(Vectors.of(shift.get(side), factors, panel))
        return Transform(lines[0], lines[1], self.operand.missing)

    def _factors(self, by: Array | None, weights: Array | None, panel: np.dtype[Any]) -> Array | None:
        """What elements are multiplied with: weights, and what they are divided by. Raises InputError where
        panels of this type do not hold it."""
        if by is None and weights is None:
            return None
        if by is None and np.finfo(panel).dtype == np.float64:
            return weights
        times, over = 1.0 if weights is None else weights, np.ones(1) if by is None else by
        if not held(over, panel, times).all():
            self._refuse("weights" if by is None else "scale" if weights is None else "scale·weights", panel)
        with np.errstate(all="ignore"):
            factors: Array = times / over
        return factors

    def _refuse(self, word: str, panel: np.dtype[Any]) -> NoReturn:
        """Raise the error that says that a type cannot hold what was given or found."""
        held_by = np.finfo(panel).dtype
        remedy = "change the unit of the array" if held_by == np.float64 else 'give out_dtype="float64"'
        raise InputError(
            f"{word} of {self.opened.name} has numbers that are too small or too large for {held_by}; "
            f"{remedy}"
        )

    def _vector(self, what: Where) -> dict[str, Array]:
        """What is subtracted from, or divides, the rows or columns of S."""
        lines = self.operand.center if what == "shift" else self.operand.scale
        if lines is None:
            return {}
        side = self._side(_axis(lines, "center" if what == "shift" else "scale"))
        assert not isinstance(lines, str), "a pass over the array has found the numbers"
        return {side: np.asarray(lines[1], np.float64)}

    def _side(self, axis: Axis) -> str:
        """`rows` or `cols` of S for rows or columns of the array as its user sees it."""
        return "rows" if (axis == "rows") != self.opened.matrix.fortran else "cols"

    @cached_property
    def _weights(self) -> Array | None:
        return None if self.operand.weights is None else numbers(self.operand.weights, "weights")

    @cached_property
    def _given(self) -> list[tuple[str, Array, int]]:
        """Vectors that the user gave, by name, with the lengths that they must have."""
        s, operand = self.opened.matrix, self.operand
        extents, found = {"rows": s.rows, "cols": s.cols}, []
        for word, lines in (("center", operand.center), ("scale", operand.scale)):
            if lines is not None and not isinstance(lines, str):
                extent = extents[self._side(_axis(lines, word))]
                found.append((word, numbers(lines[1], word), extent))
        if self._weights is not None:
            found.append(("weights", self._weights, s.cols if self.k_cols else s.rows))
        return found


def _axis(lines: Lines, word: str) -> Axis:
    """Rows or columns."""
    try:
        axis, _ = (lines, None) if isinstance(lines, str) else lines
    except (TypeError, ValueError) as error:
        raise InputError(f"{word} is {lines!r}; give 'rows', 'columns', or ('rows', numbers)") from error
    if not is_one_of(axis, get_args(Axis)):
        raise InputError(f"{word} is {axis!r}; give 'rows' or 'columns'")
    return axis


def wanted_of(operands: tuple[Operand, Operand], opened: tuple[Opened, Opened]) -> dict[str, Wanted]:
    """What is asked for, by operand, checked. Raises InputError."""
    found = {}
    for name, operand, one in zip("ab", operands, opened, strict=True):
        k_cols = one.matrix.transposed == (name == "b")
        if operand.weights is not None:
            operand = replace(operand, weights=numbers(operand.weights, "weights"))
        if operand.decode_cf:
            Wanted(operand, one, k_cols).check()  # in the units of its user
            operand, decoding = decoded(operand, one)
        else:
            decoding = PLAIN
        if operand.transformed:
            found[name] = Wanted(operand, one, k_cols, decoding).check()
    return found


def spelled(request: Request, wanted: dict[str, Wanted]) -> dict[str, Any]:
    """What happens to the elements of the operands, as options that determine C."""
    if request.elements is not None:
        return {f"{ELEMENTS}{name}": request.elements for name in "AB"}
    found = {name: one.spelled() for name, one in wanted.items()}
    for name, operand in (("a", request.a), ("b", request.b)):
        if operand.table is not None:
            table = digest([as_table(operand.table).tobytes()])
            found[name] = found.get(name, {}) | {"table": table}
    return {f"{ELEMENTS}{name.upper()}": one for name, one in found.items()}


def element_types(wanted: dict[str, Wanted], opened: tuple[Opened, Opened]) -> tuple[Any, Any]:
    """Types of the elements of A and B as they are multiplied."""
    a, b = (wanted[n].dtype if n in wanted else one.dtype for n, one in zip("ab", opened, strict=True))
    return a, b


def ledger_bytes(wanted: dict[str, Wanted], panel: np.dtype[Any], lines: int) -> tuple[int, int]:
    """Bytes of all vectors, and what each thread that places pieces allocates. lines: numbers that may be
    wanted later, so there has to be room for them."""
    nbytes = max(sum(one.nbytes(panel) for one in wanted.values()), lines * panel.itemsize)
    return nbytes, SCRATCH_BYTES if wanted or lines else 0


def found_of(
    wanted: dict[str, Wanted], panel: np.dtype[Any], limit: int, symmetric: bool
) -> tuple[dict[str, Transform], int]:
    """Transforms by operand, and the bytes read by passes that found means and deviations. symmetric: op(B)
    is op(A)ᵀ and is cut from A."""
    found: dict[tuple[Any, ...], tuple[Wanted, int]] = {}
    transforms: dict[str, Transform] = {}
    read = 0
    for name, one in wanted.items():
        if symmetric and name == "b":
            transforms["b"] = transforms["a"]
            continue
        if one.key not in found:
            found[one.key] = one.found_in(limit)
            read += found[one.key][1]
        ready = found[one.key][0].operand
        operand = replace(one.operand, center=ready.center, scale=ready.scale)
        transforms[name] = replace(one, operand=operand).transform(panel)
    return transforms, read
