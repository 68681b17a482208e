"""Build a `Cluster` from texts (`probe_text`) or from what was already read (`build`, used by `from_machine`).

Steps: recognise each text and parse it, combine the sources, infer the links, run the checks, fill in datasheet rates.
Nothing here reads the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from topology.catalog.cluster_file import parse_cluster
from topology.catalog.gpus import gpu_kind, match_driver_name
from topology.cluster import Cluster, Finding, Gpu, GpuKind, Link, LinkKind, LinkState, Nic, Node, NodeGroup, Source
from topology.codec import parse_json
from topology.errors import BadCluster, BadInput
from topology.finding import ERROR, INFO, WARNING, finding, gpu_names
from topology.probe.checks import check_links, fabric_ready
from topology.probe.checks_host import check_host, hidden_reasons
from topology.probe.fabric import NvlinkWiring, gpus_off_fabric, host_fabric, nvlink_fabric, nvlink_wirings
from topology.probe.machine import Evidence, Machine, combine_sources
from topology.readers.nccl_xml import parse_xml, read_graphs, read_topology
from topology.readers.smi_nvlink import parse_nvlink
from topology.readers.smi_p2p import parse_p2p
from topology.readers.smi_query import parse_query
from topology.readers.smi_topo import PATH_ORDER, closest_nics, parse_topo

UNKNOWN_KIND = GpuKind(
    name="unknown",
    title="GPUs of an unknown model",
    architecture="unknown",
    compute_capability=0,
    sm_count=0,
    memory_bytes=0,
    memory_bytes_per_s=0.0,
    peak_flops={},
)
MAX_HOST_GPUS = 64  # four times the largest host built
MAX_DOMAIN_GPUS = 576  # the largest announced
# GPU generations by NVLink count: a hint to the user. The count does not identify a model, so it sets no rates.
LINK_HINTS = {
    36: "Rubin",
    18: "Hopper or Blackwell",
    12: "an A100, or Hopper cards with a bridge",
    8: "an A800 or H800",
    6: "a V100, or GH200s wired to each other",
}


def probe_text(texts: Sequence[tuple[str, str]], *, gpu: str | None = None) -> Cluster:
    """Return the machine that `texts` (pairs of a name to show and the content) describe.

    Each text is recognised by its content: `nvidia-smi topo -m`, `topo -p2p`, `nvlink -s|-R|-e`, `-L`, `--query-gpu`
    CSV, NCCL topology or graph XML, or a cluster file. `gpu` names the model, which `topo -m` alone does not; without
    it the kind is `unknown` and rates stay empty. Raises BadInput when no text is any of these, BadCluster for an
    unknown `gpu`.
    """
    evidence = Evidence()
    recognised = [_read_one_text(evidence, label, text) for label, text in texts]
    if not any(recognised):
        why = "; ".join(f.why for f in evidence.findings) or "no text was given"
        raise BadInput(
            "no text describes a machine",
            why=why,
            remedy="pass the output of `nvidia-smi topo -m`, or a NCCL topology file",
        )
    if evidence.saved is not None and sum(recognised) == 1:
        if gpu is not None:
            raise BadCluster("--gpu names what a cluster file already says", remedy="leave --gpu out")
        return replace(evidence.saved, findings=(*evidence.saved.findings, *evidence.findings))
    found = build(evidence, gpu=gpu, name="probed")
    if not found.gpu_count and evidence.nccl is None:
        raise BadInput(
            "no text lists the GPUs of a machine",
            why=f"{', '.join(label for label, _ in texts)} was read and names none",
            remedy="pass the output of `nvidia-smi topo -m`, or a NCCL topology file",
        )
    return found


def _read_one_text(evidence: Evidence, label: str, text: str) -> bool:
    """Read one text into `evidence`; return whether it was recognised, and add a finding if it was not."""
    body = text.lstrip("\ufeff \t\r\n")
    try:
        if body.startswith("{"):
            evidence.saved = parse_cluster(parse_json(text, where=label), where=label)
            return True
        if body.startswith("<"):
            root = parse_xml(body, where=label)
            if root.tag == "graphs":
                evidence.graphs = (*evidence.graphs, *read_graphs(root))
            elif evidence.nccl is None:
                evidence.nccl = read_topology(root)
            else:
                evidence.findings.append(_ignored_text(label, "a second NCCL topology"))
            return True
    except (BadInput, BadCluster) as error:
        evidence.findings.append(
            finding(
                "reading",
                WARNING,
                f"{label} was not read",
                f"{error.what}: {error.why}" if error.why else error.what,
                "its contents are missing from the answer",
                error.remedy or "check the file",
            )
        )
        return False
    topo, p2p, nvlink, query = parse_topo(text), parse_p2p(text), parse_nvlink(text), parse_query(text)
    if topo is not None and evidence.topo is not None:
        evidence.findings.append(_ignored_text(label, "a second `topo -m` matrix"))
    evidence.topo = evidence.topo or topo
    evidence.p2p = (*evidence.p2p, *p2p)
    if nvlink is not None:
        evidence.nvlink_text = f"{evidence.nvlink_text}\n{text}"
        evidence.nvlink = parse_nvlink(evidence.nvlink_text)
    evidence.query = evidence.query or query
    if topo is None and not p2p and nvlink is None and not query:
        evidence.findings.append(
            finding(
                "reading",
                WARNING,
                f"{label} was not recognised",
                f"{label} holds no table, link list, XML or cluster file that is known",
                "it is not used",
                "pass the whole output of the command",
            )
        )
        return False
    return True


def _ignored_text(label: str, what: str) -> Finding:
    return finding(
        "reading",
        WARNING,
        f"{label} is {what}; the first is used",
        f"{label} came later",
        "it is not used",
        "probe one machine at a time",
    )


def build(evidence: Evidence, *, gpu: str | None, name: str) -> Cluster:
    """Turn what was read into a Cluster of one node. Raises BadCluster if `gpu` is not in the catalogue."""
    _require_one_machine(evidence)
    machine = combine_sources(evidence)
    kinds = _kinds(evidence, machine, gpu)
    known = {index: kind for index, kind in kinds.items() if kind is not UNKNOWN_KIND}
    limits = {kind.nvlink_links for kind in known.values() if kind.nvlink_links}
    wirings = nvlink_wirings(machine, max(limits) if limits and len(known) == len(kinds) else None)
    trusted = all(fabric_ready(facts) for facts in machine.gpus.values())
    # NCCL's fourth search result is NVLS: it has channels only where the switch can multicast.
    multicast = any(graph.id == 3 and (graph.channel_count or 0) > 0 for graph in evidence.graphs)
    hubs, nvlinks = nvlink_fabric(machine, wirings, multicast=multicast, trusted=trusted)
    hidden = bool(hidden_reasons(evidence, machine))
    vertices, host = host_fabric(machine, confidence=0.3 if hidden else 1.0)
    lost = set(gpus_off_fabric(machine, wirings))
    node = Node(
        name=name,
        gpus=tuple(
            Gpu(
                index=index,
                kind=kinds[index].name,
                uuid=facts.uuid,
                pci_bus_id=facts.pci,
                name=facts.name,
                memory_bytes=facts.memory_bytes,
                numa=facts.numa,
                numa_affinity=facts.numa_affinity,
                cpu_affinity=facts.cpu_affinity,
                tray=facts.tray,
                healthy=index not in lost,
            )
            for index, facts in sorted(machine.gpus.items())
        ),
        vertices=(*hubs, *vertices),
        nics=tuple(
            Nic(
                label=nic.label,
                name=nic.name,
                bytes_per_s=nic.bytes_per_s,
                numa=nic.numa,
                tray=nic.tray,
                up=nic.up is not False,
                pci_bus_id=nic.pci,
            )
            for nic in machine.nics
        ),
        links=(*nvlinks, *host),
        pairs={f"{a}-{b}": label for (a, b), label in sorted(machine.pairs.items())},
        closest_nics=_closest(evidence, machine),
        host_memory_bytes=evidence.sysfs.memory_bytes if evidence.sysfs is not None else None,
    )
    findings = [
        *evidence.findings,
        *check_links(evidence, machine, wirings, known),
        *check_host(evidence, machine, known),
    ]
    findings += _inferences(evidence, machine, wirings, kinds, gpu)
    order = [ERROR, WARNING, INFO]
    cluster = Cluster(
        name=name,
        gpu_kinds=tuple({kind.name: kind for kind in kinds.values()}.values()),
        groups=(NodeGroup(node=node),),
        findings=tuple(sorted(findings, key=lambda item: order.index(item.severity))),
    )
    return fill_rates(cluster, tuple(known.values()))


def _require_one_machine(evidence: Evidence) -> None:
    """Raise BadInput where a text lists more GPUs than one machine, or one NVLink domain, can have."""
    of_host = (evidence.topo, evidence.nvlink, evidence.nvml, evidence.sysfs)
    host = max([len(evidence.query), *(len(source.gpus) for source in of_host if source is not None)])
    domain = len(evidence.nccl.gpus) if evidence.nccl is not None else 0
    for what, count, most in (("one host", host, MAX_HOST_GPUS), ("one NVLink domain", domain, MAX_DOMAIN_GPUS)):
        if count > most:
            raise BadInput(f"a text lists {count} GPUs", why=f"it describes {what}, which has at most {most}")


def _kinds(evidence: Evidence, machine: Machine, gpu: str | None) -> dict[int, GpuKind]:
    """Return the model of each GPU: the caller's `gpu`, else by the driver's name, else of the cluster file."""
    if gpu is not None:
        return dict.fromkeys(machine.gpus, gpu_kind(gpu))
    saved = evidence.saved.gpu_kinds if evidence.saved is not None else ()
    found: dict[int, GpuKind] = {}
    for index, facts in machine.gpus.items():
        match = match_driver_name(facts.name) if facts.name else None
        found[index] = match or (saved[0] if len(saved) == 1 else UNKNOWN_KIND)
    # `nvlink -s -i 0` names one GPU of a machine; the others are assumed to be alike, and `_inferences` reports it.
    named = {found[index].name: found[index] for index, facts in machine.gpus.items() if facts.name}
    if len(named) == 1:
        (only,) = named.values()
        found.update(
            {index: only for index, facts in machine.gpus.items() if not facts.name and only is not UNKNOWN_KIND}
        )
    return found


def _closest(evidence: Evidence, machine: Machine) -> dict[str, tuple[str, ...]]:
    """Return the NICs with the nearest path class to each GPU, from the matrix if it lists NICs, else the PCI tree."""
    if evidence.topo is not None and evidence.topo.nics:
        return {str(gpu): nics for gpu, (_, nics) in sorted(closest_nics(evidence.topo).items())}
    closest: dict[str, tuple[str, ...]] = {}
    for index in sorted(machine.gpus):
        seen = [(nic, machine.path(f"gpu{index}", nic.label)) for nic in machine.nics]
        ranked = [label for _, label in seen if label in PATH_ORDER]
        if ranked:
            best = min(ranked, key=PATH_ORDER.index)
            closest[str(index)] = tuple(nic.name or nic.label for nic, label in seen if label == best)
    return closest


def _inferences(
    evidence: Evidence, machine: Machine, wirings: list[NvlinkWiring], kinds: dict[int, GpuKind], gpu: str | None
) -> Iterator[Finding]:
    """Findings about what was inferred rather than read."""
    unknown = [index for index, kind in kinds.items() if kind is UNKNOWN_KIND]
    if unknown and gpu is None:
        printed = sorted({name for index in unknown if (name := machine.gpus[index].name)})
        most = max(
            (machine.nv_total(index) for index in unknown if any(p.hub and index in p.gpus for p in wirings)), default=0
        )
        sm = sorted({facts.sm for facts in machine.gpus.values() if facts.sm is not None})
        hints = [f"{most} NVLinks a GPU fit {LINK_HINTS[most]}"] if most in LINK_HINTS else []
        hints += (
            [f"NCCL says compute capability {', '.join(f'{n // 10}.{n % 10}' for n in sm)}"]
            if sm and sm[0] < 200
            else []
        )
        hints += [f"the driver's name {', '.join(printed[:4])} is not in the catalogue"] if printed else []
        yield finding(
            "unknown_model",
            INFO,
            "the GPU model is not known",
            "; ".join(hints) or "the texts do not name it",
            "link rates and memory are left empty instead of guessed",
            "name it with --gpu",
        )
    alike = [index for index, facts in sorted(machine.gpus.items()) if not facts.name and index not in unknown]
    named = [facts for _, facts in sorted(machine.gpus.items()) if facts.name and facts.index not in unknown]
    if gpu is None and alike and named:
        yield finding(
            "assumed_model",
            INFO,
            f"{gpu_names(alike)} taken to be the same model as GPU {named[0].index}",
            f"only {gpu_names(facts.index for facts in named)} is named in the texts: {named[0].name}",
            "their rates and memory follow from that",
            "add `nvidia-smi -L`, which names every GPU",
            gpus=alike,
        )
    unsure = [wiring for wiring in wirings if not wiring.certain]
    if unsure:
        yield finding(
            "assumed_cables",
            INFO,
            "NVLink is taken as cables between the GPUs",
            "the printed counts fit cables, and also a part of a machine with NVSwitch",
            "between these GPUs both give the same rate",
            "add `nvidia-smi nvlink -R`, which names the far ends",
        )
    if evidence.saved is not None:
        count = evidence.saved.gpus_per_node
        yield finding(
            "two_answers",
            INFO if count == len(machine.gpus) else WARNING,
            "a cluster file and readings were both given; the readings are used",
            f"the file {evidence.saved.name!r} has {count} GPUs a node, the readings {len(machine.gpus)}",
            "a smaller machine than planned for" if len(machine.gpus) < count else "none",
            "leave the other texts out to use the file",
        )


def fill_rates(cluster: Cluster, kinds: Sequence[GpuKind]) -> Cluster:
    """Return `cluster` with datasheet rates on every link whose GPU is one of `kinds` (matched by `Gpu.kind`).

    NVLink: links in use times the payload rate of one. `nvlink -s` prints the line rate, slightly above the payload
    rate, so it is used only where it is below the datasheet's: that link is degraded. PCIe: the GPU's slot, unless a
    source gave speed and width; uplinks of switches are assumed to be like the slots below them. Measured rates stay.
    """
    by_name = {kind.name: kind for kind in kinds}
    groups = []
    for group in cluster.groups:
        kind_of = {gpu.vertex: by_name[gpu.kind] for gpu in group.node.gpus if gpu.kind in by_name}
        slots = [kind.pcie_bytes_per_s for kind in kind_of.values() if kind.pcie_bytes_per_s]
        switches, slot = {vertex.id for vertex in group.node.vertices}, min(slots, default=None)
        links = tuple(_with_datasheet_rate(link, kind_of, slot, switches) for link in group.node.links)
        groups.append(replace(group, node=replace(group.node, links=links)))
    merged = {kind.name: by_name.get(kind.name, kind) for kind in cluster.gpu_kinds}
    return replace(cluster, groups=tuple(groups), gpu_kinds=tuple(merged.values()))


def _with_datasheet_rate(link: Link, kind_of: dict[str, GpuKind], slot: float | None, hubs: set[str]) -> Link:
    ends = [kind_of[end] for end in (link.a, link.b) if end in kind_of]
    if link.state is LinkState.ABSENT:
        return link
    if link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH} and ends and all(kind.nvlink_bytes_per_s for kind in ends):
        rate = min(kind.nvlink_bytes_per_s for kind in ends) * link.count
        nccl = min(kind.nvlink_nccl_bytes_per_s for kind in ends) * link.count
        if link.bytes_per_s is not None and link.bytes_per_s < 0.95 * rate:
            state = LinkState.DEGRADED if link.state is LinkState.UP else link.state
            return replace(link, nccl_bytes_per_s=nccl or None, state=state)
        return replace(link, bytes_per_s=rate, nccl_bytes_per_s=nccl or None, source=Source.DATASHEET)
    if link.kind is LinkKind.C2C and ends and ends[0].c2c_bytes_per_s:
        return replace(link, bytes_per_s=ends[0].c2c_bytes_per_s)
    if link.kind is LinkKind.PCIE and link.bytes_per_s is None:
        if ends and ends[0].pcie_bytes_per_s:
            return replace(link, bytes_per_s=ends[0].pcie_bytes_per_s, source=Source.DATASHEET)
        if link.a in hubs and link.b in hubs and slot is not None:
            return replace(link, bytes_per_s=slot, source=Source.ASSUMED)
    return link


def select_gpus(cluster: Cluster, order: Sequence[int]) -> Cluster:
    """Return the cluster with only the GPUs `order` of its node, in that order, and the links that they can use."""
    node = cluster.groups[0].node
    by_index = {gpu.index: gpu for gpu in node.gpus}
    selected = [by_index[index] for index in order if index in by_index]
    removed = {gpu.vertex for gpu in node.gpus} - {gpu.vertex for gpu in selected}
    indices = {str(gpu.index) for gpu in selected}
    smaller = replace(
        node,
        gpus=tuple(selected),
        links=tuple(link for link in node.links if link.a not in removed and link.b not in removed),
        pairs={pair: label for pair, label in node.pairs.items() if set(pair.split("-")) <= indices},
        closest_nics={gpu: nics for gpu, nics in node.closest_nics.items() if gpu in indices},
    )
    used = {gpu.kind for gpu in selected}
    return replace(
        cluster,
        groups=(NodeGroup(node=smaller),),
        gpu_kinds=tuple(kind for kind in cluster.gpu_kinds if kind.name in used),
    )
