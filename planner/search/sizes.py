"""Numbers of GPUs: which there are, how a cluster with more of them is said, and how many a model takes at least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from simulator.bounds.screening import Screening
from simulator.config.optimizers import OPTIMIZERS
from topology.catalog.cluster_file import load_cluster
from topology.catalog.clusters import is_catalog_name
from topology.cluster import Cluster
from topology.errors import BadCluster, UserError

MAX_GPUS = 1 << 16
# Node counts tried one by one, for `--gpus min` and for advice; larger counts are tried by doubling.
MAX_NODES_TRIED, MAX_NODES_ADVISED = 512, 32


def min_gpus_for_state(screening: Screening) -> int:
    """Return a GPU count below which parameters and optimizer do not fit, even sharded over all GPUs."""
    spec, runtime = screening.operators.spec, screening.scenario.runtime
    param = {"float32": 4.0}.get(runtime.param_dtype, 2.0)
    master = 4.0 if spec.state.master_weights and param < 4 else 0.0
    optimizer = OPTIMIZERS.get(runtime.optimizer)
    least = optimizer and (optimizer.matrices or optimizer)  # Muon keeps less of hidden matrices than of the rest
    moments = least.state_bytes(4.0 if master else param) - least.paged if least is not None else 0.0
    return max(
        1, int(np.ceil(screening.scenario.model.parameters * (param + moments + master) / screening.capacity_bytes))
    )


def gpu_counts(cluster: Cluster, least: int, limit: int, tried: int) -> Iterator[int]:
    """Yield the possible GPU counts: up to one node, then whole nodes, which double after `tried` of them."""
    size = len(cluster.groups[0].node.gpus)
    yield from range(max(1, least), size)
    nodes = first = max(1, -(-least // size))
    while nodes * size <= limit:
        yield nodes * size
        nodes = nodes + 1 if nodes < first + tried else 2 * nodes


def most_gpus(cluster: Cluster, grow: Callable[[int], Cluster] | None) -> int:
    """Return the largest number of GPUs to choose from: MAX_GPUS, or all of a cluster that states its nodes."""
    try:
        if grow:
            grow(cluster.gpu_count + cluster.gpus_per_node)
    except UserError:
        return cluster.gpu_count
    return MAX_GPUS


def said_with_nodes(cluster: Cluster, nodes: int) -> str:
    """Return how a cluster with other `nodes` is said (2x8xh100-sxm, 2x8xh100-sxm@100GbE, 2xaws-p5); empty if no words
    say this cluster.
    """
    node, now = f"{cluster.gpus_per_node}x{cluster.slowest_kind.name}", cluster.node_count
    words = [node, *(f"{node}@{network}" for network in _networks(cluster))]
    machine = cluster.name.removeprefix(f"{now} x ")
    words += [machine] if is_catalog_name(machine) else []
    for said in words:
        with suppress(BadCluster):  # a machine that was probed is not said in numbers
            same = load_cluster(f"{now}x{said}")
            if (same.groups, same.fabric) == (cluster.groups, cluster.fabric):
                return f"{nodes}x{said}"
    return ""


def _networks(cluster: Cluster) -> Iterator[str]:
    """Yield what the network of a node may have been said to be: ports of a rate, in several spellings."""
    nics = cluster.groups[0].node.nics
    if nics and nics[0].bytes_per_s:
        ports, gbit = "" if len(nics) == 1 else f"{len(nics)}x", f"{nics[0].bytes_per_s * 8 / 1e9:g}"
        yield from (f"{ports}{gbit}{unit}" for unit in ("G", "GbE", "GbE-TCP", "GbE-RoCE"))


def with_nodes_for(cluster: Cluster, gpus: int) -> Cluster:
    """Return a cluster said in the same words, with the nodes that some GPUs take."""
    return load_cluster(said_with_nodes(cluster, -(-gpus // cluster.gpus_per_node)))
