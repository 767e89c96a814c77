"""Looks at genotypes of one byte eight at a time, as words of 64 bits.

A sum of words adds up eight bytes at once, as long as none of these sums exceeds 255. So few calls of NumPy
look at a long strip, and each reads bytes. Where many threads look at strips, most of the time is otherwise
lost in waiting for the interpreter between calls.
"""

import math
from typing import Any

import numpy as np

from ..engine.ports import Array
from ..engine.transform import as_element
from ..support.buffers import scratch
from ..support.intervals import ranges, round_up

WORD = 8
"""A word has so many bytes."""
STRIP_BYTES = 4 << 20
"""Bytes of a strip that is looked at, with the padding of its rows to whole words."""
NBYTES = 3 * STRIP_BYTES
"""What each thread computes in: a mask, bytes that are added up, and a copy of the mask."""
MOST = 255
"""The most that one byte of a sum holds."""


def fit(dtype: np.dtype[Any]) -> bool:
    """Whether genotypes of this type are looked at in words."""
    return dtype.kind in "iu" and dtype.itemsize == 1


def rows_of(samples: int) -> int:
    """Return the number of variants of a strip."""
    return max(1, STRIP_BYTES // max(1, round_up(samples, WORD)))


def room(purpose: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory of the thread for a strip. The system takes back new memory of this size each time, and gives it
    to the next strip page by page: sixteen threads then wait for each other."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    found: Array = scratch(purpose, nbytes)[:nbytes].view(dtype).reshape(shape)
    return found


class Strip:
    """What is found in a strip of genotypes. Its memory is used again by the next one of the thread."""

    def __init__(self, genotypes: Array, missing: float | None):
        """genotypes: variants × samples, of one byte each. missing: the number that stands for a missing
        one."""
        variants, self._samples = genotypes.shape
        values, shape = genotypes.view(np.uint8), (variants, round_up(self._samples, WORD))
        gone = None if missing is None else as_element(missing, genotypes.dtype)
        self._mask, some = room("missing", shape, np.uint8), room("genotypes", shape, np.uint8)
        for padded in (self._mask, some):
            padded[:, self._samples :] = 0
        mask = self._mask[:, : self._samples].view(np.bool_)
        np.greater(values, 2, out=mask)
        wrong = _sums(self._mask, 1)
        np.bitwise_and(values, 3, out=some[:, : self._samples])
        sums = _sums(some, 3)
        self.missing = np.zeros(variants, np.int64)
        """Number of missing genotypes of each variant."""
        if gone is not None:
            byte = int(np.asarray(gone).view(np.uint8))
            np.equal(values, byte, out=mask)
            self.missing = _sums(self._mask, 1)
            sums -= (byte & 3) * self.missing
            wrong -= (byte > 2) * self.missing
        self.sums = np.where(wrong == 0, sums, np.inf)
        """Sum of the genotypes of each variant; infinite where one is not 0, 1, 2 or missing."""

    def where(self) -> Array:
        """Return the indices of the missing genotypes in the strip, in C order. Most words have none."""
        flat, padded = self._mask.reshape(-1, WORD), self._mask.shape[1]
        some = np.flatnonzero(flat.view(np.uint64) != 0)
        inside = np.flatnonzero(flat[some].view(np.bool_))
        found: Array = some[inside // WORD] * WORD + inside % WORD
        found -= found // max(1, padded) * (padded - self._samples)
        return found

    def lacking(self, kept: Array) -> Array:
        """Return how many variants, of those kept, each sample lacks."""
        words = self._mask.view(np.uint64)
        words = words if kept.all() else words[kept]
        found = np.zeros(self._samples, np.int64)
        for start, stop in ranges(len(words), MOST):
            found += words[start:stop].sum(axis=0).view(np.uint8)[: self._samples]
        return found


def _sums(values: Array, most: int) -> Array:
    """Return the sum of each row of bytes, none of which exceeds `most`."""
    words = values.view(np.uint64)
    parts = np.add.reduceat(words, np.arange(0, words.shape[1], MOST // most), axis=1)
    sums: Array = parts.view(np.uint8).sum(axis=1, dtype=np.int64)
    return sums
