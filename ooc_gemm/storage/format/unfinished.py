"""What tells an unfinished C from an array: the names of the files that a run keeps at C's place."""

import contextlib

from ...support.errors import InputError
from ..io.place import Place
from . import documents

METADATA = ("zarr.json", ".zarray")
"""Where the metadata of an array stands, of version 3 and of version 2."""
PARTIAL = ".partial"
"""What follows the name of the metadata of a C that is not finished."""
ASIDE = ".ooc-gemm-replaced"
"""The folder in C's that holds the array which C replaces, until C is finished. Object stores have none."""
JOURNAL = "ooc-gemm.journal"
"""The journal, which says which chunks of C are done. In an object store, results that are made by rows have
one of another kind (`rows_store.py`)."""

TRIAL = JOURNAL + ".new"
"""An object that results made by rows put and remove, to try whether anything can be written. What a killed
process has left of it counts as nothing, and is removed where an array is made."""


def is_journal(text: bytes | None) -> bool:
    """Whether a journal of ours begins with `text`, or `text` is all that a killed process has written of
    one."""
    begin = b'{"version": '
    return text is not None and text[: len(begin)] == begin[: len(text)]


def is_begun(there: Place) -> bool:
    """Whether a run has begun a C at a place: an unfinished C stands there, or a journal of ours.

    Raises what the place's client raises.
    """
    return is_partial(there) or is_journal(_text(there, JOURNAL, 64))


def is_partial(there: Place) -> bool:
    """Whether an unfinished C stands at a place: metadata under the name of unfinished ones that are those of
    an array or lie beside a journal of ours, or the array that C replaces. Where an array stands there, too,
    only that counts: the run that was to replace it was killed as it began.

    Raises what the place's client raises.
    """
    keys = [key + PARTIAL for key in METADATA]
    if not there.traits.remote:
        keys += [f"{ASIDE}/{key}" for key in (*METADATA, *keys)]
    found = {key: text for key in keys if (text := _text(there, key, documents.MAX_BYTES)) is not None}
    begun = any(_is_array(key, text) for key, text in found.items())
    begun = begun or bool(found and is_journal(_text(there, JOURNAL, 64)))
    return begun and not any(_text(there, key, 0) is not None for key in METADATA)


def _is_array(key: str, text: bytes) -> bool:
    """Whether the file of this key is the metadata of an array."""
    with contextlib.suppress(InputError):
        return documents.kind(key, documents.parse("", text)) == "array"
    return False


def _text(there: Place, key: str, most: int) -> bytes | None:
    """Return a file as `Place.read` does; nothing of a local one that cannot be read, such as a pipe."""
    try:
        return there.read(key, most)
    except OSError:
        if there.traits.remote:
            raise
        return b""
