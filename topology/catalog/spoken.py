"""Clusters as people say them: `8xH100`, `2x8xA100-40GB`, `H100:8`, `4x8xL40S@100GbE`, `4xp5.48xlarge`.

    [NODES x] [GPUS x] GPU [: GPUS] [@ NETWORK]        NODES x MACHINE [@ NETWORK]

One number before a GPU is the number of GPUs: up to a usual node of that GPU it is one node, beyond that whole usual
nodes. NETWORK is what a node has: a rate (`100GbE`, `400G`, `HDR`, `NDR`), or ports of a rate (`8x400G`). Ethernet may
say what runs over it: `100GbE-TCP`, `10GbE-RoCE`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from topology.catalog.clusters import adapt_platform, default_platform, platform_named
from topology.catalog.gpus import gpu_kind, gpu_variants
from topology.catalog.platform import RDMA_LATENCY_S, Platform, build, joined_text
from topology.cluster import Cluster
from topology.errors import BadCluster

FORMS = (
    "a name of the catalogue (dgx-h100), a machine type of a cloud (p5.48xlarge), GPUs (8xH100, H100:8), nodes of GPUs "
    '(2x8xA100-40GB), either with a network (4x8xL40S@100GbE), {"gpu": "h100-sxm", "nodes": 2}, or a file'
)
_COUNTED = re.compile(
    r"(?:(\d{1,7})\s*[x×*]\s*)?(?:(\d{1,7})\s*[x×*]\s*)?([a-z][\w .-]*|\d{4})", re.IGNORECASE | re.ASCII
)
_NETWORK = re.compile(
    r"(?:(?P<ports>\d{1,4})\s*[x×*]\s*)?(?:(?P<rate>\d{1,5}(?:\.\d{1,3})?)\s*"
    r"(?:(?P<ethernet>gbe)(?:[ -](?P<over>tcp|roce))?|g|gb/s|gbit|gbit/s|gbps)?|(?P<word>edr|hdr|ndr|xdr))",
    re.IGNORECASE | re.ASCII,
)
_MOST_DIGITS = 7
_ROCE_GBIT = 25.0  # a slower port is Ethernet without RDMA unless that is stated (assumed: what server adapters have)
_TCP_LATENCY_S = 30e-6  # assumed, as for TCP in clusters.json and cloud.json
_INFINIBAND_GBIT = {"edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}  # of a four-lane port (IBTA)


@dataclass(frozen=True, slots=True)
class _Said:
    before: tuple[int, ...]  # counts before the name
    what: str
    after: int | None  # the count behind a colon
    network: str | None


def _parse(text: str) -> _Said | None:
    front, at, network = text.strip().partition("@")
    name, colon, after = front.partition(":")
    match = _COUNTED.fullmatch(name.strip())
    number = after.strip()
    if match is None or (colon and not (number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS)):
        return None
    first, second, what = match.groups()
    if what.isdigit():  # 8x4090
        what = f"rtx{what}"
    before = tuple(int(count) for count in (first, second) if count is not None)
    return _Said(before, what, int(number) if colon else None, network if at else None)


def is_spoken(text: str) -> bool:
    """Return whether `text` counts something or names a network, as a name of the catalogue does not."""
    said = _parse(text)
    return said is not None and (bool(said.before) or said.after is not None or said.network is not None)


def spoken_cluster(text: str) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster that `text` says and what had to be assumed. Raises BadCluster, with what was understood."""
    said = _parse(text)
    if said is None:
        raise BadCluster(f"{text[:60]!r} names no cluster", remedy=f"give {FORMS}")
    counts = [*said.before, *([] if said.after is None else [said.after])]
    if 0 in counts or len(counts) > 2:
        raise BadCluster(
            f"{text[:60]!r} counts {' and '.join(map(str, counts))} of {said.what}",
            why="nodes and GPUs in a node are two numbers of 1 or more",
            remedy="for example 2x8xH100",
        )
    known = platform_named(said.what)
    try:
        platform, nodes, assumed = _machines(known, counts) if known else _gpus(said.what, counts)
    except BadCluster as error:
        if known is None:
            raise BadCluster(
                f"{text[:60]!r}: {error.what}", why=error.why, remedy=f"{error.remedy}; or give {FORMS}"
            ) from error
        raise
    if said.network is not None:
        platform = _with_network(platform, said.network, assumed)
    elif nodes > 1 and known is None:
        total = platform.nics * platform.nic_gbit
        assumed.append(f"{platform.nics} x {platform.nic_gbit:g} Gb/s of network a node ({total:g} Gb/s), as is usual")
    kind = gpu_kind(platform.gpu)
    name = f"{nodes} x {platform.name}" if known else f"{nodes} x {platform.gpus_per_node} {kind.name}"
    return build(replace(platform, name=name), nodes=nodes), tuple(assumed)


