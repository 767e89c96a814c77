"""What a store can do, as far as plans and readers depend on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreTraits:
    """One description of a store, made where an array is opened. The defaults are those of local files."""

    remote: bool = False
    """Whether every request is a round trip to another machine."""
    latency: float = 0.0
    """Seconds until the store begins to answer; 0 where that takes no time or is not known."""
    asynchronous: bool = False
    """Whether reads and writes continue in the background once they are started."""
    in_process: bool = False
    """Whether the elements are in memory of this process, from which any part of a row is copied."""
    stackable: bool = False
    """Whether a piece may consist of several chunks, one below the other, which one task reads and which are
    copied together."""
    listable: bool = True
    """Whether the store lists what it holds, and replaces an object only if no other process has changed
    it."""


LOCAL = StoreTraits()
"""The traits of local files."""
