"""Write a cluster in the formats of other simulators: ASTRA-sim's network file, SimAI's edge list.

Formats: astra-sim @518bd513 inputs/network/; aliyun/SimAI @071ec084
astra-sim-alibabacloud/inputs/topo/gen_Topo_Template.py.
"""

from __future__ import annotations

from topology.cluster import Cluster, FabricKind, LinkKind, Node
from topology.errors import BadCluster, Infeasible
from topology.rates.node_rates import HOST_LATENCY_S, NVLINK_LATENCY_S, NodeRates, node_rates


def to_astra_sim(cluster: Cluster, *, between_nodes: str = "Switch") -> str:
    """Return the cluster as an ASTRA-sim analytical network file: one dimension in a node, one between nodes.

    Rates are GB/s per direction and GPU, latencies ns per link (a `Switch` is two links). A measured rate below the
    nominal one is used instead. Raises Infeasible for what such dimensions cannot express: unlike nodes or GPUs,
    bridged pairs, partial meshes, or a GPU off the fabric.
    """
    if between_nodes not in {"Switch", "Ring", "FullyConnected"}:
        raise BadCluster(f"ASTRA-sim has no {between_nodes!r}", remedy="use Switch, Ring or FullyConnected")
    _require_gpus(cluster)
    if len(cluster.groups) != 1:
        raise Infeasible(f"{cluster.name} has unlike nodes", why="an ASTRA-sim network is the same everywhere")
    rates, count = node_rates(cluster), len(cluster.groups[0].node.gpus)
    dimensions: list[tuple[str, int, float, float]] = []
    if count > 1:
        dimensions.append(_scale_up(rates, count))
    if cluster.node_count > 1:
        if cluster.fabric is None:
            raise Infeasible(
                f"{cluster.name} has no network between its nodes", remedy="give it network ports and a fabric"
            )
        if cluster.fabric.oversubscription > 1 and cluster.node_count > cluster.fabric.nodes_per_leaf:
            raise Infeasible(
                f"the network of {cluster.name} is oversubscribed above the leaf",
                why="one dimension has one rate",
                remedy="export as an edge list instead",
            )
        per_gpu = sum(nic.bytes_per_s or 0.0 for nic in rates.node.nics if nic.up) / count
        latency = cluster.fabric.latency_s / (2 if between_nodes == "Switch" else 1)
        dimensions.append((between_nodes, cluster.node_count, per_gpu, latency))
    if not dimensions:
        raise Infeasible(f"{cluster.name} is a single GPU", why="there is no network to describe")

    kinds, counts, speeds, delays = zip(*dimensions, strict=True)
    return (
        f"# {cluster.name.encode('ascii', 'replace').decode().replace(chr(10), ' ')}\n"
        f"topology: [ {', '.join(kinds)} ]  # one entry per dimension, inside first\n"
        f"npus_count: [ {', '.join(map(str, counts))} ]\n"
        f"bandwidth: [ {', '.join(f'{rate / 1e9:.10g}' for rate in speeds)} ]  # GB/s, one direction\n"
        f"latency: [ {', '.join(f'{delay * 1e9:.10g}' for delay in delays)} ]  # ns per link\n"
    )


def _require_gpus(cluster: Cluster) -> None:
    if not cluster.gpu_count:
        raise Infeasible(f"{cluster.name} shows no GPU", why="there is no network to describe")


