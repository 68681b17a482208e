"""Is this machine as it should be? Expected against found, each difference with what it costs in time and a remedy.

What was found comes from three places: the probe's findings (which have seen the sources), the links of the cluster
(which may come from a file without findings), and a measurement, if there is one. The same fault seen twice is one item.
Pure: nothing here reads the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from topology.cluster import Cluster, Finding, LinkKind, LinkState, Node
from topology.finding import ERROR, INFO, WARNING, names
from topology.health_cost import (
    Cost,
    bridged_cost,
    group_cost,
    host_slowdown,
    links_of,
    usual_links,
    without_nvlink,
    without_text,
)
from topology.health_item import HealthItem, item_of
from topology.health_measured import check_measured
from topology.measured import Measured
from topology.node_rates import NodeRates

_item = partial(item_of, "links")

__all__ = ["Health", "HealthItem", "diagnose"]

# The probe's findings, by what they are about. Each is tested against a real capture, so a change of wording shows.
TOPICS = (
    ("stuck", r"driver does not answer"),
    ("no_gpu", r"^no NVIDIA driver found"),
    ("lost_gpu", r"off the NVLink fabric"),
    ("missing_gpu", r"one fewer than such machines have"),
    ("fabric", r"fabric not ready|different NVLink domains"),
    ("links", r"NVLinks inactive|fewer NVLinks than|uses \d+ of the \d+ NVLinks|sources disagree on the NVLinks"),
    ("slow_links", r"run below their speed"),
    ("link_errors", r"NVLink errors"),
    ("no_nvlink", r"^no NVLink is seen"),
    ("half_bridged", r"only some GPUs are bridged"),
    ("p2p", r"^no P2P"),
    ("pcie_width", r"^the PCIe link of GPU"),
    ("hidden", r"may hide the real PCIe tree"),
    ("mig", r"^MIG is enabled"),
    ("mixed", r"GPU models in one machine"),
    ("throttled", r"is throttled"),
    ("busy", r"is in use by other processes"),
    ("not_measured", r"^nothing could be measured"),
    ("nic_down", r"^NIC .* is down"),
    ("not_offered", r"not offered by the driver"),
    ("silent", r"gave nothing$"),
    (
        "reading",
        r"was not read|was not recognised|not everything could be read|not known to this version|the first is used",
    ),
)
# About the texts or the tools, not the machine; and GPUs on the bus that a container simply was not given.
ADVICE = frozenset({"reading", "not_offered", "silent"})
ORDER = {ERROR: 0, WARNING: 1, INFO: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The verdict. `shared` are groups of GPUs that share a way to the host, as concurrent flows showed."""

    machine: str
    gpu_count: int
    items: tuple[HealthItem, ...]
    measured: bool = False
    shared: tuple[tuple[int, ...], ...] = ()

    @property
    def healthy(self) -> bool:
        """No warning or error is about the machine itself."""
        return not any(item.severity is not INFO and item.code not in ADVICE for item in self.items)


def diagnose(cluster: Cluster, measured: Measured | None = None, *, expected: Cluster | None = None) -> Health:
    """Compare the first node of `cluster` with its datasheets, its siblings, `expected` and what was measured.

    `expected` is the machine it should be, such as one of the catalogue. A dry run of a measurement (`device` cpu) says
    nothing about a machine and is ignored.
    """
    node = cluster.groups[0].node
    items = [_from_finding(cluster, finding) for finding in cluster.findings]
    told = {(item.code, gpu) for item in items for gpu in item.gpus}
    items += [item for item in _structure(cluster) if not any((item.code, gpu) in told for gpu in item.gpus)]
    if node.gpus:
        items += _mixed(cluster, known={item.code for item in items})
    if expected is not None:
        items += _against(cluster, expected)
    shared: tuple[tuple[int, ...], ...] = ()
    real = measured is not None and measured.device != "cpu"
    if measured is not None and real:
        seen, shared = check_measured(cluster, measured)
        items += seen
    return Health(
        machine=cluster.name,
        gpu_count=len(node.gpus),
        items=tuple(sorted(_merged(items), key=lambda item: ORDER[item.severity])),
        measured=real,
        shared=shared,
    )


# From findings


