"""NCCL 2.30.7's own cost model, and the algorithm and protocol that it chooses.

NCCL chooses by a cost model of its own: it searches the topology for channels, gives every (algorithm, protocol) pair
a latency and a bandwidth, and takes the smallest `latency + bytes / bandwidth`. This module implements that model from
its source (github.com/NVIDIA/nccl @5067397c, src/graph/{topo.h,search.cc,tuning.cc}, src/sym_kernels.cc). It has two
uses: a baseline to be measured against, and the *choice* inside our own model, since a wrong choice of NCCL costs real
time (it leaves LL for Simple at 8 MiB on four GB200 although LL would be faster there).

Units inside are NCCL's: microseconds, and GB/s (1e9 bytes per second). The public functions speak seconds and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("LL", "LL128", "Simple")
TUNED_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

# Per-channel speeds the search tries, GB/s, fastest first (search.cc).
_Speeds = Mapping[int, tuple[float, ...]]
_INTRA_SPEEDS: _Speeds = {
    0: (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
    90: (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    100: (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
}
_INTER_SPEEDS: _Speeds = {
    0: (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    90: (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    100: (96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
}
MAX_CHANNELS = 32
LL128_BLACKWELL = 40.0  # GB/s per ring channel, 2.30.7
_NVLS_HEADS = 8
# PCIe cards of the SM100 generation are slower than every speed of its list. It is not known which speeds NCCL tries
# there.
_PCIE_SPEEDS = (15, 12, 9, 6, 3)

# tuning.cc. Rows are LL, LL128, Simple.
_BASE_LATENCY = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0)}
_HW_LATENCY = {
    "nvlink": {
        "tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "collnet_direct": (3.7,) * 3, "collnet_chain": (2.8,) * 3,
        "nvls": (25.0,) * 3, "nvls_tree": (25.0,) * 3, "pat": (4.0,) * 3,
    },
    "pci": {
        "tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "collnet_direct": (3.7,) * 3, "collnet_chain": (2.8,) * 3,
        "nvls": (0.0,) * 3, "nvls_tree": (0.0,) * 3, "pat": (4.0,) * 3,
    },
    "net": {
        "tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "collnet_direct": (31.0,) * 3, "collnet_chain": (30.0,) * 3,
        "nvls": (18.0,) * 3, "nvls_tree": (20.9,) * 3, "pat": (14.0,) * 3,
    },
}  # fmt: skip
# Columns are 1, 2, and 4 or more nodes; rows the generation: Volta, Ampere, Hopper, Blackwell.
LL_CAP = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_RING_LL128_PER_CHANNEL = (20.0, 20.0, 36.7)  # Blackwell's is a field of NcclMachine: releases differ
_TREE_LL128_PER_CHANNEL = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE_PER_CHANNEL = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE_PER_CHANNEL = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
# Factor of a tree's bandwidth, one row for each protocol, by log2(bytes / 64) (tuning.cc).
_TREE_CORRECTION = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclMachine:
    """The inputs of NCCL's formulas about a communicator and its machine. Rates are GB/s of NCCL's own topology model.

    `nvlink` is per GPU and direction, 0 without NVLink; `pcie` is the narrowest PCIe or socket link on the path
    between neighbours; `nic` is one port, `nics` how many ports a node gives this communicator.
    """

    ranks: int
    nodes: int = 1
    compute_capability: int = 90
    nvlink: float = 0.0
    pcie: float = 12.0
    nic: float = 0.0
    nics: int = 0
    nvls: bool = False
    amd_cpu: bool = False
    net_latency: float = 0.0  # microseconds, which NCCL reads from the network plugin
    ll128_blackwell: float = LL128_BLACKWELL  # GB/s that NCCL assumes for a Blackwell ring channel in LL128

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.ranks // self.nodes)

    @property
    def generation(self) -> int:
        """Row of the tuner's tables: 0 Volta and older, 1 Ampere and Ada, 2 Hopper, 3 Blackwell."""
        return sum(self.compute_capability >= floor for floor in (80, 90, 100))


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A channel search's result: how many channels, and the GB/s of each inside a node and between nodes."""

    channels: int
    bw_intra: float
    bw_inter: float

    @property
    def found(self) -> bool:
        return self.channels > 0


def _speed_list(table: _Speeds, compute_capability: int) -> tuple[float, ...]:
    return table[100 if compute_capability >= 100 else 90 if compute_capability >= 90 else 0]


