"""Device memory that a GEMM needs besides its operands."""

from typing import Any

from . import driver

_WORD_BYTES = 4


class Scratch:
    """Memory on the current device by name. Each name keeps its memory until more is asked for under it."""

    def __init__(self) -> None:
        self._memory: dict[str, Any] = {}

    def at(self, name: str, nbytes: int) -> int:
        """Return the address of at least so many bytes. What a name has held before is lost where it grows:
        the smaller memory is freed when the device no longer works with it."""
        from cupy.cuda import Memory, runtime

        if name not in self._memory or self._memory[name].size < nbytes:
            if name in self._memory:
                runtime.deviceSynchronize()
            self._memory[name] = Memory(max(256, nbytes))
        return int(self._memory[name].ptr)

    def drawn(self, stream: Any) -> int:
        """Return the address of the word from which wgmma.cu draws tiles. It is 0 before the first launch in
        this CuPy stream, and each launch leaves it so."""
        is_new = "drawn" not in self._memory
        at = self.at("drawn", _WORD_BYTES)
        if is_new:
            driver.fill(at, 0, _WORD_BYTES, stream)
        return at