def _from_finding(cluster: Cluster, finding: Finding) -> HealthItem:
    if re.search(r"^no NVIDIA driver found", finding.what) and "timeout" in finding.why:
        finding = replace(
            finding,
            severity=ERROR,
            what="the NVIDIA driver does not answer",
            consequence="no GPU can be used while it hangs",
            remedy="look for Xid messages in `dmesg`; reset the GPU or reboot",
        )
    code = next((code for code, pattern in TOPICS if re.search(pattern, finding.what)), "note")
    if code == "silent" and re.search(r"in time|hung", finding.why):
        code = "stuck"  # a command an old driver lacks is no fault, a driver that does not answer is
    gpus = mentioned(finding.what)
    severity = finding.severity
    if code == "hidden" and _nvlink_joins_all(cluster):
        severity = INFO  # no traffic between the GPUs takes the hidden paths
    cost, extra = _cost(cluster, code, gpus, finding)
    consequence = finding.consequence + (f"; {cost.text}{extra}" if cost is not None else "")
    return HealthItem(
        code=code,
        severity=severity,
        what=finding.what,
        why=finding.why,
        consequence=consequence,
        remedy=finding.remedy,
        gpus=gpus,
        cost=cost,
        source="probe",
    )


def mentioned(text: str) -> tuple[int, ...]:
    """Return the GPU numbers a sentence of ours names: `GPU 3`, `GPUs 0, 1, 5`."""
    found = re.search(r"\bGPUs? (\d+(?:, \d+)*)", text)
    return tuple(int(number) for number in found[1].split(", ")) if found else ()


def _cost(cluster: Cluster, code: str, gpus: Sequence[int], finding: Finding) -> tuple[Cost | None, str]:
    if code == "lost_gpu":
        cost = group_cost(cluster)
        return cost, without_text(cluster, gpus) if cost is not None else ""
    if code in {"links", "slow_links"}:
        return group_cost(cluster), ""
    if code in {"fabric", "no_nvlink"}:
        return without_nvlink(cluster), ""
    if code == "half_bridged":
        return bridged_cost(cluster, gpus), ""
    if code == "pcie_width":
        lanes = re.search(r"x(\d+) of x(\d+)", finding.what)
        return (host_slowdown(cluster, gpus, int(lanes[1]) / int(lanes[2])), "") if lanes else (None, "")
    if code == "p2p":
        # Through host memory every byte crosses PCIe twice: out of one GPU, into the other.
        pair = re.search(r"\b(\d+)-(\d+)\b", finding.why)
        return (host_slowdown(cluster, (int(pair[1]), int(pair[2])), 0.5), "") if pair else (None, "")
    return None, ""


def _nvlink_joins_all(cluster: Cluster) -> bool:
    rates = NodeRates(node=cluster.groups[0].node, cluster=cluster)
    everyone = range(len(rates.node.gpus))
    hubs = {rates.ports[at][0] for at in everyone if at in rates.ports}
    return len(everyone) > 1 and all(at in rates.ports for at in everyone) and len(hubs) == 1


# From the links


def _structure(cluster: Cluster) -> list[HealthItem]:
    """Faults that the links themselves show, whether or not a probe's findings came with them."""
    node = cluster.groups[0].node
    kinds = {kind.name: kind for kind in cluster.gpu_kinds}
    found = []
    usual = usual_links(node)
    hub_links = [link for link in node.links if link.kind is LinkKind.NVSWITCH]
    totals = {gpu.index: links_of(node, gpu.vertex) for gpu in node.gpus}
    lost = [gpu.index for gpu in node.gpus if hub_links and not totals[gpu.index]]
    lost += [gpu.index for gpu in node.gpus if not gpu.healthy and gpu.index not in lost]
    for index in lost:
        cost = group_cost(cluster)
        tail = f"; {cost.text}{without_text(cluster, [index])}" if cost is not None else ""
        found.append(
            _item(
                "lost_gpu",
                ERROR,
                f"GPU {index} is off the NVLink fabric: it has no working NVLink, its peers have",
                f"its peers have {usual or 'working'} links",
                f"one such GPU pulls every collective it takes part in down to the PCIe path{tail}",
                f"leave GPU {index} out, then restart the fabric manager or reset it",
                gpus=(index,),
            )
        )
    for gpu in node.gpus:
        kind = kinds.get(gpu.kind)
        have = totals[gpu.index]
        if gpu.index in lost or not have:
            continue
        switched = any(link.a == gpu.vertex for link in hub_links)
        wanted = max(usual if switched else 0, kind.nvlink_links if kind is not None else 0)
        peers = [totals[other.index] for other in node.gpus if other.kind == gpu.kind and other.index != gpu.index]
        if have < wanted:
            # Without a switch a part of a machine looks the same: links to GPUs that this container was not given.
            sure = switched or any(count > have for count in peers)
            cost = group_cost(cluster) if switched else None
            found.append(
                _item(
                    "links",
                    WARNING if sure else INFO,
                    f"GPU {gpu.index} uses {have} of {wanted} NVLinks",
                    "its siblings have more" if sure and not switched else "the datasheet or its siblings have more",
                    f"it reaches its peers with {have}/{wanted} of the NVLink rate"
                    + (f"; {cost.text}" if cost is not None else ""),
                    "check `nvidia-smi nvlink -s`; with cards, whether all bridges between a pair are fitted and seated",
                    gpus=(gpu.index,),
                )
            )
    unsure = [
        int(link.a[3:])
        for link in hub_links
        if link.state is LinkState.UNKNOWN and link.a.removeprefix("gpu").isdigit()
    ]
    if unsure:
        found.append(
            _item(
                "fabric",
                ERROR,
                f"NVLink fabric not ready on {names(unsure)}",
                "the state of these links is unknown",
                "links that say Active may carry no data; nothing can be planned on them until they are measured"
                + (f"; {dead.text}" if (dead := without_nvlink(cluster)) is not None else ""),
                "check that the fabric manager runs and matches the driver's version, then measure",
                gpus=tuple(unsure),
            )
        )
    return found


