"""Runs that are interrupted after some chunks of C have been written."""

import functools
import shutil

import pytest
import zarr

import ooc_gemm
from ooc_gemm.storage.io import files
from ooc_gemm.storage.write import publication


class Stop(Exception):
    """Somebody pulls the plug."""


def old_c(path, value, **options):
    """The C that β·C reads."""
    shutil.rmtree(path, ignore_errors=True)
    options = {"chunks": (50, 52), "compressors": None, **options}
    made = zarr.create_array(path, shape=value.shape, dtype="f4", attributes={"mine": 1}, **options)
    made[...] = value


def stop_after(monkeypatch, count, saved=0.0):
    """Writing fails when so many chunks are written."""
    left = iter(range(count))

    def limited(write, *args):
        if next(left, None) is None:
            raise Stop
        return write(*args)

    for name in ("write", "start_write", "bring"):
        monkeypatch.setattr(files, name, functools.partial(limited, getattr(files, name)))
    monkeypatch.setattr(publication, "SAVED_SECONDS", saved)


def interrupted(monkeypatch, count, *args, saved=0.0, run=ooc_gemm.multiply, **options):
    """A run that does not end."""
    with monkeypatch.context() as patch:
        stop_after(patch, count, saved)
        with pytest.raises(ooc_gemm.Error):
            run(*args, **options)
