"""Pair rates and ring rates of the GPUs of one node, with shared links divided among the flows that use them.

Large collectives run as a ring through all GPUs of a group, and the ring's slowest hop bounds every rank. On one
NVSwitch the ring runs at port rate in any order. With direct NVLinks several rings run at once and share the links: the
best mix of rings is a small linear program. A hop without NVLink crosses PCIe and sockets, and all hops that cross the
same edge in the same direction divide its rate.

No networkx here: this runs for every candidate plan. `topology.rates.graph` has max-flow and min-cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import combinations, pairwise, permutations

from topology.cluster import Cluster, GpuKind, Link, LinkKind, LinkState, Node, VertexKind

# An NVSwitch crossing: two ports of ASTRA-sim's validated H100 network. A direct NVLink is taken to be the same.
NVLINK_LATENCY_S = 2 * 936.25e-9
# For a known topology with an unknown GPU model: one NVLink of the generations from V100 to H200, and the slowest PCIe
# slot in use. With these, distances between GPUs still compare correctly although the absolute rates are unknown.
ASSUMED_NVLINK_BYTES_PER_S = 25e9
ASSUMED_PCIE_BYTES_PER_S = 15.75e9
HOST_LATENCY_S = 5e-6  # assumed: a hop over PCIe, most of it software
MAX_RING_PACKING = 8  # GPUs of a group up to which all cycles are enumerated: 2,520 at most
MAX_RING_ORDERS = 5  # GPUs of a group up to which every order of a ring that leaves NVLink is tried

NVLINK_KINDS = frozenset({LinkKind.NVLINK, LinkKind.NVSWITCH})
HOST_KINDS = frozenset({LinkKind.PCIE, LinkKind.SMP, LinkKind.C2C})

Edge = tuple[str, str]


def gpu_kinds_of(cluster: Cluster, node: Node) -> dict[str, GpuKind]:
    """Return the kind of each GPU of a node, by its vertex."""
    kinds = {kind.name: kind for kind in cluster.gpu_kinds}
    return {gpu.vertex: kinds[gpu.kind] for gpu in node.gpus}


def link_rates(
    cluster: Cluster, node: Node, link: Link, kind_of: Mapping[str, GpuKind] | None = None
) -> tuple[float, float]:
    """Return (rate to plan with, rate in NCCL's model) of a link, bytes/s and direction; zeros for an absent one.

    A link of unknown rate gets what the datasheets of its GPUs allow, and an assumed rate where they are unknown too.
    `kind_of` is `gpu_kinds_of(cluster, node)`; pass it when asking about many links.
    """
    if link.state is LinkState.ABSENT:
        return 0.0, 0.0
    rate = link.best_bytes_per_s
    if rate is None:
        known = gpu_kinds_of(cluster, node) if kind_of is None else kind_of
        kinds = [known[end] for end in (link.a, link.b) if end in known]
        if link.kind in NVLINK_KINDS:
            rate = link.count * min((k.nvlink_bytes_per_s or ASSUMED_NVLINK_BYTES_PER_S for k in kinds), default=0.0)
        elif link.kind is LinkKind.C2C:
            rate = min((kind.c2c_bytes_per_s or ASSUMED_PCIE_BYTES_PER_S for kind in kinds), default=0.0)
        elif link.kind is LinkKind.NETWORK:
            rate = 0.0
        else:  # between switches and sockets: no narrower than the slots of the node
            near = kinds or [cluster.kind(name) for name in {gpu.kind for gpu in node.gpus}]
            rate = max((kind.pcie_bytes_per_s for kind in near), default=0.0) or ASSUMED_PCIE_BYTES_PER_S
    return rate, link.nccl_bytes_per_s if link.nccl_bytes_per_s is not None else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The best ring (or mix of rings) through some GPUs: bytes/s each rank sends, and over which layer.

    `loads` counts, per directed host edge, how often the ring crosses it; loads of concurrent rings add up.
    """

    bytes_per_s: float
    nccl_bytes_per_s: float
    latency_s: float
    layer: str  # nvswitch, nvlink, host, or self for one GPU
    loads: dict[Edge, int] = field(default_factory=dict)


@dataclass(slots=True)
class NodeRates:
    """The link rates of one node, indexed for queries about sets of its GPUs, which are given by position in the node.

    A GPU is `on_fabric` if it is healthy and, where most GPUs of the node have NVLink, has a working NVLink itself.
    """

    node: Node
    cluster: Cluster
    _rings: dict[tuple[int, ...], Ring] = field(default_factory=dict)
    _paths: dict[Edge, tuple[Edge, ...] | None] = field(default_factory=dict)
    ports: dict[int, tuple[str, float, float]] = field(default_factory=dict)  # GPU -> (hub, rate, NCCL rate)
    wires: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)  # GPU pair -> (rate, NCCL rate)
    host: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    multicast: frozenset[str] = frozenset()
    on_fabric: tuple[int, ...] = ()
    _tree_paths: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _uniform: bool | None = None
    _leaves: frozenset[str] = frozenset()  # GPUs and network ports, which forward nothing
    _cut: dict[str, set[str]] = field(default_factory=dict)  # host links that are listed but down

    def __post_init__(self) -> None:
        position = {gpu.vertex: i for i, gpu in enumerate(self.node.gpus)}
        self._leaves = frozenset((*position, *(nic.vertex for nic in self.node.nics)))
        kind_of = gpu_kinds_of(self.cluster, self.node)
        hubs = {v.id for v in self.node.vertices if v.kind is VertexKind.NVSWITCH}
        self.multicast = frozenset(v.id for v in self.node.vertices if v.id in hubs and v.multicast)
        for link in self.node.links:
            rate, nccl = link_rates(self.cluster, self.node, link, kind_of)
            if rate <= 0:
                if link.kind in HOST_KINDS:
                    self._cut.setdefault(link.a, set()).add(link.b)
                    self._cut.setdefault(link.b, set()).add(link.a)
                continue
            ends = [position[end] for end in (link.a, link.b) if end in position]
            if link.kind is LinkKind.NVSWITCH and len(ends) == 1:
                hub = link.b if link.a in position else link.a
                _, prior, prior_nccl = self.ports.get(ends[0], (hub, 0.0, 0.0))
                self.ports[ends[0]] = (hub, prior + rate, prior_nccl + nccl)
            elif link.kind is LinkKind.NVLINK and len(ends) == 2:
                pair = (min(ends), max(ends))
                prior, prior_nccl = self.wires.get(pair, (0.0, 0.0))
                self.wires[pair] = (prior + rate, prior_nccl + nccl)
            elif link.kind in HOST_KINDS:
                for a, b in ((link.a, link.b), (link.b, link.a)):
                    prior, prior_nccl = self.host.setdefault(a, {}).get(b, (0.0, 0.0))
                    self.host[a][b] = (prior + rate, prior_nccl + nccl)
        wired = {gpu for pair in self.wires for gpu in pair} | set(self.ports)
        dead = {i for i, gpu in enumerate(self.node.gpus) if i not in wired and self._cut_off(gpu.vertex)}
        healthy = [i for i, gpu in enumerate(self.node.gpus) if gpu.healthy and i not in dead]
        with_nvlink = [i for i in healthy if i in wired]
        lost = 0 < len(healthy) - len(with_nvlink) < len(with_nvlink)
        self.on_fabric = tuple(with_nvlink if lost else healthy)

    # Pairs

    def nvlink(self, a: int, b: int) -> tuple[float, float]:
        """Return (rate, NCCL rate) between two GPUs over NVLink, in bytes/s and direction; zeros where there is
        none.
        """
        if a in self.ports and b in self.ports and self.ports[a][0] == self.ports[b][0]:
            return min(self.ports[a][1], self.ports[b][1]), min(self.ports[a][2], self.ports[b][2])
        return self.wires.get((min(a, b), max(a, b)), (0.0, 0.0))

    def pair_bytes_per_s(self, a: int, b: int) -> float:
        """Return the rate of a single copy from one GPU to another: over NVLink if they have one, else via the host."""
        direct = self.nvlink(a, b)[0]
        return direct or self._ring_of([a, b], nvlink=False).bytes_per_s

    def pairs(self) -> dict[tuple[int, int], float]:
        """Return the rate of a single copy between each two GPUs, by index; 0 where no listed links join them."""
        gpus = list(enumerate(self.node.gpus))
        table = {}
        for (a, one), (b, other) in combinations(gpus, 2):
            joined = self.nvlink(a, b)[0] > 0 or self.host_path(one.vertex, other.vertex) is not None
            rate = self.pair_bytes_per_s(a, b) if joined else 0.0
            table[one.index, other.index] = table[other.index, one.index] = rate
        return table

    def host_path(self, a: str, b: str) -> tuple[Edge, ...] | None:
        """Return the directed edges of the shortest, then widest, path from `a` to `b` through the host.

        GPUs and network ports do not forward. None where the node lists no links that connect them.
        """
        if (a, b) not in self._paths:
            self._paths[a, b] = self._find_host_path(a, b)
        return self._paths[a, b]

    def _find_host_path(self, start: str, goal: str) -> tuple[Edge, ...] | None:
        leaves = self._leaves
        queue: list[tuple[int, float, str, tuple[Edge, ...]]] = [(0, -math.inf, start, ())]
        done = set()
        while queue:
            hops, narrow, here, path = heappop(queue)
            if here == goal:
                return path
            if here in done or (here in leaves and here != start):
                continue
            done.add(here)
            for there, (rate, _) in self.host.get(here, {}).items():
                if there not in done:
                    heappush(queue, (hops + 1, max(narrow, -rate), there, (*path, (here, there))))
        return None

    def _cut_off(self, vertex: str) -> bool:
        """Return whether a vertex has links to the host and all of them are down."""
        return vertex in self._cut and not self.host.get(vertex)

    def _severed(self, a: str, b: str) -> bool:
        """Return whether the listed links would connect two vertices if all of them were up."""
        if self._cut_off(a) or self._cut_off(b):
            return True
        seen, waiting = {a}, [a]
        while waiting and self._cut:
            here = waiting.pop()
            for there in {*self.host.get(here, ()), *self._cut.get(here, ())} - seen:
                seen.add(there)
                waiting.append(there)
        return b in seen

    # Rings

    @property
    def uniform(self) -> bool:
        """True if all GPU pairs have the same links: all on one hub at one rate, or a full mesh of equal links."""
        if self._uniform is None:
            every = range(len(self.node.gpus))
            rates = {self.nvlink(a, b) for a, b in combinations(every, 2)}
            self._uniform = len(every) < 2 or (len(rates) == 1 and rates != {(0.0, 0.0)} and self._one_hub(every))
        return self._uniform

    def _one_hub(self, gpus: Iterable[int]) -> bool:
        return len({self.ports.get(gpu, ("", 0.0, 0.0))[0] for gpu in gpus}) == 1

    def ring(self, gpus: Iterable[int]) -> Ring:
        """Return the best ring through `gpus` (positions), alone on the machine."""
        key = tuple(sorted(set(gpus)))
        if key not in self._rings:
            self._rings[key] = self._ring_of(key, nvlink=True)
        return self._rings[key]

    def single_ring(self, gpus: Iterable[int]) -> Ring:
        """Return a good single ring through `gpus`: a fast approximation of `ring` for comparing thousands of sets."""
        order = sorted(set(gpus), key=self._tree_path)
        if len(order) < 2 or (order[0] in self.ports and self._one_hub(order)):
            return self.ring(order)
        return self._ring_in_order(self._order_by_nvlink(order), nvlink=True)

    def concurrent_rings(self, groups: Sequence[Iterable[int]]) -> tuple[Ring, ...]:
        """Return the rings of several groups that run at the same time, each slowed by the host edges it shares."""
        rings = [self.ring(group) for group in groups]
        total: Counter[Edge] = Counter()
        for ring in rings:
            total.update(ring.loads)
        result = []
        for ring in rings:
            rate, nccl = ring.bytes_per_s, ring.nccl_bytes_per_s
            for (a, b), own in ring.loads.items():
                if total[a, b] > own:
                    rate = min(rate, self.host[a][b][0] / total[a, b])
                    nccl = min(nccl, self.host[a][b][1] / total[a, b])
            result.append(
                Ring(
                    bytes_per_s=rate,
                    nccl_bytes_per_s=nccl,
                    latency_s=ring.latency_s,
                    layer=ring.layer,
                    loads=ring.loads,
                )
            )
        return tuple(result)

    def _ring_of(self, gpus: Sequence[int], *, nvlink: bool) -> Ring:
        if len(gpus) < 2:
            return Ring(bytes_per_s=math.inf, nccl_bytes_per_s=math.inf, latency_s=0.0, layer="self")
        pairs = {(a, b): self.nvlink(a, b) for a, b in combinations(gpus, 2)} if nvlink else {}
        joined = {pair: rates for pair, rates in pairs.items() if rates[0] > 0}
        if joined and self._one_hub(gpus) and gpus[0] in self.ports:
            rate = min(self.ports[gpu][1] for gpu in gpus)
            nccl = min(self.ports[gpu][2] for gpu in gpus)
            return Ring(bytes_per_s=rate, nccl_bytes_per_s=nccl, latency_s=NVLINK_LATENCY_S, layer="nvswitch")
        if joined:
            rate = ring_packing({pair: rates[0] for pair, rates in joined.items()}, gpus)
            if rate > 0:
                nccl = ring_packing({pair: rates[1] for pair, rates in joined.items()}, gpus)
                return Ring(bytes_per_s=rate, nccl_bytes_per_s=nccl, latency_s=NVLINK_LATENCY_S, layer="nvlink")
        # Without NVLink, a ring in PCIe-tree order crosses every shared edge once per direction, which is optimal.
        in_tree_order = sorted(gpus, key=self._tree_path)
        if not joined:
            return self._ring_in_order(in_tree_order, nvlink=nvlink)
        if len(gpus) > MAX_RING_ORDERS:
            return self._ring_in_order(self._order_by_nvlink(in_tree_order), nvlink=nvlink)
        first, *rest = in_tree_order
        return max(
            (
                self._ring_in_order([first, *order], nvlink=nvlink)
                for order in permutations(rest)
                if order[0] <= order[-1]
            ),
            key=lambda ring: (ring.bytes_per_s, -sum(ring.loads.values())),
        )

    def _tree_path(self, gpu: int) -> tuple[str, ...]:
        """Return a GPU's path in the PCIe tree, root first: a sort key that keeps tree neighbours together."""
        if gpu not in self._tree_paths:
            self._tree_paths[gpu] = self._find_tree_path(gpu)
        return self._tree_paths[gpu]

    def _find_tree_path(self, gpu: int) -> tuple[str, ...]:
        vertex = self.node.gpus[gpu].vertex
        trail: list[str] = []
        kinds = {v.id: v.kind for v in self.node.vertices}
        while True:
            up = [other for other in self.host.get(vertex, {}) if other not in self._leaves and other not in trail]
            if not up or kinds.get(vertex) is VertexKind.CPU:
                return (*reversed(trail), f"{gpu:04d}")
            vertex = min(up)
            trail.append(vertex)

    def _order_by_nvlink(self, gpus: Sequence[int]) -> list[int]:
        """Return `gpus` in an order that follows NVLinks as long as possible before moving to the next island."""
        left, order = list(gpus), [gpus[0]]
        left.remove(gpus[0])
        while left:
            best = max(left, key=lambda gpu: (self.nvlink(order[-1], gpu)[0], -left.index(gpu)))
            order.append(best)
            left.remove(best)
        return order

    def _ring_in_order(self, order: Sequence[int], *, nvlink: bool) -> Ring:
        """Return one ring in this order, each hop over NVLink where there is one, else through the host."""
        loads: Counter[Edge] = Counter()
        rate = nccl = math.inf
        for a, b in pairwise([*order, order[0]]):
            direct = self.nvlink(a, b) if nvlink else (0.0, 0.0)
            if direct[0] > 0:
                rate, nccl = min(rate, direct[0]), min(nccl, direct[1])
                continue
            path = self.host_path(self.node.gpus[a].vertex, self.node.gpus[b].vertex)
            if path is None and self._severed(self.node.gpus[a].vertex, self.node.gpus[b].vertex):
                rate = nccl = 0.0
            elif path is None:  # no link listed in between: the slots of both ends bound it
                slots = (self.cluster.kind(self.node.gpus[gpu].kind).pcie_bytes_per_s for gpu in (a, b))
                slot = min(speed or ASSUMED_PCIE_BYTES_PER_S for speed in slots)
                rate, nccl = min(rate, slot), min(nccl, slot)
            else:
                loads.update(path)
        for (start, end), uses in loads.items():
            rate = min(rate, self.host[start][end][0] / uses)
            nccl = min(nccl, self.host[start][end][1] / uses)
        return Ring(bytes_per_s=rate, nccl_bytes_per_s=nccl, latency_s=HOST_LATENCY_S, layer="host", loads=dict(loads))


