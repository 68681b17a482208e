"""The collectives of a redistribution, and the bytes they send.

Ring bytes are what one rank in a group of n sends when the collective runs as a ring. In terms of its buffer sizes:
all-gather (n-1) in, reduce-scatter (n-1) out, all-reduce 2 (n-1)/n in, all-to-all (n-1)/n in, permute and send in
(Thakur, Rabenseifner, Gropp, IJHPCA 2005, section 3). A permute counts the rank that sends most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from simulator.config.runtime import ELEMENT_BYTES

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"
ALL_TO_ALL_V = "all_to_all_v"
BROADCAST = "broadcast"
REDUCE = "reduce"
PERMUTE = "collective_permute"
SEND_RECV = "send_recv"
SLICE = "slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective in every group over `axes`. Shapes are those of local buffers, padded if sharding is uneven."""

    kind: str
    mesh_dim: str
    axes: tuple[str, ...]
    group: int
    dtype: str
    local_in: tuple[int, ...]
    local_out: tuple[int, ...]
    tensor: str = ""
    reducer: str = ""
    note: str = ""
    rows: tuple[tuple[int, int, int], ...] = ()  # by rank, if ranks differ: rows in, rows out, rows sent

    @property
    def bytes_in(self) -> int:
        return prod(self.local_in) * ELEMENT_BYTES[self.dtype]

    @property
    def bytes_out(self) -> int:
        return prod(self.local_out) * ELEMENT_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return prod(self.local_in[1:]) * ELEMENT_BYTES[self.dtype]

    @property
    def ring_send_bytes(self) -> Fraction:
        """Bytes sent by the rank that sends most."""
        n = self.group
        if self.rows:
            return Fraction(max(sent for _, _, sent in self.rows) * self.row_bytes)
        match self.kind:
            case "all_gather":
                return Fraction((n - 1) * self.bytes_in)
            case "reduce_scatter":
                return Fraction((n - 1) * self.bytes_out)
            case "all_reduce":
                return Fraction(2 * (n - 1) * self.bytes_in, n)
            case "all_to_all" | "all_to_all_v":
                return Fraction((n - 1) * self.bytes_in, n)
            case _:
                return Fraction(self.bytes_in)

    @property
    def hops(self) -> int:
        """Number of ring steps, each of which costs one latency."""
        return {ALL_REDUCE: 2 * (self.group - 1), PERMUTE: 1, SEND_RECV: 1}.get(self.kind, self.group - 1)


# Compared lexicographically: ring bytes a rank sends, times the ranks of the mesh to keep them integers; number of
# collectives; ring steps; buffer bytes; local slices.
Cost = tuple[int, int, int, int, int]
FREE: Cost = (0, 0, 0, 0, 0)


def add_costs(collective: Cost, other: Cost) -> Cost:
    return (
        collective[0] + other[0],
        collective[1] + other[1],
        collective[2] + other[2],
        collective[3] + other[3],
        collective[4] + other[4],
    )


def cost_of(collectives: Sequence[Collective], ranks: int, *, slices: int = 0) -> Cost:
    """Return the total cost of `collectives` and local `slices` on a mesh of `ranks`."""
    ring = count = hops = buffer_bytes = 0
    for collective in collectives:
        buffer, result, n = collective.bytes_in, collective.bytes_out, collective.group
        match collective.kind:
            case "all_gather":
                sent = (n - 1) * buffer * ranks
            case "reduce_scatter":
                sent = (n - 1) * result * ranks
            case "all_reduce":
                sent = 2 * (n - 1) * buffer * (ranks // n)
            case "all_to_all":
                sent = (n - 1) * buffer * (ranks // n)
            case _:
                sent = buffer * ranks
        ring, count, hops, buffer_bytes = (
            ring + sent,
            count + 1,
            hops + collective.hops,
            buffer_bytes + max(buffer, result),
        )
    return (ring, count, hops, buffer_bytes, slices)
