"""Cluster files: the small form that people write by hand, and the full form that this program writes.

Two forms of JSON. The **full** form is a `Cluster` as `save_cluster` writes it, with `schema_version`. The **small**
form is for people:

    {"gpu": "a100-pcie-80gb", "gpus_per_node": 4, "nodes": 2, "interconnect": "nvlink",
     "bridges": [[0, 1], [2, 3]], "nic_gbit_per_gpu": 50, "oversubscription": 2}

| key | meaning |
|---|---|
| `gpu` | a GPU of the catalogue, by name or alias; the only key that must be there |
| `gpus_per_node`, `nodes` | counts; what is left out is as usual for that GPU, and one node |
| `interconnect` | `nvswitch`, `nvlink` (GPU to GPU) or `pcie` |
| `bridges` | pairs joined by NVLink, `[a, b]` or `[a, b, links]`; without it, the usual wiring |
| `nic_gbit_per_gpu` | network Gb/s per GPU, one port each; 0 for none |
| `fabric` | `rail-optimised`, `fat-tree` or `ethernet` |
| `oversubscription` | downlink over uplink capacity of a leaf switch, 1 or more |
| `nodes_per_leaf` | nodes that share a leaf switch |
| `pcie` | slot generation, `gen3` to `gen6`, when the slot is slower than the card |
| `slow_gpus` | GPUs of the first node that compute slower, each with the share of its rate: `[[3, 0.8]]` |
| `slow_links`, `slow_ports` | the same of the NVLink of GPUs, and of their network ports |
| `host_memory_gib` | memory of a node's host |
| `name` | what to call it |

A list of such objects, `{"groups": [...]}` of them, or `8xH100+8xA100-80GB`: machines of several kinds on one fabric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from topology.catalog.clusters import (
    adapt_platform,
    cluster,
    cluster_from_case,
    default_platform,
    is_catalog_name,
    one_port_per_gpu,
)
from topology.catalog.gpus import gpu_kind
from topology.catalog.platform import build, take_gpus
from topology.catalog.spoken import FORMS, is_spoken, spoken_cluster
from topology.catalog.verify import require_possible
from topology.cluster import ASSUMED, SCHEMA_VERSION, Cluster, Finding, GpuKind, LinkState, Node, NodeGroup, Severity
from topology.codec import JsonObject, convert, is_file, parse_json, read_json, require_schema, to_json, write_text
from topology.errors import BadCluster, BadInput
from topology.units import GIB

_JOINED = re.compile(r"[+,;&]|\band\b")  # between kinds of nodes of one cluster, in a text that describes it


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCluster:
    """The hand-written form; see the module's table."""

    gpu: str
    gpus_per_node: int | None = None
    nodes: int | None = None
    interconnect: str | None = None
    nic_gbit_per_gpu: float | None = None
    bridges: tuple[tuple[int, ...], ...] | None = None
    oversubscription: float | None = None
    nodes_per_leaf: int | None = None
    fabric: str | None = None
    pcie: str | None = None
    slow_gpus: tuple[tuple[float, ...], ...] = ()
    slow_links: tuple[tuple[float, ...], ...] = ()
    slow_ports: tuple[tuple[float, ...], ...] = ()
    host_memory_gib: float | None = None
    name: str | None = None


def load_cluster(name_or_path: str | Path, gpus: int | None = None) -> Cluster:
    """Return a cluster by a catalogue name, as people say it (`2x8xH100`), as JSON or from a file, cut to `gpus` GPUs.

    Raises BadCluster for an unknown name or an impossible cluster, BadInput for a file that cannot be read.
    """
    text = str(name_or_path)
    if not text.strip():
        raise BadCluster("the name of the cluster is empty", remedy=f"give {FORMS}")
    if isinstance(name_or_path, str) and is_catalog_name(text):
        return cluster(text, gpus)
    if isinstance(name_or_path, str) and (said := _said(text)):
        return said if gpus is None else take_gpus(said, gpus)
    if isinstance(name_or_path, str) and not _looks_like_path(text):
        _refuse_bare_gpu(text)
        return cluster(text, gpus)  # raises, with near names
    loaded = parse_cluster(read_json(name_or_path), where=text)
    return loaded if gpus is None else take_gpus(loaded, gpus)


