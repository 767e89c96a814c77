"""The command line: the commands of `ooc-gemm`, and how their results are shown."""

import signal
import threading
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """The entry point: `entry.main`, which is imported in here. SIGUSR1, which asks how far a run is, would
    end the process meanwhile."""
    unset = args is None and threading.current_thread() is threading.main_thread()
    unset = unset and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    if unset:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from .entry import main as run

    run(args, unset)
