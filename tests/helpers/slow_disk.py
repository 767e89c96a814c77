"""Workers of a cluster that are slower than they are: their disks, or their sums."""

import itertools
import os
import signal
import time

import distributed

from ooc_gemm.dask import partial, team
from ooc_gemm.storage.io import files
from ooc_gemm.storage.read import raw


class Slow(distributed.WorkerPlugin):
    """A slower disk on every worker, also those that come later."""

    def __init__(self, seconds):
        self.seconds = seconds

    def setup(self, worker):
        self.write = write = files.write

        def slowly(path, data, direct=False):
            write(path, data, direct)
            time.sleep(self.seconds)

        files.write = slowly

    def teardown(self, worker):
        files.write = self.write


class SlowSums(distributed.WorkerPlugin):
    """Every range of k takes a while on every worker, and so does adding up."""

    def setup(self, worker):
        for name in ("carried_out", "add"):
            self.slow(name, getattr(partial, name))

    @staticmethod
    def slow(name, function):
        def slowly(*arguments):
            time.sleep(0.1)
            return function(*arguments)

        setattr(partial, name, slowly)


class SlowReads(distributed.WorkerPlugin):
    """Every piece of raw chunks takes a while to read on every worker."""

    def setup(self, worker):
        start = raw.RawSource.start

        def slowly(self, piece, slot, onward=None):
            time.sleep(0.02)
            return start(self, piece, slot, onward)

        raw.RawSource.start = slowly


class StandsStill(distributed.WorkerPlugin):
    """The first worker of a cluster stops as it is about to hand over its third piece, until it is woken."""

    def setup(self, worker):
        hand_over, seen = team.Seat.hand_over, itertools.count(1)

        def stops(self, *arguments):
            if next(seen) == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            hand_over(self, *arguments)

        if worker.name == 0:
            team.Seat.hand_over = stops
