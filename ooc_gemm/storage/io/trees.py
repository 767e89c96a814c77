"""Removes folders of many files."""

import contextlib
import os
import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ...support.intervals import ranges

AT_ONCE = 8
"""Threads that remove files. The system frees the pages of a file while it is removed: 1 ms for 16 MiB in
memory, a quarter of a second for an array of 4 GiB."""
FEW = 2
"""Files that are removed at once, because to start a thread takes longer."""
TOGETHER = 16
"""Most files that a thread removes before it takes others."""


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it, many files at once. Links are removed and not followed. Raises
    OSError."""
    jobs, left = deque[Future[None]](), FEW
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _, _, names, folder in os.fwalk(path):
            if len(names) <= left:
                left -= len(names)
                _remove(os.dup(folder), names)
                continue
            for start, stop in ranges(len(names), TOGETHER):
                while len(jobs) >= 4 * AT_ONCE:  # each has a descriptor
                    jobs.popleft().result()
                jobs.append(pool.submit(_remove, os.dup(folder), names[start:stop]))
    shutil.rmtree(path)


def _remove(folder: int, names: list[str]) -> None:
    """Remove files from an open folder, and close it. `rmtree` says what is the matter with those that
    stay."""
    try:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)
