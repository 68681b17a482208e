"""How many experts tokens choose, and how many experts and rows the rank has that all others wait for."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.config.model import MixtureOfExperts

# Ratio of the most to the least frequently chosen expert, whose logarithms are evenly spaced. Source: the loads that
# aiconfigurator measures kernels of experts under (ai-dynamo/aiconfigurator collector/helper.py, sample_power_law from
# 0.01 to 2 with an exponent of 1.01, for DeepSeek's family). Loads of experts then differ by 1.29 of their mean, and
# those of ranks of eight by 0.46; NVIDIA counted 1.28 and 0.48 of DeepSeek-R1 with requests for translations
# (NVIDIA/TensorRT-LLM docs/source/blogs/tech_blog/blog04_Scaling_Expert_Parallelism_in_TensorRT-LLM.md, Table 1).
POPULAR = 200.0


def visited_share(moe: MixtureOfExperts, tokens: Floats) -> Floats:
    """Return the share of experts that at least one of `tokens` chooses.

    A router that balances loads by a bias for each expert (DeepSeek-V3's) is taken to choose all with equal frequency:
    the few tokens of a step of answers agree with that (examples/validation/serving.md).
    """
    often = np.ones(1) if moe.selection_bias else popularity()
    taken = np.minimum(1.0, moe.experts_per_token / moe.experts * often)
    return np.asarray(np.mean(1 - (1 - taken[:, None]) ** tokens, axis=0))


def popularity() -> Floats:
    """Return how often experts are chosen, over the mean."""
    frequencies: Floats = POPULAR ** np.linspace(0.0, 1.0, 65)
    return np.asarray(frequencies / frequencies.mean())


def on_fullest_rank(moe: MixtureOfExperts, tokens: Floats, ranks: int, here: int) -> tuple[Floats, Floats]:
    """Return the experts that have rows, and the rows, on the rank with the most of them, of `ranks` that hold `here`
    experts each.

    Experts of a group are chosen by the same tokens: DeepSeek-V3's tokens choose among four of eight groups, and a rank
    of eight holds one group, so it is chosen by half of the tokens and has more of their rows. Besides, experts of some
    ranks are more popular than those of others, unless as many are held twice as make ranks alike.
    """
    share, rows = visited_share(moe, tokens), tokens * moe.experts_per_token / ranks
    if ranks == 1:
        return here * share, rows
    one = moe.experts_per_token / moe.experts
    counts, both = zip(*_pairs(moe, here), strict=True)
    # Of two experts, neither is chosen by a token with 1 - 2 one + both; covariances of being visited, and of rows.
    visits = sum(
        n * ((1 - 2 * one + two) ** tokens - (1 - one) ** (2 * tokens)) for n, two in zip(counts, both, strict=True)
    )
    together = sum(n * (two - one**2) for n, two in zip(counts, both, strict=True))
    visited = _most(here * share, here * share * (1 - share) + visits, ranks)
    by_chance = tokens * (here * one * (1 - one) + together)
    popular = float(np.var(popularity())) / here if here * ranks == moe.experts else 0.0
    return np.minimum(here, visited), _most(rows, by_chance + popular * rows**2, ranks)


def _pairs(moe: MixtureOfExperts, here: int) -> list[tuple[float, float]]:
    """Return the ordered pairs of experts on a rank, of one group and of two: how many, and the share of tokens that
    choose both.
    """
    groups, met = moe.groups, moe.groups_per_token
    size, among = moe.experts / groups, moe.experts * met / groups
    chosen = moe.experts_per_token * (moe.experts_per_token - 1) / (among * max(1.0, among - 1))
    inside = here * (min(here, size) - 1)
    across = (met - 1) / (groups - 1) if groups > 1 else 0.0
    return [(inside, met / groups * chosen), (here * (here - 1) - inside, met / groups * across * chosen)]


def _most(mean: Floats, variance: Floats, ranks: int) -> Floats:
    """Return the expected most over `ranks` of a count with this mean and variance on each: Blom's approximation of the
    largest of as many normal numbers, with the first term that skewness adds to it (Cornish and Fisher). Counts are as
    skew as a Poisson or negative binomial one of their mean and variance; those that cannot grow further not at all.
    """
    normal = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    skewed = np.maximum(0.0, 2 * variance / np.maximum(mean, 1e-9) - 1)  # times the standard deviation
    return np.asarray(mean + normal * np.sqrt(np.maximum(0.0, variance)) + max(0.0, normal**2 - 1) / 6 * skewed)
