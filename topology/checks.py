"""What a person should know about NVLink here: where sources disagree, what is broken, what could not be read.

Each check looks at one thing and returns findings: what, why we think so, what it costs, what to do. A disagreement
between sources is a finding, never an error. Real cases behind the checks are named where they come from.
"""

from __future__ import annotations

from topology.cluster import Finding, GpuKind
from topology.fabric import NvlinkPlan, link_count, off_fabric, usual_count
from topology.finding import ERROR, INFO, WARNING, finding, names
from topology.machine import Evidence, GpuFacts, Machine
from topology.smi_p2p import CAPABILITY, MEANING
from topology.smi_topo import nv_count


def check_links(
    evidence: Evidence, machine: Machine, plans: list[NvlinkPlan], kinds: dict[int, GpuKind]
) -> list[Finding]:
    """Checks of the texts themselves, of NVLink and of peer access. `kinds` maps GPU index to its model, where known."""
    found: list[Finding] = []
    found += _reading(evidence)
    found += _lost_links(machine, plans)
    found += _link_counts(machine, plans)
    found += _fabric_state(machine)
    found += _bridges(machine, plans)
    found += _expected_links(machine, plans, kinds)
    found += _p2p(evidence, machine)
    return found


def _reading(evidence: Evidence) -> list[Finding]:
    """Texts that were cut, shifted or contain words of another driver version."""
    found = []
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
    if nccl is not None:
        halves = [gpu for gpu in nccl.gpus if gpu.mlopart is not None]
        if halves:
            found.append(
                finding(
                    INFO,
                    f"NCCL topology: {len(halves)} entries are halves of a split GPU",
                    "they carry `mlopart` and share a PCI function",
                    "each half is counted as a GPU with its share of the NVLinks",
                    "none needed",
                )
            )
        loops = [gpu.pci.busid for gpu in nccl.gpus if any(link.target == gpu.pci.busid for link in gpu.links)]
        if loops:
            found.append(
                finding(
                    WARNING,
                    f"NCCL topology: the NVLinks of {len(loops)} GPUs end at the GPU itself",
                    f"the target is its own address for {', '.join(loops[:8])}; some virtual machines write this",
                    "which GPUs are joined cannot be told from this file",
                    "add the output of `nvidia-smi topo -m`",
                )
            )
    if nvlink is not None:
        for block in nvlink.gpus:
            errors = sum(sum(link.errors.values()) for link in block.links)
            if errors:
                found.append(
                    finding(
                        WARNING,
                        f"GPU {block.index} has counted {errors} NVLink errors",
                        "replay, recovery or CRC counters of `nvidia-smi nvlink -e` are not zero",
                        "replays cost bandwidth; a link with many of them may go down",
                        "watch whether they grow under load; if so, have the board checked",
                    )
                )
    for source, said in problems:
        if said:
            found.append(
                finding(
                    WARNING,
                    f"{source}: not everything could be read",
                    "; ".join(said[:8]),
                    "pairs that are missing from the text are unknown, not absent",
                    "run the command again and pass its whole output",
                )
            )
    for source, tokens in unknown:
        if tokens:
            found.append(
                finding(
                    WARNING,
                    f"{source}: {len(tokens)} words are not known to this version",
                    ", ".join(tokens[:8]),
                    "they are left out; no rate is assumed for them",
                    "check the driver's legend, and report the text if it is a new class",
                )
            )
    if topo is not None and not any(map(nv_count, topo.pairs.values())) and topo.hides_nvlink:
        found.append(
            finding(
                INFO,
                "the matrix is from `topo -mp`, which leaves NVLink out",
                f"it was printed by `nvidia-smi topo {topo.command}`",
                "nothing can be said about NVLink from it",
                "run `nvidia-smi topo -m`",
            )
        )
    return found