def _scale_up(rates: NodeRates, count: int) -> tuple[str, int, float, float]:
    """Return the dimension inside a node: its kind (Switch, FullyConnected or Ring), GPUs, bytes/s and latency."""
    every = range(count)
    name = rates.node.name
    if len(rates.on_fabric) < count:
        raise Infeasible(f"a GPU of {name} is off the fabric", why="the dimensions of ASTRA-sim have no gaps")
    ports = {rates.ports.get(gpu) for gpu in every}
    if len(ports) == 1 and None not in ports:
        _, rate, _ = rates.ports[0]
        return "Switch", count, rate, _port_latency(rates.node, LinkKind.NVSWITCH, NVLINK_LATENCY_S / 2)
    if rates.wires:
        speeds = {rate for rate, _ in rates.wires.values()}
        if len(speeds) == 1 and not rates.ports:
            latency = _port_latency(rates.node, LinkKind.NVLINK, NVLINK_LATENCY_S)
            if len(rates.wires) == count * (count - 1) // 2:
                return ("Ring" if count == 2 else "FullyConnected"), count, speeds.pop(), latency
            if count > 2 and set(rates.wires) == {(min(a, b), max(a, b)) for a in every for b in [(a + 1) % count]}:
                return "Ring", count, speeds.pop(), latency
        raise Infeasible(
            f"the NVLinks of {name} are neither a switch, a full mesh nor a ring",
            why="ASTRA-sim's analytical network has only these",
            remedy="export as an edge list instead",
        )
    # Without NVLink: a switch, if all GPUs are below the same PCIe switch or CPU.
    hubs = {tuple(rates.host.get(gpu.vertex, {}).items()) for gpu in rates.node.gpus}
    if len(hubs) == 1 and len(next(iter(hubs))) == 1:
        ((_, (rate, _)),) = hubs.pop()
        return "Switch", count, rate, HOST_LATENCY_S / 2
    raise Infeasible(
        f"the GPUs of {name} share PCIe uplinks or sockets unevenly",
        why="one dimension has one rate",
        remedy="export as an edge list instead",
    )


def _port_latency(node: Node, kind: LinkKind, default: float) -> float:
    latencies = [link.latency_s for link in node.links if link.kind is kind]
    return max(latencies, default=0.0) or default


def to_simai(cluster: Cluster) -> str:
    """Return the cluster as a SimAI topology: a header, the switch ids, and one line per link.

    Header: vertices, GPUs per node, NVSwitches, other switches, links, GPU type. Ids: GPUs, then one NVSwitch per node
    (its ports carry a GPU's whole NVLink rate), then leaves, then the spine. SimAI has no NICs: a GPU's link to its
    leaf has the GPU's share of the rate of the node's ports. Raises Infeasible for nodes without one NVSwitch for all
    GPUs.
    """
    _require_gpus(cluster)
    if len(cluster.groups) != 1:
        raise Infeasible(f"{cluster.name} has unlike nodes", why="SimAI's header has one count of GPUs per node")
    node, nodes = cluster.groups[0].node, cluster.node_count
    rates, per_node = node_rates(cluster), len(node.gpus)
    if per_node > 1 and ({rates.ports.get(gpu, ("",))[0] for gpu in range(per_node)} == {""} or not rates.uniform):
        raise Infeasible(
            f"the GPUs of {node.name} do not all hang on one NVSwitch",
            why="a SimAI topology joins the GPUs of a node by NVSwitches only",
        )
    kind = cluster.slowest_kind.name.split("-")[0].upper()
    gpus = nodes * per_node
    hubs = nodes if per_node > 1 else 0
    edges: list[tuple[int, int, float, float]] = []
    for number in range(gpus):
        if hubs:
            port = rates.ports[number % per_node][1]
            edges.append((number, gpus + number // per_node, port, NVLINK_LATENCY_S / 2))
    leaves: dict[tuple[int, int], int] = {}
    fabric = cluster.fabric
    share = sum(nic.bytes_per_s or 0.0 for nic in node.nics if nic.up) / per_node
    if nodes > 1 and fabric is not None and share > 0:
        on_rail = fabric.kind is FabricKind.RAIL_OPTIMISED
        rail_count = len({nic.rail for nic in node.nics}) if on_rail else 1
        load: dict[int, float] = {}
        for number in range(gpus):
            at = (number // per_node // fabric.nodes_per_leaf, number % per_node % rail_count)
            leaf = leaves.setdefault(at, gpus + hubs + len(leaves))
            load[leaf] = load.get(leaf, 0.0) + share
            edges.append((number, leaf, share, fabric.latency_s / 2))
        spine = gpus + hubs + len(leaves)
        full = fabric.nodes_per_leaf * share * per_node / rail_count
        edges += [(leaf, spine, full / fabric.oversubscription, fabric.latency_s / 2) for leaf in load]
    switches = len(leaves) + (1 if leaves else 0)
    header = f"{gpus + hubs + switches} {per_node} {hubs} {switches} {len(edges)} {kind}"
    ids = " ".join(str(i) for i in range(gpus, gpus + hubs + switches))
    lines = [f"{a} {b} {rate * 8 / 1e9:.10g}Gbps {latency * 1e3:.10g}ms 0" for a, b, rate, latency in edges]
    return "\n".join([header, ids, *lines]) + "\n"
