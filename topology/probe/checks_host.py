"""Findings about the host side: PCIe, NUMA, NICs, topology hidden by virtualisation, and the state of each GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topology.cluster import Finding, GpuKind
from topology.finding import ERROR, INFO, WARNING, describe_processes, finding, gpu_names
from topology.probe.machine import Evidence, Machine
from topology.readers.smi_topo import closest_nics

VIRTUAL_BRIDGE_BYTES_PER_S = 1e9  # about PCIe gen 3 x1; a bridge that claims less is emulated
POWER_TOLERANCE = 0.97  # of the datasheet's power: board partners differ by a few watts


def check_host(evidence: Evidence, machine: Machine, known: Mapping[int, GpuKind]) -> list[Finding]:
    """Run the checks of this file. `known` maps a GPU index to its datasheet, where the model is known."""
    return [
        *_pcie(machine),
        *_hidden_topology(hidden_reasons(evidence, machine)),
        *_numa(evidence, machine),
        *_nics(evidence, machine),
        *_off_the_bus(evidence),
        *_memory_errors(machine),
        *_device_state(machine),
        *_power(machine, known),
        *_driver(evidence),
    ]


def _driver(evidence: Evidence) -> list[Finding]:
    """The driver's version, with which profiles must agree."""
    versions = {gpu.driver for gpu in evidence.query if gpu.driver}
    if evidence.nvml is not None and evidence.nvml.driver:
        versions.add(evidence.nvml.driver)
    return [
        finding("driver", INFO, f"driver {version}", "nvidia-smi or NVML reports it", "kernels differ by driver", "")
        for version in sorted(versions)
    ]


def _off_the_bus(evidence: Evidence) -> list[Finding]:
    """GPUs that the driver knows and cannot reach, by NVML or in the words of nvidia-smi."""
    lost = {
        f"GPU {gpu.index}": "NVML: the GPU is lost" for gpu in (evidence.nvml.gpus if evidence.nvml else ()) if gpu.lost
    }
    if not lost:
        lost = {f"the GPU at {address}": f"nvidia-smi: {words}" for address, words in evidence.unreachable}
    return [
        finding(
            "off_the_bus",
            ERROR,
            f"{name} has fallen off the bus: the driver cannot reach it",
            why,
            "a program that uses it fails, and nvidia-smi may fail for all; plans use the remaining GPUs only",
            "look for Xid 79 in `dmesg`; end what uses the GPUs, then reboot or power the machine off and on",
        )
        for name, why in lost.items()
    ]


def _memory_errors(machine: Machine) -> Iterator[Finding]:
    """GPUs whose memory has had errors that ECC could not correct, or rows that wait for a reset to be replaced."""
    for index, gpu in sorted(machine.gpus.items()):
        nvml = gpu.nvml
        if nvml is None or not (nvml.uncorrected_errors or nvml.remap_pending or nvml.remap_failed):
            continue
        reasons = (
            [f"{nvml.uncorrected_errors} uncorrected errors since the driver was loaded"]
            if nvml.uncorrected_errors
            else []
        )
        reasons += ["a row waits to be replaced"] if nvml.remap_pending else []
        reasons += ["a row could not be replaced: no spare ones are left"] if nvml.remap_failed else []
        yield finding(
            "ecc",
            ERROR if nvml.remap_failed else WARNING,
            f"the memory of GPU {index} has errors",
            "; ".join(reasons),
            "a program that reads the bad row is ended (Xid 48, 94 or 95); results may be lost at any step",
            "replace the GPU" if nvml.remap_failed else "reset the GPU when nothing uses it, then run a memory test",
            gpus=(index,),
        )


def _pcie(machine: Machine) -> list[Finding]:
    return [
        finding(
            "pcie_width",
            WARNING,
            f"the PCIe link of GPU {index} is narrower than it could be: x{gpu.pcie_width} of x{gpu.pcie_width_max}",
            "the driver or the kernel reports fewer lanes in use",
            f"host copies and PCIe collectives run at {gpu.pcie_width}/{gpu.pcie_width_max} of the rate",
            "reseat the board or its riser; some slots have fewer lanes than their length",
            gpus=(index,),
            share=(gpu.pcie_width or 0) / (gpu.pcie_width_max or 1),
        )
        for index, gpu in sorted(machine.gpus.items())
        if gpu.downgraded
    ]


