"""Disks of the workers of a cluster that are slower than they are."""

import time

import distributed

from ooc_gemm.storage.io import files


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
