"""The primitives of a redistribution, and their bytes.

Ring bytes are what one rank of a group of n sends when the collective runs as a ring, counted from its buffers:
all-gather (n-1) in, reduce-scatter (n-1) out, all-reduce 2 (n-1)/n in, all-to-all (n-1)/n in, permute and send in.
(Thakur, Rabenseifner, Gropp, IJHPCA 2005, section 3; a permute counts its worst rank.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

DTYPE_BYTES = {
    **dict.fromkeys(("f64", "i64", "u64", "c64"), 8),
    **dict.fromkeys(("f32", "i32", "u32"), 4),
    **dict.fromkeys(("bf16", "f16", "i16", "u16"), 2),
    **dict.fromkeys(("f8", "fp8", "f8e4m3", "f8e5m2", "i8", "u8", "bool"), 1),
}

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"
ALL_TO_ALL_V = "all_to_all_v"
PERMUTE = "collective_permute"
SEND_RECV = "send_recv"
SLICE = "slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of every group over `axes`. Shapes are of the local buffers, padded where cuts are uneven."""

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

    @property
    def bytes_in(self) -> int:
        return prod(self.local_in) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_out(self) -> int:
        return prod(self.local_out) * DTYPE_BYTES[self.dtype]

    @property
    def ring_send_bytes(self) -> Fraction:
        """Bytes that the worst rank sends."""
        n = self.group
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
        """Steps of the ring, each of which costs a latency."""
        return {ALL_REDUCE: 2 * (self.group - 1), PERMUTE: 1, SEND_RECV: 1}.get(self.kind, self.group - 1)


# Compared in this order: ring bytes that a rank sends, in units of one byte divided by the ranks of the mesh, which keeps
# them whole; collectives to start; ring steps; bytes of buffers; local slices.
Cost = tuple[int, int, int, int, int]
FREE: Cost = (0, 0, 0, 0, 0)


def plus(one: Cost, other: Cost) -> Cost:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3], one[4] + other[4])


def cost_of(collectives: Sequence[Collective], ranks: int, *, slices: int = 0) -> Cost:
    """Return the cost of `collectives` and local `slices` together, on a mesh of `ranks`."""
    ring = count = hops = held = 0
    for one in collectives:
        buffer, result, n = one.bytes_in, one.bytes_out, one.group
        match one.kind:
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
        ring, count, hops, held = ring + sent, count + 1, hops + one.hops, held + max(buffer, result)
    return (ring, count, hops, held, slices)
