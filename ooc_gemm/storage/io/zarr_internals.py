"""Names that zarr has and does not document. Everything else in this package takes them from here, and
tests/system/test_internals.py fails when one of them changes."""

import asyncio
import zipfile
from typing import Any

import zarr
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import _get_loop, iothread, loop, sync
from zarr.storage import WrapperStore, ZipStore

from ...support.errors import NO_MEMORY, InputError, OutOfMemoryError, no_memory

__all__ = [
    "archive_of",
    "default_buffer_prototype",
    "event_loop",
    "refuse_event_loop",
    "sync",
    "unwrapped",
    "use_fast_codecs",
]


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that zarr runs in a thread of its own. Raises OutOfMemoryError where the system
    gives no memory for that thread."""
    try:
        found: asyncio.AbstractEventLoop = _get_loop()
        return found
    except (RuntimeError, MemoryError) as error:
        # zarr keeps the loop whose thread did not start: everything asked of it would wait without end.
        if loop[0] is not None:
            loop[0].close()
        loop[0] = iothread[0] = None
        if no_memory(error):
            raise OutOfMemoryError(NO_MEMORY) from error
        raise


def archive_of(store: ZipStore) -> zipfile.ZipFile:
    """Return the archive of a store that was read from. It holds the archive's directory, which takes long to
    read where there are many chunks."""
    return store._zf


def unwrapped(store: Store) -> Store:
    """Return the store that another one, such as one that logs what is asked, passes all questions on to."""
    while isinstance(store, WrapperStore):
        store = store._store
    return store


def use_fast_codecs(array: zarr.Array[Any]) -> None:
    """Let one array use the `zarrs` codec pipeline, if it is installed and reads stores of the array's kind.
    It does not limit what decompressors make. zarr's setting for that is one of the whole process: arrays
    that other threads open meanwhile would use it, too."""
    try:
        from zarrs import ZarrsCodecPipeline
    except ImportError:
        return
    inner = array.async_array
    try:
        made = ZarrsCodecPipeline.from_array_metadata_and_store(inner.metadata, inner.store_path.store)
    except NotImplementedError:  # zarrs does not read this store, so the array keeps zarr's own pipeline
        return
    object.__setattr__(inner, "codec_pipeline", made)  # it is frozen


def refuse_event_loop() -> None:
    """Raise InputError in the thread that runs zarr's event loop, where waiting for zarr would never end. Any
    other event loop may be running. Raises OutOfMemoryError as `event_loop` does."""
    theirs = event_loop()
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if running is theirs:
        raise InputError(
            "ooc_gemm was called from inside zarr's own event loop, which it needs itself; "
            "call it from another thread, for example by asyncio.to_thread"
        )