def ring_packing(capacity: dict[tuple[int, int], float], gpus: Sequence[int]) -> float:
    """Return the total rate of rings through all `gpus` that the wires carry at once; zero if no ring exists.

    `capacity` maps a pair (lower first) to bytes/s per direction. Each ring runs both ways round, so the answer is
    twice the largest fractional packing of Hamiltonian cycles. Rates may be split at will here; NCCL's channels are
    whole fractions of a link, so it can get a little less.
    """
    if len(gpus) == 2:
        return capacity.get((min(gpus), max(gpus)), 0.0)
    if len(capacity) == len(gpus) * (len(gpus) - 1) // 2 and len(set(capacity.values())) == 1:
        return (len(gpus) - 1) * next(iter(capacity.values()))  # an even mesh: all cycles alike fill every wire
    ends = [gpu for pair in capacity for gpu in pair]
    if any(ends.count(gpu) < 2 for gpu in gpus):
        return 0.0  # a ring enters and leaves every GPU
    if len(gpus) > MAX_RING_PACKING:
        return 0.0  # too many to enumerate: the caller takes a single ring
    cycles = _cycles(capacity, gpus)
    if not cycles:
        return 0.0
    # ortools takes a third of a second to load, and only irregular meshes need it.
    from ortools.linear_solver import pywraplp  # noqa: PLC0415

    solver = pywraplp.Solver.CreateSolver("GLOP")
    scale = max(capacity.values())  # rates of order one suit the solver
    rates = [solver.NumVar(0.0, solver.infinity(), f"ring{i}") for i in range(len(cycles))]
    for pair, limit in capacity.items():
        uses = [rate for rate, cycle in zip(rates, cycles, strict=True) if pair in cycle]
        if uses:
            solver.Add(solver.Sum(uses) <= limit / scale)
    solver.Maximize(solver.Sum(rates))
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return 0.0
    return float(2 * scale * solver.Objective().Value())


