"""How many GPUs of a cluster can exchange data, and which of its links are not described.

A rate of zero means that there is no path. It is found here, before anything is divided by it: every command that plans
asks how far the links of a cluster reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from topology.cluster import ASSUMED, Cluster, LinkState, Nic
from topology.errors import BadCluster
from topology.rates.groups import GroupShape, group_rates
from topology.rates.node_rates import HOST_KINDS, NodeRates, node_rates

UNCONFIRMED = "unconfirmed"  # in the source of a figure that nothing published confirms


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """`gpus` GPUs of a cluster can exchange data, nodes filled in order; `why` not all (empty where all can)."""

    gpus: int
    why: str = ""


def reach(cluster: Cluster) -> Reach:
    """Return how many GPUs of `cluster` can work on one plan."""
    entry = _found.get(id(cluster))
    if entry is None or entry[0] is not cluster:
        if len(_found) >= 64:
            _found.clear()
        entry = _found[id(cluster)] = (cluster, _reach(cluster))
    return entry[1]


# Each entry keeps its cluster alive, so that an id cannot come to mean another cluster.
_found: dict[int, tuple[Cluster, Reach]] = {}


def _reach(cluster: Cluster) -> Reach:
    if sliced := sliced_gpus(cluster):
        named = ", ".join(map(str, sliced[:8]))
        return Reach(
            gpus=0, why=f"MIG is enabled on GPU {named}: programs see instances of it, without links between them"
        )
    per_node = cluster.gpus_per_node
    for size in range(per_node, 1, -1):
        shape = GroupShape(ranks=size, ranks_per_node=size)
        if group_rates(cluster, shape).intra_bytes_per_s > 0:
            break
    else:
        size = 1
    if size < per_node:
        return Reach(gpus=size, why=f"{size} of the {per_node} GPUs of a node have working links to each other")
    if cluster.node_count == 1:
        return Reach(gpus=cluster.gpu_count)
    between = GroupShape(ranks=2, ranks_per_node=1, siblings=per_node)
    if group_rates(cluster, between).inter_bytes_per_s > 0:
        return Reach(gpus=cluster.gpu_count)
    return Reach(gpus=per_node, why=f"the {cluster.node_count} nodes are not joined: {_why_unconnected(cluster)}")


def _why_unconnected(cluster: Cluster) -> str:
    for position, group in enumerate(cluster.groups):
        node, which = group.node, f" of node group {position}" if len(cluster.groups) > 1 else ""
        if not node.nics:
            return f"the nodes{which} have no network port"
        if not any(nic.up for nic in node.nics):
            return f"all network ports{which} are down"
        if not any(nic.up and nic.bytes_per_s != 0 for nic in node.nics):
            return f"the network ports{which} have a rate of zero"
    return "no network joins them" if cluster.fabric is None else "some of their GPUs reach no working network port"


def sliced_gpus(cluster: Cluster) -> tuple[int, ...]:
    """Return the GPUs of the cluster on which a probe found MIG instances."""
    here = {gpu.index for group in cluster.groups for gpu in group.node.gpus}
    found = {gpu for finding in cluster.findings if finding.code == "mig" for gpu in finding.gpus}
    return tuple(sorted(found & here))


def mixed_gpus(cluster: Cluster) -> list[str]:
    """Return a sentence where the cluster has several kinds of GPU: a step waits for the slowest of them."""
    used = {gpu.kind for group in cluster.groups for gpu in group.node.gpus}
    if len(used) < 2:
        return []
    titles, slowest = ", ".join(sorted(cluster.kind(name).title for name in used)), cluster.slowest_kind.title
    return [
        f"GPUs of several kinds ({titles}): every one is planned as the slowest, {slowest}, with the smallest memory"
    ]


def cluster_caveats(cluster: Cluster) -> list[str]:
    """Return a sentence for each part of the cluster that plans assume, or take at its slowest."""
    found = [finding.what for finding in cluster.findings if finding.what.startswith(ASSUMED)]
    caveats = [*(what.removeprefix(ASSUMED) for what in found), *mixed_gpus(cluster), *_unconfirmed(cluster)]
    sizes = sorted({len(group.node.gpus) for group in cluster.groups})
    if len(sizes) > 1:
        caveats.append(
            f"nodes of {' and '.join(map(str, sizes))} GPUs: groups inside a node are planned for {sizes[0]}"
        )
    if len({_network(group.node.nics) for group in cluster.groups}) > 1:
        caveats.append("nodes with different network ports: every one is planned as the slowest")
    for position in range(len(cluster.groups)):
        caveats += _unlisted(node_rates(cluster, position))
    return list(dict.fromkeys(caveats))


def _unconfirmed(cluster: Cluster) -> Iterator[str]:
    """Return a sentence for each kind of GPU with figures that no published source confirms."""
    for kind in cluster.gpu_kinds:
        fields = [
            name if source.startswith(UNCONFIRMED) else f"some of {name}"
            for name, source in kind.sources.items()
            if UNCONFIRMED in source
        ]
        if fields:
            yield f"figures of {kind.title or kind.name} that no published source confirms: {', '.join(fields)}"


def _network(nics: Sequence[Nic]) -> tuple[tuple[float, bool], ...]:
    return tuple(sorted((nic.bytes_per_s or 0.0, nic.up) for nic in nics))


def _unlisted(rates: NodeRates) -> Iterator[str]:
    """Return what is assumed about links that the node does not list or whose state is unknown."""
    node = rates.node
    hosted = {end for link in node.links if link.kind in HOST_KINDS for end in (link.a, link.b)}
    bare = [gpu.index for gpu in node.gpus if gpu.vertex not in hosted]
    if bare and len(node.gpus) > 1:
        yield (
            f"the links of GPU {', '.join(map(str, bare[:8]))} to the host are not listed:"
            " taken as a slot of the card's own rate"
        )
    weak = sorted({end for link in node.links if link.state is LinkState.DEGRADED for end in (link.a, link.b)})
    if weak := [end for end in weak if end.startswith("gpu")]:
        yield f"links of {', '.join(weak[:8])} are degraded: groups with them go by the slowest of their links"
    absent = sum(link.state is LinkState.ABSENT for link in node.links)
    if absent:
        yield f"{absent} links of a node are absent: planned without them"


def plannable(cluster: Cluster) -> bool:
    """Return whether the rates and the memory of the cluster's GPUs are known."""
    named = {kind.name for kind in cluster.gpu_kinds}
    used = {gpu.kind for group in cluster.groups for gpu in group.node.gpus}
    if not cluster.gpu_count or not used <= named:
        return False
    kind = cluster.slowest_kind
    return bool(kind.peak_flops and kind.memory_bytes_per_s and kind.sm_count and cluster.gpu_memory_bytes)


def require_plannable(cluster: Cluster) -> None:
    """Raise BadCluster where there are no GPUs, or where their rates or memory are not known."""
    if not cluster.gpu_count:
        raise BadCluster(f"{cluster.name} shows no GPU", remedy="capture nvidia-smi topo -m, which lists them")
    if not plannable(cluster):
        raise BadCluster(
            f"the GPUs of cluster {cluster.name} are of an unknown model",
            why="without its rates and memory nothing can be predicted, and they are not guessed",
            remedy="name it with the capture, such as --gpu h100-sxm; "
            "planner probe --from CAPTURE --gpu h100-sxm --out cluster.json makes a cluster file",
        )
