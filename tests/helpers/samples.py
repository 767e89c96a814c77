"""Genotypes of samples, and their kinship by the counts that define it."""

import numpy as np


def alleles(variants, samples, seed, rate=0.05):
    """Variants × samples, −1 where missing; among them variants without variation, or without genotypes."""
    rng = np.random.default_rng(seed)
    share = rng.random((variants, 1))
    share[3], share[4] = 0, 1
    found = rng.binomial(2, np.broadcast_to(share, (variants, samples))).astype("i1")
    found[rng.random(found.shape) < rate] = -1
    found[5], found[6] = -1, 1
    return found


def kinship(g):
    """As `ComputeKinship` of plink2 has it: from counts of pairs of genotypes."""
    zero, one, two = ((g == x).astype("i8") for x in (0, 1, 2))
    hom = zero + two
    ibs0 = zero.T @ two
    ibs0 = ibs0 + ibs0.T
    first = one.T @ hom
    with np.errstate(all="ignore"):
        least = one.T @ one + np.minimum(first, first.T)
        found = 0.5 - (4 * ibs0 + first + first.T) / (4 * least)
    np.fill_diagonal(found, 0.5)
    return found
