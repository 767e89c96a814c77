"""Messages on the command line name its options.

Messages are written for Python: "give force=True to replace it", "give a wider out_dtype". The command line
shows them with the option in the place of the argument: "give --force to replace it". Names of arguments that
are also English words (force, verify, chunks) are recognized only with a value; those with an underscore also
without one.

Standard library only.
"""

import re
from collections.abc import Mapping

_VALUE = r"True|False|'[^'\s]*'|\([^()]*\)|-?[\d.]+(?:e-?\d+)?j?"
"""Pattern of the values that messages name: a flag, a text, a tuple of numbers, or a number."""


def for_command_line(text: str, options: Mapping[str, str]) -> str:
    """The text with options in the place of arguments. `options`: the option of each argument, such as
    `--out-dtype` of `out_dtype`. Parts of paths stay as they are."""
    if not options:
        return text
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    pattern = rf"(?<![\w/.=+-])({names})(?:=({_VALUE}))?(?![\w/=-])(?!\.\w)"

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        if value is None:
            return options[name] if "_" in name else found[0]
        if value == "True":
            return options[name]
        if value == "False":
            return f"--no-{options[name].lstrip('-')}"
        return f"{options[name]} {value.strip(chr(39)).strip('()').replace(', ', ',')}"

    return re.sub(pattern, option, text)
