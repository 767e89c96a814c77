"""The folder in which compiled kernels, tunings and measured rates are kept between runs.

Compiled kernels are code that runs in this process, and rates decide about plans. So files are read only from
a folder that belongs to the user of this process and that nobody else may write to, and only files of
which the same holds. A folder that fails this test is left as it is, and nothing in it is used.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""Access control lists show in these bits, too: their mask takes the place of the group's rights."""


def folder() -> Path:
    """Return the cache folder: $OOC_GEMM_CACHE, else ooc-gemm/kernels in the user's cache folder."""
    own = os.environ.get("OOC_GEMM_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ooc-gemm" / "kernels"


def read(name: str) -> bytes | None:
    """Return the contents of the file `name` of the folder; None if it is missing or cannot be trusted."""
    try:
        with _opened(folder()) as there:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=there)
            with open(file, "rb") as found:
                about = os.fstat(file)
                if stat.S_ISREG(about.st_mode) and not _why_distrusted(about):
                    return found.read()
    except OSError:
        pass
    return None


def write(name: str, data: bytes) -> None:
    """Store `data` as the file `name`. The file gets its name when it is complete, so that other processes
    see the old file or the new one. Creates the folder, for this user alone, if it is missing. Raises
    OSError."""
    path = folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(path) as there:
        temporary = f"{name}.{os.urandom(8).hex()}.tmp"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=there)
        try:
            with open(file, "wb") as new:
                new.write(data)
            os.replace(temporary, name, src_dir_fd=there, dst_dir_fd=there)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=there)
            raise


def distrusted(path: Path | None = None) -> str:
    """Say in one sentence why nothing is read from a folder (by default the cache folder); "" if it can be
    trusted or does not exist yet."""
    path = path or folder()
    try:
        with _opened(path):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"the cache folder {path} is not used: {error.strerror or error}"


def guard_cupy() -> None:
    """Tell CuPy to keep its kernels in memory if its own cache folder cannot be trusted. Call this before
    CuPy compiles anything: it loads what it finds in $CUPY_CACHE_DIR, else ~/.cupy/kernel_cache."""
    if distrusted(Path(os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache")))):
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a folder and yield its descriptor. Files are opened relative to the descriptor, so the folder that
    was checked is the one that is read, even if it is renamed. Raises OSError; PermissionError if others may
    write to it."""
    there = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if why := _why_distrusted(os.fstat(there)):
            raise PermissionError(0, why)
        yield there
    finally:
        os.close(there)


def _why_distrusted(about: os.stat_result) -> str:
    """Say why somebody else could have written a file or folder; "" if only this user could."""
    if about.st_uid != os.geteuid():
        return f"it belongs to user {about.st_uid}, and this process to user {os.geteuid()}"
    if about.st_mode & _OTHERS_WRITE:
        return "others may write to it; take that right away with chmod go-w, and empty the folder"
    return ""