def is_said(text: str) -> bool:
    """Return whether `text` itself says a cluster, or tries to: no file is read for it."""
    if is_catalog_name(text) or _is_json(text):
        return True
    return not _looks_like_path(text) and all(map(is_spoken, _parts(text)))


def _is_json(text: str) -> bool:
    return text.lstrip().startswith(("{", "["))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in _JOINED.split(text)]


def _refuse_bare_gpu(text: str) -> None:
    try:
        kind = gpu_kind(text)
    except BadCluster:
        return
    raise BadCluster(
        f"{text[:60]!r} is a GPU, not a cluster",
        why="how many there are was not said",
        remedy=f"for example {default_platform(kind).gpus_per_node}x{text}",
    )


def _said(text: str) -> Cluster | None:
    """Return the cluster that is written out in `text`; None where `text` is a name or a path."""
    if _is_json(text):
        return parse_cluster(parse_json(text, where="the cluster"), where="the cluster")
    if is_catalog_name(text) or not is_said(text):
        return None
    nodes = [_spoken(part) for part in _parts(text)]
    return nodes[0] if len(nodes) == 1 else joined(nodes, where=f"{text[:60]!r}")


def _spoken(text: str) -> Cluster:
    built, assumed = spoken_cluster(text)
    return replace(built, findings=(*built.findings, *_findings(assumed, f"{text[:60]!r}", "state it")))


def parse_cluster(document: Any, *, where: str) -> Cluster:
    """Return the cluster of a decoded JSON document of either form, verified. Raises BadInput or BadCluster."""
    if isinstance(document, dict) and isinstance(document.get("gpu"), list):
        raise _listed(where)
    if several := _several(document):
        return joined([parse_cluster(one, where=f"{where}, part {n}") for n, one in enumerate(several, 1)], where=where)
    if not isinstance(document, dict):
        raise BadInput(f"{where} is not a cluster", why="expected a JSON object", remedy=_FORMS)
    if "groups" in document or "schema_version" in document:
        loaded = _full(document, where)
    elif "gpu" in document:
        loaded = _small(document, where)
    else:
        raise BadInput(f"{where} does not say which GPU it has", why=_without_gpu(document), remedy=_FORMS)
    require_possible(loaded, where=where)
    return loaded


def _without_gpu(document: JsonObject) -> str:
    """Return why a JSON object describes no cluster, with the known field nearest in name to each unknown one."""
    known = [field.name for field in fields(SmallCluster)]
    meant = [(name, get_close_matches(name, known, n=1)) for name in document if name not in known]
    unknown = ", ".join(f"{name[:40]!r} (did you mean {near[0]!r}?)" for name, near in meant if near)
    return 'neither "gpu" nor "groups" is stated' + (f"; nothing reads {unknown}" if unknown else "")


def _several(document: Any) -> list[Any]:
    """Return the descriptions of nodes in the small form that a document lists; empty when it lists none."""
    several = document if isinstance(document, list) else document.get("groups") if isinstance(document, dict) else None
    small = isinstance(several, list) and any(isinstance(one, dict) and "gpu" in one for one in several)
    return list(several) if small and several else []


