"""Opens what C is written to, and the journal of a run that is continued."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .. import __version__
from ..storage.read import addresses
from ..storage.write import consolidated, coordinates, in_memory, opening
from ..storage.write.journal import Journal
from ..storage.write.provenance import Finished
from ..storage.write.publication import Publication
from ..storage.write.target import Target
from ..support.errors import InputChangedError, InputError, RangeError
from ..support.shared import in_thread
from .labels import own_coordinate
from .observer import Notice, Observer
from .prepare import Job
from .request import Request
from .settle import Log


@contextmanager
def continued(request: Request) -> Iterator[Log | None]:
    """Yield the journal of the run that a request continues, locked until the body ends; or C where it is
    finished; or None where no run is continued.

    Raises InputError where C is neither unfinished nor the result of such a request.
    """
    log = opening.continued(request.c, request.beta or 0) if request.resume else None
    try:
        yield log
    finally:
        if isinstance(log, Journal):
            log.close()


@contextmanager
def destination(job: Job, observer: Observer, notice: Notice | None) -> Iterator[tuple[Any, Any]]:
    """Yield the target that C is written to, and the NumPy array if C is one. C becomes an array when the
    body succeeds. notice: called with sentences for the user while C is begun."""
    c, sources = job.request.c, job.sources
    if isinstance(job.log, Finished):
        yield None, None
        # The run that has made C may have been killed before that.
        consolidated.enter(c, consolidated.groups_of(c))
        _write_coordinates(job, observer)
        return
    if c is None:
        array = (np.zeros if job.request.triangle else np.empty)(job.output.shape, job.output.dtype)
        yield in_memory.ArrayTarget(array, job.plan.problem.c, job.operation.leaves), array
        return
    target = _begun(job, notice)
    try:
        if "c" in sources:
            old = sources["c"].snapshot
            target.sink.expect(old.stamps if old else None)
        yield target, None
        if left := target.sink.commit({"version": __version__, **(job.head or {"options": job.options})}):
            observer.note(left)
    except BaseException as error:
        if isinstance(error, InputError | RangeError) and _is_new(job):  # no such C is made of these inputs
            target.sink.discard()
            raise
        target.sink.pause()
        if kept := target.sink.staging.kept():
            error.add_note(kept)
        raise
    _write_coordinates(job, observer)


class Beginning(NamedTuple):
    """A C that may be begun on another thread."""

    begun: Callable[[], bool]
    """Starts to begin C if nothing has, and returns whether `found` need not wait."""
    found: Callable[[], tuple[Any, Any]]
    """Returns what `destination` yields, and waits until C is begun. Raises what prevents that."""


@contextmanager
def beginning(job: Job, observer: Observer) -> Iterator[Beginning]:
    """Yield the C of a job. A new one in a local folder is begun by the first call: the engine makes it when
    readers read the first panels. That happens on a thread of its own, so Ctrl-C leaves no C that is begun in
    part. A store that is far away may not answer, for which nobody could stop waiting then."""
    is_near = addresses.local_path(job.request.c) is not None
    if not (is_near and job.works and _is_new(job)):
        with destination(job, observer, observer.notice) as there:
            yield Beginning(lambda: True, lambda: there)
        return
    notice, said, coming = observer.notice, list[str](), list[Future[tuple[Any, Any]]]()
    whole = destination(job, observer, said.append if notice else None)

    def begun() -> bool:
        if not coming:
            coming.append(in_thread("beginning", whole.__enter__))
        return coming[0].done()

    def found() -> tuple[Any, Any]:
        begun()
        try:
            return coming[0].result()
        finally:  # the user's function is called on the user's thread, also of a C that cannot be begun
            while notice and said:
                notice(said.pop(0))

    try:
        yield Beginning(begun, found)
        found()
    except BaseException as error:
        never = not coming or coming[0].exception()
        if never or not whole.__exit__(type(error), error, error.__traceback__):
            raise
    else:
        whole.__exit__(None, None, None)


def _is_new(job: Job) -> bool:
    """Whether C is neither continued nor updated."""
    return job.log is None and job.operation.beta == 0 and not job.request.fills


def _begun(job: Job, notice: Notice | None) -> Target[Publication]:
    """Mark the stored C as unfinished, and return its target."""
    c, block, log = job.request.c, job.operation.leaves, job.log
    updates = job.operation.beta != 0 or job.request.fills
    if log is None and updates:
        return opening.update_target(c, block, job.head, force=job.request.force)
    if isinstance(log, Journal) and (log.done or updates):
        return opening.continued_target(c, block, log)
    if isinstance(log, Journal):  # nothing was made yet: what is there may be of a run before
        log.close()
    force = job.request.force or log is not None
    return opening.create_target(c, job.output, block, job.head, force, notice=notice)


def _write_coordinates(job: Job, observer: Observer) -> None:
    """Write the coordinates of C's dimensions beside C, where its operands have some."""
    names, a = job.output.dimensions, job.sources.get("a")
    if names is None or a is None or job.operation.beta != 0:
        return
    b = job.sources.get("b") or a.transpose()
    operands = job.request.a.array, job.request.b.array
    old = (a.dims or (None,))[0], (b.dims or (None,))[-1]
    found = [
        coordinates.Wanted(own_coordinate(array, was), was, name, count)
        for array, was, name, count in zip(operands, old, names, job.output.shape, strict=True)
        if was
    ]
    if said := coordinates.write_coordinates(job.request.c, found):
        observer.note(said)


def after_reading(job: Job, target: Any) -> None:
    """Raise StoreError where an input was changed while it was read, and put finished chunks in memory into
    their places. Both take long where there are many chunks, and go on while the last blocks are written.

    target: what `destination` has yielded. If an input was written to, no run can continue this one, even if
    the input is put back: chunks may have been made of what it held in between."""
    if target is None:  # C was finished before
        return
    sink = target.sink if isinstance(target, Target) else None
    for name, source in job.sources.items():
        try:
            if sink is None or name != "c":
                source.check_unchanged()
        except InputChangedError:
            if sink:
                sink.spoil(source.name)
            raise
    if sink and sink.background:
        with contextlib.suppress(OSError):  # which the end meets again
            sink.save()
