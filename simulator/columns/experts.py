"""Experts on ranks: who splits them, who shares them, and how many rows of tokens reach a rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import PlanColumns
from simulator.config.model import MixtureOfExperts
from simulator.config.workload import Workload

Floats = NDArray[np.float64]
# What ranks of tensor parallelism do with experts where a plan does not say: leave each whole, split each, or split
# them where there is no expert parallelism.
EXPERT_SPLITS = ("whole", "tp", "alone")


def expert_split(given: PlanColumns, default: str) -> NDArray[np.int64]:
    """Return how many ranks split each expert. Without sequence parallelism all ranks of tensor parallelism do: they
    hold the same tokens.
    """
    split = {"whole": np.ones_like(given.tp), "tp": given.tp, "alone": np.where(given.ep > 1, 1, given.tp)}[default]
    chosen = np.where(given.etp > 0, given.etp, np.where(given.sequence_parallel, split, given.tp))
    return np.asarray(chosen, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """How ranks share experts, a column each: `tp` ranks of tensor parallelism, with other tokens each where they are
    `apart`; `ep` ranks that share the experts, `etp` that split each; the `capacity` of an expert over its mean load, 0
    where it has none, which it is filled up to if it `pads`. `domain` ranks reach each other without a network.
    """

    tp: Floats
    ep: Floats
    etp: Floats
    apart: NDArray[np.bool_]
    capacity: Floats
    pads: bool
    domain: int


def expert_sizes(
    workload: Workload, moe: MixtureOfExperts, ranks: ExpertRanks, *, tokens: Floats, gate: float, spread: float
) -> dict[str, Floats | float]:
    """Return the axes of experts, of which a rank sends `tokens`; see `simulator.columns.plan_table.axis_sizes`."""
    tp, ep, etp = ranks.tp, ranks.ep, ranks.etp
    # Ranks that split experts compute each other's rows as well, unless they hold the same tokens anyway: those of
    # tensor parallelism without sequence parallelism.
    others = np.where(ranks.apart, etp, etp / np.minimum(tp, etp))
    # The busiest expert rank decides: its share of the rows, or what its capacity lets through.
    sent = tokens * moe.experts_per_token
    uneven = _uneven(workload, ep, moe, spread)
    let_in = ranks.capacity if ranks.pads else np.minimum(uneven, np.maximum(ranks.capacity, 1.0))
    uneven = np.where(ranks.capacity > 0, let_in, uneven)
    routed = others * sent * uneven
    local = moe.experts / ep
    return {
        "E": moe.experts,
        "e": local,
        "n": sent,
        "m": sent * uneven,
        "r": routed,
        "x": routed / local,
        "fe": moe.ffn / etp,
        "gfe": gate * moe.ffn / etp,
        "fs": moe.shared_ffn / tp,
        "gfs": gate * moe.shared_ffn / tp,
        **_visits(moe, ranks, tokens, uneven),
    }


def _uneven(workload: Workload, ep: Floats, moe: MixtureOfExperts, spread: float) -> Floats:
    """Return the tokens of the busiest rank of expert parallelism over the mean: as counted, as said, or as routers
    have them.
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


# DeepEP's and HybridEP's messages move at the rate of the network, copies that stay in a node counted with the others:
# 43, 58 and 51 GB/s of 50 with 16, 32 and 64 ranks (DeepEP's docs/legacy.md, normal kernels across nodes). Two nodes,
# where half stay, so take no less than more. NCCL's all-to-all, as which they are timed, moves at 0.6 of the rate what
# leaves a node (`simulator.collectives.times.NET_PEER`).
FUSED_NETWORK = 0.6


def _visits(moe: MixtureOfExperts, ranks: ExpertRanks, tokens: Floats, uneven: Floats) -> dict[str, Floats | float]:
    """Return the axes of dispatches that send each token once to a rank, and over a network once to a node."""
    ep, etp, domain = ranks.ep, ranks.etp, ranks.domain
    nodes = np.ceil(ep * etp / domain)
    reach = etp * tokens * places_visited(moe, ep) * uneven
    limit = np.ceil(nodes * moe.groups_per_token / moe.groups)
    leaving = np.where(nodes > 1, 1.0 - domain / np.maximum(ep * etp, domain + 1.0), 1.0)
    across = tokens * np.minimum(places_visited(moe, nodes), limit) * uneven * FUSED_NETWORK / leaving
    return {"g": tokens * ep * etp, "z": reach, "y": np.where(nodes > 1, across, reach)}


def places_visited(moe: MixtureOfExperts, places: Floats) -> Floats:
    """Return how many of so many places a token visits on average, each with an equal part of the experts, of which a
    token visits any as likely as any other.
    """
    missed = np.ones_like(places)
    for chosen in range(moe.experts_per_token):
        left = np.maximum(moe.experts * (1.0 - 1.0 / places) - chosen, 0.0)
        missed = missed * left / (moe.experts - chosen)
    return np.asarray(places * (1.0 - missed))


# The spread of a router that nothing forces to be even (`routing` natural), where the runtime's description has none of
# its own: the busiest of 8 ranks then has 1.4 times its share, of 16 1.7 times. Source: assumed.
NATURAL_SPREAD = 0.1


def routed_spread(routing: str, described: float) -> float:
    """Return the spread of the load of ranks with experts: none where the load is forced to be even."""
    if routing == "balanced":
        return 0.0
    return max(described, NATURAL_SPREAD) if routing == "natural" else described


def busiest_load(ranks: Floats, spread: float) -> Floats:
    """Return the tokens of the busiest of `ranks` ranks that share experts, over the mean; from 1 to `ranks`.

    `spread` is the standard deviation of the load of one of two ranks, over the mean. That of one of more is larger by
    sqrt(ranks - 1), as if few experts had all the tokens, wherever they are; loads add up to all tokens, and are else
    taken to be normal. Source of the largest of normal values: Blom (1958).
    """
    counts, back = np.unique(ranks, return_inverse=True)
    loads = np.array([_load(count, spread) if count > 1 else 1.0 for count in counts.tolist()])
    return loads[back]


def _load(ranks: float, spread: float) -> float:
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(1.0 + spread * math.sqrt(ranks) * largest, ranks)
