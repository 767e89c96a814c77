"""Arrays on the shelf of the S3 server of the tests, and processes that work on them."""

import signal
import subprocess
import sys
import time

import s3
import zarr

from ooc_gemm.storage.read import addresses

URL = f"s3://{s3.BUCKET}"


def put(url, values, **layout):
    """Store an array with zarr's own means."""
    layout = {"chunks": (100, 100), "compressors": None} | layout
    place = addresses.remote_place(url)
    array = zarr.create_array(place, shape=values.shape, dtype=values.dtype, **layout)
    array[...] = values
    return url


def got(url):
    """Read one with zarr's own means."""
    return zarr.open_array(addresses.remote_place(url), mode="r")[...]


def keys(url):
    return sorted(addresses.objects_at(url).all_keys())


def start(*args, **options):
    """A process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "ooc_gemm.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


SLOWLY = """
import sys
from ooc_gemm.storage.write import publication
from ooc_gemm.support import memory as limits
from ooc_gemm.cli import main
publication.SAVED_SECONDS = float(sys.argv[1])
limits.resident_bytes = lambda: 0
main(sys.argv[2:])
"""


def slowly(*args, saved=0.2):
    """A process of its own that puts its journal every so many seconds."""
    return subprocess.Popen(
        [sys.executable, "-c", SLOWLY, str(saved), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds=200):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
