"""Genotypes that are looked at in words, against those that are looked at one by one."""

import numpy as np
import pytest
from samples import alleles

from ooc_gemm.statistics import genotypes, words
from ooc_gemm.statistics.genotypes import Counts, Tally, look_through
from ooc_gemm.storage.read.inputs import open_input


def both(strip, missing, least=0.0, first=0):
    found = []
    for look in (Tally.look, Tally.look_at_words):
        tally = Tally((first + len(strip), strip.shape[1]), missing, least, Counts(strip.shape[1]))
        look(tally, strip, first)
        found.append(tally)
    return found


def agree(one, other):
    assert one.frequency.tobytes() == other.frequency.tobytes()
    assert np.array_equal(one.kept, other.kept)
    assert np.array_equal(one.lacking, other.lacking)
    assert np.array_equal(*(np.triu(tally.counts.lack_both, 1) for tally in (one, other)))


@pytest.mark.parametrize("shape", [(501, 77), (600, 8), (300, 1), (7, 3000), (20, 0), (0, 9)])
@pytest.mark.parametrize("least", [0.0, 0.2])
def test_they_are_the_same(shape, least):
    g = alleles(*shape, 1) if min(shape) else np.zeros(shape, "i1")
    agree(*both(g, -1, least, first=5))
    agree(*both(np.where(g < 0, 255, g.astype("i2")).astype("u1"), 255, least))
    agree(*both(np.where(g < 0, 3, g).astype("i1"), 3, least))


@pytest.mark.parametrize("dtype", ["i1", "u1"])
@pytest.mark.parametrize("missing", [None, -1, 0, 2, 3, 127, 255, 300, 0.5, float("nan")])
def test_every_byte_is_a_genotype_or_missing_or_wrong(dtype, missing):
    every = np.arange(256, dtype="u1").view(dtype)
    g = np.tile(np.array([0, 1, 2, 2, 1], dtype), (256, 40))
    g[:, 77] = every
    agree(*both(g, missing))
    agree(*both(every[:, None].repeat(300, axis=1), missing))


@pytest.mark.parametrize("strip", [64, 4096, words.STRIP_BYTES])
@pytest.mark.parametrize("paired", [False, True])
def test_a_pass_looks_at_bytes_in_words(monkeypatch, strip, paired):
    monkeypatch.setattr(words, "STRIP_BYTES", strip)
    monkeypatch.setattr(genotypes, "STRIP", strip)
    monkeypatch.setattr(Tally, "look", None)
    g = alleles(700, 90, 2)
    found = look_through(open_input(g), 1 << 30, -1.0, 0.1, paired)
    there = np.ma.masked_equal(g, -1)
    p = (there.mean(axis=1) / 2).filled(np.nan)
    assert np.allclose(found.frequency, p, rtol=1e-12, equal_nan=True)
    assert np.array_equal(found.missing, np.count_nonzero(g[found.kept] < 0, axis=0))
    if paired:
        have = (g[found.kept] >= 0).astype("i4")
        assert np.array_equal(found.pairs, have.T @ have)


def test_a_pass_that_lists_pairs_no_more_looks_at_longer_strips(monkeypatch):
    monkeypatch.setattr(genotypes, "STRIP", 1000)
    monkeypatch.setattr("ooc_gemm.run.stream.PANEL_BYTES", 4000)
    g, seen, look = alleles(600, 40, 3), [], Tally.look_at_words
    monkeypatch.setattr(Tally, "look_at_words", lambda *args: (seen.append(len(args[1])), look(*args)))
    found = look_through(open_input(g), 1 << 30, -1.0, 0.0, True, most=10)
    assert sum(seen) == 600
    assert min(seen) == 25 < max(seen)
    assert found.pairs is None
    assert np.array_equal(found.missing, np.count_nonzero(g < 0, axis=0))


def test_words_take_no_more_memory_than_a_pass_counts():
    assert words.NBYTES <= genotypes.THREAD_BYTES
