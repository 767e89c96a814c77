"""The entry point: runs a command, shows its error, and sets the exit status."""

import _thread
import atexit
import gc
import logging
import os
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from typing import Any

import click

from ..support.errors import (
    NO_MEMORY,
    BudgetError,
    Error,
    InputError,
    StoppedError,
    VerificationError,
    no_memory,
)
from ..support.redact import redacted
from . import arrays, bench, components, covariance, genetics, info, neighbours, products, regression  # noqa: F401
from .group import cli
from .log import end as log_end
from .log import print_status
from .show import complain, note, spelled


def main(args: Sequence[str] | None = None, ignored: bool = False) -> None:
    """The entry point; `args` are those of the process unless given. `ignored`: SIGUSR1 is ignored only until
    now. Exit status: 0 done, 1 failed while running, 2 bad input, 3 verification failed, 130 interrupted, 143
    terminated."""
    whole = args is None
    if args is None:
        args = sys.argv[1:]
        # Imports make nothing but what stays: looking for garbage meanwhile takes 0.1 s.
        gc.set_threshold(100_000)
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by whoever started this
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    verbose = "-v" in args or "--verbose" in args or os.environ.get("OOC_GEMM_VERBOSE", "0") != "0"
    if not (verbose or sys.warnoptions):
        warnings.simplefilter("ignore")  # warnings of libraries are of no use to users
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # nor are its messages on zarr's tasks
    try:
        with _signals(whole, ignored):
            _main(args, verbose)
    except SystemExit as end:
        log_end(int(end.code or 0))
        _leave(end.code, whole)
        raise


class _Terminated(BaseException):
    """Raised in the main thread when SIGTERM arrives, so that the run stops and removes its files."""


@contextmanager
def _signals(whole: bool, ignored: bool) -> Iterator[None]:
    """Let SIGTERM stop a run as Ctrl-C does, and SIGUSR1 print how far it is. While a run stops, which takes
    seconds, signals that stop it have no effect: it waits for its threads and removes its files. Signals that
    the process was started to ignore are still ignored. whole: the process does nothing after that. ignored:
    SIGUSR1 is ignored only until now."""
    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True
        error = sys.exc_info()[1]
        while error and not isinstance(error, KeyboardInterrupt | _Terminated):
            error = error.__context__
        if error is None:
            raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    def tell(number: int, frame: Any) -> None:
        # On a thread of its own, because this one may be printing something just now.
        _thread.start_new_thread(print_status, ())

    before = {}
    if threading.current_thread() is threading.main_thread():
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        before = {one: handler for one, handler in usual.items() if signal.getsignal(one) == handler}
    for one in before:
        signal.signal(one, stop)
    tells = ignored or (bool(before) and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)
    if tells:
        signal.signal(signal.SIGUSR1, tell)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_IGN if stopped else handler)
        if tells:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN if whole else signal.SIG_DFL)


def _leave(code: Any, whole: bool) -> None:
    """End the process at once where it did nothing but run a command (`whole`), whose memory the system frees
    faster than Python does, and where a thread hangs in a store that never answers, because Python would wait
    for it. Files are removed by then, and no thread works on them."""
    answers = sys.modules.get("ooc_gemm.storage.io.answers")
    hangs = answers is not None and answers.abandoned.is_set()
    if hangs or (
        whole and not (sys.gettrace() or sys.getprofile())
    ):  # those write what they found at the end
        if not hangs:
            atexit._run_exitfuncs()
        with suppress(OSError):  # nobody reads it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


ADDRESS_SPACE, FOR_EACH_CORE = 1 << 30, 64 << 20
"""Bytes of address space that libraries, and their threads, need to start (with 2 cores, 0.8 GiB is too
little, 1.2 GiB is enough)."""


def _check_address_space() -> None:
    """Refuse where a limit on address space (`ulimit -v`) would make NumPy's BLAS end the process while it is
    imported. Raises InputError."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    least = ADDRESS_SPACE + FOR_EACH_CORE * len(os.sched_getaffinity(0))
    if "numpy" not in sys.modules and limit != resource.RLIM_INFINITY and limit < least:
        raise InputError(
            f"the address space of this process is limited to {limit >> 20} MiB, and its libraries need "
            f"{least >> 20}; raise that limit (ulimit -v), and limit memory with memory_limit instead"
        )


def _main(args: Sequence[str], verbose: bool) -> None:
    """Run a command, and end the process with a message and an exit status."""
    try:
        _check_address_space()
        code = cli.main(args, prog_name="ooc-gemm", standalone_mode=False, obj=list(args)) or 0
        click.echo(nl=False)  # writes what is still in a buffer
        sys.exit(code)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        said = StringIO()
        error.show(said)
        complain(redacted(said.getvalue()))  # it quotes arguments
        log_end(error.exit_code, error.format_message())
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort, _Terminated) as error:
        what, code = ("Terminated", 143) if isinstance(error, _Terminated) else ("Interrupted", 130)
        log_end(code, what)
        logging.disable()  # of asyncio, which tells of every task that is dropped
        _notes(error)
        complain(f"{what}: {_left_by(args)}")
        sys.exit(code)
    except BrokenPipeError:
        _forget_output()
        sys.exit(1)
    except Exception as error:
        if verbose:
            click.echo(redacted(traceback.format_exc()), err=True)
        _notes(error)
        text = f"{type(error).__name__}: {error} (-v shows where)"
        if isinstance(error, Error):
            text = spelled(str(error))
        elif no_memory(error):
            text = spelled(NO_MEMORY)
        elif isinstance(error, OSError) and _while_printing(error):
            _forget_output()
            text = f"standard output cannot be written ({error.strerror}); send it to another place"
        complain(f"{'Stopped' if isinstance(error, StoppedError) else 'Error'}: {redacted(text)}")
        codes = (InputError, 2), (BudgetError, 2), (VerificationError, 3), (StoppedError, 143), (Exception, 1)
        code = next(code for kind, code in codes if isinstance(error, kind))
        log_end(code, text)
        sys.exit(code)


def _while_printing(error: BaseException) -> bool:
    """Whether an error comes from the libraries that print results."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "").partition(".")[0] in ("click", "rich")


def _forget_output() -> None:
    """Drop what was printed and cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _left_by(args: Sequence[str]) -> str:
    """Say what a command that was stopped leaves behind, and how to go on."""
    command = next((cli.commands[word] for word in args if word in cli.commands), None)
    if command is not None and any("--resume" in option.opts for option in command.params):
        return "an output that was begun stays unfinished; run again with --resume to go on"
    return "nothing was finished; run the command again to start over"


def _notes(error: BaseException) -> None:
    """Show the notes that were added to an error or to its causes, which say what files it has left."""
    found: BaseException | None = error
    while found is not None:
        for text in getattr(found, "__notes__", ()):
            note(redacted(text))
        found = found.__cause__
