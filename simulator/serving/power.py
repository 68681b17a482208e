"""Power of a serving GPU as a share of its power limit."""

from __future__ import annotations

from simulator.config.estimate import Interval
from simulator.serving.deployment import Deployment
from topology.cluster import Cluster, Source

# (middle, low, high) of power over the limit, by architecture: median and 80 % of the servers of the ML.ENERGY
# leaderboard (ml-energy/leaderboard, benchmark v3 of 2025-12: vLLM, models of 8 to 480 billion parameters, one to eight
# GPUs, 8 to 4,096 answers at once), 173 on H100 SXM and 227 on B200. These servers are always busy.
DRAWN = {"Hopper": (0.74, 0.60, 0.90), "Blackwell": (0.77, 0.53, 0.95)}


def token_energy_j(cluster: Cluster, deployment: Deployment, output_tokens_per_s: float) -> Interval | None:
    """Return the joules of all GPUs per output token; None for GPUs without published power, and without answers."""
    kind = cluster.slowest_kind
    drawn = DRAWN.get(kind.architecture.split()[0].capitalize())
    if drawn is None or not kind.power_w or not output_tokens_per_s:
        return None
    middle, low, high = (share * kind.power_w * deployment.gpus / output_tokens_per_s for share in drawn)
    return Interval(value=middle, low=low, high=high, source=Source.FITTED)
