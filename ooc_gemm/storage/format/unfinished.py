"""What tells an unfinished C from an array: the names of the files that a run keeps at C's place."""

import contextlib
import os
from pathlib import Path

from ...support.errors import InputError
from ..io.objects import Objects
from . import documents

METADATA = ("zarr.json", ".zarray")
"""Where the metadata of an array stands, of version 3 and of version 2."""
PARTIAL = ".partial"
"""What follows the name of the metadata of a C that is not finished."""
ASIDE = ".ooc-gemm-replaced"
"""The folder in C's that holds the array which C replaces, until C is finished."""
JOURNAL = "ooc-gemm.journal"
"""The journal of what is done of C."""


def is_journal(text: bytes | None) -> bool:
    """Whether this is how a journal begins, or all that a killed process has written of it."""
    begin = b'{"version": '
    return text is not None and text[: len(begin)] == begin[: len(text)]


def is_begun(there: Objects) -> bool:
    """Whether a C that is not finished stands in an object store, or one is begun: there is the metadata of
    an array under the name of unfinished ones, or a journal of ours."""
    for key in METADATA:
        text = there.read(key + PARTIAL, documents.MAX_BYTES)
        with contextlib.suppress(InputError):
            if text is not None and documents.kind(key, documents.parse("", text)) == "array":
                return True
    return is_journal(there.read(JOURNAL, 64))


def is_partial(place: Path) -> bool:
    """Whether a C that is not finished stands in a folder. Where an array stands there, too, it is that which
    counts: a run that was to replace it was killed as it began."""
    left = [*(key + PARTIAL for key in METADATA), ASIDE]
    return any(os.path.exists(place / name) for name in left) and not any(
        os.path.exists(place / key) for key in METADATA
    )
