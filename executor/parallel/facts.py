"""Facts that a rank reads from its mesh and its model's modules, for `executor.run.effects`. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFacts:
    """The mesh as torch reports it: sizes by axis, ranks by coordinate, and whether it equals the plan's."""

    axes: dict[str, int]
    ranks: list[object]
    as_requested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Counts and names read from the modules themselves, not from the request.

    `most_shards`: the number of parts of the most divided weight. `tp_overlap`: the mode by site. `fsdp_exchange`: what
    exchanges blocks, empty if they are not sharded.
    """

    most_shards: int
    stored: str
    blocks: int
    recomputed_blocks: int
    compiled_graphs: int
    graph_breaks: int
    schedule: str | None
    micro_batches: int
    tp_overlap: dict[str, str]
    cp_method: str
    fsdp_exchange: str = ""
