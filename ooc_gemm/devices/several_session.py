"""A run on several devices: a block of C is cut into bands of rows, one for each.

                    op(B) panel, on every device: uploaded to one of them, the others take it from there
                       ┌──────────────┐
                       └──────────────┘
    op(A) panel  ┌─┐   ┌──────────────┐ device 0       a chunk is read, pinned and uploaded once; only where a
    in bands     ├─┤   ├──────────────┤ device 1       device cannot reach into another's memory is op(B)
                 ├─┤   ├──────────────┤ device 2       uploaded to it, too
                 └─┘   └──────────────┘ device 3

Each device sees a smaller block, and knows nothing of the others but where to copy panels from. A kernel may
overwrite the panel that it multiplies, so no compute stream goes on before all devices have copied what they
need from it (`record` and `wait` concern all).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..engine.check import Verdict
from ..engine.ports import (
    COMPUTE,
    UPLOAD,
    Array,
    Check,
    Lost,
    Member,
    MemberSession,
    Operation,
)
from ..engine.ring import Event
from ..planning.plan import Plan
from ..planning.schedule import Block, Part, Piece
from ..support.buffers import Bytes
from ..support.intervals import band_of, band_rows, bands
from ..support.onward import Inward, Onward
from ..support.trace import PASS, Trace

_Place = tuple[tuple[int, int], tuple[int, ...]]
"""First row and column in a panel, and the number of rows and columns."""


class _All(NamedTuple):
    """An event that completes when the events of all devices have."""

    events: tuple[Event, ...]

    @property
    def done(self) -> bool:
        return all(event.done for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class _Checks(NamedTuple):
    """The checks of the bands of a block, with the first row of each band."""

    bands: tuple[tuple[int, Check], ...]

    def verdict(self) -> Verdict:
        found = [(row, check.verdict()) for row, check in self.bands]
        wrong = [row + verdict.row for row, verdict in found if verdict.row is not None]
        return Verdict(max((verdict.worst for _, verdict in found), default=0.0), min(wrong, default=None))


class SeveralSession:
    """A run on several devices: a session for each of them."""

    def __init__(
        self, devices: list[Member], weights: tuple[int, ...], plan: Plan, operation: Operation, trace: Trace
    ):
        """Opens a session on each device for blocks as high as its highest band."""
        self._op, self._weights, self._passes = operation, weights, plan.budget.linked
        self._arrived: dict[tuple[int, int, tuple[int, int]], list[_Place]] = {}
        plans = [replace(plan, bm=band_rows(plan.bm, weights, index)) for index in range(len(devices))]
        other = replace(operation, standardizer=operation.standardizer and operation.standardizer.beside())
        operations = [operation, *[other] * (len(devices) - 1)]
        with ThreadPoolExecutor(len(devices)) as pool:
            opening = [
                pool.submit(device.open, one, work, trace)
                for device, one, work in zip(devices, plans, operations, strict=True)
            ]
        self.sessions = [each.result() for each in opening if each.exception() is None]
        if len(self.sessions) < len(devices):
            with suppress(Exception):  # the first error is the one that counts
                self.close()
        for each in opening:
            each.result()
        for session in self.sessions:
            session.share()

    def host_buffers(self, count: int, nbytes: int) -> list[Bytes]:
        """Delegates to the first device: memory that is pinned for one device is pinned for all."""
        return self.sessions[0].host_buffers(count, nbytes)

    def prepare(self, buffer: Bytes, used: int | None = None) -> None:
        """Delegates to the first session."""
        self.sessions[0].prepare(buffer, used)

    def prepared(self, buffer: Bytes) -> bool:
        """Delegates to the first session."""
        return self.sessions[0].prepared(buffer)

    def release(self, buffers: list[Bytes]) -> None:
        """Delegates to the first session."""
        self.sessions[0].release(buffers)

    def upload(self, source: Array, piece: Piece, buffer: int) -> Event:
        """Uploads each row of op(A) and of C to the device whose band contains it. Of op(B) each device gets
        a share of the columns, which the others copy from it when the panel is complete (`record`). On the
        diagonal bands of op(A) are copied from op(B)."""
        events: list[Event] = []
        if piece.operand != "b" and not piece.both:
            axis = int(piece.operand == "a" and self._op.transpose_a)
            at = piece.into[axis]
            for session, rows in self._bands(piece.panel[axis]):
                if rows[0] < at + source.shape[axis] and at < rows[1]:
                    events.append(session.upload(*_cut(source, piece, axis, rows), buffer))
        else:
            piece = piece._replace(operand="b")
            if self._passes:
                index = self._holder(piece)
                events.append(self.sessions[index].upload(source, piece, buffer))
                self._arrived.setdefault((index, buffer, piece.panel), []).append((piece.into, source.shape))
            else:
                events += [session.upload(source, piece, buffer) for session in self.sessions]
        return events[0] if len(events) == 1 else _All(tuple(events))

    def onward(self, piece: Piece, dtype: np.dtype[Any], buffer: int) -> Onward | None:
        """Returns the place of a piece that one device needs, or that it passes on to the others."""
        if piece.operand != "b" and not piece.both:
            axis = int(piece.operand == "a" and self._op.transpose_a)
            size = piece.shape[axis]
            for session, rows in self._bands(piece.panel[axis]):
                if rows[0] <= piece.into[axis] and piece.into[axis] + size <= rows[1]:
                    return session.onward(_within(piece, axis, rows, size), dtype, buffer)
            return None
        if not self._passes:
            return None
        index = self._holder(piece)
        found = self.sessions[index].onward(piece._replace(operand="b"), dtype, buffer)
        if found:
            sent = found.sent

            def arrives() -> Any:
                place = piece.into, piece.shape
                self._arrived.setdefault((index, buffer, piece.panel), []).append(place)
                return sent()

            found.sent = arrives
        return found

    def _holder(self, piece: Piece) -> int:
        """Return the number of the device to which a piece of op(B) is uploaded."""
        axis = int(not self._op.transpose_b)
        return band_of(piece.into[axis], piece.panel[axis], (1,) * len(self.sessions))[0]

    def _pass_on(self, pair: tuple[int, int] | None) -> tuple[Event, ...]:
        """Copies panels of op(B) that are complete, all or the one of a pair, from each device that has a
        share to all others. Returns an event for each device that completes when its panels are complete."""
        uploaded = [session.record(UPLOAD, pair) for session in self.sessions]
        arrived = {
            key: places for key, places in list(self._arrived.items()) if pair is None or key[1] == pair[1]
        }
        if not arrived:
            return tuple(uploaded)
        for session, own in zip(self.sessions, uploaded, strict=True):  # its panel is free, and has its share
            session.wait(PASS, own)
        for (index, buffer, panel), places in arrived.items():
            rows, cols = (
                (
                    min(into[axis] for into, _ in places),
                    max(into[axis] + shape[axis] for into, shape in places),
                )
                for axis in (0, 1)
            )
            first = self.sessions[index]
            for session in self.sessions:
                if session is not first:
                    session.take(first, panel, rows, cols, buffer, uploaded[index])
            del self._arrived[index, buffer, panel]
        return tuple(session.record(PASS) for session in self.sessions)

    def multiply(
        self, block: Block, panel: tuple[int, int], pair: tuple[int, int], c: int, first: bool
    ) -> None:
        """Multiplies every band. A band that meets the diagonal is multiplied whole."""
        for session, band in self._blocks(block):
            session.multiply(band, panel, pair, c, first)

    def mirror(self, block: Block, c: int, col: int = 0) -> None:
        """Mirrors the square of each band that meets the diagonal. `download` takes the rest of what lies
        above the diagonal from the bands below it."""
        for session, band in self._blocks(block):
            session.mirror(band, c, band.row - block.row)

    def scale(self, block: Block, c: int) -> None:
        """Scales every band on its session."""
        for session, band in self._blocks(block):
            session.scale(band, c)

    def check(self, block: Block, c: int) -> Check:
        """Checks every band on its session."""
        return _Checks(
            tuple((band.row - block.row, session.check(band, c)) for session, band in self._blocks(block))
        )

    def finish(self, block: Block, c: int) -> None:
        """Finishes every band on its session."""
        for session, band in self._blocks(block):
            session.finish(band, c)

    def download(self, block: Block, part: Part, c: int, target: Array) -> Event:
        """Downloads each share of the part from the device that holds it."""
        shares = self._shares(block, part)
        return _All(tuple(session.download(band, some, c, target[at]) for session, band, some, at in shares))

    @property
    def brings(self) -> bool:
        """Whether every device has parts of C that can be brought."""
        return all(session.brings for session in self.sessions)

    def inward(self, block: Block, parts: Sequence[Part], c: int) -> Inward | None:
        """Returns the place of parts that one device has."""
        (session, band, first, _), *others = self._shares(block, parts[0])
        return None if others else session.inward(band, [part._replace(row=first.row) for part in parts], c)

    def lost(self, block: Block, part: Part, c: int) -> Lost:
        """Adds up what does not fit of the shares of the part."""
        found = [session.lost(band, some, c) for session, band, some, _ in self._shares(block, part)]
        return Lost(
            sum(lost.elements for lost in found),
            min(lost.least for lost in found),
            max(lost.greatest for lost in found),
        )

    def _shares(
        self, block: Block, part: Part
    ) -> Iterator[tuple[MemberSession, Block, Part, tuple[slice, slice]]]:
        """Yields the shares of a part: the session that holds it, its band, the share in that band, and its
        place in the part."""
        for session, band in self._blocks(block):
            start, stop = band.row - block.row, band.row - block.row + band.rows
            first, last = max(part.row, start) - part.row, min(part.row + part.rows, stop) - part.row
            left, right = max(part.col, start) - part.col, min(part.col + part.cols, stop) - part.col
            above = part.rows if part.mirrored else min(part.row + part.rows, start) - part.row
            # Columns that are rows of this band: of the transpose, or above the diagonal in bands before it.
            if (part.mirrored or (block.diagonal and above > 0)) and left < right:
                col, width = part.col + left - start, right - left
                turned = Part(part.chunk, part.row, col, above, width, mirrored=True)
                yield session, band, turned, (slice(above), slice(left, right))
            cols = right if block.diagonal else part.cols
            if not part.mirrored and first < last and cols > 0:
                some = Part(part.chunk, part.row + first - start, part.col, last - first, cols)
                yield session, band, some, (slice(first, last), slice(cols))

    def gathers(self, pair: tuple[int, int]) -> bool:
        """Whether all devices do: those that do not wait for their chunks."""
        return all(session.gathers(pair) for session in self.sessions)

    def record(self, stream: str, pair: tuple[int, int] | None = None) -> Event:
        """Records an event on every session. In the upload stream, the panels of op(B) are then on all
        devices."""
        if stream == UPLOAD:
            return _All(self._pass_on(pair))
        return _All(tuple(session.record(stream) for session in self.sessions))

    def wait(self, stream: str, event: Event) -> None:
        """Each device waits for its own event. A compute stream waits for those of all devices, because
        others may still be copying panels from this one."""
        assert isinstance(event, _All)
        for index, session in enumerate(self.sessions):
            for one in event.events if stream == COMPUTE else event.events[index : index + 1]:
                session.wait(stream, one)

    def free_panels(self) -> None:
        """Frees the panels of all devices, of each in a thread of its own."""
        self._each(lambda session: session.free_panels())

    def peak_bytes(self) -> int:
        """Returns the peak of the device that held most."""
        return max(session.peak_bytes() for session in self.sessions)

    def cancel(self) -> None:
        """Wakes the threads that wait for any of the devices, and drops the work of all."""
        for session in self.sessions:
            session.cancel()

    def close(self) -> None:
        """Frees what the run has on all devices, on each in a thread of its own."""
        self._each(lambda session: session.close())

    def _each(self, work: Callable[[MemberSession], None]) -> None:
        """Calls `work` for all sessions at once, because each takes a while to free memory. If one fails, the
        others finish first."""
        with ThreadPoolExecutor(max(1, len(self.sessions))) as pool:
            working = [pool.submit(work, session) for session in self.sessions]
        for one in working:
            one.result()

    def _bands(self, rows: int) -> Iterator[tuple[MemberSession, tuple[int, int]]]:
        return zip(self.sessions, bands(rows, self._weights), strict=True)

    def _blocks(self, block: Block) -> Iterator[tuple[MemberSession, Block]]:
        """Yields each session that has a band of the block, and that band."""
        for session, band in zip(self.sessions, _split(block, self._weights), strict=True):
            if band.rows:
                yield session, band


@lru_cache(maxsize=8)
def _split(block: Block, weights: tuple[int, ...]) -> list[Block]:
    """Cut a block into bands, one for each session."""
    cut = bands(block.rows, weights)
    return [
        replace(block, row=block.row + i, rows=stop - i, diagonal=False, band=block.diagonal)
        for i, stop in cut
    ]


def _cut(source: Array, piece: Piece, axis: int, lines: tuple[int, int]) -> tuple[Array, Piece]:
    """Cut a piece down to what lies in `lines`, a range of the panel's rows (axis 0) or columns (axis 1)."""
    at = piece.into[axis]
    start, stop = max(at, lines[0]) - at, min(at + source.shape[axis], lines[1]) - at
    cut = source[start:stop] if axis == 0 else source[:, start:stop]
    return cut, _within(piece, axis, lines, stop - start, start)


def _within(piece: Piece, axis: int, lines: tuple[int, int], size: int, skipped: int = 0) -> Piece:
    """Return `size` rows or columns of a piece, after those `skipped`, as a piece of a panel that has only
    `lines`."""
    into, panel, span = list(piece.into), list(piece.panel), (piece.rows, piece.cols)[axis]
    into[axis], panel[axis] = into[axis] + skipped - lines[0], lines[1] - lines[0]
    piece = piece._replace(into=(into[0], into[1]), panel=(panel[0], panel[1]))
    first = span[0] + skipped
    if axis == 0:
        return piece._replace(rows=(first, first + size))
    return piece._replace(cols=(first, first + size))
