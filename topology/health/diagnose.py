"""Compare a machine with what is expected of it; each difference has its cost in time and a remedy.

Faults come from three places: the findings of the probe, the links of the cluster (which may be from a file without
findings), and a measurement, if there is one. A fault found twice is one item. Nothing here reads the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from topology.cluster import Cluster, Finding, LinkKind, LinkState, Node
from topology.finding import ERROR, INFO, WARNING, gpu_names
from topology.health.cost import (
    Cost,
    HealthItem,
    cost_without_nvlink,
    group_cost,
    health_item,
    links_in_use,
    most_common_link_count,
    slow_host_link_cost,
    time_without_text,
    unbridged_pair_cost,
)
from topology.health.measurement_checks import evaluate_measurement
from topology.profile.measurement import Measurement
from topology.rates.node_rates import NodeRates

_item = partial(health_item, "links")

__all__ = ["Health", "HealthItem", "diagnose"]

# Findings that do not make a machine unhealthy: about texts or tools, or GPUs that a container was not given.
ADVICE = frozenset({"reading", "not_offered", "silent"})
ORDER = {ERROR: 0, WARNING: 1, INFO: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The verdict. `shared`: groups of GPUs that share an uplink to the host, as concurrent copies showed."""

    machine: str
    gpu_count: int
    items: tuple[HealthItem, ...]
    measured: bool = False
    shared: tuple[tuple[int, ...], ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether there is no warning or error about the machine itself."""
        return not any(item.severity is not INFO and item.code not in ADVICE for item in self.items)


def diagnose(cluster: Cluster, measured: Measurement | None = None, *, expected: Cluster | None = None) -> Health:
    """Compare the first node of `cluster` with the datasheets, `expected`, and the measurement.

    `expected` is the machine that it should be, such as one of the catalogue. A measurement with `device` cpu (a dry
    run) says nothing about a machine and is ignored.
    """
    node = cluster.groups[0].node
    items = [_from_finding(cluster, finding) for finding in cluster.findings]
    reported = {(item.code, gpu) for item in items for gpu in item.gpus}
    items += [item for item in _check_links(cluster) if not any((item.code, gpu) in reported for gpu in item.gpus)]
    if node.gpus:
        items += _check_models(cluster, known={item.code for item in items})
    if expected is not None:
        items += _compare_with_expected(cluster, expected)
    shared: tuple[tuple[int, ...], ...] = ()
    valid = measured is not None and measured.device != "cpu"
    if measured is not None and valid:
        measured_items, shared = evaluate_measurement(cluster, measured)
        items += measured_items
    return Health(
        machine=cluster.name,
        gpu_count=len(node.gpus),
        items=tuple(sorted(_merged(items), key=lambda item: ORDER[item.severity])),
        measured=valid,
        shared=shared,
    )


# From findings


def _from_finding(cluster: Cluster, finding: Finding) -> HealthItem:
    severity = finding.severity
    if finding.code == "hidden" and _nvlink_joins_all(cluster):
        severity = INFO  # no traffic between the GPUs takes the hidden paths
    cost, extra = _finding_cost(cluster, finding)
    return HealthItem(
        code=finding.code,
        severity=severity,
        what=finding.what,
        why=finding.why,
        consequence=finding.consequence + (f"; {cost.text}{extra}" if cost is not None else ""),
        remedy=finding.remedy,
        gpus=finding.gpus,
        numbers=finding.numbers,
        cost=cost,
        source="probe",
    )


def _finding_cost(cluster: Cluster, finding: Finding) -> tuple[Cost | None, str]:
    code, gpus = finding.code, finding.gpus
    if code == "lost_gpu":
        cost = group_cost(cluster)
        return cost, time_without_text(cluster, gpus) if cost is not None else ""
    if code in {"links", "slow_links"}:
        return group_cost(cluster), ""
    if code in {"fabric", "no_nvlink"}:
        return cost_without_nvlink(cluster), ""
    if code == "half_bridged":
        return unbridged_pair_cost(cluster, gpus), ""
    if code == "pcie_width":
        return slow_host_link_cost(cluster, gpus, finding.numbers.get("share", 1.0)), ""
    if code == "p2p":  # through host memory every byte crosses PCIe twice: out of one GPU, into the other
        return slow_host_link_cost(cluster, gpus[:2], 0.5), ""
    return None, ""


def _nvlink_joins_all(cluster: Cluster) -> bool:
    rates = NodeRates(node=cluster.groups[0].node, cluster=cluster)
    all_positions = range(len(rates.node.gpus))
    hubs = {rates.ports[at][0] for at in all_positions if at in rates.ports}
    return len(all_positions) > 1 and all(at in rates.ports for at in all_positions) and len(hubs) == 1


# From the links


def _check_links(cluster: Cluster) -> Iterator[HealthItem]:
    """Return faults that the links show, whether or not the cluster has findings of a probe."""
    node = cluster.groups[0].node
    kinds = {kind.name: kind for kind in cluster.gpu_kinds}
    usual = most_common_link_count(node)
    hub_links = [link for link in node.links if link.kind is LinkKind.NVSWITCH]
    totals = {gpu.index: links_in_use(node, gpu.vertex) for gpu in node.gpus}
    lost = [gpu.index for gpu in node.gpus if hub_links and not totals[gpu.index]]
    lost += [gpu.index for gpu in node.gpus if not gpu.healthy and gpu.index not in lost]
    for index in lost:
        cost = group_cost(cluster)
        tail = f"; {cost.text}{time_without_text(cluster, [index])}" if cost is not None else ""
        yield _item(
            "lost_gpu",
            ERROR,
            f"GPU {index} is off the NVLink fabric: it has no working NVLink, its peers have",
            f"its peers have {usual or 'working'} links",
            f"every collective with this GPU runs at the rate of the PCIe path{tail}",
            f"leave GPU {index} out, then restart the fabric manager or reset it",
            gpus=(index,),
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
            # Without a switch, links to GPUs that this container was not given look like missing links.
            sure = switched or any(count > have for count in peers)
            cost = group_cost(cluster) if switched else None
            yield _item(
                "links",
                WARNING if sure else INFO,
                f"GPU {gpu.index} uses {have} of {wanted} NVLinks",
                "its siblings have more" if sure and not switched else "the datasheet or its siblings have more",
                f"it reaches its peers with {have}/{wanted} of the NVLink rate"
                + (f"; {cost.text}" if cost is not None else ""),
                "check `nvidia-smi nvlink -s`; with cards, whether all bridges between a pair are fitted and seated",
                gpus=(gpu.index,),
            )
    unsure = [
        int(link.a[3:])
        for link in hub_links
        if link.state is LinkState.UNKNOWN and link.a.removeprefix("gpu").isdigit()
    ]
    if unsure:
        yield _item(
            "fabric",
            ERROR,
            f"NVLink fabric not ready on {gpu_names(unsure)}",
            "the state of these links is unknown",
            "links that say Active may carry no data; nothing can be planned on them until they are measured"
            + (f"; {without.text}" if (without := cost_without_nvlink(cluster)) is not None else ""),
            "check that the fabric manager runs and matches the driver's version, then measure",
            gpus=tuple(unsure),
        )


def _check_models(cluster: Cluster, *, known: Iterable[str]) -> list[HealthItem]:
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


def _compare_with_expected(cluster: Cluster, expected: Cluster) -> Iterator[HealthItem]:
    """Compare GPU count, models and NVLink counts with the expected machine."""
    have, want = cluster.groups[0].node, expected.groups[0].node
    if len(have.gpus) < len(want.gpus):
        ratio = len(want.gpus) / len(have.gpus) if have.gpus else 0.0
        yield _item(
            "missing_gpu",
            ERROR,
            f"{len(have.gpus)} GPUs found, {expected.name} has {len(want.gpus)}",
            "the sources list fewer GPUs than expected",
            f"the same work takes at least {ratio:.2f}x as long" if ratio else "nothing can run",
            "look for a lost GPU with `dmesg | grep Xid`, or check what the container was given",
        )
    models = ({gpu.kind for gpu in have.gpus} - {"unknown"}, {gpu.kind for gpu in want.gpus})
    if have.gpus and models[0] and not models[0] <= models[1]:
        yield _item(
            "other_model",
            WARNING,
            f"the GPUs are {', '.join(sorted(models[0]))}, {expected.name} has {', '.join(sorted(models[1]))}",
            "the driver names another model",
            "estimates made for the expected machine do not hold",
            "plan with this machine's own cluster file",
        )
    fewer = _fewer_links(have, want)
    if fewer:
        yield _item(
            "links",
            WARNING,
            f"{len(fewer)} GPUs have fewer NVLinks than {expected.name}",
            ", ".join(f"GPU {gpu}: {now} of {then}" for gpu, now, then in fewer[:16]),
            "collectives run at the rate of the weakest GPU",
            "check `nvidia-smi nvlink -s` for inactive links",
            gpus=tuple(gpu for gpu, _, _ in fewer),
        )


def _fewer_links(have: Node, want: Node) -> list[tuple[int, int, int]]:
    wanted = {gpu.index: links_in_use(want, gpu.vertex) for gpu in want.gpus}
    counts = [(gpu.index, links_in_use(have, gpu.vertex), wanted.get(gpu.index, 0)) for gpu in have.gpus]
    return [row for row in counts if row[1] < row[2]]


def _merged(items: Iterable[HealthItem]) -> list[HealthItem]:
    """Merge items about the same fault of the same GPU: the worst severity, with all reasons."""
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