def _mixed(cluster: Cluster, *, known: Iterable[str]) -> list[HealthItem]:
    node = cluster.groups[0].node
    used = sorted({gpu.kind for gpu in node.gpus})
    if len(used) < 2 or "mixed" in set(known):
        return []
    rates = [cluster.kind(name).peak_flops.get("bfloat16", 0.0) for name in used]
    slower = f"; the slowest has {min(rates) / max(rates):.0%} of the fastest's matmul rate" if min(rates) > 0 else ""
    return [
        _item(
            "mixed",
            WARNING,
            f"{len(used)} GPU models in one machine",
            ", ".join(used[:8]),
            f"a synchronous step runs at the rate, and in the memory, of the weakest{slower}",
            "use GPUs of one model, or choose them with CUDA_VISIBLE_DEVICES",
        )
    ]


def _against(cluster: Cluster, expected: Cluster) -> list[HealthItem]:
    """Compare counts, models and link classes with a machine it should be."""
    found = []
    have, want = cluster.groups[0].node, expected.groups[0].node
    if len(have.gpus) < len(want.gpus):
        ratio = len(want.gpus) / len(have.gpus) if have.gpus else 0.0
        found.append(
            _item(
                "missing_gpu",
                ERROR,
                f"{len(have.gpus)} GPUs found, {expected.name} has {len(want.gpus)}",
                "the sources list fewer GPUs than expected",
                f"the same work takes at least {ratio:.2f}x as long" if ratio else "nothing can run",
                "look for a lost GPU with `dmesg | grep Xid`, or check what the container was given",
            )
        )
    models = ({gpu.kind for gpu in have.gpus} - {"unknown"}, {gpu.kind for gpu in want.gpus})
    if have.gpus and models[0] and not models[0] <= models[1]:
        found.append(
            _item(
                "other_model",
                WARNING,
                f"the GPUs are {', '.join(sorted(models[0]))}, {expected.name} has {', '.join(sorted(models[1]))}",
                "the driver names another model",
                "estimates made for the expected machine do not hold",
                "plan with this machine's own cluster file",
            )
        )
    fewer = _fewer_links(have, want)
    if fewer:
        found.append(
            _item(
                "links",
                WARNING,
                f"{len(fewer)} GPUs have fewer NVLinks than {expected.name}",
                ", ".join(f"GPU {gpu}: {now} of {then}" for gpu, now, then in fewer[:16]),
                "collectives run at the rate of the weakest GPU",
                "check `nvidia-smi nvlink -s` for inactive links",
                gpus=tuple(gpu for gpu, _, _ in fewer),
            )
        )
    return found


def _fewer_links(have: Node, want: Node) -> list[tuple[int, int, int]]:
    wanted = {gpu.index: links_of(want, gpu.vertex) for gpu in want.gpus}
    counts = [(gpu.index, links_of(have, gpu.vertex), wanted.get(gpu.index, 0)) for gpu in have.gpus]
    return [row for row in counts if row[1] < row[2]]


def _merged(items: Iterable[HealthItem]) -> list[HealthItem]:
    """Make one item of those that say the same of the same GPU in other words: the worst, with all reasons."""
    kept: dict[tuple[str, tuple[int, ...]], HealthItem] = {}
    for number, item in enumerate(items):
        key = (item.code, item.gpus) if item.code in {"links", "lost_gpu"} and item.gpus else (f"{number}", ())
        other = kept.get(key)
        if other is None:
            kept[key] = item
            continue
        worst = min(other, item, key=lambda one: ORDER[one.severity])
        reasons = dict.fromkeys(reason for one in (other, item) for reason in one.why.split("; "))
        kept[key] = replace(worst, why="; ".join(reasons), cost=other.cost or item.cost)
    return list(kept.values())
