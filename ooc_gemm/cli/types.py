"""Types of options and arguments."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType

FOLDER = click.Path(exists=True, file_okay=False, writable=True)


class Pair(_ParamType):
    """Two positive integers, `M,N`."""

    name = "M,N"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            self.fail(f"{value!r} is not two numbers; write for example 2048,2048")
        return int(parts[0]), int(parts[1])


class Number(_ParamType):
    """A real or complex number."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> complex:
        try:
            number = complex(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a number")
        return number if number.imag else number.real
