"""The types that options and arguments of the commands have."""

from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType

FOLDER = click.Path(exists=True, file_okay=False, writable=True)


class Address(ParamType):
    """A path or URL of an array. Shells complete names of files."""

    name = "path"

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        """Leave completion to the shell."""
        return [CompletionItem(incomplete, type="file")]


class Pair(ParamType):
    """An option of two positive integers, `M,N`."""

    name = "M,N"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            self.fail(f"{value!r} is not two numbers; write for example 2048,2048")
        return int(parts[0]), int(parts[1])


class Number(ParamType):
    """An option whose value is a real or complex number, such as `2` or `1+2j`."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> complex:
        try:
            number = complex(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a number")
        return number if number.imag else number.real
