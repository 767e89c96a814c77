"""Machine code of kernels that comes with the package, so that the first product on a machine compiles
nothing.

One archive for each architecture lies in the folder cubins/ of the package; build.py writes them. A checkout
has none until then. A kernel is found by the text and the options that it was compiled from: one that has
changed since is not found, and is compiled when it is needed, as anything else is that no archive holds.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from zipfile import BadZipFile, ZipFile
from zlib import error as ZlibError

from .compile import source_of
from .config import Config

FOLDER = Path(__file__).resolve().parent.parent / "cubins"
_RUNS_CODE_OF = {"sm_86": "sm_80", "sm_89": "sm_80", "sm_103": "sm_100", "sm_121": "sm_120"}
"""Architecture → the one of the same major version whose machine code it runs, too."""


def precompiled(config: Config, arch: str) -> bytes | None:
    """Return the machine code of a kernel for `arch`, such as "sm_90a", if it came with the package; else
    None."""
    arch = _RUNS_CODE_OF.get(arch, arch)
    archive = _archive(FOLDER / f"{arch}.zip")
    if archive is None:
        return None
    try:
        return archive.read(name_of(config, arch))
    except (KeyError, OSError, BadZipFile, ZlibError):
        return None


@cache
def _archive(path: Path) -> ZipFile | None:
    """Return an archive, which stays open; None if there is none that can be read."""
    try:
        return ZipFile(path)
    except (OSError, BadZipFile):
        return None


def name_of(config: Config, arch: str) -> str:
    """Return the name under which an archive holds a kernel."""
    return hashlib.sha256(json.dumps(source_of(config, arch)).encode()).hexdigest()