def _lost_links(machine: Machine, plans: list[NvlinkPlan]) -> list[Finding]:
    """A GPU outside the NVSwitch fabric (vllm-project/vllm#16336; the GB300 of nccl-eBPF, 684.9 -> 51.6 GB/s)."""
    found = []
    for index in off_fabric(machine, plans):
        gpu = machine.gpus[index]
        said = [f"{source} counts {count} links" for source, count in gpu.active.items()]
        if machine.printed and not machine.nv_total(index):
            said.append("its row of the matrix has no NV class, all others have")
        fabric = gpu.nvml
        if fabric is not None and fabric.fabric_state == "completed":
            said.append(
                f"its fabric state looks normal (completed, clique {fabric.fabric_clique}), which proves no links"
            )
        found.append(
            finding(
                ERROR,
                f"GPU {index} is off the NVLink fabric: it has no working NVLink, its peers have",
                "; ".join(said) or "no source gives it a link",
                "one such GPU pulls every collective it takes part in down to the PCIe path",
                f"leave GPU {index} out (a group of the others is faster), then restart the fabric manager or reset it",
            )
        )
    found += [
        finding(
            WARNING,
            f"{len(plan.gpus)} GPUs share an NVSwitch fabric, one fewer than such machines have",
            f"NVSwitch boards carry {len(plan.gpus) + 1} GPUs, the sources list {len(plan.gpus)}",
            f"plans use the group sizes that {len(plan.gpus)} GPUs allow",
            "look for a lost GPU with `dmesg | grep Xid`, or check what the container was given",
        )
        for plan in plans
        if plan.hub and len(plan.gpus) in {7, 15} and len(machine.gpus) == len(plan.gpus)
    ]
    return found


def _link_counts(machine: Machine, plans: list[NvlinkPlan]) -> list[Finding]:
    """Counts that differ between sources, links that are inactive, counts below those of the peers."""
    found = []
    hubs = {gpu: plan for plan in plans if plan.hub for gpu in plan.gpus}
    for index, gpu in sorted(machine.gpus.items()):
        counts = dict(gpu.active)
        printed = machine.nv_total(index) if index in hubs else machine.nv_sum(index)
        if printed and machine.printed:
            counts["topo -m"] = printed
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{source} {count}" for source, count in counts.items())
            found.append(
                finding(
                    WARNING,
                    f"sources disagree on the NVLinks of GPU {index}",
                    said,
                    f"plans use the smallest count, {min(counts.values())}",
                    "read all sources again at the same time; a link that flaps shows in `nvidia-smi nvlink -e`",
                )
            )
        active = min(gpu.active.values(), default=None)
        if active is not None and gpu.listed and 0 < active < gpu.listed:
            found.append(
                finding(
                    WARNING,
                    f"GPU {index} has {gpu.listed - active} of {gpu.listed} NVLinks inactive",
                    f"{active} are active",
                    f"it reaches its peers with at most {active}/{gpu.listed} of the NVLink rate",
                    "expected where a bridge uses fewer links; else reseat the board and check `nvidia-smi nvlink -s`",
                )
            )
    for plan in plans:
        usual = usual_count(machine, plan.gpus)
        weak = [index for index in plan.gpus if 0 < link_count(machine, index) < usual]
        if plan.hub and weak:
            said = ", ".join(f"GPU {index} has {link_count(machine, index)}" for index in weak)
            found.append(
                finding(
                    WARNING,
                    f"{names(weak)}: fewer NVLinks than the other GPUs",
                    f"{said}; the usual count here is {usual}",
                    "a collective runs at the rate of its weakest GPU",
                    "restart the fabric manager; if it stays, have the board checked",
                )
            )
    return found


def _fabric_state(machine: Machine) -> list[Finding]:
    """Links may be active while the fabric is not ready (dstackai/dstack#1167, NVIDIA/gpu-operator#2511)."""
    found = []
    waiting = [index for index, gpu in sorted(machine.gpus.items()) if not fabric_ready(gpu)]
    if waiting:
        states = sorted(
            {str(gpu.nvml.fabric_state) for gpu in machine.gpus.values() if gpu.nvml and not fabric_ready(gpu)}
        )
        found.append(
            finding(
                ERROR,
                f"NVLink fabric not ready on {names(waiting)}",
                f"NVML reports the fabric state {', '.join(states)}",
                "links that say Active do not carry data yet; CUDA may fail to start",
                "check that the fabric manager runs and matches the driver's version, then read again",
            )
        )
    domains = {
        (gpu.nvml.fabric_cluster, gpu.nvml.fabric_clique)
        for gpu in machine.gpus.values()
        if gpu.nvml is not None and gpu.nvml.fabric_state == "completed"
    }
    if len(domains) > 1:
        found.append(
            finding(
                WARNING,
                f"GPUs belong to {len(domains)} different NVLink domains",
                "NVML reports different cluster ids or cliques",
                "GPUs of different domains do not reach each other over NVLink",
                "check the partition that the fabric manager made",
            )
        )
    return found


def fabric_ready(gpu: GpuFacts) -> bool:
    """False only if NVML knows a fabric and says that it has not finished, or finished with an error."""
    said = gpu.nvml
    if said is None or said.fabric_state in {None, "not supported"}:
        return True
    return said.fabric_state == "completed" and said.fabric_status in {0, None}


