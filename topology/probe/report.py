"""The output of `planner probe`: JSON (`probe_json`) and text (`explain`)."""

from __future__ import annotations

from collections.abc import Iterator

from topology.cluster import SCHEMA_VERSION, Cluster, Gpu, Link, LinkKind, LinkState, Node, Source, VertexKind
from topology.codec import JsonObject, to_builtins
from topology.probe.machine import components
from topology.rates.graph import bisection_bytes_per_s, crossing_kinds, graph
from topology.rates.node_rates import node_rates

MAX_SPLIT_GPUS = 16  # GPUs of the largest machine built whose pairs differ

PATH_CLASS_TEXT = {
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "between PCIe host bridges of one NUMA node",
    "SYS": "across CPU sockets",
}


def islands(node: Node) -> list[list[int]]:
    """Return the groups of two or more GPUs that NVLink (or AMD's XGMI) connects; absent links do not count."""
    hubs: dict[str, list[int]] = {}
    joined: list[tuple[int, int]] = []
    index_of = {gpu.vertex: gpu.index for gpu in node.gpus}
    for link in node.links:
        if link.state is LinkState.ABSENT:
            continue
        if link.kind is LinkKind.NVLINK and link.a in index_of and link.b in index_of:
            joined.append((index_of[link.a], index_of[link.b]))
        elif link.kind is LinkKind.NVSWITCH and link.a in index_of:
            hubs.setdefault(link.b, []).append(index_of[link.a])
    for members in hubs.values():
        joined += [(members[0], other) for other in members[1:]]
    return components(sorted(index_of.values()), joined)


def probe_json(cluster: Cluster) -> JsonObject:
    """Return the first node as plain data: bytes, bytes per second per direction, labels as printed."""
    node = cluster.groups[0].node
    return {
        "schema_version": SCHEMA_VERSION,
        "name": cluster.name,
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "kind": gpu.kind,
                "pci_bus_id": gpu.pci_bus_id,
                "memory_bytes": gpu.memory_bytes,
                "numa": gpu.numa,
                "numa_affinity": gpu.numa_affinity,
                "cpu_affinity": gpu.cpu_affinity,
                "healthy": gpu.healthy,
            }
            for gpu in node.gpus
        ],
        "pairs": dict(node.pairs),
        "islands": islands(node),
        "nics": [
            {"label": nic.label, "name": nic.name, "bytes_per_s": nic.bytes_per_s, "numa": nic.numa, "up": nic.up}
            for nic in node.nics
        ],
        "closest_nics": {gpu: list(nics) for gpu, nics in node.closest_nics.items()},
        "vertices": to_builtins(node.vertices),
        "links": to_builtins(node.links),
        "bisection": _bisection(cluster),
        "findings": to_builtins(cluster.findings),
    }


# Sources of a rate, the most reliable first.
_SOURCE_ORDER = (Source.MEASURED, Source.FITTED, Source.DATASHEET, Source.ASSUMED)


def _bisection(cluster: Cluster) -> JsonObject | None:
    """Return the bisection bandwidth of a node: the least rate between two halves of its GPUs, over all splits.

    In bytes per second per direction, with the least reliable source of the link rates; None for fewer than two GPUs,
    where no rate is known, and where unlike GPUs make too many splits to try.
    """
    if len(cluster.groups[0].node.gpus) > MAX_SPLIT_GPUS and not node_rates(cluster).uniform:
        return None
    g = graph(cluster, 1)
    rate = bisection_bytes_per_s(g)
    if rate <= 0:
        return None
    kinds = crossing_kinds(g)
    sources = {
        facts["source"]
        for _, _, facts in g.edges(data=True)
        if facts["rate_bytes_per_s"] > 0 and (kinds is None or facts["kind"] in kinds)
    }
    return {"bytes_per_s": rate, "source": max(sources, key=_SOURCE_ORDER.index).value}


def _bandwidth_lines(cluster: Cluster) -> Iterator[str]:
    """Return lines about the bisection bandwidth, and about the slowest pair where pairs differ."""
    bisection = _bisection(cluster)
    if bisection is None:
        return
    rate = f"{bisection['bytes_per_s'] / 1e9:.0f} GB/s each way ({bisection['source']} rates)"
    yield f"between any two halves of the GPUs at least {rate}"
    pairs = node_rates(cluster).pairs()
    slowest, fastest_rate = min(pairs, key=pairs.__getitem__), max(pairs.values())
    if pairs[slowest] < fastest_rate:
        a, b = sorted(slowest)
        yield f"the slowest pair is {a}-{b} with {pairs[a, b] / 1e9:.0f} GB/s, the fastest has {fastest_rate / 1e9:.0f}"


def explain(cluster: Cluster) -> str:
    """Return the machine in English: how GPUs are connected, what hangs on which switch, and the findings."""
    node = cluster.groups[0].node
    lines = [_title(cluster, node)]
    groups = islands(node)
    hub_of = {
        link.a: link.b for link in node.links if link.kind is LinkKind.NVSWITCH and link.state is not LinkState.ABSENT
    }
    lines += [_island(node, group, hub_of) for group in groups]
    inside = [set(group) for group in groups]
    lines += _between(node, inside)
    lines += _bandwidth_lines(cluster)
    lines += _hosts(node)
    lines += _nics(node)
    for item in cluster.findings:
        lines += ["", f"{item.severity.value.upper()}: {item.what}"]
        lines += [
            f"  {word}: {text}" for word, text in _labelled_reasons(item.why, item.consequence, item.remedy) if text
        ]
    return "\n".join(lines) + "\n"


