"""Dropless MoE token routing: experts on different ranks, and token counts that say how many tokens each expert gets.

`"routed": {"y": {"over": "ep", "counts": [[...], ...]}}` runs the operator that produces y on tokens dispatched to
their experts. Row r of `counts` has the tokens of rank r (in a group over `ep`) for each expert; experts are spread
evenly over ranks. The counts are exchanged first, since receivers do not know them; then tokens are dispatched and,
after the operator, combined (MegaBlocks, arXiv 2211.15841; Megatron-LM's all-to-all dispatcher). Ranks send different
amounts: bytes are reported for each rank, and the rank that sends most determines the cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from planner.sharding.layouts.collectives import ALL_TO_ALL, ALL_TO_ALL_V, Collective
from planner.sharding.layouts.layout import Layout, Mesh, local_shape
from planner.sharding.operators.operator import Tensor
from topology.errors import BadInput

MAX_COUNTS = 1 << 20


class _RoutingText(msgspec.Struct, forbid_unknown_fields=True):
    over: str
    counts: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRouting:
    """`tokens[source][target]` between the ranks of a group over `mesh_axis`, and experts per rank."""

    mesh_axis: str
    tokens: tuple[tuple[int, ...], ...]
    experts_per_rank: int

    def dispatch_collectives(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> tuple[Collective, Collective]:
        """Return the all-to-alls of counts and of the rows of `tensor`.

        Raises BadInput if its tokens differ from the counts.
        """
        n = len(self.tokens)
        tokens_per_rank, elements = sum(self.tokens[0]), prod(local_shape(tensor.shape, layout, mesh))
        if any(sum(row) != tokens_per_rank for row in self.tokens) or not tokens_per_rank or elements % tokens_per_rank:
            raise BadInput(
                f"the counts route {tokens_per_rank} tokens a rank",
                why=f"a rank holds {elements} elements of {tensor.name}, and as many tokens as any other",
                remedy="rows of counts that add up to the tokens of a rank",
            )
        counts = Collective(
            kind=ALL_TO_ALL,
            mesh_dim=self.mesh_axis,
            axes=(self.mesh_axis,),
            group=n,
            dtype="i64",
            local_in=(n, self.experts_per_rank),
            local_out=(n, self.experts_per_rank),
            tensor=tensor.name,
            note="counts",
        )
        return counts, self._rows(tensor, elements // tokens_per_rank, back=False)

    def combine_collective(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> Collective:
        """Return the all-to-all that returns the rows of the result to their ranks."""
        return self._rows(tensor, prod(local_shape(tensor.shape, layout, mesh)) // sum(self.tokens[0]), back=True)

    def _rows(self, tensor: Tensor, width: int, *, back: bool) -> Collective:
        n = len(self.tokens)
        sent = [sum(row) for row in self.tokens]
        received = [sum(self.tokens[r][to] for r in range(n)) for to in range(n)]
        rows = [(received[r], sent[r], received[r] - self.tokens[r][r]) for r in range(n)]
        if not back:
            rows = [(sent[r], received[r], sent[r] - self.tokens[r][r]) for r in range(n)]
        return Collective(
            kind=ALL_TO_ALL_V,
            mesh_dim=self.mesh_axis,
            axes=(self.mesh_axis,),
            group=n,
            dtype=tensor.dtype,
            local_in=(max(row[0] for row in rows), width),
            local_out=(max(row[1] for row in rows), width),
            tensor=tensor.name,
            rows=tuple(rows),
        )


def parse_routings(data: Mapping[str, Any], mesh: Mesh, results: frozenset[str]) -> dict[str, TokenRouting]:
    """Parse the routing of results by name. Raises BadInput."""
    out = {}
    for name, value in data.items():
        try:
            text = msgspec.convert(value, _RoutingText, strict=True)
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
                f"the counts of {name[:40]!r} do not fit the mesh",
                why=f"they need a row for each of {n} ranks and a number for each expert, experts evenly on ranks",
                remedy="counts as [[...], ...]",
            )
        per = experts // n
        tokens = tuple(tuple(sum(row[to * per : (to + 1) * per]) for to in range(n)) for row in text.counts)
        out[name] = TokenRouting(mesh_axis=text.over, tokens=tokens, experts_per_rank=per)
    return out