def _bridges(machine: Machine, plans: list[NvlinkPlan]) -> list[Finding]:
    """NVLink between some GPUs only: bridges that are missing (NVIDIA/k8s-device-plugin#436) or cross the sockets."""
    cabled = [plan for plan in plans if plan.hub is None and not machine.xgmi]
    if not cabled or any(plan.hub for plan in plans):
        return []
    found = []
    joined = [index for plan in cabled for index in plan.gpus]
    alone = [index for index in sorted(machine.gpus) if index not in joined]
    groups = "; ".join("{" + ", ".join(map(str, plan.gpus)) + "}" for plan in cabled)
    if alone:
        found.append(
            finding(
                WARNING,
                f"only some GPUs are bridged; without NVLink: {names(alone)}",
                f"NVLink joins {groups}",
                f"a group with {names(alone)} runs over PCIe, slower than a bridge",
                "keep tensor parallelism inside bridged pairs, or fit (reseat) the missing bridge",
            )
        )
    if len(cabled) > 1:
        found.append(
            finding(
                INFO,
                f"NVLink joins {len(cabled)} separate groups: {groups}",
                "pairs across the groups have a PCIe class",
                "tensor parallelism over more than one group leaves NVLink",
                "set CUDA_VISIBLE_DEVICES so that the GPUs of one group are neighbours",
            )
        )
    for plan in cabled:
        nodes = {machine.gpus[index].numa for index in plan.gpus} - {None}
        if len(plan.gpus) == 2 and len(nodes) > 1:
            found.append(
                finding(
                    INFO,
                    f"the bridge between {names(plan.gpus)} joins different NUMA nodes",
                    f"their NUMA nodes are {', '.join(map(str, sorted(node for node in nodes if node is not None)))}",
                    "the fastest pair does not share CPU memory or a NIC",
                    "pin each rank to the cores of its own GPU",
                )
            )
    return found


def _expected_links(machine: Machine, plans: list[NvlinkPlan], kinds: dict[int, GpuKind]) -> list[Finding]:
    """Compare with the datasheet, where the model is known."""
    found = []
    able = [index for index, kind in sorted(kinds.items()) if kind.nvlink_links]
    if len(able) > 1 and not machine.islands() and not machine.hides_nvlink:
        found.append(
            finding(
                WARNING,
                f"no NVLink is seen between GPUs that can have it ({kinds[able[0]].title})",
                "no source shows a link between any two of them",
                "collectives run over PCIe and the host",
                "fit bridges to cards; on boards with NVSwitch, or in a container, check what the driver is allowed to see",
            )
        )
    for index, gpu in sorted(machine.gpus.items()):
        kind = kinds.get(index)
        if kind is None or not kind.nvlink_links:
            continue
        if any(index in plan.gpus and plan.hub for plan in plans):
            count = link_count(machine, index)
            if 0 < count < kind.nvlink_links:
                found.append(
                    finding(
                        WARNING,
                        f"GPU {index} uses {count} of the {kind.nvlink_links} NVLinks of a {kind.title}",
                        "the datasheet's count is higher than what the sources show",
                        f"its NVLink rate is {count}/{kind.nvlink_links} of the datasheet's",
                        "check `nvidia-smi nvlink -s` for inactive links",
                    )
                )
        rate = gpu.line_bytes_per_s
        if rate is not None and kind.nvlink_bytes_per_s and rate < 0.95 * kind.nvlink_bytes_per_s:
            found.append(
                finding(
                    WARNING,
                    f"the NVLinks of GPU {index} run below their speed",
                    f"{rate / 1e9:.1f} GB/s a link, the datasheet has {kind.nvlink_bytes_per_s / 1e9:.1f} GB/s",
                    "collectives are slower in proportion",
                    "check link errors with `nvidia-smi nvlink -e`, then reset the GPU",
                )
            )
    return found


def _p2p(evidence: Evidence, machine: Machine) -> list[Finding]:
    found = []
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
        found.append(
            finding(
                ERROR if broken and table.capability != "a" else WARNING,
                f"no P2P ({kind}) between {len(denied)} of the GPU pairs"
                + (", some of them on NVLink" if broken else ""),
                f"pairs {shown}: {reasons}",
                "copies between them go through host memory; a short path (PIX) does not help",
                "plan for the host path; enable it in BIOS (ACS, IOMMU) or driver only where the vendor supports it",
            )
        )
    return found


def _pair(text: str) -> tuple[int, int]:
    a, b = text.split("-")
    return int(a), int(b)
