"""Where C goes, and the run that is continued."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import __version__
from ..storage.format import unfinished
from ..storage.read import addresses
from ..storage.read.source import Opened
from ..storage.write import consolidated, in_memory, opening, provenance
from ..storage.write.journal import Journal, resume_in_folder
from ..storage.write.provenance import Finished
from ..storage.write.publication import Publication
from ..storage.write.target import Target
from ..support.errors import InputChangedError, InputError
from .observer import Observer
from .prepare import Job
from .request import Request
from .settle import Log


@contextmanager
def continued(request: Request) -> Iterator[Log | None]:
    """The run that a request continues: its journal, which is locked until the body ends, or C where it is
    finished. None where nothing is continued.

    Raises InputError where C is neither unfinished nor the result of such a request.
    """
    if not request.resume:
        yield None
        return
    c, beta = request.c, request.beta
    place, name = addresses.local_path(c), addresses.describe(c)
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
def destination(job: Job, observer: Observer) -> Iterator[tuple[Any, Any]]:
    """Where C goes, and the NumPy array if that is where. C becomes an array when the body succeeds."""
    c, sources = job.request.c, job.sources
    if isinstance(job.log, Finished):
        yield None, None
        # The run that has made C may have been killed before that.
        consolidated.enter(c, consolidated.groups_of(c))
        return
    if c is None:
        array = np.empty(job.output.shape, job.output.dtype)
        yield in_memory.ArrayTarget(array, job.plan.problem.c, job.operation.arithmetic.block), array
        for source in sources.values():
            source.check_unchanged()
        return
    target = _begun(job, observer)
    try:
        if "c" in sources:
            old = sources["c"].snapshot
            target.sink.expect(old.stamps if old else None)
        yield target, None
        for name, source in sources.items():
            if name != "c":
                _check_unchanged(source, target.sink)
        if left := target.sink.commit({"version": __version__, **(job.head or {"options": job.options})}):
            observer.note(left)
    except BaseException as error:
        target.sink.pause()
        if kept := target.sink.staging.kept():
            error.add_note(kept)
        raise


def _begun(job: Job, observer: Observer) -> Target[Publication]:
    """The stored C, marked as unfinished."""
    c, block, log = job.request.c, job.operation.arithmetic.block, job.log
    updates = job.operation.beta != 0 or job.request.fills
    if log is None and updates:
        return opening.update_target(c, block, job.head, fills=job.request.fills, force=job.request.force)
    if isinstance(log, Journal) and (log.done or updates):
        return opening.continued_target(c, block, log)
    if isinstance(log, Journal):  # nothing was made yet: what is there may be of a run before
        log.close()
    force = job.request.force or log is not None
    return opening.create_target(c, job.output, block, job.head, force, notice=observer.notice)


def _check_unchanged(source: Opened, sink: Publication) -> None:
    """Raise StoreError where an input was changed during the run. If it was written to, no run can continue
    this one, even if the input is put back: chunks may have been made of what it held in between."""
    try:
        source.check_unchanged()
    except InputChangedError:
        sink.spoil(source.name)
        raise
