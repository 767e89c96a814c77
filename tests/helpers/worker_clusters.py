"""Clusters for tests: workers that are threads of this process, or processes."""

import contextlib

import distributed


@contextlib.contextmanager
def cluster(workers, processes=False, memory_limit="16GiB"):
    """The client of a cluster. What earlier tests have left in this process counts as that of workers which
    are threads, so these have a limit beyond it."""
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=processes, memory_limit=memory_limit,
            dashboard_address=":0",
        ) as found,
        distributed.Client(found, set_as_default=False) as client,
    ):  # fmt: skip
        yield client