@lru_cache(maxsize=1024)
def ring_graph(machine: NcclMachine) -> Graph:
    """Return the ring channels: of all per-channel speeds, the one whose whole number of channels uses the
    links best.
    """
    intra = machine.nvlink or machine.pcie
    inside = machine.ranks_per_node > 1
    speeds = _speed_list(_INTRA_SPEEDS if machine.nodes == 1 else _INTER_SPEEDS, machine.compute_capability)
    if not machine.nvlink and intra < speeds[-1]:
        speeds = _PCIE_SPEEDS
    best = (0.0, 0)
    for speed in speeds:
        fit = int(intra / speed + 1e-9) if inside else MAX_CHANNELS
        if machine.nodes > 1:
            fit = min(fit, machine.nics * int(machine.nic / speed + 1e-9))
        if best[1] and speed / best[0] <= 0.49:  # search.cc gives up when the next speed is less than half
            break
        fit = min(fit, MAX_CHANNELS)
        if fit * speed > best[0] * best[1] + 1e-9:
            best = (float(speed), fit)
    speed, channels = best
    if not channels:
        return Graph(channels=1, bw_intra=0.1, bw_inter=0.1)
    return _duplicate(machine, speed, channels)


def network_rates(machine: NcclMachine) -> tuple[float, ...]:
    """Return the NIC rates in GB/s, ascending and up to the machine's, just below which NCCL's search finds other
    channels.
    """
    if machine.nodes == 1:
        return ()
    speeds = _speed_list(_INTER_SPEEDS, machine.compute_capability)
    counts = range(1, MAX_CHANNELS + 1)
    found = {count * speed for speed in speeds for count in counts if count * speed <= machine.nic}
    return tuple(at * (1 - 1e-6) for at in sorted(found))


def _duplicate(machine: NcclMachine, speed: float, channels: int) -> Graph:
    """Split fast channels in two, since one CTA cannot drive them."""
    few = machine.compute_capability >= 100 and speed < 50 and channels > 4
    if speed >= 25 and not few and 2 * channels <= MAX_CHANNELS:
        channels, speed = 2 * channels, speed / 2
    return Graph(channels=channels, bw_intra=speed, bw_inter=speed)


def tree_graph(machine: NcclMachine) -> Graph:
    """Return the tree channels: as many as the ring has, at the speed that a chain through the node allows.

    A chain over n GPUs loads each port (n - 1)/n of the time when the ends rotate. Two real graph dumps agree: two
    H200 12 x 60, four GB300 16 x 50 (a perfectly balanced 60 is not found, so 5 % must stay free above two GPUs).
    """
    ring = ring_graph(machine)
    n = machine.ranks_per_node
    if not machine.nvlink or n < 2 or machine.nodes > 1:
        return ring
    room = machine.nvlink * (1.0 if n == 2 else 0.95)
    speeds = _speed_list(_INTRA_SPEEDS, machine.compute_capability)
    fits = [speed for speed in speeds if ring.channels * speed * (n - 1) / n <= room]
    speed = max([float(speed) for speed in fits] + [ring.bw_intra])
    return Graph(channels=ring.channels, bw_intra=speed, bw_inter=speed)


