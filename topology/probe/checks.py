"""Findings about NVLink and peer access: where sources disagree, what is broken, what could not be read.

Each check returns findings that say what is wrong, the evidence, the consequence and the remedy. A disagreement between
sources is a finding, never an exception. Docstrings cite the bug reports behind a check.
"""

from __future__ import annotations

from collections.abc import Iterator

from topology.cluster import Finding, GpuKind
from topology.finding import ERROR, INFO, WARNING, finding, gpu_names
from topology.probe.fabric import NvlinkWiring, gpus_off_fabric, link_count, most_common_link_count
from topology.probe.machine import Evidence, GpuFacts, Machine
from topology.readers.nccl_xml import NcclTopology
from topology.readers.smi_nvlink import NvlinkReport
from topology.readers.smi_p2p import CAPABILITY, MEANING
from topology.readers.smi_topo import TopoMatrix, nv_count


def check_links(
    evidence: Evidence, machine: Machine, wirings: list[NvlinkWiring], kinds: dict[int, GpuKind]
) -> list[Finding]:
    """Run the checks of this file. `kinds` maps a GPU index to its datasheet, where the model is known."""
    found: list[Finding] = []
    found += _text_problems(evidence)
    found += _lost_links(machine, wirings)
    found += _link_counts(machine, wirings)
    found += _fabric_state(machine)
    found += _bridges(machine, wirings)
    found += _expected_links(machine, wirings, kinds)
    found += _peer_access(evidence, machine)
    return found


def _text_problems(evidence: Evidence) -> list[Finding]:
    """Texts that are truncated, misaligned, or use words that this version does not know."""
    return [
        *_split_gpus(evidence.nccl),
        *_self_links(evidence.nccl),
        *_link_errors(evidence.nvlink),
        *_unread_parts(evidence),
        *_matrix_without_nvlink(evidence.topo),
    ]


def _split_gpus(nccl: NcclTopology | None) -> list[Finding]:
    halves = [gpu for gpu in nccl.gpus if gpu.mlopart is not None] if nccl is not None else []
    if not halves:
        return []
    return [
        finding(
            "split_gpu",
            INFO,
            f"NCCL topology: {len(halves)} entries are halves of a split GPU",
            "they have the attribute `mlopart` and share a PCI function",
            "each half is counted as a GPU with its share of the NVLinks",
            "none needed",
        )
    ]


def _self_links(nccl: NcclTopology | None) -> list[Finding]:
    gpus = nccl.gpus if nccl is not None else ()
    looped = [gpu.pci.busid for gpu in gpus if any(link.target == gpu.pci.busid for link in gpu.links)]
    if not looped:
        return []
    return [
        finding(
            "self_links",
            WARNING,
            f"NCCL topology: the NVLinks of {len(looped)} GPUs end at the GPU itself",
            f"the target is its own address for {', '.join(looped[:8])}; some virtual machines write this",
            "this file does not tell which GPUs NVLink connects",
            "add the output of `nvidia-smi topo -m`",
        )
    ]


def _link_errors(nvlink: NvlinkReport | None) -> Iterator[Finding]:
    for block in nvlink.gpus if nvlink is not None else ():
        errors = sum(sum(link.errors.values()) for link in block.links)
        if errors:
            yield finding(
                "link_errors",
                WARNING,
                f"GPU {block.index} has counted {errors} NVLink errors",
                "replay, recovery or CRC counters of `nvidia-smi nvlink -e` are not zero",
                "replays cost bandwidth; a link with many of them may go down",
                "check whether the counters grow under load; if so, have the board checked",
                gpus=(block.index,),
                errors=errors,
            )


