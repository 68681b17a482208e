"""The interface between programs and machines: costs of instructions.

The engine asks a `CostModel` how long an instruction takes on an otherwise idle machine and what it uses meanwhile;
what happens when several want the same SMs, memory or link is then arithmetic (`simulator.engine.contention`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from simulator.program.program import Instruction, Kernel

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One kernel, copy or transfer on an idle machine.

    `sms` are occupied on every rank taking part; `hbm_bytes_per_s` is the demand on the memory of every such rank,
    `link_bytes_per_s` that on the links of the transfer, averaged over `seconds` (a small message has a low demand
    because of its latency, so contention for bandwidth lengthens it little). `launches` is the number of launches that
    a kernel stands for. A copy within a GPU has `taken`: the share that it takes of the speed that kernels have left.
    """

    seconds: float
    sms: float = 0.0
    taken: float = 0.0
    hbm_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    launches: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits:
    """A GPU's shared resources, and how many kernels that have not begun one of its streams holds before the host
    waits.
    """

    sms: float = float("inf")
    queue: float = float("inf")
    hbm_bytes_per_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """A transfer puts `share` of its `link_bytes_per_s` on `link` (two legs through one port: share 2)."""

    link: Hashable
    share: float = 1.0


class CostModel(Protocol):
    """Costs on one machine. `ranks` is `(rank,)` for a kernel, the group for a collective, `(from, to)` for a message.

    Every method must be a pure function, since the engine caches results.
    """

    def cost(self, instruction: Kernel, ranks: Ranks) -> Cost:
        """Return what a kernel, copy or transfer costs."""
        ...

    def host_s(self, instruction: Instruction) -> float:
        """Return how long the host thread needs to issue `instruction`; HostWork adds its own duration. Asked once for
        kernels and transfers of a rank that have the same cost.
        """
        ...

    def limits(self, rank: int) -> GpuLimits:
        """Return the shared resources of the GPU of `rank`."""
        ...

    def routes(self, ranks: Ranks) -> tuple[LinkUse, ...]:
        """Return the shared links that a transfer among `ranks` crosses; links that are not shared may be left out.

        For one rank: the links its copies to and from the host cross. For two: a message from the first to the second;
        for a collective of two ranks the engine asks in both directions.
        """
        ...

    def link_bytes_per_s(self, link: Hashable) -> float:
        """Return the capacity of a link, whose name includes its direction."""
        ...

    def kind(self, ranks: Ranks) -> Hashable:
        """Return a key such that tuples of ranks with equal keys cost the same, whatever the instruction.

        For one rank the key also stands for its `limits`. This allows symmetric ranks to be simulated once.
        """
        ...
