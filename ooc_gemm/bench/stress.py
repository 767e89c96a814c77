"""The stress test: random products (random_products.py), each computed by a process of its own within a limit
as small as can be. If the system allows it, the limit is enforced (the *wall*). The report is a plain dict,
ready for JSON; tables.py shows it.

The peak is what the kernel says of the process (`ru_maxrss`). A process inherits the peak of the one that
started it, so a small process stands between: it builds the wall, starts the product and waits for it.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..devices import open_device
from ..planning.problem import MiB
from ..run.rates import described
from ..run.verify import verify
from ..support.errors import InputError
from ..support.memory import parse_size
from . import random_products as stress

Row = dict[str, Any]
Say = Callable[[str], None]

COMMAND = [sys.executable, "-W", "ignore", "-m", "ooc_gemm.cli"]
TIMEOUT = 600
"""Seconds after which a case counts as hanging."""
AGREE = 16 * MiB
"""Bytes by which a process's own account of its peak may differ from the kernel's after its end."""
CUDA_ENDS = 96 * MiB
"""The same with CUDA, where the end of the process takes more memory (45 to 63 MB were seen)."""
STACKS = 64 * MiB
"""Bytes for stacks of threads, which an idle process does not have."""

_START = """
import json, os, resource, signal, sys, time
said, start = json.loads(sys.argv[1]), time.monotonic()
child = os.fork()
if child == 0:
    if said["group"]:
        with open(said["group"] + "/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    if said["data"]:
        resource.setrlimit(resource.RLIMIT_DATA, (said["data"], said["data"]))
    os.execvp(said["command"][0], said["command"])
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(said["seconds"])
_, status, used = os.wait4(child, 0)
seconds, peak = time.monotonic() - start, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
took = [os.waitstatus_to_exitcode(status), peak, seconds, used.ru_utime + used.ru_stime]
os.write(said["report"], json.dumps(took).encode())
"""

_IDLE = """
import sys, time
import numpy as np
from ooc_gemm import multiply

class Slow:
    shape, dtype = (2048, 2048), np.dtype(np.float32)
    def __getitem__(self, at):
        time.sleep(0.01)
        return np.ones((2048, 2048), np.float32)[at]

def look(fraction, plan, trace):
    with open("/proc/self/status") as file:
        found = dict(line.split(":") for line in file)
    held.append(sum(sign * int(found[name].split()[0]) for name, sign in (("VmData", 1), ("RssAnon", -1))))

held = []
multiply(Slow(), Slow(), memory_limit="8GiB", device=sys.argv[1], chunks=(256, 256), progress=look)
print(max(held) * 1024)
"""


@dataclass(frozen=True)
class Wall:
    """The means that stops a process which exceeds its limit."""

    kind: str
    """`cgroup`: the kernel kills the process. `RLIMIT_DATA`: the process gets no more private memory. `none`:
    nothing stops it."""
    group: str = ""
    reserve: int = 0
    """Bytes to add to the limit, because RLIMIT_DATA also counts memory that is reserved and never touched:
    stacks and buffers of libraries."""

    def __str__(self) -> str:
        return {
            "cgroup": "the cgroup's memory.max, equal to the limit",
            "RLIMIT_DATA": f"RLIMIT_DATA, the limit and {self.reserve // MiB} MiB reserved but not held",
            "none": "none",
        }[self.kind]


NO_WALL = Wall("none")


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Exit status; negative if a signal ended the process."""
    out: str
    err: str
    peak: int
    """The largest resident set of the process, in bytes."""
    seconds: float
    cpu_seconds: float
    """Seconds of all processors, of the process and the system on its behalf."""

    @property
    def said(self) -> str:
        """The last line that the process wrote to standard error."""
        return (self.err.strip().splitlines() or [f"exit status {self.code}, without a word"])[-1]


def run(
    folder: str = ".",
    device: str = "auto",
    hours: float | None = None,
    cases: int | None = None,
    seed: int | None = None,
    only: int | None = None,
    largest: str | int = "2GiB",
    progress: Say = lambda text: None,
) -> dict[str, Any]:
    """Run cases and return the report, with a row for each. It ends after so many `cases` or `hours` (three
    minutes if neither is given), or when it is interrupted. `only`: run the case of this number alone. Raises
    InputError."""
    place, chosen, nbytes = Path(folder), open_device(device), parse_size(largest)
    if shutil.disk_usage(place).free < 2 * nbytes:
        raise InputError(f"{folder} has no room for twice {largest}; name another, or less (--largest)")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    start, seconds = time.monotonic(), 3600 * (0.05 if hours is None and cases is None else hours or 1e9)
    rows: list[Row] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="ooc-gemm-", dir=place) as scratch, wall(chosen.name) as built:
        for number in itertools.count() if only is None else (only,):
            if len(rows) == cases or time.monotonic() - start > seconds:
                break
            case = stress.draw(seed, number, nbytes)
            progress(f"case {number}: {case.what} {case.m}×{case.n}×{case.k}, {_told(rows)}")
            try:
                rows.append(_case(case, Path(scratch) / str(number), chosen.name, built))
            except KeyboardInterrupt:
                interrupted = True
                break
    return {
        "suite": "stress",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "largest": nbytes,
        "device": chosen.model,
        "place": described(place),
        "wall": str(built),
        "seconds": time.monotonic() - start,
        "interrupted": interrupted,
        "rows": rows,
    }