def _unread_parts(evidence: Evidence) -> list[Finding]:
    """Lines that the readers could not parse, and words they do not know, per source."""
    topo, nccl, nvlink = evidence.topo, evidence.nccl, evidence.nvlink
    problems: list[tuple[str, tuple[str, ...]]] = []
    unknown: list[tuple[str, list[str]]] = []
    if topo is not None:
        problems.append(("nvidia-smi topo -m", topo.problems))
        unknown.append(
            ("nvidia-smi topo -m", [f"{token} ({row}, {column or 'end'})" for row, column, token in topo.unknown])
        )
    for table in evidence.p2p:
        problems.append(("nvidia-smi topo -p2p", table.problems))
        unknown.append(("nvidia-smi topo -p2p", [f"{token} ({row}, {column})" for row, column, token in table.unknown]))
    if nvlink is not None:
        problems.append(("nvidia-smi nvlink", nvlink.problems))
        unknown.append(("nvidia-smi nvlink", list(nvlink.unknown)))
    if nccl is not None:
        problems.append(("NCCL topology", nccl.problems))
        unknown.append(("NCCL topology", list(nccl.unknown)))
    found = [
        finding(
            "reading",
            WARNING,
            f"{source}: not everything could be read",
            "; ".join(reasons[:8]),
            "pairs that are missing from the text are unknown, not absent",
            "run the command again and pass its whole output",
        )
        for source, reasons in problems
        if reasons
    ]
    found += [
        finding(
            "reading",
            WARNING,
            f"{source}: {len(tokens)} words are not known to this version",
            ", ".join(tokens[:8]),
            "they are left out; no rate is assumed for them",
            "check the driver's legend, and report the text if it is a new class",
        )
        for source, tokens in unknown
        if tokens
    ]
    return found


def _matrix_without_nvlink(topo: TopoMatrix | None) -> list[Finding]:
    if topo is None or any(map(nv_count, topo.pairs.values())) or not topo.hides_nvlink:
        return []
    return [
        finding(
            "reading_without_nvlink",
            INFO,
            "the matrix is from `topo -mp`, which leaves NVLink out",
            f"it was printed by `nvidia-smi topo {topo.command}`",
            "NVLink is unknown, not absent",
            "run `nvidia-smi topo -m`",
        )
    ]


def _lost_links(machine: Machine, wirings: list[NvlinkWiring]) -> Iterator[Finding]:
    """GPUs off the NVSwitch fabric (vllm-project/vllm#16336; a GB300 in nccl-eBPF fell from 684.9 to 51.6 GB/s)."""
    for index in gpus_off_fabric(machine, wirings):
        gpu = machine.gpus[index]
        reasons = [f"{source} counts {count} links" for source, count in gpu.active.items()]
        if machine.printed and not machine.nv_total(index):
            reasons.append("its row of the matrix has no NV class, all others have")
        fabric = gpu.nvml
        if fabric is not None and fabric.fabric_state == "completed":
            reasons.append(
                f"its fabric state looks normal (completed, clique {fabric.fabric_clique}), which proves no links"
            )
        yield finding(
            "lost_gpu",
            ERROR,
            f"GPU {index} is off the NVLink fabric: it has no working NVLink, its peers have",
            "; ".join(reasons) or "no source gives it a link",
            "every collective with this GPU runs at the rate of the PCIe path",
            f"leave GPU {index} out (a group of the others is faster), then restart the fabric manager or reset it",
            gpus=(index,),
        )
    yield from (
        finding(
            "missing_gpu",
            WARNING,
            f"{len(wiring.gpus)} GPUs share an NVSwitch fabric, one fewer than such machines have",
            f"NVSwitch boards carry {len(wiring.gpus) + 1} GPUs, the sources list {len(wiring.gpus)}",
            f"plans use the group sizes that {len(wiring.gpus)} GPUs allow",
            "look for a lost GPU with `dmesg | grep Xid`, or check what the container was given",
        )
        for wiring in wirings
        if wiring.hub and len(wiring.gpus) in {7, 15} and len(machine.gpus) == len(wiring.gpus)
    )


def _link_counts(machine: Machine, wirings: list[NvlinkWiring]) -> Iterator[Finding]:
    """Link counts that differ between sources, inactive links, and GPUs with fewer links than their peers."""
    hubs = {gpu: wiring for wiring in wirings if wiring.hub for gpu in wiring.gpus}
    for index, gpu in sorted(machine.gpus.items()):
        counts = dict(gpu.active)
        printed = machine.nv_total(index) if index in hubs else machine.nv_sum(index)
        if printed and machine.printed:
            counts["topo -m"] = printed
        if len(set(counts.values())) > 1:
            reasons = ", ".join(f"{source} {count}" for source, count in counts.items())
            yield finding(
                "links",
                WARNING,
                f"sources disagree on the NVLinks of GPU {index}",
                reasons,
                f"plans use the smallest count, {min(counts.values())}",
                "read all sources again at the same time; a link that flaps shows in `nvidia-smi nvlink -e`",
                gpus=(index,),
                least=min(counts.values()),
                most=max(counts.values()),
            )
        active = min(gpu.active.values(), default=None)
        if active is not None and gpu.listed and 0 < active < gpu.listed:
            yield finding(
                "links",
                WARNING,
                f"GPU {index} has {gpu.listed - active} of {gpu.listed} NVLinks inactive",
                f"{active} are active",
                f"it reaches its peers with at most {active}/{gpu.listed} of the NVLink rate",
                "expected where a bridge uses fewer links; else reseat the board and check `nvidia-smi nvlink -s`",
                gpus=(index,),
                active=active,
                listed=gpu.listed,
            )
    for wiring in wirings:
        usual = most_common_link_count(machine, wiring.gpus)
        weak = [index for index in wiring.gpus if 0 < link_count(machine, index) < usual]
        if wiring.hub and weak:
            reasons = ", ".join(f"GPU {index} has {link_count(machine, index)}" for index in weak)
            yield finding(
                "links",
                WARNING,
                f"{gpu_names(weak)}: fewer NVLinks than the other GPUs",
                f"{reasons}; the usual count here is {usual}",
                "a collective runs at the rate of its weakest GPU",
                "restart the fabric manager; if it stays, have the board checked",
                gpus=weak,
            )


