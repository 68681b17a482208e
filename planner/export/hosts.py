"""Hosts in the order of their ranks, and the GPUs of each host in the order of its local ranks.

A launcher numbers ranks host by host. A placement can be expressed if the ranks of every host are consecutive and equal
in number: by the order of hosts, and by `CUDA_VISIBLE_DEVICES` on each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from simulator.config.plan import Plan
from topology.cluster import Cluster, Gpu
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """`order[k]` is the physical host with node rank k, and `devices[k]` are its GPUs by local rank.

    `installed` is the number of GPUs of the largest host.
    """

    order: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    installed: int

    @property
    def count(self) -> int:
        return len(self.order)

    @property
    def ranks_per_host(self) -> int:
        return len(self.devices[0])

    @property
    def gpus_to_request(self) -> int:
        """GPUs to request from a scheduler: those of the whole host if ranks use particular GPUs."""
        return self.installed if self.devices_matter else self.ranks_per_host

    @property
    def same_devices(self) -> bool:
        return len(set(self.devices)) == 1

    @property
    def devices_matter(self) -> bool:
        """Whether the devices differ from the launcher's default, GPU i for local rank i."""
        return any(devices != tuple(range(len(devices))) for devices in self.devices)

    @property
    def order_matters(self) -> bool:
        return self.order != tuple(range(len(self.order)))


def hosts_of(plan: Plan, cluster: Cluster) -> Hosts:
    """Return the hosts of the ranks of `plan` on `cluster`. Raises Infeasible for a placement no launcher can start."""
    slots = _slots(cluster, max(plan.placement, default=0) + plan.gpus)
    placement = plan.placement or tuple(slots)[: plan.gpus]
    if len(placement) < plan.gpus:
        raise Infeasible(f"the plan needs {plan.gpus} GPUs, {cluster.name} has {len(slots)}")
    missing = sorted(number for number in set(placement) if number not in slots)
    if missing:
        raise Infeasible(
            f"the plan places ranks on GPU {', '.join(map(str, missing[:8]))}, which {cluster.name} does not have"
        )
    by_host: list[tuple[int, list[int]]] = []
    for number in placement:
        host, device = slots[number]
        if not by_host or by_host[-1][0] != host:
            by_host.append((host, []))
        by_host[-1][1].append(device)
    order = tuple(host for host, _ in by_host)
    if len(set(order)) < len(order):
        raise Infeasible(
            "the placement interleaves hosts: the ranks of one are not consecutive",
            why="launchers number ranks host by host",
            remedy="place whole hosts one after the other",
        )
    counts = {len(devices) for _, devices in by_host}
    if len(counts) > 1:
        raise Infeasible(
            f"hosts get {' and '.join(map(str, sorted(counts)))} ranks",
            why="a launcher starts the same number on each",
            remedy="plan for a number of GPUs that fills hosts evenly",
        )
    installed = max(Counter((group_index, gpu.tray) for group_index, gpu in _installed(cluster)).values())
    return Hosts(order=order, devices=tuple(tuple(devices) for _, devices in by_host), installed=installed)


def _installed(cluster: Cluster) -> Iterator[tuple[int, Gpu]]:
    for number, group in enumerate(cluster.groups):
        for gpu in group.node.gpus:
            yield number, gpu


def _slots(cluster: Cluster, wanted: int) -> dict[int, tuple[int, int]]:
    """Return (host, device on it) by GPU number. The trays of a rack are separate hosts with their own numbering.

    The number of a GPU in a placement is the first number of its node plus its index, as in the executor.
    """
    slots: dict[int, tuple[int, int]] = {}
    first = host = 0
    for group in cluster.groups:
        gpus = group.node.gpus
        trays = sorted({gpu.tray for gpu in gpus})
        least = {tray: min(gpu.index for gpu in gpus if gpu.tray == tray) for tray in trays}
        for _ in range(group.count):
            for gpu in gpus:
                device = gpu.index - (least[gpu.tray] if len(trays) > 1 else 0)
                slots[first + gpu.index] = (host + trays.index(gpu.tray), device)
            first += len(gpus)
            host += len(trays)
            if first >= wanted and len(slots) >= wanted:
                return slots
    return slots
