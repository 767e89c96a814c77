"""What a call leaves to Python's garbage collector."""

import contextlib
import gc
import time

import numpy as np


@contextlib.contextmanager
def nothing_left_to_collect():
    """Fails where objects of this package, or memory of a device, form cycles: they would keep what they hold
    until Python looks for such cycles, which it does at any time, in any thread."""
    gc.collect()
    gc.disable()
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        kinds = [type(one) for one in gc.garbage]
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
        gc.enable()
    names = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds})
    kept = [name for name in names if name.startswith(("ooc_gemm", "cupy", "numpy"))]
    assert not kept, f"cycles hold {kept}"


def bytes_of_arrays():
    """Return the bytes of all of NumPy's arrays that any object of this process refers to. One that is a part
    of another counts as that one."""
    found = {}
    for one in gc.get_objects():
        for array in gc.get_referents(one):
            if isinstance(array, np.ndarray):
                while isinstance(array.base, np.ndarray):
                    array = array.base
                found[id(array)] = array.nbytes
    return sum(found.values())


@contextlib.contextmanager
def arrays_are_freed(most, seconds=0):
    """Fails where `most` bytes of arrays, or more, are left of what is made within, cycles and all.
    `seconds`: how long other threads may still need some."""
    gc.collect()
    gc.disable()
    try:
        before = bytes_of_arrays()
        yield
        end = time.monotonic() + seconds
        while bytes_of_arrays() >= before + most and time.monotonic() < end:
            time.sleep(0.05)
        assert bytes_of_arrays() < before + most
    finally:
        gc.enable()
