"""What tests of several commands use: arrays to work on, and what is printed as JSON."""

import json

import numpy as np
from conftest import make

CPU = ("-d", "cpu")


def parsed(done):
    """The one JSON object on standard output, next to which nothing is said."""
    assert done.code == 0, done
    assert done.err == ""
    assert done.out.count("\n") == 1
    return json.loads(done.out)


def make_arrays(folder, monkeypatch):
    """Work in a folder with a (60×40, raw), b (40×100, compressed) and their product c."""
    monkeypatch.chdir(folder)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((60, 40), "f4"), rng.standard_normal((40, 100), "f4")
    make("a", a, chunks=(20, 20), compressors=None)
    make("b", b, chunks=(30, 30))
    make("c", a @ b, chunks=(30, 30))