def nvls_graph(machine: NcclMachine) -> Graph:
    """Return the NVLS heads: one for each GPU of a node, each port carrying n + 1 of them.

    A rack-wide NVLink domain is given eight, as in the graph dump of two GB300 trays; 8 x 80 GB/s also gives the 839
    GB/s measured on all 72 GPUs of an NVL72.
    """
    n = min(machine.ranks_per_node, _NVLS_HEADS)
    if not (machine.nvls and machine.nvlink and machine.compute_capability >= 90 and n > 1):
        return Graph(channels=0, bw_intra=0.0, bw_inter=0.0)
    speeds = _speed_list(_INTRA_SPEEDS, machine.compute_capability)
    speed = next((float(speed) for speed in speeds if (n + 1) * speed <= machine.nvlink), 0.0)
    inter = machine.nic * machine.nics / n if machine.nodes > 1 else speed
    return Graph(channels=n if speed else 0, bw_intra=speed, bw_inter=min(inter, 2 * speed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Latency in us and algorithm bandwidth in GB/s of one (op, algorithm, protocol)."""

    algorithm: str
    protocol: str
    latency: float
    bandwidth: float


def _node_column(nodes: int) -> int:
    return 0 if nodes == 1 else 1 if nodes == 2 else 2


@lru_cache(maxsize=1024)
def lines(machine: NcclMachine, op: str, *, allow_nvls: bool = True) -> tuple[Line, ...]:
    """Return every enabled (algorithm, protocol) of `op` with its latency and bandwidth."""
    if machine.ranks < 2 or op not in TUNED_OPS:
        return ()
    found = []
    for algorithm in ALGORITHMS:
        if algorithm.startswith("collnet") or (algorithm.startswith("nvls") and not allow_nvls):
            continue  # CollNet needs a SHARP plugin, which no catalogue machine declares
        for row, protocol in enumerate(PROTOCOLS):
            bandwidth = _bandwidth(machine, op, algorithm, row)
            if bandwidth > 0:
                latency = _latency(machine, op, algorithm, row)
                found.append(Line(algorithm=algorithm, protocol=protocol, latency=latency, bandwidth=bandwidth))
    return tuple(found)


def _steps(machine: NcclMachine, op: str) -> tuple[int, int]:
    """Return (all ring steps, those between nodes)."""
    n, k = machine.ranks, machine.nodes
    if op == "all_reduce":
        return 2 * (n - 1), 2 * (k - 1)
    if op == "broadcast":
        return n, k
    return n - 1, k - 1


def _bandwidth(machine: NcclMachine, op: str, algorithm: str, row: int) -> float:
    """Return algorithm bandwidth in GB/s; 0 where the pair does not exist."""
    n, k, ppn = machine.ranks, machine.nodes, machine.ranks_per_node
    generation, column = machine.generation, _node_column(k)
    protocol = PROTOCOLS[row]
    if protocol == "LL128" and (not machine.nvlink or machine.compute_capability < 70):
        return 0.0  # LL128 needs the 128-byte stores of NVLink to stay whole
    steps, _ = _steps(machine, op)
    if algorithm in {"nvls", "nvls_tree"}:
        return _nvls_bandwidth(machine, op, algorithm, row)
    graph = tree_graph(machine) if algorithm == "tree" else ring_graph(machine)
    bus = graph.channels * (graph.bw_intra if k <= 2 else graph.bw_inter)
    ll_row = generation if k == 1 else (1 if machine.amd_cpu else 0)
    ll_cap = LL_CAP[ll_row][column]
    if algorithm == "ring":
        if protocol == "LL":
            bus = min(ll_cap, 0.5 * bus)
        elif protocol == "LL128":
            per_channel = (*_RING_LL128_PER_CHANNEL, machine.ll128_blackwell)[generation]
            bus = min((0.7 if ppn < 2 else 0.92) * bus, graph.channels * per_channel)
        return bus * n / steps
    if algorithm == "tree":
        if op != "all_reduce":
            return 0.0
        bus = min(0.92 * bus, graph.channels * _TREE_PER_CHANNEL[generation][column])
        if protocol == "LL":
            bus = min(bus / 3.8, ll_cap)
        elif protocol == "LL128":
            factor = 7.0 / 9.0 if k == 1 else 120.0 / 128.0
            bus = min(factor * bus, graph.channels * _TREE_LL128_PER_CHANNEL[generation][column])
        return 0.5 * bus
    if algorithm == "pat" and protocol == "Simple" and op in {"all_gather", "reduce_scatter"} and ppn == 1 and k > 1:
        return 0.75 * bus
    return 0.0


def _nvls_bandwidth(machine: NcclMachine, op: str, algorithm: str, row: int) -> float:
    n, k, ppn = machine.ranks, machine.nodes, machine.ranks_per_node
    graph = nvls_graph(machine)
    if PROTOCOLS[row] != "Simple" or not graph.found or op == "broadcast":
        return 0.0
    if (algorithm == "nvls") != (k == 1) or (algorithm == "nvls_tree" and op != "all_reduce"):
        return 0.0
    heads = graph.channels
    intra = graph.bw_intra * _NVLS_EFFICIENCY[machine.generation] * (heads - 1) / heads
    intra *= 2.0 if op == "all_reduce" else (ppn - 1) / ppn
    if algorithm == "nvls":
        return heads * intra * n / _steps(machine, op)[0]
    inter = graph.bw_inter * (2.0 if k <= 2 else 1.0)
    cap = _NVLS_TREE_PER_CHANNEL[machine.generation][_node_column(k)]
    return heads * min(intra, inter, cap) * n / _steps(machine, op)[0]


def _latency(machine: NcclMachine, op: str, algorithm: str, row: int) -> float:
    """Return the latency in us."""
    n, k, ppn = machine.ranks, machine.nodes, machine.ranks_per_node
    base = _BASE_LATENCY.get(algorithm, (0.0, 0.0, 0.0))[row]
    intra = _HW_LATENCY["nvlink" if machine.nvlink else "pci"][algorithm][row]
    inter = _HW_LATENCY["net"][algorithm][row]
    if k > 1:
        inter += machine.net_latency * (2 if PROTOCOLS[row] == "Simple" else 1)
    if algorithm == "ring":
        if ppn == 1 and k > 1:
            inter = _HW_LATENCY["net"]["tree"][row]
        steps, between = _steps(machine, op)
        overhead = (2.0 if machine.amd_cpu else 1.0) if k > 1 else 0.0
        if PROTOCOLS[row] == "Simple":
            overhead *= 3
        return base + (steps - between) * max(intra, overhead) + between * inter
    if algorithm == "tree":
        return base + 2 * ((ppn - 1) * intra + math.log2(k) * inter)
    if algorithm == "nvls":
        return base + intra + (inter if k > 1 else 0.0)
    if algorithm == "nvls_tree":
        return base + intra + 2 * math.log2(k) * inter
    return base + math.log2(k) * inter / 3.5 + 2.8 * n  # pat


def line_time_us(machine: NcclMachine, op: str, line: Line, nbytes: Floats) -> Floats:
    """Return NCCL's predicted us for sizes (float array, bytes), with its corrections."""
    bandwidth = np.full_like(nbytes, line.bandwidth)
    latency = np.full_like(nbytes, line.latency)
    row = PROTOCOLS.index(line.protocol)
    nvls_tree = line.algorithm == "nvls_tree" and machine.compute_capability >= 100
    if (line.algorithm == "tree" and op == "all_reduce") or nvls_tree:
        table = np.array(_TREE_CORRECTION[row])
        index = np.floor(np.log2(np.maximum(nbytes / 64, 1.0))).astype(int)
        bandwidth = bandwidth * np.where(index < len(table), table[np.minimum(index, len(table) - 1)], 1.0)
    if line.algorithm == "ring" and line.protocol == "Simple" and machine.nodes > 1 and op == "all_reduce":
        channels = 2 * ring_graph(machine).channels
        plateau = 1.9 if machine.compute_capability < 80 else 1.4
        latency = np.where(nbytes / (channels * machine.ranks) >= 64, latency * plateau, latency)
    return latency + nbytes / (1000.0 * bandwidth)


def choose(
    machine: NcclMachine, op: str, nbytes: ArrayLike, *, allow_nvls: bool = True
) -> tuple[Floats, NDArray[np.intp], tuple[Line, ...]]:
    """Return NCCL's (seconds, index into lines, lines) for every size. Empty lines: the op is not tuned
    (all-to-all).
    """
    sizes = np.atleast_1d(np.asarray(nbytes, dtype=np.float64))
    options = lines(machine, op, allow_nvls=allow_nvls)
    if not options:
        return np.full_like(sizes, np.nan), np.zeros(sizes.shape, dtype=np.intp), ()
    table = np.stack([line_time_us(machine, op, line, sizes) for line in options])
    index = np.argmin(table, axis=0)
    return np.min(table, axis=0) * 1e-6, index, options


@lru_cache(maxsize=1024)
def switches(
    machine: NcclMachine, op: str, *, allow_nvls: bool = True
) -> tuple[Floats, NDArray[np.intp], tuple[Line, ...]]:
    """Return (sizes at which the choice changes, lines chosen from each on, lines), for costing many calls at once.

    The first size is 0. Found on a grid of 64 sizes an octave up to 4 TiB that holds every power of two.
    """
    grid = 2.0 ** (np.arange(42 * 64 + 1) / 64)
    _, pick, options = choose(machine, op, grid, allow_nvls=allow_nvls)
    changes = np.flatnonzero(np.diff(pick)) + 1
    return np.concatenate(([0.0], grid[changes])), np.concatenate((pick[:1], pick[changes])), options
