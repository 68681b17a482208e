"""Placements of DTensors and layouts of buffers: the same, written two ways."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

try:
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError:  # where torch makes it public
    from torch.distributed.tensor.placement_types import StridedShard

from simulator.sharded.program import Buffer, RunnableProgram
from topology.errors import BadInput


def tokens_of(placements: Sequence[Any]) -> list[str]:
    """Return DTensor placements as tokens: `R`, `S(0)`, `SS(0,2)`, `P(sum)`. Raises BadInput for any other kind."""
    return [_token(one) for one in placements]


def _token(one: Any) -> str:
    if isinstance(one, Replicate):
        return "R"
    if isinstance(one, Partial):
        return f"P({one.reduce_op})"
    factor = getattr(one, "split_factor", 1)
    if hasattr(one, "dim"):
        return f"S({one.dim})" if factor == 1 else f"SS({one.dim},{factor})"
    raise BadInput(f"{one} is no placement that is known", remedy="Replicate, Shard, _StridedShard or Partial")


def placements_of(buffer: Buffer, program: RunnableProgram) -> tuple[Any, ...]:
    """Return the layout of a buffer as DTensor placements, one a mesh axis."""
    sizes = dict(zip(program.mesh_names, program.mesh_shape, strict=True))
    found: dict[str, Any] = {name: Replicate() for name in program.mesh_names}
    found |= {axis: Partial("sum" if reducer == "mask" else reducer) for axis, reducer in buffer.pending.items()}
    for dim, spec in enumerate(buffer.dims):
        for position, axis in enumerate(spec):
            if isinstance(axis, str):
                later = program.mesh_names[program.mesh_names.index(axis) :]
                skipped = prod(
                    item if isinstance(item, int) else sizes[item]
                    for item in spec[:position]
                    if isinstance(item, int) or item in later
                )
                found[axis] = Shard(dim) if skipped == 1 else StridedShard(dim, split_factor=skipped)
    return tuple(found[name] for name in program.mesh_names)
