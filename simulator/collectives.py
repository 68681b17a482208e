"""What a collective costs on the graph: alpha-beta per group, vectorised over message sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topology.cluster import Cluster
from topology.groups import GroupRates, GroupShape, group_rates

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


@dataclass(slots=True)
class CollectiveModel:
    """Times of collectives on one cluster. `bytes` are nccl-tests' size column: the whole buffer of the operation.

    That is the input of an all-reduce, broadcast, all-to-all or send, the output of an all-gather, and the input of a
    reduce-scatter.
    """

    cluster: Cluster
    _rates: dict[GroupShape, GroupRates] = field(default_factory=dict)

    def rates(self, shape: GroupShape) -> GroupRates:
        if shape not in self._rates:
            self._rates[shape] = group_rates(self.cluster, shape)
        return self._rates[shape]

    def time_s(self, op: str, nbytes: ArrayLike, shape: GroupShape) -> NDArray[np.float64]:
        """Return seconds for `op` of `nbytes` in a group of `shape`. Zero for a group of one."""
        size = np.asarray(nbytes, dtype=np.float64)
        n = shape.ranks
        if n <= 1:
            return np.zeros_like(size)
        rates = self.rates(shape)
        steps = 2 * (n - 1) if op == "all_reduce" else n - 1
        traffic = size * steps / n  # bytes each rank sends on a ring
        if op in {"broadcast", "send_recv"}:
            traffic, steps = size, 1
        bandwidth = rates.intra_bytes_per_s * 0.8
        if shape.nodes > 1:
            bandwidth = min(bandwidth, rates.inter_bytes_per_s * 0.9)
        latency = steps * (rates.intra_latency_s if shape.nodes == 1 else rates.inter_latency_s)
        return 8e-6 + latency + traffic / bandwidth
