"""Stores that hang: each ends with one sentence, and nobody waits for them."""

import asyncio
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import zarr
from left_over import OLD, A, C
from outcome import assert_one_sentence
from zarr.storage import MemoryStore, WrapperStore

import ooc_gemm
from ooc_gemm.storage.io import answers

pytestmark = pytest.mark.usefixtures("here")


# ------------------------------------------------------------------------------------------------- far away


class Hanging(WrapperStore):
    """Answers no question about chunks of some kind, or one chunk."""

    hangs, keys, breaks = "", "c/", None

    def with_read_only(self, read_only=False):
        return self

    async def get(self, key, prototype, byte_range=None):
        if self.hangs == "get" and key.startswith(self.keys):
            await asyncio.Event().wait()
        if key == self.breaks:
            await asyncio.sleep(0.5)
            raise OSError("unplugged")
        return await super().get(key, prototype, byte_range)

    async def set(self, key, value):
        if self.hangs == "set" and key.startswith(self.keys):
            await asyncio.Event().wait()
        await super().set(key, value)


def hanging(values, hangs):
    made = zarr.create_array(Hanging(MemoryStore()), shape=values.shape, chunks=(50, 50), dtype="f4")
    made[...] = values
    made.store_path.store.hangs = hangs
    return made


@pytest.fixture
def abandons(monkeypatch):
    """What the test leaves hanging is forgotten after it: the command line would end the process."""
    monkeypatch.setattr(answers, "abandoned", threading.Event())


def test_a_store_that_hangs(here, monkeypatch, abandons):
    monkeypatch.setattr(answers, "TIMEOUT", 0.3)
    a, c = hanging(A, "get"), hanging(OLD, "set")
    with pytest.raises(
        ooc_gemm.StoreError, match=r"chunk c/\d/\d cannot be fetched \(no answer within 0.\d+ s\)"
    ):
        ooc_gemm.multiply(a, "b", "c", device="cpu")
    with pytest.raises(
        ooc_gemm.StoreError, match=r"chunk c/\d/\d cannot be written: no answer within 0.\d+ s"
    ):
        ooc_gemm.multiply("a", "b", c, device="cpu", force=True)
    with pytest.raises(ooc_gemm.StoreError, match=r"chunk c/\d/\d cannot be fetched"):
        ooc_gemm.verify("a", "b", hanging(C, "get"))
    a.store_path.store.hangs = ""
    monkeypatch.setattr(answers, "TIMEOUT", 60)
    ooc_gemm.multiply(a, "b", "c", device="cpu", force=True)
    assert np.array_equal(zarr.open_array("c", mode="r")[:], C)


def test_nobody_waits_for_a_store_that_hangs_once_the_run_has_failed(here, monkeypatch, abandons):
    monkeypatch.setattr(answers, "TIMEOUT", 3600)  # longer than any test may take
    a = hanging(A, "get")
    a.store_path.store.keys, a.store_path.store.breaks = "c/0/1", "c/0/0"
    with pytest.raises(ooc_gemm.StoreError, match=r"chunk c/0/0 .*unplugged"):
        ooc_gemm.multiply(a, "b", "c", device="cpu")


BLOCKING = """
import os, sys, time
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from ooc_gemm.storage.io import answers
from ooc_gemm.cli import main

class Slow(MemoryFileSystem):
    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("slow://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        if "/c/" in path:
            os.write(1, b"asked\\n")
            time.sleep(1000)
        return super().cat_file(path, start, end, **options)

fsspec.register_implementation("slow", Slow)
answers.TIMEOUT = float(sys.argv[1])
from ooc_gemm import random
random("slow://shelf/a", (300, 400), chunks=(100, 100))
main(["multiply", "slow://shelf/a", "b", "c", "-d", "cpu"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by itself", "by Ctrl-C"])
def test_a_store_whose_threads_hang_does_not_keep_the_process(here, ends):
    seconds = "0.5" if ends == "by itself" else "60"
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKING, seconds],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline() == "asked\n"
        if ends == "by Ctrl-C":
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=200)
    finally:
        process.kill()
    if ends == "by itself":
        assert process.returncode == 1
        assert_one_sentence(said, "slow://shelf/a: chunk c/", "cannot be fetched")
    else:
        assert process.returncode == 130
        assert said.strip().startswith("Interrupted: ")
