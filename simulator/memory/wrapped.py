"""State of a unit in a rank's replay: its tensors for a micro batch, and its parameters while they are used."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.memory.allocator import Block
from simulator.memory.plan_tensors import Held, Piece


@dataclass(slots=True, eq=False)
class Instance:
    """A unit for one micro batch: its tensors by slot, and what the second half of a split backward pass still
    needs.
    """

    slots: dict[int, Block] = field(default_factory=dict)
    from_forward: frozenset[int] = frozenset()
    later: tuple[Piece, ...] = ()
    casts: list[Block] = field(default_factory=list)
    away: dict[int, int] = field(default_factory=dict)  # bytes of tensors that wait in host memory, by slot


@dataclass(slots=True)
class Wrapped:
    """A unit's parameters: unsharded ones while gathered, gradients being reduced, gradients that stay, and in a pass
    `fresh` ones, with the bytes that they will have in the type of reductions.
    """

    elements: list[Held]
    gathered: list[Block] = field(default_factory=list)
    flat: Block | None = None
    whole_gradients: dict[int, Block] = field(default_factory=dict)
    gradients: list[Block] = field(default_factory=list)
    fresh: dict[int, tuple[Block, float]] = field(default_factory=dict)
