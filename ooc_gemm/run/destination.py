"""Where C goes, and the journal of the run that is continued."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import __version__
from ..storage.format import unfinished
from ..storage.read import store
from ..storage.write import consolidated, in_memory, opening, provenance
from ..storage.write.journal import Journal, resume_in_folder
from ..storage.write.provenance import Finished
from ..support.errors import InputError
from .prepare import Job


@contextmanager
def journal_of(c: Any, beta: complex | None, resume: bool) -> Iterator[Journal | Finished | None]:
    """The journal of the run that is to be continued, if there is one to be continued; or C, where it is
    finished. `beta`: None where it is not given."""
    if not resume:
        yield None
        return
    place, name = store.local_path(c) if c is not None else None, store.describe(c)
    if c is None:
        raise InputError("only a C that is stored can be continued; leave out resume=True")
    if place is None:
        yield opening.continued(c, beta or 0)
        return
    if not (unfinished.is_partial(place) or (place / unfinished.JOURNAL).exists()):
        done = provenance.finished(c)
        if done is None and (beta or any((place / key).exists() for key in unfinished.METADATA)):
            raise InputError(
                f"{name} is not the unfinished result of an interrupted run; leave out resume=True"
            )
        yield done
        return
    log = resume_in_folder(place, name)
    # Killed before it began: C is what it was, or not there.
    if not log.head or not (log.done or unfinished.is_partial(place)):
        log.close()
        yield None
        return
    try:
        yield log
    finally:
        log.close()


@contextmanager
def opened_target(
    c: Any, job: Job, log: Journal | Finished | None, notice: Callable[[str], None] | None
) -> Iterator[tuple[Any, Any]]:
    """Where C goes, and the NumPy array if that is where. C becomes an array when the body succeeds."""
    block = job.operation.arithmetic.block
    if isinstance(log, Finished):
        yield None, None
        consolidated.enter(
            c, consolidated.groups_of(c)
        )  # the run that has made C may have been killed before that
        return
    if c is None:
        array = np.empty(job.output.shape, job.output.dtype)
        yield in_memory.ArrayTarget(array, job.plan.problem.c, block), array
        for source in job.sources.values():
            source.check_unchanged()
        return
    reads = job.operation.beta != 0
    if log and not (
        log.done or reads or job.fills
    ):  # nothing was made yet: what is there may be of a run before
        log.close()
        target = opening.create_target(c, job.output, block, job.head, force=True, notice=notice)
    elif log:
        target = opening.continued_target(c, block, log)
    elif reads or job.fills:
        target = opening.update_target(c, block, job.head, fills=job.fills, force=job.force)
    else:
        target = opening.create_target(c, job.output, block, job.head, job.force, notice=notice)
    try:
        if "c" in job.sources:
            target.sink.expect(job.sources["c"].stamps)
        yield target, None
        for name, source in job.sources.items():
            if name != "c":
                source.check_unchanged()
        left = target.sink.commit({"version": __version__, **(job.head or {"options": job.options})})
        if left and notice:
            notice(left)
    except BaseException as error:
        target.sink.pause()
        if kept := target.sink.staging.kept():
            error.add_note(kept)
        raise