def _listed(where: str) -> BadCluster:
    return BadCluster(
        f"{where} has GPUs of several kinds in one node",
        why="which of them is where was not said",
        remedy='one object for each kind of node: [{"gpu": "h100"}, {"gpu": "a100-80gb"}]',
    )


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write `cluster` in the full form, atomically. Raises BadInput when the place cannot be written."""
    write_text(path, to_json(cluster) + "\n")


_FORMS = 'give {"gpu": …, "gpus_per_node": …, "nodes": …}, or a file written by this program'


def _looks_like_path(text: str) -> bool:
    words = re.sub(r"(\d\s*gb(?:it)?)/s(?=$|[\s+])", r"\1", text, flags=re.IGNORECASE)  # 8xH100@400Gb/s
    return any(mark in words for mark in ("/", "\\", ".json")) or is_file(text)


def _full(document: JsonObject, where: str) -> Cluster:
    remedy = "update meshwright, or write the file again with this release"
    require_schema(document, SCHEMA_VERSION, where=where, remedy=remedy)
    return convert(document, Cluster, where=where)


def _small(document: JsonObject, where: str) -> Cluster:
    for key in ("slow_gpus", "slow_links", "slow_ports"):
        if not isinstance(document.get(key, []), list):
            raise BadCluster(
                f"{where}: {key} is no list", why="it lists GPUs, each with the share of its rate", remedy="[[3, 0.8]]"
            )
    small = convert(document, SmallCluster, where=where)
    kind = gpu_kind(small.gpu)
    usual = default_platform(kind)
    per_node = small.gpus_per_node if small.gpus_per_node is not None else usual.gpus_per_node
    # A file that lists bridges and says nothing else means direct links.
    interconnect = small.interconnect or ("nvlink" if small.bridges else usual.interconnect)
    _, assumed = cluster_from_case(
        {
            "gpu": small.gpu,
            "gpus_per_node": small.gpus_per_node,
            "nodes": small.nodes,
            "interconnect": interconnect if small.bridges else small.interconnect,
            "nic_gbit_per_gpu": small.nic_gbit_per_gpu,
        },
        already_stated=[key for key in ("fabric", "oversubscription") if getattr(small, key) is not None],
    )
    platform = adapt_platform(usual, kind, gpus_per_node=per_node, interconnect=interconnect)
    if small.bridges is not None:
        if interconnect == "nvswitch":
            raise BadCluster(f"{where} gives bridges and an NVSwitch", remedy='say "interconnect": "nvlink"')
        platform = replace(platform, bridges=small.bridges)
    if small.nic_gbit_per_gpu is not None:
        platform = one_port_per_gpu(platform, small.nic_gbit_per_gpu)
    changes: JsonObject = {
        key: value
        for key in ("oversubscription", "nodes_per_leaf", "fabric", "pcie", "name")
        if (value := getattr(small, key)) is not None
    }
    nodes = small.nodes if small.nodes is not None else 1
    changes.setdefault("name", f"{nodes} x {per_node} {kind.name}")
    built = build(replace(platform, **changes), nodes=nodes)
    findings = _findings(assumed, where, "state it in the file")
    built = replace(built, findings=(*built.findings, *findings))
    if small.host_memory_gib is not None:
        built = with_host_memory(built, round(small.host_memory_gib * GIB), where)
    slow = {"gpus": small.slow_gpus, "links": small.slow_links, "ports": small.slow_ports}
    return with_slow_parts(built, **slow, where=where) if any(slow.values()) else built


def _findings(assumed: Iterable[str], where: str, remedy: str) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            severity=Severity.INFO,
            what=ASSUMED + text,
            why=f"{where} does not say",
            consequence="estimates rest on it",
            remedy=remedy,
        )
        for text in assumed
    )


def joined(parts: Sequence[Cluster], *, where: str) -> Cluster:
    """Return one cluster with the nodes of all `parts`. Raises BadCluster where a part has no network."""
    fabrics = [part.fabric for part in parts]
    bare = next((part for part in parts if part.fabric is None), None)
    if bare is not None or any(fabric is None for fabric in fabrics):
        raise BadCluster(
            f"{where} joins {bare.name if bare else 'nodes'} without a network to others",
            why="ranks of one step exchange data over a fabric that all nodes are on",
            remedy='say "nic_gbit_per_gpu" of every part, or plan each part by itself with --cluster',
        )
    known = [fabric for fabric in fabrics if fabric is not None]
    return Cluster(
        name=" + ".join(part.name for part in parts),
        gpu_kinds=tuple({kind.name: kind for part in parts for kind in part.gpu_kinds}.values()),
        groups=tuple(group for part in parts for group in part.groups),
        fabric=replace(
            known[0],
            oversubscription=max(fabric.oversubscription for fabric in known),
            latency_s=max(fabric.latency_s for fabric in known),
            rdma=all(fabric.rdma for fabric in known),
        ),
        findings=tuple(finding for part in parts for finding in part.findings),
    )


def with_slow_parts(
    cluster: Cluster,
    *,
    gpus: Sequence[tuple[float, ...]] = (),
    links: Sequence[tuple[float, ...]] = (),
    ports: Sequence[tuple[float, ...]] = (),
    where: str,
) -> Cluster:
    """Return a cluster of whose first node some `gpus` compute at a share of their rate, and some NVLink `links` and
    network `ports` of GPUs carry a share of theirs: pairs of a GPU and the share. Raises BadCluster.
    """
    first, *others = cluster.groups
    node, kinds = first.node, list(cluster.gpu_kinds)
    for gpu, share in _pairs(gpus, node, f"{where}: slow_gpus"):
        kind = _slower(cluster.kind(node.gpus[gpu].kind), share)
        kinds.append(kind)
        slow = tuple(replace(one, kind=kind.name) if at == gpu else one for at, one in enumerate(node.gpus))
        node = replace(node, gpus=slow)
    for gpu, share in _pairs(links, node, f"{where}: slow_links"):
        end = node.gpus[gpu].vertex
        changed = tuple(
            replace(
                link,
                bytes_per_s=_share(link.bytes_per_s, share),
                nccl_bytes_per_s=_share(link.nccl_bytes_per_s, share),
                state=LinkState.DEGRADED,
            )
            if end in {link.a, link.b} and link.label.startswith("NV")
            else link
            for link in node.links
        )
        if changed == node.links:
            raise BadCluster(f"{where}: slow_links names GPU {gpu}, which has no NVLink", remedy="slow_ports")
        node = replace(node, links=changed)
    for gpu, share in _pairs(ports, node, f"{where}: slow_ports"):
        if gpu >= len(node.nics):
            raise BadCluster(f"{where}: slow_ports names port {gpu} of {len(node.nics)}")
        slow_ports = tuple(
            replace(nic, bytes_per_s=_share(nic.bytes_per_s, share)) if at == gpu else nic
            for at, nic in enumerate(node.nics)
        )
        node = replace(node, nics=slow_ports)
    rest = (replace(first, count=first.count - 1),) if first.count > 1 else ()
    return replace(
        cluster,
        gpu_kinds=tuple({kind.name: kind for kind in kinds}.values()),
        groups=(NodeGroup(node=node), *rest, *others),
    )


def with_host_memory(cluster: Cluster, nbytes: int, where: str) -> Cluster:
    """Return the cluster with `host_memory_bytes` of every node's host replaced. Raises BadCluster."""
    if nbytes <= 0:
        raise BadCluster(f"{where}: host_memory_gib is not above zero", remedy='"host_memory_gib": 512')
    groups = (replace(one, node=replace(one.node, host_memory_bytes=nbytes)) for one in cluster.groups)
    return replace(cluster, groups=tuple(groups))


