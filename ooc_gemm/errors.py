"""Every error this package raises on purpose: `Error`, and the built-in that fits."""


class Error(Exception):
    """Base class. The message is one sentence: which array, what is wrong, what to do."""


class InputError(Error, ValueError):
    """The request cannot be carried out as it stands; nothing was written."""


class BudgetError(Error, MemoryError):
    """The problem does not fit a memory limit; nothing was written.

    `minimum_memory_limit` and `minimum_device_memory_limit` are the smallest limits in bytes that
    would do, where known.
    """

    def __init__(
        self,
        message: str,
        minimum_memory_limit: int | None = None,
        minimum_device_memory_limit: int | None = None,
    ):
        super().__init__(message)
        self.minimum_memory_limit = minimum_memory_limit
        self.minimum_device_memory_limit = minimum_device_memory_limit


class StoreError(Error, OSError):
    """A chunk could not be read or written while running."""


class RangeError(Error, OverflowError):
    """An exact integer result does not fit the type it is to be stored in."""


class DeviceError(Error, RuntimeError):
    """A device is missing, or failed."""


Place = tuple[tuple[int, int], tuple[int, int]]
"""Rows [start, stop) × columns [start, stop) of C."""


class VerificationError(Error, ArithmeticError):
    """Blocks of C failed their check, also when they were computed again; they were not written.

    `blocks`: where they lie.
    """

    def __init__(self, message: str, blocks: tuple[Place, ...] = ()):
        super().__init__(message)
        self.blocks = blocks