def _labelled_reasons(why: str, consequence: str, remedy: str) -> list[tuple[str, str]]:
    return [("why", why), ("so", consequence), ("do", remedy)]


def _title(cluster: Cluster, node: Node) -> str:
    count = len(node.gpus)
    printed = {gpu.name for gpu in node.gpus if gpu.name}
    known = sorted(printed or {gpu.kind for gpu in node.gpus} - {"unknown"})
    model = f" ({', '.join(known)})" if known else ""
    return f"{cluster.name}: {count} GPU{'s' if count != 1 else ''}{model}"


def _ids(gpus: list[int]) -> str:
    """Return the numbers of GPUs, three and more in a row as a range: `GPUs 0-3, 6`."""
    runs: list[list[int]] = []
    for one in sorted(gpus):
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(parts)}"


def _rate(link: Link) -> str:
    rate = link.best_bytes_per_s
    return f", {rate / 1e9:.0f} GB/s each way ({link.source.value})" if rate else ""


def _island(node: Node, group: list[int], hub_of: dict[str, str]) -> str:
    """Return a sentence about an NVLink group: a switch, a full mesh, or the pairs of a partial mesh."""
    members = set(group)
    hub = hub_of.get(f"gpu{group[0]}")
    if hub is not None:
        spokes = [link for link in node.links if link.b == hub and link.state is not LinkState.ABSENT]
        counts = sorted({link.count for link in spokes}, reverse=True)
        text = f"{_ids(group)} share an NVSwitch fabric: {' or '.join(map(str, counts))} links a GPU{_rate(spokes[0])}"
        return text + ", the same links for every peer"
    cables = [
        link for link in node.links if link.kind is LinkKind.NVLINK and {int(link.a[3:]), int(link.b[3:])} <= members
    ]
    labels = sorted({link.label for link in cables}, key=lambda label: (len(label), label), reverse=True)
    full = len(cables) == len(group) * (len(group) - 1) // 2
    if full and len(labels) == 1:
        return f"{_ids(group)} are fully connected by {labels[0]}{_rate(cables[0])} per pair"
    pairs = "; ".join(
        f"{label}: {' '.join(f'{link.a[3:]}-{link.b[3:]}' for link in cables if link.label == label)}"
        for label in labels
    )
    return f"{_ids(group)} are {'fully' if full else 'partly'} connected by NVLink: {pairs}"


def _between(node: Node, inside: list[set[int]]) -> Iterator[str]:
    """Return lines about the pairs outside the NVLink groups, by path class."""
    by_class: dict[str, list[tuple[int, int]]] = {}
    missing: list[str] = []
    indices = [gpu.index for gpu in node.gpus]
    for at, a in enumerate(sorted(indices)):
        for b in sorted(indices)[at + 1 :]:
            label = node.pairs.get(f"{a}-{b}")
            if label is None:
                if not any({a, b} <= group for group in inside):
                    missing.append(f"{a}-{b}")
            elif not label.startswith(("NV", "XGMI")):
                by_class.setdefault(label, []).append((a, b))
    for label in ("PIX", "PXB", "PHB", "NODE", "SYS"):
        pairs = by_class.pop(label, [])
        groups = components(sorted(indices), pairs)
        for group in groups:
            inner = [pair for pair in pairs if set(pair) <= set(group)]
            how = f"{label} ({PATH_CLASS_TEXT[label]})"
            if len(inner) == len(group) * (len(group) - 1) // 2:
                yield (
                    f"{_ids(group)} reach each other only by {how}"
                    if label != "PIX"
                    else f"{_ids(group)} meet by {how}"
                )
            else:
                shown = " ".join(f"{a}-{b}" for a, b in inner[:24]) + (" ..." if len(inner) > 24 else "")
                yield f"only by {how}: {shown}"
    yield from (f"class {label}: {len(pairs)} pairs" for label, pairs in by_class.items())
    if missing:
        yield f"nothing was read about: {' '.join(missing[:24])}{' ...' if len(missing) > 24 else ''}"


def _hosts(node: Node) -> Iterator[str]:
    """Return one line per CPU and PCIe switch with the devices below it."""
    children: dict[str, list[str]] = {}
    for link in node.links:
        if link.kind is LinkKind.PCIE:
            children.setdefault(link.b, []).append(link.a)
    for vertex in node.vertices:
        if vertex.kind is VertexKind.NVSWITCH or vertex.id not in children:
            continue
        what = {"cpu_unknown": "an unknown CPU"}.get(vertex.id, vertex.id)
        yield f"attached to {what}: {', '.join(children[vertex.id])}"


def _nics(node: Node) -> list[str]:
    """Return one line per set of nearest NICs, with the GPUs that share it."""
    same: dict[tuple[str, ...], list[Gpu]] = {}
    for gpu in node.gpus:
        nics = node.closest_nics.get(str(gpu.index))
        if nics:
            same.setdefault(nics, []).append(gpu)
    return [
        f"nearest NIC of {_ids([gpu.index for gpu in gpus])}: {', '.join(nics[:8])}{' ...' if len(nics) > 8 else ''}"
        for nics, gpus in same.items()
    ]
