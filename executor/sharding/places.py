"""The place of a rank in the mesh, and the elements of a tensor in its piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from simulator.sharded.program import Buffer, RunnableProgram, coordinates
from topology.errors import BadInput

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}


@dataclass(frozen=True, slots=True)
class Place:
    """The coordinates of a rank, and the sizes of all mesh axes."""

    at: dict[str, int]
    sizes: dict[str, int]

    @classmethod
    def of(cls, program: RunnableProgram, rank: int) -> Place:
        sizes = dict(zip(program.mesh_names, program.mesh_shape, strict=True))
        return cls(coordinates(program.mesh_names, program.mesh_shape, rank), sizes)

    def position(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return this rank's index in its group over `axes`, the first axis major, and the size of the group."""
        index, size = 0, 1
        for axis in axes:
            index = index * self.sizes[axis] + self.at[axis]
            size *= self.sizes[axis]
        return index, size

    def indices(self, buffer: Buffer, dim: int) -> torch.Tensor:
        """Return the indices along a dim of this rank's piece, in its order; uneven pieces are those of torch.chunk."""
        blocks = torch.arange(buffer.shape[dim]).reshape(1, -1)
        for item in buffer.dims[dim]:
            if isinstance(item, int):
                blocks = blocks.reshape(blocks.shape[0] * item, -1)
            else:
                width = -(-blocks.shape[1] // self.sizes[item])
                blocks = blocks[:, self.at[item] * width : (self.at[item] + 1) * width]
        return blocks.reshape(-1)

    def size(self, buffer: Buffer, dim: int) -> int:
        """Return the number of elements along a dim of this rank's piece."""
        return _size(buffer, dim, self.at, self.sizes)

    def shape(self, buffer: Buffer) -> tuple[int, ...]:
        """Return the shape of this rank's piece: `buffer.local`, which is that of the largest piece, or a
        smaller one.
        """
        return tuple(self.size(buffer, dim) for dim in range(len(buffer.shape)))

    def member_sizes(self, buffer: Buffer, dim: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the number of elements along a dim of each rank of this rank's group over `axes`, in the order of the
        axes.
        """
        places = product(*(range(self.sizes[axis]) for axis in axes))
        return tuple(_size(buffer, dim, {**self.at, **dict(zip(axes, at, strict=True))}, self.sizes) for at in places)

    def piece(self, whole: torch.Tensor, buffer: Buffer) -> torch.Tensor:
        """Return this rank's piece of a whole tensor; a pending sum is whole at coordinate 0 and zero elsewhere."""
        for dim, spec in enumerate(buffer.dims):
            if spec:
                whole = whole.index_select(dim, self.indices(buffer, dim).to(whole.device))
        if any(self.at[axis] for axis in buffer.pending):
            return torch.zeros_like(whole)
        return whole.clone()


def _size(buffer: Buffer, dim: int, at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    blocks, size = 1, buffer.shape[dim]
    for item in buffer.dims[dim]:
        if isinstance(item, int):
            blocks, size = blocks * item, size // item
        else:
            width = -(-size // sizes[item])
            size = max(0, min(width, size - at[item] * width))
    return blocks * size


@dataclass(frozen=True, slots=True)
class Context:
    """What a kernel may use besides its operands: the buffer it writes, the buffers it reads, and the rank's place."""

    out: Buffer
    reads: Mapping[str, Buffer]
    place: Place

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece that the kernel computes."""
        return self.place.shape(self.out)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.out.dtype]


def in_order(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose dims have this order in memory, outermost first; a copy if they do not have it yet."""
    return x.permute(*order).contiguous().permute([list(order).index(dim) for dim in range(x.ndim)])


def tokens_of(placements: Sequence[Placement]) -> list[str]:
    """Return DTensor placements as tokens: `R`, `S(0)`, `SS(0,2)`, `P(sum)`. Raises BadInput for any other kind."""
    return [_token(one) for one in placements]


def _token(one: Placement) -> str:
    if isinstance(one, Replicate):
        return "R"
    if isinstance(one, Partial):
        return f"P({one.reduce_op})"
    factor = getattr(one, "split_factor", 1)
    if hasattr(one, "dim"):
        return f"S({one.dim})" if factor == 1 else f"SS({one.dim},{factor})"
    raise BadInput(f"{one} is no placement that is known", remedy="Replicate, Shard, _StridedShard or Partial")


def placements_of(buffer: Buffer, program: RunnableProgram) -> tuple[Placement, ...]:
    """Return the layout of a buffer as DTensor placements, one a mesh axis."""
    sizes = dict(zip(program.mesh_names, program.mesh_shape, strict=True))
    found: dict[str, Placement] = {name: Replicate() for name in program.mesh_names}
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