def _fabric_state(machine: Machine) -> Iterator[Finding]:
    """A fabric that is not ready although its links are active (dstackai/dstack#1167, NVIDIA/gpu-operator#2511)."""
    waiting = [index for index, gpu in sorted(machine.gpus.items()) if not fabric_ready(gpu)]
    if waiting:
        states = sorted(
            {str(gpu.nvml.fabric_state) for gpu in machine.gpus.values() if gpu.nvml and not fabric_ready(gpu)}
        )
        yield finding(
            "fabric",
            ERROR,
            f"NVLink fabric not ready on {gpu_names(waiting)}",
            f"NVML reports the fabric state {', '.join(states)}",
            "links that say Active do not carry data yet; CUDA may fail to start",
            "check that the fabric manager runs and matches the driver's version, then read again",
            gpus=waiting,
        )
    domains = {
        (gpu.nvml.fabric_cluster, gpu.nvml.fabric_clique)
        for gpu in machine.gpus.values()
        if gpu.nvml is not None and gpu.nvml.fabric_state == "completed"
    }
    if len(domains) > 1:
        yield finding(
            "fabric",
            WARNING,
            f"GPUs belong to {len(domains)} different NVLink domains",
            "NVML reports different cluster ids or cliques",
            "GPUs of different domains do not reach each other over NVLink",
            "check the partition that the fabric manager made",
        )


def fabric_ready(gpu: GpuFacts) -> bool:
    """Return False only if NVML reports a fabric whose set-up has not completed, or completed with an error."""
    reasons = gpu.nvml
    if reasons is None or reasons.fabric_state in {None, "not supported"}:
        return True
    return reasons.fabric_state == "completed" and reasons.fabric_status in {0, None}


def _bridges(machine: Machine, wirings: list[NvlinkWiring]) -> Iterator[Finding]:
    """NVLink between some GPUs only: missing bridges (NVIDIA/k8s-device-plugin#436), bridges across NUMA nodes."""
    cabled = [wiring for wiring in wirings if wiring.hub is None and not machine.xgmi]
    if not cabled or any(wiring.hub for wiring in wirings):
        return
    bridged = [index for wiring in cabled for index in wiring.gpus]
    unbridged = [index for index in sorted(machine.gpus) if index not in bridged]
    groups = "; ".join("{" + ", ".join(map(str, wiring.gpus)) + "}" for wiring in cabled)
    if unbridged:
        yield finding(
            "half_bridged",
            WARNING,
            f"only some GPUs are bridged; without NVLink: {gpu_names(unbridged)}",
            f"NVLink connects {groups}",
            f"a group with {gpu_names(unbridged)} runs over PCIe, slower than a bridge",
            "keep tensor parallelism inside bridged pairs, or fit (reseat) the missing bridge",
            gpus=unbridged,
        )
    if len(cabled) > 1:
        yield finding(
            "bridged_groups",
            INFO,
            f"NVLink connects {len(cabled)} separate groups: {groups}",
            "pairs across the groups have a PCIe class",
            "tensor parallelism over more than one group leaves NVLink",
            "set CUDA_VISIBLE_DEVICES so that the GPUs of one group are neighbours",
        )
    for wiring in cabled:
        nodes = {machine.gpus[index].numa for index in wiring.gpus} - {None}
        if len(wiring.gpus) == 2 and len(nodes) > 1:
            yield finding(
                "bridge_numa",
                INFO,
                f"the bridge between {gpu_names(wiring.gpus)} joins different NUMA nodes",
                f"their NUMA nodes are {', '.join(map(str, sorted(node for node in nodes if node is not None)))}",
                "the fastest pair does not share CPU memory or a NIC",
                "pin each rank to the cores of its own GPU",
                gpus=wiring.gpus,
            )


