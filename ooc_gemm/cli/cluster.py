"""The option --scheduler, with which workers of a cluster compute what a command is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ..support.errors import InputError


def one_process(scheduler: str | None, option: str) -> None:
    """Raise UsageError where a scheduler is given with an option that is for one process."""
    if scheduler:
        raise click.UsageError(f"--{option} is for one process; leave out --scheduler.")


@contextmanager
def on_cluster(scheduler: str | None, given: dict[str, Any]) -> Iterator[None]:
    """Have the cluster of a scheduler, if there is one, compute what is computed in this context.

    given: the options of the command. Its memory limit is taken out, because it is the cluster's. Raises
    InputError and DeviceError.
    """
    if not scheduler:
        yield
        return
    try:
        from ..dask import on
    except ImportError as error:
        raise InputError(
            f"--scheduler needs a package that is not installed ({error.name}); "
            "pip install 'ooc-gemm[distributed]'"
        ) from error
    limit, given["memory_limit"] = given["memory_limit"], None
    with on(scheduler, memory_limit=limit, device=given.get("device", "auto")):
        yield