def _cycles(capacity: dict[tuple[int, int], float], gpus: Sequence[int]) -> list[frozenset[tuple[int, int]]]:
    """Return every cycle through all `gpus` along the wires of `capacity`, as sets of pairs."""
    neighbours: dict[int, list[int]] = {gpu: [] for gpu in gpus}
    for a, b in capacity:
        neighbours[a].append(b)
        neighbours[b].append(a)
    found: list[frozenset[tuple[int, int]]] = []
    start = gpus[0]

    def walk(path: list[int], seen: set[int]) -> None:
        if len(path) == len(gpus):
            if start in neighbours[path[-1]] and path[1] < path[-1]:
                found.append(frozenset((min(a, b), max(a, b)) for a, b in pairwise([*path, start])))
            return
        for gpu in neighbours[path[-1]]:
            if gpu not in seen:
                walk([*path, gpu], seen | {gpu})

    walk([start], {start})
    return found


def node_rates(cluster: Cluster, group: int = 0) -> NodeRates:
    """Return the `NodeRates` of a node group, cached per cluster object."""
    key = id(cluster)
    entry = _node_rates_cache.get(key)
    if entry is None or entry[0] is not cluster:
        if len(_node_rates_cache) >= 64:
            _node_rates_cache.clear()
        entry = _node_rates_cache[key] = (cluster, {})
    if group not in entry[1]:
        entry[1][group] = NodeRates(node=cluster.groups[group].node, cluster=cluster)
    return entry[1][group]


# Clusters hold dictionaries and cannot be hashed; each entry keeps its cluster alive, so its id stays its own.
_node_rates_cache: dict[int, tuple[Cluster, dict[int, NodeRates]]] = {}
