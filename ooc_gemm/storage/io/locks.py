"""Keeps all processes but one from working on a C in a folder. The lock is `flock` on the journal, which the
system releases when the process ends, however it ends. Some network file systems have no `flock`. There a
file names the owner: its host, the start of its system, its process. Whether that process still runs can be
told on its own host only; on other hosts it counts as running."""

import contextlib
import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from ...support.errors import InputError
from . import durable, files

OWNER = "ooc-gemm.owner"


def hold(file: BinaryIO, folder: Path, name: str) -> Path | None:
    """Lock an open journal in a folder for this process. Returns the owner file for `release` where the file
    system has no locks. `name`: how messages call C. Raises InputError where another process holds the lock,
    and OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{name} is being written by another process; wait for it, or stop it") from None
    except OSError:
        return _own(folder / OWNER, name)
    return None


def release(owner: Path | None) -> None:
    """Release the lock of `hold` after the journal is closed."""
    if owner is not None and (known := _read(owner)) is not None and known == _me():
        owner.unlink(missing_ok=True)


def is_held(file: BinaryIO, folder: Path) -> bool:
    """Whether a process works on the C in a folder, whose journal is open. Raises OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        known = _read(folder / OWNER)
        return known is not None and not _is_gone(known)
    return False


def _own(path: Path, name: str) -> Path:
    """Write the owner file, if no other process owns C. Raises InputError and OSError."""
    me = _me()
    for _ in range(100):
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | files.NOFOLLOW, 0o666)
        except FileExistsError:
            known = _read(path)
            if known is None:
                continue  # it has just been removed
            if not _is_gone(known):
                who = f"process {known['pid']} on {known['host']}" if known else "a process that is starting"
                raise InputError(
                    f"{name} is being written by {who}; wait for it, or, where it does not run any more, "
                    f"remove {path}"
                ) from None
            # Another process may find the same. Only one can move the file, and it sees what it has moved.
            aside = path.with_name(f"{path.name}.{uuid4().hex}")
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, aside)
                if _read(aside) != known:
                    os.rename(aside, path)
                else:
                    os.unlink(aside)
            continue
        try:
            durable.write_all(file, json.dumps(me).encode())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return path
    raise OSError(errno.EEXIST, f"{OWNER} cannot be read or replaced")


def _read(path: Path) -> dict[str, Any] | None:
    """Return the contents of an owner file; {} where it is incomplete, None where there is none. Raises
    OSError."""
    text = files.read_small(path, 4096)
    if text is None:
        return None
    try:
        found = json.loads(text)
        return {key: found[key] for key in ("host", "boot", "processes", "pid", "began")}
    except (ValueError, LookupError, TypeError):
        return {}


def _me() -> dict[str, Any]:
    """Return what identifies this process: host, start of the system, process number and its namespace."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "processes": _processes(),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
    }


def _is_gone(known: dict[str, Any]) -> bool:
    """Whether a process has certainly ended."""
    if not known or known["host"] != socket.gethostname():
        return False
    if known["boot"] != boot_id():
        return bool(known["boot"])
    return bool(known["processes"] == _processes() and known["began"] != _began(known["pid"]))


def _processes() -> str:
    """Return the namespace of process numbers, because containers have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _began(pid: int) -> str | None:
    """Return when a process began; None where there is no such process."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, TypeError, IndexError):
        pass
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, TypeError):
        return None
    except OSError:
        pass
    return ""


def boot_id() -> str:
    """Return the identifier of this start of the system; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
