"""Where a rank is in the mesh, and which elements of a tensor its piece has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from simulator.sharded.program import Buffer, RunnableProgram, coordinates

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
        """Return this rank's index in a group over `axes`, major first, and the size of the group."""
        index, size = 0, 1
        for axis in axes:
            index = index * self.sizes[axis] + self.at[axis]
            size *= self.sizes[axis]
        return index, size

    def indices(self, buffer: Buffer, dim: int) -> torch.Tensor:
        """Return which elements of a dim this rank's piece has, in its order."""
        blocks = torch.arange(buffer.shape[dim]).reshape(1, -1)
        for item in buffer.dims[dim]:
            if isinstance(item, int):
                blocks = blocks.reshape(blocks.shape[0] * item, -1)
            else:
                pieces = blocks.reshape(blocks.shape[0], self.sizes[item], -1)
                blocks = pieces[:, self.at[item]]
        return blocks.reshape(-1)

    def piece(self, whole: torch.Tensor, buffer: Buffer) -> torch.Tensor:
        """Return this rank's piece of a whole tensor; what is pending is with the ranks at coordinate 0."""
        for dim, spec in enumerate(buffer.dims):
            if spec:
                whole = whole.index_select(dim, self.indices(buffer, dim).to(whole.device))
        if any(self.at[axis] for axis in buffer.pending):
            return torch.zeros_like(whole)
        return whole.clone()


@dataclass(frozen=True, slots=True)
class Context:
    """What a kernel may know besides its operands: the buffer it writes, those it reads, and the rank's place."""

    out: Buffer
    reads: Mapping[str, Buffer]
    place: Place

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.out.dtype]
