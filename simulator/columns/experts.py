"""Experts on ranks: how many ranks split each expert, how many share them, and how many rows of tokens reach a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import PlanColumns
from simulator.config.model import MixtureOfExperts
from simulator.config.workload import Workload

Floats = NDArray[np.float64]
# What the ranks of tensor parallelism do with experts where a plan does not state it: keep each expert whole, split
# each, or split each only without expert parallelism.
EXPERT_SPLITS = ("whole", "tp", "alone")


def expert_split(given: PlanColumns, default: str) -> NDArray[np.int64]:
    """Return how many ranks split each expert. Without sequence parallelism these are all ranks of tensor parallelism,
    which hold the same tokens.
    """
    split = {"whole": np.ones_like(given.tp), "tp": given.tp, "alone": np.where(given.ep > 1, 1, given.tp)}[default]
    chosen = np.where(given.etp > 0, given.etp, np.where(given.sequence_parallel, split, given.tp))
    return np.asarray(chosen, dtype=np.int64)


def expert_sizes(
    workload: Workload,
    moe: MixtureOfExperts,
    plans: PlanColumns,
    degrees: Mapping[str, Floats],
    *,
    tokens: Floats,
    gate: float,
    spread: float,
    pads: bool,
    domain: int,
) -> dict[str, Floats | float]:
    """Return the axes of experts for a rank that sends `tokens`, of `plans` with these `degrees`; see
    `simulator.columns.plan_table.axis_sizes`.
    """
    tp, ep, etp, capacity = degrees["tp"], degrees["ep"], degrees["etp"], plans.capacity_factor
    # Ranks that split experts also compute each other's rows, unless they hold the same tokens anyway (tensor
    # parallelism without sequence parallelism).
    others = np.where(plans.sequence_parallel, etp, etp / np.minimum(tp, etp))
    # The busiest rank decides: its share of the rows, or what the capacity of its experts admits.
    sent = tokens * moe.experts_per_token
    uneven = _uneven(workload, ep, moe, spread)
    let_in = capacity if pads else np.minimum(uneven, np.maximum(capacity, 1.0))
    uneven = np.where(capacity > 0, let_in, uneven)
    routed = others * sent * uneven
    local = moe.experts / ep
    return {
        "E": moe.experts,
        "e": local,
        "p": others * tokens,
        "n": sent,
        "m": sent * uneven,
        "r": routed,
        "x": routed / local,
        "fe": moe.ffn / etp,
        "gfe": gate * moe.ffn / etp,
        "fs": moe.shared_ffn / tp,
        "gfs": gate * moe.shared_ffn / tp,
        **_visits(moe, ep, etp, domain, tokens, uneven),
    }


def _uneven(workload: Workload, ep: Floats, moe: MixtureOfExperts, spread: float) -> Floats:
    """Return the load of the busiest rank of expert parallelism over the mean: from counted tokens, as stated, or from
    the spread of routers.
    """
    counts = workload.expert_counts
    if counts and len(counts) == moe.experts and sum(counts):
        degrees, back = np.unique(ep.astype(np.int64), return_inverse=True)
        loads = [
            max(np.add.reduceat(counts, np.arange(0, len(counts), max(1, len(counts) // ranks)))) * ranks / sum(counts)
            for ranks in degrees.tolist()
        ]
        return np.asarray(np.array(loads)[back], dtype=np.float64)
    if workload.expert_imbalance != 1.0:
        return np.where(ep > 1, workload.expert_imbalance, 1.0)
    return busiest_load(ep, routed_spread(workload.routing, spread))


# DeepEP and HybridEP move messages at the rate of the network if copies that stay inside a node are counted too: 43, 58
# and 51 GB/s of 50 with 16, 32 and 64 ranks (DeepEP's docs/legacy.md, normal kernels across nodes). So two nodes, where
# half of the copies stay inside, are no faster than more nodes. These kernels are timed as an NCCL all-to-all, which
# moves what leaves a node at 0.6 of the rate (`simulator.collectives.times.NET_PEER`).
FUSED_NETWORK = 0.6


def _visits(
    moe: MixtureOfExperts, ep: Floats, etp: Floats, domain: int, tokens: Floats, uneven: Floats
) -> dict[str, Floats | float]:
    """Return the axes of dispatches that send each token once to a rank, and over a network once to a node."""
    nodes = np.ceil(ep * etp / domain)
    reach = etp * tokens * places_visited(moe, ep) * uneven
    limit = np.ceil(nodes * moe.groups_per_token / moe.groups)
    leaving = np.where(nodes > 1, 1.0 - domain / np.maximum(ep * etp, domain + 1.0), 1.0)
    across = tokens * np.minimum(places_visited(moe, nodes), limit) * uneven * FUSED_NETWORK / leaving
    return {"g": tokens * ep * etp, "z": reach, "y": np.where(nodes > 1, across, reach)}


def places_visited(moe: MixtureOfExperts, places: Floats) -> Floats:
    """Return how many of `places` a token visits on average, if each has an equal part of the experts and the token's
    experts are drawn uniformly without replacement.
    """
    missed = np.ones_like(places)
    for chosen in range(moe.experts_per_token):
        left = np.maximum(moe.experts * (1.0 - 1.0 / places) - chosen, 0.0)
        missed = missed * left / (moe.experts - chosen)
    return np.asarray(places * (1.0 - missed))


# Spread of a router that is not balanced (`routing` natural), where the runtime's description has none: the busiest of
# 8 ranks then has 1.4 times its share, of 16 ranks 1.7 times. Source: assumed.
NATURAL_SPREAD = 0.1


def routed_spread(routing: str, described: float) -> float:
    """Return the spread of load over ranks with experts; 0 where routing is balanced."""
    if routing == "balanced":
        return 0.0
    return max(described, NATURAL_SPREAD) if routing == "natural" else described


def busiest_load(ranks: Floats, spread: float) -> Floats:
    """Return the load of the busiest of `ranks` ranks that share experts over the mean load; from 1 to `ranks`.

    `spread` is the standard deviation of the load of one of two ranks, over the mean. With more ranks it is larger by
    sqrt(ranks - 1), as if a few experts, anywhere, had all tokens. Loads are normal apart from their fixed sum.
    """
    counts, back = np.unique(ranks, return_inverse=True)
    loads = np.array([_load(count, spread) if count > 1 else 1.0 for count in counts.tolist()])
    return loads[back]


def _load(ranks: float, spread: float) -> float:
    return min(1.0 + spread * math.sqrt(ranks) * largest_of(ranks), ranks)


def largest_of(count: float) -> float:
    """Return the expected largest of so many values of a standard normal distribution: Blom (1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
