"""Routed tokens: experts on different ranks, and counts that say how many tokens go where (dropless MoE).

`"routed": {"y": {"over": "ep", "counts": [[...], ...]}}` has the operator that makes y run on tokens at their experts:
row r of `counts` says how many tokens rank r of a group over `ep` has for each expert, experts evenly on ranks. The counts
travel first, since a receiver cannot know them; then rows go out and, after the operator, come back (MegaBlocks, arXiv
2211.15841; Megatron-LM's all-to-all dispatcher). Ranks send different amounts; bytes are given for each, and the worst
counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from planner.sharding.collectives import ALL_TO_ALL, ALL_TO_ALL_V, Collective
from planner.sharding.layout import Layout, local_shape
from planner.sharding.mesh import Mesh
from planner.sharding.operator import Tensor
from topology.errors import BadInput

MAX_COUNTS = 1 << 20


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    over: str
    counts: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Tokens from rank (first index) to rank (second) of a group over a mesh axis, and experts a rank."""

    over: str
    tokens: tuple[tuple[int, ...], ...]
    experts_per_rank: int

    def dispatched(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> tuple[Collective, Collective]:
        """Return the exchange of counts and that of rows of `tensor`. Raises BadInput if counts are of other tokens."""
        n = len(self.tokens)
        held, elements = sum(self.tokens[0]), prod(local_shape(tensor.shape, layout, mesh))
        if any(sum(row) != held for row in self.tokens) or not held or elements % held:
            raise BadInput(
                f"the counts route {held} tokens a rank",
                why=f"a rank holds {elements} elements of {tensor.name}, and as many tokens as any other",
                remedy="rows of counts that add up to the tokens of a rank",
            )
        counts = Collective(
            kind=ALL_TO_ALL,
            mesh_dim=self.over,
            axes=(self.over,),
            group=n,
            dtype="i64",
            local_in=(n, self.experts_per_rank),
            local_out=(n, self.experts_per_rank),
            tensor=tensor.name,
            note="counts",
        )
        return counts, self._rows(tensor, elements // held, back=False)

    def combined(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> Collective:
        """Return the exchange that brings rows of the result back."""
        return self._rows(tensor, prod(local_shape(tensor.shape, layout, mesh)) // sum(self.tokens[0]), back=True)

    def _rows(self, tensor: Tensor, width: int, *, back: bool) -> Collective:
        n = len(self.tokens)
        sent = [sum(row) for row in self.tokens]
        got = [sum(self.tokens[r][to] for r in range(n)) for to in range(n)]
        ways = [(got[r], sent[r], got[r] - self.tokens[r][r]) for r in range(n)]
        if not back:
            ways = [(sent[r], got[r], sent[r] - self.tokens[r][r]) for r in range(n)]
        return Collective(
            kind=ALL_TO_ALL_V,
            mesh_dim=self.over,
            axes=(self.over,),
            group=n,
            dtype=tensor.dtype,
            local_in=(max(way[0] for way in ways), width),
            local_out=(max(way[1] for way in ways), width),
            tensor=tensor.name,
            rows=tuple(ways),
        )


def routings_of(data: Mapping[str, Any], mesh: Mesh, results: frozenset[str]) -> dict[str, Routing]:
    """Return how the operands of results are routed. Raises BadInput."""
    out = {}
    for name, value in data.items():
        try:
            text = msgspec.convert(value, _Text, strict=True)
        except (msgspec.ValidationError, RecursionError) as error:
            raise BadInput(f"cannot read the routing of {name[:40]!r}", why=str(error)) from error
        if name not in results or text.over not in mesh.names:
            raise BadInput(
                f"{name[:40]!r} is routed over {text.over[:40]!r}", remedy="a result, and an axis of the mesh"
            )
        n, experts = mesh.size(text.over), len(text.counts[0]) if text.counts else 0
        good = len(text.counts) == n and experts and experts % n == 0 and n * experts <= MAX_COUNTS
        if not good or any(len(row) != experts or min(row) < 0 or max(row) > MAX_COUNTS for row in text.counts):
            raise BadInput(
                f"the counts of {name[:40]!r} are of no use",
                why=f"a row for each of {n} ranks, a number for each expert, experts evenly on ranks",
                remedy="counts as [[...], ...]",
            )
        per = experts // n
        tokens = tuple(tuple(sum(row[to * per : (to + 1) * per]) for to in range(n)) for row in text.counts)
        out[name] = Routing(over=text.over, tokens=tokens, experts_per_rank=per)
    return out