def _told(rows: list[Row]) -> str:
    bad = sum(bool(row["failed"]) for row in rows)
    return f"{len(rows)} done, {bad} bad" if bad else f"{len(rows)} done, all well"


def _case(case: stress.Case, place: Path, device: str, built: Wall) -> Row:
    """Run one case: write the arrays, find the smallest limits, multiply within the drawn limits, and
    judge."""
    place.mkdir()
    row: Row = {
        "case": case.number,
        "what": case.what,
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "types": case.types,
        **case.stored,
        "values": "normal" if case.normal else "integers",
        "data_bytes": case.data_bytes,
    }
    try:
        stress.store(case, place)
        command = [*COMMAND, *case.arguments(place), f"--device={device}", "--json", "--no-progress"]
        if device != "cpu":
            least = _least(command, "--memory-limit=64GiB", "--device-memory-limit=1")
            row["device_minimum"], row["device_limit"] = least, case.limit(least, device=True)
            command.append(f"--device-memory-limit={row['device_limit']}")
        row["minimum"] = _least(command, "--memory-limit=1")
        row["limit"] = case.limit(row["minimum"])
        if not case.beta and (place / "c").exists():
            raise ValueError("a refused product left something at C's place")
        ended = launch([*command, f"--memory-limit={row['limit']}"], built, row["limit"])
        row.update(seconds=ended.seconds, code=ended.code, **_figures(ended))
        complaints = list(judge(ended, row["limit"], row.get("device_limit")))
        row["over"] = any("passed" in one for one in complaints)
        if not ended.code:
            row["wrong"] = stress.check(case, place) or _verified(case, place)
            complaints += [row["wrong"]] if row["wrong"] else []
    except Exception as error:
        complaints = [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return {**row, "failed": "; ".join(complaints) or None}


def _least(command: list[str], *limits: str) -> int:
    """Return the smallest sufficient limit, which the refusal of a smaller one names."""
    ended = launch([*command, *limits])
    found = re.search(r"the smallest that would do is (\d+) bytes", ended.err)
    if ended.code != 2 or not found:
        raise ValueError(f"{' '.join(limits)} was not refused as too small: {ended.said}")
    return int(found[1])


def _figures(ended: Ended) -> Row:
    """Return the figures of a run that the report shows."""
    if ended.code:
        return {"peak": ended.peak}
    result = json.loads(ended.out)
    ledger = {**result["plan"]["ledger"], **result["plan"]["device_ledger"]}
    data = sum(size for name, size in ledger.items() if name not in ("baseline", "workspace"))
    return {
        "peak": max(ended.peak, result["peak_host_bytes"]),
        "peak_reported": result["peak_host_bytes"],
        "device_peak": result["peak_device_bytes"],
        "kernel": result["kernel"],
        "blocks": result["blocks"],
        "buffer_bytes": data,
        "ledger": result["plan"]["ledger"],
        "device_ledger": result["plan"]["device_ledger"],
    }


def judge(ended: Ended, limit: int, device_limit: int | None = None) -> Iterator[str]:
    """Yield a sentence for each fault of a run, apart from a wrong result."""
    if ended.peak > limit:
        yield f"it passed its limit by {ended.peak - limit:,} bytes"
    if ended.code:
        yield ended.said if ended.code > 0 else f"killed by signal {-ended.code}"
        return
    result = json.loads(ended.out)
    said, on_device = result["peak_host_bytes"], result["peak_device_bytes"]
    if said > limit >= ended.peak:
        yield f"it says that it passed its limit by {said - limit:,} bytes"
    if abs(said - ended.peak) > (AGREE if device_limit is None else CUDA_ENDS):
        yield f"it says that its peak was {said:,} bytes, and the kernel says {ended.peak:,}"
    if device_limit is not None and on_device > device_limit:
        yield f"it passed its device limit by {on_device - device_limit:,} bytes"


def _verified(case: stress.Case, place: Path) -> str | None:
    """Return what `verify` finds wrong, or None. Products that it cannot check are skipped."""
    if case.alpha != 1 or case.beta:
        return None
    ops: dict[str, Any] = {"transpose_a": case.op_a == "T", "adjoint_a": case.op_a == "C"}
    ops |= {"transpose_b": case.op_b == "T", "adjoint_b": case.op_b == "C"}
    a, b, c = (str(place / name) for name in ("a", "b" if case.b else "a", "c"))
    found = verify(a, b, c, seed=case.number, **ops)
    return None if found.ok else f"verify finds {found.rows_wrong} rows wrong, and NumPy does not"


# ------------------------------------------------------------------------------------------------ processes


def launch(
    command: list[str],
    built: Wall = NO_WALL,
    limit: int = 0,
    folder: Path | None = None,
    timeout: int | None = None,
) -> Ended:
    """Run a command behind a wall at `limit`, and wait for it. `folder`: where it runs, by default here.
    `timeout`: seconds after which it is killed, by default `TIMEOUT`."""
    if built.group:
        Path(built.group, "memory.max").write_text(str(limit))
    report, told = os.pipe()
    said = {
        "command": command,
        "group": built.group,
        "data": limit + built.reserve if built.kind == "RLIMIT_DATA" else 0,
        "seconds": timeout or TIMEOUT,
        "report": told,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _START, json.dumps(said)],
            cwd=folder,
            capture_output=True,
            text=True,
            pass_fds=[told],
        )
    finally:
        os.close(told)
        with os.fdopen(report) as file:
            heard = file.read()
    code, peak, seconds, cpu_seconds = json.loads(heard)
    return Ended(code, done.stdout, done.stderr, peak, seconds, cpu_seconds)


@contextlib.contextmanager
def wall(device: str) -> Iterator[Wall]:
    """Build the hardest wall that this system allows, and remove it at the end."""
    group = own_group()
    if group is not None:
        try:
            yield Wall("cgroup", str(group))
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    if sys.platform != "linux":
        yield NO_WALL
        return
    idle = launch([sys.executable, "-W", "ignore", "-c", _IDLE, device])
    yield NO_WALL if idle.code else Wall("RLIMIT_DATA", reserve=int(idle.out) + STACKS)


def own_group(root: Path = Path("/sys/fs/cgroup"), listed: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Make a control group (v2) that limits memory, in the nearest one above this process that allows it.
    Returns None if there is none."""
    try:
        paths = [line[3:] for line in listed.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return None
    for path in paths:
        here = Path(os.path.normpath(f"{root}/{path}"))
        for folder in (here, *here.parents):
            group = folder / f"ooc-gemm-{os.getpid()}"
            try:
                if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
                    continue
                group.mkdir()
            except OSError:
                continue
            if os.access(group / "memory.max", os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK):
                with contextlib.suppress(OSError):
                    (group / "memory.swap.max").write_text("0")
                return group
            with contextlib.suppress(OSError):
                group.rmdir()
    return None
