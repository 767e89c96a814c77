"""What a store can do, as far as plans and readers depend on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreTraits:
    """One description of a store, made where an array is opened. The defaults are those of local files."""

    remote: bool = False
    """Every request is a round trip to another machine."""
    latency: float = 0.0
    """Seconds until the store begins to answer; 0 where that is no time, or is not known."""
    asynchronous: bool = False
    """Reads and writes go on by themselves once they have been started."""
    stackable: bool = False
    """A piece may be of several chunks, one below the other: they are read at once and copied as one."""
    listable: bool = True
    """The store lists what it holds, and replaces an object only if nobody else has changed it."""


LOCAL = StoreTraits()
"""Those of local files."""