def _expected_links(machine: Machine, wirings: list[NvlinkWiring], kinds: dict[int, GpuKind]) -> Iterator[Finding]:
    """Fewer or slower links than the datasheet has, where the model is known."""
    able = [index for index, kind in sorted(kinds.items()) if kind.nvlink_links]
    unknown = sorted(machine.gpus.keys() - kinds.keys())
    if len(able) + len(unknown) > 1 and not machine.pairs and not machine.hides_nvlink:
        yield finding(
            "no_nvlink",
            WARNING,
            f"whether NVLink joins the GPUs was not read ({kinds[able[0]].title if able else 'model unknown'})",
            "no table of pairs, list of links or NCCL topology is among the sources",
            "the cluster has none: collectives run over PCIe and the host",
            "read `nvidia-smi topo -m` as well",
        )
    elif len(able) > 1 and not machine.islands() and not machine.hides_nvlink:
        yield finding(
            "no_nvlink",
            WARNING,
            f"no NVLink between GPUs that can have it ({kinds[able[0]].title})",
            "no source shows a link between any two of them",
            "collectives run over PCIe and the host",
            "fit bridges to cards; on boards with NVSwitch, or in a container, check what the driver is allowed to see",
        )
    for index, gpu in sorted(machine.gpus.items()):
        kind = kinds.get(index)
        if kind is None or not kind.nvlink_links:
            continue
        if any(index in wiring.gpus and wiring.hub for wiring in wirings):
            count = link_count(machine, index)
            if 0 < count < kind.nvlink_links:
                yield finding(
                    "links",
                    WARNING,
                    f"GPU {index} uses {count} of the {kind.nvlink_links} NVLinks of a {kind.title}",
                    "the datasheet's count is higher than what the sources show",
                    f"its NVLink rate is {count}/{kind.nvlink_links} of the datasheet's",
                    "check `nvidia-smi nvlink -s` for inactive links",
                    gpus=(index,),
                    active=count,
                    listed=kind.nvlink_links,
                )
        rate = gpu.line_bytes_per_s
        if rate is not None and kind.nvlink_bytes_per_s and rate < 0.95 * kind.nvlink_bytes_per_s:
            yield finding(
                "slow_links",
                WARNING,
                f"the NVLinks of GPU {index} run below their speed",
                f"{rate / 1e9:.1f} GB/s a link, the datasheet has {kind.nvlink_bytes_per_s / 1e9:.1f} GB/s",
                "collectives are slower in proportion",
                "check link errors with `nvidia-smi nvlink -e`, then reset the GPU",
                gpus=(index,),
                bytes_per_s=rate,
            )


def _peer_access(evidence: Evidence, machine: Machine) -> Iterator[Finding]:
    for table in evidence.p2p:
        denied = table.denied
        if table.capability == "n":  # NVLink access; pairs that only share PCIe rightly lack it
            denied = {pair: code for pair, code in denied.items() if nv_count(machine.pairs.get(_pair(pair)))}
        if not denied:
            continue
        kind = CAPABILITY.get(table.capability or "", "peer access")
        codes = sorted(set(denied.values()))
        broken = [pair for pair in denied if nv_count(machine.pairs.get(_pair(pair)))]
        reasons = "; ".join(f"{code}: {MEANING.get(code, 'unknown')}" for code in codes)
        shown = ", ".join(list(denied)[:16])
        yield finding(
            "p2p",
            ERROR if broken and table.capability != "a" else WARNING,
            f"no P2P ({kind}) between {len(denied)} of the GPU pairs" + (", some of them on NVLink" if broken else ""),
            f"pairs {shown}: {reasons}",
            "copies between them go through host memory; a short path (PIX) does not help",
            "plan for the host path; enable it in BIOS (ACS, IOMMU) or driver only where the vendor supports it",
            gpus=dict.fromkeys(gpu for pair in denied for gpu in _pair(pair)),
            pairs=len(denied),
        )


def _pair(text: str) -> tuple[int, int]:
    a, b = text.split("-")
    return int(a), int(b)
