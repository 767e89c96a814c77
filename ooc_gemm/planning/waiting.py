"""When blocks are made whose panels stay on a device: a panel is multiplied when it has come, and when those
before it have been multiplied."""

from itertools import islice

from .candidates import Candidate
from .problem import Problem
from .schedule import places


def first_made(x: Candidate, bringing: float, multiplying: float, thin: float) -> float:
    """Return the seconds after which the first block is made, whose panels are all brought, in so many
    seconds, and multiplied, in so many. thin: as of `Rates`."""
    k, passes = max(1, x.panels.k), len(x.panels)
    came = done = 0.0
    for start, stop in x.panels:
        came += (stop - start) / k * bringing
        done = max(came, done) + (stop - start + thin) / (k + thin * passes) * multiplying
    return done


def strips_made(p: Problem, x: Candidate, compute: float, reads: list[float]) -> tuple[float, float]:
    """Return the seconds after which the first block is made and the last one, where panels of op(A) and
    op(B) stay on the device. compute: seconds of all multiplications. reads: seconds in which op(A),
    op(B) and perhaps the old C are brought."""
    count, columns = max(1, len(x.panels)), x.panels.columns
    of_a, of_b, *others = reads
    rows_there, columns_there = set[int](), set[int]()
    came = made = first = 0.0
    free = dict[int, float]()  # when the first panel of each column of blocks was multiplied last

    def needs(i: int, j: int) -> tuple[float, float]:
        """Return the seconds that bring what a block needs, and those that multiply it."""
        down, across = min(x.bm, p.m - i * x.bm) / p.m, min(x.bn, p.n - j * x.bn) / p.n
        here = down * across * sum(others)
        here += (0.0 if i in rows_there else of_a * down) + (0.0 if j in columns_there else of_b * across)
        rows_there.add(i)
        columns_there.add(j)
        return here, down * across * compute

    order = places(p, x.bm, x.bn, False, together=columns)
    if x.panels.interleaved > 1:
        blocks = list(islice(order, x.panels.interleaved))
        each = [needs(*place) for place in blocks]
        bring, take = (sum(seconds) for seconds in zip(*each, strict=True))
        left, done = take / count, 0.0
        for (_, j), (here, took) in zip(blocks, each, strict=True):
            # Each panel along k takes as long, so the device waits longest for the first or the last one.
            came += here / count
            made = max(made, came + max(take, bring) * (count - 1) / count + left)
            free[j] = done = max(done, came) + took / count
            left -= took / count
        first, came = made - (take - each[0][1]) / count, bring
    for i, j in order:
        if j not in columns_there:
            came = max(came, free.get(j - columns, 0.0))
        here, took = needs(i, j)
        began, came = max(made, came + here / count), came + here
        made, free[j] = max(began + took, came + took / count), began + took / count
        first = first or made
    return first, made