def hidden_reasons(evidence: Evidence, machine: Machine) -> list[str]:
    """Return the signs that the PCIe paths shown are not the real ones (NVIDIA/nccl#324, nccl-tests#256)."""
    reasons = []
    nccl = evidence.nccl
    if nccl is not None and nccl.gpus:
        numa = [nccl.cpus[gpu.pci.cpu] for gpu in nccl.gpus]
        if any(cpu.numa is None and cpu.arch == "x86_64" for cpu in numa):
            reasons.append("NCCL sees NUMA node -1")
        widths = [gpu.pci.link_width for gpu in nccl.gpus if gpu.dev is not None]
        if widths and not any(widths):
            reasons.append("NCCL sees PCIe links of width 0")
        slow = [
            bridge
            for bridge in nccl.bridges
            if bridge.link_speed_bytes_per_s is not None and bridge.link_speed_bytes_per_s < VIRTUAL_BRIDGE_BYTES_PER_S
        ]
        if slow:
            reasons.append(
                f"bridges above the GPUs claim {(slow[0].link_speed_bytes_per_s or 0) / 1e9:.2f} GB/s,"
                " as emulated ones do"
            )
    labels = [label for label in machine.pairs.values() if not label.startswith("NV")]
    if machine.printed and len(machine.gpus) >= 4 and set(machine.pairs.values()) == {"PHB"}:
        reasons.append("every pair of GPUs is PHB")
    by_node = [
        label
        for (a, b), label in machine.pairs.items()
        if label == "SYS" and machine.gpus[a].numa is not None and machine.gpus[a].numa == machine.gpus[b].numa
    ]
    if machine.printed and by_node and len(by_node) * 2 > len(labels) - len(by_node):
        reasons.append("GPUs of one NUMA node see each other as SYS")
    return reasons


def _hidden_topology(reasons: list[str]) -> list[Finding]:
    if not reasons:
        return []
    return [
        finding(
            "hidden",
            WARNING,
            "a virtual machine or container may hide the real PCIe tree",
            "; ".join(reasons),
            "path classes say nothing about distance here; NCCL may pick slow NICs "
            "(two H200 nodes fell from 489 to 55 GB/s, NVIDIA/nccl-tests#256)",
            "measure pairs, or give NCCL a topology file of the bare machine (NCCL_TOPO_FILE)",
        )
    ]


def _numa(evidence: Evidence, machine: Machine) -> Iterator[Finding]:
    listed = {
        index: gpu.numa_affinity
        for index, gpu in sorted(machine.gpus.items())
        if gpu.numa_affinity and not gpu.numa_affinity.isdigit() and gpu.numa_affinity != "N/A"
    }
    if listed:
        yield finding(
            "numa",
            INFO,
            "some GPUs are near several NUMA nodes; the lowest is taken as their CPU's",
            ", ".join(f"GPU {index}: {text}" for index, text in listed.items()),
            "nodes that are GPU memory (GB200, POWER9) are listed there too",
            "bind processes to the CPU list, not to the node list",
            gpus=listed,
        )
    if (evidence.topo is not None and "NUMA Affinity" not in evidence.topo.columns) or not machine.gpus:
        return
    blank = [index for index, gpu in sorted(machine.gpus.items()) if gpu.numa is None]
    if blank:
        yield finding(
            "numa",
            INFO,
            f"no NUMA node is known for {gpu_names(blank)}",
            "the column is blank or N/A, or no source gives it",
            "CPU pinning and NIC choice cannot follow the GPU",
            "read `/sys/bus/pci/devices/*/numa_node` on the host",
            gpus=blank,
        )
    nodes = {gpu.numa for gpu in machine.gpus.values()}
    if len(machine.gpus) >= 8 and nodes == {0}:
        yield finding(
            "numa",
            INFO,
            f"all {len(machine.gpus)} GPUs are on NUMA node 0",
            "true for a machine with one socket; with two it means numa=off, or a virtual machine",
            "with two sockets, NODE then includes paths that cross them",
            "compare with `lscpu` on the host",
        )