def _machines(known: Platform, counts: list[int]) -> tuple[Platform, int, list[str]]:
    if len(counts) > 1:
        raise BadCluster(
            f"{known.name} has {known.gpus_per_node} GPUs; {counts[0]} and {counts[1]} were said",
            remedy=f"say how many of them: {counts[0]}x{known.name}",
        )
    return known, counts[0] if counts else 1, []


def _gpus(what: str, counts: list[int]) -> tuple[Platform, int, list[str]]:
    kind = gpu_kind(what)
    usual = default_platform(kind)
    others, assumed = gpu_variants(what), []
    if others:
        assumed.append(f"{what} is {kind.name} (the others: {', '.join(others)})")
    whole = usual.gpus_per_node
    if len(counts) == 2:
        nodes, per_node = counts
    elif counts and counts[0] > whole:
        if counts[0] % whole:
            raise BadCluster(
                f"{counts[0]} GPUs are not whole nodes of {whole}",
                why=f"{kind.name} usually comes with {whole} in a node",
                remedy=f"say nodes and GPUs in a node, for example 2x{max(1, counts[0] // 2)}x{what}",
            )
        nodes, per_node = counts[0] // whole, whole
        assumed.append(f"{nodes} nodes of {whole} GPUs, as in {usual.name}")
    else:
        nodes, per_node = 1, counts[0] if counts else whole
        if not counts:
            assumed.append(f"one node of {whole} GPUs, as in {usual.name}")
    platform = adapt_platform(usual, kind, gpus_per_node=per_node, interconnect=usual.interconnect)
    if per_node > 1:
        assumed.append(joined_text(usual, usual.interconnect))
    return platform, nodes, assumed


def _with_network(platform: Platform, said: str, assumed: list[str]) -> Platform:
    match = _NETWORK.fullmatch(said.strip())
    if match is None:
        raise BadCluster(
            f"the network {said[:40]!r} is not a rate",
            why=f"{platform.gpus_per_node} x {platform.gpu} in a node was understood",
            remedy="say what a node has, for example @100GbE, @NDR or @8x400G",
        )
    ports = int(match["ports"] or 1)
    gbit = _INFINIBAND_GBIT[match["word"].lower()] if match["word"] else float(match["rate"])
    if said.strip().endswith(("GB/s", "GBps")):  # bytes
        gbit *= 8
    ethernet, over = bool(match["ethernet"]) or gbit < _ROCE_GBIT, (match["over"] or "").lower()
    unknown = "tcp" if gbit < _ROCE_GBIT or (platform.fabric == "ethernet" and not platform.rdma) else "roce"
    tcp = ethernet and (over or unknown) == "tcp"
    if match["ports"] is None:
        assumed.append(f"one port of {gbit:g} Gb/s a node (several: @8x{gbit:g}G)")
    if ethernet and not over:
        slow = f"TCP over the Ethernet, {1e6 * _TCP_LATENCY_S:g} us (RDMA: @{gbit:g}GbE-RoCE)"
        assumed.append(slow if tcp else "RDMA over the Ethernet (RoCE)")
    beside_cpu = ports < platform.gpus_per_node
    return replace(
        platform,
        nics=ports,
        nic_gbit=gbit,
        nics_on="cpu" if beside_cpu else platform.nics_on,
        fabric="ethernet" if ethernet else "fat-tree" if beside_cpu else platform.fabric or "fat-tree",
        fabric_latency_s=_TCP_LATENCY_S if tcp else platform.fabric_latency_s if platform.rdma else RDMA_LATENCY_S,
        rdma=not tcp,
    )
