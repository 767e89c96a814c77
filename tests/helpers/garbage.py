"""What a call leaves to Python's garbage collector."""

import contextlib
import gc


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