def _nics(evidence: Evidence, machine: Machine) -> Iterator[Finding]:
    down = [nic.name or nic.label for nic in machine.nics if nic.up is False]
    if down:
        yield finding(
            "nic_down",
            WARNING,
            f"NIC {', '.join(down[:16])} is down",
            "the kernel reports its port as not active",
            "traffic of its rail takes another NIC, or plans that need it cannot run",
            "check the cable and `ibstat`",
        )
    if evidence.topo is None or not evidence.topo.nics:
        return
    best = closest_nics(evidence.topo)
    classes = {label for label, _ in best.values()}
    far = [gpu for gpu, (label, _) in sorted(best.items()) if label in {"NODE", "SYS"}]
    if classes == {"SYS"} and len(best) > 1:
        yield finding(
            "nic_pairing",
            INFO,
            "no NIC is nearer to one GPU than to another",
            "every GPU sees every NIC as SYS (always so on Grace, whose NICs hang on the CPU)",
            "the matrix cannot pair NICs with GPUs",
            "pair them by NUMA node",
        )
    elif far and len(far) < len(best):
        yield finding(
            "nic_pairing",
            INFO,
            f"{gpu_names(far)} have no NIC of their own",
            "their nearest NIC is reached through the CPU (NODE or SYS), others have one behind a switch",
            "their network traffic goes through the CPU, or over NVLink to a GPU with a NIC (NCCL's PXN)",
            "keep PXN enabled (NCCL_PXN_DISABLE=0)",
            gpus=far,
        )


def _device_state(machine: Machine) -> Iterator[Finding]:
    """MIG, mixed models, throttling, and processes of others on the GPUs."""
    mig = [index for index, gpu in sorted(machine.gpus.items()) if gpu.mig]
    if mig:
        yield finding(
            "mig",
            WARNING,
            f"MIG is enabled on {gpu_names(mig)}",
            "the driver reports MIG mode",
            "instances have no P2P or NVLink between them; plans over several are not valid (NVIDIA/nccl#1716)",
            "plan for single instances, or ask the administrator to disable MIG",
            gpus=mig,
        )
    models = sorted({gpu.name for gpu in machine.gpus.values() if gpu.name})
    if len(models) > 1:
        yield finding(
            "mixed",
            WARNING,
            f"{len(models)} GPU models in one machine",
            ", ".join(models[:8]),
            "a synchronous step runs at the rate, and in the memory, of the weakest",
            "use GPUs of one model, or choose them with CUDA_VISIBLE_DEVICES",
        )
    yield from (
        finding(
            "throttled",
            WARNING,
            f"GPU {index} is throttled",
            ", ".join(gpu.nvml.throttle),
            "measurements taken now would be too slow, and training is",
            "check cooling and the power limit with `nvidia-smi -q -d PERFORMANCE`",
            gpus=(index,),
        )
        for index, gpu in sorted(machine.gpus.items())
        if gpu.nvml and gpu.nvml.throttle
    )
    yield from (
        finding(
            "busy",
            WARNING,
            f"GPU {index} is in use by other processes",
            describe_processes({pid: used or 0.0 for pid, used in gpu.nvml.processes}),
            "its memory and time are shared; measurements are not valid",
            "wait for them, or choose other GPUs",
            gpus=(index,),
            **{str(pid): float(used or 0) for pid, used in gpu.nvml.processes},
        )
        for index, gpu in sorted(machine.gpus.items())
        if gpu.nvml and gpu.nvml.processes
    )


def _power(machine: Machine, known: Mapping[int, GpuKind]) -> Iterator[Finding]:
    """GPUs with a power limit below the datasheet's, which lowers their sustained matmul rate."""
    for index, kind in sorted(known.items()):
        nvml = machine.gpus[index].nvml
        limit = nvml.power_limit_w if nvml is not None else None
        if limit is not None and kind.power_w and limit < POWER_TOLERANCE * kind.power_w:
            yield finding(
                "power_limit",
                WARNING,
                f"GPU {index} is limited to {limit:.0f} W of {kind.power_w:.0f} W",
                "the driver enforces a power limit below the datasheet's",
                "long matmuls run at lower clocks than estimates for this model assume",
                "raise it with `nvidia-smi -pl` if the rack allows; else trust a measurement, not a datasheet",
                gpus=(index,),
                limit_w=limit,
                usual_w=kind.power_w,
            )
