"""What it takes to read the operands: passes over them, and the share of their pieces that a cache holds."""

from typing import NamedTuple

from ..support.intervals import ceil_div, touches
from .candidates import Candidate
from .machine import Rates
from .problem import Matrix, rows_apart


class Pass(NamedTuple):
    """What reading a stored matrix once takes, cut as a candidate cuts it. The numbers are estimates."""

    nbytes: float
    """So many bytes come from the store. Those of chunks that are read whole count each time."""
    decoded: float
    """Decoded size in bytes of the chunks that the readers decode."""
    pieces: float
    """So many pieces go through slots."""
    calls: float
    """So many calls read them: one for each row where a part of each row of a chunk is read."""
    unpacked: float = 0.0
    """Decoded size in bytes of the chunks that a device decodes."""

    def seconds(self, rates: Rates, rate: float, call: float) -> float:
        """Return the seconds of one pass at `rate` bytes per second and `1/call` calls per second."""
        return self.nbytes / rate + self.decoded / rates.decode + self.calls * call


def one_pass(s: Matrix, row_step: int, col_step: int, slot: int) -> Pass:
    """Estimate a pass over S, cut every `row_step` rows and `col_step` columns and at chunk edges, into slots
    of `slot` bytes."""
    nbytes = s.read_bytes_estimate(row_step, col_step)
    row_touches = touches(s.rows, row_step, s.chunk_rows)
    col_touches = touches(s.cols, col_step, s.chunk_cols)
    count = row_touches * col_touches
    stacked = s.chunks_of_piece(slot, col_step) * s.chunk_rows
    if s.whole:
        pieces = touches(s.rows, row_step, stacked) * col_touches
        size = float(count * s.chunk_bytes)
        by_readers, by_device = (0.0, size) if s.encoded else (size, 0.0)
        return Pass(nbytes, by_readers, pieces, count, by_device)
    cuts = max(1, ceil_div(s.rows * s.cols * s.itemsize, slot * max(1, count)))
    pieces = touches(s.rows, row_step, stacked) * col_touches * cuts
    by_rows = not s.traits.in_process and rows_apart(s.chunk_cols, min(col_step, s.chunk_cols), s.skipped)
    return Pass(nbytes, 0.0, pieces, s.rows * col_touches if by_rows else count * cuts)


class Reads(NamedTuple):
    """How a candidate reads one operand."""

    seconds: float
    """Seconds of one pass over the operand."""
    pieces: float
    """Number of pieces of one pass."""
    times: int
    """Number of passes, if the cache holds nothing."""
    missed: float
    """Share of the pieces that are read from the store, because neither the cache holds them nor another
    worker of the team reads them."""
    nbytes: float
    """Bytes that each pass uploads: of all its elements, or of its chunks as they are stored."""
    unpacked: float = 0.0
    """Decoded size in bytes of the chunks that a device decodes."""


def found_shares(x: Candidate, a: Pass, b: Pass, down: int, across: int) -> tuple[float, float]:
    """Estimate the shares of all pieces of A and of B that a cache holds, as `cache.hits` would count them.
    The next block's panel of the operand that stays comes first, then the panel at the turn, then any."""
    if x.by_columns:
        return found_shares(x._replace(by_columns=False), b, a, across, down)[::-1]
    strip_a, strip_b = a.pieces / down, b.pieces / across
    found_a = down * (across - 1) * min(x.cache, strip_a)
    spare = max(0.0, x.cache - strip_a - strip_b)
    found_b = (down - 1) * min(b.pieces, min(x.cache, strip_b) + spare)
    return found_a / max(1.0, a.pieces * across), found_b / max(1.0, b.pieces * down)


def found_share(x: Candidate, a: Pass, down: int) -> float:
    """Estimate the same share for a symmetric product. Block row i uses its own strip of A i more times, and
    i other strips, of which the block row before has used all but one."""
    strip = a.pieces / down
    spare = max(0.0, x.cache - 2 * strip)
    found = sum(i * min(x.cache, strip) + min(i * strip, min(x.cache, strip) + spare) for i in range(1, down))
    return found / max(1.0, a.pieces * down)