def _share(rate: float | None, share: float) -> float | None:
    """Return `share` of a rate; None for an unknown rate."""
    return None if rate is None else rate * share


def _pairs(pairs: Sequence[tuple[float, ...]], node: Node, where: str) -> list[tuple[int, float]]:
    for pair in pairs:
        if len(pair) != 2 or pair[0] != int(pair[0]) or not 0 <= pair[0] < len(node.gpus) or not 0 < pair[1] <= 1:
            raise BadCluster(
                f"{where} has {list(pair)}",
                why=f"each is a GPU of the first node, 0 to {len(node.gpus) - 1}, and a share of its rate, up to 1",
                remedy="[[3, 0.8]]",
            )
    return [(int(gpu), float(share)) for gpu, share in pairs]


def _slower(kind: GpuKind, share: float) -> GpuKind:
    """Return the kind with compute rates multiplied by a share, as by heat or a power limit; memory keeps its rate."""

    def scaled(rates: dict[str, float]) -> dict[str, float]:
        return {dtype: rate * share for dtype, rate in rates.items()}

    return replace(
        kind,
        name=f"{kind.name}-at-{share:.2g}",
        title=f"{kind.title} at {share:.0%}",
        aliases=(),
        peak_flops=scaled(kind.peak_flops),
        achieved_flops=scaled(kind.achieved_flops),
    )
