"""Short parts of local files, one after the other, through the page cache."""

import os
from collections.abc import Generator, Sequence

from ...support.buffers import Bytes
from .background import Job


def parts(jobs: Sequence[Job | None], into: Bytes, alone: bool) -> Generator[Bytes | None, None, None]:
    """Yield one part of a file after the other, which lies at the front of `into` until the next one is asked
    for. It is None for a job that is None, and where the part cannot be read or is not as long as it should
    be: `ChunkFile` says what the matter is. `alone`: whether each part is all that its file holds. Whoever
    calls this closes the generator."""
    data, opened, fd = into.data, "", -1
    try:
        for job in jobs:
            if job is None:
                yield None
                continue
            path, offset, nbytes, *_ = job
            try:
                if path != opened:
                    if fd >= 0:
                        os.close(fd)
                        fd, opened = -1, ""
                    fd, opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK), path
                got = os.preadv(fd, [data[: nbytes + alone]], offset)
            except OSError:
                got = -1
            yield into[:nbytes] if got == nbytes else None
    finally:
        if fd >= 0:
            os.close(fd)
