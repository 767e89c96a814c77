"""Puts objects once: chunks of an updated C (β·C), and the files of results that are made by rows.

Such a store cannot rename, so a chunk goes to its place at once. It is put only where the old chunk still is
(If-Match), and with a mark that names the run and the old chunk's stamp. Data and mark come in one step:

    chunk as it was ──► one put ──► new chunk, with the mark: from here on it is done

So the object itself says whether it is done. The journal says it again, because lists do not show marks.
A file that replaces none is put only where nothing is (If-None-Match).
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

from ..format.chunks import Chunks
from ..io.objects import Objects
from ..io.requests import FEWEST_REQUESTS, OPENER
from ..io.stamps import Stamp
from ..read.addresses import objects_at
from ..read.metadata import explained
from .journal import Chunk, Journal

TRIES = 3
"""How often a chunk is looked at and put. A store may refuse a put because of another one that it refused,
too."""
BATCH = 1024
"""Keys that are handed to the threads that look at them, at a time."""


class Marks:
    """The marks of one run, which the runs that continue it share."""

    def __init__(self, objects: Objects, run: str):
        """objects: those at C's address. run: a text that no other run has."""
        self._objects, self._run = objects, run

    def put(self, key: str, data: Any, was: Stamp) -> Stamp | None:
        """Replace the chunk with this stamp, and return the new stamp. A chunk that this run has put already,
        by a request whose answer was lost or in a process that counts as dead, stays. Returns None where
        there is another chunk than that. Raises what the store raises."""
        mark, left = f"{self._run} {was[0]} {was[1]}", TRIES
        missing: tuple[Stamp, Any, str] = (0, 0), "create", ""
        while True:
            first = left == TRIES and was == (0, 0)  # the store itself says whether something is there
            now, version, found = missing if first else self._objects.marked(key)
            if found == mark:
                return now
            if now != was:
                return None
            try:
                return self._objects.put_marked(key, data, version, mark)
            except Exception as error:
                left -= 1
                if not self._objects.changed(error):
                    raise
                if not left:
                    if version != "create":
                        raise
                    # SeaweedFS takes a folder, which objects that were removed have left, for an object.
                    return self._objects.put_marked(key, data, "overwrite", mark)

    def look(self, key: str) -> tuple[Stamp, Stamp] | None:
        """Return the stamps of a chunk that this run has put, and of the chunk before it; None for any other
        chunk. Raises what the store raises."""
        now, _, found = self._objects.marked(key)
        run, *was = found.split(" ")
        if run != self._run or len(was) != 2 or not all(part.isdecimal() for part in was):
            return None
        return now, (int(was[0]), int(was[1]))

    def look_at_all(self, keys: Sequence[str]) -> Iterator[tuple[str, tuple[Stamp, Stamp] | None]]:
        """Yield each key with what `look` returns, from several requests at a time. Raises what the store
        raises."""
        with ThreadPoolExecutor(2 * FEWEST_REQUESTS, OPENER) as pool:
            for at in range(0, len(keys), BATCH):
                some = keys[at : at + BATCH]
                yield from zip(some, pool.map(self.look, some), strict=True)


def find_done(name: str, array: Any, log: Journal, grid: Chunk) -> None:
    """Add to a journal the chunks of an updated C that the run has put without noting them, because it was
    killed before it put the journal. Nothing is done for a C in a folder.

    name: how messages call C. array: C. log: the journal of the run that is continued. grid: number of chunks
    down and across; one request is sent for each that the journal does not have. Raises InputError.
    """
    objects = objects_at(array)
    if objects is None:
        return
    marks, chunks = Marks(objects, log.run), Chunks(objects, array.metadata)
    every = product(range(grid[0]), range(grid[1]))
    left = {chunks.key(*chunk): chunk for chunk in every if chunk not in log.done}
    with explained(name, remote=True):
        for key, stamps in marks.look_at_all([*left]):
            if stamps is not None:
                log.add(left[key], *stamps)
